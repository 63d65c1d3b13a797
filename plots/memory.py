"""Draw what each stage keeps in its device's memory at its fullest, by the planner's estimate, under each scheme.

example:
  python plots/memory.py runs/all --output memory.png
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import matplotlib
import numpy as np
from matplotlib.axes import Axes

from plots import command, runs
from plots.style import ROW, bars_for, name_rows, save

THIN = 0.5  # of a bar's height: those of the stages stand close
MIB = 2**20


def draw(folders: Sequence[Path], output: Path) -> Path:
    """One figure from the runs' ``partition.json``. Raises ValueError if no run kept one."""
    kept = [[(run, run.partition()) for run in those] for those in runs.find(folders)]
    groups = [[(run, cut["stages"]) for run, cut in those if cut is not None] for those in kept]
    groups = [those for those in groups if those]
    if not groups:
        given = ", ".join(map(str, folders))
        raise ValueError(f"No run says how the model was cut. Received: {given}. Try newer runs of experiments/run.py.")
    most = max(len(stages) for those in groups for _, stages in those)
    room = max(1.0, THIN * most)
    figure, panels = bars_for([round(room * len(those)) for those in groups], extra=0.3 + ROW * -(-most // 4))
    colours = matplotlib.colormaps["cividis"](np.linspace(0.0, 0.9, most))
    for panel, those in zip(panels, groups, strict=True):
        _fill(panel, [stages for _, stages in those], colours)
        name_rows(panel, [run.scheme for run, _ in those], those[0][0].title)
    panels[-1].set_xlabel("MiB on the stage's device", fontsize=9)
    handles = {label: bar for panel in panels for bar, label in zip(*panel.get_legend_handles_labels(), strict=True)}
    names = sorted(handles, key=lambda name: int(name.split()[1]))
    figure.legend(
        [handles[name] for name in names],
        names,
        loc="outside lower left",
        ncols=min(4, most),
        fontsize=9,
        frameon=False,
        columnspacing=1.2,
        handlelength=1.4,
    )
    return save(figure, output)


def _fill(panel: Axes, cuts: Sequence[Sequence[dict[str, Any]]], colours: np.ndarray) -> None:
    """For every run a bar for each stage, the first on top, and the number of the fullest one."""
    for row, stages in enumerate(cuts):
        sizes = [stage["memory_bytes"] / MIB for stage in stages]
        height = 0.84 / len(stages)
        places = [row - 0.42 + (n + 0.5) * height for n in range(len(stages))]
        for n, (place, size) in enumerate(zip(places, sizes, strict=True)):
            panel.barh(place, size, min(height, 0.5), color=colours[n], label=f"stage {n}")
        fullest = int(np.argmax(sizes))
        at = (sizes[fullest], places[fullest])
        panel.annotate(f"{max(sizes):.3g}", at, (4, 0), textcoords="offset points", va="center", fontsize=8)
    panel.set_xlim(0, 1.15 * max(stage["memory_bytes"] for stages in cuts for stage in stages) / MIB or 1)


if __name__ == "__main__":
    sys.exit(command.main(__doc__, draw))
