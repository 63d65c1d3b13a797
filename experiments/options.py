"""Options that command lines have in common, kinds of their values, and the folder that results go to."""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections.abc import Callable, Collection
from contextlib import ExitStack, suppress
from pathlib import Path

import models
from experiments import datasets, optimizers
from experiments.networks import NETWORKS, defaults
from pipetrain.checkpoint.directory_lock import DirectoryLock
from pipetrain.cli.arguments import count, from_zero
from pipetrain.schemes import table
from pipetrain.schemes.scheme import Scheme
from pipetrain.schemes.text_form import chosen


def scheme_among(*names: str) -> Callable[[str], str]:
    """A kind of value: one of these names, or a file's scheme, see ``text_form.chosen``."""

    def kind(text: str) -> str:
        try:
            found = chosen(text)
            if not isinstance(found, Scheme) and found not in names:
                raise ValueError(f"unknown scheme {text!r}. Try {table.instead_of(text, names)}")
            if isinstance(found, Scheme) and Path(table.check_name(found)).name != found.name:
                raise ValueError(f"A scheme's name is that of a folder. Received: {found.name!r}. Try letters.")
        except (OSError, ValueError) as error:
            raise argparse.ArgumentTypeError(str(error).replace("%", "%%")) from error
        return text

    return kind


def writable(output: Path) -> Path:
    """The directory, made if need be; ValueError if nothing can be written there."""
    try:
        output.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output):
            return output
    except OSError as error:
        raise ValueError(
            f"Cannot write there: {error.strerror}. Received: output={str(output)!r}. Try another directory."
        ) from error


def new_folder(runs: Path) -> Path:
    """A folder for a run that begins now and no other has: of the time, and a number if one began in this second.

    Raises ValueError if none can be made there.
    """
    name = time.strftime("%Y%m%d-%H%M%S")
    for number in itertools.count(1):
        output = writable(runs) / (name if number == 1 else f"{name}-{number}")
        with suppress(FileExistsError):
            output.mkdir()
            return output
    raise AssertionError  # numbers have no end


def owned(output: Path, ends: ExitStack) -> Path:
    """The directory, made if need be, to which no other program writes until ``ends``. Raises ValueError if one does.

    It is said where the file system cannot see to that.
    """
    unlocked = ends.enter_context(DirectoryLock(writable(output), "output"))
    if unlocked:
        print(f"{output} cannot be locked ({unlocked}): see that no other program writes there.")
    return output


def add_training(parser: argparse.ArgumentParser, steps: int, output: str = "runs/<time>") -> None:
    """The options that say what is trained, on which data, and where the results go."""
    add = parser.add_argument
    add("--model", choices=models.NAMES, default="snn", help="network (default: %(default)s)")
    add(
        "--dataset",
        choices=datasets.NAMES,
        help=f"data set (default: that of the network: {defaults('dataset')}); fashion_mnist_small comes with the "
        "repository, the others through tensorflow-datasets. Images are resized to what the network reads",
    )
    add("--data-dir", metavar="DIR", help="where tensorflow-datasets keeps or downloads its data")
    add("--stages", type=count, default=4, metavar="N", help="pipeline stages (default: 4)")
    add("--batch-size", type=count, default=128, metavar="N", help="rows per minibatch (default: 128)")
    add("--steps", type=count, default=steps, metavar="N", help="minibatches (default: %(default)s)")
    rates, adaptive = defaults("learning_rate"), ", ".join(optimizers.ADAPTIVE_NAMES)
    add(
        "--optimizer",
        choices=optimizers.NAMES,
        default="momentum",
        help="sgd has no momentum, momentum and nesterov have that of --momentum (default: %(default)s)",
    )
    add(
        "--learning-rate",
        type=from_zero,
        metavar="X",
        help=f"(default: {optimizers.ADAPTIVE_RATE} for {adaptive}; else the network's: {rates})",
    )
    add("--momentum", type=from_zero, default=0.9, metavar="X", help="of momentum and nesterov (default: 0.9)")
    add_size(parser)
    add("--seed", type=int, default=0, metavar="N", help="of weights and shuffling (default: 0)")
    add("--output", metavar="DIR", help=f"where to write results (default: {output})")


def add_replicas(parser: argparse.ArgumentParser) -> None:
    """How many devices each stage has."""
    parser.add_argument(
        "--replicas",
        type=count,
        nargs="+",
        metavar="N",
        help="devices of each stage, such as 2 1 1: three stages, the first on two devices, each of which does a part "
        "of the rows (default: one each). Schemes without such stages have as many devices, or stages, in all",
    )


def with_replicas(options: argparse.Namespace, given: Collection[str]) -> None:
    """As many stages as have replicas. Raises ValueError for another number, where ``given`` has it."""
    if options.replicas is None:
        return
    if "stages" in given and options.stages != len(options.replicas):
        raise ValueError(
            f"Each stage has its number of devices. Received: --stages {options.stages}, --replicas "
            f"{' '.join(map(str, options.replicas))}. Try --stages {len(options.replicas)}, or without it."
        )
    options.stages = len(options.replicas)


def add_size(parser: argparse.ArgumentParser) -> None:
    """How large the network is."""
    add = parser.add_argument
    add("--depth", type=count, metavar="N", help="layers of the network (default: as published, 16 for snn)")
    add("--width", type=count, metavar="N", help="units of its layers (default: as published, 512 for snn)")
    add("--published", action="store_true", help="as large as published, where the default is smaller: snn 32 x 2048")


def add_workers(parser: argparse.ArgumentParser) -> None:
    """The options of runs on other processes and hosts."""
    workers = parser.add_mutually_exclusive_group()
    workers.add_argument(
        "--cluster",
        metavar="FILE",
        help="a hosts file: stages go to the workers that run there, see docs/guide/hosts.md",
    )
    workers.add_argument(
        "--local-workers",
        type=count,
        metavar="N",
        help="stages go to N processes on this machine, each on cores of its own, which end with the run",
    )
    parser.add_argument(
        "--wait",
        type=from_zero,
        metavar="SECONDS",
        help="when a worker is lost, wait so long for it to come back, and go on from the newest checkpoint; those of "
        "--local-workers are started anew",
    )
    parser.add_argument(
        "--elastic",
        action="store_true",
        help="when a worker is lost (and, with --wait, not back in time) go on from the newest checkpoint without it: "
        "with fewer stages, planned anew",
    )


def fill_in(options: argparse.Namespace) -> None:
    """Data set and learning rate are the network's own, where none are given."""
    network = NETWORKS[options.model]
    options.dataset = options.dataset or network.dataset
    options.learning_rate = learning_rate(options, options.model)


def learning_rate(options: argparse.Namespace, model: str) -> float:
    """The one that is given; otherwise the optimizer's own, or the network's for SGD."""
    if options.learning_rate is not None:
        return options.learning_rate
    return optimizers.ADAPTIVE_RATE if options.optimizer in optimizers.ADAPTIVE_NAMES else NETWORKS[model].learning_rate
