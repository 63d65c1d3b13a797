"""``python -m pipetrain simulate``: what training on devices that need not be there would be like."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from pipetrain.cli.arguments import Folded, add_scheme, add_scheme_options, count, from_zero, positive_number, whole
from pipetrain.cli.given import add_common, given, schemes_of
from pipetrain.schemes import table
from pipetrain.schemes.coded_reduce import Tree
from pipetrain.schemes.options import OF_PIPELINES, TREE, CodedReduce, check_owned
from pipetrain.schemes.transfers.orders import AUTO
from pipetrain.simulation.build import REDUCTIONS
from pipetrain.simulation.comparison import Comparison, compare
from pipetrain.simulation.every_way import choose

ABOUT = """Simulate training a saved Keras model on devices that need not be there.

Profiles the model's layers on this machine, cuts it into stages for the devices and links described, and walks the very
schedules of training through a simulated run: every forward, backward, update and transfer. Says for each scheme the
samples/s once the pipeline is full, how much of the time devices do nothing (bubble), which stage computes for most and
for least of it, and how much they wait for what is on its way (transfer).
"""
EXAMPLES = """examples:
  python -m pipetrain simulate model.keras --devices 4 --cluster cluster.json
  python -m pipetrain simulate model.keras --devices 8 --cluster cluster.json --speed 40 --scheme gpipe --scheme 2bw
  python -m pipetrain simulate model.keras --devices 4 --scheme 1f1b --scheme interleaved --chunks 3 --scheme mine.csv
  python -m pipetrain simulate model.keras --devices 4 --scheme spectrain --output trace.json
  python -m pipetrain simulate model.keras --devices 4 --cluster cluster.json --scheme parameter-server --order tic

a cluster file, for hosts with 4 GPUs each, which are joined by a switch: what a GPU sends, and what it receives, has to
queue at its port; each host has one network card for all its GPUs:
  {"memory": "16GiB",
   "levels": [{"devices": 4, "bandwidth": "12GB/s", "latency_us": 10, "contention": "port"},
              {"bandwidth": "10Gb/s", "latency_us": 50, "contention": "port"}]}
"contention" may be "none" (each two devices have a link of their own, the default), "port" or "bus" (one transfer at a
time in all the group). Without a cluster file the devices are joined as this machine's are; if these are logical CPU
devices, no more of them work at once than it has cores.

A file with a schedule, mine.csv, has a row of actions for each device, and is for as many microbatches as it has:
"python -m pipetrain schedule --csv" writes one, and tells more.

Open what --output writes in ui.perfetto.dev.
"""


def add(commands: Any) -> None:
    """Add the command ``simulate``."""
    command = commands.add_parser(
        "simulate",
        help="what training it on devices that need not be there would be like",
        description=ABOUT,
        epilog=EXAMPLES,
        formatter_class=Folded,
    )
    add_common(command)
    about = "; may be given several times (default: single, data-parallel and spectrain)"
    add_scheme(command, table.EVERY_NAME, about, action="append")
    command.add_argument(
        "--minibatches", type=count, default=200, metavar="N", help="how many are trained (default: 200)"
    )
    command.add_argument(
        "--speed",
        type=positive_number,
        default=1.0,
        metavar="X",
        help="of the devices, this machine's being 1 (default: 1)",
    )
    command.add_argument(
        "--reduction", choices=REDUCTIONS, default=REDUCTIONS[0], help="how devices sum gradients (default: ring)"
    )
    command.add_argument(
        "--slowdown", type=from_zero, default=0.0, metavar="X", help="how much actions' times vary, such as 0.1"
    )
    command.add_argument("--seed", type=whole, default=0, metavar="N", help="of that variation (default: 0)")
    command.add_argument("--output", type=Path, metavar="FILE", help="write the trace, or one for each scheme")
    add_scheme_options(
        command,
        ("horizon", "chunks", "order", *OF_PIPELINES, "synchrony", "topology", "servers", *TREE, "grid"),
        by_default={"children": "all devices, of which the root is none, as children of it"},
    )
    command.set_defaults(run=run)


def tree_of(options: argparse.Namespace) -> Tree | None:
    """The tree that is asked for, if one is. Raises ValueError for none that can be."""
    if options.children is None:
        for name in ("depth", "stragglers"):
            if (value := getattr(options, name)) is not None:
                raise ValueError(
                    f"The tree needs to know how many children every parent has. Received: --{name} {value}. "
                    "Try --children 3 too."
                )
        return None
    given = {name: getattr(options, name) for name in TREE}
    return CodedReduce(**{name: value for name, value in given.items() if value is not None}).tree


def run(options: argparse.Namespace) -> None:
    """Print what was simulated, and write the traces that are asked for."""
    schemes = options.scheme or ["single", table.DATA_PARALLEL, "spectrain"]
    named = schemes_of(schemes, options)
    check_owned(
        {
            name: getattr(options, name)
            for name in ("order", *OF_PIPELINES, "synchrony", "topology", "servers", "grid", *TREE)
        },
        *named,
    )
    made = given(options, schemes, table.check_name)
    profile = made.profile.faster(options.speed)
    of_microbatches = made.of_microbatches and made.of_microbatches.faster(options.speed)
    comparison = compare(
        profile,
        options.devices,
        made.schemes,
        made.cluster,
        made.training,
        of_microbatches=of_microbatches,
        order=options.order or AUTO,
        tree=tree_of(options),
        grid=options.grid,
        servers=options.servers,
        compression=options.compression,
        replica_compression=options.replica_compression,
        synchrony=options.synchrony,
        topology=options.topology,
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
        choice = choose(profile, options.devices, made.cluster, made.training, of_microbatches)
        parts += ["", f"Recommended by the cost model: {choice.taken}. {choice.reason}"]
    print("\n".join(map(str, [*parts, made.profile.warning])).rstrip())


def _save(comparison: Comparison, output: Path) -> None:
    """One trace there; several in files beside it that have the schemes' names."""
    for scheme, trace in comparison.traces.items():
        trace.save(output if len(comparison.traces) == 1 else output.with_stem(f"{output.stem}-{scheme}"))
