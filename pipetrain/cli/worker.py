"""The command line of a worker."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from pipetrain.cli.arguments import Folded, cores, count, port, positive_number
from pipetrain.cluster.hosts import LOOPBACK, Hosts, split, task_of_tf_config
from pipetrain.cluster.server import GONE_S, MOST, Serving, serve

ABOUT = """Serve this machine's devices: the stages of a controller's pipeline are placed on them.

Nobody is asked for a password, and nothing is encrypted: whoever reaches the port can run code here, with the rights of
whoever started the worker. So a worker keeps to this machine, all of whose users reach it, unless --address, a hosts
file or TF_CONFIG names another one's way to it; then keep it within a network that you trust, or a tunnel.
"""
EXAMPLES = """examples:
  python -m pipetrain worker                                   # this machine's, port 2222
  python -m pipetrain worker --address 10.0.0.2 --port 2222
  python -m pipetrain worker --cluster hosts.json --task 1     # the second of the hosts file's workers
  python -m pipetrain worker --cores 0-3 --cpu-devices 2 --on-controller-gone end

a hosts file:
  {"workers": ["10.0.0.1:2222", "10.0.0.2:2222"]}
With neither --address nor --cluster the environment variable TF_CONFIG says which worker this is, if it is set.
"""


def add(commands: Any) -> None:
    """Add the command to those there are."""
    command = commands.add_parser(
        "worker",
        help="serve this machine's devices to a controller",
        description=ABOUT,
        epilog=EXAMPLES,
        formatter_class=Folded,
    )
    option = command.add_argument
    option("--address", metavar="HOST", help=f"of this machine, where it is reached (default: {LOOPBACK})")
    option("--port", type=port, metavar="N", help="0 for any that is free (default: 2222)")
    option("--cluster", type=Path, metavar="FILE", help="a hosts file that has address and port, see below")
    option("--task", type=int, metavar="N", help="which of its workers this is, from 0")
    option("--cores", type=cores, metavar="LIST", help="processor cores to keep to, such as 0,2-3 (default: all)")
    option("--cpu-devices", type=_most, default=1, metavar="N", help="logical CPU devices (default: 1)")
    option("--intra-threads", type=_most, metavar="N", help="threads of an operation (default: the devices' cores)")
    option(
        "--inter-threads",
        type=_most,
        metavar="N",
        help="operations at a time until a controller joins, which says how many (default: one for each device)",
    )
    option(
        "--on-controller-gone",
        choices=("wait", "end"),
        default="wait",
        help=f"what to do when the controller has given no sign of life for {GONE_S:.0f} s: wait for the next one, or "
        "end (default: %(default)s)",
    )
    option(
        "--attended",
        nargs="?",
        type=int,
        const=0,
        metavar="PID",
        help="end when standard input does, or when the parent process does, whose number PID is",
    )
    option(
        "--job", default="", metavar="NAME", help="whose worker this is, which pipetrain launch of another job refuses"
    )
    option("--expect", action="append", default=[], help=argparse.SUPPRESS)  # of a launcher: package==version
    option("--forwarded", type=_ports, default=[], help=argparse.SUPPRESS)  # of a launcher: ports of other workers
    option("--gone-after", type=positive_number, default=GONE_S, help=argparse.SUPPRESS)  # of a launcher that waits
    option("--announce", type=int, help=argparse.SUPPRESS)  # of LocalWorkers: a file descriptor
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Serve. Raises ValueError for what cannot be served."""
    _check_versions(options.expect)
    address, port = _place(options)
    serve(
        Serving(
            address,
            port,
            options.cores,
            options.cpu_devices,
            options.intra_threads,
            options.inter_threads,
            options.on_controller_gone == "wait",
            options.attended,
            options.announce,
            options.gone_after,
            options.forwarded,
            options.job,
        )
    )


def _place(options: argparse.Namespace) -> tuple[str, int]:
    """Address and port: as given, or those of this worker in a hosts file or TF_CONFIG."""
    text, direct = os.environ.get("TF_CONFIG"), options.address is not None or options.port is not None
    if options.cluster is not None:
        if direct or options.task is None:
            raise ValueError(
                "A hosts file has address and port. Received: --cluster, "
                f"{'--address or --port' if direct else 'no --task'}. Try --cluster FILE --task N."
            )
        hosts, task = Hosts.load(options.cluster), options.task
    elif text and not direct:
        hosts, found = Hosts.of_tf_config(text), task_of_tf_config(text)
        task = found if options.task is None else options.task
        if task is None:
            raise ValueError(f"TF_CONFIG names no worker. Received: TF_CONFIG={text!r}. Try --task N.")
    elif options.task is not None:
        raise ValueError(
            f"There are no workers to choose from. Received: --task {options.task} without --cluster. "
            "Try --cluster FILE, or --address and --port alone."
        )
    else:
        return (options.address or LOOPBACK).strip("[]"), 2222 if options.port is None else options.port
    if not 0 <= task < len(hosts.workers):
        raise ValueError(
            f"There is no such worker. Received: task {task} of {len(hosts.workers)}. "
            f"Try one from 0 to {len(hosts.workers) - 1}."
        )
    return split(hosts.workers[task])


def _ports(text: str) -> list[int]:
    return [port(each) for each in text.split(",")]


def _check_versions(expected: Sequence[str]) -> None:
    """Raise ValueError for a package of another version than a launcher expects, before TensorFlow starts."""
    for name, version in (each.split("==") for each in expected):
        with suppress(metadata.PackageNotFoundError):  # it may be run from its sources
            if (here := metadata.version(name)) != version:
                raise ValueError(
                    f"This host has another {name}. Received: {name}=={here}, where {version} is used by who launches. "
                    "Try the same version everywhere."
                )


def _most(text: str) -> int:
    if count(text) > MOST:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to {MOST}")
    return count(text)
