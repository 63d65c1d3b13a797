"""The plans that need no measurement: no order at all, and one message for each layer."""

from __future__ import annotations

from pipetrain.schemes.transfers.plan import Phase, Plan
from pipetrain.schemes.transfers.workload import Workload, backward_order


def unordered(workload: Workload, serves: bool) -> Plan:
    """A message for each variable, whenever it is ready: the runtime's own order."""
    pulls = Phase(tuple(workload.pack([n]) for n in sorted(workload.owner)) if serves else (), 0)
    return Plan(pulls, Phase(tuple(workload.pack([n]) for n in backward_order(workload)), 0), name="none")


def layerwise(workload: Workload, serves: bool) -> Plan:
    """A message for each layer, weights in the order of the forward, gradients as the backward makes them."""
    packs = tuple(workload.pack(variables) for variables in workload.owned if variables)
    return Plan(Phase(packs if serves else ()), Phase(packs[::-1], 0), name="layer by layer")
