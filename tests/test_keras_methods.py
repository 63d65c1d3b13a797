"""All that Keras lets one call on a model, or override in a model, a layer or an optimizer, and what becomes of it.

These tests go through ``dir``: what a new version of Keras adds fails them until it is in a table.
"""

from __future__ import annotations

import functools
import inspect

import keras
import networks
import numpy as np
import pytest

import pipetrain
from pipetrain.compute.keras_private import LOOP_METHODS, overridden
from pipetrain.compute.optimizer import overrides
from pipetrain.frontend.keras_methods import ABSENT, COMPILED, DELEGATED, DRAINED, KEPT, OWN, PREDICTING, REPLACED

L = keras.layers
TABLES = {
    keras.Model: [DELEGATED, DRAINED, COMPILED, OWN, KEPT, ABSENT, PREDICTING, REPLACED],
    keras.optimizers.Optimizer: [
        overrides.PER_WEIGHT,
        overrides.WHOLE,
        overrides.OF_COMPILED,
        overrides.UNASKED,
        overrides.NEVER,
    ],
}


def of_keras(kind):
    """The names of the attributes that a class has from Keras, private ones included."""
    definers = {name: next(each for each in kind.__mro__ if name in vars(each)) for name in dir(kind)}
    names = [name for name, definer in definers.items() if definer.__module__.startswith("keras.")]
    return [name for name in names if not name.startswith(("__", "_api_export"))]


def spied(base, names, seen):
    """A subclass of ``base`` that does what it does, and notes what is called or read of these names in ``seen``."""

    def spy(name, own):
        def note(self, *arguments, **settings):
            seen.add(name)
            return own(self, *arguments, **settings)

        return note

    attributes = {}
    for name in names:
        own = inspect.getattr_static(base, name)
        if isinstance(own, property):
            attributes[name] = property(spy(name, own.fget), own.fset)
        elif inspect.isfunction(own):  # with Keras' signature, which Keras looks at
            attributes[name] = functools.wraps(own)(spy(name, own))
    return type(f"Own{base.__name__}", (base,), attributes)


X = np.random.default_rng(0).normal(size=(16, 6)).astype("float32")
Y = X[:, :2].copy()


def network(model=keras.Model, dense=L.Dense):
    x = keras.Input((6,))
    return model(x, dense(2, name="last")(dense(4, name="first")(x)))


FUNCTIONAL = type(network())


def used(trained, optimizer="sgd"):
    """Compiled, and asked for all that Keras' loops do."""
    trained.compile(optimizer, "mse", metrics=["mae"])
    trained.fit(X, Y, batch_size=8, epochs=2, verbose=0, validation_data=(X, Y))
    trained.evaluate(X, Y, verbose=0)
    trained.predict(X, verbose=0)
    trained.train_on_batch(X, Y)
    trained.test_on_batch(X, Y)
    trained.predict_on_batch(X)


def wrapped(model, scheme="1f1b"):
    cuts = None if scheme in ("single", "all-reduce") else ("first",)
    return pipetrain.PipelineModel(model, scheme=scheme, cuts=cuts)


@pytest.mark.parametrize("kind", TABLES, ids=lambda kind: kind.__name__)
def test_every_method_of_keras_is_in_one_table(kind):
    names = [name for name in of_keras(kind) if not name.startswith("_")]
    found = [name for table in TABLES[kind] for name in table]
    assert set(names) <= set(found), f"decide what becomes of {sorted(set(names) - set(found))}"
    assert len(found) == len(set(found))


@pytest.mark.parametrize("name", [*REPLACED, *LOOP_METHODS])
def test_what_a_pipeline_does_in_its_own_way_is_refused_where_it_is_overridden(name):
    if name not in dir(keras.Model):
        pytest.skip("this version of Keras has none")
    kind = spied(FUNCTIONAL, [name], set())
    with pytest.raises(TypeError, match=f"OwnFunctional overrides {name}. Try"):
        wrapped(network(kind))


def test_what_is_set_in_place_of_a_method_is_refused():
    model = network()
    model.train_step = lambda data: {}
    with pytest.raises(TypeError, match="overrides train_step"):
        wrapped(model)


@pytest.mark.parametrize("scheme", ["1f1b", "all-reduce"])
def test_whatever_else_keras_asks_of_a_model_a_pipeline_asks_too(scheme):
    names = [name for name in of_keras(keras.Model) if name not in REPLACED and name not in LOOP_METHODS]
    names = [name for name in names if not name.startswith("_") and name != "call"]  # the latter hides the layers
    asked, asked_of_ours = set(), set()
    model = network(spied(FUNCTIONAL, names, asked))
    asked.clear()
    used(model)
    model = network(spied(FUNCTIONAL, names, asked_of_ours))
    asked_of_ours.clear()
    used(wrapped(model, scheme))
    assert {"compute_metrics", "metrics", "predict_step", "compile"} <= asked
    assert asked <= asked_of_ours | {"dtype_policy", "jit_compile", "run_eagerly"}  # which the PipelineModel has itself


@pytest.mark.parametrize("scheme", ["1f1b", "all-reduce"])
def test_whatever_keras_asks_of_a_layer_a_pipeline_asks_too(scheme):
    asked, asked_of_ours = set(), set()
    model = network(dense=spied(L.Dense, of_keras(L.Layer), asked))
    asked.clear()
    used(model)
    model = network(dense=spied(L.Dense, of_keras(L.Layer), asked_of_ours))
    asked_of_ours.clear()
    used(wrapped(model, scheme))
    assert {"call", "compute_mask", "metrics", "trainable"} <= asked <= asked_of_ours


