"""The command line that the figures of runs have in common."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path


def main(about: str, draw: Callable[[Sequence[Path], Path], Path], arguments: Sequence[str] | None = None) -> int:
    """Draw the figure of some runs; returns the exit status: 2 where there is nothing to draw."""
    name = f"{draw.__module__.rpartition('.')[2] if draw.__module__ != '__main__' else Path(sys.argv[0]).stem}.png"
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "runs", nargs="+", type=Path, help="folders of runs, or an --output of experiments/run.py with several"
    )
    parser.add_argument("--output", type=Path, default=Path(name), help="(default: %(default)s)")
    options = parser.parse_args(arguments)
    try:
        print(draw(options.runs, options.output))
    except ValueError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    return 0
