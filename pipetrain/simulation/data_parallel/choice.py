"""The simplest order of transfers whose simulated step is about the shortest, and those that may be as fast."""

from __future__ import annotations

from pipetrain.schemes.transfers.orders import ORDERS, orders
from pipetrain.schemes.transfers.plan import Plan
from pipetrain.simulation.data_parallel.setting import Setting
from pipetrain.simulation.data_parallel.simulator import simulate_plan

WORTH = 0.97  # of a step in an order, at most what one in a less simple order is to take
NEAR = 1.1  # of the shortest simulated step: one that takes so long at most may be the shortest when it is measured
STEPS = 4  # of which the middle ones are alike


def auto(setting: Setting) -> Plan:
    """The plan of the simplest order, beginning with none, whose simulated step is within 3 per cent of the shortest.

    ``ORDERS`` has the simplest first.
    """
    return next(plan for plan, part in near(setting).items() if WORTH * part <= 1)


def near(setting: Setting) -> dict[Plan, float]:
    """The plans of all orders whose simulated step is within 10 per cent of the shortest, the simplest first.

    With each, how many times as long as the shortest it is simulated to take. Where nothing takes time, the first.
    """
    plans = [ORDERS[name](setting.workload, setting.serves) for name in orders(setting.serves)]
    seconds = [simulate_plan(setting, plan, STEPS).step_s for plan in plans]
    least_s = min(seconds)
    if not least_s:
        return {plans[0]: 1.0}
    parts = {plan: each_s / least_s for plan, each_s in zip(plans, seconds, strict=True)}
    return {plan: part for plan, part in parts.items() if part <= NEAR}
