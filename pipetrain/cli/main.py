"""The command line: parses it, and lets the command named run."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence

from pipetrain.cli import environment, launch, plan, schedule, simulate, worker


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status: 2 for what cannot be done, else what the command says, or 0."""
    options = _parse(arguments)
    try:
        return int(options.run(options) or 0)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except (OSError, TypeError, ValueError) as error:
        print(f"pipetrain {options.command}: {error}", file=sys.stderr)
        return 2


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="pipetrain",
        description="Keras models on several devices: planned, simulated, and trained on several hosts.",
    )
    parser.add_argument("--version", action="version", version=f"pipetrain {environment.version()}")
    commands = parser.add_subparsers(required=True, metavar="command", dest="command")
    for command in (launch, worker, plan, simulate, schedule, environment):
        command.add(commands)
    return parser.parse_args(arguments)
