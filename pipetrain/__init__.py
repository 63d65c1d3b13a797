"""Pipeline-parallel training for Keras and TensorFlow: SpecTrain, PipeDream, GPipe."""

from __future__ import annotations

import os
import sys

if sys.argv[:1] == ["-m"] and sys.orig_argv[-len(sys.argv)] == __name__ and sys.path[0] == os.getcwd():
    # This is python -m pipetrain: what lies in the current folder shadows no other module.
    sys.path.append(sys.path.pop(0))

from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING, Any

from pipetrain import logs
from pipetrain.compute import processor

if TYPE_CHECKING:
    from pipetrain import callbacks
    from pipetrain.cluster.connection import connect
    from pipetrain.cluster.health import WorkerLost
    from pipetrain.cluster.local_workers import LocalWorkers
    from pipetrain.compute.optimizer.muon import AttentiveMuon
    from pipetrain.compute.profiling.profiler import profile
    from pipetrain.devices import on_host, set_cpu_devices
    from pipetrain.frontend.worker_data import data
    from pipetrain.logs import set_verbosity
    from pipetrain.model import PipelineModel
    from pipetrain.plan.partition import partition
    from pipetrain.plan.profile import Profile
    from pipetrain.plan.stages import Partition
    from pipetrain.schemes.compression import BFloat16, Compression, Float16, Int4, Int8, PowerSGD, RandomK, Sign, TopK
    from pipetrain.schemes.grid import Grid
    from pipetrain.schemes.options import (
        ZBH1,
        ZBH2,
        ZBV,
        AllReduce,
        Auto,
        CodedReduce,
        GPipe,
        Interleaved,
        LoopedBFS,
        OneFOneB,
        ParameterServer,
        SpecTrain,
        SpikeCompensation,
        TwoBW,
        Vanilla,
        VerticalSync,
        VHalf,
        VMin,
        WeightStashing,
    )
    from pipetrain.schemes.synchrony import Asynchronous, Gossip, LocalSGD, Stale
    from pipetrain.simulation.coded_reduce import simulate_tree
    from pipetrain.simulation.every_way import choose
    from pipetrain.simulation.grid import simulate_grid
    from pipetrain.simulation.profiled import simulate_order
    from pipetrain.simulation.simulator import simulate
    from pipetrain.trace.idle import idle
    from pipetrain.trace.trace import Trace

__all__ = [
    "ZBH1",
    "ZBH2",
    "ZBV",
    "AllReduce",
    "Asynchronous",
    "AttentiveMuon",
    "Auto",
    "BFloat16",
    "CodedReduce",
    "Compression",
    "Float16",
    "GPipe",
    "Gossip",
    "Grid",
    "Int4",
    "Int8",
    "Interleaved",
    "LocalSGD",
    "LocalWorkers",
    "LoopedBFS",
    "OneFOneB",
    "ParameterServer",
    "Partition",
    "PipelineModel",
    "PowerSGD",
    "Profile",
    "RandomK",
    "Sign",
    "SpecTrain",
    "SpikeCompensation",
    "Stale",
    "TopK",
    "Trace",
    "TwoBW",
    "VHalf",
    "VMin",
    "Vanilla",
    "VerticalSync",
    "WeightStashing",
    "WorkerLost",
    "callbacks",
    "choose",
    "connect",
    "data",
    "idle",
    "on_host",
    "partition",
    "profile",
    "set_cpu_devices",
    "set_verbosity",
    "simulate",
    "simulate_grid",
    "simulate_order",
    "simulate_tree",
]
__version__ = "0.1.0"

logs.set_up()
processor.switch_on()  # which only serves before TensorFlow is loaded

_HOMES = {
    "AllReduce": "pipetrain.schemes.options",
    "Asynchronous": "pipetrain.schemes.synchrony",
    "AttentiveMuon": "pipetrain.compute.optimizer.muon",
    "Auto": "pipetrain.schemes.options",
    "BFloat16": "pipetrain.schemes.compression",
    "CodedReduce": "pipetrain.schemes.options",
    "Compression": "pipetrain.schemes.compression",
    "Float16": "pipetrain.schemes.compression",
    "GPipe": "pipetrain.schemes.options",
    "Gossip": "pipetrain.schemes.synchrony",
    "Grid": "pipetrain.schemes.grid",
    "Int4": "pipetrain.schemes.compression",
    "Int8": "pipetrain.schemes.compression",
    "Interleaved": "pipetrain.schemes.options",
    "LocalSGD": "pipetrain.schemes.synchrony",
    "LocalWorkers": "pipetrain.cluster.local_workers",
    "LoopedBFS": "pipetrain.schemes.options",
    "OneFOneB": "pipetrain.schemes.options",
    "ParameterServer": "pipetrain.schemes.options",
    "Partition": "pipetrain.plan.stages",
    "PipelineModel": "pipetrain.model",
    "PowerSGD": "pipetrain.schemes.compression",
    "Profile": "pipetrain.plan.profile",
    "RandomK": "pipetrain.schemes.compression",
    "Sign": "pipetrain.schemes.compression",
    "SpecTrain": "pipetrain.schemes.options",
    "SpikeCompensation": "pipetrain.schemes.options",
    "Stale": "pipetrain.schemes.synchrony",
    "TopK": "pipetrain.schemes.compression",
    "Trace": "pipetrain.trace.trace",
    "TwoBW": "pipetrain.schemes.options",
    "VHalf": "pipetrain.schemes.options",
    "VMin": "pipetrain.schemes.options",
    "Vanilla": "pipetrain.schemes.options",
    "VerticalSync": "pipetrain.schemes.options",
    "WeightStashing": "pipetrain.schemes.options",
    "WorkerLost": "pipetrain.cluster.health",
    "ZBH1": "pipetrain.schemes.options",
    "ZBH2": "pipetrain.schemes.options",
    "ZBV": "pipetrain.schemes.options",
    "choose": "pipetrain.simulation.every_way",
    "connect": "pipetrain.cluster.connection",
    "data": "pipetrain.frontend.worker_data",
    "idle": "pipetrain.trace.idle",
    "on_host": "pipetrain.devices",
    "partition": "pipetrain.plan.partition",
    "profile": "pipetrain.compute.profiling.profiler",
    "set_cpu_devices": "pipetrain.devices",
    "set_verbosity": "pipetrain.logs",
    "simulate": "pipetrain.simulation.simulator",
    "simulate_grid": "pipetrain.simulation.grid",
    "simulate_order": "pipetrain.simulation.profiled",
    "simulate_tree": "pipetrain.simulation.coded_reduce",
}


def __getattr__(name: str) -> Any:
    """Import a public name at its first use, so that ``pipetrain.plan`` alone needs no TensorFlow."""
    if name == "callbacks":
        return import_module("pipetrain.callbacks")
    if name not in _HOMES:
        near = get_close_matches(name, __all__, 1)
        raise AttributeError(
            f"module 'pipetrain' has no attribute {name!r}" + "".join(f". Did you mean: {each!r}?" for each in near)
        )
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
