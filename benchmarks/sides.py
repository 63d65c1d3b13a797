"""What is compared: figures of one way to train a network, and Keras' own ways and pipetrain's."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from benchmarks.instruction_sets import set_onednn
from benchmarks.networks import Network, build, data
from benchmarks.step_times import ends_s, mean_s
from pipetrain.cli.environment import start_tensorflow
from pipetrain.logs import quiet_stderr
from pipetrain.schemes.options import with_options
from pipetrain.schemes.table import DATA_PARALLEL

if TYPE_CHECKING:
    import keras

    from benchmarks.expected import Expected
    from pipetrain.trace.trace import Trace

TOGETHER = 2  # processes that train at once, each by itself
FIRST = 5  # minibatches that fill the pipeline and warm up
LOGICAL_GPU_MIB = 8192  # of each of two logical GPUs of one card, which plain Keras' process has too
JIT_COMPILE: dict[str, Any] = {"auto": "auto", "true": True, "false": False}
SETTINGS = {"auto": "", "true": ", XLA", "false": ", no XLA"}  # of jit_compile, in the names of pipetrain's sides


class Figures(NamedTuple):
    """One round: samples/s; how many times one core's that could be if no stage ever waited; samples/s expected."""

    samples_per_second: float
    bound: float | None = None
    predicted: float | None = None


class KerasJob(NamedTuple):
    """One process on so many cores, or GPUs: plain Keras without schemes, or pipetrain's schemes on a device each.

    With a ``rank`` it has the core of this number, and others like it work at once. ``onednn`` is the value of
    TensorFlow's switch for oneDNN's kernels, None for TensorFlow's own choice.
    """

    network: Network
    steps: int
    cores: int
    schemes: Sequence[str] = ()
    rank: int | None = None
    xla: bool = True
    onednn: str | None = None
    jit_compile: Sequence[str] = ("auto",)
    predict: bool = False
    gpus: bool = False


def work(job: KerasJob) -> Iterator[dict[str, Figures]]:
    """Samples/s of every side that lives in this process, once a round."""
    start(job)
    import keras

    keras.utils.set_random_seed(0)
    sides, expected = pipelines(job) if job.schemes else (plain(job), None)
    x, y = data(job.network, job.steps * job.network.batch_size)

    def figures(model: keras.Model, predicted: float | None = None) -> Figures:
        taken_s = mean_s(ends_s(model, x, y, job.network.batch_size), FIRST)
        rows = job.network.batch_size * (1 if job.rank is None else TOGETHER)
        return Figures(rows / taken_s, None if job.gpus else bound(model), predicted)

    for model in sides.values():
        figures(model)
    yield {}
    while True:
        rates = expected.rates() if expected else {}
        yield {name: figures(model, rates.get(name)) for name, model in sides.items()}


def start(job: KerasJob) -> None:
    """Start TensorFlow with the cores, devices and kernels that the job is to have."""
    set_onednn(job.onednn)
    if job.gpus:
        start_gpus(job.cores)
        return
    first = job.rank or 0
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[first : first + job.cores])
    if job.schemes:
        start_tensorflow(job.cores)  # as many devices
        return
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    with quiet_stderr():
        import tensorflow as tf

        tf.config.list_logical_devices()  # starts it, with its own choice of threads


def start_gpus(count: int) -> None:
    """Start TensorFlow with the GPUs, or with so many logical ones of the only card; other processes have it too."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    with quiet_stderr():
        import tensorflow as tf

        cards = tf.config.list_physical_devices("GPU")
        if len(cards) == 1 and count > 1:
            parts = [tf.config.LogicalDeviceConfiguration(memory_limit=LOGICAL_GPU_MIB)] * count
            tf.config.set_logical_device_configuration(cards[0], parts)
        else:
            for card in cards:
                tf.config.experimental.set_memory_growth(card, True)
        tf.config.list_logical_devices()


def plain_names(
    unit: str, count: int = 1, at_once: bool = False, onednn: Sequence[bool] = (False, True)
) -> dict[str, bool]:
    """The names of plain Keras on so many cores or GPUs, with whichever kernels; and whether XLA compiles it."""
    devices = f"{count} {unit}{'s' if count > 1 else ''}"
    whole = [f"Keras, {devices}" + (f", {TOGETHER} at once" if at_once else "") + each * ", oneDNN" for each in onednn]
    return {name + xla * ", XLA": xla for name in whole for xla in (False, True)}


def plain(job: KerasJob) -> dict[str, keras.Model]:
    """Plain Keras without XLA and, unless it is left out, with it (which is what Keras takes by default)."""
    names = plain_names("GPU" if job.gpus else "core", job.cores, job.rank is not None, [job.onednn == "1"])
    return {name: compiled(build(job.network), jit_compile=xla) for name, xla in names.items() if job.xla or not xla}


def pipelines(job: KerasJob) -> tuple[dict[str, Any], Expected | None]:
    """Every scheme, cut as the planner cuts for it; and what is expected of them, if that is wanted."""
    import pipetrain
    from benchmarks.expected import Expected, microbatches, profiled, training
    from experiments.variants import variant
    from pipetrain.frontend.layout import available, described
    from pipetrain.plan.partition import partition

    model, devices = build(job.network), available()
    profiles: dict[int | None, Any] = {}  # by how many microbatches there are
    for name in job.schemes:
        if microbatches(name) not in profiles:
            profiles[microbatches(name)] = profiled(model, job.network, name)
    partitions, sides = {}, {}
    for name in job.schemes:
        planned_for = training("single" if name == DATA_PARALLEL else name)
        partitions[name] = partition(profiles[microbatches(name)], job.cores, described(devices), training=planned_for)
        for setting in job.jit_compile:
            scheme, horizon, *_ = variant(name)
            pipe = pipetrain.PipelineModel(
                model, partitions[name], with_options(scheme, horizon=horizon), microbatches=microbatches(name)
            )
            sides[name + SETTINGS[setting]] = compiled(pipe, jit_compile=JIT_COMPILE[setting])
    planned = {name: each for name, each in partitions.items() if name not in ("single", DATA_PARALLEL)}
    return sides, Expected(model, job.network, planned, devices) if job.predict else None


def compiled(model: keras.Model, **settings: Any) -> keras.Model:
    """The same optimizer, loss and metric for all."""
    import keras

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(1e-3, momentum=0.9), loss=loss, metrics=["accuracy"], **settings)
    return model


def bound(model: Any) -> float | None:
    """The sum of all devices' times over the busiest's, in the run just done; with data parallelism, the devices."""
    scheme = getattr(model, "scheme", None)
    if scheme is None:
        return None
    if scheme == DATA_PARALLEL:
        return 2.0
    trace: Trace = model.trace
    spans = trace.spans
    busy_s = np.bincount(spans.device.index, spans.end_s - spans.start_s)
    return float(busy_s.sum() / busy_s.max())
