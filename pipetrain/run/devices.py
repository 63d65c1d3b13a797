"""TensorFlow devices: logical CPU devices, and which device each stage gets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache

import tensorflow as tf

from pipetrain.compute.cores import cores, full_name, is_remote
from pipetrain.plan.cluster import PCIE_3, SHARED_MEMORY, Cluster, Level
from pipetrain.run.connection import remote_devices
from pipetrain.run.links import joined


def set_cpu_devices(count: int) -> None:
    """Split the CPU into ``count`` logical TensorFlow devices, ``CPU:0`` to ``CPU:count-1``.

    The processor's cores are divided among them. Must come before TensorFlow starts (before the first
    tensor or model); asking again for the same number does nothing.

    Raises:
        ValueError: count below 1.
        RuntimeError: TensorFlow has already started with another number of CPU devices.
    """
    if not isinstance(count, int) or count < 1:
        raise ValueError(f"There must be at least one CPU device. Received: count={count!r}. Try set_cpu_devices(4).")
    cpu = tf.config.list_physical_devices("CPU")[0]
    configured = tf.config.get_logical_device_configuration(cpu)
    if configured is not None and len(configured) == count:
        return
    try:
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * count)
        tf.config.threading.set_intra_op_parallelism_threads(max(1, len(cores()) // count))
        tf.config.threading.set_inter_op_parallelism_threads(count)
    except RuntimeError as error:
        raise RuntimeError(
            f"TensorFlow has already started, so its CPU devices are fixed. Received: count={count}. "
            "Try calling pipetrain.set_cpu_devices first, before any tensor or model is made."
        ) from error


def available() -> list[str]:
    """The devices that stages go to by default: workers', if this process has joined a cluster, else its own.

    Of its own: logical CPU devices if there are several, else GPUs, else the CPU.
    """
    if workers := remote_devices():
        return workers
    cpus, gpus = tf.config.list_logical_devices("CPU"), tf.config.list_logical_devices("GPU")
    chosen = cpus if len(cpus) > 1 or not gpus else gpus
    return [device.name for device in chosen]


def resolve(devices: Sequence[str] | None) -> list[str]:
    """Full TensorFlow names of ``devices``, such as ``CPU:0``; ``available()`` where None.

    Raises ValueError for a name TensorFlow does not have, listing those it has.
    """
    if devices is None:
        return available()
    if isinstance(devices, str) or not devices:
        raise ValueError(f"One device name or more is needed. Received: devices={devices!r}. Try devices=('CPU:0',).")
    return [full_name(name) for name in devices]


def assign(devices: Sequence[str], stages: int) -> list[str]:
    """A device for each stage: neighbours share one where there are fewer devices than stages."""
    used = devices[:stages]
    return [used[stage * len(used) // stages] for stage in range(stages)]


def described(devices: Sequence[str]) -> Cluster:
    """What the planner should know of these devices: those of one processor share its memory, others PCIe.

    Links between processes and hosts are measured.
    """
    if any(map(is_remote, devices)):
        return joined(devices)
    if all("CPU" in device for device in devices):
        return Cluster((Level(SHARED_MEMORY),), processors=len(cores()))
    return Cluster((Level(PCIE_3),))


def transfer(tensor: tf.Tensor, device: str) -> tf.Tensor:
    """The tensor for a reader on another device; TensorFlow does the copy. CPU devices of one process need none.

    Nor do another process' devices: the call that reads a tensor there copies it, once. Asked for by itself a copy
    would cost two messages more, a call and a tensor to let go, and the sender would wait for whatever the reader's
    process was given before.
    """
    if not _needs_copy(tensor.device, device):
        return tensor
    with tf.device(device):
        return tf.identity(tensor)


def here(tensors: Iterable[tf.Tensor]) -> list[tf.Tensor]:
    """The tensors, those on devices of other processes copied to this one."""
    return [transfer(each, "/device:CPU:0") if is_remote(each.device) else each for each in tensors]


@cache
def _needs_copy(source: str, device: str) -> bool:
    """Whether a tensor on the one device must be copied for a reader on the other."""
    if is_remote(device) or (source.endswith(device) and not is_remote(source)):
        return False
    return not (_shares_memory(source) and _shares_memory(device))


def _shares_memory(device: str) -> bool:
    return "device:CPU:" in device and not is_remote(device)


def size_bytes(tensors: Iterable[tf.Tensor | None]) -> int:
    """What the elements of all tensors take.

    A tensor that is asked for its shape gives up Python's lock for every dimension, for its elements' number once.
    """
    return sum(each._num_elements() * each.dtype.size for each in tensors if each is not None)
