"""CARAMEL: gradients of an all-reduce that hide behind this backward, and behind the next step's forward.

Source: Hashemi, Jyothi, Godfrey, Campbell, *Caramel: Accelerating Decentralized Distributed Deep Learning with
Computation Scheduling*, 2020 (arXiv 2004.14020): batching of small parameters, transfer boundaries that reach into the
next iteration, and chunks of large parameters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pipetrain.schemes.splitting import rows_of
from pipetrain.schemes.transfers.plan import (
    Message,
    Pack,
    Phase,
    Plan,
    Workload,
    backward_order,
    made_s,
    pulled_s,
    pushed_s,
)

SPARED = 0.8  # a message of twice the size takes more than this part of what two messages take
LARGEST = 4  # a chunk's bytes at least, in thresholds
CHUNKS = (1, 2, 4, 8)  # how many there may be of one variable: what suits best of these


def caramel(workload: Workload, late: bool = True) -> Plan:
    """Packs in the order in which backward makes them, each in the phase behind which it hides.

    Of the ways that are tried, the one whose step is predicted to end soonest: large variables in up to 1, 2, 4 or 8
    chunks; all in this backward; and, with ``late``, some packs in the next forward, see ``divided``.
    """
    ways: list[tuple[Sequence[Pack], Sequence[Pack]]] = []
    for packs in dict.fromkeys(tuple(packed(workload, most)) for most in CHUNKS):
        ways.append((packs, ()))
        if late:
            ways += [divided(workload, packs, overruns) for overruns in (False, True)]
    now, then = min(ways, key=lambda way: step_s(workload, *way))
    return Plan(Phase(), Phase(tuple(now), 0), Phase(tuple(then)), name="caramel")


def threshold_bytes(message: Message, spared: float = SPARED) -> float:
    """The size d* from which two messages are as good as one: ``f(2d)/(2 f(d)) > spared`` for ``f(d) = a + b d``.

    ``d* = a (2 spared - 1) / (2 b (1 - spared))``, which is 1.5 a/b for 0.8.
    """
    if not message.overhead_s:
        return 0.0
    if not message.s_per_byte:
        return math.inf
    return message.overhead_s * (2 * spared - 1) / (2 * message.s_per_byte * (1 - spared))


def packed(workload: Workload, most: int = CHUNKS[-1]) -> list[Pack]:
    """Packs of at least the threshold, and up to so many chunks of variables that are larger than several thresholds.

    In the order of the backward; the last pack, of what is left, may be smaller.
    """
    least, packs, waiting = threshold_bytes(workload.message), list[Pack](), list[int]()
    for n in backward_order(workload):
        size = workload.sizes_bytes[n]
        chunks = min(most, int(size / (LARGEST * least))) if least else 1
        if chunks > 1:
            packs += [Pack((n,), len(rows_of(size, k, chunks)), k, chunks) for k in range(chunks)]
            continue
        waiting.append(n)
        if (pack := workload.pack(waiting)).size_bytes >= least:
            packs.append(pack)
            waiting = []
    return [*packs, workload.pack(waiting)] if waiting else packs


def divided(workload: Workload, packs: Sequence[Pack], overruns: bool) -> tuple[list[Pack], list[Pack]]:
    """The packs that are sent in this backward, in their order, and those that are left to the next forward.

    Whenever the link is free, of the packs that are made the one goes that the next forward needs first: the earliest
    deadline first. What has not begun by the end of the backward goes in the next forward, in the order of need; so
    does what would not arrive before that end, unless one pack, or one variable's chunks, may overrun it. A variable's
    chunks go one after another and stay together, as it is updated when all have arrived.
    """
    made = made_s(workload)
    end_s, time_s = made[0] if made else 0.0, 0.0
    left, now = list(packs), list[Pack]()
    while left:
        ready = [pack for pack in left if made[workload.first(pack)] <= time_s]
        if not ready:
            time_s = min(made[workload.first(pack)] for pack in left)
            continue
        begun = {n for pack in now if pack.chunks > 1 for n in pack.variables}
        first = min(ready, key=lambda pack: (pack.variables[0] not in begun, workload.first(pack)))
        arrives_s = time_s + workload.message.seconds(first.size_bytes)
        goes_on = overruns and first.variables[0] in begun
        if (time_s >= end_s and not goes_on) or (arrives_s > end_s and not overruns):
            break
        now.append(first)
        left.remove(first)
        time_s = arrives_s
    late = {n for pack in left for n in pack.variables}
    left += [pack for pack in now if pack.variables[0] in late]
    return [pack for pack in now if pack not in left], sorted(left, key=workload.first)


def step_s(workload: Workload, now: Sequence[Pack], late: Sequence[Pack]) -> float:
    """A step's seconds: the forward, which waits for what is late, then the backward and what it sends."""
    return pulled_s(workload, late) + pushed_s(workload, now)
