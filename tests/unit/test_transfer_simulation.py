"""Plans of transfers in simulated time: what steps take, what travels when, and the choice of a plan."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transfer_plans import workloads

import pipetrain
from pipetrain.plan.cluster import SHARED_MEMORY, Cluster, Level, Link
from pipetrain.plan.profile import BlockProfile, Coding, Profile
from pipetrain.schemes.compression import Compression
from pipetrain.schemes.options import AllReduce, CodedReduce, ParameterServer
from pipetrain.schemes.synchrony import Gossip, LocalSGD, joined_after
from pipetrain.schemes.table import TRANSFERRING
from pipetrain.schemes.transfers.caramel import step_s
from pipetrain.schemes.transfers.orders import ORDERS, orders
from pipetrain.schemes.transfers.plan import Layer, Message, Pack, Phase, Plan, Workload, pulled_s, pushed_s
from pipetrain.simulation import costs
from pipetrain.simulation.comparison import compare
from pipetrain.simulation.copies import estimated_step_s
from pipetrain.simulation.data_parallel import Setting, simulate_plan
from pipetrain.simulation.every_way import Chooser, choose
from pipetrain.simulation.profiled import WORTH, best_order, mean_step_s, setting_of, workload_of
from pipetrain.trace.idle import overlap, packs
from pipetrain.trace.records import Span
from pipetrain.trace.trace import Trace


def joined(s_per_byte=1.0, latency_s=0.0, **options):
    return Cluster((Level(Link(1 / s_per_byte if s_per_byte else math.inf, latency_s)),), **options)


def set_up(workload, workers=2, serves=True, **options):
    """Workers whose messages take what the workload says."""
    message = workload.message
    return Setting(workload, workers, serves, joined(message.s_per_byte, message.overhead_s), **options)


def pulled(workload, window, **options):
    """A step whose weights are pulled a variable at a time, in their order."""
    pulls = Phase(tuple(workload.pack([n]) for n in sorted(workload.owner)), window)
    return simulate_plan(set_up(workload, **options), Plan(pulls, ORDERS["none"](workload, True).pushes), 1)


def without_overhead(workload):
    return replace(workload, message=Message(0.0, workload.message.s_per_byte))


def computed_s(trace, worker):
    mine = trace.spans[trace.spans.replica == worker]
    return float((mine.end_s - mine.start_s).sum())


@given(workloads(), st.sampled_from(["layerwise", "ibatch"]))
def test_a_server_and_a_worker_take_what_the_formulas_say(workload, order):
    workload = without_overhead(workload)
    plan = ORDERS[order](workload, True)
    trace = simulate_plan(set_up(workload), plan, 1)
    found_s = pulled_s(workload, plan.pulls.packs) + pushed_s(workload, plan.pushes.packs)
    ends_s = max([trace.duration_s, *trace.transfers.end_s])
    before_s = min((layer.forward_s for layer in workload.layers if layer.forward_s), default=0.0)
    # a trace begins with the first span: that of the server's own worker, which waits for nothing
    assert ends_s == pytest.approx(found_s) or before_s == 0.0


@given(workloads())
def test_two_workers_that_sum_take_what_the_formulas_say(workload):
    workload = without_overhead(workload)
    plan = ORDERS["layerwise"](workload, False)
    forward_s = sum(layer.forward_s for layer in workload.layers)
    trace = simulate_plan(set_up(workload, serves=False), plan, 1)
    if forward_s:
        ends_s = max([trace.duration_s, *trace.transfers.end_s])
        assert ends_s == pytest.approx(forward_s + pushed_s(workload, plan.pushes.packs))


def test_what_is_late_hides_in_the_next_forward():
    workload = Workload.chain([1] * 12, [1.0] * 12, [1.0] * 12, Message(0.0, 2.0))
    plan = ORDERS["caramel"](workload, False)
    assert plan.late.packs
    trace = simulate_plan(set_up(workload, serves=False), plan, 4)
    assert trace.step_s == step_s(workload, plan.pushes.packs, plan.late.packs) == 27.0
    assert simulate_plan(set_up(workload, serves=False), ORDERS["layerwise"](workload, False), 4).step_s == 37.0


def test_a_trace_tells_how_far_transfers_and_computing_overlap():
    """Weights of 12 s and 12 s of forward, of which 11 s at the same time; gradients likewise, behind the backward."""
    workload = Workload.chain([1] * 12, [1.0] * 12, [1.0] * 12, Message(0.0, 1.0))
    setting = set_up(workload)
    layerwise = overlap(simulate_plan(setting, ORDERS["layerwise"](workload, True), 3))[1]
    assert (layerwise.step_s, layerwise.computing_s, layerwise.sending_s) == (26.0, 24.0, 24.0)
    assert (layerwise.received_s, layerwise.sent_s) == (12.0, 12.0)
    assert layerwise.coefficient == layerwise.efficiency == 22 / 24
    unordered = overlap(simulate_plan(setting, ORDERS["none"](workload, True), 3))[1]
    assert (unordered.step_s, unordered.sending_s) == (12 + 12 + 13, 24.0)
    assert unordered.efficiency < layerwise.efficiency
    assert overlap(simulate_plan(set_up(workload, 1), ORDERS["layerwise"](workload, True), 3)) == {}


def test_returned_weights_hide_behind_the_backward():
    """Both ways 24 s at the same time, from the first gradient on, 1 s after the forward; else one after the other."""
    workload = Workload.chain([1] * 12, [1.0] * 12, [1.0] * 12, Message(0.0, 2.0))
    plan = ORDERS["push-pull"](workload, True)
    assert simulate_plan(set_up(workload), plan, 4).step_s == 12 + 1 + 24 + 2
    assert simulate_plan(set_up(workload, at_once=True), plan, 4).step_s == 12 + 1 + 24 + 24
    assert simulate_plan(set_up(workload), ORDERS["layerwise"](workload, True), 4).step_s == 24 + 1 + 1 + 24
    trace = simulate_plan(set_up(workload, 3, servers=2, whole=True), plan, 4)
    assert not any(each.inverted for each in packs(trace))
    weights, gradients = (trace.transfers[trace.transfers.op == op] for op in "WR")
    for step, server, pack in itertools.product(range(4), range(2), range(6)):
        here = (gradients.microbatch == step) & (gradients.to_replica == server) & (gradients.pack == pack)
        back = (weights.microbatch == step) & (weights.from_replica == server) & (weights.pack == pack)
        assert here.sum() == back.sum() == 2
        assert (weights.start_s[back] == gradients.end_s[here].max()).all()


def test_a_weight_is_returned_when_all_chunks_of_its_gradient_have_arrived():
    """Gradients of 10 bytes are made at 1 s and 2 s; the last of three messages, a chunk, arrives at 21 s."""
    workload = Workload.chain([10, 10], [0.0, 0.0], [1.0, 1.0], Message(0.0, 1.0))
    chunks = tuple(Pack((0,), 5, k, 2) for k in range(2))
    both = workload.pack([0, 1])
    pushes = Phase((workload.pack([1]), *chunks), 0)
    trace = simulate_plan(set_up(workload), Plan(Phase(), pushes, returned=Phase((both,))), 2)
    weights = trace.transfers[trace.transfers.op == "W"]
    assert weights.size_bytes.tolist() == [20, 20]
    assert (weights.start_s[0], weights.end_s[0]) == (21, 41)


def test_a_message_waits_for_the_acknowledgement_of_the_one_a_window_before():
    """Four messages of 10 s and 3 s of latency, then 1 s of computing each."""
    workload = Workload.chain([10] * 4, [1.0] * 4, [0.0] * 4, Message(3.0, 1.0))

    def left_s(window):
        trace = pulled(workload, window)
        mine = trace.transfers[trace.transfers.op == "W"]
        assert not any(each.inverted for each in packs(trace))
        return mine.start_s.tolist(), mine.end_s.tolist()

    assert left_s(1) == ([0, 16, 32, 48], [13, 29, 45, 61])
    assert left_s(2) == ([0, 0, 16, 26], [13, 23, 33, 43])
    assert left_s(3) == ([0, 0, 0, 16], [13, 23, 33, 43])
    assert left_s(0) == ([0, 0, 0, 0], [43] * 4)  # in no order all are there when the last is


def test_an_acknowledgement_waits_for_what_its_sender_sends():
    """One server has a layer of 30 bytes, the other two of 10, the second of which leaves when the 30 are there."""
    workload = Workload.chain([30, 10, 10], [1.0] * 3, [0.0] * 3, Message(0.0, 1.0))
    trace = pulled(workload, 1, servers=2, whole=True)
    mine = trace.transfers[(trace.transfers.op == "W") & (trace.transfers.from_replica == 1)]
    assert (mine.start_s.tolist(), mine.end_s.tolist()) == ([0, 30], [10, 40])


def test_an_acknowledgement_takes_its_latency_behind_what_is_about_to_arrive():
    """With 5 s of latency 4 bytes are there at 9, while 5 bytes that go the other way will be at 10."""
    workload = Workload.chain([5, 4, 1, 1], [1.0] * 4, [0.0] * 4, Message(5.0, 1.0))
    trace = pulled(workload, 1, servers=2, whole=True)
    assert trace.transfers.start_s[trace.transfers.op == "W"].tolist() == [0, 0, 9 + 5, 10 + 5]


def test_an_acknowledgement_does_not_wait_for_what_goes_to_others():
    """Server 0 sends 30 bytes to 1, then to 2 until 60; its acknowledgement of 10 that 1 has sent is there at 30."""
    workload = Workload.chain([30, 10, 10], [1.0] * 3, [0.0] * 3, Message(0.0, 1.0))
    trace = pulled(workload, 1, workers=3, servers=2, whole=True)
    mine = trace.transfers[(trace.transfers.op == "W") & (trace.transfers.from_replica == 1)]
    assert mine.start_s[mine.to_replica == 0].tolist() == [0, 30]
    assert mine.start_s[mine.to_replica == 2].tolist() == [0, 10]


def test_the_server_has_one_port_each_way():
    """Two workers beside it pull and push through it; among three that sum, each sends and takes two thirds twice."""
    workload = Workload.chain([30], [1.0], [2.0], Message(0.0, 1.0))
    plan = ORDERS["layerwise"](workload, True)
    assert simulate_plan(set_up(workload, 3), plan, 4).step_s == 2 * 30 + 1 + 2 + 30
    assert simulate_plan(set_up(workload, 2), plan, 4).step_s == 30 + 1 + 2 + 30
    trace = simulate_plan(set_up(workload, 3, serves=False), ORDERS["layerwise"](workload, False), 4)
    assert trace.step_s == 1 + 2 + 2 * 20
    assert trace.transfers.size_bytes.sum() == 4 * 3 * 2 * 20


def test_servers_share_every_pack():
    workload = Workload.chain([30], [1.0], [2.0], Message(0.0, 1.0))
    plan = ORDERS["layerwise"](workload, True)
    assert simulate_plan(set_up(workload, 3, servers=3), plan, 4).step_s == 20 + 1 + 2 + 20
    assert simulate_plan(set_up(workload, 2, servers=2), plan, 4).step_s == 15 + 1 + 2 + 15


def test_each_of_several_servers_has_whole_variables():
    """Worker 0 has 30 bytes and gets the other 30 from worker 1, and the other way round; then they send as much back.

    The first waits for its last layer's weights from 11 to 30; the second for its first layer's until 30.
    """
    workload = Workload.chain([30, 10, 20], [1.0] * 3, [1.0] * 3, Message(0.0, 1.0))
    plan = ORDERS["layerwise"](workload, True)
    trace = simulate_plan(set_up(workload, 2, servers=2, whole=True), plan, 4)
    assert trace.step_s == 30 + 3 + 3 + 30
    sent = trace.transfers[trace.transfers.microbatch == 1]
    ways = [(op, source, size) for op, source, size in zip(sent.op, sent.from_replica, sent.size_bytes)]
    assert sorted(ways) == [("R", 0, 10), ("R", 0, 20), ("R", 1, 30), ("W", 0, 30), ("W", 1, 10), ("W", 1, 20)]


@given(workloads(), st.integers(1, 4), st.sampled_from(orders(serves=True)))
def test_servers_divide_every_phase(workload, servers, order):
    """Each variable is sent by one of them, in the phase's order."""
    setting = set_up(workload, 4, servers=servers, whole=True)
    plan = ORDERS[order](workload, True)
    for phase in (plan.pulls if plan.pulls.packs else plan.returned, plan.pushes):
        parts = setting.of_servers(phase)
        assert len(parts) == servers
        assert sum(pack.size_bytes for part in parts for pack in part.packs) == sum(workload.sizes_bytes)
        for part in parts:
            mine = [n for pack in part.packs for n in pack.variables]
            assert mine == [n for pack in phase.packs for n in pack.variables if n in set(mine)]
        everything = sorted(n for part in parts for pack in part.packs for n in pack.variables)
        assert everything == sorted(n for pack in phase.packs for n in pack.variables)


