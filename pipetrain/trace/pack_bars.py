"""Messages of a plan of transfers in a timeline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipetrain.pictures.figure import BLUE, ORANGE, PURPLE, SKY, VERMILION, Line2D, Patch
from pipetrain.trace.idle import PackTimes, packs
from pipetrain.trace.trace import Trace

# What is told apart by colour is told apart by hatching too.
LOOKS: dict[str, dict[str, Any]] = {
    "F": {"facecolor": SKY, "hatch": ""},
    "B": {"facecolor": ORANGE, "hatch": ""},
    "W": {"facecolor": PURPLE, "hatch": ""},
    "R": {"facecolor": BLUE, "hatch": ""},
    "inverted": {"facecolor": VERMILION, "hatch": "xxxx"},
}
LABELS = {
    "F": "activations on their way",
    "B": "their gradients on the way back",
    "W": "weights on their way",
    "R": "gradients on their way",
    "inverted": "after one behind it in the plan",
}
USED: dict[str, Any] = {"color": "black", "marker": 7, "linestyle": "", "markersize": 4}
LANES = 4  # of a row: messages that are under way at once
LEGIBLE = 0.012  # of the figure's width: a bar that has room for its number


def receiver(place: tuple[int, int]) -> str:
    """The name of who gets messages."""
    return f"replica {place[1]}"


def draw(axes: Any, trace: Trace, rows: Mapping[int, int], start_s: float, end_s: float) -> list[Any]:
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
        _bar(axes, each, at, look, start_s, end_s)
        if each.used_s > each.arrived_s and each.used_s < end_s:
            used = True
            axes.plot([(each.used_s - start_s) * 1e3], [at], zorder=5, **USED)
    handles = [
        Patch(**LOOKS[look], edgecolor="white", linewidth=0, label=LABELS[look]) for look in LOOKS if look in seen
    ]
    return [*handles, *([Line2D([], [], label="first used", **USED)] if used else [])]


def _bar(axes: Any, message: PackTimes, at: float, look: str, start_s: float, end_s: float) -> None:
    left_s, right_s = max(message.sent_s, start_s), min(message.arrived_s, end_s)
    height = 0.8 / LANES
    style = {**LOOKS[look], "edgecolor": "white", "linewidth": 0.4}
    axes.barh(at, (right_s - left_s) * 1e3, left=(left_s - start_s) * 1e3, height=height, zorder=2, **style)
    if right_s - left_s > LEGIBLE * (end_s - start_s):
        middle_ms = ((left_s + right_s) / 2 - start_s) * 1e3
        axes.text(middle_ms, at, str(message.pack), fontsize=6, ha="center", va="center", color="white", zorder=4)
