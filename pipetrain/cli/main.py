"""Plan or simulate training a saved Keras model on several devices, without training it; serve as a worker."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from pipetrain.cli import worker
from pipetrain.cli.argument_types import count, input_shape, input_shapes, positive, share, size, slots
from pipetrain.cli.quiet import start_tensorflow
from pipetrain.plan.advice import advise
from pipetrain.plan.cluster import Cluster
from pipetrain.plan.memory import Training
from pipetrain.plan.profile import Profile
from pipetrain.schemes import table
from pipetrain.simulation.comparison import Comparison, compare
from pipetrain.simulation.reduction import REDUCTIONS

PLAN = """Plan how to train a saved Keras model on several devices, without training it.

Profiles the model's layers on this machine, cuts it into stages, and says what to expect of one device, of data
parallelism, of a pipeline, and of a pipeline whose slow stages have several devices.
"""
PLAN_EXAMPLES = """examples:
  python -m pipetrain plan model.keras --devices 4
  python -m pipetrain plan model.keras --devices 8 --cluster cluster.json --batch-size 256 --memory 16GiB

a cluster file, for hosts with 4 GPUs each:
  {"memory": "16GiB",
   "levels": [{"devices": 4, "bandwidth": "12GB/s", "latency_us": 10},
              {"bandwidth": "10Gb/s", "latency_us": 50}]}
"""
SIMULATE = """Simulate training a saved Keras model on devices that need not be there.

Profiles the model's layers on this machine, cuts it into stages for the devices and links described, and walks the very
schedules of training through a simulated run: every forward, backward, update and transfer. Says for each scheme the
samples/s once the pipeline is full, how much of the time devices do nothing (bubble), which stage computes for most and
for least of it, and how much they wait for what is on its way (transfer).
"""
SIMULATE_EXAMPLES = """examples:
  python -m pipetrain simulate model.keras --devices 4 --cluster cluster.json
  python -m pipetrain simulate model.keras --devices 8 --cluster cluster.json --speed 40 --scheme gpipe --scheme 2bw
  python -m pipetrain simulate model.keras --devices 4 --scheme spectrain --output trace.json

a cluster file, for hosts with 4 GPUs each, which are joined by a switch: what a GPU sends, and what it receives, has to
queue at its port; each host has one network card for all its GPUs:
  {"memory": "16GiB",
   "levels": [{"devices": 4, "bandwidth": "12GB/s", "latency_us": 10, "contention": "port"},
              {"bandwidth": "10Gb/s", "latency_us": 50, "contention": "port"}]}
"contention" may be "none" (each two devices have a link of their own, the default), "port" or "bus" (one transfer at a
time in all the group). Without a cluster file the devices are joined as this machine's are; if these are logical CPU
devices, no more of them work at once than it has cores.

Open what --output writes in ui.perfetto.dev.
"""


class Given(NamedTuple):
    """What the commands start from."""

    profile: Profile
    cluster: Cluster
    training: Training


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status: 2 for what cannot be planned, simulated or served."""
    options = _parse(arguments)
    try:
        if options.command == "worker":
            worker.run(options)
            return 0
        _check_horizon(options.scheme, options.horizon)
        cluster = Cluster.load(options.cluster) if options.cluster else None
        start_tensorflow(options.devices)
        given = _given(options, cluster)
        print(f"{options.run(options, given)}\n{given.profile.warning}".rstrip())
    except (OSError, TypeError, ValueError) as error:
        print(f"pipetrain {options.command}: {error}", file=sys.stderr)
        return 2
    return 0


def _check_horizon(named: str | Sequence[str] | None, horizon: str) -> None:
    """Refuse a horizon that none of the schemes has."""
    chosen = [named] if isinstance(named, str) else named or ["spectrain"]
    if not any(table.has(each, "horizon") for each in chosen):
        table.check_options(chosen[0], horizon, False, None)


