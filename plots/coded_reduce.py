"""Draw how many times as fast CodedReduce is as three other ways, and losses over seconds.

example:
  python plots/coded_reduce.py runs/coded_reduce
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pipetrain.pictures.figure import BLACK, BLUE, GREY, ORANGE, VERMILION
from plots import command
from plots.style import NARROW, save

Row = dict[str, str]
WAYS = {
    "uncoded master": (GREY, "x"),
    "ring": (ORANGE, "^"),
    "gradient coding": (BLUE, "s"),
    "coded reduce": (VERMILION, "o"),
}
DASHES = {"exponential": "--", "shifted": "-"}
KIND, ROW_US = "logistic", 10.0  # the regression whose loss is drawn, over seconds with rows of so long, if there are


def draw(path: Path, output: Path) -> Path:
    """One figure from what ``experiments/coded_reduce.py`` wrote: gains above, losses below, a column for each tree."""
    rows, learned = (_rows(each) for each in (path, path.with_name("coded_regression.csv")))
    if not rows or not learned:
        raise ValueError(f"There is nothing to draw. Received: {str(path)!r} without rows. Try running it again.")
    trees = list(dict.fromkeys(each["tree"] for each in rows))
    figure = Figure(figsize=(0.85 * NARROW * len(trees), 6.4), layout="constrained")
    panels = figure.subplots(2, len(trees), squeeze=False)
    for (above, below), tree in zip(panels.T, trees, strict=True):
        mine = [each for each in rows if each["tree"] == tree]
        _gains(above, mine)
        above.set_title(f"{mine[0]['workers']} workers, tree {tree}", loc="left")
        _losses(below, mine, [each for each in learned if each["tree"] == tree and each["kind"] == KIND])
    panels[0][0].set_ylabel("gain of coded reduce")
    panels[1][0].set_ylabel(f"loss of {KIND} regression")
    handles = {
        label: bar
        for each in panels.flat
        for bar, label in zip(*each.get_legend_handles_labels(), strict=True)
        if not label.startswith("over")
    }
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=2, frameon=False)
    return save(figure, output)


def _rows(path: Path) -> list[Row]:
    with path.open(encoding="utf-8", newline="") as file:
        return [*csv.DictReader(file)]


def _steps(rows: list[Row], times: str, way: str) -> dict[float, float]:
    """The least milliseconds of a step for each number of microseconds of a row."""
    found: dict[float, float] = {}
    for each in rows:
        if (each["times"], each["way"]) == (times, way):
            row_us, step_ms = float(each["row_us"]), float(each["step_ms"])
            found[row_us] = min(step_ms, found.get(row_us, step_ms))
    return found


def _gains(panel: Axes, rows: list[Row]) -> None:
    for times, dashes in DASHES.items():
        ours = _steps(rows, times, "coded reduce")
        for way, (colour, marker) in WAYS.items():
            if way != "coded reduce" and ours:
                gains = {row_us: step / ours[row_us] for row_us, step in _steps(rows, times, way).items()}
                panel.plot(
                    [*gains], [*gains.values()], color=colour, marker=marker, linestyle=dashes, label=f"over {way}"
                )
        panel.plot([], [], color=BLACK, linestyle=dashes, label=f"{times} seconds")
    panel.axhline(1, color=GREY, linewidth=0.8)
    panel.set(xscale="log", yscale="log", xlabel="microseconds of computing a row")
    panel.set_yticks([0.5, 1, 2, 4, 8], ["0.5x", "1x", "2x", "4x", "8x"])
    row_us = sorted({float(each["row_us"]) for each in rows})
    panel.set_xticks(row_us, [f"{each:g}" for each in row_us])
    panel.minorticks_off()
    panel.grid(alpha=0.3)


def _losses(panel: Axes, rows: list[Row], learned: list[Row]) -> None:
    known = sorted({float(each["row_us"]) for each in rows})
    row_us = ROW_US if ROW_US in known else known[0]
    for way, (colour, marker) in WAYS.items():
        step_ms = _steps(rows, "shifted", way).get(row_us)
        if step_ms is not None:
            seconds = [int(each["step"]) * step_ms / 1e3 for each in learned]
            losses = [float(each["loss"]) for each in learned]
            panel.plot(seconds, losses, color=colour, marker=marker, markevery=6, label=way)
    panel.set(xlabel=f"seconds, {row_us:g} us a row, shifted", ylim=(0, None))
    panel.grid(alpha=0.3)


if __name__ == "__main__":
    sys.exit(command.of_folder(__doc__, draw, "experiments/coded_reduce.py", "coded_reduce.png", "coded_reduce.csv"))
