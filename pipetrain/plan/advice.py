"""Which way to train is fastest, by the cost model, and why."""

from __future__ import annotations

from dataclasses import dataclass

from pipetrain.plan.cluster import Cluster
from pipetrain.plan.cost import Costs, Place
from pipetrain.plan.memory import Training
from pipetrain.plan.partition import DEFAULT_TRAINING, NoPlan, Partition, partition, plan
from pipetrain.plan.profile import Profile, mib
from pipetrain.plan.table import table

MARGIN = 1.05  # what a less simple way must gain to be worth it


@dataclass(frozen=True)
class Advice:
    """The ways to train one model on some devices, the simplest first, and the recommended one; prints as tables.

    ``ways`` are ``single``, ``data-parallel``, ``pipeline`` (every stage one device) and ``hybrid`` (stages with
    several), each with its partition, or None where it does not fit the devices' memory.
    """

    ways: dict[str, Partition | None]
    recommended: str
    reason: str

    def __str__(self) -> str:
        one = self.ways["single"]
        rows = []
        for name, way in self.ways.items():
            if way is None:
                rows.append((name, "-", "-", "-", "does not fit"))
                continue
            gain = f"{way.samples_per_second / one.samples_per_second:.2f}x" if one else "-"
            memory = mib(max(stage.memory_bytes for stage in way.stages))
            rows.append((name, str(sum(way.replicas)), f"{way.samples_per_second:.0f}", gain, memory))
        header = ("way to train", "devices", "samples/s", "against one", "memory MiB")
        best = self.ways[self.recommended]
        parts = [f"{best}" if best else "", table(header, rows), f"Recommended: {self.recommended}. {self.reason}"]
        return "\n\n".join(part for part in parts if part)


def advise(
    profile: Profile, num_devices: int, cluster: Cluster | None = None, training: Training | None = None
) -> Advice:
    """Compare one device, data parallelism, a pipeline and a pipeline with replicated stages.

    The recommended way is the simplest that is within 5% of the fastest. Raises NoPlan, a ValueError, if none fits the
    devices' memory.
    """
    cluster, training = cluster or Cluster(), training or DEFAULT_TRAINING
    blocks = len(profile.blocks)
    ways: dict[str, Partition | None] = {
        "single": _if_it_fits(plan(profile, [blocks], cluster, [1], training), cluster),
        "data-parallel": _if_it_fits(plan(profile, [blocks], cluster, [num_devices], training), cluster),
        "pipeline": None,
        "hybrid": None,
    }
    for name, devices, replicate in (("pipeline", min(num_devices, blocks), False), ("hybrid", num_devices, True)):
        try:
            ways[name] = partition(profile, devices, cluster, replicate=replicate, training=training)
        except NoPlan:
            if replicate:  # it may be any of the others
                raise
    possible = {name: way for name, way in ways.items() if way is not None}
    fastest = max(way.samples_per_second for way in possible.values())
    recommended = next(name for name, way in possible.items() if way.samples_per_second * MARGIN >= fastest)
    return Advice(ways, recommended, _reason(profile, recommended, possible, num_devices, cluster))


def _if_it_fits(way: Partition, cluster: Cluster) -> Partition | None:
    fullest = max(stage.memory_bytes for stage in way.stages)
    return way if cluster.memory_bytes is None or fullest <= cluster.memory_bytes else None


def _reason(profile: Profile, best: str, ways: dict[str, Partition], devices: int, cluster: Cluster) -> str:
    weights = sum(block.weight_bytes for block in profile.blocks)
    whole = Costs(profile, cluster).seconds(Place(0, devices, devices)).of(0, len(profile.blocks))
    reduce_s = cluster.link(0, devices - 1).reduce_seconds(weights, devices)
    summing = (
        f"data parallelism sums {mib(weights)} MiB of gradients over {devices} devices for every minibatch, "
        f"{reduce_s / whole:.0%} of its time"
    )
    if best == "single":
        return "Nothing that uses more devices is 5% faster."
    if best == "data-parallel":
        return f"Its devices are all equally busy, and summing gradients takes {reduce_s / whole:.0%} of its time."
    slowest = max(ways[best].stages, key=lambda stage: stage.total_s)
    even = sum(stage.total_s * stage.replicas for stage in ways[best].stages) / sum(ways[best].replicas)
    above = slowest.total_s / even - 1
    balance = f"the slowest stage ({slowest.first} - {slowest.last}) takes {above:.0%} more than the average device"
    if best == "pipeline":
        return f"Devices pass on activations only, while {summing}; {balance}."
    if "pipeline" in ways:
        gain = ways[best].samples_per_second / ways["pipeline"].samples_per_second
        return f"Several devices for a slow stage gain {gain:.2f}x over a pipeline without, while {summing}; {balance}."
    return f"Only so does every stage fit its device; {balance}."
