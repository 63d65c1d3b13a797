"""Draw what the time of all stages goes into under each scheme: the paper's Figure 10.

The middle half of a run is counted, without the pauses in which nothing at all was under way for longer than a step
takes: there, weights were being evaluated or a checkpoint written.

example:
  python plots/breakdown.py runs/all --output breakdown.png
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray

from pipetrain.trace.idle import idle
from pipetrain.trace.trace import Trace
from plots import command, runs
from plots.style import bars_for, name_rows, save

FEW = 8  # minibatches: of a shorter run all are counted
VISIBLE = 0.1  # of 100: what is less in every run is not in the legend
ROOM = 0.12  # of 1: a share that its number fits into


class Shares(NamedTuple):
    """Of all stages' time, from 0 to 1: the first three sum to 1, transfers go on beside them."""

    compute: float
    for_transfers: float
    imbalance: float
    transfers: float


# Okabe and Ito's palette; what is told apart by colour is told apart by hatching too.
LOOKS = {
    "compute": ("computing", "#0072B2", ""),
    "for_transfers": ("idle, for a transfer", "#D55E00", "xx"),
    "imbalance": ("idle, for other stages or the next minibatch", "#F0E442", ".."),
    "transfers": ("transfers under way meanwhile", "#009E73", "//"),
}


def draw(folders: Sequence[Path], output: Path) -> Path:
    """One figure from the runs' ``trace.json``. Raises ValueError if no run kept one."""
    kept = [[(run, run.trace()) for run in those] for those in runs.find(folders)]
    groups = [[(run, trace) for run, trace in those if trace is not None] for those in kept]
    groups = [those for those in groups if those]
    if not groups:
        given = ", ".join(map(str, folders))
        raise ValueError(f"No run kept a trace. Received: {given}. Try runs of experiments/run.py with a pipeline.")
    figure, panels = bars_for([len(those) for those in groups], extra=1.0)
    for panel, those in zip(panels, groups, strict=True):
        _fill(panel, [shares(trace) for _, trace in those])
        name_rows(panel, [run.scheme for run, _ in those], those[0][0].title)
    panels[-1].set_xlabel("% of the stages' time", fontsize=9)
    handles = {label: bar for panel in panels for bar, label in zip(*panel.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles, loc="outside lower left", fontsize=9, frameon=False)
    return save(figure, output)


def shares(trace: Trace) -> Shares:
    """What the stages' time went into while the pipeline was full."""
    trace = without_pauses(middle(trace))
    causes = idle(trace).values()
    whole_s = trace.duration_s * len(trace.rows) - sum(each.fill_s for each in causes)
    for_transfers_s, imbalance_s = sum(each.transfer_s for each in causes), sum(each.imbalance_s for each in causes)
    compute_s = whole_s - for_transfers_s - imbalance_s
    return Shares(*(part / whole_s for part in (compute_s, for_transfers_s, imbalance_s, _under_way_s(trace))))


def middle(trace: Trace) -> Trace:
    """The middle half of the minibatches: the first ones are slow, the last ones leave stages without work."""
    minibatches = 1 + int(trace.spans.microbatch.max(initial=0))
    first = minibatches // 4 if minibatches >= FEW else 0
    spans, sent = (
        each[(each.microbatch >= first) & (each.microbatch < minibatches - first)]
        for each in (trace.spans, trace.transfers)
    )
    return Trace.of(spans, sent, starts=trace.starts, period=trace.period)


def without_pauses(trace: Trace) -> Trace:
    """The trace as if what came after a pause had followed at once: nothing under way for longer than a step takes."""
    spans, sent = trace.spans, trace.transfers
    start_s, end_s = (np.concatenate([getattr(spans, key), getattr(sent, key)]) for key in ("start_s", "end_s"))
    order = np.argsort(start_s, kind="stable")
    begun_s, done_s = start_s[order][1:], np.maximum.accumulate(end_s[order])[:-1]
    paused = begun_s - done_s > trace.step_s
    left_out_s = np.concatenate([[0.0], np.cumsum((begun_s - done_s)[paused])])

    def moved(seconds: NDArray[np.float64]) -> NDArray[np.float64]:
        return seconds - left_out_s[np.searchsorted(begun_s[paused], seconds, side="right")]

    spans, sent = (replace(each, start_s=moved(each.start_s), end_s=moved(each.end_s)) for each in (spans, sent))
    return Trace(spans, sent, starts=trace.starts, period=trace.period)


def _under_way_s(trace: Trace) -> float:
    """For how long something was on its way to a stage's replica; the sum over all of them."""
    total_s = 0.0
    sent = trace.transfers[trace.transfers.op != "R"]
    for stage, replica in trace.rows:
        mine = sent[(sent.to_stage == stage) & (sent.to_replica == replica)]
        order = np.argsort(mine.start_s, kind="stable")
        start_s, end_s = mine.start_s[order], np.maximum.accumulate(mine.end_s[order])
        before_s = np.concatenate([start_s[:1], end_s[:-1]])
        total_s += float(np.maximum(end_s - np.maximum(start_s, before_s), 0.0).sum())
    return total_s


def _fill(panel: Axes, bars: Sequence[Shares]) -> None:
    """The parts of 100% one beside the other, with the numbers of the large ones; transfers as a thin bar below."""
    left = np.zeros(len(bars))
    for key in ("compute", "for_transfers", "imbalance"):
        label, colour, hatch = LOOKS[key]
        parts = np.array([100 * getattr(bar, key) for bar in bars])
        if parts.max() < VISIBLE:
            continue
        places = np.arange(len(bars)) - 0.06
        panel.barh(
            places, parts, 0.6, left=left, color=colour, hatch=hatch, edgecolor="white", linewidth=0, label=label
        )
        left += parts
    for row, bar in enumerate(bars):
        at, colour = (0, "white") if bar.compute > ROOM else (100 * bar.compute, "black")
        panel.text(at + 1.5, row - 0.06, f"{bar.compute:.0%}", color=colour, va="center", fontsize=9, weight="bold")
    label, colour, hatch = LOOKS["transfers"]
    under_way = [100 * bar.transfers for bar in bars]
    if max(under_way) >= VISIBLE:
        places = np.arange(len(bars)) + 0.34
        panel.barh(places, under_way, 0.14, color=colour, hatch=hatch, edgecolor="white", linewidth=0, label=label)
    panel.set_xlim(0, 100)


if __name__ == "__main__":
    sys.exit(command.main(__doc__, draw))
