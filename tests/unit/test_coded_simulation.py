"""Coded gradients in simulated time: by hand for small trees, and what holds for all."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pipetrain
from pipetrain.plan.cluster import Cluster, Level, Link
from pipetrain.plan.profile import BlockProfile, Profile
from pipetrain.schemes.coded_reduce import Tree
from pipetrain.simulation.coded_reduce import simulate_tree
from pipetrain.simulation.comparison import compare
from pipetrain.trace.idle import late_steps
from pipetrain.trace.trace import Trace


def profile(seconds=12.0, size_bytes=0, update_s=0.0):
    block = BlockProfile("model", seconds / 3, 2 * seconds / 3, 0, size_bytes, update_s=update_s)
    return Profile("one block", 120, (block,))


FREE = Cluster((Level(Link(float("inf"))),))


def test_a_step_takes_the_load_of_a_worker_and_its_messages():
    """One second for a message: to three children one after another, the third computes, and has its sent."""
    assert simulate_tree(profile(), 3, 1, 1, FREE).step_s == pytest.approx(8.0)
    assert simulate_tree(profile(update_s=0.5), 4, 2, 1, FREE).step_s == pytest.approx(2.5)
    network = Cluster((Level(Link(1.0), contention="port"),))
    trace = simulate_tree(profile(size_bytes=1), 3, 1, 0, network, minibatches=6)
    assert trace.step_s == pytest.approx(3 + 4 + 1)
    coded = simulate_tree(profile(size_bytes=1), 3, 1, 1, network, minibatches=6)
    assert coded.spans[coded.spans.replica == 0].start_s[0] == pytest.approx(
        1 + 8 + 1
    )  # the second child's, since the first began


def test_no_more_devices_compute_at_once_than_there_are_processors():
    two = Cluster((Level(Link(float("inf"))),), processors=2)
    assert simulate_tree(profile(), 4, 1, 0, two).step_s == pytest.approx(6.0)


@pytest.mark.parametrize(
    ("known", "step_s"),
    [
        ({"speeds": (1.0, 1.0, 0.5)}, 8.0),  # 4 s at half the speed
        ({"caller_work_s": (0.0, 0.25, 0.5)}, 4.5),
        ({"cores": ((0,), (1,), (1,)), "processors": 2}, 8.0),
    ],
)
def test_what_is_known_of_devices_is_known_of_the_workers_beside_the_root(known, step_s):
    cluster = Cluster(FREE.levels, **known).with_program()
    assert simulate_tree(profile(), 3, 1, 0, cluster).step_s == pytest.approx(step_s)


def test_the_program_is_joined_to_each_device_as_the_first_is():
    own, fast, slow = Link(float("inf")), Link(2.0), Link(1.0)
    between = ((own, fast, slow), (fast, own, slow), (slow, slow, own))
    cluster = Cluster(FREE.levels, between=between).with_program()
    assert [cluster.link(0, n) for n in range(4)] == [own, own, fast, slow]
    assert cluster.link(2, 3) == cluster.link(3, 1) == slow
    assert FREE.with_program() == FREE


@pytest.mark.parametrize(("stragglers", "step_s"), [(0, 4 / 0.19), (1, 8.0)])
def test_a_straggler_is_waited_for_only_by_a_tree_that_bears_none(stragglers, step_s):
    trace = simulate_tree(profile(), 3, 1, stragglers, FREE, minibatches=10, speeds=[1, 1, 0.19])
    assert trace.step_s == pytest.approx(step_s)
    late = late_steps(trace, 3)
    assert late[:2] == [0, 0] and late[2] == (0 if stragglers == 0 else 10)
    mine = trace.spans[trace.spans.replica == 3]
    if stragglers:  # 42 s each: of five minibatches
        assert mine.microbatch.tolist() == [0, 5]


def test_what_is_below_a_straggler_is_left_behind_with_it():
    speeds = [1.0] * 12
    speeds[2] = 0.1
    trace = simulate_tree(profile(), 3, 2, 1, FREE, minibatches=20, speeds=speeds)
    assert trace.step_s == pytest.approx(12 * 4 / 15)
    late = late_steps(trace, 12)
    assert [worker for worker, count in enumerate(late) if count > 10] == [2, 9, 10, 11]


@pytest.mark.parametrize("wrong", [{"slowdown": -0.5}, {"slowdown": float("nan")}, {"seed": 0.5}])
def test_variations_that_there_are_none_of_are_refused(wrong):
    (given,) = wrong.items()
    with pytest.raises(ValueError, match="Received: {}={}. Try".format(*given)):
        simulate_tree(profile(), 2, 2, 1, **wrong)


def test_what_a_trace_saves_it_reads(tmp_path):
    trace = simulate_tree(profile(size_bytes=3), 2, 2, 1, minibatches=3, slowdown=0.3)
    trace.save(tmp_path / "trace.json")
    found = Trace.load(tmp_path / "trace.json")
    assert late_steps(found, 6) == late_steps(trace, 6)


@given(st.sampled_from([(3, 1, 1), (3, 2, 1), (4, 2, 1), (4, 2, 2), (2, 3, 1)]), st.integers(0, 1000), st.data())
@settings(max_examples=30)
def test_every_step_ends_and_has_enough_children_of_every_parent_that_is_used(shape, seed, data):
    tree = Tree(*shape)
    speeds = data.draw(st.lists(st.sampled_from([0.05, 0.3, 1.0]), min_size=tree.workers, max_size=tree.workers))
    network = Cluster((Level(Link(2.0, 0.1), contention="port"),))
    made = [
        simulate_tree(profile(size_bytes=1), *shape, network, 5, speeds=speeds, slowdown=0.5, seed=seed)
        for _ in range(2)
    ]
    assert made[0] == made[1]
    trace = made[0]
    root = trace.spans[trace.spans.replica == 0]
    assert root.microbatch.tolist() == [0, 1, 2, 3, 4]
    computed = trace.spans[trace.spans.op == "FB"]
    for replica in range(1, tree.workers + 1):
        mine = computed[computed.replica == replica]
        assert (np.diff(mine.microbatch) > 0).all() and (mine.start_s[1:] >= mine.end_s[:-1] - 1e-9).all()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"speeds": [1, 1]}, "Every worker has a speed above 0.*2|of 3 workers"),
        ({"speeds": [1, 1, 0]}, "speed above 0"),
        ({"minibatches": 0}, "at least one minibatch"),
        ({"stragglers": 3}, "no straggler"),
    ],
)
def test_what_cannot_be_simulated_is_refused(options, problem):
    with pytest.raises(ValueError, match=problem):
        simulate_tree(profile(), **{"children": 3, **options})


def test_it_is_compared_beside_the_others_and_a_partition_is_none_of_it():
    found = compare(profile(), 3, ["single", "coded-reduce"], FREE, minibatches=4, slowdown=0.1)
    assert [*found.traces] == ["single", "coded-reduce"] and "coded-reduce" in str(found)
    deeper = compare(profile(), 3, ["coded-reduce"], FREE, minibatches=4, tree=Tree(3, 2, 1))
    assert deeper.traces["coded-reduce"].step_s < found.traces["coded-reduce"].step_s
    with pytest.raises(ValueError, match=r"has no stages.*Try pipetrain.simulate_tree"):
        pipetrain.simulate(pipetrain.partition(profile(), 1), "coded-reduce")
