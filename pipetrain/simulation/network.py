"""The links of a cluster while transfers are under way: what each has to wait for, and when it arrives."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from pipetrain.plan.cluster import Cluster


class Route(NamedTuple):
    """The way from one device to another, and the media that a transfer has to itself while it lasts."""

    bandwidth_bytes_per_s: float
    latency_s: float
    media: tuple[int, ...]


class Network:
    """Transfers over shared media, each of which serves one at a time, first come, first served.

    A transfer begins when all its media are free, holds them for ``bytes / bandwidth``, and arrives ``latency`` later.
    Ask for transfers in the order of time.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._numbers: dict[Hashable, int] = {}
        self.free_at: list[float] = []

    def route(self, sender: int, receiver: int) -> Route:
        """The way between two devices: a link of their own, two ports, or a bus, as their level says."""
        levels = self._cluster.levels
        depth = self._cluster.depth(min(sender, receiver), max(sender, receiver))
        link = self._cluster.link(min(sender, receiver), max(sender, receiver))
        devices, contention = levels[depth].devices, levels[depth].contention
        if contention == "bus":
            media = [self.medium("bus", depth, 0 if devices == math.inf else sender // devices)]
        elif contention == "port":
            member = levels[depth - 1].devices if depth else 1
            media = [self.medium("out", depth, sender // member), self.medium("in", depth, receiver // member)]
        else:
            media = [self.medium("link", sender, receiver)]
        return Route(link.bandwidth_bytes_per_s, link.latency_s, tuple(media))

    def medium(self, *key: Hashable) -> int:
        """The number of the medium of this name; a new one's if there is none yet."""
        number = self._numbers.setdefault(key, len(self._numbers))
        if number == len(self.free_at):
            self.free_at.append(0.0)
        return number

    def send(self, route: Route, size_bytes: float, now: float) -> float:
        """Begin a transfer as soon as can be; returns when it arrives."""
        start_s = max(now, *(self.free_at[medium] for medium in route.media))
        end_s = start_s + size_bytes / route.bandwidth_bytes_per_s
        for medium in route.media:
            self.free_at[medium] = end_s
        return end_s + route.latency_s

    def reduce(self, devices: Sequence[int], size_bytes: float, now: float) -> float:
        """Sum as many bytes of each device in a ring; returns when all have the sums.

        In each of ``2 * (r-1)`` steps every device sends an r-th to the next. Without contention this takes
        ``Link.reduce_seconds``.
        """
        count = len(devices)
        ring = [self.route(devices[n], devices[(n + 1) % count]) for n in range(count)]
        step_s: Counter[int] = Counter()
        for route in ring:
            for medium in route.media:
                step_s[medium] += size_bytes / count / route.bandwidth_bytes_per_s  # type: ignore[assignment]
        start_s = max(now, *(self.free_at[medium] for medium in step_s))
        longest_s = max(step_s.values()) + max(route.latency_s for route in ring)
        end_s = start_s + 2 * (count - 1) * longest_s
        for medium in step_s:
            self.free_at[medium] = end_s
        return end_s