def test_hosts_share_the_ports_that_the_cluster_says():
    """Two hosts of two devices each: what the host of the server sends to the other goes through one card."""
    workload = Workload.chain([30], [1.0], [2.0], Message(0.0, 1.0))
    hosts = Cluster((Level(Link(math.inf), 2), Level(Link(1.0), contention="port")))
    setting = Setting(workload, 4, False, hosts)
    sums = simulate_plan(setting, ORDERS["layerwise"](workload, False), 4)
    assert sums.step_s == pytest.approx(3 + 2 * 4 * 7.5)  # a quarter from each of two to each of two, twice


def test_updates_and_rows_take_their_time():
    layers = (Layer((0,), 1.0, 2.0, (), 4.0), Layer((1,), 1.0, 2.0, (0,), 8.0))
    workload = Workload(layers, (10, 10), Message(0.0, 0.0))
    every = {serves: simulate_plan(set_up(workload, serves=serves), ORDERS["none"](workload, serves), 4) for serves in
             (True, False)}  # fmt: skip
    # the second layer's update takes the device before the first layer's backward
    assert every[True].step_s == 2 + 4 + 12
    assert every[False].step_s == 2 + 4 + 12
    assert computed_s(every[True], 0) == 4 * 18 and computed_s(every[True], 1) == 4 * 6
    assert computed_s(every[False], 1) == 4 * 18
    workload = Workload.chain([0], [1.0], [1.0], Message(0.0, 1.0))
    plan = ORDERS["none"](workload, False)
    assert simulate_plan(set_up(workload, serves=False, input_bytes=7), plan, 4).step_s == 7
    assert simulate_plan(set_up(workload, serves=False, input_bytes=1), plan, 4).step_s == 2
    assert simulate_plan(set_up(workload, serves=False, caller_s=3.0), plan, 4).step_s == 5


