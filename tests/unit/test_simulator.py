"""The simulator against closed forms, the unit-time replay and the rules that every real run keeps to."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
from array import array
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pipetrain
from pipetrain.cli import main as command_line
from pipetrain.plan.cluster import SHARED_MEMORY, Cluster, Level, Link
from pipetrain.plan.memory import Training
from pipetrain.plan.partition import partition, plan
from pipetrain.plan.profile import BlockProfile, Coding, Profile
from pipetrain.schemes import ScheduleError, dry_run, schedules
from pipetrain.schemes.actions import Action
from pipetrain.schemes.compression import Int8
from pipetrain.schemes.options import OneFOneB, SpecTrain
from pipetrain.schemes.table import NAMES, SCHEMES
from pipetrain.simulation import pipeline, simulator
from pipetrain.simulation.build import StationBuilder
from pipetrain.simulation.comparison import compare
from pipetrain.simulation.profiled import setting_of, simulate_order
from pipetrain.simulation.simulator import simulate
from pipetrain.simulation.stations import Station, StationWork
from pipetrain.trace.idle import idle, pauses
from pipetrain.trace.records import Span, Transfer
from pipetrain.trace.trace import Trace

AT_ONCE = Cluster((Level(Link(math.inf)),))
ASYNCHRONOUS = ["vanilla", "weight-stashing", "vertical-sync", "spectrain"]
PIPELINES = [name for name in SCHEMES if name != "single"]


def cut(stages, batch_size=32, replicas=None, microbatches=1):
    """Stages of (forward, backward, update seconds, output and weight bytes), side by side."""
    blocks = [BlockProfile(f"b{n}", f, b, o, w, 0, u) for n, (f, b, u, o, w) in enumerate(stages)]
    profile = Profile("made up", batch_size, tuple(blocks))
    training = Training(microbatches=microbatches)
    return plan(profile, range(1, len(stages) + 1), AT_ONCE, replicas, training)


def equal(stages, forward_s=1.0, backward_s=1.0, microbatches=1):
    """Equal stages whose microbatches take as long as is said; nothing else takes any time."""
    one = (forward_s * microbatches, backward_s * microbatches, 0, 0, 0)
    return cut([one] * stages, 4 * microbatches, microbatches=microbatches)


def joined_by(bandwidth, latency=0.0, **options):
    return Cluster((Level(Link(bandwidth, latency), **options),))


def pieces_of(scheme, stages, microbatches):
    return max(microbatches, SCHEMES[scheme].least_microbatches(stages)) if SCHEMES[scheme].splits else 1


def schedule_of(scheme, stages, minibatches, pieces):
    return schedules.orders(SCHEMES[scheme].schedule.order, stages, minibatches, pieces)


def by_row(trace):
    rows = {place: [] for place in trace.rows}
    for span in trace.spans:
        rows[span.stage, span.replica].append(span)
    return rows


seconds = st.integers(0, 5)
one_stage = st.tuples(seconds, seconds, st.integers(0, 2), st.integers(0, 9), st.integers(0, 9))
chains = st.lists(one_stage, min_size=1, max_size=4)


@given(st.sampled_from(PIPELINES), st.integers(1, 5), st.integers(1, 6), st.integers(1, 5))
@settings(max_examples=40)
def test_in_unit_time_it_is_the_replay(scheme, stages, minibatches, microbatches):
    pieces = pieces_of(scheme, stages, microbatches)
    trace = simulate(equal(stages, microbatches=pieces), scheme, AT_ONCE, minibatches)
    steps = dry_run.replay(schedule_of(scheme, stages, minibatches, pieces))
    expected = {action: float(time) for time, step in enumerate(steps) for action in step if action}
    assert {Action(*span[:3]): span.start_s for span in trace.spans} == expected
    assert trace.duration_s == len(steps)


@given(st.integers(1, 6), st.integers(1, 8), st.integers(1, 9), st.integers(1, 9), st.sampled_from(["gpipe", "1f1b"]))
@settings(max_examples=40)
def test_bubble_of_synchronous_pipelines(stages, microbatches, forward_s, backward_s, scheme):
    """(S-1)/(M+S-1), and so is what each flush takes."""
    trace = simulate(equal(stages, forward_s, backward_s, microbatches), scheme, AT_ONCE, 5)
    assert trace.bubble() == pytest.approx((stages - 1) / (microbatches + stages - 1), abs=1e-12)
    assert trace.step_s == pytest.approx((microbatches + stages - 1) * (forward_s + backward_s))


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=5))
@settings(max_examples=40)
def test_an_asynchronous_pipeline_is_as_fast_as_its_slowest_stage(times):
    trace = simulate(cut([(f, b, 0, 0, 0) for f, b in times]), "vanilla", AT_ONCE, 120)
    slowest_s = max(f + b for f, b in times)
    assert trace.step_s == pytest.approx(slowest_s)
    assert 120 * slowest_s <= trace.duration_s <= (120 + 2 * len(times)) * slowest_s


@pytest.mark.parametrize("microbatches", [1, 2, 4])
def test_asynchronous_microbatches_have_no_bubble(microbatches):
    """A flush costs ``(N-1)/M`` of a minibatch, which is not lost where all stages predict one target."""
    one = (1.0, 2.0, 0, 0, 0)
    plain = cut([one] * 8, 32, microbatches=microbatches)
    partition = replace(plain, training=Training(SpecTrain(horizon="target"), microbatches=microbatches))
    assert partition.step_s == pytest.approx(3)
    trace = simulate(partition, "spectrain", AT_ONCE, 60)
    assert trace.step_s == pytest.approx(3)
    assert len(trace.spans) == 60 * 8 * 2 * microbatches
    flushed = simulate(partition, "1f1b", AT_ONCE, 60)
    assert flushed.step_s == pytest.approx(3 * (1 + 7 / microbatches))


def test_one_target_predicts_in_every_forward_and_backward():
    """Each time for 3/5 of an update; the last stage's backward has what its forward has predicted."""
    one = (3.0, 6.0, 1.0, 0, 0)
    partition = replace(cut([one] * 4, 30), training=Training(SpecTrain(horizon="target"), microbatches=3))
    spans = simulate(partition, "spectrain", AT_ONCE, 20).spans
    for span in spans:
        if 30 <= span.microbatch < 45:
            update_s = span.op == "B" and span.microbatch % 3 == 2
            adding_s = 0.6 * (span.op == "B" and span.microbatch % 3 > 0)
            predicting_s = 0.6 * (span.op == "F" or span.stage < 3)
            work_s = (1.0 if span.op == "F" else 2.0) + predicting_s + adding_s + update_s
            assert span.end_s - span.start_s == pytest.approx(work_s)


