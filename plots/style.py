"""What all figures share: colours that colour-blind readers can tell apart, moving averages, one way to save."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pipetrain.pictures import figure as pictures
from pipetrain.pictures.figure import BLACK, BLUE, DPI, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION

# One colour per scheme, the same in every figure.
COLOURS = {
    "single": BLACK,
    "data-parallel": SKY,
    "vanilla": ORANGE,
    "weight-stashing": PURPLE,
    "vertical-sync": "#A6761D",
    "spectrain": VERMILION,
    "spike-compensation": "#7B3294",
    "2bw": "#5AAE61",
    "gpipe": GREEN,
    "1f1b": BLUE,
    "all-reduce": "#17BECF",
    "parameter-server": "#8C6D31",
    "grid": "#393B79",
}
STYLES: dict[str, Any] = {
    "single": "--",
    "data-parallel": "--",
    "vertical-sync": (0, (3, 1, 1, 1, 1, 1)),
    "spike-compensation": (0, (5, 1)),
    "2bw": (0, (4, 1, 1, 1)),
    "gpipe": ":",
    "1f1b": "-.",
    "all-reduce": (0, (6, 2)),
    "parameter-server": (0, (6, 2, 1, 2)),
    "grid": (0, (2, 2)),
}
# Lines of one scheme that differ in their microbatches, by the number of these: from light to dark.
TARGETS = {1: "#9E9AC8", 2: "#756BB1", 4: "#54278F", 8: "#2D004B"}
TARGET = "spectrain-target-M"
OTHER = GREY
NEIGHBOURS = 20  # of a point, that it is averaged with
NARROW = 4.8  # inches: as wide as a figure can be whose letters are to be read on a phone
ROW = 0.3  # inches of height of a bar


def colour_of(name: str) -> str:
    """Of a scheme, or of a variant of it: ``spectrain-target-M2``."""
    count = name.removeprefix(TARGET)
    if count != name and count.isdigit() and int(count) in TARGETS:
        return TARGETS[int(count)]
    return COLOURS.get(scheme_of(name), OTHER)


def dashes_of(name: str) -> Any:
    """Of a line: a scheme's own; of a variant, as many dots as it has microbatches between dashes."""
    scheme = scheme_of(name)
    if name == scheme:
        return STYLES.get(name, "-")
    pieces = name.rpartition("-M")[2]
    return (0, (5, 1, *[1, 1] * min(int(pieces) if pieces.isdigit() else 0, 8)))


def scheme_of(name: str) -> str:
    """The scheme of which it is a variant, or which it is."""
    return next((each for each in sorted(COLOURS, key=len)[::-1] if name == each or name.startswith(f"{each}-")), name)


def smoothed(values: Sequence[float], neighbours: int = NEIGHBOURS) -> list[float]:
    """At every point the mean of it and its neighbours, half of them on either side, as far as there are so many.

    At the steep start as few after a point as before it.
    """
    half = neighbours // 2
    return [fmean(values[max(0, n - half) : n + min(half, n) + 1]) for n in range(len(values))]


def bars_for(rows: Sequence[int], extra: float) -> tuple[Figure, list[Axes]]:
    """A narrow figure of panels one below the other, each with room for so many horizontal bars."""
    heights = [ROW * each + 0.7 for each in rows]
    figure = Figure(figsize=(NARROW, sum(heights) + extra), layout="constrained")
    panels = figure.subplots(len(rows), 1, squeeze=False, height_ratios=heights)[:, 0]
    for panel in panels:
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="x", alpha=0.3)
        panel.set_axisbelow(True)
        panel.tick_params(labelsize=9)
    return figure, list(panels)


def name_rows(panel: Axes, names: Sequence[str], title: str) -> None:
    """Name the bars of a panel, the first of them on top."""
    pictures.name_rows(panel, names)
    panel.set_title(title, fontsize=9, loc="left")


def save(figure: Figure, path: Path) -> Path:
    """Write the figure as PNG, and as SVG beside it."""
    figure.savefig(path, dpi=DPI)
    figure.savefig(path.with_suffix(".svg"))
    return path
