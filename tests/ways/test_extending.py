"""Policies and schedules of one's own: the examples that the documentation shows, which are outside the package."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import keras
import networks
import numpy as np
import parameters
import pytest
import reference
from own_schemes import in_one, reversed_backwards

import pipetrain
from pipetrain.plan.cluster import Cluster
from pipetrain.plan.memory import Training, demand
from pipetrain.plan.partition import partition
from pipetrain.plan.profile import BlockProfile, Profile
from pipetrain.schemes import Action, Read, Schedule, ScheduleError, Scheme, dry_run, policies
from pipetrain.schemes.policies import FlushPolicy
from pipetrain.schemes.schedules import gpipe, orders
from pipetrain.schemes.table import SCHEMES

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))
from own_policy import half_way  # noqa: E402
from own_schedule import breadth_first, looped  # noqa: E402

BLOCKS = tuple(BlockProfile(f"d{n}", 1e-3, 2e-3, 1000, 500, 1000, update_s=1e-4) for n in range(8))
PROFILE = Profile("chain", 12, BLOCKS)


@pytest.mark.parametrize("name", ["own_policy.py", "own_schedule.py"])
def test_each_takes_at_most_thirty_lines(name):
    own, _, _ = (EXAMPLES / name).read_text(encoding="utf-8").partition("\nif __name__ ==")  # what follows prints it
    assert len(own.splitlines()) <= 30


class HalfWayCopy(reference.Copy):
    def read(self, op, i):
        found = max(0, i - (self.stages - 1 - self.k))
        return self.predicted(found, (i - found) // 2, 1.0) if op == "F" else self.predicted(i, 0, 1.0)


@pytest.mark.wide
def test_a_policy_trains_as_its_rule_says(monkeypatch):
    pm = networks.pipeline(scheme=half_way, cuts=networks.cuts(6, 4))
    layers = [layer.get_weights() for layer in pm.model.layers]
    x, y = networks.data(200)
    networks.fit(pm, x, y)
    monkeypatch.setattr(reference, "Copy", HalfWayCopy)
    state = reference.State([tuple(map(np.float64, pair)) for pair in layers])
    batches = [(x[n : n + 20], y[n : n + 20]) for n in range(0, len(x), 20)]
    reference.train(reference.Settings("half-way", lambda t: 0.05), state, networks.ends(6, 4), batches)
    for layer, (kernel, bias) in zip(pm.model.layers, state.layers, strict=True):
        np.testing.assert_allclose(layer.kernel, kernel, atol=1e-5)
        np.testing.assert_allclose(layer.bias, bias, atol=1e-5)


def test_a_policy_is_planned_and_simulated_like_the_others():
    ours, spectrain = (partition(PROFILE, 4, training=Training(scheme)) for scheme in (half_way, "spectrain"))
    less = [b.memory_bytes - a.memory_bytes for a, b in zip(ours.stages, spectrain.stages, strict=True)]
    assert less[:2] == [0, 0]
    assert min(less[2:]) > 0  # one or no update ahead: half of it is none, and nothing is predicted
    spans = [pipetrain.simulate(*each, minibatches=9).spans for each in ((ours, half_way), (spectrain, "spectrain"))]
    assert sorted(each[:3] for each in spans[0]) == sorted(each[:3] for each in spans[1])
    assert max(spans[0].end_s) < max(spans[1].end_s)  # predicting less often takes less time


def test_the_validator_draws_the_schedule_as_its_docstring_does():
    grid = dry_run.grid(dry_run.replay(orders(breadth_first, 2, 1, 3)))
    text = (EXAMPLES / "own_schedule.py").read_text(encoding="utf-8")
    assert all(f"    {row}\n" in text for row in grid.splitlines())


def test_memory_is_that_of_all_stages_on_a_device():
    training = Training(looped, microbatches=3)
    assert demand(training, 0, 4) == demand(Training("gpipe", microbatches=3), 0, 4)
    found = partition(PROFILE, 2, training=training)
    assert [stage.device for stage in found.stages] == [0, 1, 0, 1]
    on_first = sum(stage.memory_bytes for stage in found.stages if stage.device == 0)
    assert found.fullest_bytes >= on_first > max(stage.memory_bytes for stage in found.stages)
    with pytest.raises(ValueError, match=r"stage 1 .* and stage 3 .* keep "):
        partition(PROFILE, 2, Cluster(memory_bytes=found.fullest_bytes // 3), training=training)


@pytest.mark.parametrize("microbatches", [1, 2, 3])
def test_the_simulator_walks_the_same_order(microbatches):
    training = Training(looped, microbatches=microbatches)
    found = partition(PROFILE, 2, Cluster(overhead_s=0.0), training=training)
    trace = pipetrain.simulate(found, looped, Cluster(overhead_s=0.0), minibatches=2)
    for device, order in enumerate(orders(breadth_first, 2, 2, microbatches)):
        mine = [span for span in trace.spans if span.device == f"device:{device}"]
        assert [Action(*span[:3]) for span in mine] == order
        assert all(a.end_s <= b.start_s for a, b in itertools.pairwise(mine))
    assert trace.ranks == 2
    assert trace.bubble() == pytest.approx(1 - found.slowest_s / found.step_s, abs=0.15)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("microbatches", "recompute"),
    [(3, False), *parameters.rarely((1, False), (4, True))],
)
def test_a_schedule_of_two_stages_a_device_equals_the_unsplit_model(microbatches, recompute):
    x, y = networks.data(110)
    single = networks.mlp()
    single.compile(keras.optimizers.SGD(0.05, momentum=0.9), loss=networks.crossentropy(), metrics=["accuracy"])
    settings = {"devices": ("CPU:0", "CPU:1"), "microbatches": microbatches, "recompute": recompute}
    pm = networks.pipeline(scheme=looped, cuts=networks.cuts(6, 4), **settings)
    history = [networks.fit(model, x, y, epochs=2, validation_data=(x, y)).history for model in (single, pm)]
    for name, values in history[0].items():
        np.testing.assert_allclose(history[1][name], values, rtol=1e-5, err_msg=name)
    for ours, theirs in zip(pm.get_weights(), single.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
    on = {span.stage: span.device for span in pm.trace.spans}
    assert on[0] == on[2] != on[1] == on[3]
    assert pm.trace.ranks == 2
    assert "4 stages" in str(pm.partition())


@pytest.mark.wide
def test_the_planner_cuts_for_a_schedule_of_two_stages_a_device():
    pm = networks.pipeline(cuts=None, stages=4, scheme=looped, devices=("CPU:0", "CPU:1"), microbatches=2)
    assert [stage.device for stage in pm.partition(20).stages] == [0, 1, 0, 1]
    assert "(as set)" in pm.explain(20)


def early(device, devices, groups):
    """The first device goes back before the last one has."""
    for group in groups:
        if device == 0:
            yield from (Action(op, device, microbatch) for microbatch in group for op in ("F", "B"))
        else:
            yield from (Action("F", device, microbatch) for microbatch in group)
            yield from (Action("B", device, microbatch) for microbatch in group)


def without_a_gradient(device, devices, groups):
    """The last device goes back before it has gone forward."""
    for group in groups:
        for microbatch in group:
            for op in "BF" if device == devices - 1 else "FB":
                yield Action(op, device, microbatch)


def forgetful(device, devices, groups):
    return (action for action in gpipe(device, devices, groups) if str(action) != "1B1")


def hasty(device, devices, groups):
    """Asks for all minibatches before it has done anything, which never come."""
    return gpipe(device, devices, list(groups))


@pytest.mark.parametrize(
    ("order", "error", "named"),
    [
        (early, ScheduleError, "1F1 <-- ERROR HERE: needs outputs of stage 0"),
        (without_a_gradient, ScheduleError, "1B0 <-- ERROR HERE: needs activations of stage 1"),
        (forgetful, ScheduleError, "1B1 is missing: 1F1 has no backward"),
        (hasty, ScheduleError, "asks for minibatch 1 before it has given 0F0"),
    ],
)
def test_a_schedule_that_cannot_run_is_refused_by_name_before_anything_runs(order, error, named):
    scheme = Scheme(order.__name__, Schedule(order), FlushPolicy(), splits=True)
    with pytest.raises(error, match=named):
        pipetrain.PipelineModel(networks.mlp(), cuts=("d2",), scheme=scheme, microbatches=2)
    with pytest.raises(error, match=named):
        pipetrain.simulate(partition(PROFILE, 2, training=Training("gpipe", microbatches=2)), scheme)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"stages": 3}, "2 stages on each device. Received: stages=3"),
        ({"stages": 4, "replicas": (2, 1, 1, 1)}, "no replicas"),
        ({"stages": 4, "scheme": Scheme("gpipe", looped.schedule, FlushPolicy())}, "another scheme of this name"),
    ],
)
def test_what_a_schedule_of_two_stages_a_device_does_not_have_is_refused(settings, match):
    settings = {"scheme": looped, **settings}
    with pytest.raises(ValueError, match=match):
        networks.in_way(networks.mlp(), devices=("CPU:0", "CPU:1"), **settings)


@pytest.mark.wide
def test_devices_with_several_stages_clip_by_the_norm_of_all_gradients():
    settings = {"scheme": looped, "cuts": networks.cuts(6, 4), "devices": ("CPU:0", "CPU:1"), "microbatches": 2}
    single, pm = networks.mlp(), networks.in_way(networks.mlp(), **settings)
    for model in (single, pm):
        optimizer = keras.optimizers.SGD(0.05, momentum=0.9, global_clipnorm=0.3)
        model.compile(optimizer, loss=networks.crossentropy())
        networks.fit(model, *networks.data(110), epochs=2)
    networks.assert_close(pm.get_weights(), single.get_weights())


def after_the_next(device, devices, groups):
    """Its backwards wait for the next minibatch: they cannot be in one call with their forwards."""
    before = ()
    for group in groups:
        yield from (Action("F", device, microbatch) for microbatch in group)
        yield from (Action("B", device, microbatch) for microbatch in before)
        before = group
    yield from (Action("B", device, microbatch) for microbatch in before)


def one_late(microbatch, stage, stages, microbatches):
    return max(0, microbatch - 1)


@pytest.mark.wide
def test_an_asynchronous_order_that_goes_back_a_minibatch_later():
    """Every stage is one update behind, as in no scheme of the table: ``W[i+1] = W[i] - lr * grad(W[i-1])``."""
    schedule = Schedule(after_the_next, flushes=False, found=one_late)
    trained = []
    for scheme, pieces in ((Scheme("late", schedule, policies.WeightStashingPolicy()), None), ("2bw", 1)):
        pm = networks.pipeline(scheme=scheme, cuts=networks.cuts(6, 2), microbatches=pieces)
        networks.fit(pm, *networks.data(100))
        trained.append(pm.get_weights())
    for ours, theirs in zip(*trained, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


def reversed_if_full(device, devices, groups):
    """``reversed_backwards`` for as many microbatches as there are devices, and for no others."""
    for group in groups:
        assert len(group) % devices == 0
        yield from reversed_backwards(device, devices, [group])


@pytest.mark.wide
@pytest.mark.parametrize("order", [reversed_if_full, in_one])
@pytest.mark.parametrize("rows", parameters.by_default([80, 81], 81))
def test_synchronous_orders_equal_the_unsplit_model(order, rows):
    """Of 81 rows the last batch has one: all microbatches but one are empty."""
    x, y = networks.data(rows)
    single = networks.mlp()
    single.compile(keras.optimizers.SGD(0.05, momentum=0.9), loss=networks.crossentropy(), metrics=["accuracy"])
    own = Scheme(order.__name__, Schedule(order), FlushPolicy(), splits=True)
    pm = networks.pipeline(scheme=own, cuts=networks.cuts(6, 2), microbatches=4)
    history = [networks.fit(model, x, y, epochs=2).history for model in (single, pm)]
    for name, values in history[0].items():
        np.testing.assert_allclose(history[1][name], values, rtol=1e-5, err_msg=name)
    for ours, theirs in zip(pm.get_weights(), single.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


class BackwardsAhead(policies.VanillaPolicy):
    """The backward alone predicts, further than any forward does."""

    predicts = True

    def __init__(self, horizon):
        self.horizon = horizon

    def backward(self, reader):
        return Read(reader.minibatch, self.horizon)


@pytest.mark.wide
def test_a_backward_predicts_as_far_as_its_policy_says():
    trained = {}
    for horizon in (1, 3):
        scheme = Scheme(f"ahead {horizon}", SCHEMES["vanilla"].schedule, BackwardsAhead(horizon))
        pm = networks.pipeline(scheme=scheme, cuts=networks.cuts(6, 2))
        networks.fit(pm, *networks.data(100))
        trained[horizon] = pm.get_weights()
    assert any(not np.array_equal(a, b) for a, b in zip(*trained.values(), strict=True))
