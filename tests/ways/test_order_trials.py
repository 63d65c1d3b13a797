"""``order="auto"``: orders that simulation cannot tell apart are tried, which leaves nothing in the model."""

from __future__ import annotations

import inside
import keras
import networks
import numpy as np
import pytest
from transfer_models import noisy
from transfer_plans import late_plan

import pipetrain
from pipetrain.frontend import transfer_strategy
from pipetrain.run import window
from pipetrain.run.step_runner import StepRunner
from pipetrain.run.window import TIMED, WARM_UP
from pipetrain.schemes.transfers.orders import ORDERS

DATA = networks.data(60)


def every_plan(late_first, setting):
    """Plans of all kinds: layer by layer, late or returned, unordered, and that by another name, none shorter."""
    names = (*(["push-pull"] if setting.serves else []), "layerwise", "none")
    plans = [ORDERS[name](setting.workload, setting.serves) for name in names]
    late = [] if setting.serves else [late_plan(noisy())]
    every = [*(late if late_first else []), *plans, *([] if late_first else late), plans[-1]._replace(name="again")]
    return dict.fromkeys(every, 1.0)


@pytest.fixture
def tried(monkeypatch):
    """Names of the plans that were tried, each of which takes longer than the one before it, but for the last."""
    found = []

    def minibatch_s(runner, minibatch):
        found.append(runner.plan.name)
        own(runner, minibatch)
        return 1.0 + len(found) if runner.plan.name != "none" else 1.0

    own = transfer_strategy.minibatch_s
    monkeypatch.setattr(transfer_strategy, "near", lambda setting: every_plan(False, setting))
    monkeypatch.setattr(transfer_strategy, "minibatch_s", minibatch_s)
    for name in ("WARM_UP_S", "TIMED_S"):
        monkeypatch.setattr(window, name, 0.0)
    return found


def compiled(order, scheme="all-reduce", optimizer=None):
    keras.utils.set_random_seed(0)
    pm = networks.in_way(noisy(), scheme=scheme, devices=("CPU:0", "CPU:1"), order=order)
    pm.compile(optimizer or keras.optimizers.Nadam(0.01), networks.crossentropy(), metrics=["accuracy"])
    return pm


def trained(order, scheme):
    """The model after two epochs, its history, and the steps whose weights were evaluated."""
    pm, steps = compiled(order, scheme), []
    snapshots = pipetrain.callbacks.Snapshots(2, lambda step, model: steps.append(step))
    history = networks.fit(pm, *DATA, epochs=2, callbacks=[snapshots]).history
    return pm, networks.without_figures(history), steps


@pytest.mark.wide
@pytest.mark.parametrize(
    ("scheme", "late_first"), [("all-reduce", False), ("all-reduce", True), ("parameter-server", False)]
)
def test_a_trial_leaves_nothing_in_the_model_and_the_fastest_order_trains(scheme, late_first, tried, monkeypatch):
    monkeypatch.setattr(transfer_strategy, "near", lambda setting: every_plan(late_first, setting))
    (expected, *told), (pm, *found) = (trained(order, scheme) for order in ("none", "auto"))
    assert found == told and found[1] == [2, 4, 6]
    networks.assert_equal(pm.get_weights(), expected.get_weights())
    networks.assert_equal(*([np.asarray(v) for v in each.optimizer.variables] for each in (pm, expected)))
    assert sorted(tried) == sorted(
        {"none", "layer by layer", "own"} if scheme == "all-reduce" else {"none", "layer by layer", "push-pull"}
    )
    assert inside.plan(pm).name == "none"
    assert {span.microbatch for span in pm.trace.spans} == {*range(6)}


@pytest.mark.wide
def test_orders_are_tried_once_for_a_compilation(tried):
    pm = compiled("auto")
    for _ in range(2):
        networks.fit(pm, *DATA, epochs=1)
    assert len(tried) == 3
    pm.compile(keras.optimizers.SGD(0.01, global_clipnorm=1.0), networks.crossentropy())
    networks.fit(pm, *DATA, epochs=1)
    assert len(tried) == 3 + 3 - ("own" not in tried[3:])


@pytest.mark.wide
def test_orders_that_took_about_equally_long_are_tried_again_in_turns(tried, monkeypatch):
    """Those of the runner that is there first; the median of all trials tells which is taken."""
    names, seconds = [], iter([1.0, 1.05, 1.1, 1.3, 1.2, 1.0, 1.3, 1.0, 1.3])

    def minibatch_s(runner, minibatch):
        names.append(runner.plan.name)
        return next(seconds)

    monkeypatch.setattr(transfer_strategy, "minibatch_s", minibatch_s)
    pm = compiled("auto")
    networks.fit(pm, *DATA, epochs=1)
    assert names == ["layer by layer", "none", "own", "own", "own", *["none", "layer by layer"] * 2]
    assert inside.plan(pm).name == "none"


