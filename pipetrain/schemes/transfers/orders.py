"""The table of orders of transfers by their names, and the plans that need no measurement."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pipetrain.schemes.arguments import checked_count
from pipetrain.schemes.table import SERVING, TRANSFERRING
from pipetrain.schemes.transfers import caramel, ibatch, tictac
from pipetrain.schemes.transfers.plan import Phase, Plan, Workload, backward_order


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


AUTO = "auto"  # the simplest of these that is about the fastest

# The simplest first: one that leaves all to the runtime, one that waits for no acknowledgement, and the others.
ORDERS: dict[str, Callable[[Workload, bool], Plan]] = {
    "none": unordered,
    "push-pull": lambda workload, serves: push_pull(workload),
    "layerwise": layerwise,
    "tic": tictac.tic,
    "tac": tictac.tac,
    "ibatch": ibatch.ibatch,
    "caramel": lambda workload, serves: caramel.caramel(workload),
}
SERVED, SUMMED = ("push-pull",), ("caramel",)  # orders that only a parameter server has, or only an all-reduce
ONE_BY_ONE = ("none", "tic", "tac")  # whose messages have one variable each, the others' a layer's, or several layers'
MEASURED = ("tac", "ibatch", "caramel")  # which need to know what layers and messages take


def orders(serves: bool) -> list[str]:
    """The names of the orders for a parameter server, or for an all-reduce."""
    return [name for name in ORDERS if name not in (SUMMED if serves else SERVED)]


def check_order(order: Any, scheme: str) -> None:
    """Raise ValueError for an order that there is not, or of a scheme that has none to order; None is the default."""
    if order is None:
        return
    if scheme not in TRANSFERRING:
        raise ValueError(
            f"Only {' and '.join(TRANSFERRING)} order their transfers. Received: order={order!r}, scheme={scheme!r}. "
            "Try leaving it out."
        )
    names = [AUTO, *orders(serves=scheme == SERVING)]
    if isinstance(order, str) and order not in names:
        raise ValueError(
            f"Unknown order of transfers. Received: order={order!r}, scheme={scheme!r}. "
            f"Try one of: {', '.join(names)}; or a Plan of your own."
        )


def check_servers(servers: Any, scheme: str) -> None:
    """Raise ValueError for servers that are no number from 1 up, or of a scheme that has none; None is the default."""
    if servers is None:
        return
    if scheme != SERVING:
        raise ValueError(
            f"Only the scheme {SERVING!r} has servers. Received: servers={servers!r}, scheme={scheme!r}. "
            "Try leaving it out."
        )
    checked_count("servers", servers, "Weights are on one server or more", 1)
