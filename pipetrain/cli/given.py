"""What planning and simulating start from: a profiled model, devices, and how it is to be trained."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from pipetrain.cli.argument_types import count, horizon, input_shape, input_shapes, size, slots
from pipetrain.cli.quiet import start_tensorflow
from pipetrain.plan.cluster import Cluster
from pipetrain.plan.memory import Training
from pipetrain.plan.profile import Profile
from pipetrain.schemes import table
from pipetrain.simulation.schedule_trials import pieces_to_measure


class Given(NamedTuple):
    """A profile, the devices and how they are joined, how it is trained; a profile of microbatches, if it has any."""

    profile: Profile
    cluster: Cluster
    training: Training
    of_microbatches: Profile | None


def check_horizon(named: str | Sequence[str] | None, horizon: str | float) -> None:
    """Refuse a horizon that none of the schemes has."""
    chosen = [named] if isinstance(named, str) else named or ["spectrain"]
    if not any(table.takes(each, horizon) for each in chosen):
        table.check_horizon(chosen[0], horizon)


def given(options: argparse.Namespace) -> Given:
    """Profile the model that the options name. Raises OSError, TypeError, ValueError for what cannot be planned."""
    check_horizon(options.scheme, options.horizon)
    cluster = Cluster.load(options.cluster) if options.cluster else None
    start_tensorflow(options.devices)
    import keras

    from pipetrain.compute.profiling.profiler import profile
    from pipetrain.frontend.device_choice import available, described

    device = available()[0]
    cluster = cluster or described([device])
    if options.memory is not None:
        cluster = replace(cluster, memory_bytes=options.memory)
    model = keras.saving.load_model(options.model, compile=False)
    is_open = options.scheme == table.AUTO
    scheme = options.scheme if isinstance(options.scheme, str) and not is_open else "spectrain"
    gathers = options.slots != 1  # SGD with momentum alone uses each gradient at once
    training = Training(scheme, options.slots, options.microbatches, options.recompute, options.horizon, gathers)
    about = model, options.batch_size, device, sys.stdout.isatty(), input_shapes(options.input_shape)
    named = [options.scheme] if isinstance(options.scheme, str) else options.scheme or []
    counts = [pieces_to_measure(training.under(each), options.devices) for each in named if each in table.PIPELINES]
    pieces = min(options.devices if is_open else max(counts, default=1), options.batch_size)
    return Given(profile(*about), cluster, training, profile(*about, pieces) if pieces > 1 else None)


def add_common(command: argparse.ArgumentParser) -> None:
    """The options of both commands."""
    command.add_argument("model", type=Path, metavar="MODEL.keras", help="a model that Keras saved")
    command.add_argument("--devices", type=count, required=True, metavar="N", help="how many devices there are")
    command.add_argument(
        "--cluster", type=Path, metavar="FILE", help="how they are joined (default: as here), see below"
    )
    command.add_argument(
        "--batch-size", type=count, default=128, metavar="N", help="rows of a minibatch (default: 128)"
    )
    command.add_argument(
        "--input-shape",
        type=input_shape,
        action="append",
        default=[],
        metavar="[NAME=]N,N",
        help="where the model leaves dimensions open: an input's sizes without the batch, such as 64,64,3; given once "
        "for each input in order, or by name",
    )
    command.add_argument("--memory", type=size, metavar="SIZE", help="what a device holds, such as 16GiB")
    command.add_argument(
        "--slots",
        type=slots,
        default=1,
        metavar="N",
        help="optimizer variables a weight: 1 for momentum, 2 for Adam",
    )
    command.add_argument(
        "--microbatches",
        type=count,
        default=4,
        metavar="N",
        help="of synchronous schemes, spectrain with --horizon target, and 2bw, where it is at least stages - 1 "
        "(default: 4)",
    )
    command.add_argument(
        "--horizon",
        type=horizon,
        default=table.HORIZONS[0],
        metavar="NAME|X",
        help=f"how spectrain predicts ({', '.join(table.HORIZONS)}), or how many updates ahead 2bw does, which decides "
        "on the memory (default: %(default)s)",
    )
    command.add_argument("--recompute", action="store_true", help="run forwards again instead of keeping activations")