@pytest.mark.parametrize("scheme", ["1f1b", "all-reduce", "single"])
def test_whatever_keras_asks_of_an_optimizer_a_pipeline_asks_too(scheme):
    left_out = overrides.WHOLE if scheme == "1f1b" else ()
    names = [name for name in of_keras(keras.optimizers.Adam) if name not in (*overrides.NEVER, *left_out)]
    asked, asked_of_ours = set(), set()
    used(network(), spied(keras.optimizers.Adam, names, asked)(use_ema=True))
    used(wrapped(network(), scheme), spied(keras.optimizers.Adam, names, asked_of_ours)(use_ema=True))
    assert {"update_step", "learning_rate", "finalize_variable_values"} <= asked <= asked_of_ours


@pytest.mark.parametrize("name", overrides.WHOLE)
def test_an_optimizer_that_looks_at_all_gradients_is_refused_where_none_is_given_them(name):
    if name not in dir(keras.optimizers.Optimizer):
        pytest.skip("this version of Keras has none")
    optimizer = spied(keras.optimizers.SGD, [name], set())(0.1)
    assert overridden(optimizer, overrides.WHOLE) == [name]
    for scheme, servers in (("1f1b", None), ("spectrain", None), ("parameter-server", 2)):
        pm = pipetrain.PipelineModel(network(), scheme=scheme, stages=2, servers=servers)
        with pytest.raises(ValueError, match=f"OwnSGD, whose class overrides {name}. Try"):
            pm.compile(optimizer, "mse")
    wrapped(network(), "single").compile(optimizer, "mse")


class Halved(keras.optimizers.SGD):
    def apply_gradients(self, grads_and_vars):
        return super().apply_gradients([(0.5 * gradient, variable) for gradient, variable in grads_and_vars])


class UnitLength(keras.optimizers.SGD):
    def apply(self, grads, trainable_variables=None):
        length = keras.ops.sqrt(sum(keras.ops.sum(gradient**2) for gradient in grads))
        return super().apply([gradient / length for gradient in grads], trainable_variables)


WHOLE_WAYS = {
    "single": {"scheme": "single"},
    "one stage": {"scheme": "spectrain", "stages": 1},
    "all-reduce": {"scheme": "all-reduce", "order": "caramel"},
    "parameter-server": {"scheme": "parameter-server", "servers": 1},
    "coded-reduce": {"scheme": "coded-reduce", "children": 2},
    "grid": {"scheme": "grid", "grid": (1, 2)},
}


@pytest.mark.parametrize(("optimizer", "way"), networks.combinations([Halved, UnitLength], list(WHOLE_WAYS)))
def test_an_optimizer_that_looks_at_all_gradients_is_given_them_where_one_has_all_weights(optimizer, way):
    models = []
    for make in (lambda model: model, lambda model: pipetrain.PipelineModel(model, **WHOLE_WAYS[way])):
        keras.utils.set_random_seed(0)
        models.append(network())
        trained = make(models[-1])
        trained.compile(optimizer(0.1), "mse")
        trained.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    networks.assert_close(models[1].get_weights(), models[0].get_weights())


class Warm(keras.optimizers.SGD):
    """A learning rate of its own, that begins small."""

    @property
    def learning_rate(self):
        return self._get_current_learning_rate() * keras.ops.minimum(
            1.0, (keras.ops.cast(self.iterations, float) + 1) / 4
        )


class Unlike(keras.optimizers.SGD):
    def __init__(self, learning_rate=0.1, factor=1.0, **settings):
        super().__init__(learning_rate, **settings)
        self.factor = factor

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(self.factor * gradient, variable, learning_rate)


class Required(keras.optimizers.SGD):
    def __init__(self, factor):
        super().__init__(0.1)
        self.factor = factor


def test_a_learning_rate_of_the_optimizer_s_own_is_that_of_every_stage():
    models = []
    for make in (lambda model: model, wrapped):
        keras.utils.set_random_seed(0)
        models.append(network())
        trained = make(models[-1])
        trained.compile(Warm(0.1), "mse")
        trained.fit(X, Y, batch_size=4, epochs=2, shuffle=False, verbose=0)
    networks.assert_close(models[1].get_weights(), models[0].get_weights())


def test_optimizers_that_their_config_does_not_make_again_are_refused():
    pm = wrapped(network())
    with pytest.raises(ValueError, match=r"optimizer=Unlike, of which that leaves out factor. Try Unlike.get_config"):
        pm.compile(Unlike(factor=0.5), "mse")
    pm.compile(Unlike(), "mse")
    with pytest.raises(TypeError, match=r"optimizer=Required, for which that fails.*Try Required.get_config"):
        pm.compile(Required(2.0), "mse")
    sgd = keras.optimizers.SGD(0.1)
    sgd.update_step = lambda *_: None
    with pytest.raises(ValueError, match="leaves out update_step"):
        pm.compile(sgd, "mse")


def test_an_own_scale_of_the_loss_is_refused():
    optimizer = spied(keras.optimizers.SGD, ["scale_loss"], set())(0.1)
    with pytest.raises(ValueError, match=r"overrides scale_loss\. Try"):
        wrapped(network()).compile(optimizer, "mse")
