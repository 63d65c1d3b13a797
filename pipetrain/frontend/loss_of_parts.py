"""How the compiled loss of a minibatch is put together from those of its microbatches and replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from pipetrain.frontend.checks.loss import check_hinges, check_masks
from pipetrain.frontend.divided_loss import undivided
from pipetrain.frontend.input_data import Weigh
from pipetrain.frontend.known_masks import are_masked, masks_from_inputs
from pipetrain.frontend.loss_reduction import Way, divides, hinges, is_known, ways
from pipetrain.frontend.loss_trial import found_way
from pipetrain.frontend.metrics import TrackedMetrics


class LossOfParts:
    """Lives as long as a compilation.

    Args:
        loss: as ``compile`` was given it.
        parts: of a minibatch's rows, each with its own loss.
        metrics: which compute the loss.
        model: whose outputs it is of.

    ``weigh`` gives what minibatches have in place of sample weights; None where they keep them.

    Raises:
        ValueError: for reductions that cannot be put together.
    """

    def __init__(self, loss: Any, parts: int, metrics: TrackedMetrics, model: keras.Model) -> None:
        self._loss, self._parts, self._metrics = loss, parts, metrics
        known = is_known(loss, model.outputs)
        self._is_tried = parts == 1 or known
        self._masks = masks_from_inputs(model) if parts > 1 and known else None
        self._masked = are_masked(model) if self._masks else []
        self._ways: list[Way] = ways(loss, parts, model.outputs, self._masks is not None)
        self._divided = metrics.divide(loss) if self._ways == ["divided"] else None
        self.weigh: Weigh | None = self._weighed if self._divided else None

    def _weighed(self, y: Any, sample_weight: Any, inputs: Sequence[tf.Tensor]) -> Any:
        assert self._divided is not None
        masks = self._masks(inputs) if self._masks else []
        return self._divided.with_divisors(y, sample_weight, tf.shape(inputs[0])[0], masks)

    @property
    def is_mean(self) -> bool:
        """Whether a minibatch's loss is the mean over its rows, else the sum of theirs; known once it is tried."""
        return self._ways[0] == "mean"

    def try_on(self, y: Any, sample_weight: Any, outputs: Callable[[], Sequence[tf.TensorSpec]]) -> None:
        """See by labels and weights such as the first minibatch's, if only that tells, for outputs of these specs.

        Raises ValueError for a loss that cannot be put together.
        """
        if self._parts > 1 and any(hinges(self._loss)):
            check_hinges(hinges(self._loss), keras.tree.flatten(y))
        if self._parts > 1 and self._loss is not None and y is not None:
            self._check_whole(y, undivided(sample_weight), outputs())
        if self._is_tried:
            return
        divided = self._divided.with_divisors if self._divided else None
        given = self._metrics.loss, divided, y, undivided(sample_weight), outputs()
        self._ways, self._is_tried = [found_way(self._ways, *given, named(self._loss))], True

    def _check_whole(self, y: Any, sample_weight: Any, outputs: Sequence[tf.TensorSpec]) -> None:
        """Raise ValueError for labels that fit a part's outputs alone, such as one for every class of as many rows."""
        rows = next(iter(tf.nest.flatten(y))).shape[0]
        whole = [tf.TensorSpec([rows, *each.shape[1:]], each.dtype) for each in outputs]
        y, sample_weight = tf.nest.map_structure(
            lambda each: None if each is None else tf.TensorSpec(each.shape, each.dtype), (y, sample_weight)
        )
        with keras.StatelessScope():
            try:
                tf.function(self._metrics.loss, autograph=False).get_concrete_function(y, whole, sample_weight)
            except (TypeError, ValueError) as error:
                labels, shapes = tf.nest.map_structure(lambda each: each if each is None else each.shape, (y, whole))
                raise ValueError(
                    f"The loss of a whole batch cannot be computed: {error} Received: y of shape {labels} for outputs "
                    f"of shape {shapes}. Try labels of the shape that the loss takes."
                ) from error

    def check_masks(self, masks: Sequence[Any]) -> None:
        """Raise ValueError if the loss cannot be put together where outputs have these masks."""
        if not self._masked or self._masked != [mask is not None for mask in masks]:
            check_masks(masks, divides(self._loss), self._parts)


def named(loss: Any) -> str:
    """The losses by their names."""
    return ", ".join(
        str(getattr(each, "__name__", None) or getattr(each, "name", None) or each) for each in keras.tree.flatten(loss)
    )
