"""A tree of workers at work: where they and the root meet, and the thread of one of them.

Weights go down the tree, sums of gradients up. A worker has the gradients of its rows, and the sums of its children's.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

import tensorflow as tf

from pipetrain.compute.cores import HOST, finish, is_prompt, is_remote, pin
from pipetrain.compute.functions.stage_values import BoundaryTensors, joined_rows
from pipetrain.compute.transfers.coded import (
    CodedFunctions,
    Computed,
    Messages,
    Root,
    WorkerInputs,
    given_numbers,
    streams_of,
)
from pipetrain.run.channels import take
from pipetrain.run.control import Control, StoppableThread
from pipetrain.run.gradient_exchange import Closed, here
from pipetrain.run.worker_rows import copied_here, given_to
from pipetrain.schemes.coded_reduce import ROOT, Allocation, CellsPart, Tree, allocated
from pipetrain.schemes.gradient_codes import decoding
from pipetrain.trace.records import Recent, Span, Spans, Transfer, Transfers

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


class Summed(NamedTuple):
    """Children of the root whose messages give the sum, and every worker whose messages are in it."""

    decoded: Decoded
    used: list[Delivered]


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
        """Children of a parent that have the sum, as soon as there are some."""
        return self._awaited(step, lambda: self._sufficient(parent))

    def summed(self, step: TreeStep) -> Summed:
        """Children of the root that have the sum, as soon as there are some, and all workers that are in it.

        Both are of one moment: a worker that fails closes the exchange, which then knows of none.
        """

        def there() -> Summed | None:
            found = self._sufficient(ROOT)
            return None if found is None else Summed(found, self._used())

        return self._awaited(step, there)

    def _sufficient(self, parent: int) -> Decoded | None:
        arrived = self._arrived.get(parent, [])
        found = decoding(self._tree.code, [self._tree.place(each.worker) for each in arrived])
        if found is None:
            return None
        by_place = {self._tree.place(each.worker): each for each in arrived}
        self._decoded[parent] = Decoded([by_place[place] for place, _ in found], tuple(each for _, each in found))
        return self._decoded[parent]

    def _used(self) -> list[Delivered]:
        """Of the step that the root has decoded every worker whose messages are in the sum, after its parent."""
        found, parents = list[Delivered](), [ROOT]
        for parent in parents:
            mine = self._decoded[parent].children if parent in self._decoded else []
            found += mine
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


KEPT_NUMBERS = 64  # of minibatches of different numbers of rows, whose parts' numbers are kept on a device


class Job(NamedTuple):
    """What all workers of a run have in common."""

    tree: Tree
    devices: Sequence[str]
    root: Root
    functions: CodedFunctions
    state: Sequence[tf.Tensor]
    loss_is_mean: bool
    first_step: int

    @property
    def allocation(self) -> Allocation:
        """Who has which rows."""
        return allocated(self.tree)

    def parts(self, worker: int, rows: int) -> list[CellsPart]:
        """A worker's, of a minibatch of so many rows; cells that draw random numbers draw their own."""
        return self.allocation.parts(worker, rows, apart=bool(self.functions.seeds))


