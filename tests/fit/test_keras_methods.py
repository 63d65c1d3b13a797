"""All that Keras lets one call on a model, or override in a model, a layer or an optimizer, and what becomes of it.

These tests go through ``dir``: what a new version of Keras adds fails them until it is in a table.
"""

from __future__ import annotations

import functools
import inspect

import keras
import networks
import numpy as np
import parameters
import pytest

import pipetrain
from pipetrain.compute.keras_private import LOOP_METHODS, overridden
from pipetrain.compute.optimizer import clone
from pipetrain.frontend.refusals import REPLACED
from pipetrain.frontend.wrapped_model import ABSENT, COMPILED, DELEGATED, DRAINED, KEPT, OWN, PREDICTING

L = keras.layers
TABLES = {
    keras.Model: [DELEGATED, DRAINED, COMPILED, OWN, KEPT, ABSENT, PREDICTING, REPLACED],
    keras.optimizers.Optimizer: [
        clone.PER_WEIGHT,
        clone.WHOLE,
        clone.OF_COMPILED,
        clone.UNASKED,
        clone.NEVER,
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


@pytest.mark.wide
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


@pytest.mark.wide
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


@pytest.mark.wide
@pytest.mark.parametrize("scheme", ["1f1b", "all-reduce", "single"])
def test_whatever_keras_asks_of_an_optimizer_a_pipeline_asks_too(scheme):
    left_out = clone.WHOLE if scheme == "1f1b" else ()
    names = [name for name in of_keras(keras.optimizers.Adam) if name not in (*clone.NEVER, *left_out)]
    asked, asked_of_ours = set(), set()
    used(network(), spied(keras.optimizers.Adam, names, asked)(use_ema=True))
    used(wrapped(network(), scheme), spied(keras.optimizers.Adam, names, asked_of_ours)(use_ema=True))
    assert {"update_step", "learning_rate", "finalize_variable_values"} <= asked <= asked_of_ours


@pytest.mark.parametrize("name", clone.WHOLE)
def test_an_optimizer_that_looks_at_all_gradients_is_refused_where_none_is_given_them(name):
    if name not in dir(keras.optimizers.Optimizer):
        pytest.skip("this version of Keras has none")
    optimizer = spied(keras.optimizers.SGD, [name], set())(0.1)
    assert overridden(optimizer, clone.WHOLE) == [name]
    for scheme, servers in (("1f1b", None), ("spectrain", None), ("parameter-server", 2)):
        pm = networks.in_way(network(), scheme=scheme, stages=2, servers=servers)
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


@pytest.mark.wide
@pytest.mark.parametrize(("optimizer", "way"), parameters.combinations([Halved, UnitLength], list(WHOLE_WAYS)))
def test_an_optimizer_that_looks_at_all_gradients_is_given_them_where_one_has_all_weights(optimizer, way):
    models = []
    for make in (lambda model: model, lambda model: networks.in_way(model, **WHOLE_WAYS[way])):
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


@pytest.mark.parametrize("method", ["compile", "fit", "evaluate", "predict", "train_on_batch", "test_on_batch"])
def test_signatures_are_those_of_keras(method):
    """In Keras' order too; ``...`` stands for what the wrapped model's own ``compile`` has."""
    theirs = inspect.signature(getattr(keras.Model, method)).parameters
    mine = inspect.signature(getattr(pipetrain.PipelineModel, method)).parameters
    named = [name for name, each in theirs.items() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    assert [name for name, each in mine.items() if each.kind is not inspect.Parameter.VAR_KEYWORD] == named
    for name in named:
        assert mine[name].kind is theirs[name].kind
        assert mine[name].default in (theirs[name].default, ...)


@pytest.mark.wide
def test_arguments_by_position_are_keras_own():
    plain, ours = network(), network()
    ours.set_weights(plain.get_weights())
    losses = []
    for trained in (plain, wrapped(ours)):
        trained.compile("sgd", "mse", None, ["mae"], None, False, 1, "auto", True)
        trained.fit(X, Y, 8, 3, 0, None, 0.0, (X, Y), False, None, None, 1, None, None, 4, 2)
        losses.append((trained.history.epoch, trained.evaluate(X, Y, 8, 0, None, None, None, True)))
    assert losses[0][0] == losses[1][0] == [1, 2]
    assert losses[0][1] == pytest.approx(losses[1][1], rel=1e-5)


def trained_pair():
    """A plain model and one that a pipeline has trained, both compiled, with equal weights."""
    plain, ours = network(), network()
    pm = wrapped(ours)
    for each in (plain, pm):
        each.compile("sgd", "mse", metrics=["mae"])
        each.fit(X, Y, batch_size=8, verbose=0)
    plain.set_weights(pm.get_weights())
    return plain, pm


SAME = {  # what can be compared as it is
    "compute_dtype": lambda value: value,
    "dtype": lambda value: value,
    "dtype_policy": lambda value: value.name,
    "input": lambda value: value.shape,
    "input_dtype": lambda value: value,
    "input_spec": lambda value: [each.shape for each in keras.tree.flatten(value)],
    "jit_compile": lambda value: value,
    "layers": lambda value: [type(each) for each in value],
    "losses": lambda value: len(value),
    "metrics": lambda value: [each.name for each in value],
    "metrics_names": lambda value: value,
    "metrics_variables": lambda value: len(value),
    "non_trainable_variables": lambda value: len(value),
    "non_trainable_weights": lambda value: len(value),
    "output": lambda value: value.shape,
    "quantization_mode": lambda value: value,
    "run_eagerly": lambda value: value,
    "supports_masking": lambda value: value,
    "trainable": lambda value: value,
    "trainable_variables": lambda value: [each.shape for each in value],
    "trainable_weights": lambda value: [each.shape for each in value],
    "variable_dtype": lambda value: value,
    "variables": lambda value: [each.shape for each in value],
    "weights": lambda value: [each.shape for each in value],
}
OWN_PROPERTIES = {"compiled_metrics", "distribute_strategy", "distribute_reduction_method", "path"}  # not compared
CALLS = {
    "compute_loss": lambda model: float(model.compute_loss(X, Y, Y + 1)),
    "compute_mask": lambda model: model.compute_mask(X, None),
    "compute_metrics": lambda model: sorted(model.compute_metrics(X, Y, Y + 1)),
    "compute_output_shape": lambda model: model.compute_output_shape((3, 6)),
    "compute_output_spec": lambda model: model.compute_output_spec(keras.KerasTensor((3, 6))).shape,
    "count_params": lambda model: model.count_params(),
    "get_build_config": lambda model: model.get_build_config(),
    "get_compile_config": lambda model: sorted(model.get_compile_config()),
    "get_layer": lambda model: type(model.get_layer("first")),
    "get_metrics_result": lambda model: sorted(model.get_metrics_result()),
    "get_state_tree": lambda model: sorted(model.get_state_tree()),
    "get_weights": lambda model: [each.tolist() for each in model.get_weights()],
    "predict_on_batch": lambda model: np.asarray(model.predict_on_batch(X)).round(4).tolist(),
    "stateless_call": lambda model: (
        np.asarray(model.stateless_call(model.trainable_variables, model.non_trainable_variables, X)[0])
        .round(4)
        .tolist()
    ),
    "symbolic_call": lambda model: model.symbolic_call(keras.KerasTensor((3, 6))).shape,
    "test_step": lambda model: sorted(model.test_step((X, Y))),
    "to_json": lambda model: len(model.to_json()) > 100,
}


def test_what_keras_has_of_a_model_is_that_of_the_wrapped_one(tmp_path, capsys):
    plain, pm = trained_pair()
    properties = {
        name for name in of_keras(keras.Model) if isinstance(inspect.getattr_static(keras.Model, name), property)
    }
    assert {name for name in properties if not name.startswith("_")} == set(SAME) | OWN_PROPERTIES
    for name, seen in SAME.items():
        assert seen(getattr(pm, name)) == seen(getattr(plain, name)), name
    for name, call in CALLS.items():
        assert call(pm) == call(plain), name
    assert (pm.inputs, pm.input_shape) == (pm.model.inputs, (None, 6))
    pm.export(tmp_path / "exported", verbose=False)
    served = keras.layers.TFSMLayer(tmp_path / "exported", call_endpoint="serve")
    np.testing.assert_allclose(served(X), pm.predict(X, verbose=0), atol=1e-5)


@pytest.mark.parametrize("name", [*ABSENT, "pop", "add"])
def test_what_would_leave_stages_behind_is_refused_by_name(name):
    pm = wrapped(keras.Sequential([keras.Input((6,)), L.Dense(4, name="first"), L.Dense(2)]))
    with pytest.raises(ValueError, match=f"cannot be .*Received: {name} of '.*'. Try "):
        getattr(pm, name)(*(["int8"] if name == "quantize" else []))


class Tuned(keras.Model):
    """With a metric, an attribute, a method and a ``compile`` of its own."""

    def __init__(self, *arguments, **settings):
        super().__init__(*arguments, **settings)
        self.largest, self.factor = keras.metrics.Mean(name="largest"), 1.0

    def compile(self, optimizer="auto", loss="mae", *, factor=1.0, **settings):
        self.factor = factor
        super().compile(keras.optimizers.SGD(0.1) if optimizer == "auto" else optimizer, loss, **settings)

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        self.largest.update_state(self.factor * keras.ops.max(x))
        return super().compute_metrics(x, y, y_pred, sample_weight)

    def first_bias(self):
        return self.get_layer("first").bias.numpy()


class Look(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.seen = []

    def on_epoch_end(self, epoch, logs=None):
        self.seen.append(self.model.first_bias().tolist())


@pytest.mark.wide
@pytest.mark.parametrize("scheme", ["1f1b", "spectrain"])
def test_a_model_with_compile_metrics_and_methods_of_its_own(scheme):
    results = []
    for make in (lambda model: model, lambda model: wrapped(model, scheme)):
        keras.utils.set_random_seed(0)
        trained, look = make(model := network(Tuned)), Look()
        trained.compile(factor=2.0)
        history = trained.fit(X, Y, batch_size=16, epochs=2, shuffle=False, verbose=0, callbacks=[look]).history
        trained.factor = 3.0
        assert model.factor == trained.factor == 3.0
        results.append((history, look.seen, trained.evaluate(X, Y, verbose=0, return_dict=True)))
    (history, seen, found), (our_history, our_seen, our_found) = results
    assert history["largest"] == pytest.approx([2 * X.max()] * 2)
    assert {name: pytest.approx(values, rel=1e-4) for name, values in history.items()} == (
        networks.without_figures(our_history)
    )
    if scheme == "1f1b":
        np.testing.assert_allclose(our_seen, seen, rtol=1e-4, atol=1e-6)
    assert our_found == pytest.approx(found, rel=1e-4)


def test_a_model_that_is_compiled_already_trains_as_it_is():
    plain, ours = network(), network()
    ours.set_weights(plain.get_weights())
    for model in (plain, ours):
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", metrics=["mae"])
    pm = wrapped(ours)
    for each in (plain, pm):
        each.fit(X, Y, batch_size=8, shuffle=False, verbose=0)
    networks.assert_close(ours.get_weights(), plain.get_weights())
    assert pm.optimizer is ours.optimizer
    assert pm.evaluate(X, Y, verbose=0) == pytest.approx(plain.evaluate(X, Y, verbose=0), rel=1e-4)


def test_what_compile_refuses_is_not_trained_as_the_wrapped_model_was_compiled():
    model = network()
    model.compile("sgd", "mse")
    pm = wrapped(model)
    with pytest.raises(ValueError, match="steps_per_execution"):
        pm.compile("sgd", "mse", steps_per_execution=0)
    with pytest.raises(ValueError, match=r"compile\(\)"):
        pm.fit(X, Y, verbose=0)


@pytest.mark.parametrize("name", ["run_eagerly", "steps_per_execution"])
def test_another_way_to_run_steps_set_after_compile_is_refused(name):
    pm = wrapped(network())
    pm.compile("sgd", "mse")
    setattr(pm, name, 2)
    with pytest.raises(ValueError, match=name):
        pm.fit(X, Y, verbose=0)