def test_messages_keep_the_devices_at_either_end_from_computing():
    """Two layers of 1 s forward and 4 s backward, messages of 1 s: the second layer's come while the first computes."""
    workload = Workload.chain([1, 1], [1.0, 1.0], [4.0, 4.0], Message(0.0, 1.0))
    plan = ORDERS["none"](workload, False)
    assert simulate_plan(set_up(workload, serves=False), plan, 1).step_s == 10
    worked = Setting(workload, 2, False, joined(1.0, message_work=Message(0.5, 0.25)))
    trace = simulate_plan(worked, plan, 1)
    assert trace.transfers.start_s.tolist() == [6, 6, 11.5, 11.5]  # two messages of 0.75 s before the last two leave
    assert computed_s(trace, 0) == computed_s(trace, 1) == 10 + 4 * 0.75  # at updates, too, which take no time here
    assert trace.duration_s == 11.5 + 1 + 0.75


def test_the_next_rows_leave_when_no_worker_waits_for_weights():
    """Weights of 4 s and rows of 2 s: behind the weights the rows keep nobody waiting."""
    workload = Workload.chain([4], [1.0], [3.0], Message(0.0, 1.0))
    plan = ORDERS["layerwise"](workload, True)
    expected_s = 4 + 1 + 3 + 4
    assert simulate_plan(set_up(workload), plan, 4).step_s == expected_s
    assert simulate_plan(set_up(workload, input_bytes=2), plan, 4).step_s == expected_s
    assert simulate_plan(set_up(workload, input_bytes=9), plan, 4).step_s == 4 + 9


def test_fewer_processors_than_workers_take_turns():
    workload = Workload.chain([0] * 3, [1.0] * 3, [1.0] * 3)
    setting = Setting(workload, 3, False, joined(0.0, processors=1))
    trace = simulate_plan(setting, ORDERS["none"](workload, False), 3)
    assert trace.step_s == 18 and computed_s(trace, 2) == 18


@pytest.mark.parametrize(
    ("cores", "step_s"),
    [
        (((0,), (0,), (1,)), 12),
        (((0, 1),) * 3, 9),
        (((0,), (1,), (2,)), 6),
        (((0, 1, 2, 3),) * 3, 6),
        (((0, 1, 2), (0,), (1, 2)), 6),  # the first one leaves the second the only core that it has
    ],
)
def test_workers_that_share_a_core_take_turns_though_another_is_idle(cores, step_s):
    """Layers of one second, 6 s for each of three workers: two of them on one core, or all on both of two."""
    workload = Workload.chain([0] * 3, [1.0] * 3, [1.0] * 3)
    setting = Setting(workload, 3, False, joined(0.0, processors=len({*itertools.chain(*cores)}), cores=cores))
    assert simulate_plan(setting, ORDERS["none"](workload, False), 3).step_s == step_s


