"""Processes that take turns: only one of them works at a time, so that a machine whose speed drifts is fair to all."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any, TypeVar

Job = TypeVar("Job")
Work = Callable[[Job], Iterator[Any]]


def _serve(work: Work[Any], job: Any, commands: Connection) -> None:
    """The body of a process: one item of ``work(job)`` for every command received."""
    rounds = work(job)
    next(rounds)
    commands.send("ready")
    while commands.recv():
        commands.send(next(rounds))


def taking_turns(work: Work[Job], jobs: Sequence[Job], rounds: int) -> list[list[Any]]:
    """What every job's process gives in every round.

    ``work(job)`` is a generator, run in a process of its own: it yields once when it is ready (having traced, warmed
    up, ...), then one figure a round.
    """
    context = multiprocessing.get_context("spawn")
    pipes = []
    for job in jobs:
        here, there = context.Pipe()
        context.Process(target=_serve, args=(work, job, there), daemon=True).start()
        there.close()  # if the process fails, nobody holds its end, and recv says so
        here.recv()
        pipes.append(here)
    results: list[list[Any]] = [[] for _ in jobs]
    for number in range(rounds):
        for pipe, result in zip(pipes, results, strict=True):
            pipe.send(True)
            result.append(pipe.recv())
        print(f"\rround {number + 1} of {rounds}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    for pipe in pipes:
        pipe.send(False)
    return results
