"""When the workers of data parallelism bring their weights together, and with whom: all of them, or neighbours."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from numbers import Real
from os import PathLike, fspath
from pathlib import Path
from typing import Any, ClassVar

from pipetrain.schemes.arguments import checked_bool, checked_count, is_count
from pipetrain.schemes.compression import compression_of
from pipetrain.schemes.table import SERVING, TRANSFERRING

SYNCHRONOUS = "synchronous"
REDUCING = "all-reduce"
DIRECT, RING = "direct", "ring"  # how the sums of all workers are made: each sends to each, or to the next one alone
Neighbours = tuple[tuple[int, ...], ...]  # of every worker the numbers of those with which it exchanges weights


@dataclass(frozen=True)
class LocalSGD:
    """``"local"``, ``"local:STEPS"``: every worker updates its own weights, and so many steps later they are joined.

    With the weights W before these steps, the mean M of the workers' weights after them, and ``D = W - M``::

        V <- momentum * V + D
        W <- W - rate * (D + momentum * V)

    Every worker then goes on from W. Its own optimizer, with all that this has gathered, is never sent. By default W is
    the average, as in local SGD (Stich 2019, arXiv 1805.09767), and with ``steps=1`` besides, it is taken for training
    without it. For hundreds of steps DiLoCo has ``rate=0.7, momentum=0.9`` (Douillard et al. 2023, arXiv 2311.08105);
    after few steps such a momentum goes too far.

    With several fragments the weights of so many groups of layers are joined at different steps, each by the formula
    above with its own W, M, D and V: fragment p of P after ``(p + 1) * steps // P`` of every ``steps`` steps. A period
    sends as much, but no step more than the largest fragment (Streaming DiLoCo, Douillard et al. 2025, arXiv
    2501.18512). Layers are divided as in the source's strided fragments: of each P layers in turn every fragment is
    given one, the largest going to the fragment of the fewest bytes so far.

    With ``overlap`` what is due after a step is sent while the next one computes, and each worker whose weights after
    that one are X goes on from ``mixing * X + (1 - mixing) * W``, with the source's tau of one step and its alpha. W is
    the same on all workers. A drain joins what is due without mixing.

    Every join, that of a drain too, moves W by ``rate * momentum * V`` beside ``rate * D``, however few steps it
    follows: with a momentum, a drain that joins fragments early takes these further than their steps alone would.

    Args:
        steps: of each worker between two joins. A drain, such as an epoch's end or a checkpoint, is a join too, of all
            fragments of which workers have different weights; after it the steps are counted anew. A snapshot is the
            same, but that the count goes on after it.
        rate: of the outer step.
        momentum: of the outer step, Nesterov's.
        fragments: into how many parts that are joined at different steps the trained weights are divided.
        overlap: whether weights are sent while the next step computes.
        mixing: of each worker's own weights, if so.

    A name has the steps alone.

    Raises ValueError for a count below 1, more fragments than steps, a rate that is not above 0, a momentum or a mixing
    that is not in [0, 1), a mixing without ``overlap``, and one step with ``overlap`` and no mixing; for more fragments
    than layers with trained weights when a model is compiled or simulated.
    """

    name: ClassVar[str] = "local"
    steps: int = 8
    rate: float = 1.0
    momentum: float = 0.0
    fragments: int = 1
    overlap: bool = False
    mixing: float = 0.5

    def __post_init__(self) -> None:
        """Raise ValueError for values that it cannot have."""
        checked_count("steps", self.steps, "Workers are joined after one step or more", 8)
        checked_count("fragments", self.fragments, "Weights are joined in one fragment or more", 4)
        if self.fragments > self.steps:
            raise ValueError(
                f"One fragment is joined at a step. Received: fragments={self.fragments!r}, steps={self.steps!r}. "
                f"Try fragments={self.steps}, or steps={self.fragments}."
            )
        overlap = checked_bool(
            "overlap", self.overlap, "Weights are sent while the next step computes, or they are not"
        )
        _check(
            "mixing", self.mixing, 0.5, "A part of each worker's own weights is in [0, 1)", lambda each: 0 <= each < 1
        )
        if not overlap and self.mixing != LocalSGD.mixing:
            raise ValueError(
                "Workers go on from what is joined at once as it is. Received: "
                f"mixing={self.mixing!r}, overlap={self.overlap!r}. Try overlap=True, or leaving mixing out."
            )
        if overlap and self.mixing == 0 and self.steps == 1:
            raise ValueError(
                "Without mixing, the updates of the steps in which weights are sent are lost, and these would be all "
                f"steps. Received: steps=1, overlap={self.overlap!r}, mixing={self.mixing!r}. "
                f"Try mixing={LocalSGD.mixing}, or steps={LocalSGD.steps}."
            )
        _check("rate", self.rate, 0.7, "The outer step's rate is above 0", lambda rate: 0 < rate < float("inf"))
        _check("momentum", self.momentum, 0.9, "The outer step's momentum is in [0, 1)", lambda each: 0 <= each < 1)

    def __str__(self) -> str:
        outer = "" if (self.rate, self.momentum) == (1, 0) else f", rate {self.rate:g}, momentum {self.momentum:g}"
        fragments = "" if self.fragments == 1 else f", fragments {self.fragments}"
        overlap = f", overlap, mixing {self.mixing:g}" if self.overlap else ""
        return f"{self.name}:{self.steps}{outer}{fragments}{overlap}"

    @property
    def is_plain(self) -> bool:
        """Whether all gradients of every step are averaged before they are used, or might as well be."""
        return self.steps == 1 and self.rate == 1 and self.momentum == 0 and not self.overlap


def _check(name: str, value: Any, example: float, problem: str, is_right: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, Real) or not is_right(float(value)):
        raise ValueError(f"{problem}. Received: {name}={value!r}. Try {name}={example}.")


@dataclass(frozen=True)
class Stale:
    """``"stale"``, ``"stale:1"``: gradients are sent and applied while the next step computes.

    With the gradient g of a minibatch, ``W_(t+1) = step(W_t, g_t(W_(t-1)))``: every gradient but the first one after a
    drain has a staleness of one update, whatever arrives when, so two runs are equal. That is as stale as a bound of 1
    lets gradients be (SSP, Ho et al. 2013), and as Pipe-SGD (Li et al. 2018, arXiv 1811.03619) has them. What is sent
    then takes no time but what is longer than the step's computing.

    Args:
        bound: of the staleness, 0 or 1; 0 is taken for training without it.

    Raises ValueError for another bound.
    """

    name: ClassVar[str] = "stale"
    bound: int = 1

    def __post_init__(self) -> None:
        """Raise ValueError for a bound that it cannot have."""
        if checked_count("bound", self.bound, "A bound is a number of updates", 1, least=0) > 1:
            raise ValueError(
                "A step of all workers is one function, in which the transfers of the step before can hide, and no "
                f"more. Received: bound={self.bound!r}. Try bound=1, or pipetrain.ParameterServer(synchrony="
                f"'asynchronous:{self.bound}'), whose workers go at their own pace."
            )

    def __str__(self) -> str:
        return f"{self.name}:{self.bound}"

    @property
    def is_plain(self) -> bool:
        """Whether no gradient is stale."""
        return self.bound == 0


@dataclass(frozen=True)
class Asynchronous:
    """``"asynchronous"``, ``"asynchronous:BOUND"``: every worker takes whole minibatches and pushes at its own pace.

    A worker that is free takes the next minibatch, with the weights that the servers have then, and its gradients are
    applied as soon as they are there: an update for each minibatch. None waits for a slower one until the bound is
    reached: no worker begins a minibatch before all those more than ``bound`` before it have been applied, as in SSP
    (Ho et al. 2013), so no gradient has a staleness above twice the bound. With 0, one minibatch is trained on after
    another, as on a single device, but that each worker has its own draws of Dropout and other random layers.

    Moving statistics (BatchNormalization) are read with the weights and written when the gradients are applied: of
    minibatches that are computed at the same time, the last one's replace those of the others.

    Which worker takes and applies when depends on how fast they are. ``record`` keeps that order, and each gradient's
    staleness, in a file; with ``replay`` a run takes the order of such a file, and comes to the same weights, bitwise.
    Both go on over all that one model is compiled and fitted; from a checkpoint, behind the minibatches before it.

    Args:
        bound: of the minibatches that may be begun before one that is not applied; None: as many as workers.
        record: a file to write, a line for every minibatch that is taken or applied. If it is there and not empty, only
            training that goes on from a checkpoint may write to it.
        replay: a file that was recorded. After its last line workers go on as they are.

    Raises ValueError for a bound below 0, and for a file that is both read and written; TypeError for what is no path.
    """

    name: ClassVar[str] = "asynchronous"
    bound: int | None = None
    record: str | None = None
    replay: str | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for values that it cannot have."""
        if self.bound is not None:
            checked_count("bound", self.bound, "A bound is a number of minibatches", 3, least=0)
        files = {name: getattr(self, name) for name in ("record", "replay") if getattr(self, name) is not None}
        for name, file in files.items():
            if not isinstance(file, str | PathLike):
                raise TypeError(f"An order is in a file. Received: {name}={file!r}. Try {name}='arrivals.txt'.")
            object.__setattr__(self, name, fspath(file))
        if len({Path(file).resolve() for file in files.values()}) < len(files):
            raise ValueError(
                f"An order is recorded in another file than the one that is replayed. Received: record={self.record!r},"
                f" replay={self.replay!r}. Try record=None."
            )

    def __str__(self) -> str:
        return self.name if self.bound is None else f"{self.name}:{self.bound}"

    @property
    def is_plain(self) -> bool:
        """Never: a minibatch is not divided among the workers."""
        return False

    def ahead(self, workers: int) -> int:
        """The bound, for so many workers."""
        return workers if self.bound is None else self.bound


