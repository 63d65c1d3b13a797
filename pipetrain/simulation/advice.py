"""Which way to train is fastest, with what is simulated among the ways: ordered transfers, synchronous schedules."""

from __future__ import annotations

from dataclasses import replace

from pipetrain.plan.advice import WAYS, Advice, Ordered, advise, everywhere
from pipetrain.plan.capacity import NoPlan
from pipetrain.plan.cluster import Cluster
from pipetrain.plan.memory import Training
from pipetrain.plan.partition import DEVICES, checked_training
from pipetrain.plan.profile import Profile
from pipetrain.schemes.arguments import checked_count
from pipetrain.schemes.coding.coded_reduce import widest
from pipetrain.schemes.table import CODED, GRID, TRANSFERRING
from pipetrain.simulation.coded_reduce import simulate_tree
from pipetrain.simulation.data_parallel.estimate import estimated_step_s
from pipetrain.simulation.grid.estimate import estimated_grid
from pipetrain.simulation.schedule_trials import acting, is_synchronous, try_schedules


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
    ``try_schedules``: also if one of them alone fits the devices' memory.

    Raises NoPlan, a ValueError, if nothing fits it.
    """
    cluster, training = cluster or Cluster(), checked_training(training)
    num_devices = checked_count("num_devices", num_devices, DEVICES, 4)
    schedules = None
    if is_synchronous(training.chosen):
        schedules = try_schedules(profile, num_devices, acting(cluster), training, of_microbatches)
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
