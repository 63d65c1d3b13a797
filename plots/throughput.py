"""Draw how many samples each scheme trains on per second, against one device: the paper's Figure 9.

Several folders of runs (of several networks, say) get a panel each, normalised to their own ``single``.

example:
  python plots/throughput.py runs/all --output throughput.png
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from plots import command, runs
from plots.style import COLOURS, OTHER, bars_for, name_rows, save


def draw(folders: Sequence[Path], output: Path) -> Path:
    """One figure from the runs' ``summary.json``. Raises ValueError if none of them measured its throughput."""
    groups = [those for those in runs.find(folders) if runs.throughput(those)]
    if not groups:
        given = ", ".join(map(str, folders))
        raise ValueError(f"No run was long enough to measure its throughput. Received: {given}. Try more --steps.")
    figure, panels = bars_for([len(those) for those in groups], extra=0.2)
    for panel, those in zip(panels, groups, strict=True):
        _fill(panel, those)
    return save(figure, output)


def _fill(panel: Axes, those: Sequence[runs.Run]) -> None:
    """Bars of the throughput divided by single's; where single was not run, of the throughput itself."""
    measured = runs.throughput(those)
    base = measured.get("single", 1.0)
    longest = max(measured.values()) / base
    for row, run in enumerate(those):
        value = measured.get(run.scheme, 0.0)
        times = f"{value / base:.2f}x   " if "single" in measured else ""
        label = f"{times}{value:,.0f}/s" if value else "not measured"
        panel.barh(row, value / base, 0.72, color=COLOURS.get(run.scheme, OTHER))
        panel.text(1.04 * longest, row, label, va="center", fontsize=9)
    if "single" in measured:
        panel.axvline(1, color="black", linewidth=0.8, linestyle="--")
    panel.set_xlim(0, 1.6 * longest)  # room for what is written beside the bars
    panel.xaxis.set_major_locator(MaxNLocator(6))
    panel.set_xlabel("samples/s, single = 1" if "single" in measured else "samples/s", fontsize=9)
    name_rows(panel, [run.scheme for run in those], those[0].title)


if __name__ == "__main__":
    sys.exit(command.main(__doc__, draw))
