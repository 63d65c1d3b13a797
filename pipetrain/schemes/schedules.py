"""The order in which each stage works: pure functions from arriving microbatches to actions.

Four stages of the asynchronous pipeline, one column a unit of time (``grid`` prints it)::

    0: F0 F1 F2 F3 .  .  .  B0 F4 B1 ...
    1: .  F0 F1 F2 .  .  B0 F3 B1 F4 ...
    2: .  .  F0 F1 .  B0 F2 B1 F3 B2 ...
    3: .  .  .  F0 B0 F1 B1 F2 B2 F3 ...

A schedule receives *groups*: the microbatches whose gradients make one update together. The groups may
be a list (the validator, the simulator) or a live iterator that blocks until the next minibatch arrives
(the runtime), so all of them walk the same order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from pipetrain.schemes.actions import Action

Groups = Iterable[Sequence[int]]
Schedule = Callable[[int, int, Groups], Iterator[Action]]


def asynchronous(stage: int, stages: int, groups: Groups) -> Iterator[Action]:
    """One forward, one backward, never flushed: ``stages - 1 - stage`` warm-up forwards, F, B, F, B, ..., drain.

    Source: PipeDream (arXiv 1806.03377), section 3.2; SpecTrain (arXiv 1809.02839), figure 6.
    """
    warm_up = stages - 1 - stage
    in_flight: deque[int] = deque()
    for group in groups:
        for microbatch in group:
            yield Action("F", stage, microbatch)
            in_flight.append(microbatch)
            if len(in_flight) > warm_up:
                yield Action("B", stage, in_flight.popleft())
    for microbatch in in_flight:
        yield Action("B", stage, microbatch)


def gpipe(stage: int, stages: int, groups: Groups) -> Iterator[Action]:
    """All forwards of a minibatch, then all its backwards (GPipe, arXiv 1811.06965)."""
    for group in groups:
        yield from (Action("F", stage, microbatch) for microbatch in group)
        yield from (Action("B", stage, microbatch) for microbatch in group)


def one_forward_one_backward(stage: int, stages: int, groups: Groups) -> Iterator[Action]:
    """The asynchronous order with a flush after every minibatch: fewer activations kept than ``gpipe``."""
    for group in groups:
        yield from asynchronous(stage, stages, [group])


def forward_only(stage: int, stages: int, groups: Groups) -> Iterator[Action]:
    """Every forward as its minibatch arrives, and no backward: evaluation."""
    for group in groups:
        yield from (Action("F", stage, microbatch) for microbatch in group)


def orders(schedule: Schedule, stages: int, minibatches: int, microbatches: int = 1) -> list[list[Action]]:
    """Every stage's actions for ``minibatches`` minibatches of ``microbatches`` microbatches each."""
    groups = [range(i * microbatches, (i + 1) * microbatches) for i in range(minibatches)]
    return [list(schedule(stage, stages, groups)) for stage in range(stages)]


def peak_in_flight(order: Iterable[Action]) -> int:
    """The most microbatches whose activations a stage holds at once, under its order of actions."""
    held = peak = 0
    for action in order:
        held += 1 if action.op == "F" else -1
        peak = max(peak, held)
    return peak