Synchrony = LocalSGD | Stale | Asynchronous
NUMBERED: dict[str, Callable[[int | None], Synchrony]] = {  # names with a number behind a colon, or without
    LocalSGD.name: lambda steps: LocalSGD() if steps is None else LocalSGD(steps),
    Stale.name: lambda bound: Stale() if bound is None else Stale(bound),
    Asynchronous.name: Asynchronous,
}


def synchrony_of(given: Any) -> Synchrony | None:
    """What a name, a name with a number, or an object stands for; None where every step is joined.

    Raises ValueError for a name that there is not, TypeError for what is neither.
    """
    if given is None or isinstance(given, Synchrony):
        return None if given is None or given.is_plain else given
    if not isinstance(given, str):
        raise TypeError(
            f"Synchrony is a name or an object. Received: synchrony={given!r}. "
            f"Try {SYNCHRONOUS!r}, 'local:8', 'stale:1', or pipetrain.LocalSGD(steps=8)."
        )
    name, colon, number = given.partition(":")
    if given == SYNCHRONOUS:
        return None
    if name not in NUMBERED or (colon and not (number.isascii() and number.isdecimal())):
        raise ValueError(
            f"Unknown synchrony. Received: synchrony={given!r}. "
            f"Try {SYNCHRONOUS!r}, 'local:8', 'stale:1', or 'asynchronous'."
        )
    return synchrony_of(NUMBERED[name](int(number) if number else None))


