"""Draw validation accuracy over simulated seconds, a panel for each bandwidth, a line for each way to send less.

example:
  python plots/slow_networks.py runs/slow_networks --output slow_networks.png
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from plots import command, runs
from plots.style import BLACK, save, smoothed

NEIGHBOURS = 4  # of a point, that it is averaged with
MANY = 1000  # times as long as the shortest: then fewer numbers are at the axis
SINGLE, EXACT = "single", "all-reduce"


def draw(folder: Path, output: Path) -> Path:
    """One figure from the ``slow_networks.json`` of ``experiments/slow_networks.py``. ValueError for a damaged one."""
    content = runs.load(folder / "slow_networks.json")
    rates = content["rates_mbit"]
    figure = Figure(figsize=(8.0, 1.5 + 3.0 * -(-len(rates) // 2)), layout="constrained")
    panels = figure.subplots(-(-len(rates) // 2), min(2, len(rates)), squeeze=False, sharey=True).ravel()
    colours = matplotlib.colormaps["tab10"]
    for n, (panel, rate_mbit) in enumerate(zip(panels, rates, strict=False)):
        for line, way in enumerate(content["ways"]):
            seconds = [step * way["step_s"][n] for step in way["steps"]]
            exact = way["policy"] in (SINGLE, EXACT)
            panel.plot(
                seconds,
                smoothed(way["accuracies"], min(NEIGHBOURS, len(seconds) // 5)),
                color=BLACK if exact else colours(line % 10),
                linestyle="--" if way["policy"] == SINGLE else "-",
                label=way["policy"].removeprefix(f"{EXACT}/"),
            )
        panel.set(xscale="log", xlabel="simulated seconds", title=rate(rate_mbit))
        first, last = panel.get_xlim()
        panel.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if last < MANY * first else (1.0, 3.0)))
        panel.xaxis.set_major_formatter("{x:g}")
        panel.xaxis.set_minor_formatter(NullFormatter())
        panel.grid(alpha=0.3)
    for panel in panels[:: min(2, len(rates))]:
        panel.set_ylabel("validation accuracy")
    for panel in panels[len(rates) :]:
        panel.set_visible(False)
    figure.suptitle(f"{content['title']}; a line ends with its run", fontsize="medium")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    return save(figure, output)


def rate(mbit: float) -> str:
    """A bandwidth for people."""
    return f"{mbit / 1000:g} Gb/s" if mbit >= 1000 else f"{mbit:g} Mb/s"


if __name__ == "__main__":
    sys.exit(command.of_folder(__doc__, draw, "experiments/slow_networks.py", "slow_networks.png"))
