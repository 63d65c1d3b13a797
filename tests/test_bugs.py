"""Each test tells of something that once went wrong."""

from __future__ import annotations

import keras
import networks
import numpy as np
import pytest
import tensorflow as tf
from networks import fit

import pipetrain
from experiments import run
from pipetrain.callbacks import Snapshots
from pipetrain.compute.functions.stage import Stage

L = keras.layers


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
        networks.pipeline(networks.mlp(), optimizer=plain.optimizer)


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
    assert pm.session is None
    fit(pm, x, y)


def test_draining_while_the_stages_rest_is_an_error_not_a_deadlock():
    pm, x, y = networks.pipeline(), *networks.data(200)
    with pytest.raises(RuntimeError, match=r"stages rest.*model that the function is given"):
        fit(pm, x, y, callbacks=[Snapshots(2, lambda step, model: pm.evaluate(x, y, verbose=0))])
    fit(pm, x, y)


def test_an_abort_cut_short_by_a_second_interrupt_is_finished_later(monkeypatch):
    pm, x, y = networks.pipeline(), *networks.data(200)
    from pipetrain.run.device_thread import DeviceThread

    def interrupt(batch, logs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt, match="second"):
        joins = iter([KeyboardInterrupt("second")])

        def join(self, *args):
            for error in joins:
                raise error
            return super(DeviceThread, self).join(*args)

        patch.setattr(DeviceThread, "join", join)
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


def one_layer(layer, width=4):
    keras.utils.set_random_seed(0)
    x = keras.Input((width,))
    return keras.Model(x, L.Dense(2, name="last")(layer(L.Dense(width, name="first")(x))))


def normal(*shape):
    return np.random.default_rng(0).normal(size=shape).astype("float32")


@pytest.mark.parametrize("layer", ["spectral", "stateful", "global seed"])
def test_layers_that_assign_to_what_is_no_state_are_refused(layer):
    """The normalized kernel, the recurrent memory and the seed were silently dropped."""
    if layer == "stateful":
        x = keras.Input(batch_shape=(4, 3, 2))
        model = keras.Model(x, L.Dense(2)(L.LSTM(4, stateful=True, name="inner")(x)))
        x = normal(8, 3, 2)
    else:
        inner = (
            L.SpectralNormalization(L.Dense(4))
            if layer == "spectral"
            else L.Lambda(keras.random.dropout, arguments={"rate": 0.5})
        )
        model, x = one_layer(inner), normal(8, 4)
    pm = pipetrain.PipelineModel(model, stages=2, scheme="1f1b", microbatches=1)
    pm.compile("sgd", "mse")
    with pytest.raises(ValueError, match=r"assigns, while it runs.*Received: variable.*Try"):
        pm.fit(x, normal(8, 2), batch_size=4, verbose=0)


class Centering(L.Layer):
    def build(self, shape):
        self.mean = self.add_weight(shape=shape[1:], initializer="zeros", trainable=False)

    def call(self, x):
        self.mean.assign(0.9 * self.mean + 0.1 * keras.ops.mean(x, axis=0))
        return x - self.mean


def test_no_gradient_flows_through_what_a_layer_assigns():
    x, y, weights = normal(32, 4), normal(32, 2), []
    for pipeline in (False, True):
        model = one_layer(Centering())
        if pipeline:
            model = pipetrain.PipelineModel(model, stages=3, scheme="1f1b", microbatches=1)
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
        fit(model, x, y, batch_size=8)
        weights.append(model.get_weights())
    networks.assert_close(weights[1], weights[0], 1e-5)


class Inner(L.Layer):
    """tanh(x @ w), inside a tf.function or not."""

    def __init__(self, wrap, **settings):
        super().__init__(**settings)
        self._call = tf.function(lambda x, w: tf.tanh(x @ w), autograph=False) if wrap else lambda x, w: tf.tanh(x @ w)

    def build(self, shape):
        self.w = self.add_weight(shape=(shape[-1], 4), initializer=keras.initializers.GlorotUniform(seed=1))

    def call(self, x):
        return self._call(x, tf.convert_to_tensor(self.w))


