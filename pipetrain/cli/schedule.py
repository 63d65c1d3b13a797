"""``python -m pipetrain schedule``: a schedule as text, with what it is worth, to a file and from one."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipetrain.cli.arguments import MICROBATCHES, Folded, add_scheme, add_scheme_options, count, scheme_named
from pipetrain.logs import counted
from pipetrain.schemes import table
from pipetrain.schemes.actions import Action
from pipetrain.schemes.dry_run import Step, figures, grid, replay, steady_bubble
from pipetrain.schemes.options import check_microbatches
from pipetrain.schemes.programs import Call, Program, calls_of_functions
from pipetrain.schemes.schedules import orders
from pipetrain.schemes.scheme import Scheme
from pipetrain.schemes.text_form import check_held, microbatches_of, stages_of, written
from pipetrain.schemes.validation import check

ABOUT = """Print a schedule: a row for each device, a column for each step, 2F0 being stage 2, forward, microbatch 0.

F is a forward, B a backward, I and W its halves: the gradients of a stage's inputs and those of its weights. Below the
grid stands what the schedule is worth where F, I and W take one unit of time each, B two, and transfers none. Of an
asynchronous scheme, which never drains between minibatches, several are printed, and its bubble is that of the steady
state. A schedule that cannot run is refused, with its first action that cannot.

With --calls a row has what its device does in each call of a TensorFlow function, which | separates: FB is a forward
and a backward in one, W1+W2 are made together, and U0 is the update by minibatch 0's gradients (U3 with 4 microbatches,
the last of them).
"""
EXAMPLES = """examples:
  python -m pipetrain schedule --scheme spectrain --stages 4
  python -m pipetrain schedule --scheme zb-h1 --stages 4 --microbatches 8
  python -m pipetrain schedule --scheme zb-v --stages 8 --microbatches 16 --csv zb-v.csv
  python -m pipetrain schedule --scheme vanilla --stages 3 --calls 2
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
        formatter_class=Folded,
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
    option(
        "--minibatches",
        type=count,
        metavar="N",
        help="to print (default: 1; of asynchronous schemes stages + 2, divided by the microbatches)",
    )
    option("--limit", type=count, metavar="N", help="microbatches whose activations of a stage a device holds at most")
    calls = "print what devices do in each call of a function, of an asynchronous scheme for N minibatches (default: 1)"
    option("--calls", type=count, nargs="?", const=1, metavar="N", help=calls)
    option("--csv", type=Path, metavar="FILE", help="write the schedule of a minibatch, if it is synchronous")
    add_scheme_options(command, ["chunks"])
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Print the schedule, and write it if that is asked for."""
    chosen = table.scheme(scheme_named(options.scheme, options.chunks))
    stages = options.stages or stages_of(chosen) or max(4, 2 * chosen.schedule.chunks)
    microbatches = options.microbatches or microbatches_of(chosen) or (MICROBATCHES if chosen.splits else 1)
    check_microbatches(microbatches, chosen)
    check(chosen, stages, microbatches)
    if options.csv and chosen.asynchronous:
        raise ValueError(
            "A file has the order of one minibatch, after which the pipeline drains. Received: --csv, "
            f"--scheme {chosen}. Try it without --csv, or a synchronous scheme such as 1f1b."
        )
    few = max(1, -(-(stages + 2) // microbatches)) if chosen.asynchronous else 1
    minibatches = options.minibatches or few
    made = _orders(chosen, stages, minibatches, microbatches)
    if options.limit is not None:
        check_held(made, options.limit)
    place = f"{counted(stages, 'stage')} on {counted(len(made), 'device')}"
    print(f"{chosen}: {place}, {_counted(chosen, minibatches, microbatches)}")
    if options.calls:
        programs = calls_of_functions(chosen.schedule, stages, microbatches, minibatches, options.calls)
        print(_by_device(programs, is_several=chosen.schedule.chunks > 1))
    else:
        print(_folded(replay(made, stages=stages)))
    print(_worth(chosen, stages, minibatches, microbatches))
    if options.csv:
        of_one = _orders(chosen, stages, 1, microbatches)
        options.csv.write_text(written(replay(of_one, stages=stages)), encoding="utf-8")


def _by_device(programs: Sequence[Program], is_several: bool) -> str:
    """A line for every device: what it does in each call."""

    def cell(call: Call) -> str:
        names = [str(action) for action in call]
        return "+".join(names if is_several else [name.lstrip("0123456789") for name in names])

    rows = [[" ".join(map(cell, program.calls[n])) for program in programs] for n in range(len(programs[0].calls))]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (" | ".join(f"{each:<{width}}" for each, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join(f"{device}: {line}" for device, line in enumerate(lines))


def _orders(chosen: Scheme, stages: int, minibatches: int, microbatches: int) -> list[list[Action]]:
    return orders(chosen.schedule.order, chosen.schedule.devices(stages), minibatches, microbatches)


def _counted(chosen: Scheme, minibatches: int, microbatches: int) -> str:
    pieces = counted(microbatches, "microbatch")
    if minibatches == 1:
        return pieces if chosen.splits else counted(1, "minibatch")
    return counted(minibatches, "minibatch") + f" of {pieces}" * chosen.splits


def _worth(chosen: Scheme, stages: int, minibatches: int, microbatches: int) -> str:
    """What the schedule is worth, for people."""
    made = _orders(chosen, stages, minibatches, microbatches)
    worth = figures(made)
    if chosen.asynchronous:
        steady = steady_bubble(lambda count: _orders(chosen, stages, count, microbatches), 2 * stages)
        bubble = f"bubble {steady:.1%} of the work in the steady state, when the pipeline is full\n"
    else:
        bubble = f"bubble {figures(_orders(chosen, stages, 1, microbatches)).bubble:.1%} of the work; "
    return (
        f"{bubble}{worth.makespan} units from the first action to the last\n"
        f"activations of a stage that each device holds at most: {', '.join(map(str, worth.peak_held))}"
    )


def _folded(steps: Sequence[Step]) -> str:
    """The grid, on a terminal as many of its columns below each other as there is room for."""
    lines = grid(steps).split("\n")
    if not sys.stdout.isatty():
        return "\n".join(lines)
    head = len(f"{len(lines) - 1}: ")
    cells = [(label, rest.split()) for label, _, rest in (line.partition(": ") for line in lines)]
    width = 1 + max(len(cell) for _, row in cells for cell in row)
    room = max(1, (shutil.get_terminal_size().columns - head) // width)
    parts = [
        "\n".join(
            f"{label + ':':<{head}}" + "".join(f"{cell:<{width}}" for cell in row[first : first + room]).rstrip()
            for label, row in cells
        )
        for first in range(0, len(steps), room)
    ]
    return "\n\n".join(parts)
