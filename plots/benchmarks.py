"""Draw figures of docs/ from the CSV files beside them: two cores, hosts, planned memory, Table 1's accuracy.

examples:
  python plots/benchmarks.py --output docs
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

sys.path.insert(0, str(Path(__file__).parents[1]))

from matplotlib.axes import Axes

from pipetrain.cli.arguments import Folded
from pipetrain.pictures.figure import (
    BLUE,
    GREY,
    LIGHT,
    ORANGE,
    VERMILION,
    Picture,
    height_of,
    name_rows,
    on_white,
    plain,
)
from plots.style import NARROW, colour_of, save

PAGES = Path(__file__).parents[1] / "docs"
Sides: TypeAlias = "dict[str, tuple[list[float], str]]"  # the values of each, and its colour
SIDES = {"planned": LIGHT, "measured": BLUE}
BAR = 0.38  # of a row, where it has two bars
MARKS, GROUP = "osDv^P", 0.8  # of a row, what its marks take


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Folded)
    parser.add_argument("--output", type=Path, default=Path(), help="the folder to write to (default: this one)")
    options = parser.parse_args()
    figures = {"benchmarks/two-cores": two_cores, "benchmarks/hosts": hosts, "benchmarks/memory": memory}
    for name, drawn in {**figures, "results/table1": accuracy}.items():
        path = options.output / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        print(save(drawn(), path))


def rows_of(name: str) -> list[dict[str, str]]:
    """The rows of a CSV file beside the pages."""
    with (PAGES / name).open(encoding="utf-8") as file:
        return [*csv.DictReader(file)]


@on_white
def two_cores() -> Picture:
    """Samples/s of two cores over those of one, of exact ways and of predicted weights."""
    figure = Picture(NARROW, 8)
    upper, lower = figure.subplots(2, 1, height_ratios=(6, 10))
    rows = rows_of("benchmarks/synchronous.csv")
    pipelines: Sides = {
        "pipetrain, best exact pipeline": ([max(float(row["1f1b"]), float(row["zb-h2"])) for row in rows], BLUE),
        "PyTorch, best pipeline": ([float(row["PyTorch's best"]) for row in rows], LIGHT),
    }
    _pairs(upper, [row["network"] for row in rows], pipelines, "Exact pipelines, against one core (Xeon)")
    rows = rows_of("benchmarks/auto.csv")
    exact = ("all-reduce", "parameter-server", "1f1b, 4", "zb-h2, 4", "zb-v, 2")
    sides: Sides = {
        "pipetrain, predicted weights": ([float(row["spectrain, target"]) for row in rows], ORANGE),
        "pipetrain, best exact way": ([max(float(row[way]) for way in exact) for row in rows], BLUE),
        "Keras, MirroredStrategy": ([float(row["data-parallel"]) for row in rows], LIGHT),
    }
    names = [row["network"].partition(",")[0].partition(" of ")[0] for row in rows]
    _pairs(lower, names, sides, "All ways, against one device (EPYC)")
    return figure


@on_white
def hosts() -> Picture:
    """A step of MultiWorkerMirroredStrategy over one of ``auto``, network by network."""
    rows = rows_of("benchmarks/hosts.csv")
    names = [*dict.fromkeys(map(_of_hosts, rows))]
    figure = Picture(NARROW, height_of(len(names)))
    panel = figure.subplots()
    for row in rows:
        colour = BLUE if row["scheme"] == "all-reduce" else VERMILION
        for column, marker in (("over own packs", "o"), ("over packs of 1 MiB", "D")):
            panel.plot(
                float(row[column]),
                names.index(_of_hosts(row)),
                marker,
                color=colour,
                markersize=6,
                markerfacecolor=colour if marker == "o" else "none",
            )
    for name, colour, marker in (
        ("all-reduce, own packs", BLUE, "o"),
        ("all-reduce, 1 MiB", BLUE, "D"),
        ("parameter-server, own packs", VERMILION, "o"),
        ("parameter-server, 1 MiB", VERMILION, "D"),
    ):
        panel.plot([], [], marker, color=colour, markerfacecolor=colour if marker == "o" else "none", label=name)
    panel.axvline(1, color=GREY, linewidth=1)
    name_rows(panel, names)
    plain(panel, "times as fast")
    _legend(panel, "Packs of the strategy")
    return figure


@on_white
def memory() -> Picture:
    """Planned and measured bytes of the fullest device, way by way."""
    rows = [row for row in rows_of("benchmarks/memory.csv") if row["way"] != "data-parallel"]
    figure = Picture(NARROW, 0.75 * height_of(2 * len(rows)))
    panel = figure.subplots()
    sides = {side: ([float(row[side]) for row in rows], colour) for side, colour in SIDES.items()}
    _pairs(panel, [row["way"] for row in rows], sides, "The fullest device", "multiples of the model's weights")
    return figure


@on_white
def accuracy() -> Picture:
    """The best validation accuracy of each scheme, in points against one device, with the 95% interval."""
    rows = [row for row in rows_of("results/table1.csv") if row["figure"].startswith("against")]
    networks, schemes = ([*dict.fromkeys(row[key] for row in rows)] for key in ("network", "scheme"))
    figure = Picture(NARROW, height_of(len(networks) * len(schemes)) * 0.6)
    panel = figure.subplots()
    for place, scheme in enumerate(schemes):
        name = scheme.replace("/", "-").replace("=", "")
        mine = {row["network"]: row for row in rows if row["scheme"] == scheme}
        there = [network for network in networks if network in mine]
        at = [networks.index(each) + (place - (len(schemes) - 1) / 2) * GROUP / len(schemes) for each in there]
        means = [float(mine[each]["mean"]) for each in there]
        widths = [float(mine[each]["half_width"] or 0) for each in there]  # of one seed there is none
        panel.errorbar(means, at, xerr=widths, fmt=MARKS[place], color=colour_of(name), label=scheme, markersize=5)
    panel.axvline(0, color=GREY, linewidth=1)
    name_rows(panel, networks)
    plain(panel, "points of accuracy against one device")
    _legend(panel, "Table 1: highest validation accuracy")
    return figure


def _of_hosts(row: dict[str, str]) -> str:
    """What a row of hosts.csv is of."""
    rate = row["Mb/s"] if "limit" in row["Mb/s"] else f"{row['Mb/s']} Mb/s"
    return f"{row['network']}, {row['hosts']} hosts, {rate}"


def _legend(panel: Axes, title: str) -> None:
    """Above the panel, where it covers nothing."""
    panel.legend(fontsize=8, loc="lower left", bbox_to_anchor=(0, 1), title=title, alignment="left", frameon=False)


def _pairs(
    panel: Axes,
    names: Sequence[str],
    sides: Sides,
    title: str,
    axis: str = "times as fast",
) -> None:
    """Bars of each side below one another, a row for each name."""
    thick = 2 * BAR / len(sides)
    for place, (side, (values, colour)) in enumerate(sides.items()):
        at = [row + (place - (len(sides) - 1) / 2) * thick for row in range(len(names))]
        panel.barh(at, values, thick, color=colour, label=side)
    if axis == "times as fast":
        panel.axvline(1, color=GREY, linewidth=1)
    name_rows(panel, names)
    plain(panel, axis)
    _legend(panel, title)


if __name__ == "__main__":
    main()
