"""The program of a step on a grid, and what a run would be: the same kind of trace as training records."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from pipetrain.plan.cluster import Cluster
from pipetrain.plan.grid_cost import FLOAT_BYTES, Use, best_grid, elsewhere_bytes, uses
from pipetrain.plan.memory import Training
from pipetrain.plan.profile import Profile
from pipetrain.schemes.actions import Op
from pipetrain.schemes.arguments import checked_count
from pipetrain.schemes.grid import Grid, check_grid
from pipetrain.simulation.costs import between_steps_s
from pipetrain.simulation.data_parallel import COUNTED
from pipetrain.simulation.kernel import Kernel, varying
from pipetrain.simulation.simulated_trace import trace_of_devices
from pipetrain.simulation.steps import Send, StepProgram, StepSimulation, Task
from pipetrain.trace.trace import Trace

STEPS = 4  # of which the middle ones are alike


def simulate_grid(
    profile: Profile,
    devices: int,
    cluster: Cluster | None = None,
    grid: object = None,
    minibatches: int = STEPS,
    slowdown: float = 0.0,
    seed: int = 0,
    piece_s: float = 0.0,
) -> Trace:
    """Simulate the scheme ``grid`` of a profiled model.

    A device takes its share of a block's seconds: of the rows, and of the outputs of a divided layer, whose parts take
    what the profile's ``slices`` say, or their share where it has none.

    Args:
        profile: what the blocks cost for a whole minibatch.
        devices: how many there are.
        cluster: how they are joined. A link's latency is what a message takes beside its bytes.
        grid: as for ``PipelineModel``; by default the one that sends the least.
        minibatches: how many are trained.
        slowdown: how much the seconds vary: the standard deviation, as a part of the mean, of random factors
            (lognormal, with mean 1).
        seed: of these.
        piece_s: what a block's forward and its backward take on each device beside their computing.

    Raises ValueError for a grid of another number of devices, and for more devices than rows.
    """
    cluster = cluster or Cluster()
    chosen = chosen_grid(profile, devices, cluster, grid)
    checked_count("minibatches", minibatches, COUNTED, 8)
    kernel = Kernel(cluster, [varying(slowdown, seed)] * chosen.devices)
    program = _GridStep(profile, chosen, between_steps_s(profile, cluster), piece_s).program
    StepSimulation(kernel, [program] * minibatches).run()
    return trace_of_devices(kernel)


def chosen_grid(profile: Profile, devices: int, cluster: Cluster, grid: object = None) -> Grid:
    """The grid that is asked for, or the one that sends the least, with the layers that it divides."""
    if profile.network is None:
        raise ValueError(
            f"It is not known which layers can be divided. Received: a profile of {profile.model!r} without a network. "
            "Try profiling the model again."
        )
    if devices > profile.batch_size:
        raise ValueError(
            f"Every device has a row at least. Received: {devices} devices, batch_size={profile.batch_size}. "
            f"Try {profile.batch_size} devices."
        )
    checked = check_grid(grid, "grid")
    if not isinstance(checked, Grid):
        if devices == 1:
            return Grid(1, 1, ())
        return best_grid(profile.network, devices, profile.batch_size, cluster.slowest(devices))
    if checked.devices != devices:
        raise ValueError(
            f"A grid has a device in each of its places. Received: grid={tuple(checked)[:2]}, {devices} devices. "
            f"Try {checked.devices} devices."
        )
    if checked.layers is None:
        wide = tuple(layer.name for layer in profile.network.layers if layer.wide >= checked.outputs)
        return checked._replace(layers=wide)
    return checked


class GridEstimate(NamedTuple):
    """A grid, the seconds of a step, and what a device need not have of the whole model: other devices' parts."""

    grid: Grid
    step_s: float
    elsewhere_bytes: int


def estimated_grid(
    profile: Profile, devices: int, cluster: Cluster, training: Training, asked: Grid | None = None
) -> GridEstimate | None:
    """The grid that is asked for, or that of so many devices that sends the least; with the training's optimizer.

    None where it is not known which layers can be divided, and where none should be: that grid is an all-reduce.
    """
    if profile.network is None:
        return None
    grid = chosen_grid(profile, devices, cluster, asked)
    if grid.outputs == 1 and asked is None:
        return None
    elsewhere = elsewhere_bytes(profile.network, grid, grid.layers or (), training.slots, training.temporaries)
    return GridEstimate(grid, simulate_grid(profile, devices, cluster, grid).step_s, elsewhere)


