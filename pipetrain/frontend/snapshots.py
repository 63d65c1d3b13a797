"""Weights of earlier steps, handed out in the model's own variables."""

from __future__ import annotations

from collections.abc import Iterator

import keras
import tensorflow as tf

from pipetrain.compute.graph.beside import beside
from pipetrain.run.pipeline import Pipeline


def handed_out(pipeline: Pipeline, model: keras.Model) -> Iterator[int]:
    """Each version kept by now: the model holds its weights, and the stages rest, until the next is asked for.

    At the end the model has the weights that it had, unless the pipeline has handed back others meanwhile.
    """
    if not pipeline.snapshots:
        return
    variables = [*model.variables, *beside(model)]
    newest, drained = [tf.identity(variable.value) for variable in variables], pipeline.is_drained
    with pipeline.paused():
        try:
            while pipeline.snapshots:
                snapshot = pipeline.snapshots.popleft()
                pipeline.restore(snapshot)
                yield snapshot.version
        finally:  # after a drain they are what training goes on with; an abort has handed back newer ones
            if pipeline.is_drained == drained:
                for variable, value in zip(variables, newest, strict=True):
                    variable.assign(value)
