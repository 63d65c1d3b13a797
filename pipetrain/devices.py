"""Which devices TensorFlow has, and where a model is made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import tensorflow as tf

from pipetrain.cluster.connection import joins
from pipetrain.compute.cores import HOST, cores, give_own_pools
from pipetrain.schemes.arguments import checked_count


def set_cpu_devices(count: int) -> None:
    """Split the CPU into ``count`` logical TensorFlow devices, ``CPU:0`` to ``CPU:count-1``.

    The processor's cores are divided among them, and each has a pool of threads of its own, so that stages which XLA
    compiles run at once (``TF_OVERRIDE_GLOBAL_THREADPOOL=1``, unless the variable is set). Must come before TensorFlow
    starts (before the first tensor or model); asking again for the same number does nothing. Once workers have been
    joined, as in a script of ``pipetrain launch``, it does nothing either: their devices train.

    Raises:
        ValueError: count below 1.
        RuntimeError: TensorFlow has already started with another number of CPU devices.
    """
    count = checked_count("count", count, "There must be at least one CPU device", 4)
    if joins():
        return
    cpu = tf.config.list_physical_devices("CPU")[0]
    configured = tf.config.get_logical_device_configuration(cpu)
    if configured is not None and len(configured) == count:
        return
    try:
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * count)
        tf.config.threading.set_intra_op_parallelism_threads(max(1, len(cores()) // count))
        # Of each device's own pool. More threads than there are cores look for work that is not there, and take time.
        tf.config.threading.set_inter_op_parallelism_threads(max(2, len(cores()) // count))
        give_own_pools()
    except RuntimeError as error:
        raise RuntimeError(
            f"TensorFlow has already started, so its CPU devices are fixed. Received: count={count}. "
            "Try calling pipetrain.set_cpu_devices first, before any tensor or model is made."
        ) from error


@contextmanager
def on_host() -> Iterator[None]:
    """Within, models are made, or loaded from files, in the host's memory, and none of them on a GPU.

    Keras makes a whole model on the first GPU, which may not hold it. ``PipelineModel`` gives every device the weights
    and slots of its stages alone, so that a model of any size trains which its stages' devices hold together::

        with pipetrain.on_host():
            model = build()
        pm = pipetrain.PipelineModel(model, stages=8)

    The model's own variables stay in the host's memory. What computes with the model itself, such as
    ``model.predict``, computes there; ``pm.predict`` and ``pm.evaluate`` compute on the stages' devices.
    """
    with tf.device(HOST):
        yield
