"""Draw validation accuracy, or a language model's loss, over seconds, a line for each scheme.

example:
  python plots/over_time.py runs/vgg16 --output over_time.png
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from matplotlib.figure import Figure

from plots import command, runs
from plots.staleness import LOOKS
from plots.style import colour_of, dashes_of, save, smoothed

NEIGHBOURS = 4  # of a point, that it is averaged with: fewer where there are few points


def draw(folder: Path, output: Path) -> Path:
    """One figure from the ``over_time.json`` of ``experiments/over_time.py``. Raises ValueError for a damaged one."""
    content = runs.load(folder / "over_time.json")
    figure = Figure(figsize=(8.0, 5.5), layout="constrained")
    panel = figure.subplots()
    for way in content["ways"]:
        seconds = [step * way["step_s"] for step in way["steps"]]
        colour, marker, dashes = look(way["label"])
        values = smoothed(way["values"], min(NEIGHBOURS, len(seconds) // 10))
        panel.plot(seconds, values, color=colour, linestyle=dashes, label=way["label"])
        panel.plot(seconds[-1:], values[-1:], marker or ".", color=colour)
    panel.set(xscale="log", xlabel="simulated seconds", ylabel=f"validation {content['measure']}")
    panel.grid(alpha=0.3, which="both")
    panel.set_title(
        f"{content['title']}\nmean of {content['seeds']} seeds; a line ends with its run", fontsize="medium"
    )
    figure.legend(loc="outside lower center", ncols=4)
    return save(figure, output)


def look(label: str) -> tuple[str, str, Any]:
    """Colour, marker and dashes of a scheme: those of the study of staleness, where it has them."""
    near = max((each for each in LOOKS if f"{label}/".startswith(f"{each}/")), key=len, default="")
    if near == label or "/" in near:
        return LOOKS[near]
    variant = label.replace("/", "-").replace("=", "")  # as runs' folders are called
    return colour_of(variant), "", dashes_of(variant)


if __name__ == "__main__":
    sys.exit(command.of_folder(__doc__, draw, "experiments/over_time.py", "over_time.png"))
