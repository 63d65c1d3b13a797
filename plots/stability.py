"""Draw the largest stable step over the number of stages, a line for each policy.

example:
  python plots/stability.py runs/stability --output stability.png
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from matplotlib.figure import Figure

from plots import command
from plots.staleness import LOOKS, OTHER
from plots.style import save


def draw(study: Path, output: Path) -> Path:
    """One figure from the ``summary.json`` of ``experiments/stability.py``."""
    summary = json.loads((study / "summary.json").read_text(encoding="utf-8"))
    figure = Figure(figsize=(8.0, 6.0), layout="constrained")
    panel = figure.subplots()
    for policy, steps in summary["steps"].items():
        colour, marker, dashes = LOOKS.get(policy, OTHER)
        panel.plot(summary["stages"], steps, color=colour, marker=marker, linestyle=dashes, label=policy)
    panel.set(xscale="log", yscale="log", xlabel="stages", ylabel="largest stable step: learning rate * curvature")
    panel.set_xticks(summary["stages"], [str(stages) for stages in summary["stages"]])
    panel.minorticks_off()
    panel.grid(alpha=0.3)
    panel.set_title(f"heavy ball, momentum {summary['momentum']:g}", fontsize="medium")
    figure.legend(loc="outside lower center", ncols=4)
    return save(figure, output)


if __name__ == "__main__":
    sys.exit(command.of_folder(__doc__, draw, "experiments/stability.py", "stability.png"))
