"""TensorFlow devices by name, and the processor core that a logical CPU device has to itself."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import tensorflow as tf

# Where data are read. Rows taken of them on the default device, a GPU, would wait for the stage there.
HOST = "/device:CPU:0"
OWN_POOLS = "TF_OVERRIDE_GLOBAL_THREADPOOL"  # TensorFlow's switch, which it reads when it makes its devices
_LOCAL = "/job:localhost/replica:0/task:0"
LOCAL_HOST = f"{_LOCAL}{HOST}"  # its name among those of workers


def full_name(name: str) -> str:
    """TensorFlow's full name of a device such as ``CPU:0``; raises ValueError for an unknown one."""
    present = [device.name for device in tf.config.list_logical_devices()]
    wanted = _of_a_task(name).upper()
    for full in present:
        if wanted in (full.upper(), full.upper().removeprefix("/DEVICE:")):
            return full
    raise ValueError(
        f"TensorFlow has no such device. Received: devices=... {name!r}. "
        f"Try one of: {', '.join(full.removeprefix('/device:') for full in present)}; "
        "more CPU devices come from pipetrain.set_cpu_devices."
    )


@cache  # asked for several times an action
def is_remote(device: str) -> bool:
    """Whether a device, by its full name, is in another process: only then does the name have a job."""
    return device.startswith("/job:") and not device.startswith("/job:localhost/")


def is_processor(device: str) -> bool:
    """Whether a device, by its full name, is a processor, of this process or another."""
    return "CPU" in device


def processor_of(device: str) -> str:
    """The first processor of the process that has a device, each by its full name."""
    return str(tf.DeviceSpec.from_string(device).replace(device_type="CPU", device_index=0).to_string())


def is_prompt(device: str) -> bool:
    """Whether calls on a device are finished when they return, as they are on a CPU of this process."""
    return is_processor(device) and not is_remote(device)


def with_job(device: str) -> str:
    """A device's full name as variables and functions have it, this process's devices with a job too."""
    return device if device.startswith("/job:") else f"{_LOCAL}{device}"


def finish(device: str) -> None:
    """Wait until a GPU or another process has finished all that was called on it."""
    if not is_prompt(device):
        with tf.device(device):
            (tf.zeros([]) + 1.0).numpy()


def _of_a_task(name: str) -> str:
    """A worker's device as TensorFlow writes it, with replica 0; other names are unchanged."""
    try:
        spec = tf.DeviceSpec.from_string(name)
    except ValueError:
        return name
    return name if spec.job is None else spec.replace(replica=0, task=spec.task or 0).to_string()


def cores() -> list[int]:
    """The processor cores this process may use."""
    known = hasattr(os, "sched_getaffinity")  # on Linux
    return sorted(os.sched_getaffinity(0)) if known else list(range(os.cpu_count() or 1))


def own_machine() -> str:
    """Equal for processes of one machine, whose cores they share, in whatever containers they are."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()


def own_host() -> str:
    """Equal for processes of one machine, and there of one network namespace: containers may be far apart."""
    try:
        return own_machine() + os.readlink("/proc/self/ns/net")
    except OSError:
        return own_machine()


def give_own_pools() -> None:
    """Let each CPU device have a pool of threads of its own, unless the user has decided on that."""
    os.environ.setdefault(OWN_POOLS, "1")


def has_pool(device: str) -> bool:
    """Whether no CPU device of this process waits for a thread of TensorFlow's pools; True for other devices."""
    cpus = [cpu.name for cpu in tf.config.list_logical_devices("CPU") if not is_remote(cpu.name)]
    threads = tf.config.threading.get_intra_op_parallelism_threads() or len(cores())  # 0 stands for the default
    return not is_prompt(device) or os.environ.get(OWN_POOLS, "0") in ("1", "true") or threads >= len(cpus)


def pin(device: str) -> None:
    """Keep this thread on its CPU device's core, where each device has one: a thread that moves slows others down."""
    known = cores()
    cpus = [cpu.name for cpu in tf.config.list_logical_devices("CPU") if not is_remote(cpu.name)]
    if device in cpus and 1 < len(cpus) <= len(known) and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, [known[cpus.index(device)]])


@contextmanager
def pinned(device: str) -> Iterator[None]:
    """``pin`` this thread, and undo it at the end."""
    before = cores()
    try:
        pin(device)
        yield
    finally:
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, before)