@given(chains, st.sampled_from([1.0, 7.0]))
@settings(max_examples=25)
def test_asynchronous_schemes_differ_in_weights_only(stages, bandwidth):
    traces = [simulate(cut(stages), scheme, joined_by(bandwidth, 0.5), 12) for scheme in ASYNCHRONOUS[:-1]]
    assert all(trace == traces[0] for trace in traces)


@given(chains, st.sampled_from([1.0, 7.0]))
@settings(max_examples=25)
def test_predicting_weights_takes_three_fifths_of_an_update_each_time(stages, bandwidth):
    """SpecTrain's forwards all predict but in the first two stages where these are last; backwards from stage 2 on.

    The last stage's backward has the forward's.
    """
    last = len(stages) - 1
    longer = [
        (f + 0.6 * u * (k < last or k > 1), b + 0.6 * u * (1 < k < last), u, o, w)
        for k, (f, b, u, o, w) in enumerate(stages)
    ]
    cluster = joined_by(bandwidth, 0.5)
    predicting, plain = (
        simulate(cut(each), name, cluster, 12) for each, name in ((stages, "spectrain"), (longer, "vanilla"))
    )
    for got, want in zip(predicting.spans, plain.spans, strict=True):
        assert got[:3] == want[:3]
        assert (got.start_s, got.end_s) == pytest.approx((want.start_s, want.end_s))


@given(chains, st.sampled_from(PIPELINES), st.floats(0.1, 100), st.floats(1, 100), st.data())
@settings(max_examples=40)
def test_more_bandwidth_is_never_slower(stages, scheme, bandwidth, factor, data):
    replicas = data.draw(st.lists(st.integers(1, 3), min_size=len(stages), max_size=len(stages)))
    slow, fast = (
        simulate(cut(stages, replicas=replicas, microbatches=3), scheme, joined_by(each, 0.1), 6)
        for each in (bandwidth, bandwidth * factor)
    )
    starts = {(span[:3], span.replica): span.start_s for span in slow.spans}
    assert all(span.start_s <= starts[span[:3], span.replica] + 1e-9 for span in fast.spans)
    assert fast.duration_s <= slow.duration_s + 1e-9


@given(
    chains,
    st.sampled_from(PIPELINES),
    st.sampled_from(["none", "port", "bus"]),
    st.sampled_from([1, 2, math.inf]),
    st.sampled_from([0.0, 0.5]),
    st.sampled_from(["ring", "server"]),
    st.booleans(),
    st.data(),
)
@settings(max_examples=60)
def test_what_holds_for_every_run(stages, scheme, contention, processors, slowdown, reduction, replicate, data):
    counts = st.lists(st.integers(1, 3), min_size=len(stages), max_size=len(stages))
    replicas = data.draw(counts) if replicate else [1] * len(stages)
    hosts = (Level(Link(9.0, 0.1), 2, contention), Level(Link(3.0, 0.2), contention=contention))
    pieces = pieces_of(scheme, len(stages), 3)
    trace = simulate(
        cut(stages, replicas=replicas, microbatches=pieces),
        scheme,
        Cluster(hosts, processors=processors),
        5,
        slowdown=slowdown,
        reduction=reduction,
    )
    orders = schedule_of(scheme, len(stages), 5, pieces)
    rows = by_row(trace)
    assert [*rows] == [(k, r) for k, count in enumerate(replicas) for r in range(count)]
    for (stage, _), spans in rows.items():
        assert [Action(*span[:3]) for span in spans] == orders[stage]
        assert all(a.end_s <= b.start_s for a, b in itertools.pairwise(spans))
        assert len({span.device for span in spans}) == 1
        updates = 0
        for span in spans:
            assert span.version == updates
            updates += span.op == "B" and span.microbatch % pieces == pieces - 1
    assert dry_run.replay([[Action(*span[:3]) for span in rows[k, 0]] for k in range(len(stages))])
    starts = {(span[:3], span.replica): span.start_s for span in trace.spans}
    for transfer in trace.transfers:
        assert transfer.start_s <= transfer.end_s
        if transfer.op != "R":
            action = (transfer.op, transfer.to_stage, transfer.microbatch)
            assert transfer.end_s <= starts[action, transfer.to_replica]
    if not replicate:  # replicas that wait for each other take no processor
        ends = [(span.end_s, -1) for span in trace.spans if span.end_s > span.start_s]
        changes = sorted([*ends, *((span.start_s, 1) for span in trace.spans if span.end_s > span.start_s)])
        assert max(itertools.accumulate((change for _, change in changes)), default=0) <= processors
    causes = idle(trace)
    assert all(second >= -1e-9 for each in causes.values() for second in each)
    found = pauses(trace)
    for place, each in causes.items():
        assert sum(pause.end_s - pause.start_s for pause in found if pause[:2] == place) == pytest.approx(each.total_s)
    waited = dict.fromkeys(rows, 0.0)  # for other replicas and for sums, within spans
    for transfer in trace.transfers:
        if transfer.op == "R":
            waited[transfer.to_stage, transfer.to_replica] += transfer.end_s - transfer.start_s
    for place, spans in rows.items():
        computed_s = sum(span.end_s - span.start_s for span in spans) - waited[place]
        assert computed_s == pytest.approx(trace.duration_s - causes[place].total_s, abs=1e-9)