def test_backward_reads_its_own_weights_inside_a_function_too():
    """They were taken from forward, so that vanilla trained as weight stashing does."""
    x, y, weights = normal(80, 4), normal(80, 2), []
    for wrap in (False, True):
        keras.utils.set_random_seed(0)
        layers = [keras.Input((4,)), Inner(wrap, name="a"), Inner(wrap, name="b"), L.Dense(2)]
        pm = pipetrain.PipelineModel(keras.Sequential(layers), cuts=("a", "b"), scheme="vanilla")
        pm.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
        fit(pm, x, y, batch_size=8)
        weights.append(pm.get_weights())
    networks.assert_close(weights[1], weights[0], 1e-6)


def test_profile_of_a_model_that_folds_its_batch():
    x = keras.Input((8, 8, 4))
    windows = keras.ops.reshape(x, (-1, 16, 4))
    inner = L.Dense(4, name="inner")(windows)
    model = keras.Model(x, L.Dense(2)(L.Flatten()(keras.ops.reshape(inner, (-1, 8, 8, 4)))))
    profile = pipetrain.profile(model, batch_size=3, verbose=False)
    sizes = {block.name: block.output_bytes for block in profile.blocks}
    assert sizes["inner"] == 3 * 8 * 8 * 4 * 4


def test_a_cut_after_a_layer_of_another_type_than_it_says():
    """One-hot lookups declare float32 and give int64."""
    x = keras.Input((1,), dtype="int32")
    encoded = L.IntegerLookup(vocabulary=[1, 2, 3], output_mode="one_hot", name="look")(x)
    pm = pipetrain.PipelineModel(keras.Model(x, L.Dense(2)(encoded)), cuts=("look",), scheme="vanilla")
    pm.compile("sgd", "mse")
    assert np.isfinite(fit(pm, np.arange(20)[:, None] % 4, normal(20, 2), batch_size=5).history["loss"]).all()


def test_dictionaries_of_inputs_go_by_the_models_own_keys():
    a, b = keras.Input((2,), name="b"), keras.Input((2,), name="a")  # named after each other's key
    model = keras.Model({"a": a, "b": b}, L.Dense(1)(L.Concatenate()([a, 2 * b])))
    x, y = {"a": normal(16, 2), "b": 3 + normal(16, 2)}, normal(16, 1)
    pm = pipetrain.PipelineModel(keras.models.clone_model(model), stages=2, scheme="1f1b", microbatches=1)
    pm.set_weights(model.get_weights())
    losses = []
    for each in (model, pm):
        each.compile(keras.optimizers.SGD(0.01), "mse")
        losses.append(fit(each, x, y, batch_size=8).history["loss"])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
    with pytest.raises(ValueError, match=r"missing: \['b'\].*Received: x with \['a', 'c'\]"):
        fit(pm, {"a": x["a"], "c": x["b"]}, y)


@pytest.mark.parametrize("reduce", ["sum", "mean", "max"])
def test_losses_that_are_functions_of_all_rows(reduce):
    """A sum was taken for a mean, so that gradients were too small by the number of microbatches."""
    x, y, weights = normal(42, 4), normal(42, 2), []

    def loss(y, outputs):
        return getattr(keras.ops, reduce)(keras.ops.square(y - outputs))

    for pipeline in (False, True):
        model = one_layer(L.ReLU())
        if pipeline:
            model = pipetrain.PipelineModel(model, stages=2, scheme="1f1b", microbatches=3)
        model.compile(keras.optimizers.SGD(0.001), loss)
        if reduce == "max" and pipeline:
            with pytest.raises(ValueError, match="cannot be put together"):
                fit(model, x, y, batch_size=8)
            return
        fit(model, x, y, batch_size=8)
        weights.append(model.get_weights())
    networks.assert_close(weights[1], weights[0], 1e-5)


def test_refusals_of_models_cuts_and_labels_say_what_to_do():
    x = keras.Input((4,))
    with pytest.raises(ValueError, match=r"nothing to cut.*Received: model="):
        pipetrain.PipelineModel(keras.Model(x, x))
    with pytest.raises(ValueError, match=r"cuts='first'.*Try cuts=\('first',\)"):
        pipetrain.PipelineModel(one_layer(L.ReLU()), cuts="first")
    pm = pipetrain.PipelineModel(one_layer(L.ReLU()), stages=2, scheme="vanilla")
    pm.compile("sgd", "mse")
    with pytest.raises(ValueError, match=r"The loss cannot be computed.*Received: y of shape \(None, 3\)"):
        fit(pm, normal(8, 4), normal(8, 3))


