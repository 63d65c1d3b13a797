"""Models with a preprocessor of their own, as task models of keras_hub are: ``fit`` takes what theirs takes."""

from __future__ import annotations

import keras
import networks
import numpy as np
import parameters
import pytest
import tensorflow as tf
from keras import layers as L

import pipetrain
from pipetrain.frontend import input_data

FIGURES, CLASSES, ROWS, BATCH = 4, 3, 40, 8


class Task(keras.Model):
    """A Functional model whose own training begins with numbers written as words."""

    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.preprocessor = True

    def preprocess_samples(self, x, y=None, sample_weight=None):
        read = tf.strings.to_number(tf.strings.split(x, " ").to_tensor(shape=[None, FIGURES]))
        return keras.utils.pack_x_y_sample_weight(read, y, sample_weight)


def task():
    keras.utils.set_random_seed(0)
    inputs = keras.Input((FIGURES,))
    h = L.Dense(8, activation="tanh", name="first")(inputs)
    return Task(inputs, L.Dense(CLASSES, name="second")(h))


def compiled(model):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, weighted_metrics=["accuracy"])
    return model


def data():
    rng = np.random.default_rng(0)
    figures = rng.normal(size=(ROWS, FIGURES)).astype("float32")
    words = np.array([" ".join(map(repr, map(float, row))) for row in figures])
    return figures, words, figures.argmax(axis=1) % CLASSES, rng.uniform(0.5, 1.5, ROWS).astype("float32")


@pytest.mark.wide
@pytest.mark.parametrize("as_dataset", parameters.by_default([False, True], True))
def test_words_train_as_the_figures_that_the_preprocessor_makes_of_them(as_dataset):
    figures, words, y, weights = data()
    plain = compiled(keras.Model(*(lambda model: (model.inputs, model.outputs))(task())))
    wanted = plain.fit(figures, y, BATCH, 2, 0, shuffle=False, sample_weight=weights, validation_data=(figures, y))
    pm = compiled(pipetrain.PipelineModel(task(), 2, "1f1b"))
    minibatches = tf.data.Dataset.from_tensor_slices((words, y, weights)).batch(BATCH)
    given = (minibatches,) if as_dataset else (words, y, BATCH)
    settings = {} if as_dataset else {"sample_weight": weights}
    history = pm.fit(*given, epochs=2, verbose=0, validation_data=(words, y), **settings)
    for name, values in wanted.history.items():
        np.testing.assert_allclose(history.history[name], values, rtol=1e-5, err_msg=name)
    networks.assert_close(pm.get_weights(), plain.get_weights())
    np.testing.assert_allclose(pm.evaluate(words, y, BATCH, 0), plain.evaluate(figures, y, BATCH, 0), rtol=1e-5)
    np.testing.assert_allclose(pm.predict(words, BATCH, 0), plain.predict(figures, BATCH, 0), rtol=1e-4, atol=1e-6)
    one = slice(BATCH)
    ours, theirs = ((m.train_on_batch(x[one], y[one], weights[one])) for m, x in ((pm, words), (plain, figures)))
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    ours, theirs = ((m.test_on_batch(x[one], y[one])) for m, x in ((pm, words), (plain, figures)))
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)


@pytest.mark.wide
@pytest.mark.parametrize("kind", [np.asarray, list])
def test_the_last_rows_are_split_off_as_in_keras(kind):
    figures, words, y, weights = data()
    settings = {"batch_size": BATCH, "epochs": 2, "verbose": 0, "sample_weight": weights, "validation_split": 0.3}
    plain = compiled(keras.Model(*(lambda model: (model.inputs, model.outputs))(task())))
    wanted = plain.fit(figures, y, shuffle=False, **settings).history
    found = compiled(pipetrain.PipelineModel(task(), 2, "1f1b")).fit(kind(words), y, **settings).history
    assert "val_loss" in found
    for name, values in wanted.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-5, err_msg=name)


def test_validation_data_may_be_texts_alone():
    """As for tasks that make their labels of them."""
    words = data()[1]
    given = {"x": words, "y": None, "sample_weight": None, "batch_size": 8, "validation_split": 0.0}
    made = input_data.fit_arguments(task(), {**given, "validation_data": words[:3]})
    (read,) = made["validation_data"]
    assert read.shape == (3, FIGURES)


def test_what_a_data_set_has_of_its_own_is_not_given_beside_it():
    _, words, y, weights = data()
    pm = compiled(pipetrain.PipelineModel(task(), 2, "1f1b"))
    minibatches = tf.data.Dataset.from_tensor_slices((words, y)).batch(BATCH)
    with pytest.raises(ValueError, match=r"x=Dataset and y\. Try leaving it out"):
        pm.fit(minibatches, y, verbose=0)
    with pytest.raises(ValueError, match=r"x=Dataset and sample_weight"):
        pm.evaluate(minibatches, sample_weight=weights, verbose=0)
    with pytest.raises(ValueError, match=r"cannot be split.*validation_split=0\.5.*Try validation_data"):
        pm.fit(minibatches, validation_split=0.5, verbose=0)