@given(
    st.lists(st.tuples(*[st.floats(0, 5)] * 3, *[st.integers(0, 9)] * 2), min_size=1, max_size=5),
    st.sampled_from(PIPELINES),
    st.integers(1, 12),
    st.sampled_from([0.0, 0.5]),
    st.sampled_from([None, 1, 3]),
    st.sampled_from([0.0, 0.7]),
)
@settings(max_examples=40)
def test_arrays_and_the_heap_give_equal_traces(stages, scheme, minibatches, slowdown, window, caller_s):
    options = {"slowdown": slowdown, "window": window, "caller_s": caller_s, "overhead_s": 0.1}
    pieces = pieces_of(scheme, len(stages), 3)
    traces = []
    for at_once in (0, math.inf):
        with mock.patch.object(pipeline, "AT_ONCE", at_once):
            partition = cut(stages, 10, microbatches=pieces)
            traces.append(simulate(partition, scheme, joined_by(3.0, 0.3), minibatches, **options))
    assert traces[0] == traces[1]


@pytest.mark.parametrize("product_bytes", [0, 2, 8])
def test_products_of_several_second_halves_in_one_call_are_made_once(product_bytes):
    """Of zb-h2's second stage W1 to W3 are one call after W0: what is no product of their 8 bytes is added thrice."""
    block = BlockProfile("b", 4, 8, 0, 8, update_s=1, product_bytes=product_bytes)
    training = Training("zb-h2", microbatches=4)
    planned = plan(Profile("made up", 4, (block, block), microbatches=4), [1, 2], AT_ONCE, training=training)
    spans = simulate(planned, "zb-h2", AT_ONCE, 1).spans
    adding_s, part = 0.6, 1 - product_bytes / 8
    assert [span.end_s - span.start_s for span in spans if span.stage == 1 and span.op == "W"] == pytest.approx(
        [1, 1 + adding_s, 1 + part * adding_s, 1 + part * adding_s + 1]
    )


def test_a_comparison_counts_devices_of_several_stages_once():
    compared = compare(chain(8), 2, ["1f1b", "zb-v"], AT_ONCE, minibatches=3, microbatches=8)
    rows = {line.split()[0]: line for line in str(compared).split("\n")}
    assert [rows[scheme].split()[1] for scheme in ("1f1b", "zb-v")] == ["2", "2"]
    trace = compared.traces["zb-v"]
    for stages in ((0, 3), (1, 2)):
        share = sum(map(trace.busy_s, stages)) / trace.duration_s
        assert f"stage {stages[0]} and stage {stages[1]}: {share:.0%}" in rows["zb-v"]


@pytest.mark.wide
def test_many_stages_are_simulated_by_arrays():
    with mock.patch.object(simulator, "VectorizedSimulation", wraps=pipeline.VectorizedSimulation) as used:
        trace = simulate(equal(120), "vanilla", AT_ONCE, 120)
        assert used.call_count == 1
        simulate(equal(120), "vanilla", Cluster(AT_ONCE.levels, processors=60), 120)
        simulate(equal(120), "vanilla", joined_by(math.inf, contention="bus"), 120)
        simulate(equal(120), "gpipe", AT_ONCE, 2)
        assert used.call_count == 1
    assert trace.duration_s == 2 * (120 + 119)


@given(st.integers(2, 5), *[st.integers(1, 8)] * 3, st.sampled_from(["none", "port"]))
@settings(max_examples=25)
def test_data_parallelism(devices, compute_s, update_s, weights, contention):
    """Each device does its share of every stage, then all gradients are summed in a ring, or go to a server."""
    stages = [(compute_s, 2 * compute_s, update_s, 3, weights)] * devices
    cluster = joined_by(2.0, 0.5, contention=contention)
    work_s = 3 * compute_s + update_s * devices
    partition = cut(stages, batch_size=devices)
    ring = simulate(partition, "data-parallel", cluster, 4)
    assert ring.rows == [(0, replica) for replica in range(devices)]
    reduce_s = cluster.link(0, 1).reduce_seconds(devices * weights, devices)
    assert ring.duration_s == pytest.approx(4 * (work_s + reduce_s))
    server = simulate(partition, "data-parallel", cluster, 4, reduction="server")
    one_way_s = 0.5 + (devices - 1) * devices * weights / 2.0
    assert server.duration_s == pytest.approx(4 * (work_s + 2 * one_way_s))
    bus = simulate(partition, "data-parallel", joined_by(2.0, 0.5, contention="bus"), 4)
    assert bus.duration_s == pytest.approx(4 * (work_s + 2 * (devices - 1) * (0.5 + devices * weights / 2.0)))


