"""Runs steps whose gradients come up a tree of workers of which some may be late."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from pipetrain.compute.cores import HOST
from pipetrain.compute.functions.stage_values import BoundaryTensors, without_rows
from pipetrain.compute.keras_private import count_of
from pipetrain.compute.transfers.coded import CodedFunctions, CodedUpdate, Messages, Root
from pipetrain.run.collector import Result
from pipetrain.run.control import CallThread, Control, RunSettings
from pipetrain.run.gradient_exchange import here
from pipetrain.run.pipeline import KEPT_SPANS
from pipetrain.run.stepwise import Stepwise
from pipetrain.run.tree_worker import Delivered, Job, Summed, TreeExchange, TreeStep, TreeWorker, received
from pipetrain.schemes.coded_reduce import Tree
from pipetrain.trace.records import Span


class CodedRunner(Stepwise):
    """The root of a tree, in this process, and the threads that call its workers.

    The root begins a step, waits until the messages of so many of its children are there that the sum of all rows'
    gradients is known, updates the weights, and ends the step, whoever is still at it. Threads live from the first
    ``post`` to the next ``drain``, which waits for those that are late.

    Args:
        root: the weights that are updated.
        tree: the workers.
        devices: of each worker.
        settings: called whenever the weights are taken from the model.
        rate: gives the learning rate of a step that begins, None where the optimizer knows it.
        returns_outputs: whether results have the predictions of all rows, else of none.

    ``stragglers`` has for every worker the steps that ended without it.
    """

    def __init__(
        self,
        root: Root,
        tree: Tree,
        devices: Sequence[str],
        settings: Callable[[], RunSettings],
        rate: Callable[[], float | None],
        returns_outputs: bool = True,
    ) -> None:
        self._returns_outputs = returns_outputs
        super().__init__(devices, settings, rate)
        self._root, self._tree, self._devices = root, tree, list(devices)
        self._functions: CodedFunctions | None = None
        self.stragglers = [0] * tree.workers
        self._threads: list[TreeWorker] = []
        self._exchange, self._control = TreeExchange(tree), Control(RunSettings())
        self._weights: Messages = []
        self._seeds: list[tf.Tensor] = []
        self._state: list[tf.Tensor] = []

    def _gradients_traced(self, targets: Any) -> Sequence[Any]:
        return self._root.trace([None] * len(self._root.segment.inputs), targets)

    def _retraced(self) -> None:
        self._functions = None

    def post(self, x: list[tf.Tensor], y: Any, sample_weight: Any, learning_rate: float | None) -> None:
        """Make the minibatch's step."""
        if self._run is None:
            self._start()
        self._root.groups[0].set_rate(self._rate())  # that of the minibatch is as old as its reading
        step = TreeStep(self._steps_done, x, (y, sample_weight), self._seeds)
        self._exchange.begin(step, self._weights)
        summed = self._control.guarded(lambda: self._exchange.summed(step))
        updated = self._update(step, summed)
        result = self._result(updated, summed.used, int(x[0].shape[0]))
        for worker in self._exchange.end():
            self.stragglers[worker] += 1
        self._stepped(result)

    def _update(self, step: TreeStep, summed: Summed) -> CodedUpdate:
        """Update the weights by the sum."""
        functions, number, decoded = self._functions, self.made + step.number, summed.decoded
        assert functions is not None  # since the start
        start_s = time.perf_counter()
        updated = functions.update([each.messages for each in decoded.children], decoded.coefficients)
        self._weights = updated.weights
        for group in self._root.groups:
            group.updated()
        if self._seeds:
            left = next(each.computed.seeds for each in summed.used if each.computed.seeds)
            self._seeds = self._lost.unless_lost(lambda: here(left))
        for each in received(decoded.children, 0, number, functions.size_bytes):
            self._transfers.append(each)
        self._spans.append(Span("B", 0, number, HOST, start_s, time.perf_counter(), number, 0))
        return updated

    def _result(self, updated: CodedUpdate, used: Sequence[Delivered], rows: int) -> Result:
        """The loss and the outputs of all rows: of each from the first worker that has them."""
        job, places, needed, begin = self._job, np.full(rows, -1), list[Delivered](), 0
        for each in used:
            parts = job.parts(each.worker, rows)
            mine = np.array([row for part in parts for some in part.rows for row in some], np.int64)
            new = places[mine] < 0
            if new.any() or (parts and not needed):  # a minibatch without rows has outputs too
                places[mine[new]] = begin + np.flatnonzero(new)
                begin += len(mine)
                needed.append(each)
        of_rows = [self._wanted(each) for each in needed]
        fetched = self._lost.unless_lost(lambda: _fetched(of_rows))
        output, losses = tf.nest.map_structure(lambda *rows: _ordered(rows, places), *fetched)
        output = _none_of(needed[0].computed.output) if output is None else output
        loss = updated.loss if losses is None else losses
        return Result(loss + updated.penalty if self._root.is_penalized else loss, output)

    def _wanted(self, delivered: Delivered) -> tuple[BoundaryTensors | None, Any]:
        """What is wanted of a worker's rows: outputs, if anybody reads them, and losses, if each row has one."""
        computed = delivered.computed
        return computed.output if self._returns_outputs else None, computed.losses

    def _load(self, settings: RunSettings) -> None:
        self._root.load(settings.updates)
        state = self._root.state()
        if self._functions is None:
            self._functions = CodedFunctions(self._root)
        functions = self._functions
        self._state, self._seeds = state, [state[n] for n in functions.seeds]
        self._weights = functions.read()
        exchange, control = TreeExchange(self._tree), Control(settings)
        control.boxes.append(exchange)  # before anybody else can close it
        self._exchange, self._control = exchange, control
        self._job = Job(self._tree, self._devices, self._root, functions, state, settings.loss_is_mean, self.made)
        kept = 2 * KEPT_SPANS // self._tree.workers if settings.is_traced else 0
        self._threads = [
            TreeWorker(worker, self._job, self._exchange, self._control, kept) for worker in range(self._tree.workers)
        ]
        for thread in self._threads:
            thread.start()

    def _rest(self) -> None:
        """Let workers that are late end."""
        self._stop()
        if self._control.error is not None:
            raise self._control.error

    def _stop(self) -> None:
        self._control.close()
        for thread in self._threads:
            thread.ended(self._lost.gives_up)
            self._spans.extend(thread.spans.columns())
            self._transfers.extend(thread.transfers.columns())
        self._threads = []

    def lose(self, error: Exception) -> None:
        """From another thread: a worker is lost. Whoever waits for workers is given the error."""
        super().lose(error)
        self._control.lose(error)

    def _count(self, settings: RunSettings) -> None:
        (group,) = self._root.groups
        self._steps_done = int(count_of(group.optimizer).numpy()) - settings.updates

    def _outcome(self) -> list[Any]:
        """The weights and the state."""
        state = list(self._state)
        for n, seed in zip(self._functions.seeds if self._functions else (), self._seeds, strict=True):
            state[n] = seed
        return [*self._root.stored(), *state]

    def _store(self, values: Sequence[Any]) -> None:
        count = len(self._root.variables)
        self._root.store(values[:count])
        self._root.store_state(values[count:])


def _fetched(values: Sequence[Any]) -> list[Any]:
    """Nested tensors of several workers, in this process."""
    if len(values) == 1 or all(each is None for each in tf.nest.flatten(values)):
        return [tf.nest.map_structure(_fetch, each) for each in values]
    calls = [CallThread(partial(tf.nest.map_structure, _fetch, each)) for each in values]
    for call in calls:
        call.start()
    for call in calls:
        call.join()
    return [call.outcome() for call in calls]


def _none_of(output: BoundaryTensors | None) -> BoundaryTensors:
    """As many outputs as these, without rows."""

    def empty(tensor: Any) -> Any:
        return None if tensor is None else without_rows(tensor)

    with tf.device(HOST):
        return BoundaryTensors(*tf.nest.map_structure(empty, tuple(output or ((), ()))))


def _fetch(tensor: Any) -> Any:
    return None if tensor is None else here([tensor])[0]


def _ordered(rows: Sequence[Any], places: Any) -> Any:
    if rows[0] is None:
        return None
    with tf.device(HOST):
        return tf.gather(tf.concat(rows, 0), places)
