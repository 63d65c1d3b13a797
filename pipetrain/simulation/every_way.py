"""The choice among every way to train a profiled model on some devices: each is planned or simulated."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple

from pipetrain.plan.choice import BASELINE, SAME, Choice, Way, least_slowest_s
from pipetrain.plan.cluster import Cluster
from pipetrain.plan.memory import Training
from pipetrain.plan.partition import DEVICES, NoPlan, checked_training, everywhere, partition, plan
from pipetrain.plan.profile import Profile, bounds_of, divided, merged, undisturbed
from pipetrain.plan.roofline import UPDATE_PASSES
from pipetrain.plan.stages import Partition
from pipetrain.schemes.arguments import checked_count
from pipetrain.schemes.options import (
    STALENESS,
    AllReduce,
    AnyScheme,
    PipelineOptions,
    SpecTrain,
    allowed,
    check_synchronous,
    compressing,
    name_of,
    uncompressed,
    with_options,
    without_sums,
)
from pipetrain.schemes.schedules import has_halves
from pipetrain.schemes.synchrony import Gossip
from pipetrain.schemes.table import CHUNKED, PIPELINES, UNCUT
from pipetrain.schemes.text_form import stages_of
from pipetrain.simulation.copies import KINDS, Copies, is_exact
from pipetrain.simulation.costs import acting
from pipetrain.simulation.simulator import timed

TARGET = SpecTrain(horizon="target")
TARGET_MICROBATCHES = (1, 2, 4, 8, 16)  # of it: at least a quarter of the stages
ROUNDS = (1, 2, 4, 8)  # numbers of microbatches to try, in those of devices
MOST = 8192  # microbatches of all devices together that are worth the time to simulate them
SENT = "int8", "int4", "top-k", "power-sgd"  # to try, where training need not be exact
LOCAL, STALE = "local:8", "stale:1"
CROSSING = "int8"  # likewise
CHUNKS = (2, 3)  # stages a device to try, where a schedule leaves that open
SUM_PASSES = 3  # over the weights' bytes: a sum of two gradients reads both and is written
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
    several devices for slow stages. Where ``staleness`` is allowed, also pipelines whose weights are predicted to one
    target, which never drain; where ``compression``, ``local``, ``gossip`` or ``stale`` is, an all-reduce that sends
    less or later, and with the first of these pipelines whose cuts are crossed by fewer bytes. MirroredStrategy
    (``data-parallel``) and ``coded-reduce`` are there to compare with, and not taken: what the latter is for, workers
    that are late, is not predicted.

    Args:
        profile: of whole minibatches.
        num_devices: how many there are.
        cluster: how they are joined, and their memory.
        training: the optimizer's slots, recomputation and kernels; its scheme and microbatches are what is chosen.
        of_microbatches: a profile of microbatches, if there is one.
        staleness: ``none``, for training that equals the unsplit model's, or ``predicted``.
        mirrored: whether MirroredStrategy is possible: it is within one process.
        layout: of the pipelines, whose schedule alone is then chosen; None: any way.
        allow: what is allowed beside training that equals the unsplit model's, see ``schemes.options.Auto``.
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
        allow: str | Collection[str] = (),
    ) -> None:
        self._devices = checked_count("num_devices", num_devices, DEVICES, 4)
        profile = undisturbed(profile, of_microbatches)
        bounds = bounds_of(profile, max(MOST_BLOCKS, 4 * self._devices))
        self._profile, self._pieces = merged(profile, bounds), of_microbatches and merged(of_microbatches, bounds)
        self._whole = profile, of_microbatches
        self.cluster, self._given = acting(cluster or Cluster()), checked_training(training)
        # A name keeps the options of the training's scheme, without its compression: exact ways have none.
        self._training = self._given._replace(scheme=uncompressed(self._given.scheme))
        self._allow, self._mirrored = allowed(allow, staleness), mirrored
        self._layout, self._left_out = layout, list[str]()
        self._set_cut: Partition | None = None
        check_synchronous(self._allow, layout is not None)

    def choice(self, as_set: tuple[Way, Partition] | None = None) -> Choice:
        """All ways, that which is set among them if one is, with its cut, and the one that is taken.

        Within a layout one device is there to compare with. Raises NoPlan, a ValueError, if none fits the devices'
        memory.
        """
        one = self._way("single", everywhere(self._profile, 1, self.cluster, self._training), scheme="single")
        if self._layout is not None:
            ways = [*self._pipelines(), one._replace(kind=BASELINE)]
        else:
            ways = [one, *self._copied, *self._pipelines(), *self._hybrids("1f1b", self._counts())]
            compressions = (None, CROSSING) if "compression" in self._allow else (None,)
            for compression in compressions if "staleness" in self._allow else ():
                ways += self._predicted(compressing(TARGET, compression=compression))
            ways += self._sending_less()
            ways += self._crossed_by_less() if "compression" in self._allow else ()
        if as_set is not None:
            self._set_cut = as_set[1]
            ways = [way._replace(is_set=way.is_like(as_set[0])) for way in ways]
            ways += [] if any(way.is_set for way in ways) else [as_set[0]]
        return Choice(
            self._profile.batch_size,
            ways,
            self._profile.spread,
            self._cut,
            self.cluster.memory_bytes,
            self._left_out,
            bool(self._allow),
        )

    def of(self, scheme: AnyScheme, microbatches: int | None = None) -> tuple[Way, Partition]:
        """One scheme, as a way that is set, and its cut: that of the layout, or the fastest that fits.

        ``microbatches``: of a minibatch, by default those of the training. A cut that fits no device is there, too.
        """
        name = name_of(scheme)
        if name in UNCUT:
            return self._uncut(scheme, name)
        scheme = self._given.under(scheme).scheme
        training = self._trained(scheme, microbatches or self._given.under(scheme).microbatches)
        training = training if training.chosen.splits else training._replace(microbatches=1)
        count = training.microbatches_of(len(self._layout.replicas) if self._layout else self._devices)
        profile = divided(*self._whole, count)
        cuts = [timed(self._laid_out(profile, training), self.cluster)]
        is_open = stages_of(training.chosen) is None and training.chosen.schedule.chunks == 1
        if self._layout is None and is_open:
            cuts += self._replicated(profile, training)
        cut = max(cuts, key=lambda each: (self.cluster.holds(each.fullest_bytes), each.samples_per_second))
        # A scheme that compresses sums is refused where no stage has several devices.
        arguments: dict[str, Any] = {"scheme": scheme if max(cut.replicas) > 1 else without_sums(scheme)}
        arguments |= {"replicas": cut.replicas} if max(cut.replicas) > 1 else {}
        arguments |= {"microbatches": training.microbatches} if training.chosen.splits else {}
        kind = "hybrid" if max(cut.replicas) > 1 else "pipeline"
        return self._way(kind, cut, **arguments)._replace(is_set=True), cut

    def _uncut(self, scheme: AnyScheme, name: str) -> tuple[Way, Partition]:
        """A scheme whose devices have all layers."""
        devices = 1 if name == "single" else self._devices
        cut = everywhere(self.copies if devices > 1 else self._profile, devices, self.cluster, self._training)
        found = self._copies.of(scheme) if name != "single" and self._copies else None
        kind = "single" if name == "single" else KINDS[name]
        way = found or self._way(kind, cut, scheme=scheme)._replace(is_exact=is_exact(scheme, self._profile))
        return way._replace(is_set=True), replace(cut, simulated_s=way.step_s)

    def _way(self, kind: str, cut: Partition, **arguments: Any) -> Way:
        fits = self.cluster.holds(cut.fullest_bytes)
        return Way(kind, arguments, cut.devices, cut.step_s, cut.fullest_bytes, fits, is_exact=cut.is_exact)

    @cached_property
    def _copies(self) -> Copies | None:
        """The schemes of which all devices have the whole model; None where not every device has a row."""
        if not 1 < self._devices <= self._profile.batch_size:
            return None
        return Copies(self.copies, self._devices, self.cluster, self._training)

    @cached_property
    def _copied(self) -> list[Way]:
        """Those schemes, grids only of chains that are not merged."""
        is_whole = len(self._profile.blocks) == len(self._whole[0].blocks)
        return [*self._copies.ways(self._mirrored, is_whole)] if self._copies else []

    @cached_property
    def copies(self) -> Profile:
        """The profile for devices that each have a part of the rows, and sum gradients.

        A part takes what such a microbatch takes. A sum takes as much of an update's seconds as it makes passes over
        the weights' bytes.
        """
        parts = self._in(self._devices)
        blocks = tuple(block.longer(1.0, 1 + SUM_PASSES / UPDATE_PASSES) for block in parts.blocks)
        return replace(parts, blocks=blocks, microbatches=1)

    def _sending_less(self) -> Iterator[Way]:
        """An all-reduce that sends less, less often or while the next step computes, or to neighbours alone."""
        compressions = SENT if "compression" in self._allow else ()
        synchronies = [None, *(each for each in (LOCAL, STALE) if each.partition(":")[0] in self._allow)]
        sent: list[tuple[str | None, str | None]] = [(compression, None) for compression in (None, *compressions)]
        sent += [(None, Gossip.name)] if "gossip" in self._allow else []
        for (compression, topology), synchrony in product(sent, synchronies):
            is_one = compression or topology or synchrony
            if self._copies is not None and is_one and not (topology and synchrony == STALE):
                scheme = AllReduce(compression=compression, synchrony=synchrony, topology=topology)
                way = self._copies.of(scheme)
                if way is not None:
                    yield way._replace(family=f"all-reduce, {compression}, {synchrony}, {topology}")

    def _crossed_by_less(self) -> Iterator[Way]:
        """1F1B with compressed cuts, of one device a stage and of several, whose sums are then compressed, too."""
        depth, scheme = self._depth(), compressing("1f1b", compression=CROSSING)
        counts = microbatch_counts(depth, depth, self._profile.batch_size)
        if depth > 1 and counts:
            way = fastest_of([*self._with_each(scheme, counts)])
            yield way._replace(family=_family(scheme))
        yield from self._hybrids(compressing(scheme, replica_compression=CROSSING), self._counts())

    def _pipelines(self) -> Iterator[Way]:
        """Each synchronous schedule with the microbatches that suit it, as far as there are blocks for its stages.

        Those are the devices' number times 1, 2, 4 and 8, as far as the minibatch has rows and devices times
        microbatches are no more than 8192. Seconds of numbers that were not measured are estimated, see ``divided``.
        """
        depth, blocks, layout = self._depth(), len(self._profile.blocks), self._layout
        counts = microbatch_counts(depth, depth, self._profile.batch_size)
        if layout is not None:
            counts = [layout.microbatches] if layout.microbatches is not None else counts or [1]
        if not counts or (depth == 1 and layout is None):
            return
        for scheme in _candidates(depth == 1):
            schedule = self._trained(scheme, 1).chosen.schedule
            if layout is None and depth * schedule.chunks > blocks:
                self._left_out.append(
                    f"{scheme} with {schedule.chunks} stages a device" if schedule.chunks > 1 else str(scheme)
                )
            elif layout is None or schedule.chunks == 1:
                yield fastest_of([*self._with_each(scheme, counts)])

    def _with_each(self, scheme: AnyScheme, counts: Sequence[int]) -> Iterator[Way]:
        """From the most microbatches down: fewer never need less memory, so the first that is too much is the last."""
        for count in reversed(counts):
            training = self._trained(scheme, count)
            cut = timed(self._laid_out(self._in(count), training), self.cluster)
            schedule = training.chosen.schedule
            halved = has_halves(schedule.order, schedule.devices(len(cut.stages)), count)
            family = f"{'some' if schedule.chunks > 1 else 'one'} a device, {'halves' if halved else 'whole'}"
            replicas = {"replicas": cut.replicas} if max(cut.replicas) > 1 else {}
            way = self._way("pipeline", cut, scheme=scheme, **replicas, microbatches=count)._replace(family=family)
            yield way
            if not way.fits:
                return

    def _laid_out(self, profile: Profile, training: Training) -> Partition:
        """The cut in the layout that is given, or a stage on every device: that fits, or without one the best."""
        layout, blocks = self._layout, len(profile.blocks)
        if layout is not None and layout.ends is not None:
            return plan(
                divided(*self._whole, profile.microbatches), layout.ends, self.cluster, layout.replicas, training
            )
        chunks = training.chosen.schedule.chunks
        devices = sum(layout.replicas) if layout is not None else max(1, min(self._devices, blocks // chunks))
        replicas = layout.replicas if layout is not None else None
        try:
            return partition(profile, devices, self.cluster, replicas=replicas, training=training)
        except NoPlan:
            free = replace(self.cluster, memory_bytes=None)
            return partition(profile, devices, free, replicas=replicas, training=training)

    def _replicated(self, profile: Profile, training: Training) -> Iterator[Partition]:
        """The best cut with replicated stages, if it has several stages, and one of them several devices."""
        if self._devices < 3:
            return
        try:
            cut = partition(profile, self._devices, self.cluster, replicate=True, training=training)
        except NoPlan:
            return
        if len(cut.stages) > 1 and max(cut.replicas) > 1:
            yield timed(cut, self.cluster)

    def _depth(self) -> int:
        """How many stages a pipeline of one stage a device has."""
        return len(self._layout.replicas) if self._layout else min(self._devices, len(self._profile.blocks))

    def _counts(self) -> list[int]:
        """Numbers of microbatches to try for hybrids, whose pipelines are shorter than there are devices."""
        half = max(self._devices // 2, 1)
        return [count for count in microbatch_counts(half, self._devices, self._profile.batch_size) if count > 1]

    def _hybrids(self, scheme: AnyScheme, counts: list[int]) -> Iterator[Way]:
        """The best cut with replicated stages for each number of microbatches, if it has any."""
        for count in counts:
            for cut in self._replicated(self._in(count), self._trained(scheme, count)):
                if name_of(scheme) == "1f1b" or 4 * count >= len(cut.stages):
                    arguments = {"scheme": scheme, "replicas": cut.replicas, "microbatches": count}
                    way = self._way("hybrid", cut, **arguments)
                    yield way._replace(family=_family(scheme))

    def _predicted(self, scheme: AnyScheme) -> Iterator[Way]:
        """Pipelines that never drain, whose weights are predicted to one target."""
        depth = self._depth()
        if depth == 1:
            return
        counts = [count for count in TARGET_MICROBATCHES if count <= self._profile.batch_size]
        for count in (count for count in counts if 4 * count >= depth):
            cut = self._laid_out(self._in(count), self._trained(scheme, count))
            way = self._way("pipeline", cut, scheme=scheme, microbatches=count)
            yield way._replace(family=_family(scheme))
        yield from self._hybrids(scheme, counts)

    def _trained(self, scheme: AnyScheme, microbatches: int) -> Training:
        return self._training.under(scheme)._replace(microbatches=microbatches)

    def _in(self, microbatches: int) -> Profile:
        """The profile of minibatches in so many microbatches."""
        return divided(self._profile, self._pieces, microbatches)

    def _cut(self, way: Way) -> tuple[Partition, float]:
        """The cut of a pipeline, of all blocks, and the least that any cut's slowest stage takes."""
        if way.is_set and self._set_cut is not None:
            cut = self._set_cut
            return cut, least_slowest_s(self._whole[0], way.devices, replicate=max(cut.replicas) > 1)
        count = way.arguments.get("microbatches", 1)
        training, replicas = self._trained(way.arguments["scheme"], count), way.arguments.get("replicas")
        profile = divided(*self._whole, count)
        if replicas is not None and self._layout is None:
            cut = partition(profile, way.devices, self.cluster, replicas=replicas, training=training)
        else:
            cut = self._laid_out(profile, training)
        return cut, least_slowest_s(self._whole[0], way.devices, replicate=max(cut.replicas) > 1)