def test_what_messages_take_of_a_shared_core_delays_whoever_computes_there():
    """Messages of two workers, half a second of work each: on their own cores, and all on one."""
    workload = Workload.chain([1], [1.0], [2.0], Message(0.0, 0.0))
    taken_s = [
        simulate_plan(
            Setting(workload, 2, False, joined(0.0, message_work=Message(0.5, 0.0), processors=2, cores=cores)),
            ORDERS["none"](workload, False),
            3,
        ).step_s
        for cores in ((), ((0,), (1,)), ((0,), (0,)))
    ]
    assert taken_s[0] == taken_s[1] and taken_s[2] > taken_s[1] + 3


@pytest.mark.parametrize(
    ("known", "step_s"),
    [
        ({}, 3.0),
        ({"speeds": (1.0, 0.5)}, 6.0),
        ({"speeds": (2.0,)}, 3.0),  # the second one's is not known: it is 1
        ({"caller_work_s": (0.25, 0.5)}, 3.5),
        ({"caller_work_s": (0.25, 0.25), "cores": ((0,), (0,)), "processors": 1}, 6.25),
        ({"caller_work_s": (0.25, 0.0), "cores": ((0,), (0,)), "processors": 1}, 6.25),
        ({"caller_work_s": (0.5, 0.5), "speeds": (1.0, 0.5)}, 6.5),
    ],
)
def test_a_step_lasts_as_long_as_the_slowest_worker_and_what_the_program_takes_of_its_core(known, step_s):
    """Layers of 3 s for each of two workers; what the program takes of a core does not depend on its device's speed."""
    workload = Workload.chain([0], [1.0], [2.0])
    setting = Setting(workload, 2, False, joined(0.0, **known))
    assert simulate_plan(setting, ORDERS["none"](workload, False), 3).step_s == step_s


@given(workloads(), st.booleans(), st.integers(1, 4), st.sampled_from([0, 1, 2, 5]))
@settings(max_examples=25)
def test_every_plan_runs_and_moves_what_it_says(workload, serves, workers, window):
    """Whatever the windows; with one message under way at a time all arrive in the order of the plan."""
    for name in orders(serves):
        plan = ORDERS[name](workload, serves)
        plan = plan._replace(
            **{each: getattr(plan, each)._replace(window=window) for each in ("pulls", "pushes", "late", "returned")}
        )
        trace = simulate_plan(set_up(workload, workers, serves), plan, 3)
        size, late = sum(workload.sizes_bytes), sum(pack.size_bytes for pack in plan.late.packs)
        sent = trace.transfers
        if serves:
            assert sent.size_bytes[sent.op == "W"].sum() == 3 * (workers - 1) * size
            assert sent.size_bytes[sent.op == "R"].sum() == 3 * (workers - 1) * size
        else:
            exact = sum(each.size_bytes for each in sent)
            assert exact == pytest.approx(2 * (workers - 1) * (3 * size - late), abs=len(sent))
        assert (sent.end_s >= sent.start_s).all() and (sent.kept_s >= 0).all()
        if window == 1:
            assert not any(each.inverted for each in packs(trace))
        seconds = sum(layer.forward_s + layer.backward_s for layer in workload.layers)
        assert computed_s(trace, workers - 1) == pytest.approx(3 * seconds)
        idle = pipetrain.idle(trace)
        for replica, causes in idle.items():
            assert causes.total_s + computed_s(trace, replica[1]) == pytest.approx(trace.duration_s)


def test_a_trace_is_the_same_again_and_after_it_was_saved(tmp_path):
    workload = Workload.chain([40] * 6, [0.5] * 6, message=Message(0.25, 0.0625))
    plan = ORDERS["ibatch"](workload, True)
    trace, again = (simulate_plan(set_up(workload, 3), plan, 5, slowdown=0.2, seed=1) for _ in range(2))
    assert trace == again
    assert trace != simulate_plan(set_up(workload, 3), plan, 5, slowdown=0.2, seed=2)
    trace.save(tmp_path / "trace.json")
    loaded = Trace.load(tmp_path / "trace.json")
    np.testing.assert_array_equal(loaded.transfers.pack, trace.transfers.pack)
    np.testing.assert_allclose(loaded.transfers.kept_s, trace.transfers.kept_s)
    first = packs(trace)[0]
    assert first.sent_s <= first.arrived_s < first.used_s


def test_inversions_are_found():
    """Against its own plan: a pack that comes after one that is behind it."""
    workload = Workload.chain([1, 100, 1], [1.0] * 3, message=Message(0.0, 1.0))
    pushes = tuple(workload.pack([n]) for n in (0, 1, 2))
    trace = simulate_plan(set_up(workload, serves=False), Plan(Phase(), Phase(pushes, 0)), 1)
    assert [(each.pack, each.inverted) for each in packs(trace) if each.to_replica] == [
        (2, False),
        (1, True),
        (0, True),
    ]


# The choice ---------------------------------------------------------------------------------------------------------


@pytest.mark.wide
@given(workloads(), st.booleans())
def test_the_choice_is_the_simplest_order_that_is_about_the_fastest(workload, serves):
    setting = set_up(workload, 3, serves)
    chosen_s = simulate_plan(setting, ORDERS[best_order(setting)](workload, serves), 4).step_s
    seconds = [simulate_plan(setting, ORDERS[name](workload, serves), 4).step_s for name in orders(serves)]
    least_s = min(seconds)
    assert chosen_s == next(each for each in seconds if WORTH * each <= least_s)


def test_where_transfers_take_as_long_as_computing_an_order_is_chosen():
    chain = Workload.chain([100] * 16, [1.0] * 16, [2.0] * 16, Message(0.4, 0.03))
    assert best_order(set_up(chain)) == "push-pull"  # weights hide behind the backward
    assert best_order(set_up(chain, serves=False)) == "caramel"  # some gradients hide in the next forward
    free = Workload.chain([1] * 16, [1.0] * 16)
    assert best_order(set_up(free)) == best_order(set_up(free, serves=False)) == "none"


