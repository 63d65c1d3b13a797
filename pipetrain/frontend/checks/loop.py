"""Refuses ways of running Keras' loop, and callbacks in it, that training by stages does not have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras

from pipetrain.schemes.arguments import checked_count


def check_loop(run_eagerly: bool, steps_per_execution: int) -> None:
    """Refuse ways of running a step that a pipeline does not have."""
    if run_eagerly:
        raise ValueError("Stages run as TensorFlow functions. Received: run_eagerly=True. Try run_eagerly=False.")
    if steps_per_execution != 1:
        raise ValueError(
            "Keras' loop gives the pipeline minibatches one by one. Received: "
            f"steps_per_execution={steps_per_execution}, set after compile. Try it as an argument of compile."
        )


def checked_steps(steps_per_execution: Any) -> int | None:
    """How many minibatches a call is to have, None if that is not asked. Raises ValueError for what is no number."""
    if steps_per_execution is None:
        return None
    problem = "The minibatches of a call are a whole number of at least 1"
    return checked_count("steps_per_execution", steps_per_execution, problem, 1)


def check_callbacks(callbacks: Sequence[Any], optimizer: keras.optimizers.Optimizer) -> None:
    """Refuse the callback that swaps weights with averages of them, where none are kept."""
    swaps = any(isinstance(each, keras.callbacks.SwapEMAWeights) for each in callbacks)
    if swaps and not optimizer.use_ema:
        raise ValueError(
            "There are no averages of weights to swap with. Received: callbacks with SwapEMAWeights, "
            f"optimizer={type(optimizer).__name__}(use_ema=False). Try an optimizer with use_ema=True."
        )


def check_backup(callbacks: Sequence[Any], scheme: str, beside_slots: Callable[[], Sequence[str]]) -> None:
    """Refuse Keras' backup where training needs more to go on than a Keras file holds: ``beside_slots``."""
    backs_up = any(isinstance(each, keras.callbacks.BackupAndRestore) for each in callbacks)
    if backs_up and (left_out := beside_slots()):
        raise ValueError(
            f"Training would not go on as it was: to predict weights, {scheme!r} remembers more of the last step than "
            f"a Keras file holds. Received: callbacks with BackupAndRestore, which leaves out {[*left_out]}. "
            "Try pipetrain.callbacks.PipelineCheckpoint."
        )
