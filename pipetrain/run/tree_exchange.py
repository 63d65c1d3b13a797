"""Where the workers of a tree and its root meet: the steps, the weights on their way down, the sums on their way up."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

from pipetrain.compute.transfers.coded import Computed, Messages
from pipetrain.run.gradient_exchange import Closed
from pipetrain.schemes.coded_reduce import ROOT, Tree
from pipetrain.schemes.gradient_codes import decoding

Value = TypeVar("Value")


class Over(Exception):
    """The step has ended: what a worker still makes of it nobody wants."""


class TreeStep(NamedTuple):
    """A step as the root begins it: its number, its minibatch, and the seeds with which it begins."""

    number: int
    inputs: list[Any]
    targets: Any
    seeds: list[Any]


class Handed(NamedTuple):
    """The weights of a step on a parent's device, and copies on those of some of its children."""

    weights: Messages
    copies: dict[int, Messages]


class Delivered(NamedTuple):
    """What a worker has for its parent, what it made of its own rows, and when that was there."""

    worker: int
    messages: Messages
    computed: Computed
    ready_s: float


class Decoded(NamedTuple):
    """Children whose messages give the sum, in order, and the coefficient of each."""

    children: list[Delivered]
    coefficients: tuple[float, ...]

    @property
    def workers(self) -> list[int]:
        """Their numbers."""
        return [each.worker for each in self.children]


class TreeExchange:
    """One step at a time. Threads wait here, and nowhere else, for what others bring.

    Every method that waits raises ``Closed`` when nothing is waited for any more, and ``Over`` if it waits for a step
    that the root has ended.

    Args:
        tree: who is whose parent.
    """

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._changed = threading.Condition()
        self._step: TreeStep | None = None
        self._is_over = self._is_closed = False
        self._at: dict[int, int] = {}  # the step of every worker that is at one
        self._weights: dict[int, Handed] = {}  # by parents
        self._arrived: dict[int, list[Delivered]] = {}
        self._decoded: dict[int, Decoded] = {}

    def begin(self, step: TreeStep, weights: Messages) -> None:
        """The root begins a step with these weights."""
        with self._changed:
            self._step, self._is_over = step, False
            self._weights, self._arrived, self._decoded = {ROOT: Handed(weights, {})}, {}, {}
            self._changed.notify_all()

    def next(self, worker: int, last: int) -> TreeStep:
        """The newest step, when there is one after the last that the worker has had; the worker is free until then."""
        with self._changed:
            self._at.pop(worker, None)
            while True:
                if self._is_closed:
                    raise Closed
                if self._step is not None and not self._is_over and self._step.number > last:
                    self._at[worker] = self._step.number
                    return self._step
                self._changed.wait()

    def free(self, workers: Iterable[int], step: TreeStep) -> list[int]:
        """Those of the workers that are not at an earlier step still."""
        with self._changed:
            return [worker for worker in workers if self._at.get(worker, step.number) == step.number]

    def weights(self, worker: int, step: TreeStep) -> Messages:
        """The weights of the step for a worker, as soon as its parent has them: on its own device, or the parent's."""
        handed = self._awaited(step, lambda: self._weights.get(self._tree.parent(worker)))
        return handed.copies.get(worker, handed.weights)

    def hand_down(self, worker: int, step: TreeStep, weights: Messages, copies: dict[int, Messages]) -> None:
        """A worker has the weights of the step, and has sent ``copies`` to some of its children."""
        with self._changed:
            self._check(step)
            self._weights[worker] = Handed(weights, copies)
            self._changed.notify_all()

    def deliver(self, step: TreeStep, delivered: Delivered) -> None:
        """A worker's messages are there for its parent."""
        with self._changed:
            self._check(step)
            self._arrived.setdefault(self._tree.parent(delivered.worker), []).append(delivered)
            self._changed.notify_all()

    def decoded(self, parent: int, step: TreeStep) -> Decoded:
        """Children of a parent, or of the root, that have the sum, as soon as there are some."""
        return self._awaited(step, lambda: self._sufficient(parent))

    def _sufficient(self, parent: int) -> Decoded | None:
        arrived = self._arrived.get(parent, [])
        found = decoding(self._tree.code, [self._tree.place(each.worker) for each in arrived])
        if found is None:
            return None
        by_place = {self._tree.place(each.worker): each for each in arrived}
        self._decoded[parent] = Decoded([by_place[place] for place, _ in found], tuple(each for _, each in found))
        return self._decoded[parent]

    def used(self) -> list[tuple[int, Delivered]]:
        """Of the step that the root has decoded every worker whose messages are in the sum, after its parent."""
        with self._changed:
            found, parents = list[tuple[int, Delivered]](), [ROOT]
            for parent in parents:
                mine = self._decoded[parent].children if parent in self._decoded else []
                found += [(parent, each) for each in mine]
                parents += [each.worker for each in mine]
            return found

    def end(self) -> list[int]:
        """The root ends the step; the workers that were left behind.

        Those whose parent had the weights, and whose messages are not there. Who waits for a parent that is left behind
        is not to blame.
        """
        with self._changed:
            self._is_over = True
            there = {each.worker for arrived in self._arrived.values() for each in arrived}
            self._changed.notify_all()
            return [
                worker
                for worker in range(self._tree.workers)
                if worker not in there and self._tree.parent(worker) in self._weights
            ]

    def close(self) -> None:
        """Nothing is waited for any more."""
        with self._changed:
            self._is_closed = True
            self._weights, self._arrived, self._decoded = {}, {}, {}
            self._changed.notify_all()

    def _check(self, step: TreeStep) -> None:
        if self._is_closed:
            raise Closed
        if self._is_over or self._step is None or self._step.number != step.number:
            raise Over

    def _awaited(self, step: TreeStep, there: Callable[[], Value | None]) -> Value:
        with self._changed:
            while True:
                self._check(step)
                if (found := there()) is not None:
                    return found
                self._changed.wait()
