"""Schedules of several stages a device, or with backwards in halves: bubbles and memory are as published."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parameters import by_default

from pipetrain.plan.cluster import Cluster, Level, Link
from pipetrain.plan.memory import Training
from pipetrain.plan.partition import NoPlan, partition, plan
from pipetrain.plan.profile import BlockProfile, Profile
from pipetrain.schemes import dry_run, schedules, zero_bubble
from pipetrain.schemes.actions import Action
from pipetrain.schemes.dry_run import figures
from pipetrain.schemes.schedules import orders
from pipetrain.schemes.scheme import Scheme
from pipetrain.schemes.table import PIPELINES, SCHEDULED, check_name, chunked, scheme
from pipetrain.schemes.validation import check
from pipetrain.simulation.simulator import simulate

UNIT_S = 1e-3
FAST = Cluster((Level(Link(bandwidth_bytes_per_s=1e15, latency_s=0.0)),), overhead_s=0.0)


def of_name(name):
    family, _, chunks = name.partition("/")
    return scheme(chunked(family, int(chunks) if chunks else None))


@cache
def simulated(name, devices, microbatches):
    """The bubble of one minibatch, simulated with T_F = T_I = T_W for every stage and no time for transfers.

    As the papers count it: the time in which a device waits between its first action and its last one, most of all
    devices, as a part of the time in which it works.
    """
    chosen = of_name(name)
    count = devices * chosen.schedule.chunks
    rows = microbatches  # so that a stage's forward of a microbatch takes one unit
    blocks = tuple(BlockProfile(f"b{n}", rows * UNIT_S, 2 * rows * UNIT_S, 1000, 500, 1000) for n in range(count))
    training = Training(chosen, microbatches=microbatches)
    cut = partition(Profile("chain", rows, blocks), devices, FAST, training=training)
    spans = simulate(cut, chosen, FAST, minibatches=1).spans
    waits = []
    for device in range(devices):
        mine = [span for span in spans if span.device == f"device:{device}"]
        work_s = sum(span.end_s - span.start_s for span in mine)
        waits.append((max(span.end_s for span in mine) - min(span.start_s for span in mine)) / work_s - 1)
    return max(waits)


def held(name, devices, microbatches):
    """The most activations of a stage, of a microbatch each, that a device holds."""
    return max(figures(orders(of_name(name).schedule.order, devices, 1, microbatches)).peak_held)


# The published bubble for p devices and m microbatches where there are as many as it is published for, and where there
# are fewer, what the way of a single microbatch down and up the devices leaves; and the activations held.
CLOSED = {
    "gpipe": (lambda p, m: (p - 1) / m, lambda p, m: m),  # arXiv 1811.06965, section 2.3
    "1f1b": (lambda p, m: (p - 1) / m, lambda p, m: min(p, m)),  # arXiv 2006.09503, section 3
    "interleaved/2": (  # arXiv 2104.04473, section 2.2
        lambda p, m: (p - 1 + max(0, p - m)) / (2 * m),
        lambda p, m: min(2 * m, 3 * p - 1) if m % p == 0 or m < p else None,
    ),
    "interleaved/3": (
        lambda p, m: (p - 1 + 2 * max(0, p - m)) / (3 * m),
        lambda p, m: min(3 * m, 4 * p - 1) if m % p == 0 or m < p else None,
    ),
    "looped-bfs/2": (lambda p, m: (p - 1 + max(0, p - m)) / (2 * m), lambda p, m: 2 * m),  # arXiv 2211.05953
    "looped-bfs/3": (lambda p, m: (p - 1 + 2 * max(0, p - m)) / (3 * m), lambda p, m: 3 * m),
    "zb-h1": (  # arXiv 2401.10241, table 1: (p-1)(T_F + T_I - T_W) of m(T_F + T_I + T_W), at 1F1B's memory
        lambda p, m: max(p - 1, 2 * p - 1 - m) / (3 * m),
        lambda p, m: min(p, m),
    ),
    "zb-h2": (  # the same: (p-1)(T_F + T_I - 2 T_W), at 2p-1
        lambda p, m: max(0, 2 * p - 1 - m) / (3 * m),
        lambda p, m: min(2 * p - 1, m),
    ),
    "zb-v": (  # the same, section 6: none, at 1F1B's memory, that is p microbatches at both stages
        lambda p, m: max(0, 2 * p - 1 - m, 4 * p - 1 - 4 * m) / (6 * m),
        lambda p, m: min(2 * p, 2 * m),
    ),
}
# arXiv 2405.15362, section 3: bubbles and memory up to a constant number of actions, for p devices of both stages.
CONTROLLED = {
    "v-half": (lambda p, m: p / (2 * m), lambda p: (p + 2) // 2, 4),
    "v-min": (lambda p, m: 2 * p / (3 * m), lambda p: (p + 4) // 3, 5),
}


@pytest.mark.parametrize("microbatches", by_default([4, 5, 7, 8, 12, 15, 16, 24, 32], 4, 7, 16))
@pytest.mark.parametrize("devices", [4, 8])
@pytest.mark.parametrize("name", CLOSED)
def test_bubble_and_memory_are_as_published(name, devices, microbatches):
    bubble, peak = CLOSED[name]
    if "interleaved" in name and microbatches > devices and microbatches % devices:
        assert simulated(name, devices, microbatches) <= bubble(devices, microbatches) * 1.5
        return
    assert simulated(name, devices, microbatches) == pytest.approx(bubble(devices, microbatches), abs=1e-9)
    assert held(name, devices, microbatches) == peak(devices, microbatches)


@pytest.mark.parametrize("microbatches", by_default([4, 5, 7, 8, 12, 15, 16, 24, 32], 4, 7, 16))
@pytest.mark.parametrize("devices", [4, 8])
@pytest.mark.parametrize("name", CONTROLLED)
def test_controlled_memory_is_as_published_and_the_bubble_at_most(name, devices, microbatches):
    bubble, peak, fewer = CONTROLLED[name]
    found, published = simulated(name, devices, microbatches), bubble(devices, microbatches)
    assert published - fewer / (6 * microbatches) <= found + 1e-9
    assert found <= published + 1e-9
    assert held(name, devices, microbatches) == 2 * min(microbatches, peak(devices))


@pytest.mark.parametrize("name", SCHEDULED)
def test_simulated_times_are_those_of_units(name):
    schedule = SCHEDULED[name].schedule
    for devices, microbatches in ((2, 3), (4, 4), (4, 9)):
        bubble = figures(orders(schedule.order, devices, 1, microbatches)).bubble
        assert simulated(name, devices, microbatches) == pytest.approx(bubble, abs=1e-9)


@given(
    st.sampled_from([*SCHEDULED, *(f"{name}/{v}" for name in ("interleaved", "looped-bfs") for v in (1, 3, 4))]),
    st.integers(1, 9),
    st.integers(1, 33),
)
@settings(max_examples=80)
def test_every_schedule_finishes(name, devices, microbatches):
    dry_run.replay(orders(of_name(name).schedule.order, devices, 2, microbatches))


@pytest.mark.parametrize("microbatches", [1, 3, 4, 8])
@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize("name", [*SCHEDULED, "interleaved/1", "interleaved/3", "looped-bfs/3"])
def test_the_validator_takes_them(name, devices, microbatches):
    chosen = of_name(name)
    check(chosen, devices * chosen.schedule.chunks, microbatches)


@pytest.mark.parametrize(
    ("module", "schedule", "devices", "microbatches"),
    [
        (schedules, PIPELINES["interleaved"].schedule, 2, 4),
        (schedules, PIPELINES["looped-bfs"].schedule, 2, 4),
        (zero_bubble, zero_bubble.ZB_H1, 4, 6),
        (zero_bubble, zero_bubble.ZB_H2, 4, 7),
        (zero_bubble, zero_bubble.ZB_V, 2, 3),
        (zero_bubble, zero_bubble.V_HALF, 2, 3),
        (zero_bubble, zero_bubble.V_MIN, 2, 3),
    ],
)
def test_docstrings_show_the_grids(module, schedule, devices, microbatches):
    grid = dry_run.grid(dry_run.replay(orders(schedule.order, devices, 1, microbatches)))
    assert "\n".join(f"    {row}" for row in grid.splitlines()) in module.__doc__


def test_one_chunk_is_the_schedule_without_chunks():
    for family, plain in (("interleaved/1", "1f1b"), ("looped-bfs/1", "gpipe")):
        assert orders(of_name(family).schedule.order, 3, 2, 5) == orders(PIPELINES[plain].schedule.order, 3, 2, 5)


def test_chunks_are_of_schemes_that_have_any_number_of_them():
    assert chunked("interleaved", 2) == SCHEDULED["interleaved"]
    three = chunked("interleaved", 3)
    assert isinstance(three, Scheme)
    assert check_name(three) == "interleaved-3"
    assert three.schedule.devices(6) == 2
    for name, chunks in (("zb-v", 3), ("1f1b", 2), ("interleaved", 0), ("interleaved", 1.5)):
        with pytest.raises(ValueError, match="Received: chunks="):
            chunked(name, chunks)


def test_weight_gradients_that_follow_each_other_are_one_list():
    made = [Action.parse(text) for text in ["0F0", "0F1", "0I0", "0W0", "0I1", "2W0", "2W1", "0W1"]]
    lists = [[str(action) for action in each] for each in schedules.joined(iter(made), 2)]
    assert lists == [["0F0"], ["0F1"], ["0I0"], ["0W0"], ["0I1"], ["2W0", "2W1"], ["0W1"]]


def test_a_minibatch_with_whole_and_halved_backwards_ends_without_the_next_one():
    """PyTorch's DualPipeV has such; the caller posts the next minibatch when the update of this one is made."""
    given = []

    def order():
        for text in ["0F0", "0F1", "0B0", "0I1", "0W1"]:
            given.append(text)
            yield Action.parse(text)
        raise AssertionError("The next minibatch is awaited.")

    lists = schedules.joined(order(), 2)
    assert [str(next(lists)[0]) for _ in range(5)] == given


