"""What the devices of a grid do in one step, and the messages between: who waits for what."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from pipetrain.plan.grid_cost import FLOAT_BYTES, Use, uses
from pipetrain.plan.profile import Profile
from pipetrain.schemes.actions import Op
from pipetrain.schemes.grid import Grid
from pipetrain.trace.records import What


@dataclass
class Send:
    """A message that leaves when all that it ``awaits`` is done: tasks' and other messages' numbers."""

    what: What
    source: int
    sink: int
    size_bytes: float
    awaits: list[int]


@dataclass
class Task:
    """A piece of a device's work, which begins when its messages have come and its earlier ones are done."""

    device: int
    op: Op
    seconds: float
    awaits: list[int] = field(default_factory=list)


class StepTasks:
    """The tasks and messages of a step, numbered together, in an order in which each device may do its own.

    Args:
        profile: what blocks take for a whole minibatch, with the model's network.
        grid: the devices.
        divided: the names of the layers whose outputs are divided.
    """

    def __init__(self, profile: Profile, grid: Grid, divided: Collection[str]) -> None:
        assert profile.network is not None  # asked before
        self._profile, self._grid, self._network = profile, grid, profile.network
        self._divided = set(divided) if grid.outputs > 1 else set()
        self._counts = grid.counts(profile.batch_size)
        self._uses = {use.value: use for use in uses(self._network, self._divided)}
        self.items: list[Task | Send] = []
        self._made: dict[tuple[str, int, int], int] = {}  # a device's forward or backward of a block, by their numbers
        self._summing: list[list[int]] = []
        self._forward()
        self._backward()

    def _add(self, item: Task | Send) -> int:
        self.items.append(item)
        return len(self.items) - 1

    def _share(self, block: int, device: int) -> float:
        """What of a block's work for the minibatch a device has."""
        layer, rows = self._network.layers[block], self._profile.batch_size
        if layer.name not in self._divided:
            return self._counts[device] / rows
        part, rank = divmod(device, self._grid.outputs)
        own = len(self._grid.channels(layer.wide)[rank]) / layer.wide
        return own * sum(self._counts[n] for n in self._grid.group(part)) / rows

    def _maker(self, value: int) -> int | None:
        layers = self._network.layers
        return next((n for n, layer in enumerate(layers) if value in layer.writes), None)

    def _group(self, device: int) -> Sequence[int]:
        return self._grid.group(device // self._grid.outputs)

    def _forward(self) -> None:
        there: dict[tuple[int, int, bool], list[int]] = {}  # a device's messages of a value, for all of it or its rows
        for number, (block, layer) in enumerate(zip(self._profile.trained, self._network.layers, strict=True)):
            whole = layer.name in self._divided
            for device in range(self._grid.devices):
                awaits = []
                for value in layer.reads:
                    key = device, value, whole
                    if key not in there:
                        there[key] = list(self._gathers(value, device, whole))
                    awaits += there[key]
                seconds = block.seconds.forward_s * self._share(number, device)
                self._made["F", number, device] = self._add(Task(device, "F", seconds, awaits))
        for value in self._network.outputs:
            for device in range(self._grid.devices):
                if (device, value, False) not in there:
                    there[device, value, False] = list(self._gathers(value, device, False))
        self._outputs = {
            device: [n for value in self._network.outputs for n in there[device, value, False]]
            for device in range(self._grid.devices)
        }

    def _gathers(self, value: int, sink: int, whole: bool) -> Iterator[int]:
        """What a device is sent of a value."""
        maker, use = self._maker(value), self._uses[value]
        if maker is None or not (whole or use.by_channels):
            return
        for source in self._group(sink):
            size = self._size(use, source, sink, whole)
            if source != sink and size:
                yield self._add(Send("F", source, sink, size, [self._made["F", maker, source]]))

    def _size(self, use: Use, source: int, sink: int, whole: bool) -> float:
        """The bytes of a value's part on its way from who made it to who reads it."""
        of_row = FLOAT_BYTES * self._network.elements[use.value]
        if not use.by_channels:
            return of_row * self._counts[source]
        own = len(self._grid.channels(use.by_channels)[source % self._grid.outputs]) / use.by_channels
        rows = sum(self._counts[n] for n in self._group(sink)) if whole else self._counts[sink]
        return of_row * own * rows

    def _backward(self) -> None:
        for number in reversed(range(len(self._network.layers))):
            block, layer = self._profile.trained[number], self._network.layers[number]
            scattered = [self._scatters(value, number) for value in layer.writes if value in self._network.trained]
            for device in range(self._grid.devices):
                awaits = [n for each in scattered for n in each.get(device, [])]
                if number == len(self._network.layers) - 1:
                    awaits += self._outputs[device]
                seconds = block.seconds.backward_s * self._share(number, device)
                self._made["B", number, device] = self._add(Task(device, "B", seconds, awaits))
            self._sum(number)

    def _scatters(self, value: int, maker: int) -> dict[int, list[int]]:
        """The gradients' parts that each device is sent."""
        use, found = self._uses[value], dict[int, list[int]]()
        readers = [n for n, layer in enumerate(self._network.layers) if value in layer.reads]
        for whole in (True, False):
            of = [n for n in readers if (self._network.layers[n].name in self._divided) == whole]
            if not (of or (value in self._network.outputs and not whole)) or not (whole or use.by_channels):
                continue
            for source in range(self._grid.devices):
                awaits = [self._made["B", n, source] for n in of] or self._outputs[source]
                for sink in self._group(source):
                    size = self._size(use, sink, source, whole)
                    if source != sink and size:
                        found.setdefault(sink, []).append(self._add(Send("B", source, sink, size, awaits)))
        return found

    def _sum(self, number: int) -> None:
        """Sum a block's gradients over the devices that have its weights, and update them."""
        layer, block = self._network.layers[number], self._profile.trained[number]
        if not layer.weights:
            return
        divided = layer.name in self._divided
        groups = [self._grid.batch_group(rank) for rank in range(self._grid.outputs)]
        for rank, devices in enumerate(groups if divided else [range(self._grid.devices)]):
            own = len(self._grid.channels(layer.wide)[rank]) / layer.wide if divided else 1.0
            arrived = self._reduced(number, devices, FLOAT_BYTES * layer.weights * own)
            for device in devices:
                mine = arrived.get(device, [self._made["B", number, device]])
                self._add(Task(device, "B", block.seconds.update_s * own, mine))

    def _reduced(self, number: int, devices: Sequence[int], size: float) -> dict[int, list[int]]:
        """What each device awaits of the sums: between two all of the other's, among more a part of each, summed."""
        count, made = len(devices), {device: self._made["B", number, device] for device in devices}
        part = size if count == 2 else size / count
        first: dict[int, list[int]] = {
            sink: [self._add(Send("R", source, sink, part, [made[source]])) for source in devices if source != sink]
            for sink in devices
        }
        if count <= 2:
            return {device: [made[device], *first[device]] for device in devices}
        return {
            sink: [
                made[sink],
                *first[sink],
                *(
                    self._add(Send("R", source, sink, part, [made[source], *first[source]]))
                    for source in devices
                    if source != sink
                ),
            ]
            for sink in devices
        }
