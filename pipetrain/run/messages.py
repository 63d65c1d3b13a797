"""What travels through the pipeline: microbatches downstream, reports to the caller."""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

from pipetrain.compute.stage import Values


class Microbatch(NamedTuple):
    """One microbatch on its way down the stages.

    ``index`` counts microbatches since the pipeline was last empty, ``minibatch`` counts minibatches;
    ``group`` are the microbatches of the same minibatch. ``share`` is its part of the minibatch's rows,
    ``loss_share`` the factor of its loss in the minibatch's. ``targets`` are the labels and sample weights, for
    the last stage; ``penalty`` the regularization losses of the stages passed.
    """

    index: int
    minibatch: int
    group: range
    share: float
    loss_share: float
    learning_rate: float | None
    values: Values | None
    targets: Any
    penalty: tf.Tensor | None = None

    def passed(self, penalty: tf.Tensor | None) -> Microbatch:
        """This microbatch after a stage's forward: its inputs let go, the stage's penalty added."""
        penalties = [each for each in (self.penalty, penalty) if each is not None]
        return self._replace(values=None, penalty=tf.add_n(penalties) if penalties else None)


class Output(NamedTuple):
    """The last stage's report of one forward."""

    microbatch: Microbatch
    loss: tf.Tensor
    predictions: Values


class Updated(NamedTuple):
    """A stage's report of one update: minibatches applied since the start, and the weights if asked for."""

    stage: int
    version: int
    snapshot: list[tf.Tensor] | None
