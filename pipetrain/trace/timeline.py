"""Draw what every stage, or device of several, did and when: boxes numbered by minibatch, and why it was idle.

Where a plan orders the transfers of data parallelism, a row below each worker's has what came to it, numbered by the
packs of the plan: from when it was sent to when it had arrived, and a mark where it was used, as far as that is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import fill
from typing import Any

from pipetrain.pictures.figure import GREEN, ORANGE, PURPLE, SKY, VERMILION, WIDTH, YELLOW, Patch, Picture, on_white
from pipetrain.trace import pack_bars
from pipetrain.trace.idle import IdleSpan, messages, pauses
from pipetrain.trace.records import Span, Spans
from pipetrain.trace.steady import first_of_steady, pieces
from pipetrain.trace.trace import Trace

FILL = {"F": SKY, "B": ORANGE, "I": YELLOW, "W": GREEN, "FB": VERMILION, "FI": PURPLE}
OPERATIONS = {
    "F": "forward",
    "B": "backward and update",
    "I": "gradients of inputs",
    "W": "gradients of weights, and update",
    "FB": "forward, backward and update in one",
    "FI": "forward and gradients of inputs in one",
}
IDLE: dict[str, dict[str, Any]] = {
    "transfer": {"facecolor": "#F3D9E7", "edgecolor": PURPLE, "hatch": "//////"},
    "imbalance": {"facecolor": "#E3E3E3", "edgecolor": "#E3E3E3"},
    "fill": {"facecolor": "#F6F6F6", "edgecolor": "#C4C4C4", "hatch": ".."},
}
LABELS = {
    "transfer": "idle: input, or sum, on its way",
    "imbalance": "idle: input, or next minibatch, not ready",
    "fill": "idle: filling, draining",
}
LARGE = "Large: the {number}. Small, below it: {small}."
VERSIONS = "the version of the weights (updates of the stage by then)"
STAGES = "the stage"
MARGIN = 1.2  # inches of width that are not a row
NUMBER, SMALL = 9.0, 7.0  # points
SMALLEST = 6.0  # points: a number that has less room is left out
SLIM = 0.66 / 72  # inches that a character takes at most for each point of its size
FILLED = 0.93  # of the width of a box, by a number
VISIBLE = 1e-3  # of the figure's width: what is idle for less is not shown
LINE = 110  # characters of the caption's lines


@on_white
def draw(trace: Trace, first: int | None = None, minibatches: int = 12, title: str = "") -> Picture:
    """The span of time from the first to the last action of these minibatches, a row per stage and replica.

    Where a device has several stages it is a row per device, whose boxes have the microbatch and the stage. Of schemes
    with microbatches ``first`` and ``minibatches`` count these. Without ``first`` the part is one in which the pipeline
    is full.

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
    figure = Picture(WIDTH, 1.7 + 0.55 * height)
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
        small = f"s{span.stage}" if are_shared else f"v{span.version}"
        _write(axes, rows[span.stage, span.replica], clear, small, start_s, (WIDTH - MARGIN) / (end_s - start_s))
    for each in idle:
        _bar(axes, rows, each, start_s, **IDLE[each.cause], linewidth=0, zorder=3)
    axes.set(xlim=(0, (end_s - start_s) * 1e3), ylim=(height - 0.5, -0.5))
    axes.set_title(title, loc="left")
    caption = LARGE.format(number=_numbered(trace), small=STAGES if are_shared else VERSIONS)
    axes.set_xlabel(f"milliseconds\n{fill(caption, LINE)}", fontsize=9)
    labels = {(1 + is_ordered) * row: name for row, name in enumerate(names)}
    if is_ordered:
        labels |= {row + 1: f"to {pack_bars.receiver(place)}" for place, row in rows.items()}
    axes.set_yticks([*labels], [*labels.values()])
    done = {*shown.op.tolist()}
    handles = [Patch(color=FILL[op], label=about) for op, about in OPERATIONS.items() if op in done]
    causes = {each.cause for each in idle}
    handles += [Patch(**IDLE[cause], linewidth=0, label=LABELS[cause]) for cause in IDLE if cause in causes]
    if is_ordered:
        handles += pack_bars.draw(axes, trace, {place[1]: row + 1 for place, row in rows.items()}, start_s, end_s)
    figure.legend(handles=handles, loc="outside upper right", ncols=3, frameon=False, fontsize=9)
    return figure


def _numbered(trace: Trace) -> str:
    """What the large text in the bars counts."""
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
            "There is nothing in the trace. Received: no spans. Try that of a fit that has ended, with is_traced=True."
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


def _write(axes: Any, row: int, span: Span, small: str, start_s: float, inches_per_s: float) -> None:
    """The number of the minibatch, and below it the small text, where there is room for them."""
    room = (span.end_s - span.start_s) * inches_per_s
    middle_ms = ((span.start_s + span.end_s) / 2 - start_s) * 1e3
    number = str(span.microbatch)
    at = {"ha": "center", "va": "center", "clip_on": True, "zorder": 4}
    size = min(NUMBER, FILLED * room / _inches(number))
    if size < SMALLEST:
        return
    small_size = min(SMALL, FILLED * room / _inches(small))
    fits = small_size >= SMALLEST
    axes.text(middle_ms, row - 0.16 * fits, number, fontsize=size, **at)
    if fits:
        axes.text(middle_ms, row + 0.22, small, fontsize=small_size, color="#333333", **at)


def _inches(text: str) -> float:
    """How wide it is at most, for each point of its size."""
    return SLIM * len(text)