def test_single_is_the_sum_of_all_stages_and_the_caller():
    partition = cut([(1, 2, 3, 4, 5), (6, 7, 8, 9, 10)])
    trace = simulate(partition, "single", minibatches=3, overhead_s=0.5, caller_s=10.0)
    assert trace.rows == [(0, 0)]
    assert not trace.transfers
    assert trace.duration_s == 3 * (27 + 2 * 0.5) + 2 * 10.0
    assert trace.step_s == 38
    assert simulate(partition, "single", minibatches=3, speeds=[2.0, 1.0]).duration_s == 3 * 27 / 2
    assert idle(trace) == {(0, 0): (0, 20, 0)}


def test_devices_compute_as_fast_as_the_cluster_knows():
    partition, speeds = cut([(1, 2, 3, 4, 5), (6, 7, 8, 9, 10)]), (0.5, 0.8)
    known = replace(joined_by(3.0, 1.0), speeds=speeds)
    for scheme in ("1f1b", "vanilla"):
        expected = simulate(partition, scheme, joined_by(3.0, 1.0), 4, speeds=speeds)
        assert simulate(partition, scheme, known, 4) == expected
    alone = simulate(partition, "single", joined_by(3.0, 1.0), 4)
    assert simulate(partition, "single", known, 4) == alone  # while the other one is idle


def test_transfers_by_hand():
    """2 s for what crosses; sent when computed, before the update; the sender goes on."""
    trace = simulate(cut([(1, 1, 1, 3, 0), (4, 4, 2, 0, 0)]), "1f1b", joined_by(3.0, 1.0), 2)
    assert [(str(Action(*span[:3])), span.start_s, span.end_s) for span in trace.spans] == [
        ("0F0", 0, 1),
        ("1F0", 3, 7),
        ("1B0", 7, 13),
        ("0B0", 13, 15),
        ("0F1", 15, 16),
        ("1F1", 18, 22),
        ("1B1", 22, 28),
        ("0B1", 28, 30),
    ]
    assert trace.transfers[0] == Transfer("F", 0, 0, 0, 1, 0, 3, 1.0, 3.0)
    assert [(each.op, each.start_s, each.end_s) for each in trace.transfers[:2]] == [("F", 1, 3), ("B", 11, 13)]
    assert idle(trace) == {(0, 0): (4, 20, 0), (1, 0): (2, 3, 5)}
    again = simulate(cut([(1, 1, 1, 3, 0), (4, 4, 2, 0, 0)]), "vanilla", joined_by(3.0, 1.0), 2)
    assert again.spans[1] == Span("F", 0, 1, "device:0", 1.0, 2.0, 0)


def test_contention_by_hand():
    """Both stages of two replicas: four transfers of 2 s at a time, one after another on a bus, two by two on ports."""
    partition = cut([(2, 0, 0, 16, 0), (2, 0, 0, 0, 0)], 4, [1, 2])
    arrivals = {
        contention: [
            each.end_s for each in simulate(partition, "gpipe", joined_by(4.0, contention=contention), 1).transfers[:2]
        ]
        for contention in ("none", "port", "bus")
    }
    assert arrivals == {"none": [4, 4], "port": [4, 6], "bus": [4, 6]}
    hosts = (Level(Link(math.inf), 2), Level(Link(4.0), contention="port"))
    crossed = simulate(cut([(2, 0, 0, 16, 0)] * 2, 4, [2, 2]), "gpipe", Cluster(hosts), 1)
    assert [each.end_s for each in crossed.transfers if each.op == "F"] == [3, 5]  # through one port of the first host


def test_reductions_of_a_stage_by_hand():
    """3 and 2 of 5 rows; 2 * (0.5 + 8/2/4) s for the sums; then the update."""
    trace = simulate(cut([(5, 10, 1, 0, 8)], 5, [2]), "single", joined_by(4.0, 0.5), 1)
    assert trace.rows == [(0, 0)]
    trace = simulate(cut([(5, 10, 1, 0, 8)], 5, [2]), "vanilla", joined_by(4.0, 0.5), 1)
    assert [(span.start_s, span.end_s) for span in trace.spans] == [(0, 2), (0, 3), (2, 13), (3, 13)]
    assert [(each.op, each.start_s, each.end_s) for each in trace.transfers] == [("R", 6, 12), ("R", 9, 12)]
    assert idle(trace) == {(0, 0): (3, 3, 0), (0, 1): (3, 0, 0)}


def test_replicas_wait_for_their_rows():
    """One replica above, two below: each message carries its rows' bytes."""
    trace = simulate(cut([(4, 0, 0, 40, 0), (4, 0, 0, 0, 0)], 5, [1, 2]), "vanilla", joined_by(10.0), 1)
    assert [each.size_bytes for each in trace.transfers if each.op == "F"] == [16, 24]
    assert sum(each.size_bytes for each in trace.transfers if each.op == "B") == 40
    thin = simulate(cut([(4, 0, 0, 40, 0), (4, 0, 0, 0, 0)], 1, [1, 2]), "vanilla", joined_by(10.0), 1)
    assert [each.to_replica for each in thin.transfers if each.op == "F"] == [1]  # the other has no row