@pytest.mark.parametrize("name", ["zb-h1", "zb-v"])
def test_no_minibatch_is_awaited_before_a_given_one_has_ended(name):
    schedule = SCHEDULED[name].schedule
    for device in range(2):
        given, waits = [], []

        def arriving(given=given, waits=waits):
            for group in schedules.groups_of(3, 4):
                waits.append(len(given))
                yield group

        for each in schedules.joined(schedule.order(device, 2, arriving()), 4):
            given += each
        assert waits == [n * len(given) // 3 for n in range(3)]
        assert given == orders(schedule.order, 2, 3, 4)[device]


@pytest.mark.parametrize("name", [name for name, each in PIPELINES.items() if each.schedule.flushes and each.splits])
def test_the_planner_counts_the_units_in_which_devices_wait(name):
    training = Training(name, microbatches=8)
    blocks = tuple(BlockProfile(f"b{n}", 1e-3, 2e-3, 1000, 0, 1000) for n in range(8))
    planned = partition(Profile("chain", 8, blocks), 4, FAST, training=training)
    trace = simulate(planned, name, FAST, minibatches=3)
    assert planned.step_s == pytest.approx(trace.step_s, rel=0.06)


@pytest.mark.parametrize("microbatches", by_default([8, 16, 32], 8, wide=[16, 32]))
@pytest.mark.parametrize("devices", [4, 8])
@pytest.mark.parametrize("name", [*CLOSED, *CONTROLLED])
def test_planned_memory_is_as_published(name, devices, microbatches):
    """In the activations that all of a device's layers keep of one microbatch: p for zb-v, and so on."""
    chosen = of_name(name)
    chunks = chosen.schedule.chunks
    kept_bytes = 2**10 * microbatches  # of a minibatch, at each stage
    blocks = tuple(BlockProfile(f"b{n}", 1e-3, 2e-3, 0, 0, kept_bytes) for n in range(devices * chunks))
    training = Training(chosen, microbatches=microbatches)
    cut = partition(Profile("chain", microbatches, blocks), devices, FAST, training=training)
    if name in CONTROLLED:
        expected = chunks * min(microbatches, CONTROLLED[name][1](devices))
    else:
        expected = CLOSED[name][1](devices, microbatches)
    assert cut.fullest_bytes == expected * 2**10


@given(
    st.sampled_from([name for name in SCHEDULED if of_name(name).schedule.chunks > 1]),
    st.integers(1, 3),
    st.sampled_from([1, 2, 4, 8]),
    st.lists(st.integers(0, 1000), min_size=6, max_size=6),
)
@settings(max_examples=40)
def test_a_device_holds_what_its_stages_hold_together(name, devices, microbatches, sizes):
    """The planned bytes are those of a walk through the order that keeps each microbatch from its F to its B or W."""
    schedule = PIPELINES[name].schedule
    blocks = tuple(BlockProfile(f"b{n}", 1.0, 2.0, 0, 0, 8 * size) for n, size in enumerate(sizes[: 2 * devices]))
    training = Training(name, microbatches=microbatches)
    cut = partition(Profile("chain", 8, blocks), devices, FAST, training=training)
    fullest = []
    for order in orders(schedule.order, devices, 1, microbatches):
        held, most = set(), 0
        halved = {each.stage for each in order if each.op == "W"}
        for op, stage, microbatch in order:
            held |= {(stage, microbatch)} if op == "F" else set()
            most = max(most, sum(8 * sizes[each] // microbatches for each, _ in held))
            held -= {(stage, microbatch)} if op == ("W" if stage in halved else "B") else set()
        fullest.append(most)
    assert cut.fullest_bytes == max(fullest)


@pytest.mark.parametrize("name", ["interleaved", "zb-v", "v-half", "v-min"])
def test_a_limit_is_kept_and_used(name):
    """Layers keep more and more: the most even cut is not the leanest, and a leaner one is found."""
    blocks = tuple(BlockProfile(f"b{n}", 1e-3, 2e-3, 0, 0, 1000 * (n + 20)) for n in range(48))
    profile, training = Profile("chain", 16, blocks), Training(name, microbatches=16)
    free = partition(profile, 4, FAST, training=training)
    limit = int(0.97 * free.fullest_bytes)
    limited = partition(profile, 4, Cluster(FAST.levels, memory_bytes=limit), training=training)
    assert limited.fullest_bytes <= limit
    assert limited.slowest_s >= free.slowest_s
    least = limited.fullest_bytes // 4
    with pytest.raises(NoPlan, match=rf"stage \d+ .* and stage \d+ .* keep .*too much.*bytes={least} .*devices=4"):
        partition(profile, 4, Cluster(FAST.levels, memory_bytes=least), training=training)


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_the_first_trained_layer_has_weight_gradients_alone(frozen):
    """Of dense layers, for half of whose weights' bytes the gradients are made once: of all their backward, or of half.

    So it is after layers without trained weights.
    """
    still = [BlockProfile(f"b{n}", 1.0, 0.0, 0, 0, 0, late_bytes=0) for n in range(frozen)]
    dense = BlockProfile("dense", 1.0, 2.0, 0, 400, 0, product_bytes=200, late_bytes=400)
    profile = Profile("chain", 4, (*still, *[replace(dense, name=f"d{n}") for n in range(3)]))
    halves = {"I": [0.0, 1.0, 1.0], "W": [2.0, 1.0, 1.0]}
    for name, takes_s in (("zb-h1", halves), ("1f1b", {"B": [1.0, 1.5, 1.5]})):
        cut = plan(profile, [frozen + 1, frozen + 2, frozen + 3], FAST, training=Training(name, microbatches=4))
        assert [stage.late_s for stage in cut.stages] == [2.0, 1.0, 1.0]
        assert [stage.product_s for stage in cut.stages] == [1.0, 0.5, 0.5]
        spans = simulate(cut, name, FAST, minibatches=1).spans
        for op, expected in takes_s.items():
            for stage, seconds in enumerate(expected):
                taken = [round(each.end_s - each.start_s, 9) for each in spans if (each.op, each.stage) == (op, stage)]
                last_s = cut.stages[stage].product_s if op == "B" else 0.0  # made with the update
                assert taken == [seconds / 4] * 3 + [seconds / 4 + last_s]


def test_what_waits_is_what_the_profile_says():
    """I and W of a stage: a normalization's gradients do not wait, and the first layer has no input gradients."""
    late = [400, 400, 0, None]
    blocks = tuple(BlockProfile(f"b{n}", 1.0, 2.0, 0, 400, 0, late_bytes=each) for n, each in enumerate(late))
    training = Training("zb-h1", microbatches=4)
    cut = partition(Profile("chain", 4, blocks), 4, FAST, training=training)
    assert [stage.late_s for stage in cut.stages] == [2.0, 1.0, 0.0, 1.0]
    spans = simulate(cut, "zb-h1", FAST, minibatches=1).spans
    for stage, late_s in enumerate([2.0, 1.0, 0.0, 1.0]):
        for op, expected in (("I", 2.0 - late_s), ("W", late_s)):
            taken = {round(each.end_s - each.start_s, 9) for each in spans if (each.op, each.stage) == (op, stage)}
            assert taken == {expected / 4}
