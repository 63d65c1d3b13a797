"""Draw validation loss over minibatches, a panel for each optimizer and rate, a line for each scheme.

example:
  python plots/language_quality.py runs/language_quality --output language_quality.png
"""

from __future__ import annotations

import csv
import sys
from collections import defaultdict
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).parents[1]))

from matplotlib.figure import Figure

from plots import command
from plots.over_time import look
from plots.style import save

TABLE = "language_quality.csv"


def draw(study: Path, output: Path) -> Path:
    """One figure from the table of ``experiments/language_quality.py``: means over the seeds."""
    with (study / TABLE).open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    panels: dict[str, dict[str, dict[int, list[float]]]] = {}
    for row in rows:
        lines = panels.setdefault(f"{row['optimizer']}, {row['learning_rate']}", {})
        at = lines.setdefault(row["scheme"], defaultdict(list))
        at[int(row["minibatch"])].append(float(row["validation_loss"]))
    figure = Figure(figsize=(4.5 * max(1, len(panels)), 4.5), layout="constrained")
    axes = figure.subplots(1, max(1, len(panels)), squeeze=False, sharey=True)[0]
    for panel, (title, lines) in zip(axes, panels.items(), strict=False):
        for scheme, found in lines.items():
            colour, marker, dashes = look(scheme)
            means = [fmean(found[step]) for step in sorted(found)]
            panel.plot(sorted(found), means, color=colour, marker=marker or ".", linestyle=dashes, label=scheme)
        panel.set(xlabel="minibatches", title=title)
        panel.grid(alpha=0.3)
    axes[0].set_ylabel("validation loss")
    shown = {label: line for panel in axes for line, label in zip(*panel.get_legend_handles_labels(), strict=True)}
    figure.legend([*shown.values()], [*shown], loc="outside lower center", ncols=4)
    return save(figure, output)


if __name__ == "__main__":
    sys.exit(command.of_folder(__doc__, draw, "experiments/language_quality.py", "language_quality.png"))