class Quiet(L.Layer):
    """Inner layers that behave otherwise in training, of which ``call`` does not know."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.normal, self.drop = L.BatchNormalization(momentum=0.5), L.Dropout(0.5, seed=3)

    def call(self, x):
        return self.drop(self.normal(x))


def test_layers_inside_layers_know_that_they_train():
    x, y, weights = normal(32, 4), normal(32, 2), []
    for pipeline in (False, True):
        model = one_layer(Quiet())
        if pipeline:
            model = pipetrain.PipelineModel(model, stages=3, scheme="1f1b", microbatches=1)
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
        fit(model, x, y, batch_size=8)
        weights.append(model.get_weights())
    networks.assert_close(weights[1], weights[0], 1e-5)


@pytest.mark.parametrize(
    ("width", "devices"),
    [(8, 3), pytest.param(16, 3, marks=pytest.mark.slow), pytest.param(8, 2, marks=pytest.mark.slow)],
)
def test_data_parallel_trains_one_model_after_another_on_batches_that_do_not_divide(width, devices):
    """The second strategy of a process met the first one's collective operations."""
    x, y = networks.data(70)
    names = [f"CPU:{n}" for n in range(devices)]
    pm = pipetrain.PipelineModel(networks.mlp(width=width), scheme="data-parallel", devices=names)
    pm.compile(keras.optimizers.SGD(0.05), networks.crossentropy(), metrics=["accuracy"])
    history = pm.fit(x, y, batch_size=16, epochs=2, validation_data=(x, y), verbose=0).history
    assert history["loss"][1] < history["loss"][0]


@pytest.mark.parametrize("scheme", ["keras", "1f1b", "spectrain"])
def test_the_count_of_steps_is_the_user_s_to_set(scheme):
    """Reading the weights put back the pipeline's own count."""
    x, y = networks.data(80)
    model = networks.fresh(scheme)
    fit(model, x, y)
    model.optimizer.iterations.assign(100)
    model.get_weights()
    assert int(model.optimizer.iterations) == 100
    fit(model, x, y)
    assert int(model.optimizer.iterations) == 104


@pytest.mark.parametrize("scheme", ["keras", "1f1b"])
def test_an_interrupted_fit_counts_its_steps(scheme):
    x, y = networks.data(80)

    def interrupt(batch, logs):
        if batch == 2:
            raise KeyboardInterrupt

    model = networks.fresh(scheme)
    with pytest.raises(KeyboardInterrupt):
        fit(model, x, y, callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=interrupt)])
    assert int(model.optimizer.iterations) == 3
    fit(model, x, y)
    assert int(model.optimizer.iterations) == 7


def test_layers_frozen_anew_keep_their_own_momentum():
    """The optimizer's slots go with their layers, whichever are trained."""
    model = networks.mlp(depth=4)
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    pm = pipetrain.PipelineModel(model, stages=2, scheme="1f1b")
    for frozen in ("d1", "d2"):
        for layer in model.layers:
            layer.trainable = layer.name != frozen
        pm.compile(optimizer, loss=networks.crossentropy())
        if frozen == "d2":
            optimizer.learning_rate = 0.0
            before = [weight.numpy() for weight in model.get_layer("d1").weights]
        x, y = networks.data(32)
        pm.fit(x, y, batch_size=16, verbose=0)
    networks.assert_equal([weight.numpy() for weight in model.get_layer("d1").weights], before)


def test_train_on_batch_within_fit_is_refused():
    pm = networks.pipeline()
    x, y = networks.data(64)
    again = keras.callbacks.LambdaCallback(on_train_batch_end=lambda step, logs: pm.train_on_batch(x, y))
    with pytest.raises(RuntimeError, match="train_on_batch within fit"):
        pm.fit(x, y, batch_size=16, verbose=0, callbacks=[again])
    pm.train_on_batch(x, y)


def test_evaluating_within_predict():
    pm = networks.pipeline()
    x, y = networks.data(32)
    look = keras.callbacks.LambdaCallback(on_predict_batch_end=lambda step, logs: pm.evaluate(x, y, verbose=0))
    np.testing.assert_allclose(pm.predict(x, verbose=0, callbacks=[look]), pm.model.predict(x, verbose=0), rtol=1e-5)


