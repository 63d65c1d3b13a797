"""Refuses losses that cannot be put together from parts of a minibatch, or that no weight decides on."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from pipetrain.compute.functions.stage import Stage


def check_masks(masks: Sequence[Any], divides: bool, parts: int) -> None:
    """Raise ValueError for masked outputs whose loss is a mean over what the mask leaves, a piece at a time."""
    if parts > 1 and divides and any(mask is not None for mask in masks):
        raise ValueError(
            "An output of the model is masked, and Keras divides its loss by the number of entries that are not: it "
            f"cannot be put together from those of its microbatches and replicas. Received: {parts} parts of a "
            "batch. Try reduction='sum', or microbatches=1 and one replica of the last stage."
        )


def check_added(summed: Sequence[bool]) -> None:
    """Raise ValueError if some of the losses that layers add are sums over rows, of which Keras takes devices' mean."""
    if any(summed):
        raise ValueError(
            "A layer adds a loss that is a sum over rows, and MirroredStrategy would take the mean of the devices'. "
            "Received: scheme='data-parallel'. Try a mean over rows in add_loss, or scheme='all-reduce'."
        )


def check_hinges(hinges: Sequence[bool], labels: Sequence[Any]) -> None:
    """Raise ValueError for labels of 0 beside others than 1: a part without these would take 0 for -1.

    ``hinges`` are those among the losses, ``labels`` what these are given; one loss may be for all.
    """
    pairs = zip(hinges if len(hinges) == len(labels) else [any(hinges)] * len(labels), labels, strict=True)
    for y in (np.asarray(each) for is_hinge, each in pairs if is_hinge and each is not None):
        if np.any(y == 0) and not np.isin(y, (0, 1)).all():
            raise ValueError(
                "The loss of a batch cannot be put together from its parts': hinge losses take 0 for -1 where a batch "
                f"has no other labels than 0 and 1. Received: labels from {y.min():g} to {y.max():g}, 0 among them. "
                "Try labels of -1 and 1, or microbatches=1 and one replica of the last stage."
            )


def check_minimised(loss: Any, stages: Sequence[Stage]) -> None:
    """Refuse what has no loss, and weights of which none gets a gradient; warn of those that get none, as Keras does.

    ``stages`` have been traced.
    """
    if loss is None and not any(stage.is_penalized for stage in stages):
        raise ValueError(
            "There is nothing to minimise: no layer adds a loss. Received: compile with loss=None. Try loss='mse'."
        )
    trained = {id(each): each for stage in stages for each in stage.segment.trainable_variables}
    reached = {id(each) for stage in stages for each in stage.reached}
    untrained = [variable.path for each, variable in trained.items() if each not in reached]
    if untrained and not reached:
        raise ValueError(
            "No gradient of the loss reaches a weight that is trained. Received: trainable variables "
            f"{_some(untrained)}. Try a loss of outputs that depend on them, or a model without stop_gradient."
        )
    if untrained:
        warnings.warn(f"The loss has no gradient by these variables, which stay: {_some(untrained)}.", stacklevel=2)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 12 else f"{', '.join(names[:6])}, ... ({len(names)} in all)"