def check_synchrony(given: Any, scheme: str) -> None:
    """Raise ValueError, TypeError for no synchrony, and for a scheme that has one alone; None is the default."""
    found = synchrony_of(given)
    if found is not None and scheme not in TRANSFERRING:
        raise ValueError(
            f"Only {' and '.join(TRANSFERRING)} have this. Received: synchrony={given!r}, scheme={scheme!r}. "
            f"Try leaving it out, or scheme={REDUCING!r}."
        )
    if isinstance(found, Asynchronous) and scheme != SERVING:
        raise ValueError(
            f"Only {SERVING} has weights that each worker may pull by itself. Received: synchrony={given!r}, "
            f"scheme={scheme!r}. Try scheme={SERVING!r}, or synchrony='stale:1'."
        )
    if isinstance(found, LocalSGD) and scheme != REDUCING:
        raise ValueError(
            f"Only {REDUCING} has workers with weights of their own. Received: synchrony={given!r}, scheme={scheme!r}. "
            f"Try leaving it out, or scheme={REDUCING!r}."
        )


def _on_ring(workers: int) -> list[set[int]]:
    return [{(worker - 1) % workers, (worker + 1) % workers} for worker in range(workers)]


def _on_torus(workers: int) -> list[set[int]]:
    """In rows and columns whose numbers are as near to each other as can be; of a prime number it is a ring."""
    rows = next(each for each in range(math.isqrt(workers), 0, -1) if workers % each == 0)
    columns = workers // rows
    found = []
    for row, column in (divmod(worker, columns) for worker in range(workers)):
        beside = {row * columns + (column + step) % columns for step in (-1, 1)}
        found.append(beside | {(row + step) % rows * columns + column for step in (-1, 1)})
    return found


GRAPHS: dict[str, Callable[[int], list[set[int]]]] = {
    "ring": _on_ring,
    "torus": _on_torus,
    "complete": lambda workers: [{*range(workers)} for _ in range(workers)],
}
A_GRAPH = "pipetrain.Gossip(graph=((1,), (0, 2), (1,)))"


