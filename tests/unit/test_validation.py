"""Schedules and policies that cannot train are refused, by the action that cannot be. No TensorFlow."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from own_schemes import in_one, reversed_backwards

from pipetrain.plan.cluster import Cluster
from pipetrain.plan.memory import Training, demand
from pipetrain.plan.partition import partition
from pipetrain.plan.profile import BlockProfile, Profile
from pipetrain.schemes import Action, Read, Schedule, ScheduleError, Scheme, policies
from pipetrain.schemes.policies import FlushPolicy, VanillaPolicy, WeightStashingPolicy
from pipetrain.schemes.schedules import asynchronous, gpipe, unflushed
from pipetrain.schemes.table import SCHEMES, scheme
from pipetrain.schemes.validation import check
from pipetrain.simulation.simulator import simulate
from pipetrain.trace.trace import Trace

PROFILE = Profile("chain", 12, tuple(BlockProfile(f"d{n}", 1e-3, 2e-3, 1000, 500, 1000) for n in range(4)))


def synchronous(order, **settings):
    return Scheme(order.__name__, Schedule(order, **settings), FlushPolicy(), splits=True)


def nothing(device, devices, groups):
    return iter(())


def every_other_minibatch(device, devices, groups):
    return gpipe(device, devices, (group for number, group in enumerate(groups) if number % 2 == 0))


def all_but_the_last(device, devices, groups):
    return gpipe(device, devices, (group[:-1] for group in groups))


def one_too_many(device, devices, groups):
    return gpipe(device, devices, (range(group[0], group[-1] + 2) for group in groups))


def first_device_alone(device, devices, groups):
    return gpipe(0, devices, groups)


def early_for_the_next(device, devices, groups):
    """Asks for the next minibatch when it has taken all but the last microbatch of this one."""
    groups = iter(groups)
    group = next(groups, None)
    while group is not None:
        yield from (Action("F", device, microbatch) for microbatch in group[:-1])
        following = next(groups, None)
        yield Action("F", device, group[-1])
        yield from (Action("B", device, microbatch) for microbatch in group)
        group = following


def waits_for_the_next(device, devices, groups):
    """Asks for the next minibatch before it goes back, which is posted when this one has made its updates."""
    before = ()
    for group in groups:
        yield from (Action("F", device, microbatch) for microbatch in group)
        yield from (Action("B", device, microbatch) for microbatch in before)
        before = group
    yield from (Action("B", device, microbatch) for microbatch in before)


def mixed(device, devices, groups):
    """The backwards of two minibatches in turns: their gradients would be one."""
    groups = iter(groups)
    for first in groups:
        yield from (Action("F", device, microbatch) for microbatch in first)
        second = next(groups, ())
        yield from (Action("F", device, microbatch) for microbatch in second)
        for each in range(len(first)):
            yield from (Action("B", device, group[each]) for group in (first, second) if group)


def endless(device, devices, groups):
    microbatch = 0
    while True:
        yield Action("F", device, microbatch)
        microbatch += 1


def tuples(device, devices, groups):
    return (tuple(action) for action in gpipe(device, devices, groups))


def unknown(device, devices, groups):
    return (action._replace(op="X") for action in gpipe(device, devices, groups))


def none(device, devices, groups):
    return None


@pytest.mark.parametrize(
    ("broken", "stages", "named"),
    [
        (synchronous(gpipe, chunks=2), 4, "2F0 is missing"),
        (synchronous(nothing), 2, "0F0 is missing"),
        (synchronous(every_other_minibatch), 2, "0F2 is missing"),
        (synchronous(all_but_the_last), 2, "0F1 is missing"),
        (synchronous(one_too_many), 2, "0F2 stands 2 times"),
        (synchronous(first_device_alone), 2, "0F0 stands in the order of device 1"),
        (synchronous(early_for_the_next), 2, "asks for minibatch 1 before it has given 0F1"),
        (synchronous(waits_for_the_next), 2, "0F2 <-- ERROR HERE: needs a minibatch that is posted after it"),
        (synchronous(mixed, flushes=False, found=unflushed), 1, "0B1 comes after a backward of the next minibatch"),
        (synchronous(endless), 2, "The order of device 0 does not end"),
        (synchronous(tuples), 2, r"\('F', 0, 0\) stands in the order of device 0"),
        (synchronous(unknown), 2, "Action.*'X'.* stands in the order of device 0"),
        (synchronous(none), 2, "The order of device 0 gives None"),
    ],
    ids=lambda value: value.name if isinstance(value, Scheme) else None,
)
def test_orders_that_cannot_run_are_refused(broken, stages, named):
    with pytest.raises(ScheduleError, match=named):
        check(broken, stages, 2)


@dataclass(frozen=True)
class Given:
    """Reads so many versions, and updates ahead, of what is newest."""

    forward_of: tuple[int, int] = (0, 0)
    backward_of: tuple[int, int] = (0, 0)
    predicts: bool = True

    def forward(self, reader):
        return Read(reader.newest() + self.forward_of[0], self.forward_of[1])

    def backward(self, reader):
        return Read(reader.minibatch + self.backward_of[0], self.backward_of[1])


class BackwardReadsTheFirst(VanillaPolicy):
    """Reads at the end what it has not read since the beginning: nobody holds it."""

    def backward(self, reader):
        return Read(0 if reader.minibatch == 4 else reader.minibatch)


class PredictsTheOneBefore(VanillaPolicy):
    """Predicts from what is not the newest: it is kept as it is read."""

    predicts = True

    def forward(self, reader):
        return Read(max(0, reader.newest() - 1), 1)


def one_more(microbatch, stage, stages, microbatches):
    return unflushed(microbatch, stage, stages, microbatches) + 1


@pytest.mark.parametrize(
    ("policy", "found", "named"),
    [
        (VanillaPolicy(), None, "0F1 finds 0 updates made; by the schedule's ``found`` there are 1"),
        (VanillaPolicy(), one_more, "0F0 finds 0 updates made; by the schedule's ``found`` there are 1"),
        (VanillaPolicy(), lambda *place: 0, "0F2 finds 1 updates made; by the schedule's ``found`` there are 0"),
        (Given(forward_of=(1, 0)), unflushed, r"0F0 is to read Read\(version=1, horizon=0\); versions are 0 to 0"),
        (Given(backward_of=(-1, 0)), unflushed, r"0B0 is to read Read\(version=-1"),
        (Given(forward_of=(0, -1)), unflushed, r"0F0 is to read Read\(version=0, horizon=-1\)"),
        (Given(forward_of=(0, 1), predicts=False), unflushed, "by a policy of predicts=False"),
        (Given(backward_of=(-1, 1)), unflushed, r"0B0 is to read Read\(version=-1"),
        (BackwardReadsTheFirst(), unflushed, "B4 reads version 0 in its backward; .* only those are held"),
    ],
)
def test_weights_that_are_not_there_are_refused(policy, found, named):
    schedule = Schedule(asynchronous, flushes=False, **({"found": found} if found else {}))
    with pytest.raises(ScheduleError, match=named):
        check(Scheme("own", schedule, policy), 2, 1)


@pytest.mark.parametrize("stages", [1, 2, 5])
@pytest.mark.parametrize("name", SCHEMES)
def test_the_table_s_own_can_run(name, stages):
    chosen = SCHEMES[name]
    check(chosen, stages, 4 if chosen.splits else 1)


@pytest.mark.parametrize(
    ("name", "horizon", "microbatches"),
    [("spectrain", "local", 1), ("spectrain", "fitted", 1), ("spectrain", "target", 3), ("2bw", 1.5, 4)],
)
def test_and_with_their_horizons(name, horizon, microbatches):
    check(scheme(name, horizon), 5, microbatches)


def test_what_is_predicted_need_not_be_the_newest():
    check(Scheme("own", SCHEMES["vanilla"].schedule, PredictsTheOneBefore()), 3, 1)


@dataclass
class Unhashable:
    predicts: bool = False

    def forward(self, reader):
        return Read(reader.newest())

    backward = forward


@pytest.mark.parametrize(
    ("own", "named"),
    [
        (Scheme("own", gpipe, FlushPolicy()), "A scheme has a Schedule. Received: schedule=<function gpipe"),
        (Scheme("own", Schedule(gpipe), None), "A policy is an object.* Received: policy=None"),
        (Scheme("own", Schedule(gpipe), FlushPolicy), "A policy is an object.* Received: policy=<class"),
        (Scheme("own", Schedule(gpipe), Unhashable()), "frozen=True"),
    ],
)
def test_schemes_of_parts_that_are_none_are_refused(own, named):
    with pytest.raises(ValueError, match=named):
        scheme(own)


@pytest.mark.parametrize("make", [lambda own: demand(Training(own), 0, 2), lambda own: simulate(EVEN, own)])
def test_planning_and_simulating_refuse_them_too(make):
    with pytest.raises(ScheduleError, match="0F0 is missing"):
        make(Scheme("own", Schedule(nothing), FlushPolicy()))


EVEN = partition(PROFILE, 2, Cluster(overhead_s=0.0), training=Training("gpipe", microbatches=3))


def test_the_update_follows_the_last_backward_whatever_its_number():
    own = Scheme("reversed", Schedule(reversed_backwards), FlushPolicy(), splits=True)
    check(own, 2, 3)
    trace = simulate(EVEN, own, Cluster(overhead_s=0.0), minibatches=2, microbatches=3)
    versions = {(span.op, span.stage, span.microbatch): span.version for span in trace.spans}
    assert all(versions[op, stage, m] == m // 3 for op in "FB" for stage in (0, 1) for m in range(6))


def test_forward_and_backward_in_one_are_planned_simulated_and_kept_in_traces(tmp_path):
    own = Scheme("in one", Schedule(in_one), FlushPolicy(), splits=True)
    check(own, 2, 3)
    ours, gpipes = (demand(Training(each, microbatches=3), 1, 2) for each in (own, "gpipe"))
    assert ours.activations == pytest.approx(1 / 3)
    assert gpipes.activations == 1
    assert ours.weights == gpipes.weights
    trace = simulate(EVEN, own, Cluster(overhead_s=0.0), minibatches=1, microbatches=3)
    ways = {(each.op, each.from_stage, each.to_stage) for each in trace.transfers}
    assert ways == {("F", 0, 1), ("B", 1, 0)}
    trace.save(tmp_path / "trace.json")
    assert Trace.load(tmp_path / "trace.json") == trace
    assert {span.op for span in trace.spans if span.stage == 1} == {"FB"}


def test_a_rule_predicts_as_far_as_either_way_does():
    for forward, backward in ((1, 3), (3, 1)):
        own = Scheme("own", SCHEMES["vanilla"].schedule, Given((0, forward), (0, backward)))
        assert own.rule(0, 2).furthest == 3
    assert Scheme("own", SCHEMES["vanilla"].schedule, WeightStashingPolicy()).rule(0, 4).furthest == 0
    assert [scheme("spectrain").rule(k, 4).furthest for k in range(4)] == [3, 2, 2, 1]
    assert [
        Scheme("own", SCHEMES["2bw"].schedule, policies.LocalSpecTrainPolicy()).rule(k, 4, 3).furthest for k in (0, 3)
    ]
