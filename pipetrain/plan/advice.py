"""Which way to train is fastest, by the cost model, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from pipetrain.plan.capacity import NoPlan
from pipetrain.plan.cluster import Cluster
from pipetrain.plan.cost import Costs, Place
from pipetrain.plan.memory import Training
from pipetrain.plan.partition import DEVICES, checked_training, partition, plan
from pipetrain.plan.profile import Profile, mib
from pipetrain.plan.schedule_advice import ScheduleAdvice
from pipetrain.plan.stages import Partition
from pipetrain.plan.text_table import text_table
from pipetrain.schemes.arguments import checked_count

WAYS = ("single", "data-parallel", "pipeline", "hybrid")  # the simplest first
MARGIN = 1.05  # what a less simple way must gain to be worth it


class Ordered(NamedTuple):
    """Data parallelism whose transfers are ordered: how many devices, the simulated rate, what each device keeps."""

    devices: int
    samples_per_second: float
    memory_bytes: int


@dataclass(frozen=True)
class Advice:
    """The ways to train one model on some devices, the simplest first, and the recommended one; prints as tables.

    ``ways`` are ``single``, ``data-parallel`` (one stage on several devices), ``pipeline`` (every stage one device) and
    ``hybrid`` (stages with several), each with its fastest partition, or None where it does not fit the devices'
    memory. A way that is the best cut of none is not there: ``hybrid`` where a simpler one is faster than any.
    ``ordered`` are the schemes beside them whose transfers are ordered, those that fit, see ``beside``. ``schedules``
    are those that the pipeline may have, where one is asked about that trains as the unsplit model does.
    """

    ways: dict[str, Partition | None]
    recommended: str
    reason: str
    ordered: Mapping[str, Ordered] = field(default_factory=dict)
    schedules: ScheduleAdvice | None = None

    def __str__(self) -> str:
        best = self.ways.get(self.recommended)  # an ordered scheme has no stages
        return f"{best}\n\n{self.comparison()}" if best else self.comparison()

    def beside(self, ordered: Mapping[str, Ordered]) -> Advice:
        """The advice with these schemes beside, one of which is recommended if it is 5% faster than what is so far."""
        way = self.ways[self.recommended]
        found = replace(self, ordered=ordered)
        if way is None or not ordered:
            return found
        best = max(ordered, key=lambda name: ordered[name].samples_per_second)
        gain = ordered[best].samples_per_second / way.samples_per_second
        if gain < MARGIN:
            return found
        reason = (
            f"Its transfers go on while its devices compute: simulated, {gain:.2f}x {self.recommended}, the best of "
            f"the others. {self.reason}"
        )
        return replace(found, recommended=best, reason=reason)

    def comparison(self) -> str:
        """The table of ways, and what is recommended and why; and so for schedules."""
        one = self.ways["single"]

        def row(name: str, devices: int, rate: float, memory_bytes: int) -> tuple[str, ...]:
            gain = f"{rate / one.samples_per_second:.2f}x" if one else "-"
            return name, str(devices), f"{rate:.0f}", gain, mib(memory_bytes)

        rows: list[tuple[str, ...]] = []
        for name in WAYS:
            way = self.ways.get(name)
            if way is None:
                rows.append((name, "-", "-", "-", "does not fit" if name in self.ways else "not faster"))
            else:
                rows.append(row(name, sum(way.replicas), way.samples_per_second, way.fullest_bytes))
        rows += [row(name, *scheme) for name, scheme in self.ordered.items()]
        header = ("way to train", "devices", "samples/s", "against one", "memory MiB")
        schedules = f"\n\n{self.schedules}" if self.schedules else ""
        return f"{text_table(header, rows)}\n\nRecommended: {self.recommended}. {self.reason}{schedules}"


def advise(
    profile: Profile,
    num_devices: int,
    cluster: Cluster | None = None,
    training: Training | None = None,
    of_microbatches: Profile | None = None,
) -> Advice:
    """Compare one device, data parallelism, a pipeline and a pipeline with replicated stages.

    ``of_microbatches`` is the profile for pipelines whose training divides minibatches, if it is another.
    The recommended way is the simplest that is within 5% of the fastest. Raises NoPlan, a ValueError, if none fits the
    devices' memory.
    """
    cluster, training = cluster or Cluster(), checked_training(training)
    num_devices = checked_count("num_devices", num_devices, DEVICES, 4)
    unsplit = training if training.chosen.schedule.chunks == 1 else training.under("single")
    ways: dict[str, Partition | None] = {"single": None}
    if num_devices > 1:
        ways["data-parallel"] = None
    for replicas in range(1, num_devices + 1):
        way = unsplit if replicas == 1 else unsplit._replace(jit_compile=False)  # as data-parallel runs
        _keep_faster(ways, plan(profile, [len(profile.blocks)], cluster, [replicas], way), cluster)
    chunks, pieces = training.chosen.schedule.chunks, of_microbatches or profile
    try:
        devices = min(num_devices, len(profile.blocks) // chunks)
        _keep_faster(ways, partition(pieces, devices, cluster, training=training), cluster)
    except NoPlan:
        ways["pipeline"] = None
    if chunks == 1:  # of the ways with replicas too, it may be any: it raises if there is none
        _keep_faster(ways, partition(pieces, num_devices, cluster, replicate=True, training=training), cluster)
    possible = {name: way for name, way in ways.items() if way is not None}
    fastest = max(way.samples_per_second for way in possible.values())
    recommended = next(
        name for name in WAYS if name in possible and possible[name].samples_per_second * MARGIN >= fastest
    )
    return Advice(
        {name: ways[name] for name in WAYS if name in ways},
        recommended,
        _reason(profile, recommended, possible, Costs(profile, cluster, 1, training.jit_compile)),
    )


def everywhere(profile: Profile, num_devices: int, cluster: Cluster, training: Training) -> Partition:
    """The whole model on every device, whether it fits their memory or not."""
    way = training.under("single")._replace(jit_compile=False)
    return plan(profile, [len(profile.blocks)], cluster, [num_devices], way)


def _keep_faster(ways: dict[str, Partition | None], way: Partition, cluster: Cluster) -> None:
    """Enter the partition under its name if it fits the devices, and is faster than what is there."""
    if not cluster.holds(way.fullest_bytes):
        return
    several = max(way.replicas) > 1
    name = WAYS[2 * (len(way.stages) > 1) + several]
    known = ways.get(name)
    if known is None or way.samples_per_second > known.samples_per_second:
        ways[name] = way


def _reason(profile: Profile, best: str, ways: dict[str, Partition], costs: Costs) -> str:
    if best == "single":
        return "Nothing that uses more devices is 5% faster."
    devices = max(sum(way.replicas) for way in ways.values())
    if best == "data-parallel":
        devices = sum(ways[best].replicas)
    weights = sum(block.weight_bytes for block in profile.blocks)
    everywhere = costs.chosen(Place(0, devices, devices), 0, costs.blocks)
    whole = costs.seconds(everywhere).of(0, costs.blocks)
    part = costs.cluster.link(0, devices - 1).reduce_seconds(weights, devices) / whole
    if best == "data-parallel":
        return f"Its devices are all equally busy, and summing gradients takes {part:.0%} of its time."
    summing = (
        f"on {devices} devices data parallelism sums {mib(weights)} MiB of gradients for every minibatch, {part:.0%} "
        "of its time, and each updates all weights"
    )
    slowest = max(ways[best].stages, key=lambda stage: stage.total_s)
    even = sum(stage.total_s * stage.replicas for stage in ways[best].stages) / sum(ways[best].replicas)
    above = slowest.total_s / even - 1
    balance = f"the slowest stage ({slowest.first} - {slowest.last}) takes {above:.0%} more than the average device"
    if best == "pipeline":
        return f"Devices pass on activations only; {summing}; {balance}."
    if "pipeline" in ways:
        gain = ways[best].samples_per_second / ways["pipeline"].samples_per_second
        return f"Several devices for a slow stage gain {gain:.2f}x over a pipeline without; {summing}; {balance}."
    return f"Only so does every stage fit its device; {balance}."
