"""The command line: parses it, and lets the command named run."""

from __future__ import annotations

import argparse
import re
import signal
import sys
import traceback
from collections.abc import Sequence
from difflib import get_close_matches

from pipetrain.cli import environment, launch, plan, schedule, simulate, worker


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status: 2 for what cannot be done, else what the command says, or 0."""
    options = _parse(arguments)
    try:
        return int(options.run(options) or 0)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except SyntaxError:  # of a script
        traceback.print_exc(limit=0)
        return 1
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
    options, unknown = parser.parse_known_args(arguments)
    if unknown:  # which argparse would tell with the usage of no command
        own = commands.choices[options.command]
        near = get_close_matches(unknown[0].partition("=")[0], re.findall(r"--[\w-]+", own.format_usage()), 1)
        own.error(f"there is no {unknown[0]}" + "".join(f"; did you mean {each}?" for each in near))
    return options
