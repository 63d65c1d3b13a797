"""How the compiled loss of a minibatch is put together from those of its microbatches and replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from pipetrain.frontend.checks.loss import check_masks
from pipetrain.frontend.divided_loss import undivided
from pipetrain.frontend.input_data import Weigh
from pipetrain.frontend.loss_reduction import Way, divides, is_known, ways
from pipetrain.frontend.loss_trial import found_way
from pipetrain.frontend.metrics import TrackedMetrics


class LossOfParts:
    """Lives as long as a compilation.

    Args:
        loss: as ``compile`` was given it.
        parts: of a minibatch's rows, each with its own loss.
        metrics: which compute the loss.

    ``weigh`` gives what minibatches have in place of sample weights; None where they keep them.

    Raises:
        ValueError: for reductions that cannot be put together.
    """

    def __init__(self, loss: Any, parts: int, metrics: TrackedMetrics) -> None:
        self._loss, self._parts, self._metrics = loss, parts, metrics
        self._ways: list[Way] = ways(loss, parts)
        self._is_tried = parts == 1 or is_known(loss)
        self.weigh: Weigh | None = metrics.divide(loss).with_divisors if self._ways == ["divided"] else None

    @property
    def is_mean(self) -> bool:
        """Whether a minibatch's loss is the mean over its rows, else the sum of theirs; known once it is tried."""
        return self._ways[0] == "mean"

    @property
    def is_tried(self) -> bool:
        """Whether that is known; else when the first minibatch is there."""
        return self._is_tried

    def try_on(self, y: Any, sample_weight: Any, outputs: Sequence[tf.TensorSpec]) -> None:
        """See by labels and weights such as these. Raises ValueError for a loss that cannot be put together."""
        given = self._metrics.loss, self.weigh, y, undivided(sample_weight), outputs
        self._ways, self._is_tried = [found_way(self._ways, *given, named(self._loss))], True

    def check_masks(self, masks: Sequence[Any]) -> None:
        """Raise ValueError if the loss cannot be put together where outputs have these masks."""
        check_masks(masks, divides(self._loss), self._parts)


def named(loss: Any) -> str:
    """The losses by their names."""
    return ", ".join(
        str(getattr(each, "__name__", None) or getattr(each, "name", None) or each) for each in keras.tree.flatten(loss)
    )