def microbatch_counts(times: int, devices: int, batch_size: int) -> list[int]:
    """The numbers of microbatches worth trying on so many devices: ``times`` 1, 2, 4 and 8, as far as can be."""
    return [rounds * times for rounds in ROUNDS if rounds * times <= min(batch_size, MOST / devices)]


def _family(scheme: AnyScheme) -> str:
    """That of ways whose cuts are crossed by fewer bytes; empty, which stands for the scheme's name, of others."""
    compression = scheme.compression if isinstance(scheme, PipelineOptions) else None
    return "" if compression is None else f"{scheme}, {compression}"


def _candidates(one_stage: bool) -> Iterator[AnyScheme]:
    """The table's synchronous schedules, some with several numbers of stages a device; for one stage 1f1b alone."""
    for name, scheme in PIPELINES.items():
        if scheme.synchronous and (not one_stage or name == "1f1b"):
            several = CHUNKS if name in CHUNKED else [None]
            yield from (with_options(name, chunks=chunks) for chunks in several)


def fastest_of(ways: Sequence[Way]) -> Way:
    """The fastest that fits, of equally fast ones that with the fewest microbatches; if none fits, the leanest.

    What calls of microbatches take beside computing is not always known.
    """
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
    allow: str | Collection[str] = (),
) -> Choice:
    """Predict every way to train a profiled model on so many devices, and take the fastest that fits; see ``Chooser``.

    Raises NoPlan, a ValueError, if none fits the devices' memory.
    """
    chooser = Chooser(profile, num_devices, cluster, training, of_microbatches, staleness, mirrored, layout, allow)
    return chooser.choice()
