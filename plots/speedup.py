"""Draw what the paper's platform would give: throughput normalised to one device, and where devices' time goes.

example:
  python plots/speedup.py runs/speedup
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from plots import command
from plots.style import COLOURS, save

# Related ways share a colour and differ in hatching.
LOOKS = {
    "model-parallel": ("#999999", ""),
    "data-parallel (server)": (COLOURS["data-parallel"], "///"),
    "data-parallel (ring)": (COLOURS["data-parallel"], ""),
    "data-parallel (overlapped)": (COLOURS["data-parallel"], "..."),
    "pipeline": (COLOURS["vanilla"], ""),
    "pipeline (hybrid)": (COLOURS["vanilla"], "///"),
    "spectrain": (COLOURS["spectrain"], ""),
    "spectrain (hybrid)": (COLOURS["spectrain"], "///"),
}
# As in breakdown.py.
PARTS = {
    "computing": ("compute_s", "#0072B2", ""),
    "waiting for transfers": ("transfer_s", "#D55E00", "xx"),
    "waiting for other devices": ("imbalance_s", "#F0E442", ".."),
    "filling and draining": ("fill_s", "#BBBBBB", ""),
}
SHORT = {
    "data-parallel (server)": "data, server",
    "data-parallel (ring)": "data, ring",
    "data-parallel (overlapped)": "data, overlapped",
    "model-parallel": "model",
    "spectrain (hybrid)": "spectrain, hybrid",
}


def draw(path: Path, output: Path) -> list[Path]:
    """Two figures from what ``experiments/speedup.py`` wrote: ``throughput.png`` and ``breakdown.png``."""
    data = json.loads(path.read_text(encoding="utf-8"))
    return [
        save(throughput(data), output / "throughput.png"),
        save(breakdown(data), output / "breakdown.png"),
    ]


def throughput(data: dict) -> Figure:
    """After the paper's Figure 9: bars for every network, a panel for each number of devices."""
    counts, names = _axes_of(data)
    figure = Figure(figsize=(2.2 * len(names) + 3, 3.3 * len(counts) + 1), layout="constrained")
    panels = figure.subplots(len(counts), 1, squeeze=False)[:, 0]
    for panel, devices in zip(panels, counts, strict=True):
        by = {(each["model"], each["way"]): each for each in data["outcomes"] if each["devices"] == devices}
        _bars(panel, names, by)
        panel.set_title(f"{devices} {data['device']['name']}, minibatches of {data['batch_size']}", loc="left")
        panel.set_ylabel("throughput, one device = 1")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    return figure


def _bars(panel: Axes, names: Sequence[str], by: dict) -> None:
    width = 0.86 / len(LOOKS)
    for place, (way, (colour, hatch)) in enumerate(LOOKS.items()):
        shift = (place - (len(LOOKS) - 1) / 2) * width
        heights = [by[name, way]["against_single"] for name in names]
        places = [n + shift for n in range(len(names))]
        panel.bar(places, heights, width * 0.92, color=colour, hatch=hatch, edgecolor="white", linewidth=0, label=way)
        for x, height in zip(places, heights, strict=True):
            text = f"{height:.1f}" if height >= 0.95 else f"{height:.2f}".lstrip("0")
            label = panel.annotate(text, (x, height), (0, 3), textcoords="offset points", ha="center", fontsize=7)
            label.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.3})
    panel.axhline(1.0, color=COLOURS["single"], linestyle="--", linewidth=1, zorder=0)
    panel.set_xticks(range(len(names)), names)
    panel.margins(y=0.1)
    panel.set_xlim(-0.5, len(names) - 0.5)


def breakdown(data: dict) -> Figure:
    """After the paper's Figure 10: an average device's time by what it goes to, a column for each number of devices."""
    counts, names = _axes_of(data)
    figure = Figure(figsize=(5.5 * len(counts) + 1.5, 1.35 * len(names) + 1.2), layout="constrained")
    panels = figure.subplots(1, len(counts), sharey=True, squeeze=False)[0]
    ways = [way for way in LOOKS if not way.startswith("pipeline")]  # spectrain's, and no time to predict
    rows = [(name, way) for name in names for way in ways]
    gap = len(ways) + 1
    heights = [n // len(ways) * gap + n % len(ways) for n in range(len(rows))]
    for panel, devices in zip(panels, counts, strict=True):
        by = {(each["model"], each["way"]): each for each in data["outcomes"] if each["devices"] == devices}
        _stacks(panel, heights, [by[row] for row in rows])
        panel.set(title=f"{devices} devices", xlabel="per cent of a device's time", xlim=(0, 100))
        panel.set_yticks(heights, [SHORT.get(way, way) for _, way in rows], fontsize="small")
    for n, name in enumerate(names):
        panels[0].annotate(
            name, (-0.32, n * gap + (gap - 2) / 2), xycoords=("axes fraction", "data"), rotation=90, va="center"
        )
    panels[0].invert_yaxis()
    panels[0].margins(y=0.01)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    return figure


def _stacks(panel: Axes, heights: Sequence[int], outcomes: Sequence[dict]) -> None:
    lefts = [0.0] * len(outcomes)
    totals = [sum(each[key] for key, *_ in PARTS.values()) for each in outcomes]
    for label, (key, colour, hatch) in PARTS.items():
        widths = [100 * each[key] / total for each, total in zip(outcomes, totals, strict=True)]
        panel.barh(heights, widths, 0.85, lefts, color=colour, hatch=hatch, edgecolor="white", linewidth=0, label=label)
        for height, left, width in zip(heights, lefts, widths, strict=True):
            if width >= 8:
                text = panel.annotate(f"{width:.0f}", (left + width / 2, height), ha="center", va="center", fontsize=7)
                text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.8})
        lefts = [left + width for left, width in zip(lefts, widths, strict=True)]


def _axes_of(data: dict) -> tuple[list[int], list[str]]:
    """The numbers of devices, and the networks."""
    return (
        list(dict.fromkeys(each["devices"] for each in data["outcomes"])),
        list(dict.fromkeys(each["model"] for each in data["outcomes"])),
    )


if __name__ == "__main__":
    sys.exit(command.of_folder(__doc__, draw, "experiments/speedup.py", "", "speedup.json"))
