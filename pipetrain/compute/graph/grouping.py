"""Which layer calls no cut can separate."""

from __future__ import annotations

import graphlib
from collections.abc import Container, Sequence

from pipetrain.compute.graph.segment import Call
from pipetrain.compute.graph.sharing import state_variables
from pipetrain.compute.graph.topological_order import sorted_topologically


def grouped(calls: Sequence[Call], composite: Container[int]) -> list[list[Call]]:
    """The calls as blocks in running order.

    Calls that share state (BatchNorm's statistics) are in one block with all calls between them, and so are those that
    make and read a ``composite`` value. Weights may be shared by calls in different blocks.
    """
    owner = _DisjointSets(len(calls))
    users: dict[int, int] = {}
    makers = {value: index for index, call in enumerate(calls) for value in call.writes}
    for index, call in enumerate(calls):
        for variable in state_variables(call.operation):
            owner.join(users.setdefault(id(variable), index), index)
        for value in call.reads:
            if value in makers and value in composite:
                owner.join(makers[value], index)
    while True:
        needs: dict[int, set[int]] = {owner.of(index): set() for index in range(len(calls))}
        for index, call in enumerate(calls):
            made_by = {owner.of(makers[value]) for value in call.reads if value in makers}
            needs[owner.of(index)] |= made_by - {owner.of(index)}
        try:
            order = list(sorted_topologically(needs))
        except graphlib.CycleError as error:  # what runs between two calls of a group belongs to it
            for member in error.args[1]:
                owner.join(error.args[1][0], member)
            continue
        members: dict[int, list[Call]] = {group: [] for group in order}
        for index, call in enumerate(calls):
            members[owner.of(index)].append(call)
        return list(members.values())


class _DisjointSets:
    """Disjoint sets of the numbers below ``count``, each known by its smallest member."""

    def __init__(self, count: int) -> None:
        self._parent = list(range(count))

    def of(self, member: int) -> int:
        while self._parent[member] != member:
            self._parent[member] = member = self._parent[self._parent[member]]
        return member

    def join(self, one: int, other: int) -> None:
        low, high = sorted((self.of(one), self.of(other)))
        self._parent[high] = low
