"""The thread of one worker of a tree: the gradients of its rows, and the sums of its children's."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import tensorflow as tf

from pipetrain.compute.cores import HOST, finish, is_prompt, is_remote, pin
from pipetrain.compute.functions.stage_values import BoundaryTensors
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
from pipetrain.run.tree_exchange import Delivered, Over, TreeExchange, TreeStep
from pipetrain.schemes.coded_reduce import ROOT, Allocation, CellsPart, Tree, allocated
from pipetrain.trace.records import Recent, Span, Spans, Transfer, Transfers

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
            self._fixed = [[_sent(each) for each in state], [_sent(each) for each in functions.captured]]
        state, captured = self._fixed
        seeds = [_sent(each) for each in step.seeds]
        return functions.compute(weights, state, seeds, captured, self._given(step, parts))

    def _given(self, step: TreeStep, parts: Sequence[CellsPart]) -> WorkerInputs:
        rows = int(step.inputs[0].shape[0])
        ranges = [each for part in parts for each in part.rows]
        with tf.device(HOST):
            mine, targets = rows_in(step.inputs, ranges, rows), rows_in(step.targets, ranges, rows)
        masks: list[Any] = [None] * len(mine)
        inputs = self._job.root.sorted(BoundaryTensors(mine, masks), targets)
        if is_remote(self.device):  # else the call itself takes them
            inputs = tf.nest.map_structure(_sent, inputs)
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
    if len(ranges) == 1:
        return take(data, ranges[0], rows)
    if not ranges:
        return take(data, range(0), rows)
    parts = [take(data, each, rows) for each in ranges]
    return tf.nest.map_structure(lambda *each: None if each[0] is None else tf.concat(each, 0), *parts)


def _sent(tensor: Any) -> Any:
    return None if tensor is None else tf.identity(tensor)
