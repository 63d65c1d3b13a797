"""How the replicas of a stage sum their gradients, in simulated time."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from pipetrain.schemes.splitting import reduction_bytes
from pipetrain.simulation.network import Network, Route
from pipetrain.simulation.stations import Due

REDUCTIONS = ("ring", "server")


class Ring:
    """All replicas wait for the last, then sum the gradients in a ring; each updates its own weights.

    Of the gradients only their bytes together are known: every replica is taken to sum an r-th of them. In training it
    sums whole variables, see ``splitting.shared_out``.

    Args:
        network: the links.
        stations: the numbers of the stage's replicas.
        devices: theirs.
        size_bytes: the gradients'.
    """

    def __init__(self, network: Network, stations: Sequence[int], devices: Sequence[int], size_bytes: int) -> None:
        self._network, self._stations, self._devices = network, stations, devices
        self._size_bytes, self._entered = size_bytes, 0
        replicas = len(devices)
        self.sent_bytes = [reduction_bytes(size_bytes, Fraction(size_bytes) / replicas, replicas)] * replicas

    def enter(self, station: int, now: float) -> Due:
        """The last one's coming sets the ring going."""
        self._entered += 1
        if self._entered < len(self._stations):
            return []
        self._entered = 0
        end_s = self._network.reduce(self._devices, self._size_bytes, now)
        return [(end_s, each) for each in self._stations]

    def updated(self, station: int, now: float) -> Due:
        """Nobody waits for it."""
        return []


class Server:
    """Each replica sends its gradients to the first one's device, which updates the weights and sends them back.

    Whatever the links, the server has one port, which takes in one transfer at a time and sends out one.
    """

    def __init__(self, network: Network, stations: Sequence[int], devices: Sequence[int], size_bytes: int) -> None:
        self._network, self._stations, self._size_bytes = network, stations, size_bytes
        self._entered, self._latest_s = 0, 0.0
        ways_in, ways_out = network.medium("server", "in", devices[0]), network.medium("server", "out", devices[0])
        self._in = {n: _through(network.route(d, devices[0]), ways_in) for n, d in _others(stations, devices)}
        self._out = {n: _through(network.route(devices[0], d), ways_out) for n, d in _others(stations, devices)}
        self.sent_bytes = [(len(devices) - 1) * size_bytes, *[size_bytes] * (len(devices) - 1)]

    def enter(self, station: int, now: float) -> Due:
        """The gradients go to the server; it has them when the last are there."""
        if station in self._in:
            now = self._network.send(self._in[station], self._size_bytes, now)
        self._entered, self._latest_s = self._entered + 1, max(self._latest_s, now)
        if self._entered < len(self._stations):
            return []
        self._entered = 0
        return [(self._latest_s, self._stations[0])]

    def updated(self, station: int, now: float) -> Due:
        """The server's weights go to the others."""
        if station in self._out:
            return []
        return [(self._network.send(route, self._size_bytes, now), n) for n, route in self._out.items()]


def _others(stations: Sequence[int], devices: Sequence[int]) -> list[tuple[int, int]]:
    return list(zip(stations, devices, strict=True))[1:]


def _through(route: Route, medium: int) -> Route:
    return route._replace(media=(*route.media, medium))
