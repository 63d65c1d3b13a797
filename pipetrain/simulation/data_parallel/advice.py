"""Which way to train is fastest, with data parallelism whose transfers are ordered among the ways."""

from __future__ import annotations

from pipetrain.plan.advice import Advice, Ordered, advise, everywhere
from pipetrain.plan.cluster import Cluster
from pipetrain.plan.memory import Training
from pipetrain.plan.partition import checked_training
from pipetrain.plan.profile import Profile
from pipetrain.schemes.table import TRANSFERRING
from pipetrain.simulation.data_parallel.profiled import simulate_order


def advise_all(
    profile: Profile,
    num_devices: int,
    cluster: Cluster | None = None,
    training: Training | None = None,
    of_microbatches: Profile | None = None,
) -> Advice:
    """``advise``, with ``all-reduce`` and ``parameter-server`` on all devices beside it, as they are simulated.

    Each has the order of transfers that is predicted to be the fastest. There are none on one device, on more than the
    minibatch has rows, and where the whole model does not fit a device's memory.
    """
    cluster, training = cluster or Cluster(), checked_training(training)
    advice = advise(profile, num_devices, cluster, training, of_microbatches)
    whole = everywhere(profile, num_devices, cluster, training)
    if whole is None or not 1 < num_devices <= profile.batch_size:
        return advice
    ordered = {}
    for scheme in TRANSFERRING:
        step_s = simulate_order(profile, scheme, num_devices, cluster).step_s
        ordered[scheme] = Ordered(num_devices, profile.batch_size / step_s, whole.fullest_bytes)
    return advice.beside(ordered)
