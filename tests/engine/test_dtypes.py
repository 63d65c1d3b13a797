"""What crosses a cut keeps its gradient, whatever its type."""

from __future__ import annotations

import keras
import networks
import numpy as np
import parameters
import pytest
import tensorflow as tf
from networks import fit, normal

import pipetrain
from pipetrain.schemes.table import NAMES

L = keras.layers
PIPELINES = [name for name in NAMES if name not in ("single", "data-parallel")]


class Cast(L.Layer):
    def __init__(self, to, **settings):
        super().__init__(autocast=False, **settings)
        self.to = to

    def call(self, x):
        if x.dtype.is_complex and not tf.as_dtype(self.to).is_complex:
            x = tf.math.real(x) + 2.0 * tf.math.imag(x)
        return tf.cast(x, self.to)


class Spectrum(L.Layer):
    """The Fourier transform as complex numbers, or as their real and their imaginary parts."""

    def __init__(self, parts=False, **settings):
        super().__init__(**settings)
        self.parts = parts

    def call(self, x):
        z = tf.signal.fft(tf.complex(x, tf.zeros_like(x)))
        return (tf.math.real(z), tf.math.imag(z)) if self.parts else z


class Power(L.Layer):
    def call(self, real, imaginary=None):
        if imaginary is None:
            real, imaginary = tf.math.real(real), tf.math.imag(real)
        return 0.1 * (real**2 + imaginary**2)


def spectral(parts=False):
    keras.utils.set_random_seed(0)
    x = keras.Input((networks.FEATURES,))
    z = Spectrum(parts, name="spectrum")(L.Dense(6, "tanh", name="first")(x))
    power = Power(name="power")(*z) if parts else Power(name="power")(z)
    return keras.Model(x, L.Dense(networks.CLASSES, name="last")(power))


def casting(dtype):
    keras.utils.set_random_seed(0)
    x = keras.Input((networks.FEATURES,))
    y = Cast("float32", name="back")(Cast(dtype, name="there")(L.Dense(6, "tanh", name="first")(x)))
    return keras.Model(x, L.Dense(networks.CLASSES, name="last")(y))


def trained(model, **settings):
    if settings:
        model = networks.in_way(model, **settings)
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), networks.crossentropy())
    networks.fit(model, *networks.data(120), batch_size=20)
    return model.get_weights()


@pytest.mark.wide
@pytest.mark.parametrize(
    ("dtype", "cuts"),
    parameters.combinations(
        ["complex64", "complex128", "float64", "float16", "bfloat16"],
        [("there",), ("first", "back")],
        default=[("float64", ("first", "back")), ("float16", ("there",))],
    ),
)
def test_types_that_have_gradients_cross_as_in_plain_keras(dtype, cuts):
    networks.assert_close(trained(casting(dtype), cuts=cuts, scheme="1f1b"), trained(casting(dtype)))


@pytest.mark.wide
@pytest.mark.parametrize("scheme", parameters.by_default(PIPELINES, "spectrain"))
def test_complex_numbers_train_as_their_parts_do_in_every_scheme(scheme):
    complex_numbers, parts = (
        trained(spectral(parts), cuts=("first", "spectrum"), scheme=scheme) for parts in (False, True)
    )
    networks.assert_close(complex_numbers, parts)
    first = spectral().get_weights()[0]
    assert np.abs(complex_numbers[0] - first).max() > 1e-3


@pytest.mark.wide
@pytest.mark.parametrize("scheme", parameters.by_default(["gpipe", "1f1b"], "1f1b"))
def test_complex_numbers_train_as_in_plain_keras(scheme):
    networks.assert_close(trained(spectral(), cuts=("spectrum",), scheme=scheme), trained(spectral()))


@pytest.mark.wide
def test_complex_numbers_cross_to_and_from_replicas():
    got = trained(spectral(), cuts=("spectrum",), scheme="1f1b", replicas=(2, 3))
    networks.assert_close(got, trained(spectral()))


@pytest.mark.wide
def test_whole_numbers_cross_and_carry_no_gradient_as_in_plain_keras():
    def model():
        keras.utils.set_random_seed(0)
        x = keras.Input((networks.FEATURES,))
        words = Cast("int32", name="words")(4.0 * L.Dense(6, "sigmoid", name="first")(x))
        flat = L.Reshape((18,))(L.Embedding(5, 3, name="embedding")(words))
        return keras.Model(x, L.Dense(networks.CLASSES, name="last")(flat))

    got, expected = trained(model(), cuts=("first", "words"), scheme="1f1b"), trained(model())
    networks.assert_close(got, expected)
    np.testing.assert_array_equal(got[0], model().get_weights()[0])


def test_a_type_without_gradients_is_refused_by_name():
    pm = pipetrain.PipelineModel(casting("float8_e5m2"), cuts=("there",), scheme="spectrain")
    pm.compile(keras.optimizers.SGD(0.05, momentum=0.9), networks.crossentropy())
    with pytest.raises(ValueError, match=r"No gradient crosses a cut in the type float8_e5m2.*'there'.*Try a cut"):
        networks.fit(pm, *networks.data(40))


def test_a_layer_of_another_type_than_it_declares_may_end_a_stage():
    """One-hot lookups declare float32 and give int64."""
    x = keras.Input((1,), dtype="int32")
    encoded = L.IntegerLookup(vocabulary=[1, 2, 3], output_mode="one_hot", name="look")(x)
    pm = pipetrain.PipelineModel(keras.Model(x, L.Dense(2)(encoded)), cuts=("look",), scheme="vanilla")
    pm.compile("sgd", "mse")
    assert np.isfinite(fit(pm, np.arange(20)[:, None] % 4, normal(20, 2), batch_size=5).history["loss"]).all()
