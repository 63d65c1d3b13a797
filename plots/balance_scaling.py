"""Draw how networks scale by balance equations: how much of as many times the speed as nodes is left.

example:
  python plots/balance_scaling.py runs/balance_scaling
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from matplotlib.figure import Figure

from experiments.balance_scaling import PAPER
from pipetrain.pictures.figure import BLACK, BLUE, GREEN, GREY, ORANGE, VERMILION
from plots import command
from plots.style import save

LOOKS = {
    "alexnet": (BLUE, "o"),
    "vgg_a": (VERMILION, "s"),
    "overfeat_fast": (GREEN, "D"),
    "cd_dnn": (ORANGE, "v"),
}


def draw(path: Path, output: Path) -> Path:
    """One figure from what ``experiments/balance_scaling.py`` wrote; stars are the source's numbers."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = [*csv.DictReader(file)]
    if not rows:
        raise ValueError(f"There is nothing to draw. Received: {str(path)!r} without rows. Try running it again.")
    figure = Figure(figsize=(5.6, 4.8), layout="constrained")
    axes = figure.subplots()
    axes.axhline(100, linestyle=":", color=GREY, label="as many times as nodes")
    axes.plot([], [], "*", color=GREY, markeredgecolor=BLACK, markersize=14, label="published")
    for key in dict.fromkeys((each["network"], each["rows"], each["system"]) for each in rows):
        name, minibatch, system = key[0], int(key[1]), float(key[2])
        mine = [each for each in rows if (each["network"], each["rows"], each["system"]) == key]
        some = {int(each["nodes"]): float(each["step_s"]) for each in mine}
        colour, marker = LOOKS.get(name, (BLACK, "^"))
        parts = [100 * some[1] / each / nodes for nodes, each in some.items()]
        axes.plot([*some], parts, color=colour, marker=marker, label=f"{name}, {minibatch} rows")
        for (network, nodes, *which), value in PAPER.items():
            if (network, *which) == (name, minibatch, system) and nodes in some:
                star = {"color": colour, "markeredgecolor": BLACK, "markersize": 14, "zorder": 5}
                axes.plot(nodes, 100 * value / nodes, "*", **star)
    axes.set_xscale("log", base=2)
    ticks = sorted({int(each["nodes"]) for each in rows})
    axes.set_xticks(ticks, [str(each) for each in ticks])
    axes.set(xlabel="nodes", ylabel="speed-up, % of the nodes", ylim=(0, 110))
    axes.set_title(f"{float(rows[0]['system']):g} FLOP for each byte", loc="left")
    axes.grid(alpha=0.3)
    figure.legend(frameon=False, loc="outside lower center", ncols=2)
    return save(figure, output)


if __name__ == "__main__":
    sys.exit(
        command.of_folder(__doc__, draw, "experiments/balance_scaling.py", "balance_scaling.png", "balance_scaling.csv")
    )
