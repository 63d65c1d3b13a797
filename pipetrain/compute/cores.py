"""Processor cores: which there are, and which one a logical CPU device has to itself."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import tensorflow as tf


def cores() -> list[int]:
    """The processor cores this process may use."""
    known = hasattr(os, "sched_getaffinity")  # on Linux
    return sorted(os.sched_getaffinity(0)) if known else list(range(os.cpu_count() or 1))


def pin(device: str) -> None:
    """Keep this thread on its CPU device's core, where each device has one: threads that wander disturb others."""
    known = cores()
    cpus = [cpu.name for cpu in tf.config.list_logical_devices("CPU")]
    if device in cpus and 1 < len(cpus) <= len(known) and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, [known[cpus.index(device)]])


@contextmanager
def pinned(device: str) -> Iterator[None]:
    """``pin``, and back at the end."""
    before = cores()
    pin(device)
    try:
        yield
    finally:
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, before)
