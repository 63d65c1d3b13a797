"""Every synchronous schedule tried with every number of microbatches worth trying, in simulated time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from pipetrain.plan.capacity import NoPlan
from pipetrain.plan.cluster import Cluster
from pipetrain.plan.division import divided
from pipetrain.plan.memory import Training
from pipetrain.plan.partition import partition
from pipetrain.plan.profile import Profile
from pipetrain.plan.schedule_advice import SAME, ScheduleAdvice, Trial
from pipetrain.plan.stages import Partition
from pipetrain.schemes.schedules import has_halves
from pipetrain.schemes.scheme import Scheme
from pipetrain.schemes.table import CHUNKED, PIPELINES, chunked
from pipetrain.schemes.table import scheme as of_name
from pipetrain.simulation.minibatch import simulated

ROUNDS = (1, 2, 4, 8)  # numbers of microbatches to try, in those of devices
MOST = 8192  # microbatches of all devices together that are worth the time to simulate them
CHUNKS = (2, 3)  # stages a device to try, where a schedule leaves that open


def is_synchronous(scheme: Scheme) -> bool:
    """Whether it trains as the unsplit model does, by the microbatches of one minibatch at a time."""
    return scheme.trains and scheme.splits and not scheme.asynchronous


def pieces_to_measure(training: Training, num_devices: int) -> int:
    """Into how many microbatches a minibatch is to be divided for a second profile; 1 where none is of use."""
    chosen = training.chosen
    if not chosen.splits:
        return 1
    return training.microbatches if training.microbatches > 1 or not is_synchronous(chosen) else num_devices


def try_schedules(
    profile: Profile,
    num_devices: int,
    cluster: Cluster,
    training: Training,
    of_microbatches: Profile | None = None,
) -> ScheduleAdvice | None:
    """What is predicted of each synchronous schedule, with the microbatches that make it fastest within the memory.

    Each has a stage on every device, or several, cut for it and for its number of microbatches, which are the devices'
    number times 1, 2, 4, and 8, as far as the minibatch has rows and devices times microbatches are no more than 8192.
    Seconds of numbers that were not measured are estimated, see ``divided``. What fits no cut is given with the memory
    of the fastest one.

    Args:
        profile: of whole minibatches.
        num_devices: how many there are.
        cluster: how they are joined, and the memory limit.
        training: as it is set, which is tried too, and what else decides on the memory.
        of_microbatches: a profile of microbatches, if there is one.

    None where there is nothing to choose: on one device, or if the minibatch has fewer rows than there are devices.
    """
    blocks = len(profile.blocks)
    devices = min(num_devices, blocks)
    counts = microbatch_counts(devices, devices, profile.batch_size)
    if devices == 1 or not counts:
        return None
    attempt = partial(_attempt, profile, of_microbatches, cluster, training)
    trials, left_out = [], []
    for name, scheme in _candidates():
        if devices * scheme.schedule.chunks <= blocks:
            trials.append(_best([*_all(partial(attempt, name, scheme, devices), counts)]))
        else:
            left_out.append(name if name not in CHUNKED else f"{name} with {scheme.schedule.chunks} stages a device")
    as_set = None
    own = training.chosen
    if is_synchronous(own) and blocks >= own.schedule.chunks:
        on = min(num_devices, blocks // own.schedule.chunks)
        as_set = attempt(own.name, own, on, min(training.microbatches, profile.batch_size))
    return ScheduleAdvice(trials, as_set, left_out, cluster.memory_bytes)


def microbatch_counts(times: int, devices: int, batch_size: int) -> list[int]:
    """The numbers of microbatches worth trying on so many devices: ``times`` 1, 2, 4 and 8, as far as can be."""
    return [rounds * times for rounds in ROUNDS if rounds * times <= min(batch_size, MOST / devices)]


def planned(profile: Profile, devices: int, cluster: Cluster, training: Training) -> tuple[Partition, bool]:
    """The best cut that fits the devices, or without one the best of all; whether it fits."""
    try:
        return partition(profile, devices, cluster, training=training), True
    except NoPlan:
        return partition(profile, devices, replace(cluster, memory_bytes=None), training=training), False


def _candidates() -> Iterator[tuple[str, Scheme]]:
    """The schedules of the table by their names, some with several numbers of stages on a device."""
    for name, scheme in PIPELINES.items():
        if is_synchronous(scheme):
            several = CHUNKS if name in CHUNKED else [None]
            yield from ((name, of_name(chunked(name, chunks))) for chunks in several)


def _all(attempt: partial[Trial], counts: Sequence[int]) -> Iterator[Trial]:
    """From the most microbatches down: fewer never need less memory, so they end with the first that does not fit."""
    for count in reversed(counts):
        trial = attempt(count)
        yield trial
        if not trial.fits:
            return


def _best(trials: Sequence[Trial]) -> Trial:
    """The fastest of those that fit, of equally fast ones that with the fewest microbatches: what their calls take
    beside computing is not always known. If none fits, the one that needs least memory.
    """
    possible = [trial for trial in trials if trial.fits]
    if not possible:
        return min(trials, key=lambda trial: trial.memory_bytes)
    fastest = max(trial.samples_per_second for trial in possible)
    same = [trial for trial in possible if trial.samples_per_second * SAME >= fastest]
    return min(same, key=lambda trial: trial.microbatches)


def _attempt(
    whole: Profile,
    pieces: Profile | None,
    cluster: Cluster,
    training: Training,
    name: str,
    scheme: Scheme,
    devices: int,
    microbatches: int,
) -> Trial:
    """One schedule with so many microbatches, cut for it and simulated."""
    profile = divided(whole, pieces, microbatches)
    trained = training.under(scheme)._replace(microbatches=microbatches)
    cut, fits = planned(profile, devices, cluster, trained)
    trace = simulated(cut, cluster)
    schedule = scheme.schedule
    return Trial(
        name,
        schedule.chunks,
        microbatches,
        has_halves(schedule.order, schedule.devices(len(cut.stages)), microbatches),
        profile.batch_size / trace.step_s,
        trace.bubble(),
        cut.fullest_bytes,
        fits,
    )
