"""What is trained changes between fits, or within: as in plain Keras it takes effect with ``compile``, everywhere."""

from __future__ import annotations

import keras
import networks
import numpy as np
import parameters
import pytest

L = keras.layers
X, Y = networks.data(60)
WAYS = {
    "1f1b": {"scheme": "1f1b", "microbatches": 1, "cuts": ("norm",)},
    "gpipe": {"scheme": "gpipe", "microbatches": 1, "cuts": ("base",)},
    "single": {"scheme": "single"},
    "all-reduce": {"scheme": "all-reduce", "stages": 1, "order": "none"},
    "parameter-server": {"scheme": "parameter-server", "stages": 1, "order": "none"},
}


def model_of():
    """A base model with statistics and penalties, and a head."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((networks.FEATURES,))
    h = L.Dense(8, "tanh", kernel_regularizer="l2", name="first")(inputs)
    base = keras.Model(inputs, L.BatchNormalization(name="norm")(h), name="base")
    x = keras.Input((networks.FEATURES,))
    return keras.Model(x, L.Dense(networks.CLASSES, kernel_regularizer="l2", name="head")(base(x)))


def compiles(model, optimizer=None, metrics=("accuracy",)):
    optimizer = optimizer or keras.optimizers.SGD(0.05, momentum=0.9)
    model.compile(optimizer, networks.crossentropy(), metrics=list(metrics))


def fits(model, **settings):
    history = networks.fit(model, X, Y, validation_data=(X[:40], Y[:40]), **settings).history
    names = [name for name in sorted(history) if "loss" in name or "accuracy" in name]  # others are of the pipeline
    return [value for name in names for value in history[name]]


def looks(model):
    """Losses and outputs of evaluations, whose penalties depend on what is trained."""
    losses = model.evaluate(X, Y, verbose=0, return_dict=True)
    return [*losses.values(), model.predict(X[:20], verbose=0)]


def base(model):
    return getattr(model, "inner", model).get_layer("base")


def refrozen(model):
    base(model).trainable = False
    compiles(model)
    seen = [*fits(model), *looks(model)]
    base(model).trainable = True
    compiles(model)
    seen += [*fits(model), *looks(model)]
    base(model).get_layer("norm").trainable = False
    compiles(model, metrics=())
    return [*seen, *fits(model), *looks(model)]


def frozen_without_compile(model):
    compiles(model)
    seen = fits(model)
    base(model).trainable = False
    return [*seen, *fits(model), *looks(model)]


def unfrozen_without_compile(model):
    base(model).trainable = False
    compiles(model)
    seen = [*fits(model), *looks(model)]
    base(model).trainable = True
    seen += fits(model)
    compiles(model)
    return [*seen, *fits(model), *looks(model)]


def frozen_in_a_callback(model):
    compiles(model)

    def freeze(epoch, logs):
        base(model).trainable = epoch != 1

    return fits(model, epochs=3, callbacks=[keras.callbacks.LambdaCallback(on_epoch_begin=freeze)])


def frozen_within_an_epoch(model):
    compiles(model)

    def freeze(batch, logs):
        base(model).get_layer("first").trainable = batch != 1

    return fits(model, epochs=2, callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=freeze)])


def frozen_before_the_first_step(model):
    """Keras looks when it traces its first step."""
    compiles(model)

    def freeze(logs):
        base(model).trainable = False

    return [*fits(model, callbacks=[keras.callbacks.LambdaCallback(on_train_begin=freeze)]), *looks(model)]


def adapted(model):
    compiles(model)
    seen = [*fits(model), *looks(model)]
    first = base(model).get_layer("first")
    first.enable_lora(2)
    values = np.random.default_rng(0)
    for weight in (first.lora_kernel_a, first.lora_kernel_b):
        weight.assign(values.normal(size=weight.shape))
    compiles(model)
    return [*seen, *fits(model), *looks(model)]


def in_another_precision(model):
    compiles(model)
    seen = looks(model)
    model.get_layer("head").dtype_policy = keras.DTypePolicy("mixed_bfloat16")
    compiles(model)
    return [*seen, *looks(model)]


def other_metrics(model):
    compiles(model, metrics=())
    seen = [*fits(model), *looks(model)]
    compiles(model, model.optimizer, metrics=["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2)])
    return [*seen, *fits(model), *looks(model)]


def loaded(model, path="/tmp/never"):
    compiles(model)
    weights = model.get_weights()
    seen = [*fits(model), *looks(model)]
    model.set_weights(weights)
    model.reset_metrics()
    return [*seen, *looks(model), *fits(model)]


PHASES = [refrozen, frozen_without_compile, unfrozen_without_compile, frozen_in_a_callback, frozen_within_an_epoch]
PHASES += [frozen_before_the_first_step, adapted, in_another_precision, other_metrics, loaded]
OFTEN = [("1f1b", each) for each in (refrozen, frozen_without_compile, frozen_before_the_first_step)]
OFTEN += [("all-reduce", adapted), ("1f1b", frozen_in_a_callback), ("single", unfrozen_without_compile)]


@pytest.mark.wide
@pytest.mark.parametrize(("way", "phases"), parameters.combinations(list(WAYS), PHASES, default=OFTEN))
def test_equal_to_plain_keras(way, phases):
    results = []
    for settings in (None, WAYS[way]):
        model = model_of()
        fitted = model if settings is None else networks.in_way(model, **settings)
        results.append([*phases(fitted), *fitted.get_weights()])
    tolerance = 0.05 if phases is in_another_precision else 1e-5
    for got, want in zip(results[1], results[0], strict=True):
        np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("way", parameters.by_default(WAYS, "1f1b"))
def test_what_would_have_to_be_traced_anew_is_refused(way):
    """With sample weights Keras traces its step again, and follows what is trainable then."""
    model = model_of()
    pm = networks.in_way(model, **WAYS[way])
    compiles(pm)
    networks.fit(pm, X, Y)
    before = pm.get_weights()
    base(pm).get_layer("first").trainable = False
    with pytest.raises(ValueError, match=r"changed after compile.*Received: 'first' with trainable=False.*Try compile"):
        networks.fit(pm, X, Y, sample_weight=np.ones(60))
    networks.assert_equal(pm.get_weights(), before)
    compiles(pm)
    networks.fit(pm, X, Y, sample_weight=np.ones(60))
    networks.assert_equal(pm.get_weights()[:2], before[:2])
