"""The command lines that figures have in common: of runs, and of one folder of results."""

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


def of_folder(about: str, draw: Callable[[Path, Path], Path], made_by: str, name: str) -> None:
    """Draw the figure of a folder of results of a program, by default as a file of this name in that folder."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help=f"--output of {made_by}")
    parser.add_argument("--output", type=Path, help=f"(default: {name} in that folder)")
    options = parser.parse_args()
    print(draw(options.folder, options.output or options.folder / name))
