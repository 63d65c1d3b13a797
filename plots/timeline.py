"""Draw what every stage, or device of several, did and when: boxes numbered by minibatch, and why it was idle.

Where a plan orders the transfers of data parallelism, a row below each worker's has what came to it, numbered by the
packs of the plan: from when it was sent to when it had arrived, and a mark where it was used, as far as that is known.

examples:
  python plots/timeline.py runs/all/spectrain
  python plots/timeline.py runs/all/spectrain --first 60 --minibatches 6
  python plots/timeline.py trace.json --output timeline.png
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from pipetrain.cli.arguments import Folded, count
from pipetrain.trace.idle import IdleSpan, messages, pauses
from pipetrain.trace.records import Span, Spans
from pipetrain.trace.trace import Trace
from plots import command, packs
from plots.steady import first_of_steady, pieces
from plots.style import save

FILL = {"F": "#56B4E9", "B": "#E69F00", "I": "#F0E442", "W": "#009E73", "FB": "#D55E00", "FI": "#CC79A7"}
OPERATIONS = {
    "F": "forward",
    "B": "backward and update",
    "I": "gradients of inputs",
    "W": "gradients of weights, and update",
    "FB": "forward, backward and update in one",
    "FI": "forward and gradients of inputs in one",
}
IDLE: dict[str, dict[str, Any]] = {
    "transfer": {"facecolor": "#F3D9E7", "edgecolor": "#CC79A7", "hatch": "//////"},
    "imbalance": {"facecolor": "#E3E3E3", "edgecolor": "#E3E3E3"},
    "fill": {"facecolor": "#F6F6F6", "edgecolor": "#C4C4C4", "hatch": ".."},
}
LABELS = {
    "transfer": "idle: input, or sum, on its way",
    "imbalance": "idle: input, or next minibatch, not ready",
    "fill": "idle: filling, draining",
}
CAPTION = (
    "Large: the {number}. Small, below it: the version of the weights, that is how many updates the stage had made "
    "when the action began."
)
WIDTH, MARGIN = 14.0, 1.3  # inches: of the figure, and of what is not a row
NUMBER, VERSION = 8.5, 6.0  # points
SMALLEST = 5.5  # points: a number that has less room is left out
SLIM, WIDE = 0.66 / 72, 1.0 / 72  # inches that a character takes at most, and a W, for each point of its size
FILLED = 0.93  # of the width of a box, by a number
VISIBLE = 1e-3  # of the figure's width: what is idle for less is not shown


def draw(trace: Trace, output: Path, first: int | None = None, minibatches: int = 12, title: str = "") -> Path:
    """The span of time from the first to the last action of these minibatches, a row per stage and replica.

    Where a device has several stages it is a row per device, of actions such as 2F0: stage 2, forward, microbatch 0.
    Of schemes with microbatches ``first`` and ``minibatches`` count these. Without ``first`` the part is one in which
    the pipeline is full.

    Raises ValueError where the trace has no such minibatches.
    """
    is_ordered = len(messages(trace.transfers)) > 0
    if first is None:
        first = first_of_steady(trace, minibatches)
    chosen = _chosen(trace.spans, first, minibatches)
    start_s, end_s = float(chosen.start_s.min()), float(chosen.end_s.max())
    shown = trace.spans[(trace.spans.start_s < end_s) & (trace.spans.end_s > start_s)]
    places, names = _rows(trace)
    rows = {place: (1 + is_ordered) * row for place, row in places.items()}
    height = (1 + is_ordered) * len(names)
    figure = Figure(figsize=(WIDTH, 1.3 + 0.62 * height), layout="constrained")
    axes = figure.subplots()
    are_shared = trace.devices_are_shared
    idle = [] if are_shared else _seen(pauses(trace), start_s, end_s)
    for span in shown:
        alpha = 1.0 if first <= span.microbatch < first + minibatches else 0.4
        _bar(
            axes, rows, span, start_s, facecolor=FILL[span.op], edgecolor="white", linewidth=0.8, alpha=alpha, zorder=2
        )
        clear_s = min([each.start_s for each in idle if _within(each, span)], default=span.end_s)
        clear = span._replace(start_s=max(span.start_s, start_s), end_s=min(clear_s, end_s))
        number = f"{span.stage}{span.op}{span.microbatch}" if are_shared else str(span.microbatch)
        _write(axes, rows[span.stage, span.replica], clear, number, start_s, (WIDTH - MARGIN) / (end_s - start_s))
    for each in idle:
        _bar(axes, rows, each, start_s, **IDLE[each.cause], linewidth=0, zorder=3)
    axes.set(xlim=(0, (end_s - start_s) * 1e3), ylim=(height - 0.5, -0.5))
    axes.set_title(title, loc="left")
    axes.set_xlabel(f"milliseconds\n{CAPTION.format(number=_numbered(trace))}")
    labels = {(1 + is_ordered) * row: name for row, name in enumerate(names)}
    if is_ordered:
        labels |= {row + 1: f"to {packs.receiver(place)}" for place, row in rows.items()}
    axes.set_yticks([*labels], [*labels.values()])
    done = {*shown.op.tolist()}
    handles = [Patch(color=FILL[op], label=about) for op, about in OPERATIONS.items() if op in done]
    causes = {each.cause for each in idle}
    handles += [Patch(**IDLE[cause], linewidth=0, label=LABELS[cause]) for cause in IDLE if cause in causes]
    if is_ordered:
        handles += packs.draw(axes, trace, {place[1]: row + 1 for place, row in rows.items()}, start_s, end_s)
    columns = -(-len(handles) // 2) if is_ordered else min(len(handles), 4)
    figure.legend(handles=handles, loc="outside upper right", ncols=columns, frameon=False)
    return save(figure, output)


def _numbered(trace: Trace) -> str:
    """What the text in the bars counts."""
    if trace.devices_are_shared:
        return "stage, the action and the microbatch"
    return "microbatch" if pieces(trace) > 1 else "minibatch"


def _rows(trace: Trace) -> tuple[dict[tuple[int, int], int], list[str]]:
    """The row of each stage and replica, and the rows' names: those of devices where these have several stages."""
    if not trace.devices_are_shared:
        return {place: row for row, place in enumerate(trace.rows)}, trace.row_names()
    on = {(span.stage, span.replica): span.device for span in trace.spans}
    devices = list(dict.fromkeys(on[place] for place in trace.rows))
    return {place: devices.index(device) for place, device in on.items()}, [each.rpartition("/")[2] for each in devices]


