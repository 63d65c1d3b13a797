"""What a run of a partition would be: a simulation over the schedules of real runs, which gives the same trace."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from pipetrain.plan.cluster import Cluster
from pipetrain.plan.partition import checked_training
from pipetrain.plan.stages import Partition, StagePlan
from pipetrain.schemes.arguments import checked_count, checked_from_zero
from pipetrain.schemes.options import AnyScheme, check_microbatches, name_of, scheduled
from pipetrain.schemes.scheme import Scheme
from pipetrain.schemes.splitting import window as window_of
from pipetrain.schemes.table import (
    AUTO,
    CODED,
    DATA_PARALLEL,
    GRID,
    SCHEMES,
    TRANSFERRING,
    check_name,
)
from pipetrain.schemes.validation import check_own
from pipetrain.simulation.build import REDUCTIONS, SimulationOptions, StationBuilder
from pipetrain.simulation.kernel import Processors, checked_seed
from pipetrain.simulation.pipeline import PipelineSimulation, VectorizedSimulation, suits
from pipetrain.simulation.simulated_trace import trace_of_stations
from pipetrain.simulation.stations import SimulatedCaller
from pipetrain.trace.trace import Trace

MINIBATCHES = 3  # of a schedule that flushes: each is like the one before, once all devices have begun
COUNTED = "A simulation counts from 1 up"
UNSTAGED = {  # schemes without stages: why, and what simulates them
    CODED: ("A tree of workers has no stages", "pipetrain.simulate_tree(profile, children)"),
    GRID: ("A grid divides layers, which a partition does not have", "pipetrain.simulate_grid(profile, devices)"),
    **dict.fromkeys(
        TRANSFERRING,
        (
            "Transfers are ordered by layers, which a partition has not",
            "pipetrain.simulate_order(profile, scheme, workers)",
        ),
    ),
}
SUMMED = (
    *("blocks", "forward_s", "backward_s", "update_s", "step_s"),
    *("weight_bytes", "product_bytes", "product_s", "late_s"),
)


def simulate(
    partition: Partition,
    scheme: AnyScheme = "spectrain",
    cluster: Cluster | None = None,
    minibatches: int = 200,
    *,
    microbatches: int | None = None,
    overhead_s: float | None = None,
    caller_s: float | None = None,
    speeds: Sequence[float] | None = None,
    slowdown: float = 0.0,
    seed: int = 0,
    window: int | None = None,
    reduction: str = REDUCTIONS[0],
) -> Trace:
    """Simulate training: the times of all actions of every replica of every stage, and of all transfers.

    Stages execute the same schedules as in training. A replica takes its share of the rows of a stage's forward and
    backward seconds; after the last backward of a minibatch, replicas sum their gradients and update. A forward waits
    for the activations from all replicas above, a backward for the gradients from all below. Transfers overlap with
    computing, over links that carry one transfer at a time in each direction and what the cluster's levels say of
    ``contention``. ``single`` and ``data-parallel`` take the partition's stages together, on its first device and on
    all of them.

    Args:
        partition: the stages and what they cost; see ``partition``.
        scheme: the name of a scheme, or a ``Scheme``; with the horizon of the partition's training, if it has that; or
            an object such as ``pipetrain.SpecTrain(horizon="target")``.
        cluster: how devices are joined and how many work at once; by default as ``Cluster()``, with the partition's
            processors.
        minibatches: how many are trained before the pipeline drains.
        microbatches: pieces of a minibatch, for schemes that split it; by default as the partition was made for.
        overhead_s: seconds that every action takes in addition to its computing; by default the cluster's.
        caller_s: seconds that the caller takes between a minibatch's result and posting the next one; by default those
            of the partition's metric and the cluster's calls.
        speeds: of the devices, 1 being that of the profile; by default those of the cluster.
        slowdown: how much the seconds of actions vary: the standard deviation, as a part of the mean, of random factors
            (lognormal, with mean 1).
        seed: of these.
        window: how many minibatches are posted ahead of the results taken; by default as in training.
        reduction: how replicas, and the devices of ``data-parallel``, sum gradients: ``ring``, or ``server``, a
            parameter server on the first one's device.

    Raises:
        ValueError: for what cannot be simulated, with a suggestion; ``ScheduleError`` for a schedule that cannot run.
    """
    _check_staged(scheme)
    training = checked_training(partition.training).under(scheme)
    scheme = scheduled(scheme)
    chosen = SCHEMES["single"] if check_name(scheme) == DATA_PARALLEL else training.chosen
    check_microbatches(microbatches, scheme if scheme == DATA_PARALLEL else chosen)
    stages, devices = _placed(partition, chosen, scheme == DATA_PARALLEL)
    cluster = cluster or Cluster(processors=partition.processors)
    pieces = _pieces(chosen, len(stages), partition, microbatches)
    check_own(chosen, len(stages), pieces)
    used = {device for each in devices for device in each}
    call_s = cluster.call_s if chosen.asynchronous else cluster.calls_s(len(used))
    options = SimulationOptions(
        minibatches=checked_count("minibatches", minibatches, COUNTED, 200),
        microbatches=pieces,
        window=_window(window, len(stages), pieces, chosen),
        caller_s=checked_from_zero("caller_s", partition.metric_s + call_s if caller_s is None else caller_s),
        overhead_s=checked_from_zero("overhead_s", cluster.overhead_s if overhead_s is None else overhead_s),
        speeds=cluster.speeds_of(1 + max(used)) if speeds is None else _speeds(speeds, devices),
        slowdown=checked_from_zero("slowdown", slowdown),
        seed=checked_seed(seed),
        reduction=_reduction(reduction),
    )
    built = StationBuilder(stages, devices, partition.batch_size, chosen, options, cluster)
    caller = SimulatedCaller(options.minibatches, pieces, options.window, options.caller_s, built.reports)
    group = pieces * (options.minibatches if chosen.asynchronous else 1)
    processors = Processors(cluster, 1 + max(station.device for station in built.stations))
    if built.plain and suits(built.stations, cluster, processors, group):
        record = VectorizedSimulation(built.stations, caller, not chosen.asynchronous).run()
    else:
        record = PipelineSimulation(built.stations, caller, not chosen.asynchronous, processors).run()
    return trace_of_stations(built.stations, record, None if chosen.schedule.chunks == 1 else len(built.stations))


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


def _check_staged(scheme: AnyScheme) -> None:
    """Refuse schemes that have no stages, which are simulated from a profile."""
    if (name := name_of(scheme)) == AUTO:
        raise ValueError(
            f"What auto takes is chosen among all ways. Received: scheme={str(scheme)!r}. "
            "Try pipetrain.choose(profile, devices)."
        )
    if name in UNSTAGED:
        problem, instead = UNSTAGED[name]
        raise ValueError(f"{problem}. Received: scheme={scheme!r}. Try {instead}.")


def _placed(partition: Partition, scheme: Scheme, everywhere: bool) -> tuple[list[StagePlan], list[list[int]]]:
    """The stages to simulate, and of each device of the schedule those of its replicas.

    ``everywhere``: whether every device has all stages.
    """
    stages = list(partition.stages)
    devices = [list(range(stage.device, stage.device + stage.replicas)) for stage in stages]
    if scheme.schedule.chunks > 1:
        place, count = scheme.schedule.place, scheme.schedule.devices(len(stages))
        devices = [[n] for n in range(count)]
        if [stage.device for stage in stages] != [place(stage, count) for stage in range(len(stages))]:
            raise ValueError(
                f"The partition's stages are not where the schedule has them. Received: scheme={scheme.name!r}, stages "
                f"on devices {[stage.device for stage in stages]}. Try partition(..., training=Training(scheme))."
            )
    every = [device for each in devices for device in each]
    if len({*every}) < len(every):
        raise ValueError(
            f"Each replica of a stage has a device of its own. Received: devices={devices}. "
            "Try pipetrain.partition, which places them."
        )
    if scheme.name != "single":
        return stages, devices
    whole = replace(
        stages[0],
        last=stages[-1].last,
        output_bytes=0,
        **{name: sum(getattr(stage, name) for stage in stages) for name in SUMMED},
    )
    return [whole], [every if everywhere else every[:1]]


def _pieces(scheme: Scheme, stages: int, partition: Partition, microbatches: int | None) -> int:
    if not scheme.splits:
        return 1
    least = scheme.least_microbatches(stages)
    pieces = max(int(partition.training.microbatches), least) if microbatches is None else int(microbatches)
    if pieces < least or pieces > partition.batch_size:
        raise ValueError(
            "A minibatch has at least as many rows as microbatches, and 2bw as many of these as stages but one. "
            f"Received: microbatches={pieces}, batch_size={partition.batch_size}, {stages} stages. "
            f"Try microbatches={least}."
        )
    return pieces


def _window(given: int | None, stages: int, microbatches: int, scheme: Scheme) -> int:
    if given is not None:
        return checked_count("window", given, COUNTED, 4)
    return window_of(stages, microbatches, scheme.schedule.flushes)


def _speeds(speeds: Sequence[float], devices: Sequence[Sequence[int]]) -> Sequence[float]:
    last = max(device for each in devices for device in each)
    if len(speeds) <= last or not all(0 < speed < math.inf for speed in speeds):
        raise ValueError(
            f"Every device has a speed above 0. Received: speeds={speeds!r} for devices up to {last}. "
            f"Try speeds={[1.0] * (last + 1)}."
        )
    return speeds


def _reduction(name: str) -> str:
    if name not in REDUCTIONS:
        raise ValueError(f"Unknown reduction. Received: reduction={name!r}. Try one of: {', '.join(REDUCTIONS)}.")
    return name
