"""Draw training loss, validation loss and validation accuracy over the steps, a curve for each run.

Lightly what was measured, and boldly the mean of every point and the 20 about it (paper: Figures 5 and 11); a curve
of fewer than 40 points is drawn as it is.

example:
  python plots/learning_curves.py runs/all --output curves.png
  python plots/learning_curves.py runs/all/spectrain runs/all/vanilla --output curves.png
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from plots import command, runs
from plots.style import NARROW, NEIGHBOURS, colour_of, dashes_of, save, smoothed

PANELS = {"train_loss": "training loss", "val_loss": "validation loss", "val_accuracy": "validation accuracy"}
START = 20  # the first of as many parts of a curve is its start
FAILS = 2  # times the next higher loss: such a curve must not flatten the others


def draw(folders: Sequence[Path], output: Path, narrow: bool = False) -> Path:
    """One figure of three panels from the runs' ``history.jsonl`` and ``config.json``; ``narrow``: one below another.

    Raises ValueError if no run has a history.
    """
    found = [run for those in runs.find(folders) for run in those]
    drawn = [run for run in found if run.history()]
    if not drawn:
        raise ValueError(f"No run has a history. Received: {', '.join(map(str, folders))}. Try more --steps.")
    figure = Figure(figsize=(NARROW, 9.6) if narrow else (13, 4.2), layout="constrained")
    grid = figure.subplots(3, 1) if narrow else figure.subplots(1, 3)
    handles: dict[str, Any] = {}
    for panel, (key, name) in zip(grid, PANELS.items(), strict=True):
        for run in drawn:
            handles[run.scheme] = curve(panel, run.scheme, *run.values(key))
        panel.set(xlabel="step", title=name)
        panel.grid(alpha=0.3)
        limit(panel, key)
    figure.suptitle(drawn[0].title, fontsize="medium" if narrow else "large")
    place, columns = ("outside lower center", 2) if narrow else ("outside right upper", 1)
    figure.legend(handles.values(), handles, loc=place, ncols=columns, frameon=False)
    return save(figure, output)


def curve(panel: Axes, scheme: str, steps: Sequence[float], values: Sequence[float]) -> Any:
    """Draw what was measured and is a finite number lightly, and its moving average boldly over it."""
    finite = [(step, value) for step, value in zip(steps, values, strict=True) if math.isfinite(value)]
    steps, values = zip(*finite, strict=True) if finite else ((), ())
    colour = colour_of(scheme)
    means = smoothed(values) if len(values) >= 2 * NEIGHBOURS else values
    panel.plot(steps, values, color=colour, linewidth=0.7, alpha=0.35)
    return panel.plot(steps, means, color=colour, linewidth=2, linestyle=dashes_of(scheme))[0]


def limit(panel: Axes, key: str) -> None:
    """The steep start may leave the panel, and so may single peaks, and the loss of a scheme that fails."""
    values = [line.get_ydata()[len(line.get_ydata()) // START :] for line in panel.lines]
    light, bold = ([each for each in values[first::2] if len(each)] for first in (0, 1))
    if not bold:
        return
    if key == "val_accuracy":
        low, high = min(map(min, bold)), max(map(max, light))
    else:
        highest = sorted(map(max, bold))
        while len(highest) > 1 and highest[-1] > FAILS * highest[-2]:
            highest.pop()
        low, high = min(map(min, light)), highest[-1]
    margin = 0.1 * (high - low) or 0.1
    panel.set_ylim(max(0.0, low - margin), high + margin)


if __name__ == "__main__":
    sys.exit(command.main(__doc__, draw))