def test_slowdowns_are_reproducible():
    partition = cut([(1, 2, 0, 0, 0)] * 3)
    first, again, other = (simulate(partition, minibatches=2000, slowdown=0.3, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    taken = first.spans.end_s - first.spans.start_s
    forwards = taken[first.spans.op == "F"]
    assert np.mean(forwards) == pytest.approx(1, rel=0.03)
    assert np.std(forwards) == pytest.approx(0.3, rel=0.05)
    assert first.duration_s > simulate(partition, minibatches=2000).duration_s


def test_the_window_bounds_what_is_posted():
    traces = [simulate(equal(4), "spectrain", AT_ONCE, 20, window=window) for window in (1, 4, 100, None)]
    assert [trace.step_s for trace in traces] == [4, 2, 2, 2]  # for 1, each waits for the last stage's forward
    assert traces[2] == traces[3]
    update = cut([(1, 1, 0, 0, 0), (1, 1, 5, 0, 0)])  # a synchronous caller waits for the last update
    assert simulate(update, "1f1b", AT_ONCE, 3).step_s == 8


def test_processors_are_taken_in_turn():
    trace = simulate(equal(4), "vanilla", Cluster(AT_ONCE.levels, processors=1), 10)
    assert trace.duration_s == 4 * 2 * 10
    hand_over = simulate(cut([(1, 1, 1, 0, 0)] * 2), "vanilla", Cluster(AT_ONCE.levels, processors=1), 1)
    assert [(span.start_s, span.end_s) for span in hand_over.spans] == [(0, 1), (1, 2), (2, 4), (4, 6)]


@pytest.mark.parametrize(("scheme", "microbatches"), [("vanilla", None), ("1f1b", 4)])
def test_stages_that_keep_to_one_core_share_it(scheme, microbatches):
    """Four stages of three seconds: three on one core and one on another, two on each, and all on either."""
    taken_s = []
    for cores in (((0,), (0,), (0,), (1,)), ((0,), (0,), (1,), (1,)), ((0, 1),) * 4):
        cluster = Cluster(AT_ONCE.levels, processors=2, cores=cores)
        taken_s.append(simulate(cut([(1, 2, 0, 0, 0)] * 4), scheme, cluster, 40, microbatches=microbatches).step_s)
    assert taken_s[0] == pytest.approx(9, rel=0.1) and taken_s[0] > taken_s[1] >= taken_s[2] >= 6
    own = Cluster(AT_ONCE.levels, processors=4, cores=((0,), (1,), (2,), (3,)))
    traces = [simulate(equal(4), scheme, each, 10, microbatches=microbatches) for each in (own, AT_ONCE)]
    assert traces[0] == traces[1]


@pytest.mark.parametrize("scheme", NAMES)
def test_every_scheme_is_simulated(scheme):
    partition = cut([(1, 2, 0.5, 8, 16)] * 4)
    trace = pipetrain.simulate(partition, scheme, minibatches=8)
    assert trace.rows[-1] == {"single": (0, 0), "data-parallel": (0, 3)}.get(scheme, (3, 0))
    assert 0 <= trace.bubble() < 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scheme": "zigzag"}, "scheme='zigzag'"),
        ({"minibatches": 0}, "minibatches=0"),
        ({"minibatches": True}, "minibatches=True"),
        (
            {"scheme": "vanilla", "microbatches": 4},
            "microbatches=4, scheme='vanilla'. Try leaving it out, or one of: 2bw",
        ),
        ({"scheme": "single", "microbatches": 2}, "microbatches=2, scheme='single'"),
        ({"scheme": "data-parallel", "microbatches": 2}, "microbatches=2, scheme='data-parallel'"),
        ({"scheme": SCHEMES["vanilla"]._replace(name="own"), "microbatches": 2}, "microbatches=2, scheme='own'"),
        ({"scheme": "gpipe", "microbatches": 0}, "microbatches=0. Try microbatches=4"),
        ({"scheme": "gpipe", "microbatches": 2.0}, "microbatches=2.0"),
        ({"window": 0}, "window=0"),
        ({"scheme": "gpipe", "microbatches": 99}, "microbatches=99, batch_size=32"),
        ({"scheme": "2bw", "microbatches": 1}, "Try microbatches=2"),
        ({"speeds": [1.0]}, r"Try speeds=\[1.0, 1.0, 1.0\]"),
        ({"speeds": [1.0, 0.0, 1.0]}, "a speed above 0"),
        ({"slowdown": -1}, "slowdown=-1"),
        ({"seed": -1}, "seed=-1. Try seed=0"),
        ({"overhead_s": math.nan}, "overhead_s=nan"),
        ({"reduction": "tree"}, "reduction='tree'. Try one of: ring, server"),
    ],
)
def test_what_cannot_be_simulated(options, message):
    with pytest.raises(ValueError, match=rf"Received: .*{message}|{message}"):
        simulate(cut([(1, 1, 0, 0, 0)] * 3), **options)


@pytest.mark.parametrize(("stages", "kernel"), [(2, "PipelineSimulation"), (80, "VectorizedSimulation")])
def test_stations_that_wait_for_each_other_say_where(stages, kernel, monkeypatch):
    monkeypatch.setattr(simulator, "StationBuilder", backward_first)
    with (
        mock.patch.object(simulator, kernel, wraps=getattr(simulator, kernel)) as used,
        pytest.raises(ScheduleError, match=r"Deadlock: device 0 stands before 0B0, its action 0\."),
    ):
        simulate(equal(stages), "vanilla", AT_ONCE, 200)
    assert used.call_count == 1


def test_where_a_station_stands_is_the_device_and_the_stage_of_its_action():
    work = StationWork([(1, "F"), (1, "B"), (3, "F"), (3, "B")], array("i", [0, 4 * 5 + 2]), [], [0], b"", b"")
    assert Station(0, (1, 0), 1, work, []).where(1) == "device 1 stands before 3F5, its action 1"


def backward_first(*arguments):
    """Stations of which the first begins with a backward."""
    built = StationBuilder(*arguments)
    order = built.stations[0].order
    order.insert(0, order.pop(order.index(1)))
    return built


