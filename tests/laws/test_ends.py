"""However training ends, in every way: weights are whole, no thread is left, and training goes on as if undisturbed."""

from __future__ import annotations

import gc
import random

import inside
import networks
import numpy as np
import pytest
import tensorflow as tf
import ways_to_train
from checkpointed import Stop
from interruption import Interrupting, assert_whole
from tensorflow.python.framework.func_graph import FuncGraph
from ways_to_train import (
    BATCH,
    EACH_MECHANISM,
    WAYS,
    WITH_LATE,
    X,
    Y,
    anew,
    assert_bitwise,
    fit,
    made,
    outcome,
    over,
    undisturbed,
)

from pipetrain.callbacks import PipelineCheckpoint
from pipetrain.compute.program.stage_trace import StageTrace
from pipetrain.run.stage_work import StageWork


@over(default=("spectrain",), wide=WITH_LATE)
def test_stopped_in_the_midst_and_resumed_is_bitwise_as_never_stopped(way, tmp_path):
    """In another object, which knows of the first one only what is in the checkpoint.

    The first minibatch that it reads is the last one of an epoch, of fewer rows than microbatches or devices. What was
    never stopped has no checkpoints either, but where threads drain an asynchronous pipeline for each.
    """

    def run(pm, name, *callbacks):
        saving = PipelineCheckpoint(tmp_path / name, every_steps=3)
        fit(pm, epochs=2, callbacks=[saving, *callbacks])
        return saving.resumed_at, pm.get_weights()

    pm = anew(way)
    fit(pm, epochs=2)
    drains = WAYS[way].rule is not None and not inside.is_program(pm)
    whole = run(anew(way), "whole")[1] if drains else pm.get_weights()
    with pytest.raises(InterruptedError):
        run(anew(way), "cut", Stop(8))
    resumed_at, weights = run(made(way), "cut")
    assert resumed_at == 6
    networks.assert_equal(weights, whole)


@over(default=("spectrain",), wide=EACH_MECHANISM)
def test_interrupted_at_any_moment_and_trained_again_is_as_undisturbed(way):
    want, pm = undisturbed(way), anew(way)
    with Interrupting() as counting:
        fit(pm)
    chance = random.Random(way)
    for _ in range(2):
        pm = anew(way)
        try:
            with Interrupting(1 + chance.randrange(counting.calls)):
                fit(pm)
        except KeyboardInterrupt:
            assert_whole(pm)
    assert_bitwise(outcome(anew(way)), want)


@over(default=("spectrain", "all-reduce"), wide=(*EACH_MECHANISM, "data-parallel"))
def test_an_operation_that_fails_is_raised_and_training_goes_on_after_it(way):
    labels = Y.copy()
    labels[3 * BATCH + 2] = 99
    pm = anew(way)
    with pytest.raises(tf.errors.InvalidArgumentError, match="label value of 99") as raised:
        networks.fit(pm, X, labels, batch_size=BATCH)
    assert_whole(pm)
    notes = "\n".join(getattr(raised.value, "__notes__", []))
    if WAYS[way].is_pipeline:
        assert f"stage {WAYS[way].stages - 1}, forward of minibatch 3" in notes
    if way == "coded-reduce":
        assert "step 3 of worker" in notes
    assert_bitwise(outcome(anew(way)), undisturbed(way))


@over(*ways_to_train.pipelines(), default=("1f1b",), wide=("spectrain, fitted",))
def test_what_any_stage_raises_names_stage_action_and_minibatch(way, monkeypatch):
    pm, finish = anew(way), StageWork._finish
    fit(pm)
    if inside.is_program(pm):
        pytest.skip("see test_an_action_that_cannot_be_traced_is_named, and ways/test_schedule_errors.py")
    for stage in range(WAYS[way].stages):
        failed = []

        def failing(self, stage=stage, failed=failed):
            action = self._now[1][-1]
            if (action.stage, action.microbatch // inside.microbatches(pm)) == (stage, 2):
                failed.append(action)
                raise OSError("no such row")
            return finish(self)

        with monkeypatch.context() as patch, pytest.raises(OSError, match="no such row") as raised:
            patch.setattr(StageWork, "_finish", failing)
            fit(anew(way))
        (note,) = raised.value.__notes__
        assert f"stage {stage}" in note and "of minibatch 2" in note and f"(action {failed[0]})" in note
        assert_whole(pm)
    assert_bitwise(outcome(anew(way)), undisturbed(way))


@over(*ways_to_train.pipelines(), default=("1f1b",), wide=("zb-v",))
def test_an_action_that_cannot_be_traced_is_named(way, monkeypatch):
    """Where a minibatch is one function, for the first minibatch of its form."""
    pm = anew(way)
    fit(pm)
    if not inside.is_program(pm):
        pytest.skip("its actions are made one by one")
    for stage in range(WAYS[way].stages):
        pm = anew(way)
        inside.forget_functions(pm)
        with monkeypatch.context() as patch, pytest.raises(OSError, match="no such row") as raised:
            patch.setattr(StageTrace, "_weights", failing_at(stage))
            fit(pm)
        (note,) = raised.value.__notes__
        assert f"stage {stage}, forward" in note and "of minibatch 0" in note and f"(action {stage}F" in note
        assert_whole(pm)
    assert_bitwise(outcome(anew(way)), undisturbed(way))


def failing_at(stage):
    weights = StageTrace._weights

    def failing(self, *given):
        if self.place.stage == stage:
            raise OSError("no such row")
        return weights(self, *given)

    return failing


@over(default=("spectrain",), wide=EACH_MECHANISM)
def test_a_loss_that_is_not_a_number_ends_training_and_leaves_the_weights_of_before(way):
    x = X.copy()
    x[3 * BATCH + 2] = np.nan
    pm = anew(way)
    before = pm.get_weights()
    with pytest.raises(FloatingPointError, match="nan at step 4"):
        networks.fit(pm, x, Y, batch_size=BATCH)
    assert_whole(pm)
    networks.assert_equal(pm.get_weights(), before)
    assert_bitwise(outcome(anew(way)), undisturbed(way))


@over(default=("spike-compensation",), wide=[way for way in EACH_MECHANISM if way != "data-parallel"])
def test_what_a_model_that_is_gone_has_held_is_free(way):
    """TensorFlow keeps the functions of custom gradients for ever, and Keras' optimizers have one.

    With data-parallel it is Keras' own function that trains, and stays.
    """

    def graphs():
        gc.collect()
        return sum(isinstance(each, FuncGraph) for each in gc.get_objects())

    fit(made(way))
    before = graphs()
    fit(made(way))
    assert graphs() == before
