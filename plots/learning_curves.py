"""Draw training loss, validation loss and validation accuracy over the steps, a curve for each run.

example:
  python plots/learning_curves.py runs/all/spectrain runs/all/vanilla --output curves.png
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from matplotlib.figure import Figure

from plots.style import COLOURS, STYLES, save

PANELS = {"train_loss": "training loss", "val_loss": "validation loss", "val_accuracy": "validation accuracy"}


def draw(runs: Sequence[Path], output: Path) -> Path:
    """One figure of three panels from the runs' ``history.jsonl`` and ``config.json``."""
    figure = Figure(figsize=(13, 4.2), layout="constrained")
    panels = dict(zip(PANELS, figure.subplots(1, 3), strict=True))
    for run in runs:
        config = json.loads((run / "config.json").read_text(encoding="utf-8"))
        rows = [json.loads(line) for line in (run / "history.jsonl").read_text(encoding="utf-8").splitlines()]
        scheme = config["scheme"]
        for key, panel in panels.items():
            finite = [(row["step"], row[key]) for row in rows if math.isfinite(row[key])]
            steps, values = zip(*finite, strict=True) if finite else ((), ())
            panel.plot(steps, values, color=COLOURS.get(scheme), linestyle=STYLES.get(scheme, "-"), label=scheme)
    for key, panel in panels.items():
        panel.set(xlabel="step", title=PANELS[key])
        panel.grid(alpha=0.3)
    _limit_losses([panels["train_loss"], panels["val_loss"]])
    figure.suptitle(
        f"{config['model']} on {config['dataset']}, {config['stages']} stages, batch {config['batch_size']}"
    )
    handles, labels = panels["val_accuracy"].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper")
    return save(figure, output)


def _limit_losses(panels: Sequence) -> None:
    """A diverged scheme must not flatten the others: the highest fifth of the curves may leave the panel."""
    for panel in panels:
        highest = sorted(max(line.get_ydata()) for line in panel.lines if len(line.get_ydata()))
        if highest:
            panel.set_ylim(0, 1.1 * highest[int(0.8 * len(highest))])


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="run directories, each with history.jsonl")
    parser.add_argument("--output", type=Path, default=Path("learning_curves.png"), help="(default: %(default)s)")
    options = parser.parse_args()
    print(draw(options.runs, options.output))


if __name__ == "__main__":
    main()
