"""Processes that take turns: only one of them works at a time, so that a machine whose speed drifts is fair to all.

A turn during which other machines took the processors is taken again.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from benchmarks.steal import undisturbed

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
    return teams_taking_turns(work, [[job] for job in jobs], rounds)


def teams_taking_turns(work: Work[Job], teams: Sequence[Sequence[Job]], rounds: int) -> list[list[Any]]:
    """The same for teams of jobs: those of a team work at once, and what the first one gives counts."""
    context = multiprocessing.get_context("spawn")
    started: list[list[Connection]] = []
    for team in teams:
        pipes = []
        for job in team:
            here, there = context.Pipe()
            context.Process(target=_serve, args=(work, job, there), daemon=True).start()
            there.close()  # if the process fails, nobody holds its end, and recv says so
            pipes.append(here)
        _replies(pipes)  # ready
        started.append(pipes)
    results: list[list[Any]] = [[] for _ in teams]
    for number in range(rounds):
        for pipes, result in zip(started, results, strict=True):
            result.append(undisturbed(partial(_turn, pipes)))
        print(f"\rround {number + 1} of {rounds}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    for pipes in started:
        for pipe in pipes:
            pipe.send(False)
    return results


def _turn(pipes: Sequence[Connection]) -> Any:
    for pipe in pipes:
        pipe.send(True)
    return _replies(pipes)[0]


def _replies(pipes: Sequence[Connection]) -> list[Any]:
    return [pipe.recv() for pipe in pipes]
