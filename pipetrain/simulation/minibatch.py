"""What a minibatch takes in a pipeline that flushes: every prediction of synchronous schedules goes by it."""

from __future__ import annotations

from dataclasses import replace

from pipetrain.plan.cluster import Cluster
from pipetrain.plan.stages import Partition
from pipetrain.simulation.simulator import simulate
from pipetrain.trace.trace import Trace

MINIBATCHES = 3  # to simulate: each is like the one before, once all devices have begun
ACTION_S = 5e-5  # what an action takes at least beside its computing, see docs/benchmarks/overhead.md
THREAD_ACTION_S = 3e-4  # and one of a device's thread, as GPUs have


def acting(cluster: Cluster) -> Cluster:
    """The cluster, whose actions take ``ACTION_S`` each beside their computing, or what it says if that is more."""
    return replace(cluster, overhead_s=max(cluster.overhead_s, ACTION_S))


def simulated(cut: Partition, cluster: Cluster) -> Trace:
    """A few minibatches of the training that the cut was made for; ``step_s`` is that of one of them.

    Raises ScheduleError for a schedule that cannot run.
    """
    microbatches = min(cut.training.microbatches_of(len(cut.stages)), cut.batch_size)
    return simulate(cut, cut.training.scheme, cluster, MINIBATCHES, microbatches=microbatches)


def timed(cut: Partition, cluster: Cluster) -> Partition:
    """The cut with ``simulated_s``, if it has several stages and its schedule flushes.

    Others take what their slowest stage takes.
    """
    if len(cut.stages) == 1 or cut.training.chosen.asynchronous:
        return cut
    return replace(cut, simulated_s=simulated(cut, cluster).step_s)