# What a profile predicts --------------------------------------------------------------------------------------------


def profiled(count=8, weight_bytes=10**6, **options):
    blocks = [BlockProfile(f"d{n}", 1e-3, 2e-3, 100, weight_bytes, **options) for n in range(count)]
    return Profile("chain", 64, tuple(blocks))


def test_blocks_are_layers_of_a_share_of_the_rows():
    blocks = (
        BlockProfile("a", 1.0, 2.0, 8, 100, update_s=5.0, shared=((3, 40),)),
        BlockProfile("b", 3.0, 4.0, 8, 0),
        BlockProfile("c", 5.0, 6.0, 8, 40, shared=((3, 40),)),
    )
    workload = workload_of(Profile("m", 4, blocks), 2, Message())
    assert workload.sizes_bytes == (60, 40)
    assert [layer.variables for layer in workload.layers] == [(0, 1), (), (1,)]
    assert [layer.forward_s for layer in workload.layers] == [0.5, 1.5, 2.5]
    assert workload.update_s == (3.0, 2.0)


@pytest.mark.parametrize(
    ("options", "times"),
    [
        ({}, 1),
        ({"processors": 8}, 1),
        ({"processors": 6}, 8 / 6),
        ({"processors": 4}, 2),
        ({"processors": 2}, 4),
        ({"processors": 2, "cores": ((0,),) * 5 + ((1,),) * 3}, 5),
        ({"processors": 2, "cores": ((0, 1),) * 8}, 4),
        ({"speeds": (1.0, 0.5) * 4}, 2),
        ({"processors": 4, "speeds": (0.5,) * 8}, 4),
        ({"caller_work_s": (0.0, 3e-3) + (1e-3,) * 6}, 2),
        ({"processors": 2, "caller_work_s": (3e-3,) * 8}, 5),
    ],
)
def test_many_workers_take_as_long_as_those_of_the_fullest_core(options, times):
    """Eight, of which two stand for all; nothing that is sent takes any time."""
    cluster = Cluster((Level(Link(float("inf"))),), **options)
    assert estimated_step_s(profiled(), "all-reduce", 8, cluster) == pytest.approx(times * 8 * 3e-3 / 8)


def test_all_devices_that_share_their_memory_do_what_a_server_is_given():
    """An all-reduce updates the weights on each of them, a server once."""
    profile = profiled(update_s=1e-3)
    for link, whole in ((SHARED_MEMORY, False), (Link(1e9), True)):
        setting = setting_of(profile, "parameter-server", 2, Cluster((Level(link),)))
        assert (setting.servers, setting.whole) == (2, whole)
    shared = Cluster((Level(SHARED_MEMORY),))
    reduced_s, served_s = (
        pipetrain.simulate_order(profile, scheme, 2, shared, "none").step_s for scheme in TRANSFERRING
    )
    assert served_s < reduced_s
    many_s = [estimated_step_s(profile, scheme, 8, replace(shared, processors=2)) for scheme in TRANSFERRING]
    assert many_s[1] < many_s[0]


@pytest.mark.parametrize("large", [1, 4])
def test_two_workers_stand_for_many_whose_weights_are_on_all_of_them(large):
    """Where the servers have equal parts, and where one has twice as much as the others."""
    blocks = profiled(16).blocks
    blocks = (*blocks[:12], replace(blocks[12], weight_bytes=large * 10**6), *blocks[13:])
    profile = replace(profiled(), blocks=blocks)
    cluster = Cluster((Level(Link(1e9, 1e-5)),), processors=8)
    simulated_s = pipetrain.simulate_order(profile, "parameter-server", 8, cluster).step_s
    assert estimated_step_s(profile, "parameter-server", 8, cluster) == pytest.approx(simulated_s, rel=0.2)


@pytest.mark.parametrize("link", [SHARED_MEMORY, Link(1e9)])
def test_many_servers_without_weights_are_estimated(link):
    """Eight workers have an eighth of the rows each: four layers of 3 ms take 1.5 ms if all compute at once."""
    cluster = Cluster((Level(link),), processors=8)
    assert estimated_step_s(profiled(4, 0), "parameter-server", 8, cluster) == pytest.approx(4 * 3e-3 / 8)


def test_simulate_order_is_public():
    hosts = joined(1e-9, 5e-4)
    rates = {order: pipetrain.simulate_order(profiled(), "parameter-server", 2, hosts, order).step_s for order in
             ("none", "layerwise", "auto")}  # fmt: skip
    assert rates["auto"] <= rates["layerwise"] < rates["none"]
    with pytest.raises(ValueError, match="Unknown order of transfers"):
        pipetrain.simulate_order(profiled(), "parameter-server", 2, hosts, "caramel")
    with pytest.raises(ValueError, match=r"65 workers, batch_size=64"):
        pipetrain.simulate_order(profiled(), "all-reduce", 65, hosts)
    with pytest.raises(ValueError, match=r"fragments=9, for a model of 4 layers .*Try fragments=4"):
        pipetrain.simulate_order(profiled(4), "all-reduce", 2, hosts, synchrony=LocalSGD(9, fragments=9))
    with pytest.raises(ValueError, match=r"Servers are workers too.*servers=3, workers=2"):
        Setting(Workload.chain([1], [1.0]), 2, True, hosts, servers=3)
    with pytest.raises(ValueError, match=r"caller_s=-1"):
        Setting(Workload.chain([1], [1.0]), 2, True, hosts, caller_s=-1)
    with pytest.raises(ValueError, match=r"which a partition has not.*Try pipetrain.simulate_order"):
        pipetrain.simulate(pipetrain.partition(profiled(), 2), "all-reduce")


