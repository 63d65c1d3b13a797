"""``python -m pipetrain schedule``: a schedule as text, with what it is worth, to a file and from one."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from pipetrain.cli.argument_types import MICROBATCHES, add_scheme, count, scheme_named
from pipetrain.schemes import table
from pipetrain.schemes.dry_run import grid, replay
from pipetrain.schemes.schedules import orders
from pipetrain.schemes.text_form import check_held, microbatches_of, stages_of, written
from pipetrain.schemes.unit_times import figures
from pipetrain.schemes.validation import check

ABOUT = """Print a schedule: a row for each device, a column for each step, 2F0 being stage 2, forward, microbatch 0.

F is a forward, B a backward, I and W its halves: the gradients of a stage's inputs and those of its weights. Below the
grid stands what the schedule is worth where F, I and W take one unit of time each, B two, and transfers none. One
that cannot run is refused, with its first action that cannot.
"""
EXAMPLES = """examples:
  python -m pipetrain schedule --scheme zb-h1 --stages 4 --microbatches 8
  python -m pipetrain schedule --scheme zb-v --stages 8 --microbatches 16 --csv zb-v.csv
  python -m pipetrain schedule --scheme mine.csv --limit 8

A file has what --csv writes: the cells of the grid, in CSV. PyTorch's compute-only files are such files.
"""


def add(commands: Any) -> None:
    """Add the command ``schedule``."""
    command = commands.add_parser(
        "schedule",
        help="print a schedule, write it to a file, or check one of a file",
        description=ABOUT,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    option = command.add_argument
    add_scheme(command, table.PIPELINES, required=True)
    option("--stages", type=count, metavar="N", help="in all (default: the file's, or two devices' but at least 4)")
    option(
        "--microbatches",
        type=count,
        metavar="N",
        help=f"of a minibatch (default: {MICROBATCHES}, or those of the file)",
    )
    option("--limit", type=count, metavar="N", help="microbatches whose activations of a stage a device holds at most")
    option("--csv", type=Path, metavar="FILE", help="write the schedule")
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Print the schedule, and write it if that is asked for."""
    chosen = table.scheme(scheme_named(options.scheme, options.chunks))
    stages = options.stages or stages_of(chosen) or max(4, 2 * chosen.schedule.chunks)
    microbatches = options.microbatches or microbatches_of(chosen) or (MICROBATCHES if chosen.splits else 1)
    table.check_microbatches(microbatches, chosen)
    check(chosen, stages, microbatches)
    made = orders(chosen.schedule.order, chosen.schedule.devices(stages), 1, microbatches)
    if options.limit is not None:
        check_held(made, options.limit)
    steps, worth = replay(made, stages=stages), figures(made)
    print(
        f"{chosen}: {stages} stages on {len(made)} devices, {microbatches} microbatches\n{grid(steps)}\n"
        f"bubble {worth.bubble:.1%} of the work; {worth.makespan} units from the first action to the last\n"
        f"activations of a stage that each device holds at most: {', '.join(map(str, worth.peak_held))}"
    )
    if options.csv:
        options.csv.write_text(written(steps), encoding="utf-8")
