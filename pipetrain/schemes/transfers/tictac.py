"""TicTac: the order in which weights are pulled, such that no layer waits for what others do not need yet.

Source: Hashemi, Jyothi, Campbell, *TicTac: Accelerating Distributed Deep Learning with Communication Scheduling*, SysML
2019 (arXiv 1803.03288), Algorithms 1 to 3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from pipetrain.schemes.transfers.plan import Phase, Plan, Workload, backward_order


class Properties(NamedTuple):
    """Algorithm 1, for each outstanding transfer r: its own seconds, and those of what it gives way to.

    ``M`` is what r itself takes. ``P`` are the seconds of the computations for which r is the only transfer that is
    outstanding: ``sum of time(op) for op.dep = {r}``. ``M_plus`` is the least that all transfers of a computation that
    needs r and others take: ``min of op.M for r in op.dep, |op.dep| > 1``.
    """

    M: float
    P: float
    M_plus: float


class Overlap(NamedTuple):
    """How far a step's transfers and its computing go on at the same time, on one device; sections 2 and 3.

    ``step_s`` is T. ``computing_s`` is C; ``sending_s``, N, are the seconds in which any message to or from the device
    is under way, ``received_s`` and ``sent_s`` those of either direction.
    """

    step_s: float
    computing_s: float
    sending_s: float
    received_s: float = 0.0
    sent_s: float = 0.0

    @property
    def rho(self) -> float:
        """``N / C``: what is sent takes longer than computing above 1."""
        return self.sending_s / self.computing_s if self.computing_s else math.inf

    @property
    def coefficient(self) -> float:
        """``alpha = (N + C - T) / min(N, C)``: 1: the shorter of the two is hidden, 0: nothing is.

        Below 0 where for some time nothing is computed and nothing under way; 1 where nothing is sent.
        """
        return _part(self.sending_s + self.computing_s - self.step_s, min(self.sending_s, self.computing_s))

    @property
    def computing_part(self) -> float:
        """``C / T = 1 / (1 + rho - alpha min(rho, 1))``: the part of the time in which the device computes."""
        return self.computing_s / self.step_s if self.step_s else 0.0

    @property
    def longest_s(self) -> float:
        """``U``: everything one after another."""
        return self.computing_s + self.received_s + self.sent_s

    @property
    def shortest_s(self) -> float:
        """``L``: the processor, or either direction of the link, is never idle; dependencies may not allow it."""
        return max(self.computing_s, self.received_s, self.sent_s)

    @property
    def efficiency(self) -> float:
        """Scheduling efficiency ``E = (U - T) / (U - L)``: 1 is the best that an order could give, 0 the worst."""
        return _part(self.longest_s - self.step_s, self.longest_s - self.shortest_s)

    @property
    def potential(self) -> float:
        """``S = (U - L) / L``: by how much the best order could be faster than the worst one."""
        return (self.longest_s - self.shortest_s) / self.shortest_s if self.shortest_s else 0.0


def _part(part_s: float, whole_s: float) -> float:
    return part_s / whole_s if whole_s else 1.0


def tic(workload: Workload, serves: bool) -> Plan:
    """Timing-Independent Communication (Algorithm 2): by ``priorities``."""
    rank = priorities(workload)
    return _in_order(workload, sorted(rank, key=lambda n: (rank[n], workload.owner[n], n)), serves, "tic")


def tac(workload: Workload, serves: bool) -> Plan:
    """Timing-Aware Communication (Algorithm 3): one after another, the transfer that Johnson's rule puts first.

    The printed comparator of two transfers, ``min(P_A, M_B) < min(P_B, M_A)``, is inverted: for M = (1, 10) and P =
    (10, 1) it gives 21 seconds where 12 are possible. Johnson's rule for two machines (1954) in its form of two sets is
    an order, which the comparator alone is not: first those with ``M <= P`` by increasing M, then the others by
    decreasing P. ``M_plus`` decides between equal ones, as printed, and then the order of the layers.
    """
    seconds = [workload.message.seconds(size) for size in workload.sizes_bytes]
    dependencies, left = _dependencies(workload), set(workload.owner)
    computed = [layer.forward_s for layer in workload.layers]
    order: list[int] = []
    while left:
        found = _properties(dependencies, left, seconds, computed)
        order.append(min(found, key=lambda n: (*_johnson(found[n]), found[n].M_plus, workload.owner[n], n)))
        left.remove(order[-1])
    return _in_order(workload, order, serves, "tac")


def priorities(workload: Workload) -> dict[int, int]:
    """TIC's priority of each variable, which the graph alone gives: how many have a smaller ``M_plus``.

    Every transfer counts 1 and every computation 0. A chain of n layers with one variable each has 0, 0, 2, ..., n-1.
    """
    count, none = [1.0] * len(workload.sizes_bytes), [0.0] * len(workload.layers)
    found = _properties(_dependencies(workload), set(workload.owner), count, none)
    return {n: sum(other.M_plus < each.M_plus for other in found.values()) for n, each in found.items()}


def _johnson(transfer: Properties) -> tuple[int, float]:
    return (0, transfer.M) if transfer.M <= transfer.P else (1, -transfer.P)


def _dependencies(workload: Workload) -> list[int]:
    """For each layer the variables that it needs, directly or not, as the bits of a number."""
    found: list[int] = []
    for layer in workload.layers:
        needed = sum(1 << n for n in set(layer.variables))
        for before in layer.after:
            needed |= found[before]
        found.append(needed)
    return found


def _properties(
    dependencies: Sequence[int], left: set[int], seconds: Sequence[float], computed: Sequence[float]
) -> dict[int, Properties]:
    """Algorithm 1 for the transfers that are left."""
    outstanding = sum(1 << n for n in left)
    alone, several = dict.fromkeys(left, 0.0), []
    for needed, takes_s in zip(dependencies, computed, strict=True):
        among = [n for n in left if needed >> n & 1] if (needed := needed & outstanding) else []
        if len(among) == 1:
            alone[among[0]] += takes_s
        elif among:
            several.append((sum(seconds[n] for n in among), among))
    least = dict.fromkeys(left, math.inf)
    for together, among in several:
        for n in among:
            least[n] = min(least[n], together)
    return {n: Properties(seconds[n], alone[n], least[n]) for n in left}


def _in_order(workload: Workload, order: Sequence[int], serves: bool, name: str) -> Plan:
    """A message for each variable: pulls in this order, pushes as the backward makes them."""
    pulls = tuple(workload.pack([n]) for n in order) if serves else ()
    pushes = tuple(workload.pack([n]) for n in backward_order(workload))
    return Plan(Phase(pulls), Phase(pushes, 0), name=name)
