"""How many updates training has made: the compiled optimizer's count, kept right while a runner is ahead of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from pipetrain.compute.keras_private import count_of
from pipetrain.compute.optimizer.loss_scaling import is_dynamic, stepping
from pipetrain.frontend.attributes import known


class UpdateCount:
    """The updates of one strategy, since its optimizer was made and since a ``fit`` began.

    Keras' step counts the minibatch whose result it takes; a runner has made updates for later minibatches too. Those
    are added when it drains. The count of an optimizer that another one wraps, to scale the loss, is of the minibatches
    that made a step: it is right after a drain only.

    ``told`` counts the minibatches since the last drain that the compiled optimizer has been told of.
    """

    def __init__(self) -> None:
        self.told = tf.Variable(0, dtype=tf.int64, trainable=False)
        self._optimizer: keras.optimizers.Optimizer | None = None
        self._fitted_before = self._made_before = 0  # of this fit, and of the runner, when they were last set

    def learn_optimizer(self, optimizer: keras.optimizers.Optimizer) -> None:
        """The compiled optimizer is another one."""
        self._optimizer = optimizer

    @property
    def variable(self) -> Any:
        """The compiled optimizer's own count."""
        return count_of(known(self._optimizer))

    @property
    def updates(self) -> int:
        """Those of the optimizer up to the last drain."""
        return int(self.variable.numpy()) - int(self.told.numpy())

    @property
    def steps(self) -> int:
        """The steps among these; of a scaled loss, those that were not skipped, as counted at the last drain."""
        optimizer = known(self._optimizer)
        return int(count_of(stepping(optimizer)).numpy()) if is_dynamic(optimizer) else self.updates

    def set(self, updates: int) -> None:
        """The optimizer has made so many."""
        self.variable.assign(updates)

    def set_fitted(self, updates: int, runner: Any) -> None:
        """This ``fit`` has made so many by now."""
        self._fitted_before, self._made_before = updates, runner.made if runner else 0

    def fitted(self, runner: Any) -> int:
        """Updates since the start of ``fit``, up to the last drain."""
        return self._fitted_before + runner.made - self._made_before if runner else 0

    @contextmanager
    def during(self, runner: Any) -> Iterator[None]:
        """What the runner updates meanwhile, the optimizer counts: from where it is, should someone have set it."""
        before = runner.made
        try:
            yield
        finally:
            if ahead := runner.made - before - int(self.told.numpy()):
                self.variable.assign_add(ahead)
            self.told.assign(0)
            if runner.made > before:
                runner.loss_scale.hand_back(self._optimizer)
