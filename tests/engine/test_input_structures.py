"""Inputs in whatever structure: taken as plain Keras takes them, or refused."""

from __future__ import annotations

import warnings

import keras
import networks
import numpy as np
import pytest
import tensorflow as tf
from networks import normal

import pipetrain
from pipetrain.frontend.input_data import checked_inputs

L = keras.layers
A, B, C = normal(16, 3), -normal(16, 3), np.zeros((16, 3), "float32")
A1 = A[:, :1]

STRUCTURES = {
    "list": lambda a, b: [a, b],
    "turned": lambda a, b: [b, a],
    "tuple": lambda a, b: (a, b),
    "dictionary": lambda a, b: {"a": a, "b": b},
    "turned dictionary": lambda a, b: {"b": b, "a": a},
    "other keys": lambda a, b: {"y": a, "x": b},
    "nested": lambda a, b: {"p": [a, b]},
    "mixed": lambda a, b: [a, {"b": b}],
    "turned and nested": lambda a, b: {"q": [a], "p": b},
}
GIVEN = {
    **{name: make(A, B) for name, make in STRUCTURES.items()},
    "more": [A, B, C],
    "fewer": [A],
    "one": A,
    "one more key": {"a": A, "b": B, "c": C},
    "one more key before": {"0": C, "a": A, "b": B},
    "one more of other keys": {"y": A, "x": B, "w": C},
    "one key less": {"a": A},
    "other case": {"A": A, "B": B},
    "keys in the list": [{"a": A}, {"b": B}],
    "lists in the list": [[A], [B]],
    "keys in the key": {"p": {"a": A, "b": B}},
    "both in one": [np.concatenate([A, B], 1)],
}
OF_ONE = {
    "plain": A,
    "list": [A],
    "tuple": (A,),
    "its name": {"a": A},
    "another key": {"k": A},
    "one more": {"a": A, "c": C},
    "one more before": {"0": C, "a": A},
    "one more of another": {"0": C, "k": A},
    "two": [A, B],
    "nested": {"a": [A]},
    "twice": [[A]],
    "nothing": [],
    "empty": {},
}


def of_two(structure):
    keras.utils.set_random_seed(0)
    a, b = keras.Input((3,), name="a"), keras.Input((3,), name="b")
    return keras.Model(STRUCTURES[structure](a, b), L.Dense(2)(L.Concatenate()([a, L.Dense(3)(b)])))


def of_one(structure, width=3):
    keras.utils.set_random_seed(0)
    if structure == "sequential":
        return keras.Sequential([keras.Input((width,), name="a"), L.Dense(2)])
    a = keras.Input((width,), name="a")
    given = {"plain": a, "list": [a], "its name": {"a": a}, "another key": {"k": a}}[structure]
    return keras.Model(given, L.Dense(2)(a))


def result_of(call):
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return np.asarray(call())
    except Exception as error:
        return error


def assert_taken_alike(model, x):
    """Whether it is taken: as Keras takes it, or not at all."""
    expected = result_of(lambda: model(keras.tree.map_structure(tf.constant, x)))
    flat = keras.Function(model.inputs, model.outputs)
    got = result_of(lambda: flat(checked_inputs(x, model))[0])
    if isinstance(got, Exception):
        assert isinstance(got, ValueError | TypeError), got
        assert "Received" in str(got)
        return False
    assert not isinstance(expected, Exception), f"Keras refuses it: {expected}"
    np.testing.assert_array_equal(got, expected)
    return True


@pytest.mark.parametrize("structure", STRUCTURES)
def test_two_inputs_are_taken_as_keras_takes_them_or_not_at_all(structure):
    model = of_two(structure)
    taken = [name for name, x in GIVEN.items() if assert_taken_alike(model, x)]
    assert structure in taken


@pytest.mark.parametrize("structure", ["plain", "list", "its name", "another key", "sequential"])
def test_so_is_one(structure):
    model = of_one(structure)
    taken = [name for name, x in OF_ONE.items() if assert_taken_alike(model, x)]
    assert ("plain" if structure == "sequential" else structure) in taken
    narrow = of_one(structure, width=1)
    for x in (A1, A1[:, 0], A1[..., None], A):
        assert_taken_alike(narrow, x)


def small():
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((6,)), L.Dense(4, "tanh", name="cut"), L.Dense(2)])


@pytest.mark.wide
def test_sparse_inputs_of_a_dense_model_are_made_dense_as_keras_does():
    sparse = pytest.importorskip("scipy.sparse")
    dense, y = np.maximum(normal(16, 6), 0), normal(16, 2)
    x = sparse.csr_matrix(dense)
    expected, pm = small(), pipetrain.PipelineModel(small(), cuts=("cut",), scheme="1f1b", microbatches=2)
    settings = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}
    for model in (expected, pm):
        model.compile(keras.optimizers.SGD(0.1), "mse")
        model.fit(x, y, **settings)
    networks.assert_close(pm.get_weights(), expected.get_weights(), 1e-6)
    given = tf.data.Dataset.from_tensor_slices((tf.sparse.from_dense(dense), y)).batch(8)
    np.testing.assert_allclose(pm.evaluate(x, y, verbose=0), expected.evaluate(given, verbose=0), rtol=1e-5)
    np.testing.assert_allclose(pm.predict(x, verbose=0), expected.predict(x, verbose=0), rtol=1e-5)


def test_a_sparse_input_and_one_that_is_left_out_are_refused_by_name():
    read = keras.Model(given := keras.Input((3,), sparse=True, name="words"), L.Dense(2)(given))
    with pytest.raises(ValueError, match=r"dense.*SparseTensor for 'words'"):
        checked_inputs(tf.sparse.from_dense(A), read)
    with pytest.raises(ValueError, match=r"must be given.*None for 'b'"):
        checked_inputs([A, None], of_two("list"))
