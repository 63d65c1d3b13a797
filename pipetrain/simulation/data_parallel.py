"""Training steps of data parallelism as programs, and what a simulation of them is told."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from pipetrain.plan.cluster import Cluster
from pipetrain.schemes.arguments import checked_count
from pipetrain.schemes.synchrony import RING, Gossip, joined_after
from pipetrain.schemes.transfers.plan import Pack, Phase, Plan, Workload, check_plan
from pipetrain.simulation.kernel import Kernel, varying
from pipetrain.simulation.simulated_trace import trace_of_devices
from pipetrain.simulation.steps import Acknowledgement, Join, Send, StepProgram, StepSimulation, Task
from pipetrain.trace.trace import Trace

ALONE = Plan(Phase(), Phase())  # of a step in which nothing is sent
COUNTED = "Data parallelism has whole numbers from 1 up"


@dataclass(frozen=True)
class Setting:
    """Workers that compute the same workload, each of its own rows, on devices 0, 1, ... of a cluster.

    Args:
        workload: what one worker computes of its rows, and the model's variables.
        workers: how many there are.
        serves: whether the weights are on servers, else on every worker.
        cluster: how devices are joined, and how many work at once. A link's latency is what a message takes beside its
            bytes, the runtime's part included, and what an acknowledgement takes at least.
        caller_s: seconds between the end of a step and the next one's beginning.
        servers: devices that have the weights, from the first one on; they are workers too.
        whole: whether each layer's variables are on one server, as in training, else an equal part of it on every one.
        input_bytes: of each worker's rows, which the first device sends to the others while they compute the rows
            before, from when all have the weights that their forward reads.
        at_once: whether no variable is updated before all gradients are there, as where their common norm is clipped.
        gradient_bytes: of every variable's gradient where it is compressed: every worker then sends its own to all
            that need the sum. None: gradients are as large as the variables.
        join_steps: of workers that update weights of their own, the steps after which they send the same weights again;
            the updates of the steps between are left out. 1: all in every step.
        fragments: the variables of each fragment of the weights that they then send at one step, see ``LocalSGD``;
            none: all at once.
        topology: of workers that sum gradients: ``RING``, or ``Gossip``, whose workers send weights to their
            neighbours alone; None: each sends to all others.
        is_stale: whether gradients are sent and applied while the next step computes, by the weights before; or, of
            workers that update weights of their own, what is due in a step is.

    Raises ValueError for counts below 1, more servers than workers, and times and sizes that are negative or infinite.
    """

    workload: Workload
    workers: int
    serves: bool
    cluster: Cluster
    caller_s: float = 0.0
    servers: int = 1
    whole: bool = False
    input_bytes: int = 0
    at_once: bool = False
    gradient_bytes: tuple[int, ...] | None = None
    join_steps: int = 1
    fragments: tuple[tuple[int, ...], ...] = ()
    topology: Gossip | str | None = None
    is_stale: bool = False

    def __post_init__(self) -> None:
        for name in ("workers", "servers", "join_steps"):
            checked_count(name, getattr(self, name), COUNTED, 2)
        if self.servers > self.workers:
            raise ValueError(
                f"Servers are workers too. Received: servers={self.servers}, workers={self.workers}. "
                f"Try servers={self.workers}."
            )
        for name in ("caller_s", "input_bytes"):
            _check_number(name, getattr(self, name))

    @property
    def parts(self) -> int:
        """Into how many parts, each on a server, every variable is divided."""
        return 1 if self.whole else self.servers

    def of_servers(self, phase: Phase) -> list[Phase]:
        """What of a phase's packs each server sends or gets."""
        if self.whole:
            return [phase.of(each, self.workload.sizes_bytes) for each in self.workload.on_servers(self.servers)]
        packs = tuple(pack._replace(size_bytes=-(-pack.size_bytes // self.parts)) for pack in phase.packs)
        return [phase._replace(packs=packs)] * self.servers

    def joining(self, *fragment: tuple[int, ...]) -> Setting:
        """The same workers, who join this fragment of their weights in every step; without one all of them."""
        return replace(self, join_steps=1, fragments=fragment)

    def joined_after(self, made: int) -> int | None:
        """The fragment that is sent in the step with which so many have been made; None where none is."""
        return joined_after(made - self.is_stale, self.join_steps, max(1, len(self.fragments)))

    def sent(self, plan: Plan, fragment: int | None) -> Plan:
        """What is sent of a plan in a step that joins this fragment, or none."""
        if fragment is None:
            return ALONE
        if not self.fragments:
            return plan
        return plan._replace(pushes=plan.pushes.of({*self.fragments[fragment]}, self.workload.sizes_bytes))

    @property
    def joined_bytes(self) -> int:
        """The bytes of the weights that are joined at one step, at most."""
        sizes = self.workload.sizes_bytes
        return max((sum(sizes[n] for n in each) for each in self.fragments), default=sum(sizes))

    def pushed_bytes(self, pack: Pack) -> float:
        """The bytes of a worker's gradients of a pack, as it sends them."""
        if self.gradient_bytes is None:
            return pack.size_bytes
        return sum(self.gradient_bytes[n] for n in pack.variables) / pack.chunks / self.parts


def _check_number(name: str, value: Any) -> None:
    if not 0 <= value < math.inf:
        raise ValueError(f"A number from 0 up is needed. Received: {name}={value!r}. Try {name}=0.")


def simulate_plan(setting: Setting, plan: Plan, minibatches: int = 8, slowdown: float = 0.0, seed: int = 0) -> Trace:
    """Simulate so many steps of data parallelism whose transfers this plan orders.

    The spans of a worker are the pieces of its forward, ``F``, and of its backward and updates, ``B``, that it does
    without a pause; where it waits between them for weights or sums, there is a pause. ``W`` are messages of weights,
    ``R`` of gradients, each from when it leaves.

    Args:
        setting: the workers, how they are joined, and what they compute.
        plan: of the transfers.
        minibatches: how many are trained.
        slowdown: how much the seconds of layers and updates vary: the standard deviation, as a part of the mean, of
            random factors (lognormal, with mean 1).
        seed: of these.

    Raises ValueError for a plan that does not move every variable once each way, and for counts below 1.
    """
    check_plan(plan, setting.workload.sizes_bytes, setting.serves)
    plan = plan.returning.in_time(plan.late_variables) if setting.is_stale else plan
    checked_count("minibatches", minibatches, COUNTED, 8)
    kernel = Kernel(setting.cluster, [varying(slowdown, seed)] * setting.workers)
    programs, before = programs_of(setting, plan, minibatches), _first_rows(setting)
    StepSimulation(kernel, [*before, *programs], -len(before)).run()
    return trace_of_devices(kernel, period=setting.join_steps if minibatches >= setting.join_steps else 1)


def programs_of(setting: Setting, plan: Plan, steps: int) -> list[StepProgram]:
    """Of each step: the first one has nothing late of another before, the last one sends no rows for another."""
    made: dict[tuple[bool, bool, int | None], StepProgram] = {}
    programs = []
    for step in range(steps):
        has_late, has_next = (
            step > 0 and (setting.is_stale or bool(plan.late.packs)),
            step + 1 < steps and setting.input_bytes > 0,
        )
        key = has_late, has_next, setting.joined_after(step + 1)
        if key not in made:
            made[key] = _ExchangeStep(setting, setting.sent(plan, key[2]), has_late, has_next).program
        programs.append(made[key])
    return programs


def _first_rows(setting: Setting) -> list[StepProgram]:
    """What comes before the first step: its rows, without which it does not begin."""
    program = StepProgram()
    for worker in range(1, setting.workers if setting.input_bytes else 1):
        program.add(_rows_for(setting, worker))
    return [program] if program.items else []


def _rows_for(setting: Setting, worker: int) -> Send:
    return Send(None, 0, worker, setting.input_bytes)


class _ExchangeStep:
    """A step of all workers, as a program.

    A step updates each pack's variables where its sums are, when all of them have come. Weights that are returned
    are sent to all workers when they are updated; those of the first step are there when it begins. Gradients that are
    late are sent and updated at the beginning of the next step, before the forward of the layers that read the
    variables. Rows of the next step are sent when all workers have the weights.
    """

    def __init__(self, setting: Setting, plan: Plan, has_late: bool, has_next: bool) -> None:
        self._setting, self._plan, self.program = setting, plan, StepProgram(setting.caller_s)
        self._workers = range(setting.workers)
        self._weights: list[int] = []  # what brings them to workers
        # Of each worker and layer what brings the weights that its forward awaits, and the messages that it uses then
        layers = setting.workload.layers
        self._there: list[list[dict[int, None]]] = [[{} for _ in layers] for _ in self._workers]
        self._used: list[list[list[int]]] = [[[] for _ in layers] for _ in self._workers]
        late = plan.late if has_late else Phase()
        if setting.serves:
            self._pull()
        else:
            self._sum_late(late)
        if has_next:
            there = self.program.add(Join(), self._weights)
            for worker in self._workers[1:]:
                self.program.add(_rows_for(setting, worker), [there])
        if setting.is_stale:
            for sums in self._pushes(0) if has_late else ():
                sums.offer_all()
            self._compute([])
        else:
            self._compute(self._pushes(len(late.packs)))

    def _pull(self) -> None:
        """Every server sends its part of each pack to every worker, to each in the phase's order, itself first."""
        phases, count = self._setting.of_servers(self._plan.pulls), len(self._workers)
        turns = [(server, (server + turn) % count) for turn in range(count) for server in range(len(phases))]
        pairs = [(server, worker) for server, worker in turns if server != worker]
        places = {(server, worker): _Places(self.program, phases[server]) for server, worker in pairs}
        together = {pair: self.program.add(Join(shared=True)) for pair in pairs if not phases[pair[0]].window}
        for place in range(max(len(phase.packs) for phase in phases)):
            for server, worker in pairs:
                for pack in phases[server].packs[place : place + 1]:
                    message = Send("W", server, worker, pack.size_bytes, place, places[server, worker].behind(place))
                    sent = places[server, worker].send(place, message)
                    there = together.get((server, worker), sent)
                    if there != sent:
                        self.program.wait(there, sent)
                        self.program.used[there].append(sent)
                    self._bring(worker, pack, there, [sent])

    def _bring(self, worker: int, pack: Pack, there: int, used: Sequence[int]) -> None:
        """A pack's weights are at a worker once this is done."""
        self._weights.append(there)
        for layer in dict.fromkeys(self._setting.workload.owner[n] for n in pack.variables):
            self._there[worker][layer][there] = None
            self._used[worker][layer] += used

    def _sum_late(self, phase: Phase) -> None:
        sums = _GradientSums(self.program, self._setting, phase, 0, self._workers)
        for place, pack in enumerate(phase.packs):
            for sink in self._workers:
                self._bring(sink, pack, sums.update(place, Task(sink, "F", self._update_s(pack))), [])
        sums.offer_all()

    def _pushes(self, before: int) -> list[_GradientSums]:
        """The sums of each server's gradients, or of all devices', with the updates, and what is then returned."""
        setting, plan = self._setting, self._plan
        phases = setting.of_servers(plan.pushes) if setting.serves else [plan.pushes]
        returned = setting.of_servers(plan.returned) if plan.returned.packs else [Phase()] * len(phases)
        found = []
        for server, (phase, back) in enumerate(zip(phases, returned, strict=True)):
            sinks = range(server, server + 1) if setting.serves else self._workers
            sums = _GradientSums(self.program, setting, phase, before, sinks)
            updates = []
            for place, pack in enumerate(phase.packs):
                seconds = self._update_s(pack) / (setting.parts if setting.serves else 1)
                updates += [(pack, sums.update(place, Task(sink, "B", seconds))) for sink in sinks]
            self._return(server, back, updates)
            found.append(sums)
        return found

    def _return(self, server: int, phase: Phase, updates: Sequence[tuple[Pack, int]]) -> None:
        """Send weights to the other workers, each pack when all of its variables have been updated."""
        before = len(self._setting.of_servers(self._plan.pulls)[server].packs) if phase.packs else 0
        places = {worker: _Places(self.program, phase) for worker in self._workers if worker != server}
        for place, pack in enumerate(phase.packs):
            awaits = [n for each, n in updates if self._setting.at_once or {*each.variables} & {*pack.variables}]
            for worker, each in places.items():
                message = Send("W", server, worker, pack.size_bytes, before + place, each.behind(place))
                each.send(place, message, awaits)

    def _compute(self, pushes: Sequence[_GradientSums]) -> None:
        """Every layer forward when what it needs is there, then every layer backward, and what is made is sent."""
        workload, add = self._setting.workload, self.program.add
        last: list[list[int]] = [[] for _ in self._workers]
        for layer, each in enumerate(workload.layers):
            for worker in self._workers:
                awaits = [*last[worker], *self._there[worker][layer]]
                last[worker] = [add(Task(worker, "F", each.forward_s), awaits, self._used[worker][layer])]
        made_after = [_by_first(sums.phase, workload) for sums in pushes]
        for layer in reversed(range(len(workload.layers))):
            for worker in self._workers:
                last[worker] = [add(Task(worker, "B", workload.layers[layer].backward_s), last[worker])]
                for n in beginning_with(worker, range(len(pushes))):
                    for place in made_after[n][layer]:
                        pushes[n].offer(place, worker, last[worker])

    def _update_s(self, pack: Pack) -> float:
        return sum(self._setting.workload.update_s[n] for n in pack.variables) / pack.chunks


class _Places:
    """The messages of a phase's packs, and acknowledgements of those that others of them wait behind."""

    def __init__(self, program: StepProgram, phase: Phase) -> None:
        self._program, self._awaited = program, phase.awaited
        self._acknowledged = {
            place: program.add(Acknowledgement()) for place in dict.fromkeys(self._awaited) if place is not None
        }

    def behind(self, place: int) -> int | None:
        """The acknowledgement behind which the messages of the pack at this place are sent."""
        before = self._awaited[place]
        return None if before is None else self._acknowledged[before]

    def send(self, place: int, message: Send, awaits: Sequence[int] = ()) -> int:
        """One of the messages of the pack at this place."""
        sent = self._program.add(message, awaits)
        if place in self._acknowledged:
            self._program.wait(self._acknowledged[place], sent)
        return sent


class _GradientSums:
    """The sums of a phase's gradients: on the server whose phase it is, or on every worker.

    Among more than two workers each adds a part of the pack and sends the sum to all others, unless gradients are
    compressed. On a ring each part goes from worker to worker, and then its sum. In a gossip a worker has the sum of
    its own and its neighbours'.

    Args:
        program: of the step.
        setting: of the workers.
        phase: the packs.
        before: packs of other phases that the step has sent.
        sinks: the devices that need the sums.
    """

    def __init__(self, program: StepProgram, setting: Setting, phase: Phase, before: int, sinks: range) -> None:
        self.phase, self._program, self._setting = phase, program, setting
        self._before, self._workers, self._sinks = before, range(setting.workers), sinks
        self._places = _Places(program, phase)
        self._scatters = len(sinks) > 2 and setting.gradient_bytes is None and setting.topology is None
        self._is_ring = setting.topology == RING
        self._sources = {sink: {*self._workers} for sink in sinks}
        if isinstance(setting.topology, Gossip):
            self._sources = {sink: {*each} for sink, each in enumerate(setting.topology.neighbours(setting.workers))}
        self._added = [{sink: program.add(Join()) for sink in sinks} for _ in phase.packs]
        self._there: list[dict[int, int]] = []  # by place and sink: what says that all parts of the sum are there
        self._came: list[dict[int, list[int]]] = [{sink: [] for sink in sinks} for _ in phase.packs]
        for place, added in enumerate(self._added):
            self._there.append({sink: program.add(Join()) for sink in sinks} if self._scatters else added)
            for sink in sinks if self._scatters else ():
                for worker in beginning_with(sink, self._workers):
                    there = added[sink]
                    if worker != sink:
                        there = self._send(place, sink, worker, None, [there])
                        self._came[place][worker].append(there)
                    program.wait(self._there[place][worker], there)
            if self._is_ring:
                self._there[-1] = self._around(place)

    def _around(self, place: int) -> dict[int, int]:
        """Every part of a pack, from worker to worker; gives what says that all its sums are at a worker."""
        there, count = {worker: self._program.add(Join()) for worker in self._workers}, len(self._workers)
        for part in self._workers:
            came = self._added[place][part]
            for hop in range(1, 2 * count - 1):
                source, sink = (part + hop - 1) % count, (part + hop) % count
                came = self._send(place, source, sink, self._places.behind(place) if hop == 1 else None, [came])
                if hop < count:
                    came = self._program.add(Join(), [came, self._added[place][sink]])
                else:
                    self._came[place][sink].append(came)
                if hop >= count - 1:
                    self._program.wait(there[sink], came)
        return there if count > 1 else self._added[place]

    def update(self, place: int, task: Task) -> int:
        """A task that awaits the sum of a pack on its device, and uses the messages that brought it."""
        number = self._program.add(task, [self._there[place][task.device]])
        self._program.used[number] = self._came[place][task.device]  # to which messages are still added
        return number

    def offer(self, place: int, worker: int, awaits: Sequence[int]) -> None:
        """A worker has its gradients of the pack at this place of the phase when all these are done."""
        for sink in beginning_with(worker, self._sinks):
            if sink == worker:
                for awaited in awaits:
                    self._program.wait(self._added[place][sink], awaited)
            if sink == worker or self._is_ring or worker not in self._sources[sink]:
                continue
            sent = self._send(place, worker, sink, self._places.behind(place), awaits)
            self._program.wait(self._added[place][sink], sent)
            if not self._scatters:
                self._came[place][sink].append(sent)

    def offer_all(self) -> None:
        """All workers have all gradients when the step begins."""
        for place in range(len(self.phase.packs)):
            for worker in self._workers:
                self.offer(place, worker, [])

    def _send(self, place: int, source: int, sink: int, behind: int | None, awaits: Sequence[int]) -> int:
        pushed_bytes = self._setting.pushed_bytes(self.phase.packs[place])
        size_bytes = pushed_bytes / (len(self._sinks) if self._scatters or self._is_ring else 1)
        message = Send("R", source, sink, size_bytes, self._before + place, behind)
        return self._places.send(place, message, awaits)


def beginning_with(device: int, others: range) -> list[int]:
    """The others, beginning with this device's place: so that not all send to the same one first."""
    first = device % max(len(others), 1)
    return [*others[first:], *others[:first]]


def _by_first(phase: Phase, workload: Workload) -> list[list[int]]:
    """For each layer the places in the phase of the packs that are complete when it has run backward."""
    found: list[list[int]] = [[] for _ in workload.layers]
    for place, pack in enumerate(phase.packs):
        found[workload.first(pack)].append(place)
    return found