def test_one_microbatch_is_a_minibatch_of_any_scheme():
    partition = cut([(1, 1, 0, 0, 0)] * 3)
    assert simulate(partition, "vanilla", microbatches=np.int64(1)) == simulate(partition, "vanilla")
    assert simulate(partition, "gpipe", microbatches=np.int64(4)) == simulate(partition, "gpipe", microbatches=4)


def test_microbatches_are_for_those_of_several_schemes_that_split():
    simulated = compare(chain(8), 4, ["gpipe", "vanilla"], minibatches=4, microbatches=8)
    pieces = {name: 1 + max(span.microbatch for span in trace.spans) for name, trace in simulated.traces.items()}
    assert pieces == {"gpipe": 4 * 8, "vanilla": 4}
    with pytest.raises(ValueError, match="microbatches=8, scheme='vanilla'"):
        compare(chain(8), 4, ["vanilla", "single"], microbatches=8)
    with pytest.raises(ValueError, match=r"Each scheme has a row\. Received: schemes=\['1f1b', '1f1b'\]"):
        compare(chain(8), 4, ["1f1b", OneFOneB(compression="int8")], minibatches=4)


def test_a_compression_of_gradients_alone_leaves_pipelines_as_they_are():
    whole = compare(chain(8), 4, ["1f1b", "all-reduce"], minibatches=4)
    less = compare(chain(8), 4, ["1f1b", "all-reduce"], minibatches=4, compression="top-k")
    assert less.traces["1f1b"] == whole.traces["1f1b"]
    with pytest.raises(ValueError, match="top-k"):
        compare(chain(8), 4, ["1f1b"], minibatches=4, compression="top-k")
    with pytest.raises(ValueError, match="asynchronous"):
        compare(chain(8), 4, ["parameter-server"], minibatches=4, synchrony="asynchronous")


def test_other_refusals():
    partition = cut([(1, 1, 0, 0, 0)] * 2)
    with pytest.raises(ValueError, match=r"Unknown scheme. Received: scheme='nonsense'. Try one of"):
        simulate(replace(partition, training=Training("nonsense")))
    same = replace(partition, stages=tuple(replace(stage, device=0) for stage in partition.stages))
    with pytest.raises(ValueError, match=r"devices=\[\[0\], \[0\]\]"):
        simulate(same)
    with pytest.raises(ValueError, match="contention='much'"):
        Level(Link(1.0), contention="much")


def test_traces_are_columns_and_sequences(tmp_path):
    trace = simulate(cut([(1, 2, 1, 8, 4)] * 2, replicas=[2, 1]), "vanilla", joined_by(4.0, 0.5), 3)
    assert trace.spans.start_s.dtype == float
    spans = list(trace.spans)
    assert spans == [trace.spans[n] for n in range(len(spans))]
    assert list(trace.spans[2:5]) == spans[2:5]
    assert list(trace.spans[trace.spans.stage == 1]) == [span for span in spans if span.stage == 1]
    assert trace.spans[-1] in trace.spans
    rebuilt = Trace.of(spans, trace.transfers)
    assert rebuilt == trace
    assert repr(trace).startswith(f"Trace({len(spans)} spans of 2 stages")
    assert trace.busy_s(1) == pytest.approx(sum(span.end_s - span.start_s for span in spans if span.stage == 1))
    trace.save(tmp_path / "trace.json")
    loaded = Trace.load(tmp_path / "trace.json")
    assert list(loaded.transfers) == list(trace.transfers)
    assert loaded.spans.device == trace.spans.device
    assert np.allclose(loaded.spans.end_s, trace.spans.end_s)
    assert {*idle(loaded)} == {(0, 0), (0, 1), (1, 0)}
    assert Trace(()).rows == []
    assert Trace(()).step_s == 0
    assert idle(Trace(())) == {}


def test_idle_of_a_trace_without_transfers_is_imbalance():
    spans = [Span("F", 0, 0, "a", 0, 1, 0), Span("F", 1, 0, "b", 2, 3, 0), Span("B", 1, 0, "b", 5, 6, 0)]
    assert idle(Trace.of(spans)) == {(0, 0): (0, 0, 5), (1, 0): (0, 2, 2)}


def test_simulating_imports_no_tensorflow():
    code = "import sys, pipetrain; pipetrain.simulate; sys.exit('tensorflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def chain(blocks):
    rng = np.random.default_rng(0)
    made = [BlockProfile(f"b{n}", *rng.uniform(1e-3, 4e-3, 2), 10**6, 10**7, 10**6, 1e-4) for n in range(blocks)]
    return Profile("made up", 64, tuple(made))


def test_schemes_side_by_side():
    cluster = Cluster((Level(Link(12e9, 1e-5)),), memory_bytes=5 * 10**8)
    both = compare(chain(8), 4, ["data-parallel", "spectrain"], cluster, minibatches=80)
    assert [*both.traces] == ["data-parallel", "spectrain"]
    lines = str(both).splitlines()[-2:]
    assert [line.split()[0] for line in lines] == ["data-parallel", "spectrain"]
    gain = both.single.step_s / both.traces["spectrain"].step_s
    assert f"{gain:.2f}x" in lines[1]
    assert gain > 2.5
    one = compare(chain(8), 1, ["gpipe", "single"], Cluster(cluster.levels), minibatches=4).traces
    assert one["gpipe"].step_s == pytest.approx(one["single"].step_s)
    small = Cluster(cluster.levels, memory_bytes=15 * 10**7)  # too small for all blocks on one device
    apart = compare(chain(8), 4, ["single", "spectrain"], small, minibatches=4)
    assert [*apart.traces] == ["spectrain"]


