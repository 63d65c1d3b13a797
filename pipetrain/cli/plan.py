"""``python -m pipetrain plan``: how to train a saved model; with ``--balance``, how to divide which of its layers."""

from __future__ import annotations

import argparse
import math
from typing import Any

from pipetrain.cli.arguments import Folded, add_scheme, add_scheme_options, part
from pipetrain.cli.given import add_common, given, schemes_of
from pipetrain.plan.balance import Balance
from pipetrain.plan.cluster import Cluster
from pipetrain.plan.profile import Profile
from pipetrain.schemes import table
from pipetrain.schemes.options import OF_PIPELINES, STALENESS, check_owned
from pipetrain.schemes.scheme import Scheme
from pipetrain.simulation.every_way import Chooser

NO_SUMS = "No stage has several devices, whose sums --replica-compression could change."
ABOUT = """Plan how to train a saved Keras model on several devices, without training it.

Profiles the model's layers on this machine, cuts it into stages, and says what to expect of one device, of data
parallelism, of a pipeline, and of a pipeline whose slow stages have several devices; and, as simulated, of data
parallelism that sends weights or gradients while it computes (all-reduce, parameter-server). With a synchronous scheme,
such as 1f1b, or a schedule of a file, which "python -m pipetrain schedule --csv" writes, it compares all synchronous
schedules, each with the microbatches that suit it, and recommends one. With
--scheme auto it lists every way to train with its predicted rate, and the one that PipelineModel(scheme="auto") takes.
"""
EXAMPLES = """examples:
  python -m pipetrain plan model.keras --devices 4
  python -m pipetrain plan model.keras --devices 4 --scheme 1f1b --memory 2GiB
  python -m pipetrain plan model.keras --devices 4 --scheme interleaved --chunks 3 --microbatches 8
  python -m pipetrain plan model.keras --devices 4 --scheme mine.csv
  python -m pipetrain plan model.keras --devices 4 --scheme 1f1b --compression int8
  python -m pipetrain plan model.keras --devices 4 --scheme auto --staleness predicted
  python -m pipetrain plan model.keras --devices 4 --scheme auto --allow compression,local
  python -m pipetrain plan model.keras --devices 8 --cluster cluster.json --batch-size 256 --memory 16GiB
  python -m pipetrain plan model.keras --devices 8 --cluster cluster.json --batch-size 256 --balance

a cluster file, for hosts with 4 GPUs each:
  {"memory": "16GiB",
   "levels": [{"devices": 4, "bandwidth": "12GB/s", "latency_us": 10},
              {"bandwidth": "10Gb/s", "latency_us": 50}]}
"""


def add(commands: Any) -> None:
    """Add the command ``plan``."""
    command = commands.add_parser(
        "plan",
        help="how to train a saved model on several devices",
        description=ABOUT,
        epilog=EXAMPLES,
        formatter_class=Folded,
    )
    add_common(command)
    about = "; decides on the memory, and what is compared (default: spectrain)"
    add_scheme(command, [*table.PIPELINES, table.AUTO], about, default="spectrain")
    add_balance(command)
    options = ("horizon", "chunks", *OF_PIPELINES, "staleness", "allow")
    add_scheme_options(command, options, defaults={"staleness": STALENESS[0]})
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Print the plan."""
    check_balance(options)
    asked = {"staleness": None if options.staleness == STALENESS[0] else options.staleness, "allow": options.allow}
    asked |= {name: getattr(options, name) for name in OF_PIPELINES}
    check_owned(asked, *schemes_of([options.scheme], options))
    profile, cluster, training, of_microbatches, _ = given(options, [options.scheme], _check_planned)
    if options.balance:
        print(balance(options, profile, cluster))
        return
    chooser = Chooser(
        profile, options.devices, cluster, training, of_microbatches, options.staleness, allow=options.allow or ()
    )
    if options.scheme == table.AUTO:
        print(chooser.choice().explained())
    else:
        way, cut = chooser.of(training.scheme)
        choice = chooser.choice((way, cut))
        changes_nothing = options.replica_compression is not None and max(cut.replicas) == 1
        print(choice.explained(cut, NO_SUMS if changes_nothing else ""))


def _check_planned(scheme: str | Scheme) -> None:
    """Refuse names of no scheme, and of those that have no schedule, which are compared anyway."""
    if scheme != table.AUTO:
        table.scheme(scheme)


PASSES = 3  # of a training step: forward, and both gradients of each product


def add_balance(command: argparse.ArgumentParser) -> None:
    """The options."""
    command.add_argument(
        "--balance",
        action="store_true",
        help="instead, which layers should be data-parallel and which model-parallel, by the operations that each has "
        "for a byte that it sends",
    )
    overlap = command.add_mutually_exclusive_group()
    overlap.add_argument(
        "--no-overlap", action="store_true", help="--balance where no gradients are sent while layers compute"
    )
    overlap.add_argument(
        "--overlap",
        type=part,
        metavar="X",
        help="--balance where so much of the gradients' exchange goes on meanwhile, from 0 to 1 (default: 1)",
    )
    command.add_argument(
        "--as-printed",
        action="store_true",
        help="--balance by the inequality as its source prints it: one pass of model parallelism beside three of data "
        "parallelism",
    )


def check_balance(options: argparse.Namespace) -> None:
    """Raise ValueError for what only the table has, where another plan is asked for."""
    asked = {"--no-overlap": options.no_overlap, "--overlap": options.overlap is not None}
    flags = [flag for flag, value in {**asked, "--as-printed": options.as_printed}.items() if value]
    if flags and not options.balance:
        raise ValueError(f"Only --balance has this. Received: {' and '.join(flags)}. Try it with --balance.")


def balance(options: argparse.Namespace, profile: Profile, cluster: Cluster) -> str:
    """The table. The operations a second are those that the profile's seconds come to."""
    import keras

    from pipetrain.compute.graph.blocks import Chain
    from pipetrain.compute.graph.wide_layers import wide_layers
    from pipetrain.compute.profiling.operation_count import operation_counts

    model = keras.saving.load_model(options.model, compile=False)
    layers = [layer.shape for layer in wide_layers(Chain(model).blocks)]
    if not layers:
        return "No layer of this model can be divided: it has no dense layers or convolutions of their own."
    flops = PASSES * sum(work.flops for work in operation_counts(model, options.batch_size))
    slowest = min(
        (cluster.link(0, n).bandwidth_bytes_per_s for n in range(1, options.devices)),
        default=math.inf,
    )
    system = flops / profile.total_s / slowest
    overlap = 0.0 if options.no_overlap else 1.0 if options.overlap is None else options.overlap
    return str(Balance(layers, options.devices, options.batch_size, system, overlap, options.as_printed))
