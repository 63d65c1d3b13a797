"""The table of orders of transfers by their names."""

from __future__ import annotations

from collections.abc import Callable

from pipetrain.schemes.transfers import caramel, ibatch, layerwise, tictac
from pipetrain.schemes.transfers.plan import Plan
from pipetrain.schemes.transfers.workload import Workload

ORDERS: dict[str, Callable[[Workload, bool], Plan]] = {
    "none": layerwise.unordered,
    "layerwise": layerwise.layerwise,
    "tic": tictac.tic,
    "tac": tictac.tac,
    "ibatch": ibatch.ibatch,
    "caramel": lambda workload, serves: caramel.caramel(workload),
}
MEASURED = ("tac", "ibatch", "caramel")  # which need to know what layers and messages take


def orders(serves: bool) -> list[str]:
    """The names of the orders for a parameter server, or for an all-reduce."""
    return [name for name in ORDERS if not (serves and name == "caramel")]
