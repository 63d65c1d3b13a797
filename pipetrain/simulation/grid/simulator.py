"""What a run on a grid would be: the same kind of trace as training records."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

from pipetrain.plan.cluster import Cluster
from pipetrain.plan.grid_cost import best_grid
from pipetrain.plan.profile import Profile
from pipetrain.schemes.arguments import checked_count
from pipetrain.schemes.grid import Grid, check_grid
from pipetrain.schemes.transfers.workload import Workload
from pipetrain.simulation.data_parallel.clock import Processors, SimulatedClock, SimulatedDevice, varying
from pipetrain.simulation.data_parallel.messages import Ports, SimulatedMessage
from pipetrain.simulation.data_parallel.setting import COUNTED, Setting
from pipetrain.simulation.data_parallel.simulator import spans_of, transfers_of
from pipetrain.simulation.grid.tasks import Send, StepTasks, Task
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
) -> Trace:
    """Simulate the scheme ``grid`` of a profiled model.

    A device takes its share of a block's seconds: of the rows, and of the outputs of a divided layer.

    Args:
        profile: what the blocks cost for a whole minibatch.
        devices: how many there are.
        cluster: how they are joined. A link's latency is what a message takes beside its bytes.
        grid: as for ``PipelineModel``; by default the one that sends the least.
        minibatches: how many are trained.
        slowdown: how much the seconds vary: the standard deviation, as a part of the mean, of random factors
            (lognormal, with mean 1).
        seed: of these.

    Raises ValueError for a grid of another number of devices, and for more devices than rows.
    """
    cluster = cluster or Cluster()
    chosen = chosen_grid(profile, devices, cluster, grid)
    checked_count("minibatches", minibatches, COUNTED, 8)
    training = GridTraining(profile, chosen, cluster, minibatches, varying(slowdown, seed))
    training.run()
    return Trace.of(spans_of(training.devices), transfers_of(training.messages))


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


class GridTraining:
    """So many steps; a step begins when the one before has ended everywhere.

    Args:
        profile: what blocks take.
        grid: the devices, with the layers that they divide.
        cluster: how they are joined.
        steps: how many.
        factor: gives by how much longer each piece of work takes.

    ``messages`` are those of all steps, in the order in which they left.
    """

    def __init__(self, profile: Profile, grid: Grid, cluster: Cluster, steps: int, factor: Callable[[], float]) -> None:
        self._clock, processors = SimulatedClock(), Processors(cluster.processors)
        setting = Setting(Workload((), ()), grid.devices, False, cluster)
        self.devices = [SimulatedDevice(self._clock, processors, factor) for _ in range(grid.devices)]
        self._ports, self._steps = Ports(self._clock, setting, self.devices), steps
        self._caller_s = profile.metric_s + cluster.overhead_s
        self._items = StepTasks(profile, grid, grid.layers or ()).items
        self._after: list[list[int]] = [[] for _ in self._items]
        for number, item in enumerate(self._items):
            for awaited in item.awaits:
                self._after[awaited].append(number)
        self.messages: list[SimulatedMessage] = []
        self._step = -1

    def run(self) -> None:
        """All steps."""
        self._begin()
        self._clock.run()

    def _begin(self) -> None:
        self._step += 1
        if self._step == self._steps:
            return
        self._left, self._missing = len(self._items), [len(item.awaits) for item in self._items]
        self._queues: list[deque[int]] = [deque() for _ in self.devices]
        for number, item in enumerate(self._items):
            if isinstance(item, Task):
                self._queues[item.device].append(number)
        self._busy = [False] * len(self.devices)
        for device in range(len(self.devices)):
            self._next(device)

    def _next(self, device: int) -> None:
        """The first of a device's tasks that may begin: sums may come later than what follows them."""
        queue = self._queues[device]
        ready = next((n for n in queue if not self._missing[n]), None)
        if self._busy[device] or ready is None:
            return
        queue.remove(ready)
        self._busy[device] = True
        task = self._items[ready]
        assert isinstance(task, Task)
        self.devices[device].do(task.seconds, task.op, self._step, partial(self._ended, ready, device))

    def _ended(self, number: int, device: int, start_s: float) -> None:
        self._busy[device] = False
        self._done(number)
        self._next(device)

    def _done(self, number: int) -> None:
        self._left -= 1
        for after in self._after[number]:
            self._missing[after] -= 1
            item = self._items[after]
            if self._missing[after]:
                continue
            if isinstance(item, Send):
                self._send(after, item)
            else:
                self._next(item.device)
        if not self._left:
            self._clock.at(self._clock.now + self._caller_s, self._begin)

    def _send(self, number: int, item: Send) -> None:
        message = SimulatedMessage(item.what, self._step, 0, item.source, item.sink, item.size_bytes)
        message.left_s = self._clock.now
        self.messages.append(message)
        self._ports.send(item.source, item.sink, item.size_bytes, partial(self._arrived, number, message))

    def _arrived(self, number: int, message: SimulatedMessage) -> None:
        message.arrived_s = message.used_s = self._clock.now
        self._done(number)
