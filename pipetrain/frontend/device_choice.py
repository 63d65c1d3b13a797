"""Which devices stages go to, what the planner knows of them, and devices that a way to train does not have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from pipetrain.cluster.bandwidth import joined, joined_within_functions
from pipetrain.cluster.connection import remote_devices
from pipetrain.compute.cores import cores, full_name, is_remote
from pipetrain.plan.cluster import PCIE_3, SHARED_MEMORY, Cluster, Level
from pipetrain.simulation.action_costs import THREAD_ACTION_S


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


def described(devices: Sequence[str], within_functions: bool = False) -> Cluster:
    """What the planner should know of these devices: those of one processor share its memory, others PCIe.

    Links between processes and hosts are measured: for calls, or for messages ``within_functions`` over all devices.
    """
    if any(map(is_remote, devices)):
        return joined_within_functions(devices) if within_functions else joined(devices)
    if all("CPU" in device for device in devices):
        return Cluster((Level(SHARED_MEMORY),), processors=len(cores()))
    return Cluster((Level(PCIE_3),), overhead_s=THREAD_ACTION_S)


def check_local(devices: Sequence[str]) -> None:
    """Refuse devices of other processes, which MirroredStrategy does not reach."""
    if any(map(is_remote, devices)):
        raise ValueError(
            f"data-parallel has its copies on this process's devices. Received: devices={[*devices]}. "
            "Try scheme='all-reduce', which reaches other hosts."
        )


def check_remembered(memories: Sequence[Any], devices: int) -> None:
    """Refuse recurrent layers that remember the rows of a whole minibatch, of which each device has a part."""
    if memories and devices > 1:
        raise ValueError(
            "A stateful recurrent layer remembers the rows of a whole minibatch. Received: scheme='data-parallel' with "
            f"{devices} devices, and a model with such a layer. Try scheme='all-reduce', or stateful=False."
        )
