"""Pipeline-parallel training for Keras and TensorFlow: SpecTrain, PipeDream, GPipe."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipetrain import callbacks
    from pipetrain.compute.profiler import profile
    from pipetrain.model import PipelineModel
    from pipetrain.plan.partition import partition
    from pipetrain.plan.profile import Profile
    from pipetrain.plan.simulator import simulate
    from pipetrain.plan.stages import Partition
    from pipetrain.plan.trace import Trace
    from pipetrain.run.connection import connect
    from pipetrain.run.devices import set_cpu_devices
    from pipetrain.run.local import LocalWorkers

__all__ = [
    "LocalWorkers",
    "Partition",
    "PipelineModel",
    "Profile",
    "Trace",
    "callbacks",
    "connect",
    "partition",
    "profile",
    "set_cpu_devices",
    "simulate",
]
__version__ = "0.1.0"

_HOMES = {
    "LocalWorkers": "pipetrain.run.local",
    "Partition": "pipetrain.plan.stages",
    "PipelineModel": "pipetrain.model",
    "Profile": "pipetrain.plan.profile",
    "Trace": "pipetrain.plan.trace",
    "connect": "pipetrain.run.connection",
    "partition": "pipetrain.plan.partition",
    "profile": "pipetrain.compute.profiler",
    "set_cpu_devices": "pipetrain.run.devices",
    "simulate": "pipetrain.plan.simulator",
}


def __getattr__(name: str) -> Any:
    """Import a public name at its first use, so that ``pipetrain.plan`` alone needs no TensorFlow."""
    if name == "callbacks":
        return import_module("pipetrain.callbacks")
    if name not in _HOMES:
        raise AttributeError(f"module 'pipetrain' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