def _given(options: argparse.Namespace, cluster: Cluster | None) -> Given:
    import keras

    from pipetrain.compute.profiling.profiler import profile
    from pipetrain.frontend.device_choice import available, described

    device = available()[0]
    cluster = cluster or described([device])
    if options.memory is not None:
        cluster = replace(cluster, memory_bytes=options.memory)
    model = keras.saving.load_model(options.model, compile=False)
    scheme = options.scheme if isinstance(options.scheme, str) else "spectrain"
    gathers = options.slots != 1  # SGD with momentum alone uses each gradient at once
    training = Training(scheme, options.slots, options.microbatches, options.recompute, options.horizon, gathers)
    shapes = input_shapes(options.input_shape)
    return Given(profile(model, options.batch_size, device, sys.stdout.isatty(), shapes), cluster, training)


def _plan(options: argparse.Namespace, given: Given) -> str:
    return str(advise(given.profile, options.devices, given.cluster, given.training))


def _simulate(options: argparse.Namespace, given: Given) -> str:
    chosen = options.scheme or ["single", table.DATA_PARALLEL, "spectrain"]
    profile = given.profile.faster(options.speed)
    comparison = compare(
        profile,
        options.devices,
        chosen,
        given.cluster,
        given.training,
        minibatches=options.minibatches,
        reduction=options.reduction,
        slowdown=options.slowdown,
        seed=options.seed,
    )
    if options.output:
        _save(comparison, options.output)
    title = f"{profile.model}: batch {profile.batch_size}, {options.minibatches} minibatches simulated"
    parts = [title, comparison]
    if not options.scheme:
        advice = advise(profile, options.devices, given.cluster, given.training)
        parts += ["", f"Recommended by the cost model: {advice.recommended}. {advice.reason}"]
    return "\n".join(map(str, parts))


def _save(comparison: Comparison, output: Path) -> None:
    """One trace there; several in files beside it that have the schemes' names."""
    for scheme, trace in comparison.traces.items():
        trace.save(output if len(comparison.traces) == 1 else output.with_stem(f"{output.stem}-{scheme}"))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m pipetrain", description="Pipeline-parallel training for Keras.")
    commands = parser.add_subparsers(required=True, metavar="command", dest="command")
    plan = commands.add_parser(
        "plan",
        help="how to train a saved model on several devices",
        description=PLAN,
        epilog=PLAN_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_common(plan)
    plan.add_argument(
        "--scheme",
        choices=[*table.SCHEMES],
        default="spectrain",
        help="decides on the memory (default: spectrain)",
    )
    plan.set_defaults(run=_plan)
    simulate = commands.add_parser(
        "simulate",
        help="what training it on devices that need not be there would be like",
        description=SIMULATE,
        epilog=SIMULATE_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_common(simulate)
    _add_simulated(simulate)
    simulate.set_defaults(run=_simulate)
    worker.add(commands)
    return parser.parse_args(arguments)


def _add_common(command: argparse.ArgumentParser) -> None:
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
        help="for gpipe, 1f1b and 2bw, which has stages - 1 at least (default: 4)",
    )
    command.add_argument(
        "--horizon",
        choices=table.HORIZONS,
        default=table.HORIZONS[0],
        help="how spectrain predicts, which decides on the memory (default: %(default)s)",
    )
    command.add_argument("--recompute", action="store_true", help="run forwards again instead of keeping activations")


def _add_simulated(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--scheme",
        choices=table.NAMES,
        action="append",
        help="may be given several times (default: single, data-parallel and spectrain)",
    )
    command.add_argument(
        "--minibatches", type=count, default=200, metavar="N", help="how many are trained (default: 200)"
    )
    command.add_argument(
        "--speed", type=positive, default=1.0, metavar="X", help="of the devices, this machine's being 1 (default: 1)"
    )
    command.add_argument(
        "--reduction", choices=REDUCTIONS, default=REDUCTIONS[0], help="how devices sum gradients (default: ring)"
    )
    command.add_argument(
        "--slowdown", type=share, default=0.0, metavar="X", help="how much actions' times vary, such as 0.1"
    )
    command.add_argument("--seed", type=int, default=0, metavar="N", help="of that variation (default: 0)")
    command.add_argument("--output", type=Path, metavar="FILE", help="write the trace, or one for each scheme")
