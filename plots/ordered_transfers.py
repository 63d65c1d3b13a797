"""Draw what an order of transfers brings, from what ``experiments/ordered_transfers.py`` wrote for one paper.

example:
  python plots/ordered_transfers.py runs/ordered_transfers/tictac.csv --output tictac.png
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pipetrain.cli.arguments import Folded
from pipetrain.logs import counted
from pipetrain.pictures.figure import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION
from plots.command import shown
from plots.style import NARROW, ROW, save

Row = dict[str, str]
SIZES = ((SKY, "o"), (BLUE, "s"), (ORANGE, "^"), (VERMILION, "D"), (GREEN, "v"), (PURPLE, "P"))
PUBLISHED = {"training": 1.192, "inference": 1.377}  # TicTac's, at most
# CARAMEL's parts, one after another
PARTS = {
    "after": ("after the backward", GREY, "x"),
    "as-made": ("as the backward makes them", BLACK, "o"),
    "packs": ("+ together", SKY, "s"),
    "chunks": ("+ in chunks", GREEN, "^"),
    "next-forward": ("+ in the next forward", ORANGE, "D"),
    "reordered": ("+ branches reordered", VERMILION, "P"),
}
HOP_US = "50"
# iBatch's ways
WAYS = {
    "one message": (GREY, ":", "x"),
    "layer by layer": (BLUE, "--", "s"),
    "exact": (VERMILION, "-", "o"),
}


def draw(path: Path, output: Path) -> Path:
    """The figure of a paper, whose name is that of the file."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = [*csv.DictReader(file)]
    if path.stem not in FIGURES or not rows:
        raise ValueError(
            f"There is nothing to draw. Received: {str(path)!r}. Try one of {', '.join(FIGURES)}.csv, with rows."
        )
    return save(FIGURES[path.stem](rows), output)


def of_tictac(rows: Sequence[Row]) -> Figure:
    """Gains in training and in inference, network below network, a mark for each number of nodes."""
    seconds = {(each["mode"], each["network"], each["nodes"], each["order"]): float(each["step_ms"]) for each in rows}
    names, sizes = (list(dict.fromkeys(each[key] for each in rows)) for key in ("network", "nodes"))
    figure = Figure(figsize=(1.6 * NARROW, ROW * len(names) + 1.6), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for panel, (mode, published) in zip(panels, PUBLISHED.items(), strict=True):
        for (colour, marker), size in zip(SIZES, sizes, strict=False):
            of_size = [
                seconds[mode, name, size, "none"] / min(seconds[mode, name, size, order] for order in ("tic", "tac"))
                for name in names
            ]
            panel.plot(of_size, range(len(names)), marker, color=colour, label=f"{size} nodes", alpha=0.9)
        panel.axvline(published, color=BLACK, linestyle=":", label="published, at most")
        panel.axvline(1, color=GREY, linewidth=0.8)
        panel.set(xlabel="times as fast as without an order")
        panel.set_title(mode, loc="left")
        panel.grid(alpha=0.3)
    _named(panels[0], names)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
    return figure


def of_caramel(rows: Sequence[Row]) -> Figure:
    """The part of a step in which the device computes, on the most nodes, a panel for each device."""
    most = max(int(each["nodes"]) for each in rows)
    some = [each for each in rows if int(each["nodes"]) == most and each["hop_us"] == HOP_US]
    names, devices = (list(dict.fromkeys(each[key] for each in some)) for key in ("network", "device"))
    figure = Figure(figsize=(1.6 * NARROW, ROW * 1.3 * len(names) + 1.9), layout="constrained")
    panels = figure.subplots(1, len(devices), sharey=True, squeeze=False)[0]
    for panel, device in zip(panels, devices, strict=True):
        for way, (label, colour, marker) in PARTS.items():
            of_way = {
                each["network"]: 100 * float(each["computing_part"])
                for each in some
                if each["device"] == device and each["way"] == way
            }
            panel.plot([of_way[name] for name in names], range(len(names)), marker, color=colour, label=label)
        panel.set(xlabel="% of a step in which it computes", xlim=(0, 103))
        panel.set_title(device, loc="left")
        panel.grid(alpha=0.3)
    _named(panels[0], names)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    return figure


def of_ibatch(rows: Sequence[Row]) -> Figure:
    """Speed-up over nodes, in per cent of them; the usual setting above, the one that is found below."""
    names = list(dict.fromkeys(each["network"] for each in rows))
    kinds = {"curve": "T_s 0.5 ms", "found": "found"}
    figure = Figure(figsize=(2.3 * len(names) + 0.6, 5.4), layout="constrained")
    panels = figure.subplots(len(kinds), len(names), sharex=True, sharey=True, squeeze=False)
    for line, kind in zip(panels, kinds, strict=True):
        for panel, name in zip(line, names, strict=True):
            of_panel = [
                each for each in rows if (each["kind"], each["network"], each["gradients"]) == (kind, name, "dense")
            ]
            for way, (colour, dashes, marker) in WAYS.items():
                of_way = {
                    int(each["nodes"]): 100 * float(each["computing_ms"]) / float(each["step_ms"])
                    for each in of_panel
                    if each["way"] == way
                }
                panel.plot(
                    [*of_way],
                    [*of_way.values()],
                    color=colour,
                    linestyle=dashes,
                    marker=marker,
                    label=way,
                    markersize=5,
                )
            panel.set(xscale="log", ylim=(0, 105))
            panel.set_xscale("log", base=2)
            sizes = sorted({int(each["nodes"]) for each in of_panel if each["nodes"] in ("1", "4", "16", "72")})
            panel.set_xticks(sizes, [str(each) for each in sizes])
            panel.minorticks_off()
            panel.grid(alpha=0.3)
            if of_panel:
                one = of_panel[0]
                rows_of = counted(int(one["rows"]), "row")
                about = f"T_s {float(one['startup_ms']):g} ms, {float(one['gbit_per_s']):.2g} Gb/s, {rows_of}"
                panel.set_title(f"{name}\n{about}", loc="left", fontsize=9)
    figure.supxlabel("nodes")
    figure.supylabel("speed-up, % of the nodes")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside upper right", ncols=3, frameon=False)
    return figure


def _named(panel: Axes, names: Sequence[str]) -> None:
    """The networks, the first of them on top."""
    panel.set_yticks(range(len(names)), names)
    panel.invert_yaxis()


FIGURES: dict[str, Callable[[Sequence[Row]], Figure]] = {
    "tictac": of_tictac,
    "caramel": of_caramel,
    "ibatch": of_ibatch,
}


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Folded)
    parser.add_argument("file", type=Path, help="PAPER.csv of the --output of experiments/ordered_transfers.py")
    parser.add_argument("--output", type=Path, help="(default: beside the file)")
    options = parser.parse_args()
    output = options.output or options.file.with_suffix(".png")
    return shown(
        parser.prog, lambda: draw(options.file, output), "Try the --output of experiments/ordered_transfers.py."
    )


if __name__ == "__main__":
    sys.exit(main())