@dataclass(frozen=True)
class Gossip:
    """``"gossip"``, ``"gossip:GRAPH"``: every worker takes its own step, then averages with its neighbours.

    With the weights X_j of worker j after its step, and the neighbours' numbers d_j of each::

        X_i <- sum of A_ij X_j    A_ij = 1 / (1 + max(d_i, d_j)) for neighbours    A_ii = 1 - their sum

    Source: D-PSGD (Lian et al. 2017, arXiv 1705.09056), with Metropolis weights, which are symmetric: what a worker
    gives and what it takes are both whole. The model's weights are the average of all workers'.

    Args:
        graph: ``ring``; ``torus``, of about as many rows as columns; ``complete``, where the average is that of all;
            or of every worker its neighbours' numbers, from 0 up.

    Raises ValueError for another graph, for one of which some neighbour does not know the other, and for one that is in
    several parts.
    """

    name: ClassVar[str] = "gossip"
    graph: str | Neighbours = "ring"

    def __post_init__(self) -> None:
        """Raise ValueError for what is no graph."""
        if not isinstance(self.graph, str):
            object.__setattr__(self, "graph", _checked(self.graph))
        elif self.graph not in GRAPHS:
            raise ValueError(f"Unknown graph. Received: graph={self.graph!r}. Try one of: {', '.join(GRAPHS)}.")

    def __str__(self) -> str:
        return f"{self.name}:{self.graph}"

    def neighbours(self, workers: int) -> Neighbours:
        """Of so many workers, in the order of their numbers. Raises ValueError where the graph has others."""
        if isinstance(self.graph, str):
            found = GRAPHS[self.graph](workers)
            return tuple(tuple(sorted(each - {worker})) for worker, each in enumerate(found))
        if len(self.graph) != workers:
            raise ValueError(
                f"A graph has the neighbours of every worker. Received: graph={self.graph!r}, of {len(self.graph)}, "
                f"for {workers} workers. Try neighbours for each of {workers}."
            )
        return self.graph

    def mixing(self, workers: int) -> list[dict[int, float]]:
        """Of every worker whose weights it averages, its own among them, and by which factors, in their order."""
        neighbours = self.neighbours(workers)
        rows = []
        for worker, others in enumerate(neighbours):
            row = {other: Fraction(1, 1 + max(len(others), len(neighbours[other]))) for other in others}
            row[worker] = 1 - sum(row.values(), Fraction(0))
            rows.append({each: float(row[each]) for each in sorted(row) if row[each]})
        return rows


def _checked(graph: Any) -> Neighbours:
    """The graph as tuples. Raises ValueError, TypeError for what is none."""
    if not isinstance(graph, Sequence) or not all(isinstance(each, Sequence) for each in graph):
        raise TypeError(
            f"A graph is a name, or has every worker's neighbours. Received: graph={graph!r}. Try {A_GRAPH}."
        )
    if not graph or not all(is_count(n, 0) and n < len(graph) for each in graph for n in each):
        raise ValueError(f"Neighbours are numbers of workers. Received: graph={graph!r}. Try {A_GRAPH}.")
    found = tuple(tuple(sorted({*each})) for each in graph)
    for worker, others in enumerate(found):
        for other in others:
            if worker == other or worker not in found[other]:
                raise ValueError(
                    f"Neighbours know each other. Received: graph={graph!r}, where worker {worker} has {other} alone. "
                    f"Try {A_GRAPH}."
                )
    reached, new = {0}, {0}
    while new := {other for worker in new for other in found[worker]} - reached:
        reached |= new
    if len(reached) < len(found):
        raise ValueError(
            f"All workers are joined by their neighbours. Received: graph={graph!r}, where worker 0 reaches "
            f"{sorted(reached)} alone. Try {A_GRAPH}."
        )
    return found


def topology_of(given: Any) -> Gossip | str | None:
    """What a name, a name with a graph, or an object stands for: ``Gossip``, ``RING``; None for ``DIRECT``.

    Raises ValueError for a name that there is not, TypeError for what is neither.
    """
    if given is None or isinstance(given, Gossip):
        return given
    if not isinstance(given, str):
        raise TypeError(
            f"A topology is a name or an object. Received: topology={given!r}. "
            f"Try {RING!r}, {Gossip.name!r}, or {A_GRAPH}."
        )
    if given in (DIRECT, RING):
        return None if given == DIRECT else RING
    name, colon, graph = given.partition(":")
    if name != Gossip.name:
        raise ValueError(
            f"Unknown topology. Received: topology={given!r}. "
            f"Try one of: {DIRECT}, {RING}, {', '.join(f'{Gossip.name}:{each}' for each in GRAPHS)}."
        )
    return Gossip(graph) if colon else Gossip()


