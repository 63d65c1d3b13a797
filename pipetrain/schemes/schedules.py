"""Schedules: the order in which each device works, and which weight version each forward then finds.

Four stages of the asynchronous pipeline, one column a unit of time (``dry_run.grid`` prints it)::

    0: F0 F1 F2 F3 .  .  .  B0 F4 B1 ...
    1: .  F0 F1 F2 .  .  B0 F3 B1 F4 ...
    2: .  .  F0 F1 .  B0 F2 B1 F3 B2 ...
    3: .  .  .  F0 B0 F1 B1 F2 B2 F3 ...

An order receives *groups*: the microbatches whose gradients make one update together. The groups may be a list (the
validator, the simulator) or a live iterator that blocks until the next minibatch arrives (the runtime), so all of them
use the same order. An order therefore asks for a group only after it has given every action that needs no further
group.

With v stages on each device, the stages d, d + p, d + 2p, ... on device d of p, the bubble is a v-th. Interleaved
1F1B of two devices, four stages and four microbatches, one column a unit of time::

    0: 0F0  0F1  2F0  2F1  0F2  2B0  0F3  2B1  2F2  0B0  2F3  0B1  .    2B2  .    2B3  0B2  0B3
    1: .    1F0  1F1  3F0  3B0  3F1  3B1  1F2  1B0  1F3  1B1  3F2  3B2  3F3  3B3  1B2  1B3  .

Looped breadth first with the same::

    0: 0F0  0F1  0F2  0F3  2F0  2F1  2F2  2F3  .    .    2B0  2B1  2B2  2B3  0B0  0B1  0B2  0B3
    1: .    1F0  1F1  1F2  1F3  3F0  3F1  3F2  3F3  3B0  3B1  3B2  3B3  1B0  1B1  1B2  1B3  .
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import chain, pairwise, zip_longest
from typing import NamedTuple

from pipetrain.schemes.actions import Action
from pipetrain.schemes.splitting import rows_of

Groups = Iterable[Sequence[int]]
Order = Callable[[int, int, Groups], Iterator[Action]]


def looped(stage: int, devices: int) -> int:
    """The device of a virtual stage: ``stage mod devices``, so that device d has stages d, d + devices, ..."""
    return stage % devices


def unflushed(microbatch: int, stage: int, stages: int, microbatches: int) -> int:
    """What the asynchronous order finds: ``floor(max(0, m - (N-1-k)) / M)`` updates are made before F(m)."""
    return max(0, microbatch - (stages - 1 - stage)) // microbatches


def flushed(microbatch: int, stage: int, stages: int, microbatches: int) -> int:
    """What every order finds that flushes after each minibatch: ``floor(m / M)`` updates are made before F(m)."""
    return microbatch // microbatches


class Schedule(NamedTuple):
    """An order of actions for every device, and its properties.

    ``order(device, devices, groups)`` gives the actions of one of so many devices. ``chunks`` is the number of virtual
    stages on each, ``place(stage, devices)`` says which device has a stage. ``flushes``: whether every minibatch has
    made its updates before the next one begins. ``found(m, k, N, M)`` is the number of updates that stage k of N has
    made when F(m) begins, M microbatches being a minibatch.
    """

    order: Order
    flushes: bool = True
    found: Callable[[int, int, int, int], int] = flushed
    chunks: int = 1
    place: Callable[[int, int], int] = looped

    def devices(self, stages: int) -> int:
        """How many devices so many stages are on. Raises ValueError where each cannot have as many."""
        devices, rest = divmod(stages, self.chunks)
        if rest or not devices:
            raise ValueError(
                f"The schedule has {self.chunks} stages on each device. Received: stages={stages}. "
                f"Try stages={self.chunks * max(1, devices)}."
            )
        return devices

    def stages_on(self, device: int, stages: int) -> list[int]:
        """The stages that a device has, in order."""
        devices = self.devices(stages)
        return [stage for stage in range(stages) if self.place(stage, devices) == device]


def asynchronous(device: int, devices: int, groups: Groups) -> Iterator[Action]:
    """One forward, one backward, never flushed: ``N-1-k`` warm-up forwards, F, B, F, B, ..., drain.

    Source: PipeDream (arXiv 1806.03377), section 3.2; SpecTrain (arXiv 1809.02839), figure 6.
    """
    warm_up = devices - 1 - device
    in_flight: deque[int] = deque()
    for group in groups:
        for microbatch in group:
            yield Action("F", device, microbatch)
            in_flight.append(microbatch)
            if len(in_flight) > warm_up:
                yield Action("B", device, in_flight.popleft())
    for microbatch in in_flight:
        yield Action("B", device, microbatch)


def gpipe(device: int, devices: int, groups: Groups) -> Iterator[Action]:
    """All forwards of a minibatch, then all its backwards (GPipe, arXiv 1811.06965)."""
    for group in groups:
        yield from (Action("F", device, microbatch) for microbatch in group)
        yield from (Action("B", device, microbatch) for microbatch in group)


def one_forward_one_backward(device: int, devices: int, groups: Groups) -> Iterator[Action]:
    """The asynchronous order with a flush after every minibatch: fewer activations kept than ``gpipe``."""
    for group in groups:
        yield from asynchronous(device, devices, [group])


def forward_only(device: int, devices: int, groups: Groups) -> Iterator[Action]:
    """Every forward as its minibatch arrives, and no backward: evaluation."""
    for group in groups:
        yield from (Action("F", device, microbatch) for microbatch in group)


def fused(actions: Iterator[Action], last: int) -> Iterator[Action]:
    """The same order with FB, or FI, for F and B, or I, of one microbatch that follow each other at the last stage.

    There nothing has to arrive between the two, and one call reads the weights once. So the action after an F of the
    last stage is asked for before that F is given: only for orders that are ``fusible``.
    """
    for action in actions:
        following = next(actions, None) if action.op == "F" and action.stage == last else None
        if following == ("B", last, action.microbatch):
            yield action._replace(op="FB")
        elif following == ("I", last, action.microbatch):
            yield action._replace(op="FI")
        else:
            yield action
            if following is not None:
                yield following


def joined(
    actions: Iterator[Action], microbatches: int, made: Counter[tuple[int, int]] | None = None
) -> Iterator[list[Action]]:
    """The same order, each action in a list of its own, but the W of one stage that follow each other in one list.

    Nothing has to arrive between them, and one call makes the products of all their rows. The action after a W is asked
    for before that W is given, unless it completes its minibatch. ``made`` are the weight gradients of each stage and
    minibatch before these actions, whole backwards' too.
    """
    made = made or Counter()
    run: list[Action] = []
    for action in actions:
        if run and (action.op != "W" or action.stage != run[0].stage):
            yield run
            run = []
        place = action.stage, action.microbatch // microbatches
        made[place] += action.updates
        completes = made[place] == microbatches
        if completes:
            del made[place]
        run.append(action)
        if completes or action.op != "W":
            yield run
            run = []


@lru_cache(maxsize=256)
def has_halves(order: Order, devices: int, microbatches: int) -> bool:
    """Whether any backward of the order is in halves."""
    return any(action.op == "W" for each in orders(order, devices, 1, microbatches) for action in each)


@lru_cache(maxsize=256)
def fusible(order: Order, device: int, devices: int, last: int, microbatches: int) -> bool:
    """Whether F and B, or I, of the last stage follow each other, and no minibatch is awaited after such an F."""
    given: list[Action] = []
    waits = False

    def arriving() -> Iterator[range]:
        nonlocal waits
        for group in groups_of(devices + 2, microbatches):
            waits = waits or bool(given and given[-1].op == "F" and given[-1].stage == last)
            yield group

    for action in order(device, devices, arriving()):
        given.append(action)
    pairs = {(a.stage, a.op, b.stage, b.op) for a, b in pairwise(given) if a.microbatch == b.microbatch}
    return not waits and not pairs.isdisjoint({(last, "F", last, "B"), (last, "F", last, "I")})


def groups_of(minibatches: int, microbatches: int) -> list[range]:
    """The microbatches of each of so many minibatches."""
    return [range(i * microbatches, (i + 1) * microbatches) for i in range(minibatches)]


def orders(order: Order, devices: int, minibatches: int, microbatches: int = 1) -> list[list[Action]]:
    """Every device's actions for ``minibatches`` minibatches of ``microbatches`` microbatches each."""
    groups = groups_of(minibatches, microbatches)
    return [list(order(device, devices, groups)) for device in range(devices)]


