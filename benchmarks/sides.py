"""What is compared: figures of one way to train a network, and Keras' own ways and pipetrain's."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.networks import Network, build, data
from pipetrain.cli.quiet import start_tensorflow
from pipetrain.run.stderr import quiet_stderr
from pipetrain.schemes.table import DATA_PARALLEL

if TYPE_CHECKING:
    import keras

    from pipetrain.trace.trace import Trace

ONE_CORE = ("Keras, 1 core", "Keras, 1 core, XLA")
TOGETHER = 2  # processes that train at once, each by itself
FIRST = 5  # minibatches that fill the pipeline and warm up


class Figures(NamedTuple):
    """One round: samples/s, and how many times one core's that could be if no stage ever waited."""

    samples_per_second: float
    bound: float | None = None


class KerasJob(NamedTuple):
    """One process with so many cores: plain Keras without schemes, or pipetrain's schemes on a core each.

    With a ``rank`` it has the core of this number, and others like it work at once.
    """

    network: Network
    steps: int
    cores: int
    schemes: Sequence[str] = ()
    rank: int | None = None
    xla: bool = True


def work(job: KerasJob) -> Iterator[dict[str, Figures]]:
    """Samples/s of every side that lives in this process, once a round."""
    first = job.rank or 0
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[first : first + job.cores])
    if job.schemes:
        start_tensorflow(job.cores)  # as many devices
    else:
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
        with quiet_stderr():
            import tensorflow as tf

            tf.config.list_logical_devices()  # starts it, with its own choice of threads
    import keras

    keras.utils.set_random_seed(0)
    sides = pipelines(job) if job.schemes else plain(job)
    x, y = data(job.network, job.steps * job.network.batch_size)
    times: list[float] = []
    clock = keras.callbacks.LambdaCallback(on_train_batch_end=lambda step, logs: times.append(time.perf_counter()))

    def figures(model: keras.Model) -> Figures:
        times.clear()
        model.fit(x, y, batch_size=job.network.batch_size, verbose=0, callbacks=[clock])
        step_s = (times[-1] - times[FIRST - 1]) / (len(times) - FIRST)
        rows = job.network.batch_size * (1 if job.rank is None else TOGETHER)
        return Figures(rows / step_s, bound(model))

    for model in sides.values():
        figures(model)
    yield {}
    while True:
        yield {name: figures(model) for name, model in sides.items()}


def plain(job: KerasJob) -> dict[str, keras.Model]:
    """Plain Keras without XLA and, unless it is left out, with it (which is what Keras takes by default)."""
    cores = f"{job.cores} core{'s' if job.cores > 1 else ''}" + ("" if job.rank is None else f", {TOGETHER} at once")
    names = {f"Keras, {cores}": False, f"Keras, {cores}, XLA": True}
    return {name: compiled(build(job.network), jit_compile=xla) for name, xla in names.items() if job.xla or not xla}


def pipelines(job: KerasJob) -> dict[str, Any]:
    """Every scheme, all cut alike: as the planner says."""
    import pipetrain
    from pipetrain.frontend.device_choice import available, described
    from pipetrain.plan.partition import partition

    model = build(job.network)
    profile = pipetrain.profile(model, job.network.batch_size, verbose=False)
    chosen = partition(profile, job.cores, described(available()))
    return {name: compiled(pipetrain.PipelineModel(model, chosen, name)) for name in job.schemes}


def compiled(model: keras.Model, **settings: Any) -> keras.Model:
    """The same optimizer, loss and metric for all."""
    import keras

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(1e-3, momentum=0.9), loss=loss, metrics=["accuracy"], **settings)
    return model


def bound(model: Any) -> float | None:
    """The sum of all stages' times over the slowest's, in the run just done; with data parallelism, the devices."""
    scheme = getattr(model, "scheme", None)
    if scheme is None:
        return None
    if scheme == DATA_PARALLEL:
        return 2.0
    trace: Trace = model.trace
    busy_s = [trace.busy_s(stage) for stage in range(trace.stages)]
    return sum(busy_s) / max(busy_s)
