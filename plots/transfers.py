"""Draw how much devices send each other for each minibatch under each scheme, by what the runs' traces recorded.

Activations go down the pipeline, their gradients come back up, and the replicas of a stage sum the gradients of their
weights; a parameter server sends weights. The first stage's inputs do not count.

example:
  python plots/transfers.py runs/all --output transfers.png
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
from matplotlib.axes import Axes

from pipetrain.trace.records import ENDING
from pipetrain.trace.trace import Trace
from plots import command, runs
from plots.style import bars_for, name_rows, save

KIB = 2**10
# Okabe and Ito's palette; what is told apart by colour is told apart by hatching too.
LOOKS = {
    "F": ("activations, down the pipeline", "#56B4E9", ""),
    "B": ("their gradients, up", "#E69F00", "//"),
    "R": ("gradients of weights, to be summed", "#009E73", ".."),
    "W": ("weights, from a server", "#CC79A7", "xx"),
}


def draw(folders: Sequence[Path], output: Path) -> Path:
    """One figure from the runs' ``trace.json``. Raises ValueError if none of them recorded a transfer."""
    kept = [[(run, run.trace()) for run in those] for those in runs.find(folders)]
    groups = [[(run, sent_bytes(trace)) for run, trace in those if trace is not None] for those in kept]
    groups = [those for those in groups if any(any(sent.values()) for _, sent in those)]
    if not groups:
        given = ", ".join(map(str, folders))
        raise ValueError(f"No run recorded a transfer. Received: {given}. Try runs of experiments/run.py with stages.")
    figure, panels = bars_for([len(those) for those in groups], extra=0.8)
    for panel, those in zip(panels, groups, strict=True):
        _fill(panel, [sent for _, sent in those])
        name_rows(panel, [run.scheme for run, _ in those], those[0][0].title)
    panels[-1].set_xlabel("KiB sent for each minibatch, by all devices", fontsize=9)
    handles = {label: bar for panel in panels for bar, label in zip(*panel.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles, loc="outside lower left", fontsize=9, frameon=False)
    return save(figure, output)


def sent_bytes(trace: Trace) -> dict[str, float]:
    """The bytes of all transfers for each update of the last stage's weights, by what is sent: see ``Transfer.op``."""
    backwards = trace.spans[(trace.spans.stage == trace.stages - 1) & (trace.spans.replica == 0)]
    versions = backwards.version[np.isin(backwards.op, ENDING)]
    updates = max(1, int(np.count_nonzero(np.diff(versions, append=-1))))
    sent = trace.transfers
    return {op: float(sent.size_bytes[sent.op == op].sum()) / updates for op in LOOKS}


def _fill(panel: Axes, bars: Sequence[dict[str, float]]) -> None:
    """What is sent one beside the other, and the sum."""
    left = np.zeros(len(bars))
    for op, (label, colour, hatch) in LOOKS.items():
        parts = np.array([sent[op] / KIB for sent in bars])
        if parts.any():
            look = {"color": colour, "hatch": hatch, "edgecolor": "white", "linewidth": 0}
            panel.barh(range(len(bars)), parts, 0.72, left=left, label=label, **look)
        left += parts
    for row, total in enumerate(left):
        text = f"{total:,.0f}" if total >= 10 or not total else f"{total:.2g}"
        panel.annotate(text, (total, row), (4, 0), textcoords="offset points", va="center", fontsize=9)
    panel.set_xlim(0, 1.18 * float(left.max()))


if __name__ == "__main__":
    sys.exit(command.main(__doc__, draw))