@lru_cache
def interleaved(chunks: int) -> Schedule:
    """Interleaved 1F1B: each device has ``chunks`` stages, and takes p microbatches through one before the next.

    Bubble ``(p-1)/(v m)``, for m a multiple of p; the first device holds ``v p + p - 1`` activations of a stage. With
    one stage a device it is ``1f1b``. Microbatches are divided into rounds of p, or a few more where m is no multiple.

    Source: Narayanan et al. 2021 (arXiv 2104.04473), section 2.2, figure 4.
    """
    if chunks == 1:
        return Schedule(one_forward_one_backward)
    return Schedule(partial(_interleaved, chunks), chunks=chunks)


@lru_cache
def looped_bfs(chunks: int) -> Schedule:
    """All microbatches go through one stage of the device before the next; backwards likewise, the last stage first.

    Bubble ``(p-1)/(v m)``, for m from p up; every device holds ``v m`` activations of a stage.

    Source: Lamy-Poirier 2022, Breadth-First Pipeline Parallelism (arXiv 2211.05953), section 4.1.
    """
    return Schedule(partial(_breadth_first, chunks), chunks=chunks)


def _interleaved(chunks: int, device: int, devices: int, groups: Groups) -> Iterator[Action]:
    stages = range(device, chunks * devices, devices)
    for group in groups:
        rounds = max(1, len(group) // devices)
        pieces = [[group[m] for m in rows_of(len(group), each, rounds)] for each in range(rounds)]
        forwards = [Action("F", stage, m) for piece in pieces for stage in stages for m in piece]
        backwards = [Action("B", stage, m) for piece in pieces for stage in reversed(stages) for m in piece]
        warm_up = (chunks - 1) * max(map(len, pieces)) + 2 * (devices - 1 - device)
        yield from _in_turns(forwards, backwards, warm_up)


def _in_turns(forwards: Sequence[Action], backwards: Sequence[Action], warm_up: int) -> Iterator[Action]:
    """So many forwards, then a forward and a backward in turn, then the backwards that are left."""
    yield from forwards[:warm_up]
    pairs = zip_longest(forwards[warm_up:], backwards)
    yield from (action for action in chain.from_iterable(pairs) if action is not None)


def _breadth_first(chunks: int, device: int, devices: int, groups: Groups) -> Iterator[Action]:
    stages = range(device, chunks * devices, devices)
    for group in groups:
        yield from (Action("F", stage, microbatch) for stage in stages for microbatch in group)
        yield from (Action("B", stage, microbatch) for stage in reversed(stages) for microbatch in group)
