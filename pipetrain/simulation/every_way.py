"""The choice among every way to train a profiled model on some devices: each is planned or simulated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from pipetrain.plan.capacity import NoPlan
from pipetrain.plan.choice import BASELINE, Choice, Way, least_slowest_s
from pipetrain.plan.cluster import Cluster
from pipetrain.plan.coarse import bounds_of, merged
from pipetrain.plan.division import divided, undisturbed
from pipetrain.plan.memory import Training
from pipetrain.plan.partition import DEVICES, checked_training, everywhere, partition, plan
from pipetrain.plan.profile import Profile
from pipetrain.plan.roofline import UPDATE_PASSES
from pipetrain.plan.schedule_advice import SAME
from pipetrain.plan.stages import Partition
from pipetrain.schemes.arguments import checked_count
from pipetrain.schemes.grid import Grid
from pipetrain.schemes.options import (
    STALENESS,
    AnyScheme,
    SpecTrain,
    check_staleness,
    with_options,
)
from pipetrain.schemes.schedules import has_halves
from pipetrain.schemes.table import CHUNKED, DATA_PARALLEL, PIPELINES, TRANSFERRING
from pipetrain.simulation.data_parallel.estimate import estimated_step_s
from pipetrain.simulation.grid.estimate import estimated_grid
from pipetrain.simulation.minibatch import acting, timed
from pipetrain.simulation.schedule_trials import is_synchronous, microbatch_counts, planned, try_schedules

TARGET = SpecTrain(horizon="target")
TARGET_MICROBATCHES = (1, 2, 4, 8, 16)  # of spectrain with horizon="target": at least a quarter of the stages
SUM_PASSES = 3  # over the weights' bytes: a sum of two gradients reads both and is written
MOST_ON_GRID = 16  # devices: every two of a group exchange messages
MOST_BLOCKS = 96  # of a chain while ways are compared; at least four for each device


class PipelineLayout(NamedTuple):
    """Of a pipeline: how many devices each stage has.

    ``ends``: the number of blocks up to each stage's end; ``microbatches``: of a minibatch. None: these are open.
    """

    replicas: tuple[int, ...]
    ends: Sequence[int] | None = None
    microbatches: int | None = None


class Chooser:
    """Predicts every way to train a profiled model.

    Ways are ``single``; data parallelism, by ``all-reduce`` and ``parameter-server`` with the order of transfers that
    suits; the ``grid`` that sends the least; pipelines with every synchronous schedule; and ``hybrid`` ones with
    several devices for slow stages. With ``staleness="predicted"`` also pipelines whose weights are predicted to one
    target, which never drain. MirroredStrategy (``data-parallel``) is a baseline, which is not taken.

    Args:
        profile: of whole minibatches.
        num_devices: how many there are.
        cluster: how they are joined, and their memory.
        training: the optimizer's slots, recomputation and kernels; its scheme and microbatches are what is chosen.
        of_microbatches: a profile of microbatches, if there is one.
        staleness: ``none``, for training that equals the unsplit model's, or ``predicted``.
        mirrored: whether MirroredStrategy is possible: it is within one process.
        layout: of the pipelines, whose schedule alone is then chosen; None: any way.
    """

    def __init__(
        self,
        profile: Profile,
        num_devices: int,
        cluster: Cluster | None = None,
        training: Training | None = None,
        of_microbatches: Profile | None = None,
        staleness: str = STALENESS[0],
        mirrored: bool = True,
        layout: PipelineLayout | None = None,
    ) -> None:
        self._devices = checked_count("num_devices", num_devices, DEVICES, 4)
        profile = undisturbed(profile, of_microbatches)
        bounds = bounds_of(profile, max(MOST_BLOCKS, 4 * self._devices))
        self._profile, self._pieces = merged(profile, bounds), of_microbatches and merged(of_microbatches, bounds)
        self._whole = profile, of_microbatches
        self._cluster, self._training = acting(cluster or Cluster()), checked_training(training)
        self._staleness, self._mirrored = check_staleness(staleness), mirrored
        self._layout = layout

    def choice(self) -> Choice:
        """All ways and the one that is taken."""
        if self._layout is not None:
            ways = [*self._within_layout()]
            return Choice(self._profile.batch_size, ways, self._profile.spread, self._cut, self._cluster.memory_bytes)
        ways = [*self._unsplit(), *self._pipelines(), *self._hybrids("1f1b", self._counts())]
        if self._staleness == "predicted":
            ways += self._predicted()
        return Choice(self._profile.batch_size, ways, self._profile.spread, self._cut, self._cluster.memory_bytes)

    def _way(self, kind: str, cut: Partition, step_s: float, elsewhere_bytes: int = 0, **arguments: Any) -> Way:
        memory_bytes = cut.fullest_bytes - elsewhere_bytes
        return Way(kind, arguments, cut.devices, step_s, memory_bytes, self._cluster.holds(memory_bytes))

    def _unsplit(self) -> Iterator[Way]:
        """One device, and the whole model on all."""
        one = everywhere(self._profile, 1, self._cluster, self._training)
        yield self._way("single", one, one.step_s, scheme="single")
        if not 1 < self._devices <= self._profile.batch_size:
            return
        copies = self._copies()
        every = everywhere(copies, self._devices, self._cluster, self._training)
        if self._mirrored:
            yield self._way(BASELINE, every, every.step_s, scheme=DATA_PARALLEL)
        for scheme in TRANSFERRING:
            step_s = estimated_step_s(copies, scheme, self._devices, self._cluster)
            yield self._way("data parallelism", every, step_s, scheme=scheme)
        yield from self._grid(copies, every)

    def _grid(self, copies: Profile, every: Partition) -> Iterator[Way]:
        """The grid that sends the least, if it divides the outputs of any layer; of chains that are not merged."""
        if len(copies.blocks) < len(self._whole[0].blocks) or self._devices > MOST_ON_GRID:
            return
        if found := estimated_grid(copies, self._devices, self._cluster, self._training.slots):
            shape = Grid(found.grid.outputs, found.grid.rows)
            yield self._way("grid", every, found.step_s, found.elsewhere_bytes, scheme=shape)

    def _copies(self) -> Profile:
        """The profile for devices that each have a part of the rows, and sum gradients.

        A part takes what such a microbatch takes. A sum takes as much of an update's seconds as it makes passes over
        the weights' bytes.
        """
        parts = self._in(self._devices)
        blocks = tuple(block.longer(1.0, 1 + SUM_PASSES / UPDATE_PASSES) for block in parts.blocks)
        return replace(parts, blocks=blocks, microbatches=1)

    def _pipelines(self) -> Iterator[Way]:
        """Each synchronous schedule with the microbatches that suit it."""
        training = self._training.under("1f1b")._replace(microbatches=1)
        found = try_schedules(self._profile, self._devices, self._cluster, training, self._pieces)
        for trial in found.trials if found else ():
            scheme = with_options(trial.scheme, chunks=trial.chunks if trial.scheme in CHUNKED else None)
            arguments = {"scheme": scheme, "microbatches": trial.microbatches}
            step_s, devices = self._profile.batch_size / trial.samples_per_second, self._depth(trial.chunks)
            family = f"{'some' if trial.chunks > 1 else 'one'} a device, {'halves' if trial.halves else 'whole'}"
            yield Way("pipeline", arguments, devices, step_s, trial.memory_bytes, trial.fits, family=family)

    def _within_layout(self) -> Iterator[Way]:
        """Each synchronous schedule of one stage a device in the layout, with the microbatches that suit.

        Raises NoPlan, a ValueError, where the layout leaves cuts open and none fits the memory.
        """
        layout = self._layout
        assert layout is not None
        stages, batch_size = len(layout.replicas), self._profile.batch_size
        counts = [layout.microbatches] if layout.microbatches else microbatch_counts(stages, stages, batch_size) or [1]
        for name, scheme in PIPELINES.items():
            if not is_synchronous(scheme) or scheme.schedule.chunks > 1 or (stages == 1 and name != "1f1b"):
                continue
            found = []
            for count in counts if stages > 1 else [layout.microbatches or 1]:
                cut = timed(self._laid_out(self._trained(name, count)), self._cluster)
                found.append(self._way("pipeline", cut, cut.step_s, scheme=name, microbatches=count))
            halved = has_halves(scheme.schedule.order, stages, counts[0])
            yield fastest_of(found)._replace(family="halves" if halved else "whole")

    def _laid_out(self, training: Training) -> Partition:
        """The cut in the layout that is given."""
        layout, profile = self._layout, divided(*self._whole, training.microbatches)
        assert layout is not None
        if layout.ends is not None:
            return plan(profile, layout.ends, self._cluster, layout.replicas, training)
        devices = sum(layout.replicas)
        return partition(profile, devices, self._cluster, replicas=layout.replicas, training=training)

    def _depth(self, chunks: int = 1) -> int:
        """How many devices a pipeline has."""
        return min(self._devices, len(self._profile.blocks) // chunks)

    def _counts(self) -> list[int]:
        """Numbers of microbatches to try for hybrids, whose pipelines are shorter than there are devices."""
        half = max(self._devices // 2, 1)
        return [count for count in microbatch_counts(half, self._devices, self._profile.batch_size) if count > 1]

    def _hybrids(self, scheme: AnyScheme, counts: list[int]) -> Iterator[Way]:
        """The best cut with replicated stages for each number of microbatches, if it has any."""
        for count in counts if self._devices > 2 else ():
            training, profile = self._trained(scheme, count), self._in(count)
            try:
                found = partition(profile, self._devices, self._cluster, replicate=True, training=training)
            except NoPlan:
                continue
            cut = timed(found, self._cluster)
            enough = scheme != TARGET or 4 * count >= len(cut.stages)
            if len(cut.stages) > 1 and max(cut.replicas) > 1 and enough:
                yield self._way("hybrid", cut, cut.step_s, scheme=scheme, replicas=cut.replicas, microbatches=count)

    def _predicted(self) -> Iterator[Way]:
        """Pipelines that never drain, whose weights are predicted to one target."""
        depth = self._depth()
        if depth == 1:
            return
        counts = [count for count in TARGET_MICROBATCHES if count <= self._profile.batch_size]
        for count in (count for count in counts if 4 * count >= depth):
            cut, _ = planned(self._in(count), depth, self._cluster, self._trained(TARGET, count))
            yield self._way("pipeline", cut, cut.step_s, scheme=TARGET, microbatches=count)
        yield from self._hybrids(TARGET, counts)

    def _trained(self, scheme: AnyScheme, microbatches: int) -> Training:
        return self._training.under(scheme)._replace(microbatches=microbatches)

    def _in(self, microbatches: int) -> Profile:
        """The profile of minibatches in so many microbatches."""
        return divided(self._profile, self._pieces, microbatches)

    def _cut(self, way: Way) -> tuple[Partition, float]:
        """The cut of a pipeline, of all blocks, and the least that any cut's slowest stage takes."""
        count = way.arguments["microbatches"]
        training = self._trained(way.arguments["scheme"], count)
        profile, replicas = divided(*self._whole, count), way.arguments.get("replicas")
        if self._layout is not None:
            cut = self._laid_out(training)
        else:
            cut = partition(profile, way.devices, self._cluster, replicas=replicas, training=training)
        return cut, least_slowest_s(self._whole[0], way.devices, replicate=max(cut.replicas) > 1)


def fastest_of(ways: Sequence[Way]) -> Way:
    """The fastest that fits, of equally fast ones that with the fewest microbatches; if none fits, the leanest."""
    possible = [way for way in ways if way.fits]
    if not possible:
        return min(ways, key=lambda way: way.memory_bytes)
    least_s = min(way.step_s for way in possible)
    return min(
        (way for way in possible if way.step_s <= SAME * least_s), key=lambda way: way.arguments.get("microbatches", 1)
    )


def choose(
    profile: Profile,
    num_devices: int,
    cluster: Cluster | None = None,
    training: Training | None = None,
    of_microbatches: Profile | None = None,
    staleness: str = STALENESS[0],
    mirrored: bool = True,
    layout: PipelineLayout | None = None,
) -> Choice:
    """Predict every way to train a profiled model on so many devices, and take the fastest that fits; see ``Chooser``.

    Raises ValueError if none fits the devices' memory.
    """
    return Chooser(profile, num_devices, cluster, training, of_microbatches, staleness, mirrored, layout).choice()
