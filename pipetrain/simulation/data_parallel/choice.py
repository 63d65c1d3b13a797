"""The order of transfers whose simulated step is the shortest, of all that there are."""

from __future__ import annotations

from pipetrain.schemes.transfers.orders import ORDERS, orders
from pipetrain.schemes.transfers.plan import Plan
from pipetrain.simulation.data_parallel.setting import Setting
from pipetrain.simulation.data_parallel.simulator import simulate_plan

WORTH = 0.97  # of a step in no order, at most what one in another order is to take
STEPS = 4  # of which the middle ones are alike
UNPROVEN = ("caramel",)  # which has been predicted to be faster than it was: see docs/benchmarks/data_parallel.md


def tried(serves: bool) -> list[str]:
    """The names of the orders among which it chooses."""
    return [name for name in orders(serves) if name not in UNPROVEN]


def auto(setting: Setting) -> Plan:
    """The plan whose simulated step is the shortest; no order unless another promises 3 per cent."""
    plans = {name: ORDERS[name](setting.workload, setting.serves) for name in tried(setting.serves)}
    seconds = {name: simulate_plan(setting, plan, STEPS).step_s for name, plan in plans.items()}
    best = min(seconds, key=lambda name: seconds[name])
    return plans[best if seconds[best] < WORTH * seconds["none"] else "none"]
