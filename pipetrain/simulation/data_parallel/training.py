"""Training steps of data parallelism in simulated time, one after another, with all that their devices send."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from pipetrain.schemes.transfers.plan import Pack, Phase, Plan
from pipetrain.schemes.transfers.workload import Workload
from pipetrain.simulation.data_parallel.clock import Processors, SimulatedClock, SimulatedDevice
from pipetrain.simulation.data_parallel.exchange import Returning, Summing, beginning_with
from pipetrain.simulation.data_parallel.messages import Flow, Ports, SimulatedMessage
from pipetrain.simulation.data_parallel.setting import Setting
from pipetrain.simulation.data_parallel.worker import WorkerStep


class SimulatedTraining:
    """So many steps; a step begins when the one before has ended everywhere.

    A step updates each pack's variables where its sums are, when all of them have come. Weights that are returned
    are sent to all workers when they are updated; those of the first step are there when it begins. Gradients that are
    late are sent and updated at the beginning of the next step, before the forward of the layers that read the
    variables.

    Args:
        setting: the workers.
        plan: of the transfers.
        steps: how many.
        factor: gives by how much longer each piece of work takes.

    ``messages`` are those of all steps, in the order in which they left.
    """

    def __init__(self, setting: Setting, plan: Plan, steps: int, factor: Callable[[], float]) -> None:
        self._setting, self._plan, self._steps = setting, plan, steps
        self._clock, processors = SimulatedClock(), Processors(setting.cluster.processors)
        self.devices = [SimulatedDevice(self._clock, processors, factor) for _ in range(setting.workers)]
        self._ports = Ports(self._clock, setting, self.devices)
        self._pulls = setting.of_servers(plan.pulls)
        self._pushes = setting.of_servers(plan.pushes) if setting.serves else [plan.pushes]
        self._returned = setting.of_servers(plan.returned)
        self._made_after = [_by_first(phase, setting.workload) for phase in self._pushes]
        self._step = -1
        self._left = 0  # of the current step: layers to run backward, updates to make, weights and rows to arrive
        self._flows: list[Flow] = []

    def run(self) -> list[SimulatedMessage]:
        """All steps; the messages."""
        self._send_rows(range(1, self._setting.workers))
        self._clock.run()
        return [message for flow in self._flows for message in flow.messages]

    def _send_rows(self, workers: range) -> None:
        """The first step's rows, without which it does not begin."""
        if not self._setting.input_bytes or not workers:
            self._begin()
            return
        left = [*workers]

        def arrived() -> None:
            left.pop()
            if not left:
                self._begin()

        for worker in workers:
            self._ports.send(0, worker, self._setting.input_bytes, arrived)

    def _begin(self) -> None:
        setting, plan = self._setting, self._plan
        self._step += 1
        if self._step == self._steps:
            return
        late = plan.late if self._step else Phase()
        awaited = [pack for phase in self._pulls for pack in phase.packs] if setting.serves else late.packs
        sinks = [range(n, n + 1) for n in range(setting.servers)] if setting.serves else [range(setting.workers)]
        self._left = setting.workers * len(setting.workload.layers)
        self._left += sum(len(on) * len(phase.packs) for on, phase in zip(sinks, self._pushes, strict=True))
        if self._step + 1 < self._steps and setting.input_bytes > 0:
            self._left += setting.workers - 1
        self._left += sum(len(phase.packs) for phase in self._returned) * (setting.workers - 1)
        self._without_weights = setting.workers
        self._returns = [self._returning(*each) for each in enumerate(self._returned)] if plan.returned.packs else []
        pushes = [
            self._summing(phase, len(late.packs), self._updated, on)
            for on, phase in zip(sinks, self._pushes, strict=True)
        ]
        self._workers = [
            WorkerStep(setting.workload, device, self._step, awaited, partial(self._made, pushes, number), self._ready)
            for number, device in enumerate(self.devices)
        ]
        if setting.serves:
            self._pull()
        else:
            sums = self._summing(late, 0, self._updated_late, *sinks)
            for place, pack in enumerate(late.packs):
                for worker in range(setting.workers):
                    sums.offer(place, pack, worker)
        for each in self._workers:
            each.begin()

    def _ready(self) -> None:
        """A worker has all weights; when all workers have, the next step's rows are sent."""
        self._without_weights -= 1
        if not self._without_weights and self._step + 1 < self._steps and self._setting.input_bytes:
            for worker in range(1, self._setting.workers):
                self._ports.send(0, worker, self._setting.input_bytes, self._done)

    def _pull(self) -> None:
        """Every server sends its part of each pack to every worker, to each in the phase's order, itself first."""
        count = self._setting.workers
        flows = {
            (server, (server + turn) % count): self._flow(phase, 1, together=not phase.window)
            for turn in range(count)
            for server, phase in enumerate(self._pulls)
        }
        for place in range(max(len(phase.packs) for phase in self._pulls)):
            for (server, worker), flow in flows.items():
                for pack in self._pulls[server].packs[place : place + 1]:
                    there = self._workers[worker].there
                    if server == worker:
                        there(pack, [])
                        continue
                    message = SimulatedMessage("W", self._step, place, server, worker, pack.size_bytes)
                    flow.offer(place, message, partial(there, pack, [message]))

    def _flow(self, phase: Phase, expected: int, together: bool = False) -> Flow:
        self._flows.append(Flow(self._ports, phase, expected, together))
        return self._flows[-1]

    def _summing(
        self, phase: Phase, before: int, summed: Callable[[Pack, int, list[SimulatedMessage]], None], sinks: range
    ) -> Summing:
        return Summing(self._setting.workers, phase, self._step, before, self._flow, summed, sinks)

    def _made(self, pushes: Sequence[Summing], worker: int, layer: int) -> None:
        for n in beginning_with(worker, range(len(pushes))):
            for place, pack in self._made_after[n][layer]:
                pushes[n].offer(place, pack, worker)
        self._done()

    def _updated(self, pack: Pack, sink: int, messages: list[SimulatedMessage]) -> None:
        """The sums of a pack are there: update its variables."""

        def updated() -> None:
            if self._returns:
                self._returns[sink].updated(pack)
            self._done()

        seconds = self._update_s(pack) / (self._setting.parts if self._setting.serves else 1)
        self.devices[sink].do(seconds, "B", self._step, partial(self._used, messages, updated))

    def _returning(self, server: int, phase: Phase) -> Returning:
        """What a server returns to the other workers in this step."""
        before = len(self._pulls[server].packs)
        workers = [worker for worker in range(self._setting.workers) if worker != server]
        flows = {worker: self._flow(phase, 1) for worker in workers}

        def send(place: int, pack: Pack) -> None:
            for worker, flow in flows.items():
                message = SimulatedMessage("W", self._step, before + place, server, worker, pack.size_bytes)
                flow.offer(place, message, self._done)

        return Returning(phase, self._pushes[server], self._setting.at_once, send)

    def _updated_late(self, pack: Pack, sink: int, messages: list[SimulatedMessage]) -> None:
        """The sums of a late pack are there: update its variables, then its layers may run."""
        there = partial(self._workers[sink].there, pack, [])
        self.devices[sink].do(self._update_s(pack), "F", self._step, partial(self._used, messages, there))

    def _update_s(self, pack: Pack) -> float:
        return sum(self._setting.workload.update_s[n] for n in pack.variables) / pack.chunks

    @staticmethod
    def _used(messages: list[SimulatedMessage], then: Callable[[], None], start_s: float) -> None:
        for message in messages:
            message.used_s = start_s
        then()

    def _done(self) -> None:
        self._left -= 1
        if not self._left:
            self._clock.at(self._clock.now + self._setting.caller_s, self._begin)


def _by_first(phase: Phase, workload: Workload) -> list[list[tuple[int, Pack]]]:
    """For each layer the packs, with their places in the phase, that are complete when it has run backward."""
    found: list[list[tuple[int, Pack]]] = [[] for _ in workload.layers]
    for place, pack in enumerate(phase.packs):
        found[workload.first(pack)].append((place, pack))
    return found
