"""PipelineModel: a Keras model that trains as a pipeline of stages."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import keras
import tensorflow as tf

from pipetrain import checks
from pipetrain.engine import PipelineEngine
from pipetrain.layout import Layout
from pipetrain.mirror import MirroredEngine
from pipetrain.plan.partition import Partition
from pipetrain.plan.schemes import DATA_PARALLEL, SCHEMES, check_name
from pipetrain.plan.trace import Trace
from pipetrain.run.collector import Result
from pipetrain.run.devices import resolve
from pipetrain.run.readahead import Minibatch


class PipelineModel(keras.Model):
    """Trains a Keras model as a pipeline: stages on several devices, many minibatches in flight.

    It is a ``keras.Model``: ``compile``, ``fit``, ``evaluate``, ``predict`` and ``save`` are Keras' own, its
    weights those of the wrapped model in the same order. While a pipeline runs, each stage owns its weights; at the
    end of every epoch, and before anything reads or saves the model, it drains and they flow back.

    Sources: SpecTrain (arXiv 1809.02839), PipeDream (arXiv 1806.03377), GPipe (arXiv 1811.06965).

    Args:
        model: a Sequential model, or a Functional one without branches.
        stages: how many stages (the model is then profiled and cut at the first ``fit``), or a ``Partition``.
            By default one per device. ``single`` always uses one.
        scheme: ``single``, ``data-parallel``, ``vanilla``, ``weight-stashing``, ``vertical-sync``, ``spectrain``,
            ``gpipe`` or ``1f1b``.
        cuts: instead of ``stages``, the name of the last layer of every stage but the final one.
        devices: TensorFlow devices, such as ``("CPU:0", "CPU:1")``; by default all logical CPU devices if there are
            several, else all GPUs. Fewer devices than stages: neighbours share.
        replicas: not there yet.
        microbatches: pieces per minibatch for ``gpipe`` and ``1f1b``, 4 by default; the other schemes have one.
        recompute: not there yet.
        name: the model's name.

    Raises:
        ValueError, TypeError: for whatever could not be trained, before anything is.
    """

    def __init__(
        self,
        model: keras.Model,
        stages: int | Partition | None = None,
        scheme: str = "spectrain",
        *,
        cuts: Sequence[str] | None = None,
        devices: Sequence[str] | None = None,
        replicas: Sequence[int] | None = None,
        microbatches: int | None = None,
        recompute: bool = False,
        name: str | None = None,
    ) -> None:
        check_name(scheme)
        checks.check_not_yet(replicas, recompute)
        checks.check_microbatches(microbatches)
        layout = Layout(model, stages, cuts, resolve(devices))
        if scheme == "single":
            layout = Layout(model, 1, None, resolve(devices))
        engine: Any
        if scheme == DATA_PARALLEL:
            engine = MirroredEngine(model, layout.distinct_devices)
        else:
            split = scheme in ("gpipe", "1f1b")
            engine = PipelineEngine(model, layout, SCHEMES[scheme], (microbatches or 4) if split else 1)
        with engine.strategy.scope():
            super().__init__(name=name or model.name)
        self.scheme = scheme
        self.snapshot_every = 0
        # What Keras sees as this model's layers: the model, or its mirrored copy.
        self.inner = engine.trained
        self._engine, self._layout = engine, layout
        self._original = (model,)  # in a tuple, which Keras does not search for layers
        self.built = True