def _chosen(spans: Spans, first: int, count: int) -> Spans:
    """The spans of these minibatches."""
    if not len(spans):
        raise ValueError(
            "There is nothing in the trace. Received: no spans. Try that of a fit that has ended, without trace=False."
        )
    wanted = spans[(spans.microbatch >= first) & (spans.microbatch < first + count)]
    if not len(wanted):
        least, most = int(spans.microbatch.min()), int(spans.microbatch.max())
        raise ValueError(
            f"The trace has no such minibatches. Received: first={first}, minibatches={count}. Try first={least} to "
            f"{most}."
        )
    return wanted


def _seen(idle: Sequence[IdleSpan], start_s: float, end_s: float) -> list[IdleSpan]:
    """Those between these times that are long enough to be seen."""
    least_s = VISIBLE * (end_s - start_s)
    return [each for each in idle if min(each.end_s, end_s) - max(each.start_s, start_s) > least_s]


def _within(pause: IdleSpan, span: Span) -> bool:
    """Whether a replica waited for others in the midst of an action."""
    same = (pause.stage, pause.replica) == (span.stage, span.replica)
    return same and span.start_s < pause.start_s and pause.end_s < span.end_s


def _bar(axes: Any, rows: dict[tuple[int, int], int], what: Span | IdleSpan, start_s: float, **style: Any) -> None:
    left_ms, width_ms = (what.start_s - start_s) * 1e3, (what.end_s - what.start_s) * 1e3
    axes.barh(rows[what.stage, what.replica], width_ms, left=left_ms, height=0.86, **style)


def _write(axes: Any, row: int, span: Span, number: str, start_s: float, inches_per_s: float) -> None:
    """The number of the minibatch and the weight version, where there is room for them."""
    room = (span.end_s - span.start_s) * inches_per_s
    middle_ms = ((span.start_s + span.end_s) / 2 - start_s) * 1e3
    version = f"v{span.version}"
    at = {"ha": "center", "va": "center", "clip_on": True, "zorder": 4}
    size = min(NUMBER, FILLED * room / _inches(number))
    if size < SMALLEST:
        return
    fits = room >= _inches(version) * VERSION
    axes.text(middle_ms, row - 0.13 * fits, number, fontsize=size, **at)
    if fits:
        axes.text(middle_ms, row + 0.23, version, fontsize=VERSION, color="#333333", **at)


def _inches(text: str) -> float:
    """How wide it is at most, for each point of its size."""
    return sum(WIDE if each == "W" else SLIM for each in text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status: 2 where there is nothing to draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Folded)
    parser.add_argument("run", type=Path, help="a run's folder, or a trace file such as simulate writes")
    parser.add_argument(
        "--first",
        type=int,
        metavar="N",
        help="first minibatch, or microbatch of schemes that have them, to show (default: where the pipeline is full)",
    )
    parser.add_argument("--minibatches", type=count, default=12, metavar="N", help="how many (default: 12)")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="(default: timeline.png in the run's folder; FILE.png)"
    )
    options = parser.parse_args(arguments)
    of_run = options.run.is_dir()
    output = options.output or (options.run / "timeline.png" if of_run else options.run.with_suffix(".png"))
    title = options.run.resolve().name if of_run else options.run.stem
    return command.shown(
        parser.prog, lambda: draw(_loaded(options.run), output, options.first, options.minibatches, title)
    )


def _loaded(run: Path) -> Trace:
    """The trace of a run's folder, or of a file. Raises ValueError where there is none."""
    file = run / "trace.json" if run.is_dir() else run
    try:
        return Trace.load(file)
    except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        why = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        raise ValueError(
            f"There is no trace. Received: {str(file)!r} ({why}). Try the folder of one scheme in an "
            "--output of experiments/run.py, or a file that Trace.save or --trace wrote."
        ) from error


if __name__ == "__main__":
    sys.exit(main())