def check_topology(given: Any, scheme: str) -> None:
    """Raise ValueError, TypeError for no topology, and for a scheme that has one alone; None is the default."""
    if topology_of(given) is not None and scheme != REDUCING:
        raise ValueError(
            f"Only {REDUCING} has a topology. Received: topology={given!r}, scheme={scheme!r}. "
            f"Try leaving it out, or scheme={REDUCING!r}."
        )


def join_steps(synchrony: Any) -> int:
    """Steps from one join of the same weights to the next: 1 where all are joined in every step."""
    joined = synchrony_of(synchrony)
    return joined.steps if isinstance(joined, LocalSGD) else 1


def join_fragments(synchrony: Any) -> int:
    """In how many fragments weights are joined in these steps."""
    joined = synchrony_of(synchrony)
    return joined.fragments if isinstance(joined, LocalSGD) else 1


def hides_joins(synchrony: Any) -> bool:
    """Whether weights are sent while the step after the one in which they are due computes."""
    joined = synchrony_of(synchrony)
    return isinstance(joined, LocalSGD) and bool(joined.overlap)


def joined_after(made: int, steps: int, fragments: int = 1) -> int | None:
    """The fragment that is joined when so many steps have been made, from 1 up; None where none is.

    Fragment p of P is joined after ``(p + 1) * steps // P`` steps of each period: as P is at most ``steps``, no two are
    joined together, and the last one ends the period.
    """
    place = (made - 1) % steps + 1
    count = -(-place * fragments // steps)  # of the fragments that are joined up to there, this one included
    return count - 1 if count * steps // fragments == place else None


def check_fragments(synchrony: Any, layers: int) -> None:
    """Raise ValueError for more fragments than a model has layers with trained weights."""
    fragments = join_fragments(synchrony)
    if fragments > max(layers, 1):
        raise ValueError(
            f"Each fragment has the weights of a layer at least. Received: fragments={fragments}, for a model of "
            f"{layers} layers with trained weights. Try fragments={max(layers, 1)}."
        )


def check_together(topology: Any, synchrony: Any, compression: Any) -> None:
    """Raise ValueError for options of which each can be, but not together."""
    found, joined, sent = topology_of(topology), synchrony_of(synchrony), compression_of(compression)
    if isinstance(joined, Asynchronous) and sent is not None:
        raise ValueError(
            "Gradients of single workers are sent as they are. Received: "
            f"compression={compression!r}, synchrony={synchrony!r}. Try no compression, or synchrony='stale:1'."
        )
    if isinstance(joined, LocalSGD) and sent is not None and sent.local_clipnorm is not None:
        raise ValueError(
            "Devices clip the gradients that they send, and workers that join their weights send none. Received: "
            f"compression={compression!r}, synchrony={synchrony!r}. Try local_clipnorm=None."
        )
    if isinstance(joined, LocalSGD) and sent is not None and sent.majority:
        raise ValueError(
            "Workers that join their weights average how far these have moved, which a majority of signs does not say. "
            f"Received: compression={str(sent)!r}, synchrony={synchrony!r}. Try compression={sent.name!r}."
        )
    if found is not None and sent is not None:
        why = "Compressed gradients go to all workers that need them" if found == RING else "Neighbours send weights"
        raise ValueError(
            f"{why}. Received: topology={topology!r}, compression={compression!r}. Try topology={DIRECT!r}, or no "
            "compression."
        )
    if isinstance(found, Gossip) and isinstance(joined, Stale):
        raise ValueError(
            "Neighbours average the weights of this step. Received: "
            f"topology={topology!r}, synchrony={synchrony!r}. Try topology={DIRECT!r}, or synchrony='local:8'."
        )
    if isinstance(found, Gossip) and isinstance(joined, LocalSGD) and (joined.rate, joined.momentum) != (1, 0):
        raise ValueError(
            f"Neighbours have no weights in common that an outer step starts from. Received: topology={topology!r}, "
            f"synchrony={synchrony!r}. Try synchrony='{LocalSGD.name}:{joined.steps}'."
        )
    if isinstance(found, Gossip) and (join_fragments(joined) > 1 or hides_joins(joined)):
        raise ValueError(
            f"Neighbours average all of their weights, those of this step. Received: topology={topology!r}, "
            f"synchrony={synchrony!r}. Try fragments=1 and overlap=False, or topology={DIRECT!r}."
        )
