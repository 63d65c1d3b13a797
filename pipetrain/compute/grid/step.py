"""One training step over a grid of devices, as one function that TensorFlow runs on all of them.

Every device computes its part of each wide layer for all rows of its model group, and all other layers for its own
rows. Gradients of a wide layer's part are summed over the devices that have it, those of other weights over all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import tensorflow as tf

from pipetrain.compute.grid.group_run import GroupRun
from pipetrain.compute.grid.values import ModelGroup
from pipetrain.compute.grid.weights import GridWeights
from pipetrain.compute.transfers.message import Order, sent
from pipetrain.compute.transfers.record import Record, RecordedMessage
from pipetrain.compute.transfers.reduction import reduced
from pipetrain.compute.transfers.step import Rows, StepResult, collected
from pipetrain.compute.transfers.weights import Shares
from pipetrain.compute.transfers.worker import Worker
from pipetrain.schemes.transfers.plan import Pack, Phase


class GridStep:
    """The step's functions, one for each number of rows that minibatches have.

    Args:
        weights: of all devices, whose pieces have been traced.
        workers: the devices, each with its state.
        host: this process's device, to which results come.
    """

    is_late = False

    def __init__(self, weights: GridWeights, workers: Sequence[Worker], host: str) -> None:
        self.weights, self.workers, self.host = weights, list(workers), host
        self._like = [tf.TensorSpec(each.shape, each.dtype) for each in weights.segment.inputs], weights.targets
        self._functions: dict[Any, Any] = {}
        self._sent: dict[Any, list[RecordedMessage]] = {}

    def __call__(self, rows: Sequence[Rows], pending: bool, records: bool) -> tuple[StepResult, list[RecordedMessage]]:
        """One step, and the messages that were recorded if it ``records`` them."""
        given = {each.worker: (*each.inputs, each.shares) for each in rows}
        counts = self._counts(given)
        key = counts, records
        if key not in self._functions:
            record = Record() if records else None
            function = tf.function(partial(self._body, counts, record), autograph=False)
            like = tf.nest.map_structure(
                _with_rows, given, {n: (*self._like, Shares(*[tf.TensorSpec([])] * 2)) for n in given}
            )
            self._functions[key] = function.get_concrete_function(like)
            self._sent[key] = record.messages if record else []
        result: StepResult = self._functions[key](given)
        return result, self._sent[key]

    def _counts(self, given: Mapping[int, Any]) -> tuple[int, ...]:
        """How many rows are each device's own."""
        grid = self.weights.grid
        every = grid.outputs if self.weights.reads_whole else 1
        return grid.counts(sum(int(each[0][0].shape[0]) for n, each in given.items() if n % every == 0))

    def prepare(self) -> None:
        """Nothing is returned to workers."""

    def flush(self) -> None:
        """Nothing waits for a next step."""

    def _body(self, counts: Sequence[int], record: Record | None, given: Mapping[int, Any]) -> StepResult:
        grid, devices = self.weights.grid, [worker.device for worker in self.workers]
        runs = []
        for part in range(grid.rows):
            numbers = grid.group(part)
            own = [counts[n] for n in numbers]
            if any(own) or (not part and not any(counts)):  # of a minibatch without rows the first has these
                group = ModelGroup([devices[n] for n in numbers], own, record)
                mine = {n: given[n] for n in numbers if n in given}
                share = sum(own) / sum(counts) if any(own) else 1.0
                runs.append(GroupRun(self.weights, self.workers, group, numbers, mine, share))
        for run in runs:
            run.forward()
        for run in runs:
            run.backward()
        self._assign(runs)
        self.weights.apply(self._sums(runs, record))
        return collected(
            self.host,
            [each for run in runs for each in run.losses],
            [each for run in runs for each in run.penalties],
            [each for run in runs for each in run.outputs],
            record,
        )

    def _assign(self, runs: Sequence[GroupRun]) -> None:
        """What layers assign: to state on the same device, to weights on all, by the first where nothing was run."""
        left: dict[int, dict[int, Any]] = {}
        for run in runs:
            for n, state in run.state.items():
                worker = self.workers[n]
                numbers = [k for k, variable in enumerate(worker.state) if id(variable) in run.assigned]
                worker.assign(numbers, [state[id(worker.state[k])] for k in numbers])
            left |= run.left
        for number, (worker, group) in enumerate(zip(self.workers, self.weights.groups, strict=True)):
            source = number if number in left else next(iter(left), number)
            for n, value in left.get(source, {}).items():
                there = sent(value, self.workers[source].device, worker.device, [])
                with tf.device(worker.device):
                    group.variables[n].assign(there)

    def _sums(self, runs: Sequence[GroupRun], record: Record | None) -> list[dict[int, Any]]:
        """Of every device, the gradients' sums."""
        grid, like, divided = self.weights.grid, self.weights.gradients_like, set(self.weights.divided)
        devices = [worker.device for worker in self.workers]
        gradients = {n: each for run in runs for n, each in run.gradients.items()}
        sums: list[dict[int, Any]] = [{} for _ in devices]
        common = [n for n in like if n not in divided]
        made = [(devices[n], each) for n, each in gradients.items() if any(k in each for k in common)]
        for found, each in zip(sums, _reduced(record, made, devices, common, like), strict=True):
            found.update(each)
        for rank in range(grid.outputs):
            numbers = grid.batch_group(rank)
            on = [devices[n] for n in numbers]
            mine = {k: self._part_like(rank, k) for k in like if k in divided}
            made = [(devices[n], gradients[n]) for n in numbers if n in gradients]
            for n, each in zip(numbers, _reduced(record, made, on, list(mine), mine), strict=True):
                sums[n].update(each)
        return sums

    def _part_like(self, rank: int, number: int) -> tf.TensorSpec:
        variable = self.weights.groups[rank].variables[number]
        return tf.TensorSpec(variable.shape, self.weights.gradients_like[number].dtype)


def _reduced(
    record: Record | None, made: Sequence[Any], sinks: Sequence[str], numbers: Sequence[int], like: Mapping[int, Any]
) -> list[dict[int, Any]]:
    """Each weight's sum as it is ready, one message for each."""
    if not numbers:
        return [{} for _ in sinks]
    phase = Phase(tuple(Pack((n,), 0) for n in reversed(numbers)), 0)
    return reduced(Order(phase, "push", record), made, sinks, {n: like[n] for n in numbers})


def _with_rows(tensor: tf.Tensor | None, like: tf.TensorSpec | None) -> tf.TensorSpec | None:
    """A spec with the tensor's own number of rows."""
    if tensor is None or like is None:
        return None
    return tf.TensorSpec([*tensor.shape[:1], *like.shape[1:]], like.dtype)
