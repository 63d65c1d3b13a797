"""Which way to train is fastest, with what is simulated among the ways: ordered transfers, synchronous schedules."""

from __future__ import annotations

from dataclasses import replace

from pipetrain.plan.advice import MARGIN, WAYS, Advice, Ordered
from pipetrain.plan.capacity import NoPlan
from pipetrain.plan.cluster import Cluster
from pipetrain.plan.cost import Costs, Place
from pipetrain.plan.memory import Training
from pipetrain.plan.partition import DEVICES, checked_training, everywhere, partition
from pipetrain.plan.profile import Profile, mib
from pipetrain.plan.stages import Partition
from pipetrain.schemes.arguments import checked_count
from pipetrain.schemes.coding.coded_reduce import widest
from pipetrain.schemes.table import CODED, GRID, TRANSFERRING
from pipetrain.schemes.text_form import stages_of
from pipetrain.simulation.coded_reduce import simulate_tree
from pipetrain.simulation.data_parallel.estimate import estimated_step_s
from pipetrain.simulation.grid.estimate import estimated_grid
from pipetrain.simulation.minibatch import acting, timed
from pipetrain.simulation.schedule_trials import is_synchronous, try_schedules


def advise(
    profile: Profile,
    num_devices: int,
    cluster: Cluster | None = None,
    training: Training | None = None,
    of_microbatches: Profile | None = None,
) -> Advice:
    """Compare one device, data parallelism, a pipeline and a pipeline with replicated stages.

    Pipelines whose schedule flushes are simulated, see ``minibatch.timed``; others take what their slowest stage takes.
    ``of_microbatches`` is the profile for pipelines whose training divides minibatches, if it is another.
    The recommended way is the simplest that is within 5% of the fastest. Raises NoPlan, a ValueError, if none fits the
    devices' memory.
    """
    cluster, training = cluster or Cluster(), checked_training(training)
    num_devices = checked_count("num_devices", num_devices, DEVICES, 4)
    ways: dict[str, Partition | None] = dict.fromkeys(WAYS[: min(num_devices, 2)])
    for devices in range(1, num_devices + 1):
        _keep_faster(ways, everywhere(profile, devices, cluster, training), cluster)
    schedule, pieces = training.chosen.schedule, of_microbatches or profile
    refusal: NoPlan | None = None
    try:
        devices = min(num_devices, len(profile.blocks) // schedule.chunks)
        _keep_faster(ways, timed(partition(pieces, devices, cluster, training=training), cluster), cluster)
    except NoPlan as error:
        ways["pipeline"], refusal = None, error
    if schedule.chunks == 1 and stages_of(training.chosen) is None:
        found = partition(pieces, num_devices, cluster, replicate=True, training=training)
        _keep_faster(ways, timed(found, cluster), cluster)  # it may be any of the ways
    possible = {name: way for name, way in ways.items() if way is not None}
    if refusal is not None and not possible:
        raise refusal
    fastest = max(way.samples_per_second for way in possible.values())
    recommended = next(
        name for name in WAYS if name in possible and possible[name].samples_per_second * MARGIN >= fastest
    )
    return Advice(
        {name: ways[name] for name in WAYS if name in ways},
        recommended,
        _reason(profile, recommended, possible, Costs(profile, cluster, 1, training.jit_compile)),
    )


def advise_all(
    profile: Profile,
    num_devices: int,
    cluster: Cluster | None = None,
    training: Training | None = None,
    of_microbatches: Profile | None = None,
) -> Advice:
    """``advise``, with ``all-reduce`` and ``parameter-server`` on all devices beside it, as they are simulated.

    Each has the order of transfers that is predicted to be the fastest. There are none on one device, on more than the
    minibatch has rows, and where the whole model does not fit a device's memory. Beside them is ``coded-reduce``, which
    bears a straggler though none is simulated, and the ``grid`` that sends the least, if it divides any layer by its
    outputs. Where the training's scheme is a synchronous pipeline, the other schedules of this kind are there too, see
    ``try_schedules``: also if one of them alone fits the devices' memory. All ways then count what an action takes
    beside its computing, for which such pipelines wait, see ``minibatch.acting``.

    Raises NoPlan, a ValueError, if nothing fits it.
    """
    cluster, training = cluster or Cluster(), checked_training(training)
    num_devices = checked_count("num_devices", num_devices, DEVICES, 4)
    schedules = None
    if is_synchronous(training.chosen):
        cluster = acting(cluster)
        schedules = try_schedules(profile, num_devices, cluster, training, of_microbatches)
    try:
        pieces = of_microbatches if training.microbatches > 1 else None
        advice = advise(profile, num_devices, cluster, training, pieces)
    except NoPlan:
        if schedules is None or schedules.recommended is None:
            raise
        advice = Advice(dict.fromkeys(WAYS[:3]), "pipeline", "Nothing fits as it is set, but with another schedule.")
    whole = everywhere(profile, num_devices, cluster, training)
    if not cluster.holds(whole.fullest_bytes) or not 1 < num_devices <= profile.batch_size:
        return replace(advice, schedules=schedules)
    ordered = {}
    for scheme in TRANSFERRING:
        step_s = estimated_step_s(profile, scheme, num_devices, cluster)
        ordered[scheme] = Ordered(num_devices, profile.batch_size / step_s, whole.fullest_bytes)
    step_s = simulate_tree(profile, *widest(num_devices), cluster).step_s
    ordered[CODED] = Ordered(num_devices, profile.batch_size / step_s, whole.fullest_bytes)
    if (grid := estimated_grid(profile, num_devices, cluster, training.slots)) is not None:
        rate, memory_bytes = profile.batch_size / grid.step_s, whole.fullest_bytes - grid.elsewhere_bytes
        ordered[GRID] = Ordered(num_devices, rate, memory_bytes)
    return replace(advice.beside(ordered), schedules=schedules)


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
    devices = max(way.devices for way in ways.values())
    if best == "data-parallel":
        devices = ways[best].devices
    weights = sum(block.weight_bytes for block in profile.blocks)
    copies = costs.chosen(Place(0, devices, devices), 0, costs.blocks)
    whole = costs.seconds(copies).of(0, costs.blocks)
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