def test_devices_that_compute_faster():
    profile = chain(3)
    assert profile.faster(2.0).total_s == pytest.approx(profile.total_s / 2)
    assert profile.faster(2.0).blocks[0].update_s == 5e-5


def test_schemes_with_microbatches_have_a_profile_of_their_own():
    def found(**settings):
        return compare(chain(8), 4, ["gpipe", "vanilla"], minibatches=4, microbatches=4, **settings).partitions

    got, plain = found(of_microbatches=replace(chain(8).faster(0.5), microbatches=4)), found()
    assert got["vanilla"] == plain["vanilla"]
    forward_s = [sum(stage.forward_s for stage in each["gpipe"].stages) for each in (got, plain)]
    assert forward_s[0] == pytest.approx(2 * forward_s[1])


def test_simulate_on_the_command_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(
        "pipetrain.cli.given.on_this_machine", lambda _: (lambda pieces: chain(8), Cluster((Level(SHARED_MEMORY),)))
    )
    levels = [{"devices": 4, "bandwidth": "12GB/s", "contention": "port"}, {"bandwidth": "10Gb/s"}]
    (tmp_path / "cluster.json").write_text(json.dumps({"levels": levels}))
    common = [
        "simulate",
        "m.keras",
        "--devices",
        "4",
        "--minibatches",
        "20",
        "--cluster",
        str(tmp_path / "cluster.json"),
    ]
    assert command_line.main([*common, "--output", str(tmp_path / "all.json")]) == 0
    out = capsys.readouterr().out
    assert all(word in out for word in ("single", "data-parallel", "spectrain", "Recommended"))
    assert out.split().count("against") == 1 and out.split().count("single") >= 2
    assert {path.name for path in tmp_path.glob("all*")} == {f"all-{n}.json" for n in out.split() if n in NAMES}
    one = ["--scheme", "gpipe", "--speed", "4", "--slowdown", "0.1", "--reduction", "server"]
    assert command_line.main([*common, *one, "--output", str(tmp_path / "one.json")]) == 0
    assert Trace.load(tmp_path / "one.json").stages == 4
    ordered = ["--scheme", "parameter-server", "--order", "layerwise", "--servers", "2"]
    assert command_line.main([*common, *ordered, "--output", str(tmp_path / "ordered.json")]) == 0
    loaded = Trace.load(tmp_path / "ordered.json")
    assert len(loaded.rows) == 4 and {*loaded.transfers.op.tolist()} == {"R", "W"}
    assert {*loaded.transfers.from_replica[loaded.transfers.op == "W"].tolist()} == {0, 1}
    capsys.readouterr()
    assert command_line.main([*common, "--servers", "2"]) == 2
    assert "Only the scheme 'parameter-server' has servers" in capsys.readouterr().err
    assert command_line.main([*common, "--order", "tic"]) == 2
    assert "Only all-reduce and parameter-server order their transfers" in capsys.readouterr().err
    for wrong, message in {"--speed": "'0' is not a number above 0", "--slowdown": "'x' is not a number"}.items():
        with pytest.raises(SystemExit):
            command_line.main([*common, wrong, message.split("'")[1]])
        assert message in capsys.readouterr().err
    (tmp_path / "cluster.json").write_text('{"levels": [{"bandwidth": "1GB/s", "contention": "much"}]}')
    assert command_line.main(common) == 2
    assert "pipetrain simulate: Not a cluster file: Unknown contention" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command_line.main(["simulate", "--help"])
    assert '"contention": "port"' in capsys.readouterr().out


