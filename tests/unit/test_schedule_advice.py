"""What is predicted of synchronous schedules, which one is recommended under a memory limit, and why."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parameters import by_default, widely

from pipetrain.plan.capacity import NoPlan
from pipetrain.plan.cluster import Cluster, Level, Link
from pipetrain.plan.division import divided
from pipetrain.plan.memory import Training
from pipetrain.plan.profile import BlockProfile, Profile, Seconds
from pipetrain.plan.schedule_advice import MARGIN, ScheduleAdvice, Trial
from pipetrain.schemes.dry_run import replay
from pipetrain.schemes.schedules import orders
from pipetrain.schemes.table import CHUNKED, chunked, scheme
from pipetrain.schemes.text_form import scheme_of, written
from pipetrain.schemes.unit_times import figures
from pipetrain.simulation.advice import advise_all
from pipetrain.simulation.minibatch import ACTION_S
from pipetrain.simulation.schedule_trials import ROUNDS, pieces_to_measure, try_schedules
from pipetrain.simulation.simulator import simulate

UNIT_S = 2.0**-10
KEPT_BYTES = 2**16  # of one minibatch, for each block
BLOCKS, DEVICES, ROWS = 24, 4, 64
FAST = Cluster((Level(Link(bandwidth_bytes_per_s=1e15)),))
SET = Training("1f1b", microbatches=4)


def chain(blocks=BLOCKS, rows=ROWS, weight_bytes=0, microbatches=1, times=1.0):
    """Blocks whose backward takes twice their forward."""
    each = [
        BlockProfile(f"b{n}", times * UNIT_S, 2 * times * UNIT_S, 0, weight_bytes, KEPT_BYTES) for n in range(blocks)
    ]
    return Profile("chain", rows, tuple(each), microbatches=microbatches)


def tried(profile=None, cluster=FAST, training=SET, devices=DEVICES, pieces=None):
    found = try_schedules(profile or chain(), devices, cluster, training, pieces)
    assert found is not None
    return found


def orders_of(trial):
    named = chunked(trial.scheme, trial.chunks if trial.scheme in CHUNKED else None)
    return orders(scheme(named).schedule.order, DEVICES, 1, trial.microbatches)


def of_each(advice):
    return {(trial.scheme, trial.chunks): trial for trial in advice.trials}


@pytest.mark.wide
def test_rates_and_memory_are_those_of_the_orders():
    """Equal stages: a minibatch takes as many units as the order, and the device holds as many activations."""
    advice = tried()
    assert [*of_each(advice)] == [
        ("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("looped-bfs", 2), ("looped-bfs", 3),
        ("zb-h1", 1), ("zb-h2", 1), ("zb-v", 2), ("v-half", 2), ("v-min", 2),
    ]  # fmt: skip
    assert advice.as_set is not None
    assert (advice.as_set.scheme, advice.as_set.microbatches) == ("1f1b", 4)
    for trial in (*advice.trials, advice.as_set):
        worth = figures(orders_of(trial))
        part = BLOCKS / (DEVICES * trial.chunks) / trial.microbatches  # of a minibatch's work and activations
        assert ROWS / trial.samples_per_second == pytest.approx(worth.makespan * part * UNIT_S, rel=1e-9)
        assert trial.memory_bytes == max(worth.peak_held) * part * KEPT_BYTES
        assert trial.fits


@pytest.mark.wide
def test_the_microbatches_are_the_fewest_of_the_fastest():
    """More take no longer here, until they are so many that a bubble is not worth another one per cent."""
    for trial in tried().trials:
        rates = []
        for rounds in ROUNDS:
            other = trial._replace(microbatches=rounds * DEVICES)
            rates.append(1 / (figures(orders_of(other)).makespan / other.microbatches))
        best = next(n for n, rate in enumerate(rates) if rate * 1.01 >= max(rates))
        assert trial.microbatches == ROUNDS[best] * DEVICES


@pytest.mark.wide
def test_microbatches_that_take_time_are_fewer():
    """Eight microbatches take twice as long as the minibatch whole: then 4 are as good as it gets."""
    pieces = chain(microbatches=8, times=2.0)
    for trial in tried(pieces=pieces).trials:
        assert trial.microbatches <= 8
    assert {trial.microbatches for trial in tried(chain(rows=8)).trials} <= {4, 8}  # as far as there are rows


@given(st.floats(1.0, 4.0), st.floats(0.2, 4.0), st.integers(2, 16), st.integers(1, 64))
@settings(deadline=None)
def test_times_in_between_go_with_the_microbatches(first, last, measured, microbatches):
    whole, pieces = chain(times=first), chain(times=last, microbatches=measured)
    found = divided(whole, pieces, microbatches)
    each_more = (last - first) / (measured - 1)
    expected = first + each_more * (microbatches - 1)
    if last < first:
        expected = max(expected, last)
    assert found.microbatches == microbatches
    for n, block in enumerate(found.blocks):
        assert block.forward_s == pytest.approx(expected * UNIT_S)
        assert block.backward_s == pytest.approx(2 * expected * UNIT_S)
        assert block.activation_bytes == whole.blocks[n].activation_bytes


def test_measured_times_stay_and_compiled_ones_are_estimated_too():
    with_xla = [replace(block, compiled=Seconds(UNIT_S, UNIT_S, 0.0)) for block in chain().blocks]
    whole, pieces = replace(chain(), blocks=tuple(with_xla)), chain(microbatches=4, times=3.0)
    assert divided(whole, None, 8).blocks == whole.blocks  # nothing is known of microbatches
    assert divided(whole, pieces, 1) == whole
    assert divided(whole, pieces, 4).blocks == pieces.blocks  # which XLA does not compile there
    with_xla = [replace(block, compiled=Seconds(2 * UNIT_S, UNIT_S, 0.0)) for block in pieces.blocks]
    pieces = replace(pieces, blocks=tuple(with_xla))
    assert divided(whole, pieces, 7).blocks[0].compiled == Seconds(3 * UNIT_S, UNIT_S, 0.0)
    assert Profile.from_json(pieces.to_json()) == pieces


def test_a_second_profile_is_of_the_microbatches_that_are_set():
    assert pieces_to_measure(SET, 8) == 4
    assert pieces_to_measure(SET._replace(microbatches=1), 8) == 8  # so that any are measured
    assert pieces_to_measure(Training("spectrain", microbatches=4), 8) == 1
    assert pieces_to_measure(Training("2bw", microbatches=4), 8) == 4


def test_without_a_limit_the_simplest_within_five_per_cent_is_recommended():
    advice = tried()
    best, fastest = advice.recommended, max(trial.samples_per_second for trial in advice.trials)
    assert best is not None
    assert best.samples_per_second * MARGIN >= fastest
    assert not [
        trial
        for trial in advice.trials
        if trial.samples_per_second * MARGIN >= fastest and (trial.chunks, trial.halves) < (best.chunks, best.halves)
    ]
    plain = of_each(advice)["1f1b", 1]
    gain = best.samples_per_second / plain.samples_per_second
    assert f"It is {gain:.2f}x as fast as 1f1b with {plain.microbatches} microbatches; its devices" in advice.reason
    assert f"wait for {best.waiting:.0%} of the time, the other's for {plain.waiting:.0%}" in advice.reason
    assert f"Recommended of these: scheme={best.scheme!r}, microbatches={best.microbatches}. It is" in str(advice)


def trial(name, rate, memory_bytes=100, fits=True, chunks=1, halves=False, microbatches=8):
    return Trial(name, chunks, microbatches, halves, rate, 0.25, memory_bytes, fits)


def test_the_simplest():
    """One stage a device and whole backwards first, the fastest of them, less memory where they are as fast."""
    plain = trial("1f1b", 100.0), trial("gpipe", 100.5, 800)
    others = trial("zb-h1", 104.0, 50, halves=True), trial("interleaved", 104.9, 50, chunks=2)
    advice = ScheduleAdvice((*plain, *others))
    assert advice.recommended == plain[0]
    assert advice.reason == "No other that fits is 5% faster."
    faster = ScheduleAdvice((*plain, *others, trial("interleaved", 106.0, 90, chunks=3)))
    assert faster.recommended == others[0]  # within five per cent of it
    alone = ScheduleAdvice((*plain, trial("interleaved", 106.0, 90, chunks=3)))
    assert "scheme='interleaved', chunks=3, microbatches=8" in str(alone)
    assert "scheme='zb-v', microbatches=8" in str(ScheduleAdvice([trial("zb-v", 1.0, chunks=2, halves=True)]))


def test_what_a_limit_excludes_is_said():
    mib = 2**20
    lean, fat = trial("1f1b", 100.0, 8 * mib), trial("zb-h2", 120.0, 16 * mib, False, halves=True)
    advice = ScheduleAdvice((lean, fat), lean._replace(samples_per_second=50.0), ["zb-v"], 10 * mib)
    assert advice.recommended == lean
    assert advice.reason == (
        "No other that fits is 5% faster; zb-h2 with 8 microbatches would be 1.20x as fast, and needs 16.00 MiB on a "
        "device, of which each has 10.00."
    )
    assert re.search(r"as set: 1f1b +1 +8 +50 +1\.00x +25% +8\.00\n1f1b +1 +8 +100 +2\.00x", str(advice))
    assert "16.00, too much" in str(advice) and "too few layers for zb-v." in str(advice)
    none = ScheduleAdvice((fat, fat._replace(memory_bytes=12 * mib)), None, (), 10 * mib)
    assert none.recommended is None
    assert str(none).endswith(
        "No synchronous schedule fits. The leanest, zb-h2 with 8 microbatches, needs 12.00 MiB on a device, of which "
        "each has 10.00."
    )


@pytest.mark.wide
@pytest.mark.parametrize("activations", by_default([2, 3, 4, 6, 8, 40], 2, 6, 40))
def test_the_limit_decides(activations):
    """A limit of so many activations of a whole device, for one of 32 microbatches, or of fewer larger ones."""
    limit = activations * KEPT_BYTES * BLOCKS // DEVICES // 32
    advice = tried(cluster=replace(FAST, memory_bytes=limit))
    free = of_each(tried())
    for each in advice.trials:
        assert each.fits == (each.memory_bytes <= limit)
        if free[each.scheme, each.chunks].memory_bytes <= limit:
            assert each == free[each.scheme, each.chunks]
    best = advice.recommended
    if best is None:
        assert activations < 3
    else:
        assert best.memory_bytes <= limit
        assert (best.scheme == "zb-h1") == (activations >= 4)


@pytest.mark.wide
def test_only_another_schedule_fits():
    """A device holds three quarters of what its layers keep of a minibatch; with gpipe it would be all of it."""
    small, limit = chain(rows=4, weight_bytes=16), 3 * KEPT_BYTES * BLOCKS // DEVICES // 4 + 5 * 16 * BLOCKS
    tight = replace(FAST, memory_bytes=limit)
    found = advise_all(small, DEVICES, tight, SET.under("gpipe"))
    assert {*found.ways.values()} == {None}
    assert found.schedules == tried(small, replace(tight, overhead_s=ACTION_S), SET.under("gpipe"))
    fitting = {trial.scheme for trial in found.schedules.trials if trial.fits}
    assert {"v-half", "v-min"} <= fitting
    assert fitting.isdisjoint({"gpipe", "looped-bfs", "zb-h2", "zb-v"})
    assert "but with another schedule" in str(found) and "Recommended of these" in str(found)
    with pytest.raises(NoPlan, match="No cut of 'chain' fits"):
        advise_all(small, DEVICES, replace(FAST, memory_bytes=1024), SET)


@pytest.mark.wide
def test_where_there_is_nothing_to_choose():
    assert try_schedules(chain(), 1, FAST, SET) is None
    assert try_schedules(chain(rows=3), 4, FAST, SET) is None  # fewer rows than devices
    weighty = chain(weight_bytes=16)
    assert advise_all(weighty, DEVICES, FAST, Training("spectrain")).schedules is None
    assert advise_all(weighty, DEVICES, FAST, SET).schedules == tried(weighty, replace(FAST, overhead_s=ACTION_S))
    slow = replace(FAST, overhead_s=1.0)
    assert advise_all(weighty, DEVICES, slow, SET).schedules == tried(weighty, slow)


def test_schedules_of_more_stages_than_there_are_layers_are_left_out():
    advice = tried(chain(blocks=9))
    assert {trial.chunks for trial in advice.trials} == {1, 2}
    assert advice.left_out == ["interleaved with 3 stages a device", "looped-bfs with 3 stages a device"]
    advice = tried(chain(blocks=3), training=Training("zb-v", microbatches=4))
    assert {trial.scheme for trial in advice.trials} == {"gpipe", "1f1b", "zb-h1", "zb-h2"}
    assert "zb-v" in advice.left_out
    assert advice.as_set is not None and advice.as_set.chunks == 2  # on one device


FIVE = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v")
UNEVEN = ((7, 2, 4), *widely((13, 4, 4), (13, 3, 1), (24, 4, 16)))  # blocks, devices, microbatches


def uneven(blocks, rows=ROWS):
    """Blocks of which every third takes four times as long, and which send what they make."""
    each = [
        BlockProfile(f"b{n}", f * UNIT_S, 2 * f * UNIT_S, 10**4, 10**3, KEPT_BYTES, UNIT_S / 4)
        for n, f in enumerate((4, 1, 1)[n % 3] for n in range(blocks))
    ]
    return Profile("uneven", rows, tuple(each))


@pytest.mark.parametrize(("blocks", "devices", "microbatches"), UNEVEN)
@pytest.mark.parametrize("name", by_default(FIVE, "1f1b", wide=FIVE))
@pytest.mark.parametrize("processors", [pytest.param(2, marks=pytest.mark.wide), math.inf])
def test_the_ways_take_what_the_simulator_says(blocks, devices, microbatches, name, processors):
    """To 1e-6, over forty minibatches, each of which fills and drains the pipeline; on few processors too."""
    hosts = Cluster((Level(Link(1e8, 1e-5)),), processors=processors)
    training = Training(name, microbatches=microbatches)
    advice = advise_all(uneven(blocks), devices, hosts, training)
    acts = replace(hosts, overhead_s=ACTION_S)
    ways = [way for way in advice.ways.values() if way is not None and len(way.stages) > 1]
    assert ways
    for way in ways:
        expected_s = simulate(way, name, acts, 40).step_s
        assert way.step_s == pytest.approx(expected_s, rel=1e-6)
        assert f"{ROWS / expected_s:.0f}" in advice.comparison() and "about" in str(way)
    assert advice.schedules is not None and advice.schedules.as_set is not None
    if processors == math.inf and advice.ways.get("pipeline"):  # on few processors, fewer stages may be faster
        pipeline = advice.ways["pipeline"]
        assert pipeline.samples_per_second == advice.schedules.as_set.samples_per_second


def test_asynchronous_ways_take_what_their_slowest_stage_takes():
    advice = advise_all(uneven(13), 4, FAST, Training("spectrain"))
    way = advice.ways["pipeline"]
    assert way is not None and way.simulated_s is None and "at most" in str(way)
    assert way.step_s == way.slowest_s


@pytest.mark.wide
def test_nothing_fits_a_schedule_of_several_stages_a_device():
    with pytest.raises(NoPlan, match="No cut of 'chain' fits"):
        advise_all(chain(), DEVICES, replace(FAST, memory_bytes=1024), Training("zb-v", microbatches=4))


@pytest.mark.wide
def test_the_ways_with_a_schedule_of_a_file(tmp_path):
    for name, stages in (("zb-h1", 4), ("zb-v", 8)):
        path = tmp_path / f"{name}.csv"
        made = orders(scheme(name).schedule.order, 4, 1, 6)
        path.write_text(written(replay(made)), encoding="utf-8")
        found, own = (
            advise_all(chain(), DEVICES, FAST, Training(each, microbatches=6)) for each in (scheme_of(path), name)
        )
        assert (len(found.ways["pipeline"].stages), found.ways["pipeline"].devices) == (stages, DEVICES)
        assert found.ways["pipeline"].step_s == own.ways["pipeline"].step_s
        assert found.schedules.as_set == own.schedules.as_set._replace(scheme=f"{name}.csv")
