"""What planning and simulating start from: a profiled model, devices, and how it is to be trained."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from pipetrain.cli.arguments import (
    MICROBATCHES,
    budget,
    count,
    input_shape,
    input_shapes,
    scheme_named,
    size,
    whole,
)
from pipetrain.cli.environment import start_tensorflow
from pipetrain.compute.profiling.limits import BUDGET_S
from pipetrain.plan.cluster import Cluster
from pipetrain.plan.memory import Training
from pipetrain.plan.profile import Profile
from pipetrain.schemes import table
from pipetrain.schemes.options import (
    OF_PIPELINES,
    AnyScheme,
    allowed,
    each_compressing,
    name_of,
    scheduled,
    with_horizon,
)
from pipetrain.schemes.scheme import Scheme
from pipetrain.schemes.text_form import microbatches_of, stages_of
from pipetrain.simulation.every_way import CROSSING, SENT


class PlanningInputs(NamedTuple):
    """A profile, the devices and how they are joined, how it is trained; a profile of microbatches, if it has any.

    ``schemes`` are those that are named, with their options, and a file's schedule in place of its name. Where they are
    one pipeline, ``training`` has it.
    """

    profile: Profile
    cluster: Cluster
    training: Training
    of_microbatches: Profile | None
    schemes: Sequence[AnyScheme]


def ahead(schemes: Sequence[str | Scheme], horizon: str | float) -> list[AnyScheme]:
    """The schemes, with this horizon as far as they have it. Raises ValueError for one that none of them has."""
    if not any(table.takes(each, horizon) for each in schemes):
        table.check_horizon(schemes[0], horizon)
    return [with_horizon(each, horizon) for each in schemes]


def schemes_of(names: Sequence[str], options: argparse.Namespace) -> list[str | Scheme]:
    """The schemes of these names, files' schedules among them, with as many stages on a device as are asked for.

    Raises ValueError for files that hold no schedule, or one for other devices or microbatches, and for ``--chunks`` if
    no scheme takes them.
    """
    several = [name for name in names if name in table.CHUNKED] or names
    schemes = [scheme_named(name, options.chunks if name in several else None) for name in names]
    for scheme in schemes:
        stages, microbatches = stages_of(scheme), microbatches_of(scheme)
        if isinstance(scheme, Scheme) and stages is not None:
            devices = scheme.schedule.devices(stages)
            if options.devices != devices or options.microbatches not in (None, microbatches):
                raise ValueError(
                    f"The schedule of a file is for its own devices and microbatches. Received: --scheme {scheme}, "
                    f"--devices {options.devices}, --microbatches {options.microbatches}. "
                    f"Try --devices {devices} --microbatches {microbatches}."
                )
    return schemes


def given(options: argparse.Namespace, names: Sequence[str], check: Callable[[str | Scheme], object]) -> PlanningInputs:
    """Profile the model that the options name, to be trained by the schemes of these names, each of which is checked.

    Raises OSError, TypeError, ValueError for what cannot be planned.
    """
    schemes = schemes_of(names, options)
    for scheme in schemes:
        check(scheme)
    asked = each_compressing(ahead(schemes, options.horizon), options.compression, options.replica_compression)
    of_file = Cluster.load(options.cluster) if options.cluster else None
    measured, here = on_this_machine(options)
    cluster = of_file or here
    if options.memory is not None:
        cluster = replace(cluster, memory_bytes=options.memory)
    pipelines = [each for each in asked if isinstance(each, Scheme) or name_of(each) in table.PIPELINES]
    trained = pipelines[0] if len(asked) == len(pipelines) == 1 else "spectrain"
    microbatches = options.microbatches or microbatches_of(scheduled(trained)) or MICROBATCHES
    slots = options.slots
    gathers, temporaries = slots != 1, 0 if slots == 1 else 2  # 1: SGD with momentum, which uses each gradient at once
    training = Training(trained, slots, microbatches, options.recompute, gathers, temporaries=temporaries)
    pieces = min(options.devices, options.batch_size)
    of_microbatches = measured(pieces) if pieces > 1 else None
    return PlanningInputs(measured(1), cluster, training, of_microbatches, asked)


def on_this_machine(options: argparse.Namespace) -> tuple[Callable[[int], Profile], Cluster]:
    """What profiles the model with minibatches in as many pieces as it is given, and how devices are joined here."""
    start_tensorflow(options.devices)
    import keras

    from pipetrain.compute.profiling.profiler import profile
    from pipetrain.frontend.layout import available, described

    device = available()[0]
    model = keras.saving.load_model(options.model, compile=False)
    shapes = input_shapes(options.input_shape)

    sent = {getattr(options, name) for name in OF_PIPELINES} - {None}
    sent |= {*SENT, CROSSING} if "compression" in allowed(getattr(options, "allow", None) or ()) else set()

    def measured(pieces: int) -> Profile:
        given = options.batch_size, device, sys.stdout.isatty(), shapes, pieces, options.budget
        return profile(model, *given, sorted(sent))

    return measured, described([device])


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
    command.add_argument(
        "--budget",
        type=budget,
        default=BUDGET_S,
        metavar="SECONDS",
        help="what each profile that is needed may take: the longest layers are measured first, the rest is estimated; "
        "inf measures all (default: %(default)g)",
    )
    command.add_argument("--memory", type=size, metavar="SIZE", help="what a device holds, such as 16GiB")
    command.add_argument(
        "--slots",
        type=whole,
        default=1,
        metavar="N",
        help="optimizer variables a weight: 1 for momentum, 2 for Adam",
    )
    command.add_argument(
        "--microbatches",
        type=count,
        metavar="N",
        help="of synchronous schemes, spectrain with --horizon target, and 2bw, where it is at least stages - 1 "
        f"(default: {MICROBATCHES}, or those of the file)",
    )
    command.add_argument("--recompute", action="store_true", help="run forwards again instead of keeping activations")
