"""Ragged and sparse tensors cross no cut: what makes and what reads them is one block."""

from __future__ import annotations

import keras
import networks
import numpy as np
import parameters
import pytest
import random_models
import tensorflow as tf

import pipetrain
from pipetrain.compute.graph.blocks import Chain

L = keras.layers


class Undeclared(L.Layer):
    """Ragged, without saying so; what reads it takes dense tensors as well."""

    def call(self, x):
        return tf.RaggedTensor.from_tensor(x)


class Total(L.Layer):
    def call(self, x):
        return tf.reduce_sum(x, axis=1)

    def compute_output_spec(self, x):
        return keras.KerasTensor((x.shape[0], x.shape[2]), "float32")


class Sparse(L.Layer):
    def call(self, x):
        return tf.sparse.from_dense(x)


def declared(x):
    return random_models.Dense(name="read")(random_models.Ragged(name="made")(x))


def undeclared(x):
    return L.RepeatVector(3)(Total(name="read")(Undeclared(name="made")(x)))


def through_keras(x):
    """A layer of Keras' own stands between."""
    return L.RepeatVector(3)(Total(name="read")(L.Identity(name="between")(Undeclared(name="made")(x))))


def sparse(x):
    y = Sparse(name="made")(L.Flatten()(x))
    return L.Reshape((3, 4))(L.Dense(12, name="read")(y))


def beside(x):
    """Other layers run between what makes the tensor and what reads it."""
    ragged = random_models.Ragged(name="made")(x)
    other = L.Dense(4, "tanh", name="other")(x)
    return L.Add()([random_models.Dense(name="read")(ragged), other])


KINDS = [declared, undeclared, through_keras, sparse, beside]


def model(kind):
    keras.utils.set_random_seed(0)
    x = keras.Input((networks.FEATURES,))
    y = kind(L.Reshape((3, 4))(L.Dense(12, "tanh", name="first")(x)))
    return keras.Model(x, L.Dense(networks.CLASSES, name="last")(L.Flatten()(y)))


def trained(built, **settings):
    if settings:
        built = networks.in_way(built, **settings)
    built.compile(keras.optimizers.SGD(0.05, momentum=0.9), networks.crossentropy())
    networks.fit(built, *networks.data(100))
    return built.get_weights()


@pytest.mark.wide
@pytest.mark.parametrize("kind", parameters.by_default(KINDS, declared, sparse, beside))
def test_models_with_such_tensors_are_cut_around_them(kind):
    built = model(kind)
    blocks = Chain(built).blocks
    (together,) = [block for block in blocks if len(block.calls) > 1]
    assert {"made", "read"} <= {call.name for call in together.calls}
    expected = trained(model(kind))
    how = {"stages": len(blocks)} if kind is sparse else {"cuts": tuple(block.name for block in blocks[:-1])}
    networks.assert_close(trained(built, scheme="1f1b", **how), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_cut_there_is_refused_by_name(kind):
    what = "sparse" if kind is sparse else "ragged"
    with pytest.raises(ValueError, match=f"No cut can be made after 'made': what 'made' makes is {what}.*Try 'read'"):
        pipetrain.PipelineModel(model(kind), cuts=("made",), scheme="spectrain")


@pytest.mark.parametrize(("layer", "remedy"), [(Undeclared, "to_tensor"), (Sparse, "to_dense")])
def test_an_output_of_that_kind_is_refused_by_name(layer, remedy):
    x = keras.Input((4, 2))
    with pytest.raises(ValueError, match=f"output of a model that is cut must be dense.*'made'.*{remedy}"):
        pipetrain.PipelineModel(keras.Model(x, layer(name="made")(L.Dense(2)(x))), stages=1, scheme="spectrain")


def test_models_without_such_tensors_are_not_traced_for_them(monkeypatch):
    monkeypatch.setattr(tf, "function", None)
    assert len(Chain(networks.mlp()).blocks) == 6


def test_what_keras_wrongly_declares_sparse_is_not():
    x = keras.Input((networks.FEATURES,))
    doubled = keras.ops.sin(L.Dense(4, name="first")(x)) * 2.0
    assert doubled.sparse
    assert all(len(block.calls) == 1 for block in Chain(keras.Model(x, L.Dense(2)(doubled))).blocks)


def test_lookups_that_make_ragged_tensors_are_seen():
    x = keras.Input((1,), dtype="string")
    words = L.TextVectorization(output_mode="int", ragged=True, vocabulary=["a", "b"], name="words")(x)
    try:
        built = keras.Model(x, L.Dense(2)(Total(name="read")(L.Embedding(4, 3, name="embedding")(words))))
    except Exception as error:  # this Keras does not take it either
        pytest.skip(f"plain Keras: {error}")
    names = [[call.name for call in block.calls] for block in Chain(built).blocks]
    assert ["words", "embedding", "read"] in names


@pytest.mark.wide
def test_predictions_are_those_of_plain_keras():
    built = model(beside)
    pm = pipetrain.PipelineModel(built, stages=3, scheme="spectrain")
    x, _ = networks.data(50)
    np.testing.assert_allclose(pm.predict(x, verbose=0), built.predict(x, verbose=0), atol=1e-6)
