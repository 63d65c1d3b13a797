"""Each test tells of something that once went wrong."""

from __future__ import annotations

import keras
import networks
import numpy as np
import pytest
import tensorflow as tf

import pipetrain
from experiments import run
from pipetrain.callbacks import Snapshots

L = keras.layers


def fit(model, x, y, **settings):
    return model.fit(x, y, **{"batch_size": 20, "shuffle": False, "verbose": 0, **settings})


def plain_and_pipeline(make_optimizer, **settings):
    """An MLP trained by Keras, and its equal as a synchronous pipeline."""
    plain, model = networks.mlp(), networks.mlp()
    plain.compile(make_optimizer(plain), networks.crossentropy())
    pm = pipetrain.PipelineModel(model, cuts=networks.cuts(6, 3), scheme="1f1b", microbatches=1, **settings)
    pm.compile(make_optimizer(model), networks.crossentropy())
    return plain, pm


@pytest.mark.parametrize("call", ["evaluate", "get_metrics_result"])
@pytest.mark.parametrize("scheme", ["spectrain", "1f1b"])
def test_evaluating_in_a_batch_callback_does_not_end_the_epoch(scheme, call):
    x, y = networks.data(200)
    pm, steps = networks.pipeline(scheme=scheme), []

    def look(batch, logs):
        steps.append(batch)
        if batch == 3:
            pm.evaluate(x, y, verbose=0) if call == "evaluate" else pm.get_metrics_result()

    fit(pm, x, y, callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=look)])
    assert steps == list(range(10))
    assert int(pm.optimizer.iterations) == 10


def test_data_parallel_keeps_the_best_weights_of_early_stopping():
    x, y = networks.data(80)
    pm, kept = networks.pipeline(scheme="data-parallel", optimizer=keras.optimizers.SGD(3.0)), []
    stop = keras.callbacks.EarlyStopping("val_loss", restore_best_weights=True)
    keep = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: kept.append((logs["val_loss"], pm.get_weights()))
    )
    fit(pm, x, y, epochs=6, validation_data=(x, y), callbacks=[keep, stop])
    networks.assert_close(pm.get_weights(), min(kept, key=lambda pair: pair[0])[1])


@pytest.mark.parametrize("by", ["name", "variable"])
def test_weights_excluded_from_decay_stay_excluded(by):
    def optimizer(model):
        chosen = keras.optimizers.AdamW(0.01, weight_decay=0.5)
        if by == "name":
            chosen.exclude_from_weight_decay(var_names=["kernel"])
        else:
            chosen.exclude_from_weight_decay(var_list=[model.layers[1].kernel])
        return chosen

    plain, pm = plain_and_pipeline(optimizer)
    for model in (plain, pm):
        fit(model, *networks.data(200))
    networks.assert_close(pm.get_weights(), plain.get_weights(), 2e-5)


def test_loss_scaling_of_the_optimizer_is_refused():
    with pytest.raises(ValueError, match="loss_scale_factor is not supported"):
        networks.pipeline(optimizer=keras.optimizers.SGD(0.1, loss_scale_factor=1024), scheme="1f1b")


def test_an_optimizer_that_trained_another_model_is_refused():
    plain = networks.mlp()
    plain.compile(keras.optimizers.SGD(0.1, momentum=0.9), networks.crossentropy())
    fit(plain, *networks.data(60))
    with pytest.raises(ValueError, match=r"trained another model.*SGD after 3 steps.*from_config"):
        networks.pipeline(plain, optimizer=plain.optimizer)


def test_compiled_again_an_optimizer_keeps_its_momentum_and_its_steps():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 5, 0.5)
    plain, pm = plain_and_pipeline(lambda model: keras.optimizers.SGD(schedule, momentum=0.9))
    for model in (plain, pm):
        fit(model, *networks.data(100))
        model.compile(model.optimizer, networks.crossentropy())
        fit(model, *networks.data(100))
    networks.assert_close(pm.get_weights(), plain.get_weights())
    assert int(pm.optimizer.iterations) == 10


