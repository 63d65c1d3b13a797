"""Draw the tables of docs/benchmarks that the summary shows: two cores, two and three hosts, planned memory.

examples:
  python plots/benchmarks.py --output docs/benchmarks
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

sys.path.insert(0, str(Path(__file__).parents[1]))

from matplotlib.axes import Axes

from pipetrain.cli.arguments import Folded
from pipetrain.pictures.figure import (
    BLUE,
    GREY,
    LIGHT,
    ORANGE,
    VERMILION,
    Picture,
    height_of,
    name_rows,
    on_white,
    plain,
)
from plots.style import NARROW, save

PAGES = Path(__file__).parents[1] / "docs" / "benchmarks"
Sides: TypeAlias = "dict[str, tuple[list[float], str]]"  # the values of each, and its colour
BAR = 0.38  # of a row, where it has two bars


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Folded)
    parser.add_argument("--output", type=Path, default=Path(), help="the folder to write to (default: this one)")
    options = parser.parse_args()
    for name, figure in {"two-cores": two_cores(), "hosts": hosts(), "memory": memory()}.items():
        print(save(figure, options.output / f"{name}.png"))


def table(page: str, header: str) -> list[list[str]]:
    """The rows below the line that begins with ``header``, cell by cell."""
    text = (PAGES / page).read_text(encoding="utf-8")
    lines = text[text.index(header) :].partition("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def number(cell: str) -> float:
    """The first number of a cell: of ``1.22 (1.06 - 1.53)`` 1.22."""
    found = re.search(r"\d+\.?\d*", cell)
    if not found:
        raise ValueError(f"A cell has no number. Received: {cell!r}.")
    return float(found[0])


@on_white
def two_cores() -> Picture:
    """Samples/s of two cores over those of one, of exact ways and of predicted weights."""
    figure = Picture(NARROW, 8)
    upper, lower = figure.subplots(2, 1, height_ratios=(6, 10))
    rows = table("throughput.md", "| | Keras, 1 core | `1f1b` | `zb-h1`")
    names = [row[0].partition(",")[0] for row in rows]
    ours = [max(number(row[2]), number(row[4])) for row in rows]
    pipelines: Sides = {
        "pipetrain, best exact pipeline": (ours, BLUE),
        "PyTorch, best pipeline": ([number(row[7]) for row in rows], LIGHT),
    }
    _pairs(upper, names, pipelines, "Exact pipelines, against one core (Xeon)")
    rows = table("auto.md", "| network | one device, samples/s")
    sides: Sides = {
        "pipetrain, predicted weights": ([number(row[8]) for row in rows], ORANGE),
        "pipetrain, best exact way": ([max(map(number, row[3:8])) for row in rows], BLUE),
        "Keras, MirroredStrategy": ([number(row[2]) for row in rows], LIGHT),
    }
    names = [row[0].partition(",")[0].partition(" of ")[0] for row in rows]
    _pairs(lower, names, sides, "All ways, against one device (EPYC)")
    return figure


@on_white
def hosts() -> Picture:
    """A step of MultiWorkerMirroredStrategy over one of ``auto``, network by network."""
    rows = table("data_parallel.md", "| network | hosts | Mb/s | `all-reduce`: of the best")
    figure = Picture(NARROW, height_of(len(rows)))
    panel = figure.subplots()
    for at, row in enumerate(rows):
        for column, colour, marker in ((5, BLUE, "o"), (6, BLUE, "D"), (9, VERMILION, "o"), (10, VERMILION, "D")):
            panel.plot(
                number(row[column]),
                at,
                marker,
                color=colour,
                markersize=6,
                markerfacecolor=colour if marker == "o" else "none",
            )
    for name, colour, marker in (
        ("all-reduce, own packs", BLUE, "o"),
        ("all-reduce, 1 MiB", BLUE, "D"),
        ("parameter-server, own packs", VERMILION, "o"),
        ("parameter-server, 1 MiB", VERMILION, "D"),
    ):
        panel.plot([], [], marker, color=colour, markerfacecolor=colour if marker == "o" else "none", label=name)
    panel.axvline(1, color=GREY, linewidth=1)
    name_rows(panel, [f"{row[0]}, {row[1]} hosts, {row[2]}" + ("" if "limit" in row[2] else " Mb/s") for row in rows])
    plain(panel, "times as fast")
    _legend(panel, "Packs of the strategy")
    return figure


@on_white
def memory() -> Picture:
    """Planned and measured bytes of the fullest device, way by way."""
    rows = [row for row in table("memory.md", "| | planned | measured |") if row[0] != "`data-parallel`"]
    figure = Picture(NARROW, 0.75 * height_of(2 * len(rows)))
    panel = figure.subplots()
    sides = {"planned": ([number(row[1]) for row in rows], LIGHT), "measured": ([number(row[2]) for row in rows], BLUE)}
    _pairs(
        panel,
        [row[0].replace("`", "") for row in rows],
        sides,
        "The fullest device",
        "multiples of the model's weights",
    )
    return figure


def _legend(panel: Axes, title: str) -> None:
    """Above the panel, where it covers nothing."""
    panel.legend(fontsize=8, loc="lower left", bbox_to_anchor=(0, 1), title=title, alignment="left", frameon=False)


def _pairs(
    panel: Axes,
    names: Sequence[str],
    sides: Sides,
    title: str,
    axis: str = "times as fast",
) -> None:
    """Bars of each side below one another, a row for each name."""
    thick = 2 * BAR / len(sides)
    for place, (side, (values, colour)) in enumerate(sides.items()):
        at = [row + (place - (len(sides) - 1) / 2) * thick for row in range(len(names))]
        panel.barh(at, values, thick, color=colour, label=side)
    if axis == "times as fast":
        panel.axvline(1, color=GREY, linewidth=1)
    name_rows(panel, names)
    plain(panel, axis)
    _legend(panel, title)


if __name__ == "__main__":
    main()
