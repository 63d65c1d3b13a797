"""Draw what every stage, or device of several, did and when: boxes numbered by minibatch, and why it was idle.

Where a plan orders the transfers of data parallelism, a row below each worker's has what came to it, numbered by the
packs of the plan: from when it was sent to when it had arrived, and a mark where it was used, as far as that is known.
Without a choice of minibatches, those are drawn that show what the stages do most of the time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import fill
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipetrain.pictures.figure import (
    BLUE,
    GREEN,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    WIDTH,
    YELLOW,
    Line2D,
    Patch,
    Picture,
    on_white,
)
from pipetrain.trace.idle import IdleSpan, PackTimes, messages, packs, pauses
from pipetrain.trace.records import ENDING, Span, Spans
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
# What is told apart by colour is told apart by hatching too.
MESSAGE_LOOKS: dict[str, dict[str, Any]] = {
    "F": {"facecolor": SKY, "hatch": ""},
    "B": {"facecolor": ORANGE, "hatch": ""},
    "W": {"facecolor": PURPLE, "hatch": ""},
    "R": {"facecolor": BLUE, "hatch": ""},
    "inverted": {"facecolor": VERMILION, "hatch": "xxxx"},
}
MESSAGE_LABELS = {
    "F": "activations on their way",
    "B": "their gradients on the way back",
    "W": "weights on their way",
    "R": "gradients on their way",
    "inverted": "after one behind it in the plan",
}
FIRST_USED: dict[str, Any] = {"color": "black", "marker": 7, "linestyle": "", "markersize": 4}
LANES = 4  # of a row: messages that are under way at once
LEGIBLE = 0.012  # of the figure's width: a bar that has room for its number
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
# Of all parts of a trace with as many microbatches, by their seconds, those between these shares of them: of a short
# trace most of the parts may have an evaluation in them.
USUAL = (0.1, 0.3)


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
        labels |= {row + 1: f"to {receiver(place)}" for place, row in rows.items()}
    axes.set_yticks([*labels], [*labels.values()])
    done = {*shown.op.tolist()}
    handles = [Patch(color=FILL[op], label=about) for op, about in OPERATIONS.items() if op in done]
    causes = {each.cause for each in idle}
    handles += [Patch(**IDLE[cause], linewidth=0, label=LABELS[cause]) for cause in IDLE if cause in causes]
    if is_ordered:
        handles += draw_messages(axes, trace, {place[1]: row + 1 for place, row in rows.items()}, start_s, end_s)
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


def receiver(place: tuple[int, int]) -> str:
    """The name of who gets messages."""
    return f"replica {place[1]}"


def draw_messages(axes: Any, trace: Trace, rows: Mapping[int, int], start_s: float, end_s: float) -> list[Any]:
    """Bars for the messages of this time in the rows of their receivers; gives what the legend is to show."""
    shown = [each for each in packs(trace) if each.sent_s < end_s and each.arrived_s > start_s]
    free_s: dict[int, list[float]] = {row: [0.0] * LANES for row in rows.values()}
    seen: dict[str, None] = {}
    used = False
    for each in shown:
        row = rows[each.to_replica]
        lane = min(range(LANES), key=lambda n: (free_s[row][n] > each.sent_s, free_s[row][n]))
        free_s[row][lane] = each.arrived_s
        look = "inverted" if each.inverted else each.op
        seen[look] = None
        at = row - 0.4 + 0.8 * (lane + 0.5) / LANES
        _message_bar(axes, each, at, look, start_s, end_s)
        if each.used_s > each.arrived_s and each.used_s < end_s:
            used = True
            axes.plot([(each.used_s - start_s) * 1e3], [at], zorder=5, **FIRST_USED)
    handles = [
        Patch(**MESSAGE_LOOKS[look], edgecolor="white", linewidth=0, label=MESSAGE_LABELS[look])
        for look in MESSAGE_LOOKS
        if look in seen
    ]
    return [*handles, *([Line2D([], [], label="first used", **FIRST_USED)] if used else [])]


def _message_bar(axes: Any, message: PackTimes, at: float, look: str, start_s: float, end_s: float) -> None:
    left_s, right_s = max(message.sent_s, start_s), min(message.arrived_s, end_s)
    height = 0.8 / LANES
    style = {**MESSAGE_LOOKS[look], "edgecolor": "white", "linewidth": 0.4}
    axes.barh(at, (right_s - left_s) * 1e3, left=(left_s - start_s) * 1e3, height=height, zorder=2, **style)
    if right_s - left_s > LEGIBLE * (end_s - start_s):
        middle_ms = ((left_s + right_s) / 2 - start_s) * 1e3
        axes.text(middle_ms, at, str(message.pack), fontsize=6, ha="center", va="center", color="white", zorder=4)


def first_of_steady(trace: Trace, count: int) -> int:
    """The first of ``count`` microbatches about the middle of a trace that take as long as most do.

    They are whole minibatches from their first microbatch on, without a drain, and where there are such with as many
    microbatches between them and a drain as there are stages, so that no stage is seen to wait for one. What a few of
    them waited for, such as an evaluation, is not in them.
    """
    number, starts_s, ends_s = _times(trace)
    if not len(number):
        return 0
    firsts = np.flatnonzero(number % pieces(trace) == 0)
    firsts = firsts[firsts + count <= len(number)]
    for margin in (trace.stages, 0):
        apart = _apart(number[firsts], number[-1] + 1, count, margin, np.sort(trace.starts))
        if apart.any():
            return _usual(firsts[apart], number, ends_s[firsts[apart] + count - 1] - starts_s[firsts[apart]])
    return int(number[0])


def pieces(trace: Trace) -> int:
    """How many microbatches a minibatch has: the backwards of as many at one stage lead to an update."""
    spans = trace.spans[np.isin(trace.spans.op, ENDING) & (trace.spans.stage == 0) & (trace.spans.replica == 0)]
    made = np.unique(np.stack([spans.version, spans.microbatch]), axis=1)[0]  # a backward may be several spans
    return int(np.unique(made, return_counts=True)[1].max(initial=1))


def _times(trace: Trace) -> tuple[NDArray[np.int32], NDArray[np.float64], NDArray[np.float64]]:
    """Every microbatch, when its first action began, and when its last one ended."""
    number, of = np.unique(trace.spans.microbatch, return_inverse=True)
    starts_s, ends_s = np.full(len(number), np.inf), np.zeros(len(number))
    np.minimum.at(starts_s, of, trace.spans.start_s)
    np.maximum.at(ends_s, of, trace.spans.end_s)
    return number, starts_s, ends_s


def _apart(
    firsts: NDArray[np.int32], end: int, count: int, margin: int, starts: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Of parts that begin with these microbatches, whether they are apart from all drains, and from the end."""
    run = np.searchsorted(starts, firsts, side="right")
    begin = np.concatenate([[0], starts])[run]
    until = np.concatenate([starts, [end]])[run]
    found: NDArray[np.bool_] = (firsts >= begin + margin) & (firsts + count + margin <= until)
    return found


def _usual(firsts: NDArray[np.int64], number: NDArray[np.int32], seconds: NDArray[np.float64]) -> int:
    """Of these parts, the one next to the middle of those that take about as long as most do."""
    least, most = np.quantile(seconds, USUAL)
    usual = firsts[(seconds >= least) & (seconds <= most)]
    if not len(usual):
        usual = firsts[[np.argsort(seconds)[len(seconds) // 2]]]
    return int(number[usual[np.argmin(np.abs(usual - np.median(firsts)))]])