def test_what_replicas_sum_is_compressed():
    """Each sends its message to all others; in a plan it takes as long, and the memory of what is kept."""
    size, slow, int8 = 4 * 32 * 1000, joined_by(1e6), OneFOneB(replica_compression="int8")
    sent = int8.scheme.replica_compression.sent_bytes((size // 4,))
    profile = chain(2)
    profile = replace(
        profile, blocks=tuple(replace(each, weight_bytes=size, output_bytes=4) for each in profile.blocks)
    )
    for replicas in ((2, 1), (3, 1)):
        found = []
        for way in ("1f1b", int8, OneFOneB(replica_compression="int4")):
            devices, training = sum(replicas), Training(way, microbatches=2)
            parts = partition(profile, devices, slow, replicas=replicas, training=training)
            trace = simulate(parts, way, slow, 4)
            found.append((parts.stages[0], trace.step_s, [t.size_bytes for t in trace.transfers if t.op == "R"]))
        (plain, plain_s, _), (coded, coded_s, sizes), (_, least_s, _) = found
        assert {*sizes} == {(replicas[0] - 1) * coded.summed_bytes(int8.scheme.replica_compression)}
        assert coded.summed_bytes(int8.scheme.replica_compression) == pytest.approx(sent, rel=0.01)
        assert least_s < coded_s < plain_s and coded.total_s < plain.total_s
        assert coded.memory_bytes == plain.memory_bytes + size and coded.sent_bytes < plain.sent_bytes
    with pytest.raises(ValueError, match="reduction='server'"):
        simulate(parts, int8, slow, 4, reduction="server")


def test_rows_and_what_would_not_be_smaller_are_sent_as_they_are():
    """As if nothing were compressed; a stage of rows and other weights encodes these alone."""
    size, slow, way = 4 * 32 * 1000, joined_by(1e6), OneFOneB(replica_compression="int8")
    codings = tuple(Coding(name, (1e-3, 1e-6), (1e-3, 1e-6)) for name in ("int8", "top-k:0.9", "bfloat16"))

    def planned(way, rows_bytes, **more):
        blocks = tuple(
            replace(each, weight_bytes=size, output_bytes=4, rows_bytes=rows_bytes, **more) for each in chain(2).blocks
        )
        profile = replace(chain(2), blocks=blocks, codings=codings)
        return partition(profile, 3, slow, replicas=(2, 1), training=Training(way, microbatches=2))

    plain, rows, half, coded = (
        planned(*each).stages[0] for each in (("1f1b", 0), (way, size), (way, size // 2), (way, 0))
    )
    assert (rows.total_s, rows.sent_bytes, rows.memory_bytes) == pytest.approx(
        (plain.total_s, plain.sent_bytes, plain.memory_bytes)
    )
    assert rows.messages_s == 0 < half.messages_s < coded.messages_s
    assert half.sent_bytes == pytest.approx((rows.sent_bytes + coded.sent_bytes) / 2, rel=1e-3)
    assert half.memory_bytes == (rows.memory_bytes + coded.memory_bytes) / 2
    sent = [each.size_bytes for each in simulate(planned(way, size), way, slow, 4).transfers if each.op == "R"]
    assert {*sent} == {size}
    assert planned(OneFOneB(replica_compression="top-k:0.9"), 0).stages[0].messages_s == 0
    both = tuple(replace(each, shared=((0, size // 2),), shared_rows=(0,)) for each in chain(2).blocks)
    both = tuple(replace(each, weight_bytes=size, output_bytes=4) for each in both)
    tied = partition(replace(chain(2), blocks=both), 2, slow, replicas=(2,), training=Training(way)).stages[0]
    assert (tied.weight_bytes, tied.uncoded_bytes) == (3 * size // 2, size // 2)
    halves = planned(OneFOneB(compression="bfloat16"), 0, floats=(2, 4))  # numbers of 2 bytes cross
    assert halves.stages[0].coding_s == (0.0, 0.0)


def test_what_compressions_take_is_counted_where_it_was_measured():
    size, slow = 4 * 32 * 1000, joined_by(1e6)
    blocks = tuple(replace(each, weight_bytes=size, output_bytes=size) for each in chain(2).blocks)
    plain = replace(chain(2), blocks=blocks)
    each_s = 1e-6 * size / 4  # of encoding what crosses, and of decoding half as much
    known = replace(plain, codings=(Coding("int8", (0.0, 1e-6), (0.0, 0.5e-6)),))
    assert Profile.from_json(known.to_json()) == known
    assert (
        known.faster(2).coding(Int8()).encoding_s(2e6) == 1.0 and known.coding(Int8(64)) is plain.coding(Int8()) is None
    )
    crossing, summed = OneFOneB(compression="int8"), OneFOneB(replica_compression="int8")
    for way, devices, replicas, counted in (
        ("1f1b", 2, (1, 1), [0.0, 0.0]),
        (crossing, 2, (1, 1), [1.5 * each_s] * 2),
        (summed, 3, (2, 1), [each_s + 2 * 0.5 * each_s, 0.0]),
    ):
        parts = [
            partition(each, devices, slow, replicas=replicas, training=Training(way, microbatches=2))
            for each in (plain, known)
        ]
        longer = [b.total_s - a.total_s for a, b in zip(*(each.stages for each in parts), strict=True)]
        assert longer == pytest.approx(counted, abs=1e-9)
        first_s, second_s = (simulate(each, way, slow, 4).step_s for each in parts)
        assert second_s - first_s >= max(counted) / 2 if way != "1f1b" else first_s == second_s
    for feedback, part in ((False, 1 + 3 * 0.5), (True, 1.5 + 3 * 0.5)):
        options = Int8(error_feedback=feedback)
        measured = replace(known, codings=(known.codings[0]._replace(compression=str(options)),))
        setting = [setting_of(each, "all-reduce", 3, slow, compression=options) for each in (plain, measured)]
        seconds = [sum(a.backward_s + a.update_s for a in each.workload.layers) for each in setting]
        assert seconds[1] - seconds[0] == pytest.approx(2 * part * each_s)
    assert simulate_order(known, "all-reduce", 2, slow, compression="int8").step_s > (
        simulate_order(plain, "all-reduce", 2, slow, compression="int8").step_s
    )


def test_what_crosses_the_cuts_is_compressed():
    """Numbers with gradients alone; of others, and of numbers that are small already, all bytes are sent."""
    size, slow = 4 * 32 * 1000, joined_by(1e6)
    parts = cut([(0.01, 0.02, 0.0, size, 0)] * 2, microbatches=4)
    half = replace(parts.stages[0], floats=(size // 8, size // 2))
    for kind, sent in (
        (OneFOneB(), size),
        (OneFOneB(compression="bfloat16"), size // 2),
        (OneFOneB(compression="int8"), size // 4 + 4 * size // 4 // 256),
    ):
        trace = simulate(parts, kind, slow, 4)
        assert sum(each.size_bytes for each in trace.transfers) == 4 * 2 * sent
        assert sent / 1e6 < trace.step_s < 0.06 + 2 * sent / 1e6
    assert half.crossing_bytes(OneFOneB(compression="bfloat16").scheme.compression) == 3 * size // 4
    assert replace(half, floats=(0, 0)).crossing_bytes(OneFOneB(compression="int8").scheme.compression) == size
    assert simulate(parts, SpecTrain(compression="int8"), slow, 4).step_s < simulate(parts, "spectrain", slow, 4).step_s
