"""The command lines that figures have in common: of runs, and of one folder of results."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from pipetrain.cli.arguments import Folded
from plots.missing import DAMAGED, said


def main(about: str, draw: Callable[[Sequence[Path], Path], Path], arguments: Sequence[str] | None = None) -> int:
    """Draw the figure of some runs; returns the exit status: 2 where there is nothing to draw."""
    name = f"{draw.__module__.rpartition('.')[2] if draw.__module__ != '__main__' else Path(sys.argv[0]).stem}.png"
    parser = argparse.ArgumentParser(description=about, formatter_class=Folded)
    parser.add_argument(
        "runs", nargs="+", type=Path, help="folders of runs, or an --output of experiments/run.py with several"
    )
    parser.add_argument("--output", type=Path, default=Path(name), help="(default: %(default)s)")
    options = parser.parse_args(arguments)
    return shown(parser.prog, lambda: draw(options.runs, options.output))


def of_folder(
    about: str,
    draw: Callable[[Path, Path], Path | Sequence[Path]],
    made_by: str,
    name: str,
    file: str = "",
    arguments: Sequence[str] | None = None,
) -> int:
    """Draw the figures of a folder of results of a program, by default as a file of this name in that folder.

    The figure is of the ``file`` in that folder, if it is of one; the file itself may be given, too. Returns the exit
    status: 2 where there is nothing to draw.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=Folded)
    parser.add_argument("folder", type=Path, help=f"--output of {made_by}" + f", or its {file}" * bool(file))
    parser.add_argument("--output", type=Path, help=f"(default: {name or 'files'} in that folder)")
    options = parser.parse_args(arguments)
    folder = options.folder.parent if file and options.folder.name == file else options.folder
    return shown(
        parser.prog, lambda: draw(folder / file, options.output or folder / name), f"Try the --output of {made_by}."
    )


def shown(program: str, draw: Callable[[], Path | Sequence[Path]], remedy: str = "") -> int:
    """Draw, and print which files there are; returns the exit status: 2, and a sentence, where that cannot be."""
    try:
        drawn = draw()
    except DAMAGED as error:
        print(f"{program}: {said(error, remedy)}", file=sys.stderr)
        return 2
    print(*([drawn] if isinstance(drawn, Path) else drawn), sep="\n")
    return 0