def test_schemes_with_ordered_transfers_are_compared_beside_the_others():
    hosts = joined(1e-9, 5e-4)
    found = compare(profiled(), 2, ["single", "all-reduce", "parameter-server"], hosts, minibatches=8, slowdown=0.1)
    assert [*found.traces] == ["single", "all-reduce", "parameter-server"]
    assert re.search(r"parameter-server +2 ", str(found))
    below = str(found).split("\n\n")[1]
    assert re.search(r"all-reduce +\d+\.\d\d +-?\d+% +-?\d+% +\d+%", below) and "single" not in below
    assert "\n\n" not in str(compare(profiled(), 2, ["single"], hosts, minibatches=8))
    tight = compare(profiled(), 2, ["all-reduce"], replace(hosts, memory_bytes=10**6), minibatches=8)
    assert "no cut fits" in str(tight)


@pytest.mark.parametrize("minibatches", [4, 50])
@pytest.mark.parametrize(
    "synchrony",
    ["local:2", "local:8", LocalSGD(8, fragments=3), LocalSGD(8, fragments=3, overlap=True), "stale:1", None],
)
def test_a_trace_tells_the_seconds_by_which_ways_are_compared(synchrony, minibatches, tmp_path):
    """Of workers that join their weights after some steps those of whole periods, however many are simulated."""
    hosts, way = joined(4e-7, 1e-4), AllReduce("none", synchrony=synchrony)
    trace = pipetrain.simulate_order(profiled(4), way.name, 2, hosts, "none", minibatches, synchrony=synchrony)
    assert trace.step_s == pytest.approx(Chooser(profiled(4), 2, hosts).of(way)[0].step_s, rel=0.01)
    trace.save(tmp_path / "trace.json")
    assert Trace.load(tmp_path / "trace.json").step_s == pytest.approx(trace.step_s)
    (of_object,) = compare(profiled(4), 2, [way], hosts, minibatches=minibatches).traces.values()
    (of_options,) = compare(profiled(4), 2, [way.name], hosts, order="none", synchrony=synchrony).traces.values()
    assert of_object.step_s == pytest.approx(of_options.step_s)
    assert of_object.step_s == pytest.approx(trace.step_s, rel=0.01)