def test_data_parallelism_reads_a_shuffled_data_set_from_its_beginning():
    """Its first batch was read before training, for its shapes: a data set that shuffles anew then began otherwise."""
    x, y = networks.data(96)
    losses = {}
    for scheme in ("single", "data-parallel"):
        model = pipetrain.PipelineModel(networks.small(), scheme=scheme, devices=("CPU:0", "CPU:1"))  # and a new seed
        model.compile(keras.optimizers.SGD(0.0), networks.crossentropy())
        data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(96, seed=3, reshuffle_each_iteration=True)
        losses[scheme] = []
        seen = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs, seen=losses[scheme]: seen.append(float(logs["loss"]))
        )
        model.fit(data.batch(16), epochs=2, verbose=0, callbacks=[seen])
    np.testing.assert_allclose(losses["data-parallel"], losses["single"], rtol=1e-5)


def test_a_failed_hand_back_leaves_the_model_as_it_was(monkeypatch):
    """A worker that died then left some stages' weights newer than the others'."""
    x, y = networks.data(80)
    pm = networks.pipeline(scheme="vanilla")
    fit(pm, x, y)
    before, original = pm.get_weights(), Stage.outcome

    def broken(self, others):
        if self is pm._strategy._stages.replicas[-1][0]:
            raise InterruptedError
        return original(self, others)

    with monkeypatch.context() as patch, pytest.raises(InterruptedError):
        patch.setattr(Stage, "outcome", broken)
        fit(pm, x, y)
    networks.assert_equal(pm.get_weights(), before)
    assert int(pm.optimizer.iterations) == 4
    fit(pm, x, y)
    assert int(pm.optimizer.iterations) == 8


class Positions(L.Layer):
    """Adds to each word's vector one that is learnt for its place."""

    def build(self, shape):
        self.table = self.add_weight(shape=shape[1:], initializer="uniform", name="table")

    def call(self, x):
        return x + keras.ops.take(self.table, keras.ops.arange(x.shape[1]), axis=0)


@pytest.mark.parametrize("settings", [{"microbatches": 4}, {"microbatches": 2, "replicas": (3, 1)}])
def test_rows_that_all_microbatches_share_are_summed(settings):
    """Adam squared the gradient of each microbatch, and each replica, for itself."""

    def model():
        keras.utils.set_random_seed(0)
        layers = [L.Embedding(7, 4), Positions(name="positions"), L.Flatten(), L.Dense(3)]
        return keras.Sequential([keras.Input((5,), dtype="int32"), *layers])

    x, y = np.random.default_rng(0).integers(0, 7, (40, 5)), np.arange(40) % 3
    plain, pm = model(), pipetrain.PipelineModel(model(), cuts=("positions",), scheme="gpipe", **settings)
    for each in (plain, pm):
        each.compile(keras.optimizers.Adam(0.01), networks.crossentropy())
        fit(each, x, y)
    networks.assert_close(pm.get_weights(), plain.get_weights())


class Reversal(L.Layer):
    """Turns the gradient round, so many times as strong."""

    def __init__(self, strength):
        super().__init__()
        self.strength = strength

    def call(self, x):
        @tf.custom_gradient
        def turned(x):
            return tf.identity(x), lambda gradient: -gradient * tf.convert_to_tensor(self.strength)

        return turned(x)


@pytest.mark.parametrize("make", [tf.constant, tf.Variable])
@pytest.mark.parametrize("scheme", ["1f1b", "spectrain"])
def test_a_custom_gradient_reads_what_is_no_weight_of_a_layer(make, scheme):
    """Cutting failed: AttributeError, Tensor.op is undefined when eager execution is enabled."""

    def model(strength):
        keras.utils.set_random_seed(0)
        layers = [L.Dense(8), Reversal(strength), L.Dense(6, "relu", name="middle"), Reversal(strength), L.Dense(5)]
        return keras.Sequential([keras.Input((12,)), *layers])

    x, y = networks.data(60)
    strengths = make(0.5), make(0.5)
    plain = model(strengths[0])
    pm = pipetrain.PipelineModel(model(strengths[1]), cuts=("middle",), scheme=scheme, microbatches=1)
    batch_size = 20 if scheme == "1f1b" else 60  # all at once: an update of what is not stale
    for each, strength in zip((plain, pm), strengths, strict=True):
        each.compile(keras.optimizers.SGD(0.1, momentum=0.9), networks.crossentropy())
        each.fit(x, y, batch_size=batch_size, verbose=0, shuffle=False)
        if make is tf.Variable:
            strength.assign(2.0)
        each.fit(x, y, batch_size=batch_size, verbose=0, shuffle=False)
    networks.assert_close(pm.get_weights(), plain.get_weights())