class _GridStep:
    """A step as a program, whose tasks are in an order in which each device may do its own.

    A device does the first of its tasks whose messages have come: sums may come later than what follows them.

    Args:
        profile: what blocks take for a whole minibatch, with the model's network.
        grid: the devices, with the layers that they divide.
        pause_s: between two steps.
        piece_s: of each task beside its computing.
    """

    def __init__(self, profile: Profile, grid: Grid, pause_s: float, piece_s: float = 0.0) -> None:
        assert profile.network is not None  # asked before
        self._profile, self._grid, self._network, self._piece_s = profile, grid, profile.network, piece_s
        self._divided = {*(grid.layers or ())} if grid.outputs > 1 else set[str]()
        self._counts = grid.counts(profile.batch_size)
        self._uses = {use.value: use for use in uses(self._network, self._divided)}
        self.program = StepProgram(pause_s)
        self._made: dict[tuple[str, int, int], int] = {}  # a device's forward or backward of a block, by their numbers
        self._forward()
        self._backward()

    def _do(self, device: int, op: Op, seconds: float, awaits: Iterable[int]) -> int:
        return self.program.add(Task(device, op, seconds, priority=len(self.program.items)), awaits)

    def _seconds(self, number: int, device: int) -> tuple[float, float]:
        """What a device takes for its part of a block's forward and of its backward."""
        layer, block, rows = self._network.layers[number], self._profile.trained[number], self._profile.batch_size
        if layer.name not in self._divided:
            share, (forward_s, backward_s) = self._counts[device] / rows, (block.forward_s, block.backward_s)
        else:
            part, rank = divmod(device, self._grid.outputs)
            share = sum(self._counts[n] for n in self._grid.group(part)) / rows
            forward_s, backward_s = block.slice_s(layer.wide / len(self._grid.channels(layer.wide)[rank]))
        return self._piece_s + share * forward_s, self._piece_s + share * backward_s

    def _maker(self, value: int) -> int | None:
        layers = self._network.layers
        return next((n for n, layer in enumerate(layers) if value in layer.writes), None)

    def _group(self, device: int) -> Sequence[int]:
        return self._grid.group(device // self._grid.outputs)

    def _forward(self) -> None:
        there: dict[tuple[int, int, bool], list[int]] = {}  # a device's messages of a value, for all of it or its rows
        for number, layer in enumerate(self._network.layers):
            whole = layer.name in self._divided
            for device in range(self._grid.devices):
                awaits = []
                for value in layer.reads:
                    key = device, value, whole
                    if key not in there:
                        there[key] = list(self._gathers(value, device, whole))
                    awaits += there[key]
                forward_s, _ = self._seconds(number, device)
                self._made["F", number, device] = self._do(device, "F", forward_s, awaits)
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
                yield self.program.add(Send("F", source, sink, size), [self._made["F", maker, source]])

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
            layer = self._network.layers[number]
            scattered = [self._scatters(value) for value in layer.writes if value in self._network.trained]
            for device in range(self._grid.devices):
                awaits = [n for each in scattered for n in each.get(device, [])]
                if number == len(self._network.layers) - 1:
                    awaits += self._outputs[device]
                _, backward_s = self._seconds(number, device)
                self._made["B", number, device] = self._do(device, "B", backward_s, awaits)
            self._sum(number)

    def _scatters(self, value: int) -> dict[int, list[int]]:
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
                        found.setdefault(sink, []).append(self.program.add(Send("B", source, sink, size), awaits))
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
            arrived = self._reduced(number, devices, [FLOAT_BYTES * own * size for size in layer.messages])
            for device in devices:
                mine = arrived.get(device, [self._made["B", number, device]])
                self._do(device, "B", block.optimizer_s * own, mine)

    def _reduced(self, number: int, devices: Sequence[int], sizes: Sequence[float]) -> dict[int, list[int]]:
        """What each device awaits of the sums of a block's variables, each of which is a message of its own."""
        awaited: dict[int, list[int]] = {device: [self._made["B", number, device]] for device in devices}
        for size in sizes:
            for device, numbers in self._reduced_one(number, devices, size).items():
                awaited[device] += numbers
        return awaited

    def _reduced_one(self, number: int, devices: Sequence[int], size: float) -> dict[int, list[int]]:
        """Between two devices all of the other's gradient, among more a part of each, and then of the sums."""
        count, made = len(devices), {device: self._made["B", number, device] for device in devices}
        part = size if count == 2 else size / count
        add = self.program.add
        first: dict[int, list[int]] = {
            sink: [add(Send("R", source, sink, part), [made[source]]) for source in devices if source != sink]
            for sink in devices
        }
        if count <= 2:
            return first
        return {
            sink: [
                *first[sink],
                *(
                    add(Send("R", source, sink, part), [made[source], *first[source]])
                    for source in devices
                    if source != sink
                ),
            ]
            for sink in devices
        }