def test_a_comparison_has_what_fits_with_the_options_that_it_is_given():
    """Weights of workers' own take memory beside."""
    hosts, way = joined(1e-9, 1e-4), AllReduce(synchrony="local:8")
    plain, own = (Chooser(profiled(), 2, hosts).of(each)[0].memory_bytes for each in ("all-reduce", way))
    tight = replace(hosts, memory_bytes=(plain + own) // 2)
    assert plain < own and [*compare(profiled(), 2, ["all-reduce"], tight).traces] == ["all-reduce"]
    for ways, options in (([way], {}), (["all-reduce"], {"synchrony": "local:8"})):
        assert "no cut fits" in str(compare(profiled(), 2, ways, tight, **options))
    ways = [AllReduce(synchrony=LocalSGD(8, fragments=count)) for count in (1, 2, 4)]
    ways.append(AllReduce(synchrony=LocalSGD(8, fragments=4, overlap=True)))
    one, two, four, later = (Chooser(profiled(4), 2, hosts).of(each)[0].memory_bytes for each in ways)
    weights_bytes = sum(block.weight_bytes for block in profiled(4).blocks)
    assert one - two == 2 * weights_bytes // 2 and one - four == 2 * weights_bytes * 3 // 4  # what is sent, and comes
    assert later - four == weights_bytes // 4


def test_workers_at_their_own_pace_are_estimated_by_how_far_they_may_be_ahead():
    chooser = Chooser(profiled(), 4, joined(1e-9, 1e-4))
    ways = [chooser.of(ParameterServer("none", synchrony=f"asynchronous:{bound}"))[0] for bound in (0, 1, 3, 8)]
    assert [ways[0].step_s / each.step_s for each in ways] == pytest.approx([1, 2, 4, 4])
    small, large = profiled(), profiled()
    large = replace(large, blocks=tuple(replace(each, output_bytes=10**6) for each in large.blocks))
    ways = [ParameterServer("none", synchrony="asynchronous"), ParameterServer("none")]
    apart, together = (
        [Chooser(each, 4, joined(1e-9, 1e-4)).of(way)[0].memory_bytes for each in (small, large)] for way in ways
    )
    whole = apart[1] - apart[0]
    assert whole == pytest.approx(4 * (together[1] - together[0]), rel=0.1)  # the activations of a whole minibatch
    assert apart[0] - together[0] >= 8 * 10**6  # the weights that a worker has read


def test_a_comparison_has_the_options_of_objects_and_those_that_one_scheme_has():
    hosts = joined(1e-9, 1e-4)
    for way in (CodedReduce(2, stragglers=0), AllReduce("none", topology="ring"), ParameterServer("none", servers=1)):
        (of_object,) = compare(profiled(), 4, [way], hosts).traces.values()
        assert of_object.step_s == pytest.approx(Chooser(profiled(), 4, hosts).of(way)[0].step_s, rel=0.02), way
    (of_tree,) = compare(profiled(), 4, ["coded-reduce"], hosts, tree=CodedReduce(2, stragglers=0).tree).traces.values()
    assert of_tree == compare(profiled(), 4, [CodedReduce(2, stragglers=0)], hosts).traces["coded-reduce"]
    names = ["parameter-server", "all-reduce"]
    for options in ({"order": "caramel"}, {"order": "push-pull"}, {"synchrony": "local:8"}, {"servers": 1}):
        both = compare(profiled(), 2, names, hosts, **options).traces
        assert both == compare(profiled(), 2, names[::-1], hosts, **options).traces
    with pytest.raises(ValueError, match="Received: order='caramel'"):
        compare(profiled(), 2, names[:1], hosts, order="caramel")
    with pytest.raises(ValueError, match="Each scheme has a row"):
        compare(profiled(), 2, ["all-reduce", AllReduce(compression="int8")], hosts)


@dataclass
class Halves(Compression):
    """One that cannot be hashed."""

    factor: float = 0.5

    def encode(self, values):
        return [values]

    def decode(self, parts):
        return parts[0]


def test_compressions_that_cannot_be_hashed_are_compared():
    assert "all-reduce" in compare(profiled(), 2, ["all-reduce"], joined(1e-9, 1e-4), compression=Halves()).traces


def test_a_measured_trace_that_is_short_tells_the_last_whole_period(tmp_path):
    """Three steps in every four take a second, the fourth eleven, the first ever a hundred."""
    took = [100.0, 1, 1, 11, 1, 1, 1, 11, 1, 1]
    ends = list(itertools.accumulate(took))
    spans = [Span("B", 0, n, "CPU:0", end - each, end, n) for n, (end, each) in enumerate(zip(ends, took))]
    assert Trace.of(spans, period=4).step_s == 14 / 4 == Trace.of(spans[:9], period=np.int64(4)).step_s
    Trace.of(spans, period=np.int64(4)).save(tmp_path / "trace.json")
    assert Trace.load(tmp_path / "trace.json").step_s == pytest.approx(14 / 4)
    assert Trace.of(spans[:4], period=4).step_s == 113 / 4


def test_workers_hold_the_weights_of_all_their_neighbours():
    chooser = Chooser(profiled(), 5, joined(1e-9, 1e-4))
    ring, whole = (chooser.of(AllReduce(topology=each))[0].memory_bytes for each in ("gossip", "gossip:complete"))
    assert whole - ring == 2 * 8 * 10**6  # four copies of 8 MB in place of two


def test_they_are_among_the_ways_as_they_are_simulated():
    hosts = joined(1e-9, 5e-4)
    chooser = Chooser(profiled(), 2, hosts)
    rates = {way.name: 64 / way.step_s for way in chooser.choice().ways if way.name in (*TRANSFERRING, "coded-reduce")}
    assert rates == {
        name: pytest.approx(64 / pipetrain.simulate_order(chooser.copies, name, 2, chooser.cluster).step_s)
        for name in ("all-reduce", "parameter-server")
    } | {"coded-reduce": pytest.approx(64 / pipetrain.simulate_tree(chooser.copies, 2, cluster=chooser.cluster).step_s)}
    assert [way.name for way in choose(profiled(), 1, hosts).ways] == ["single"]


def test_a_model_without_trained_weights(monkeypatch):
    """As one whose layers are all frozen: nothing is sent, in whatever order."""
    monkeypatch.setattr(costs, "ACTION_S", 0.0)
    ways = {way.name: way for way in choose(profiled(weight_bytes=0), 2, joined(1e-9, 5e-4)).ways}
    found = [64 / ways[name].step_s for name in ("all-reduce", "parameter-server", "coded-reduce")]
    assert found == pytest.approx([2 * 64 / 24e-3, 2 * 64 / 24e-3, 64 / 24e-3])  # coded, each worker has all rows


def test_one_of_them_is_taken_where_it_is_clearly_faster():
    """Few blocks that send much, whose gradients hide behind computing only where transfers are ordered."""
    light, slow = profiled(weight_bytes=10**6), joined(1e-9, 0.0)
    heavy = replace(light, blocks=tuple(replace(b, output_bytes=10**7) for b in light.blocks))
    assert choose(heavy, 2, slow).taken.name == "all-reduce"


@pytest.mark.parametrize("workers", [2, 3, 4])
@given(workload=workloads(), steps=st.integers(1, 4))
def test_compressed_gradients_are_sent_whole_to_every_other_worker(workers, workload, steps):
    sent = tuple(size // 4 + 1 for size in workload.sizes_bytes)
    setting = set_up(workload, workers, serves=False, gradient_bytes=sent)
    trace = simulate_plan(setting, ORDERS["layerwise"](workload, False), steps)
    owned = sum(sent[n] for n in workload.owner)
    assert trace.transfers.size_bytes.sum() == steps * workers * (workers - 1) * owned


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
@given(workload=workloads(), steps=st.integers(1, 3))
def test_a_ring_sends_to_the_next_worker_alone(workers, workload, steps):
    setting = set_up(workload, workers, serves=False, topology="ring")
    trace = simulate_plan(setting, ORDERS["layerwise"](workload, False), steps)
    owned = sum(workload.sizes_bytes[n] for n in workload.owner)
    sent = trace.transfers  # whose bytes are whole numbers
    assert sent.size_bytes.sum() == pytest.approx(steps * 2 * (workers - 1) * owned, abs=len(sent))
    assert all((sent.from_replica + 1) % workers == sent.to_replica)


@pytest.mark.parametrize("graph", ["ring", "torus", "complete", ((1,), (0, 2), (1, 3), (2, 4), (3, 5), (4,))])
@given(workload=workloads(), steps=st.integers(1, 3))
def test_a_gossip_sends_to_neighbours_alone(graph, workload, steps):
    setting = set_up(workload, 6, serves=False, topology=Gossip(graph))
    trace = simulate_plan(setting, ORDERS["layerwise"](workload, False), steps)
    owned, neighbours = sum(workload.sizes_bytes[n] for n in workload.owner), Gossip(graph).neighbours(6)
    sent = trace.transfers
    assert sent.size_bytes.sum() == steps * sum(map(len, neighbours)) * owned
    assert all(to in neighbours[at] for at, to in zip(sent.from_replica, sent.to_replica, strict=True))


@pytest.mark.parametrize("serves", [False, True])
@given(workload=workloads())
def test_stale_gradients_are_sent_while_the_next_step_computes(serves, workload):
    """As many bytes, but for those of the last step; no step takes longer."""
    setting = set_up(workload, 3, serves=serves)
    stale, plan = replace(setting, is_stale=True), ORDERS["layerwise"](workload, serves)
    sent = [simulate_plan(each, plan, 3).transfers for each in (setting, stale)]
    whole, late = (int(each[each.op == "R"].size_bytes.sum()) for each in sent)
    assert late == pytest.approx(whole * 2 / 3, abs=len(sent[0]))
    plan = plan.returning  # of a server weights are pulled at once
    assert mean_step_s(stale, plan) <= mean_step_s(setting, plan) * (1 + 1e-9)


def test_rows_of_embeddings_are_neither_encoded_nor_made_smaller():
    blocks = [BlockProfile(f"b{n}", 1.0, 2.0, 0, 4096, rows_bytes=rows) for n, rows in enumerate((4096, 1024, 0))]
    profile = Profile("m", 8, tuple(blocks), codings=(Coding("int8", (1.0, 0.0), (0.0, 0.0)),))
    setting = setting_of(profile, "all-reduce", 2, Cluster(), compression="int8")
    assert setting.workload.sizes_bytes == (4096, 1024, 3072, 4096) and setting.workload.rows == {0, 1}
    assert setting.gradient_bytes[:2] == (4096, 1024) and all(each < 1100 for each in setting.gradient_bytes[2:])
    assert [layer.backward_s for layer in setting.workload.layers] == [1.0, 2.0, 2.0]


def test_a_stale_step_takes_what_takes_longer():
    """Two workers compute for 8 s, or send for 4 or 40."""
    for size, seconds in ((4, 8.0), (40, 40.0)):
        workload = Workload.chain([size], [4.0], message=Message(0.0, 1.0))
        setting = set_up(workload, 2, serves=False, is_stale=True)
        assert simulate_plan(setting, ORDERS["none"](workload, False), 8).step_s == pytest.approx(seconds)
        whole = simulate_plan(replace(setting, is_stale=False), ORDERS["none"](workload, False), 8)
        assert whole.step_s == pytest.approx(8 + size)


def test_steps_of_each_topology_take_what_they_send():
    """Four workers: a port carries 1.5 times the weights each way, in a gossip 2 or 3 times."""
    workload = Workload.chain([4000], [1.0], message=Message(0.0, 1.0))
    for topology, times in ((None, 1.5), ("ring", 1.5), (Gossip(), 2), (Gossip("complete"), 3)):
        setting = set_up(workload, 4, serves=False, topology=topology)
        assert mean_step_s(setting, ORDERS["none"](workload, False)) == pytest.approx(2 + 4000 * times)


@given(workloads(), st.integers(2, 5), st.integers(1, 5))
def test_workers_that_join_their_weights_send_each_fragment_once_in_so_many_steps(workload, steps, fragments):
    """The only one, or the last of them, at the end of a period; while the next step computes, a step later."""
    parts = workload.fragments(min(steps, fragments))
    setting = set_up(workload, serves=False, join_steps=steps, fragments=parts)
    trace = simulate_plan(setting, ORDERS["layerwise"](workload, False), 2 * steps)
    sent = [int(trace.transfers.size_bytes[trace.transfers.microbatch == step].sum()) for step in range(2 * steps)]
    expected = [0] * steps
    for n, each in enumerate(parts, 1):
        expected[n * steps // len(parts) - 1] = 2 * sum(workload.sizes_bytes[k] for k in each)
    assert sent == 2 * expected and sum(expected) == 2 * sum(workload.sizes_bytes[n] for n in workload.owner)
    assert trace.period == steps and setting.joined_bytes == max(expected) / 2
    plan, later = ORDERS["layerwise"](workload, False), replace(setting, is_stale=True)
    assert mean_step_s(setting, plan) <= mean_step_s(setting.joining(), plan) * (1 + 1e-9)
    assert mean_step_s(later, plan) <= mean_step_s(setting, plan) * (1 + 1e-9)
    trace = simulate_plan(later, plan, 2 * steps + 1)
    sent = [int(trace.transfers.size_bytes[trace.transfers.microbatch == step].sum()) for step in range(2 * steps + 1)]
    assert sent == [0, *2 * expected]


@given(st.integers(1, 40), st.data())
def test_fragments_are_joined_one_at_a_step_and_evenly(steps, data):
    fragments = data.draw(st.integers(1, steps))
    joined = [joined_after(made, steps, fragments) for made in range(1, 2 * steps + 1)]
    assert joined[:steps] == joined[steps:] and joined[steps - 1] == fragments - 1
    places = [place for place, each in enumerate(joined) if each is not None]
    assert [joined[place] for place in places] == [*range(fragments)] * 2
    between = {later - earlier for earlier, later in itertools.pairwise(places)}
    assert between <= {steps // fragments, -(-steps // fragments)}


@given(workloads(), st.integers(1, 9))
def test_fragments_divide_layers_in_turn_and_about_evenly(workload, count):
    """Of layers of one size as the source's strided fragments."""
    owned = [workload.owned[k] for k in workload.trained]
    parts = workload.fragments(count)
    fragment_of = {n: part for part, each in enumerate(parts) for n in each}
    assert len(parts) == count and sorted(n for each in parts for n in each) == sorted(workload.owner)
    of_layers = [fragment_of[layer[0]] for layer in owned]
    assert all({fragment_of[n] for n in layer} == {part} for layer, part in zip(owned, of_layers, strict=True))
    turns = [of_layers[first : first + count] for first in range(0, len(owned), count)]
    assert all(len({*turn}) == len(turn) for turn in turns)
    sizes_bytes = [sum(workload.sizes_bytes[n] for n in each) for each in parts]
    largest_bytes = max((sum(workload.sizes_bytes[n] for n in layer) for layer in owned), default=0)
    assert max(sizes_bytes) - min(sizes_bytes) <= largest_bytes
    alike = Workload.chain([8] * 7, [1.0] * 7)
    assert alike.fragments(3) == ((0, 3, 6), (1, 4), (2, 5))
