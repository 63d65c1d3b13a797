"""A scheme: an order of actions, the weights that they read, and corrections of updates for staleness."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from pipetrain.schemes.compression import Compression, check_crossing, compression_of
from pipetrain.schemes.policies import OneTargetPolicy, Policy, Read, Reader, stretch
from pipetrain.schemes.schedules import Schedule


class UpdateRule(NamedTuple):
    """What the updates of one stage do in addition to the optimizer's own step.

    ``predicts``: the velocity is wanted; ``horizons``: for so many updates ahead (none: for any number); ``fits``: its
    best multiple is learnt; ``spikes``, ``rescale_steps``, ``stretch``: see ``policies``. ``momentum``: whether the
    optimizer has its own; else what comes to it has been summed by momentum before, see ``compression``.
    """

    predicts: bool = False
    horizons: frozenset[float] = frozenset()
    fits: bool = False
    spikes: bool = False
    rescale_steps: int = 0
    stretch: float = 1.0
    momentum: bool = True

    @property
    def furthest(self) -> float:
        """The most updates that are predicted; 0 where none are, or any number."""
        return max(self.horizons, default=0)

    @property
    def fit_horizon(self) -> int:
        """Over how many updates the best multiple of the velocity is learnt; 0 where it is not."""
        return int(self.furthest) if self.fits else 0

    @property
    def corrects(self) -> bool:
        """Whether an update depends on the staleness of its gradient."""
        return self.spikes or self.rescale_steps > 0


def one(stages: int) -> int:
    """Of any number of microbatches."""
    return 1


class Scheme(NamedTuple):
    """A way to train: the order of actions, the weights they read, and a line of description.

    Your own scheme is accepted wherever a name is: ``PipelineModel(model, scheme=Scheme(...))``.

    ``trains``: whether every forward is followed by a backward. ``splits``: whether minibatches are divided into
    microbatches. ``fits``: whether predictions use a fitted multiple of the velocity. ``spikes`` and ``rescale_steps``:
    spike compensation, and the steps over which rates are rescaled by staleness (0: not). ``least(N)``: the fewest
    microbatches with N stages, where minibatches are divided. ``compression``: of what crosses the cuts;
    ``replica_compression``: of the gradients that the replicas of a stage sum.
    """

    name: str
    schedule: Schedule
    policy: Policy
    about: str = ""
    trains: bool = True
    splits: bool = False
    fits: bool = False
    spikes: bool = False
    rescale_steps: int = 0
    least: Callable[[int], int] = one
    compression: Compression | None = None
    replica_compression: Compression | None = None

    def __str__(self) -> str:
        return self.name

    @property
    def asynchronous(self) -> bool:
        """Whether several minibatches are in flight at once."""
        return not self.schedule.flushes

    @property
    def compresses(self) -> bool:
        """Whether anything arrives otherwise than it was sent."""
        return self.compression is not None or self.replica_compression is not None

    @property
    def synchronous(self) -> bool:
        """Whether it trains as the unsplit model does, by the microbatches of one minibatch at a time."""
        return self.trains and self.splits and not self.asynchronous

    def reader(self, microbatch: int, stage: int, stages: int, microbatches: int, first: int | None = None) -> Reader:
        """Microbatch m at stage k of N, M of them being a minibatch, for the policy.

        ``first`` is the first stage that has the weights, where several share them.
        """
        return Reader(microbatch, stage, stages, microbatches, self.schedule.found, first)

    def check(self) -> None:
        """Raise ValueError, TypeError for parts that are none, or that cannot be looked up."""
        if not isinstance(self.schedule, Schedule) or not callable(self.schedule.order):
            raise ValueError(
                f"A scheme has a Schedule. Received: schedule={self.schedule!r}, scheme={self.name!r}. "
                "Try Schedule(order)."
            )
        ways = all(callable(getattr(self.policy, way, None)) for way in ("forward", "backward"))
        if isinstance(self.policy, type) or not ways or not hasattr(self.policy, "predicts"):
            raise ValueError(
                "A policy is an object that has forward, backward and predicts. Received: "
                f"policy={self.policy!r}, scheme={self.name!r}. Try one like policies.VanillaPolicy()."
            )
        check_crossing(self.compression, self.name)
        compression_of(self.replica_compression, "replica_compression")
        if self.replica_compression is not None and self.schedule.chunks > 1:
            raise ValueError(
                "A schedule of several stages a device has no replicas. Received: "
                f"replica_compression={self.replica_compression!r}, scheme={self.name!r}. Try leaving it out."
            )
        for name in ("compression", "replica_compression"):
            if isinstance(given := getattr(self, name), str):
                raise TypeError(
                    f"A scheme has the compression itself. Received: {name}={given!r}, scheme={self.name!r}. "
                    "Try pipetrain.Int8()."
                )
        try:
            hash(self)
        except TypeError as error:
            raise ValueError(
                "What has been planned for a scheme is looked up by its parts, which so have a hash. Received: "
                f"scheme={self.name!r}, {error}. Try @dataclass(frozen=True) for the policy."
            ) from error

    def rule(self, stage: int, stages: int, microbatches: int = 1, first: int | None = None) -> UpdateRule:
        """What the updates of stage k of N do, M microbatches being a minibatch.

        ``first`` is the first stage that has the weights, where several share them.
        """
        return UpdateRule(
            self.policy.predicts,
            _horizons(self, stage, stages, microbatches, first),
            self.fits,
            self.spikes,
            self.rescale_steps,
            stretch(stages, microbatches) if self.stretches else 1.0,
        )

    @property
    def stretches(self) -> bool:
        """Whether momentum is stretched, or may be: that of an optimizer which has one that is known."""
        return isinstance(self.policy, OneTargetPolicy) and bool(self.policy.stretch)

    def predictions(self, stage: int, stages: int, microbatches: int = 1) -> tuple[int, int]:
        """How many forwards and backwards of a minibatch predict weights, when the pipeline has long been full.

        The last stage's backward does not predict again what its forward has read, with which it is one call. What is
        read of an old version was predicted once, before the update that made it old.
        """
        if not self.policy.predicts:
            return 0, 0
        forwards = backwards = 0
        stored: set[Read] = set()
        for microbatch in range(2 * stages * microbatches, (2 * stages + 1) * microbatches):
            reader = self.reader(microbatch, stage, stages, microbatches)
            read, again = self.policy.forward(reader), self.policy.backward(reader)
            newest, current = reader.newest(), reader.current()
            forwards += read.horizon > 0 and read.version == newest
            backwards += again.horizon > 0 and again.version == current and (again != read or stage < stages - 1)
            stored |= {each for each, there in ((read, newest), (again, current)) if each.version < there}
        return forwards, backwards + sum(read.horizon > 0 for read in stored)

    def least_microbatches(self, stages: int) -> int:
        """The fewest microbatches that give every version in time, with so many stages."""
        return self.least(stages) if self.splits else 1


@lru_cache(maxsize=4096)
def _horizons(scheme: Scheme, stage: int, stages: int, microbatches: int, first: int | None = None) -> frozenset[float]:
    """How many updates stage k of N predicts ahead, all numbers until the pipeline has long been full."""
    if not scheme.policy.predicts:
        return frozenset()
    readers = [scheme.reader(m, stage, stages, microbatches, first) for m in range((2 * stages + 1) * microbatches)]
    ways = scheme.policy.forward, scheme.policy.backward
    return frozenset(way(each).horizon for each in readers for way in ways) - {0}
