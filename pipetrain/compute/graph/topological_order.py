"""A topological order in which the smallest key comes first wherever several are possible."""

from __future__ import annotations

import graphlib
import heapq
from collections.abc import Iterator
from typing import Any


def sorted_topologically(needs: dict[Any, set[Any]]) -> Iterator[Any]:
    """The keys, each after those it needs, the smallest possible one first. Raises graphlib.CycleError."""
    sorter = graphlib.TopologicalSorter(needs)
    sorter.prepare()
    ready: list[Any] = []
    while sorter.is_active():
        for key in sorter.get_ready():
            heapq.heappush(ready, key)
        key = heapq.heappop(ready)
        yield key
        sorter.done(key)