@pytest.mark.wide
def test_functions_are_made_once_for_an_order_as_long_as_the_weights_are_the_same(tried, monkeypatch):
    made, kept = [], []

    class Counted(transfer_strategy.TransferStep):
        def __init__(self, weights, workers, plan, *others):
            made.append(plan.name)
            super().__init__(weights, workers, plan, *others)

    def minibatch_s(runner, minibatch):
        own(runner, minibatch)
        kept.append(len(runner._known))
        return 1.0

    own = transfer_strategy.minibatch_s
    monkeypatch.setattr(transfer_strategy, "TransferStep", Counted)
    monkeypatch.setattr(transfer_strategy, "minibatch_s", minibatch_s)
    pm = compiled("auto", "parameter-server")
    networks.fit(pm, *DATA, epochs=1)
    assert made == ["push-pull", "layer by layer", "none"]
    assert kept == [0, 1, *[2] * 7]  # three trials of each
    assert inside.runner(pm)._known == {}


@pytest.mark.wide
def test_plans_of_one_runner_are_tried_again_after_another(tried, monkeypatch):
    """Those that update the same variables late share a runner; of ``own``, which is late, there is another."""
    made = []

    class Counted(StepRunner):
        def __init__(self, *given):
            made.append(given[2].name)
            super().__init__(*given)

    monkeypatch.setattr(transfer_strategy, "StepRunner", Counted)
    monkeypatch.setattr(transfer_strategy, "minibatch_s", lambda runner, minibatch: 1.0)
    pm = compiled("auto")
    networks.fit(pm, *DATA, epochs=1)
    assert made == ["layer by layer", "own", "none"]  # the last one is there for both, and for training
    assert inside.plan(pm).name == "layer by layer"


@pytest.mark.wide
@pytest.mark.parametrize(("late", "taken"), [(1.02, "none"), (1.08, "layer by layer")])
def test_simulation_tells_which_of_two_that_took_about_equally_long_is_taken(late, taken, tried, monkeypatch):
    """Three trials give one 6% less; where the mean of them and of the simulation is within 3%, the first is taken."""

    def near(setting):
        plans = [plan for plan in every_plan(False, setting) if plan.name in ("layer by layer", "none")]
        return {plan: late if plan.name == "none" else 1.0 for plan in plans}

    monkeypatch.setattr(transfer_strategy, "near", near)
    monkeypatch.setattr(transfer_strategy, "minibatch_s", lambda runner, _: 1.0 if runner.plan.name == "none" else 1.06)
    pm = compiled("auto")
    networks.fit(pm, *DATA, epochs=1)
    assert inside.plan(pm).name == taken


@pytest.mark.wide
@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_interrupted_trial_leaves_the_model_as_it_was(error, tried, monkeypatch):
    """Whose optimizer has gathered something before."""
    expected, pm = (twice(each) for each in (None, error))
    networks.assert_equal(pm.get_weights(), expected.get_weights())
    assert len(tried) == 3 + 2 + 3 and sorted(tried[5:]) == sorted(tried[:3])  # the second of two was interrupted


def twice(error):
    """A model trained in one order, and then once more in an open one, whose first trial the error ends, if any."""
    pm = compiled("none")
    networks.fit(pm, *DATA, epochs=1)
    inside.strategy(pm)._order = "auto"
    pm.compile(pm.optimizer, networks.crossentropy(), metrics=["accuracy"])
    if error:
        before = states(pm)
        with pytest.MonkeyPatch.context() as patched, pytest.raises(error):
            patched.setattr(StepRunner, "post", failing(error, WARM_UP + TIMED + WARM_UP))
            networks.fit(pm, *DATA, epochs=1)
        networks.assert_equal(states(pm), before)
    networks.fit(pm, *DATA, epochs=1)
    return pm


def states(pm):
    return [*pm.get_weights(), *(np.asarray(each) for each in pm.optimizer.variables)]


def failing(error, after):
    """``StepRunner.post``, which raises the error after so many steps."""
    calls, post = [], StepRunner.post

    def step(self, *given):
        calls.append(given)
        post(self, *given)
        if len(calls) == after:
            raise error("in a trial")

    return step
