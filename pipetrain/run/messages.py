"""What travels through the pipeline: microbatches downstream, reports to the caller."""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

from pipetrain.compute.functions.stage_values import BoundaryTensors


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
