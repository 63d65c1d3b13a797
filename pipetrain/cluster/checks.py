"""What workers must be, to be joined: there, each once, of this job, with the same TensorFlow."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import tensorflow as tf

from pipetrain.cluster.hosts import RUN, Hosts, job_of, split
from pipetrain.cluster.sockets import NO_HOST, probed

RETRY_S = 0.2
TELL_S = 5.0  # who waits longer says for whom
_logger = logging.getLogger(__name__)


def check_answers(hosts: Hosts, timeout_s: float) -> None:
    """Raise ConnectionError for workers that do not answer: TensorFlow itself would wait for minutes, or exit.

    Raises ValueError for two addresses of one worker.
    """
    begun_s = time.monotonic()
    _check_names(hosts)
    with ThreadPoolExecutor(len(hosts.workers)) as pool:
        asked = [pool.submit(_unreachable, address, begun_s + timeout_s) for address in hosts.workers]
        left = wait(asked, TELL_S).not_done
        if left:
            late = [address for address, each in zip(hosts.workers, asked, strict=True) if each in left]
            _logger.info("Waiting up to %g s for workers: %s.", timeout_s, ", ".join(late))
    answers = [each.result() for each in asked]
    silent = [f"{address} ({why})" for address, why in zip(hosts.workers, answers, strict=True) if why]
    if silent:
        raise ConnectionError(
            f"Workers do not answer. Received: {', '.join(silent)}, tried for {time.monotonic() - begun_s:.0f} s. "
            "Try starting them there with python -m pipetrain worker, other addresses, or opening the port."
        )


def _check_names(hosts: Hosts) -> None:
    """Raise ValueError for two addresses of one worker, as far as names tell."""
    known: dict[Any, str] = {}
    for address in hosts.workers:
        found = []
        with contextlib.suppress(OSError, UnicodeError):  # no such host, which will be said
            found = [each[4][:2] for each in socket.getaddrinfo(*split(address), type=socket.SOCK_STREAM)]
        for each in found:
            if known.setdefault(each, address) != address:
                raise ValueError(
                    f"Two of the addresses are of one worker. Received: {known[each]} and {address}. "
                    "Try one address of each."
                )


def _unreachable(address: str, until_s: float) -> str:
    """Why no gRPC server answers there; empty if one does.

    A name that there is not will not come, unless a scheduler is about to publish it.
    """
    final = ("",) if job_of(address) else ("", NO_HOST)
    while True:
        why = probed(address, max(until_s - time.monotonic(), RETRY_S))
        if why in final or time.monotonic() + RETRY_S > until_s:
            return why
        time.sleep(RETRY_S)


def check_versions(hosts: Hosts, versions: Sequence[str | None]) -> None:
    """Raise ValueError for another TensorFlow: they may understand each other, and kernels compute something else."""
    others = [
        f"{address} has {version}"
        for address, version in zip(hosts.workers, versions, strict=True)
        if version not in (None, tf.__version__)
    ]
    if others:
        raise ValueError(
            f"Workers have another TensorFlow. Received: {', '.join(others)}; the controller has {tf.__version__}. "
            "Try the same version everywhere, and then a new process."
        )


def check_jobs(hosts: Hosts, jobs: Sequence[str]) -> None:
    """Raise ValueError for workers of other jobs than a launcher has told; a program that nobody launched joins any.

    Two jobs may have been given the same ports: the second one's worker cannot listen there, and the first's does.
    """
    others = {
        address: f"{address} of {f'job {job}' if job else 'no job'}"
        for address, job in zip(hosts.workers, jobs, strict=True)
        if job_of(address) not in (None, job)
    }
    if others:
        raise ValueError(
            f"Workers are another job's. Received: {', '.join(others.values())}; this is job "
            f"{job_of(next(iter(others)))}. Try other ports by --port, or when that job has ended; --job names a job."
        )


def check_served(hosts: Hosts, runs: Sequence[str]) -> None:
    """Raise ValueError for workers that another launcher's scripts have used, and that are not to go on after it."""
    run = os.environ.get(RUN, "")
    left = [address for address, other in zip(hosts.workers, runs, strict=True) if run and other not in ("", run)]
    if left:
        raise ValueError(
            f"Workers are left over from an earlier launch, and are asked to end. Received: {', '.join(left)}. Try "
            "again; or --wait, or one name for both by --job, on all hosts, for workers that go on with who launches "
            "next."
        )
