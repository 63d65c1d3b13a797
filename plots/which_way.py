"""Draw which way to train is predicted to be the fastest: a panel for each cluster, a pair of bars a network.

example:
  python plots/which_way.py runs/which_way --output which-way.png
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from plots import command
from plots.style import COLOURS, colour_of, save

NAME = "which_way.csv"
SIDES = {"taken": (-0.2, 1.0), "taken with predicted weights": (0.2, 0.55)}  # a bar's place, and how opaque it is
COLUMNS = 3


def draw(path: Path, output: Path) -> Path:
    """One figure from what ``experiments/which_way.py`` wrote: gains over one device, on a logarithmic axis."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = [*csv.DictReader(file)]
    clusters = [*dict.fromkeys((row["GPUs"], row["Gb/s"]) for row in rows)]
    networks = [*dict.fromkeys(row["network"] for row in rows)][::-1]
    across = min(COLUMNS, len(clusters))
    down = -(-len(clusters) // across)
    figure = Figure(figsize=(1.2 + 4.0 * across, 0.9 + down * (0.9 + 0.5 * len(networks))), layout="constrained")
    panels = figure.subplots(down, across, sharex=True, sharey=True, squeeze=False).ravel()
    most = max(gain for row in rows for side in SIDES for _, gain in [way_of(row[side])])
    for panel, (devices, rate) in zip(panels, sorted(clusters, key=_size), strict=False):
        _bars(panel, [row for row in rows if (row["GPUs"], row["Gb/s"]) == (devices, rate)], networks)
        panel.set_title(f"{devices} GPUs" + (f", {rate} Gb/s between hosts" if rate else " of one host"), loc="left")
        panel.set(xscale="log", xlim=(0.8, 12 * most), xlabel="times as fast as one device")
        panel.set_xticks([1, 3, 10, 30, 100], ["1", "3", "10", "30", "100"])
        panel.set_yticks(range(len(networks)), networks)
        panel.spines[["top", "right"]].set_visible(False)
        panel.tick_params(labelbottom=True)
    for panel in panels[len(clusters) :]:
        panel.set_axis_off()
    figure.suptitle(
        "What is predicted to be the fastest; pale: if predicted weights are allowed", x=0.01, ha="left", fontsize=12
    )
    return save(figure, output)


def _size(cluster: tuple[str, str]) -> tuple[int, int]:
    devices, rate = cluster
    return int(devices), int(rate or 0)


def way_of(told: str) -> tuple[str, float]:
    """The scheme and the gain of a cell such as ``1f1b, replicas 2-2, M=4, 3.8x``."""
    return told.partition(",")[0], float(told.rpartition(", ")[2].removesuffix("x"))


def _bars(panel: Axes, rows: list[dict[str, str]], networks: list[str]) -> None:
    for row in rows:
        sides = SIDES if len({row[side] for side in SIDES}) > 1 else {"taken": (0.0, 1.0)}
        for side, (shift, alpha) in sides.items():
            scheme, gain = way_of(row[side])
            place = networks.index(row["network"]) - shift
            fill = colour_of(scheme) if scheme in COLOURS else COLOURS["1f1b"]
            panel.barh(place, gain, 0.38, color=fill, alpha=alpha)
            panel.annotate(
                f"{scheme} {gain:.1f}x", (gain, place), (3, 0), textcoords="offset points", va="center", fontsize=8
            )


if __name__ == "__main__":
    sys.exit(command.of_folder(__doc__, draw, "experiments/which_way.py", "which_way.png", NAME))
