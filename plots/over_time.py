"""Draw validation accuracy over seconds, a line for each scheme.

example:
  python plots/over_time.py runs/vgg16 --output over_time.png
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from matplotlib.figure import Figure

from plots import command, runs
from plots.staleness import LOOKS, OTHER
from plots.style import COLOURS, STYLES, save, smoothed

NEIGHBOURS = 4  # of a point, that it is averaged with


def draw(folder: Path, output: Path) -> Path:
    """One figure from the ``over_time.json`` of ``experiments/over_time.py``. Raises ValueError for a damaged one."""
    content = runs.load(folder / "over_time.json")
    figure = Figure(figsize=(8.0, 5.5), layout="constrained")
    panel = figure.subplots()
    for way in content["ways"]:
        seconds = [step * way["step_s"] for step in way["steps"]]
        colour, marker, dashes = look(way["label"])
        values = smoothed(way["accuracy"], NEIGHBOURS)
        panel.plot(seconds, values, color=colour, linestyle=dashes, label=way["label"])
        panel.plot(seconds[-1:], values[-1:], marker or ".", color=colour)
    panel.set(xscale="log", xlabel="simulated seconds", ylabel="validation accuracy")
    panel.grid(alpha=0.3, which="both")
    panel.set_title(
        f"{content['title']}\nmean of {content['seeds']} seeds; a line ends with its run", fontsize="medium"
    )
    figure.legend(loc="outside lower center", ncols=4)
    return save(figure, output)


def look(label: str) -> tuple[str, str, str]:
    """Colour, marker and dashes of a scheme: those of the study of staleness, where it has them."""
    name, _, pieces = label.partition("/")
    if label in LOOKS or name not in COLOURS:
        return LOOKS.get(label, OTHER)
    near = next((each for each in LOOKS if label.startswith(f"{each}/")), None)
    if near:
        return LOOKS[near]
    return COLOURS[name], "s" if pieces else "", STYLES.get(name, "-")


if __name__ == "__main__":
    command.of_folder(__doc__, draw, "experiments/over_time.py", "over_time.png")
