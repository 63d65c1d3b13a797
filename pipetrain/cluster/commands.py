"""Commands that start this package's processes, where modules of the current folder shadow no others."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = str(Path(__file__).parents[2])  # of this very package, wherever the program has it from
# Python would put the current folder first on the path of modules, where anybody may have written; -P is of 3.11 on.
# One line: csh, which may be the shell of a host, takes no other. It begins with what a list of processes is to show.
MAIN = (
    "pipetrain = None; import sys; sys.path = [each for each in sys.path if each]; root, name = sys.argv[1:3]; "
    "del sys.argv[1:3]; "
    "sys.path[:0] = {root} - {*sys.path, str()}; from importlib import import_module; "
    "sys.exit(import_module(name).main())"
)


def process(module: str, *arguments: object, python: Sequence[str] = (), root: str = ROOT) -> list[str]:
    """The command of a process that calls ``main`` of a module of this package.

    Args:
        module: its name.
        arguments: of the command line.
        python: the command of Python; by default this process' one.
        root: the folder with the package, if Python does not find it there by itself; empty for one that it finds.
    """
    return [*(python or [sys.executable]), "-c", MAIN, root, module, *map(str, arguments)]


def worker(*arguments: object, python: Sequence[str] = (), root: str = ROOT) -> list[str]:
    """The command of a worker, with these arguments of ``pipetrain worker``; see ``process``."""
    return process("pipetrain.cli.main", "worker", *arguments, python=python, root=root)


def launched_worker(
    port: int, cpu_devices: int, gone_s: float, *more: object, python: Sequence[str] = (), root: str = ROOT
) -> list[str]:
    """The command of a worker that ends with who has started it, or when its controller has gone for so long."""
    ends = ("--attended", "--on-controller-gone", "end", "--gone-after", gone_s)
    return worker("--port", port, "--cpu-devices", cpu_devices, *ends, *more, python=python, root=root)
