"""Draw how grids of processes scale: speed-up over processes at the largest width, and over widths at the most.

example:
  python plots/grid_scaling.py runs/grid_scaling
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pipetrain.pictures.figure import BLACK, BLUE, ORANGE, VERMILION
from plots import command
from plots.style import save

LOOKS = {"batch": (BLUE, "o"), "model": (VERMILION, "s"), "integrated": (ORANGE, "^")}
DASHES = {"equation-8": "-", "pipetrain": "--"}
PUBLISHED = {"batch": 5.8, "model": 1.2}  # at 32 processes and 1,024 units


def draw(path: Path, output: Path) -> Path:
    """One figure of two panels from what ``experiments/grid_scaling.py`` wrote; stars are the source's numbers."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = [*csv.DictReader(file)]
    if not rows:
        raise ValueError(f"There is nothing to draw. Received: {str(path)!r} without rows. Try running it again.")
    most, widest = (max(int(each[key]) for each in rows) for key in ("processes", "width"))
    figure = Figure(figsize=(9, 4.4), layout="constrained")
    over_processes, over_widths = figure.subplots(1, 2)
    _lines(over_processes, rows, "processes", {"width": widest})
    _lines(over_widths, rows, "width", {"processes": most})
    over_processes.set(title=f"{widest} units a layer", xlabel="processes", ylabel="speed-up over one process")
    over_widths.set(title=f"{most} processes", xlabel="units a layer")
    for way, value in PUBLISHED.items():
        if (most, widest) == (32, 1024):
            for panel, x in ((over_processes, most), (over_widths, widest)):
                panel.plot(x, value, "*", color=LOOKS[way][0], markeredgecolor=BLACK, markersize=14, zorder=5)
    handles = dict(zip(*over_processes.get_legend_handles_labels()[::-1], strict=True))
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=3, frameon=False)
    return save(figure, output)


def _lines(panel: Axes, rows: list[dict[str, str]], over: str, fixed: dict[str, int]) -> None:
    mine = [each for each in rows if all(int(each[key]) == value for key, value in fixed.items())]
    for sending, dashes in DASHES.items():
        for way, (colour, marker) in LOOKS.items():
            some = [each for each in mine if (each["sending"], each["way"]) == (sending, way)]
            points = sorted((int(each[over]), float(each["speedup"])) for each in some)
            panel.plot(*zip(*points, strict=True) if points else ([], []), dashes, color=colour, marker=marker,
                       label=f"{way}, {sending}")  # fmt: skip
    panel.set_xscale("log", base=2)
    panel.set_yscale("log", base=2)
    ticks = sorted({int(each[over]) for each in mine})
    panel.set_xticks(ticks, [str(each) for each in ticks])
    panel.yaxis.set_major_formatter("{x:g}")
    panel.grid(alpha=0.3)


if __name__ == "__main__":
    sys.exit(command.of_folder(__doc__, draw, "experiments/grid_scaling.py", "grid_scaling.png", "grid_scaling.csv"))
