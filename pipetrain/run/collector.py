"""The reports of all stages, and how they are joined: microbatches to results, stages' weights to snapshots."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from pipetrain.compute.functions.stage_function import joined_loss
from pipetrain.compute.functions.stage_values import BoundaryTensors, KeptStage, joined_rows


class Microbatch(NamedTuple):
    """One microbatch on its way down the stages.

    ``number`` counts microbatches since the pipeline was last empty, ``minibatch`` counts minibatches;
    ``group`` are the microbatches of the same minibatch. ``share`` is its part of the minibatch's rows, ``rows`` their
    number; ``loss_is_mean``: whether a loss is the mean over them. ``values`` are None for a replica that has none of
    the rows. ``targets`` are the labels and sample weights, for the last stage; ``penalty`` the regularization losses
    of the stages passed.
    """

    number: int
    minibatch: int
    group: range
    share: float
    loss_is_mean: bool
    rows: int
    learning_rate: float | None
    values: BoundaryTensors | None
    targets: Any
    penalty: tf.Tensor | None = None

    @property
    def loss_share(self) -> float:
        """The factor of this microbatch's loss in the minibatch's."""
        return self.share if self.loss_is_mean else 1.0

    def with_values(self, values: Any) -> Microbatch:
        """A copy of this microbatch with other values, such as some of the rows."""
        return self._replace(values=values)

    def passed(self, penalty: tf.Tensor | None) -> Microbatch:
        """This microbatch after a stage's forward: its inputs released, the stage's penalty added."""
        if penalty is None:
            return self._replace(values=None)
        return self._replace(values=None, penalty=penalty if self.penalty is None else self.penalty + penalty)


class OutputReport(NamedTuple):
    """The report of one forward by a replica of the last stage; without loss and predictions where it had no rows."""

    microbatch: Microbatch
    replica: int
    loss: tf.Tensor | None
    predictions: BoundaryTensors | None


class UpdateReport(NamedTuple):
    """A replica's report of one update: minibatches applied since the start, and the weights if asked for."""

    stage: int
    replica: int
    version: int
    snapshot: list[tf.Tensor] | None


class Result(NamedTuple):
    """One minibatch's loss, a number or one of every example, and the predictions it was computed from."""

    loss: tf.Tensor
    predictions: BoundaryTensors


class Snapshot(NamedTuple):
    """Every stage's weights and state after the same number of updates."""

    version: int
    stages: list[list[tf.Tensor]]


class Collector:
    """Results in the order of their minibatches, and complete snapshots.

    A synchronous result is complete once every stage has made the minibatch's update; an asynchronous one as soon as
    the last stage has run it.

    Args:
        replicas: of each stage.
        synchronous: which of the two.
        updates_before: updates made before those that are reported.
    """

    def __init__(self, replicas: Sequence[int], synchronous: bool, updates_before: int) -> None:
        self.results: deque[Result] = deque()
        self.snapshots: deque[Snapshot] = deque()
        self._synchronous, self._updates_before = synchronous, updates_before
        self._stages, self._last_replicas = len(replicas), replicas[-1]
        self._versions = {(stage, replica): 0 for stage, count in enumerate(replicas) for replica in range(count)}
        self._released = 0
        self._outputs: defaultdict[int, list[OutputReport]] = defaultdict(list)
        self._waiting: deque[Result] = deque()
        self._parts: defaultdict[int, dict[int, list[tf.Tensor]]] = defaultdict(dict)

    def add(self, report: OutputReport | UpdateReport) -> None:
        """Take one report."""
        if isinstance(report, OutputReport):
            outputs = self._outputs[report.microbatch.minibatch]
            outputs.append(report)
            if len(outputs) == self._last_replicas * len(report.microbatch.group):
                in_order = sorted(outputs, key=lambda output: (output.microbatch.number, output.replica))
                self._waiting.append(_joined([output for output in in_order if output.loss is not None]))
                del self._outputs[report.microbatch.minibatch]
        else:
            self._versions[report.stage, report.replica] = report.version
            if report.snapshot is not None:
                self._add_snapshot(report.stage, report.version, report.snapshot)
        while self._waiting and (not self._synchronous or self._released < min(self._versions.values())):
            self.results.append(self._waiting.popleft())
            self._released += 1

    def _add_snapshot(self, stage: int, version: int, values: list[tf.Tensor]) -> None:
        parts = self._parts[version]
        parts[stage] = values
        if len(parts) == self._stages:
            del self._parts[version]
            ordered = [parts[k] for k in range(len(parts))]
            self.snapshots.append(Snapshot(self._updates_before + version, ordered))


def _joined(outputs: list[OutputReport]) -> Result:
    """A minibatch's result from its microbatches', by the shares of these in its loss and in its rows."""
    of = [output.microbatch for output in outputs]
    losses = [(output.loss, each.loss_share) for output, each in zip(outputs, of, strict=True)]
    penalties = [(each.penalty, each.share) for each in of if each.penalty is not None]
    return Result(joined_loss(losses, penalties), joined_rows([output.predictions for output in outputs]))


class InFlight(NamedTuple):
    """What is in flight in a pipeline that does not flush, minibatches counted since it was empty.

    Attributes:
        slices: what calls have been made, see ``Course.slice``: each up to so many results, and where fewer minibatches
            had come than it asks for, how many had. What is in flight does not depend on how earlier ones were cut.
        posted: of every minibatch that matters, its number, rows and learning rate; the rates of those too that have
            been posted and not gone in: they are read again, and would have another rate.
        specs: of what the last call has left, as functions know it.
        held: that, as tensors.
        results: those that are there and that no step has taken.
        parts: the weights kept for snapshots that not all stages have come to, by version and stage.
        snapshots: those that are complete, and after how many updates they are given.
    """

    slices: list[tuple[int, int | None]]
    posted: list[tuple[int, int, float | None]]
    specs: Any
    held: list[tf.Tensor]
    results: list[Result]
    parts: dict[int, dict[int, list[Any]]]
    snapshots: list[tuple[int, Snapshot]]


class Kept(NamedTuple):
    """All that the devices hold between two calls, after so many results have been ``taken`` since they last drained.

    ``stages`` are those of all replicas of every stage. Where nothing is in flight between two calls, ``taken`` is 0,
    and training goes on from it as after a drain. A call has so many ``minibatches``.
    """

    stages: list[list[KeptStage]]
    taken: int = 0
    in_flight: InFlight | None = None
    minibatches: int = 1
