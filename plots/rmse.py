"""Draw the errors of stale and of predicted weights over training, a panel for each s.

example:
  python plots/rmse.py runs/rmse --output rmse.png
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from plots import command
from plots.style import save

WINDOW = 20  # steps of the moving average
COLUMNS = 4


class Curve(NamedTuple):
    """How one of the errors is drawn. Colours: Okabe and Ito's palette."""

    label: str
    colour: str
    style: str
    width: float


CURVES = {
    "stale": Curve("stale", "#0072B2", "-", 2.2),
    "predicted": Curve("predicted, s times the last update", "#D55E00", "-", 2.2),
    "best": Curve("best c times the last update (known afterwards)", "#000000", "--", 0.9),
}


def draw(run: Path, output: Path) -> Path:
    """One figure from a run's ``config.json`` and ``history.jsonl``."""
    config = json.loads((run / "config.json").read_text(encoding="utf-8"))
    rows = [json.loads(line) for line in (run / "history.jsonl").read_text(encoding="utf-8").splitlines()]
    horizons = config["horizons"]
    columns = min(COLUMNS, len(horizons))
    height = math.ceil(len(horizons) / columns)
    figure = Figure(figsize=(max(7.0, 3.6 * columns + 0.6), 3.0 * height + 1.0), layout="constrained")
    panels = figure.subplots(height, columns, sharex=True, sharey=True, squeeze=False).ravel()
    for panel, horizon in zip(panels, horizons, strict=False):
        _fill(panel, [row for row in rows if row["horizon"] == horizon])
        panel.set(title=f"s = {horizon}", yscale="log")
        panel.grid(alpha=0.3)
    for panel in panels[len(horizons) :]:
        panel.set_axis_off()
    for n, panel in enumerate(panels[: len(horizons)]):
        below = n + columns < len(horizons)
        panel.tick_params(labelbottom=not below)
        panel.set(xlabel="" if below else "step", ylabel="" if n % columns else "RMSE")
    figure.suptitle(
        f"{config['model']} on {config['dataset']}, {config['stages']} stages of {config['scheme']}, "
        f"{config['optimizer']}, learning rate {config['learning_rate']:g}",
        fontsize="medium",
    )
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3 if columns > 2 else 1)
    return save(figure, output)


def _fill(panel: Axes, rows: Sequence[dict]) -> None:
    """Every step's value faintly, and the moving average over it."""
    for key, curve in CURVES.items():
        kept = [(row["step"], row[key]) for row in rows if math.isfinite(row[key]) and row[key] > 0]
        steps, values = np.array(kept).T if kept else np.empty((2, 0))
        if key != "best":
            panel.plot(steps, values, color=curve.colour, alpha=0.25, linewidth=0.8)
        steps, values = smoothed(steps, values)
        panel.plot(steps, values, curve.style, color=curve.colour, linewidth=curve.width, label=curve.label)


def smoothed(steps: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The means of ``WINDOW`` values in a row, each at the middle of its steps; few values stay as they are."""
    if len(values) < 2 * WINDOW:
        return steps, values
    window = np.full(WINDOW, 1 / WINDOW)
    return np.convolve(steps, window, "valid"), np.convolve(values, window, "valid")


if __name__ == "__main__":
    sys.exit(command.of_folder(__doc__, draw, "experiments/rmse.py", "rmse.png"))
