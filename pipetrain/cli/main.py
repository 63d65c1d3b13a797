"""The command line: parses it, and lets the command named run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from pipetrain.cli import plan, schedule, simulate, worker


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status: 2 for what cannot be planned, simulated, scheduled or served."""
    options = _parse(arguments)
    try:
        options.run(options)
    except (OSError, TypeError, ValueError) as error:
        print(f"pipetrain {options.command}: {error}", file=sys.stderr)
        return 2
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m pipetrain", description="Pipeline-parallel training for Keras.")
    commands = parser.add_subparsers(required=True, metavar="command", dest="command")
    for command in (plan, simulate, schedule, worker):
        command.add(commands)
    return parser.parse_args(arguments)
