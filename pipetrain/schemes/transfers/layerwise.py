"""The plans that need no measurement: no order at all, and one message for each layer, pulled or returned."""

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


def push_pull(workload: Workload) -> Plan:
    """A message for each layer, as the backward makes gradients; weights are returned as soon as they are updated.

    Both ways of a link are then used at once, and weights hide behind the backward. The last that are returned are
    those that the next forward needs first.

    Source of returning weights that were not asked for: Jayarajan et al., *Priority-based Parameter Propagation for
    Distributed DNN Training*, SysML 2019 (arXiv 1905.03960), whose slices and priorities this plan does not have.
    """
    pushes = layerwise(workload, serves=True).pushes
    return Plan(Phase(), pushes, name="push-pull", returned=pushes)
