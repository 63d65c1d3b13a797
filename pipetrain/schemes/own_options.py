"""The options that some schemes alone have, by name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from pipetrain.schemes.grid import check_grid
from pipetrain.schemes.scheme import Scheme
from pipetrain.schemes.table import GRID, SERVING, TRANSFERRING
from pipetrain.schemes.transfers.orders import check_order, check_servers


class Own(NamedTuple):
    """The names of the schemes that have an option, and what refuses a value for a scheme, by its name."""

    schemes: Collection[str]
    check: Callable[[Any, str], object]


OWN = {
    "grid": Own((GRID,), check_grid),
    "order": Own(TRANSFERRING, check_order),
    "servers": Own((SERVING,), check_servers),
}


def check_own(given: Mapping[str, Any], schemes: Sequence[str | Scheme]) -> None:
    """Refuse what is given, and not None, of these options where none of several schemes has it."""
    for name, (having, check) in OWN.items():
        if given.get(name) is not None and not any(scheme in [*having] for scheme in schemes):
            first = schemes[0]
            check(given[name], first.name if isinstance(first, Scheme) else first)
