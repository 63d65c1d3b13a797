"""The order of transfers that is predicted to be the fastest, of all that there are."""

from __future__ import annotations

from dataclasses import replace

from pipetrain.schemes.transfers.orders import ORDERS, orders
from pipetrain.schemes.transfers.plan import Phase, Plan
from pipetrain.schemes.transfers.workload import Workload, pulled_s, pushed_s

AUTO = "auto"
WORTH = 0.97  # of a step in no order, at most what one in another order is to take
UNPROVEN = ("caramel",)  # which has been predicted to be faster than it was: see docs/benchmarks/data_parallel.md


def tried(serves: bool) -> list[str]:
    """The names of the orders among which it chooses."""
    return [name for name in orders(serves) if name not in UNPROVEN]


def auto(workload: Workload, serves: bool) -> Plan:
    """The plan whose step is predicted to end soonest; no order unless another promises 3 per cent."""
    plans = {name: ORDERS[name](workload, serves) for name in tried(serves)}
    seconds = {name: predicted_s(workload, plan) for name, plan in plans.items()}
    best = min(seconds, key=lambda name: seconds[name])
    return plans[best if seconds[best] < WORTH * seconds["none"] else "none"]


def predicted_s(workload: Workload, plan: Plan) -> float:
    """A step's seconds: the forward, which waits for what it pulls or for what is late, then the backward and pushes.

    One message is sent after another, on one link each way. Weights in no order are all there only when the last is,
    and messages in no order overlap but for their bytes.
    """
    forward = plan.pulls if plan.pulls.packs else plan.late
    return _forward_s(workload, forward) + pushed_s(_overlapping(workload, plan.pushes), plan.pushes.packs)


def _forward_s(workload: Workload, phase: Phase) -> float:
    if phase.window:
        return pulled_s(workload, phase.packs)
    message = _overlapping(workload, phase).message
    return sum(message.seconds(pack.size_bytes) for pack in phase.packs) + pulled_s(workload, ())


def _overlapping(workload: Workload, phase: Phase) -> Workload:
    return workload if phase.window else replace(workload, message=replace(workload.message, overhead_s=0.0))