def test_steps_counted_by_hand_stay():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 5, 0.5)
    plain, pm = plain_and_pipeline(lambda model: keras.optimizers.SGD(schedule))
    for model in (plain, pm):
        fit(model, *networks.data(100))
        model.optimizer.iterations.assign(0)
        fit(model, *networks.data(100))
    networks.assert_close(pm.get_weights(), plain.get_weights())


@pytest.mark.parametrize("scheme", ["spectrain", "1f1b"])
def test_training_goes_on_after_a_loss_that_was_not_finite(scheme):
    x, y = networks.data(200)
    pm = networks.pipeline(scheme=scheme)
    with pytest.raises(FloatingPointError):
        fit(pm, x * np.nan, y)
    history = fit(pm, x, y, epochs=2).history
    assert np.isfinite(history["loss"]).all()


def test_two_snapshots_callbacks_are_refused_and_none_stays_asked_for():
    pm, x, y = networks.pipeline(), *networks.data(100)
    with pytest.raises(ValueError, match="Only one Snapshots"):
        fit(pm, x, y, callbacks=[Snapshots(2, lambda step, model: None), Snapshots(5, lambda step, model: None)])

    def fails(step, model):
        raise KeyError(step)

    with pytest.raises(KeyError):
        fit(pm, x, y, callbacks=[Snapshots(2, fails)])
    assert pm.snapshot_every == 0
    fit(pm, x, y)


def test_draining_while_the_stages_rest_is_an_error_not_a_deadlock():
    pm, x, y = networks.pipeline(), *networks.data(200)
    with pytest.raises(RuntimeError, match=r"stages rest.*model that the function is given"):
        fit(pm, x, y, callbacks=[Snapshots(2, lambda step, model: pm.evaluate(x, y, verbose=0))])
    fit(pm, x, y)


def test_an_abort_cut_short_by_a_second_interrupt_is_finished_later(monkeypatch):
    pm, x, y = networks.pipeline(), *networks.data(200)
    from pipetrain.run.worker import Worker

    def interrupt(batch, logs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt, match="second"):
        joins = iter([KeyboardInterrupt("second")])

        def join(self, *args):
            for error in joins:
                raise error
            return super(Worker, self).join(*args)

        patch.setattr(Worker, "join", join)
        fit(pm, x, y, callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=interrupt)])
    assert np.isfinite(pm.get_weights()[0]).all()
    fit(pm, x, y)


@pytest.mark.parametrize("compiled", [False, True])
def test_train_on_batch_says_what_is_missing(compiled):
    pm = pipetrain.PipelineModel(networks.mlp(), stages=2)
    if compiled:
        pm.compile(keras.optimizers.SGD(0.1))
    with pytest.raises(ValueError, match="loss=None" if compiled else r"compile\(\)"):
        pm.train_on_batch(*networks.data(20))


def test_a_fixed_batch_size_takes_microbatches_and_a_short_last_batch():
    layers = [L.Dense(8, activation="tanh", name="one"), L.Dense(networks.CLASSES)]
    model = keras.Sequential([keras.Input(batch_shape=(20, networks.FEATURES)), *layers])
    pm = pipetrain.PipelineModel(model, cuts=("one",), scheme="gpipe", microbatches=4)
    pm.compile(keras.optimizers.SGD(0.1), networks.crossentropy())
    fit(pm, *networks.data(50))
    assert int(pm.optimizer.iterations) == 3


def test_sparse_inputs_are_refused():
    x, y = networks.data(20)
    data = tf.data.Dataset.from_tensors((tf.sparse.from_dense(x), y))
    with pytest.raises(ValueError, match=r"must be dense.*SparseTensor"):
        networks.pipeline().fit(data, verbose=0)


def test_a_schedule_set_after_compile_is_refused():
    pm = networks.pipeline()
    pm.optimizer.learning_rate = keras.optimizers.schedules.ExponentialDecay(0.1, 5, 0.5)
    with pytest.raises(ValueError, match=r"became a schedule.*compile again"):
        fit(pm, *networks.data(40))


@pytest.mark.parametrize("rate", ["-1", "nan", "inf"])
def test_impossible_learning_rates_are_refused(rate, capsys):
    with pytest.raises(SystemExit):
        run.main(["--learning-rate", rate])
    assert "a finite number of at least 0 is needed" in capsys.readouterr().err