class TreeWorker(StoppableThread):
    """Takes the newest step whenever it is free, until the exchange is closed.

    It takes the weights from its parent's device, hands them down, computes, waits for so many of its children that
    their sums are known, and has the whole sent to its parent's device. A step that has ended meanwhile it leaves.

    Args:
        worker: its number.
        job: what all have in common.
        exchange: where they meet.
        control: where it reports an exception.
        kept: how many spans, and transfers, are recorded, the newest.

    ``spans`` are the gradients that it has made, ``transfers`` the messages that it has used, of which nothing is
    recorded elsewhere.
    """

    def __init__(self, worker: int, job: Job, exchange: TreeExchange, control: Control, kept: int) -> None:
        super().__init__(name=f"pipetrain worker {worker}", daemon=True)
        self.worker, self.device = worker, job.devices[worker]
        self._job, self._exchange, self._control = job, exchange, control
        self._parent, self._children = job.tree.parent(worker), job.tree.below(worker)
        self._numbers: dict[int, list[tf.Tensor]] = {}
        self._fixed: list[Any] = []
        self.spans, self.transfers = Recent(Spans, kept), Recent(Transfers, kept)
        self._doing = "the start"

    def run(self) -> None:
        """The thread's body."""
        try:
            pin(self.device)
            with tf.device(self.device):
                last = -1
                while True:
                    step = self._exchange.next(self.worker, last)
                    last = step.number
                    self._take(step)
        except Closed:
            pass
        except BaseException as error:
            self._control.fail(error, f"Raised in {self._doing} of worker {self.worker}")

    def _take(self, step: TreeStep) -> None:
        self._doing = f"step {step.number}"
        with suppress(Over):
            self._make(step)

    def _make(self, step: TreeStep) -> None:
        weights = self._weights(step)
        parts = self._job.parts(self.worker, int(step.inputs[0].shape[0]))
        start_s = time.perf_counter()
        computed = self._compute(step, parts, weights)
        finish(self.device)  # a worker's call is over before what it does
        messages, ready_s = computed.messages, time.perf_counter()
        number = self._job.first_step + step.number
        self.spans.append(Span("FB", 0, number, self.device, start_s, ready_s, number, self.worker + 1))
        if self._children:
            messages, ready_s = self._combined(step, messages), time.perf_counter()
        if self._parent == ROOT:
            messages = arrived(messages)
        self._exchange.deliver(step, Delivered(self.worker, messages, computed, ready_s))

    def _weights(self, step: TreeStep) -> Messages:
        """The weights here, of which those children have copies who are free.

        A copy that is asked for when this device computes has to wait until it has done so.
        """
        weights = copied(self._exchange.weights(self.worker, step), self.device)
        if self._children:
            free = self._exchange.free(self._children, step)
            copies = {child: copied(weights, self._job.devices[child]) for child in free}
            self._exchange.hand_down(self.worker, step, weights, copies)
        return weights

    def _compute(self, step: TreeStep, parts: Sequence[CellsPart], weights: Messages) -> Computed:
        functions = self._job.functions
        if not parts:
            return Computed(functions.nothing(), None, None, [])
        if not self._fixed:
            seeds = functions.seeds
            state = [each for n, each in enumerate(self._job.state) if n not in seeds]
            self._fixed = [[copied_here(each) for each in state], [copied_here(each) for each in functions.captured]]
        state, captured = self._fixed
        seeds = [copied_here(each) for each in step.seeds]
        return functions.compute(weights, state, seeds, captured, self._given(step, parts))

    def _given(self, step: TreeStep, parts: Sequence[CellsPart]) -> WorkerInputs:
        rows = int(step.inputs[0].shape[0])
        ranges = [each for part in parts for each in part.rows]
        with tf.device(HOST):
            mine, targets = rows_in(step.inputs, ranges, rows), rows_in(step.targets, ranges, rows)
        masks: list[Any] = [None] * len(mine)
        inputs = given_to(self.device, self._job.root.sorted(BoundaryTensors(mine, masks), targets))
        if rows not in self._numbers:
            if len(self._numbers) == KEPT_NUMBERS:
                self._numbers.clear()
            shares = [part.size / rows if rows else 1.0 for part in parts]
            of_loss = shares if self._job.loss_is_mean else [1.0] * len(parts)
            numbers = given_numbers([part.size for part in parts], shares, of_loss, [each[0] for each in parts])
            streams = streams_of([part.cells[0] for part in parts])
            self._numbers[rows] = [tf.constant(each) for each in (*numbers, streams)]
        return WorkerInputs(inputs, *self._numbers[rows])

    def _combined(self, step: TreeStep, own: Messages) -> Messages:
        decoded = self._exchange.decoded(self.worker, step)
        start_s = time.perf_counter()
        messages = self._job.functions.combined(own, [each.messages for each in decoded.children], decoded.coefficients)
        finish(self.device)
        number = self._job.first_step + step.number
        for each in received(decoded.children, self.worker + 1, number, self._job.functions.size_bytes):
            self.transfers.append(each)
        end_s = time.perf_counter()
        self.spans.append(Span("B", 0, number, self.device, start_s, end_s, number, self.worker + 1))
        return messages


def received(children: Sequence[Delivered], replica: int, number: int, size_bytes: int) -> list[Transfer]:
    """The messages of children that were used, from when they were ready until they are now."""
    end_s = time.perf_counter()
    return [Transfer("R", number, 0, each.worker + 1, 0, replica, size_bytes, each.ready_s, end_s) for each in children]


def copied(messages: Messages, device: str) -> Messages:
    """The messages on another device; processors of this process need no copies."""
    if is_prompt(device) and all(is_prompt(each.device) for each in messages):
        return messages
    with tf.device(device):
        return [tf.identity(each) for each in messages]


def arrived(messages: Messages) -> Messages:
    """The messages in this process, when they are there: a copy from another one is returned before."""
    found = here(messages)
    for each in found if any(is_remote(message.device) for message in messages) else ():
        each[:1].numpy()
    return found


def rows_in(data: Any, ranges: Sequence[range], rows: int) -> Any:
    """The rows in these ranges, in order, of nested tensors that have so many; None stays None."""
    return joined_rows([take(data, each, rows) for each in ranges or [range(0)]])
