"""Loss scaling: ``mixed_float16`` in synchronous schemes, ``loss_scale_factor`` in all of them, as in plain Keras."""

from __future__ import annotations

import sys
from pathlib import Path

import keras
import networks
import numpy as np
import parameters
import pytest

import pipetrain
from pipetrain.callbacks import PipelineCheckpoint
from pipetrain.compute.keras_private import count_of

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from own_schedule import looped

L = keras.layers
SGD = keras.optimizers.SGD
X, Y = networks.data(100)  # five minibatches
HUGE = np.ones(100, "float32")
HUGE[20:40] = 1e12  # of the second one, whose gradients overflow float16 whatever the scale and the microbatches
LAYERS = 6
ONE = {"cuts": ("d1", "d3"), "microbatches": 1}
COPIES = {"scheme": "data-parallel", "devices": ("CPU:0", "CPU:1")}
AVERAGES = {"use_ema": True, "ema_momentum": 0.8}
OVERWRITING = {**AVERAGES, "ema_overwrite_frequency": 3}
ACCUMULATING = {"gradient_accumulation_steps": 3}
BOTH = {**AVERAGES, "gradient_accumulation_steps": 2}
CLIPPED = {"global_clipnorm": 0.5}
OPTIMIZERS = {
    "momentum": lambda **settings: SGD(0.05, momentum=0.9, **settings),
    "adam": lambda **settings: keras.optimizers.Adam(0.01, **settings),
}


def scaled(name="momentum", scale=1024.0, growth=3, **settings):
    return keras.optimizers.LossScaleOptimizer(OPTIMIZERS[name](**settings), scale, growth)


def penalized():
    """The MLP with penalties in two of its stages: for activities only in float32, as Keras itself adds no others."""
    keras.utils.set_random_seed(0)
    settings = {"kernel_regularizer": "l2"}
    if keras.config.dtype_policy().name == "float32":
        settings["activity_regularizer"] = "l2"
    layers = [L.Dense(16, "tanh", name=f"d{n}", **(settings if n in (1, 4) else {})) for n in range(LAYERS - 1)]
    return keras.Sequential([keras.Input((networks.FEATURES,)), *layers, L.Dense(networks.CLASSES, name="d5")])


@pytest.fixture
def mixed():
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    yield
    keras.config.set_dtype_policy(before)


def compiled(optimizer, make=networks.mlp, settings=None, jit_compile="auto"):
    """As a pipeline with these settings, without any in plain Keras."""
    model = make() if settings is None else networks.in_way(make(), **settings)
    loss = keras.losses.MeanSquaredError() if make is networks.tied_autoencoder else networks.crossentropy()
    model.compile(optimizer, loss, jit_compile=jit_compile)
    return model


def trained(optimizer, make=networks.mlp, settings=None, sample_weight=None, **compilation):
    """Two epochs; the model and its history."""
    model = compiled(optimizer, make, settings, **compilation)
    y = X if make is networks.tied_autoencoder else Y
    return model, networks.fit(model, X, y, epochs=2, sample_weight=sample_weight).history


def scale_of(model):
    """The scale, the steps since it last changed, and all steps: minibatches whose gradients were used."""
    optimizer = model.optimizer
    return float(optimizer.dynamic_scale), int(optimizer.step_counter), int(count_of(optimizer.inner_optimizer))


def assert_as(got, want, tolerance=1e-6):
    """Losses, weights and slots up to a tolerance, what there is of scales exactly; each is a model and a history."""
    (pm, history), (plain, expected) = got, want
    np.testing.assert_allclose(history["loss"], expected["loss"], rtol=tolerance)
    networks.assert_close(pm.get_weights(), plain.get_weights(), tolerance)
    assert scale_of(pm) == scale_of(plain)
    ours, theirs = (model.optimizer.inner_optimizer.variables for model in (pm, plain))
    networks.assert_close([each.numpy() for each in ours], [each.numpy() for each in theirs], tolerance)


def rounding(plain, make):
    """How far weights may be from those of another sum over the minibatch's rows.

    A sum in float16 rounds every gradient by at most ``eps / 2`` of the largest, and so does the sum that it is
    compared with; each layer that gradients come back through adds as much. What the weights have moved differs by that
    part.
    """
    moved = max(np.abs(now - first).max() for now, first in zip(plain.get_weights(), make().get_weights()))
    return LAYERS * np.finfo(np.float16).eps * moved


@pytest.mark.wide
@pytest.mark.parametrize(
    ("name", "options", "scale", "growth", "make", "settings"),
    [
        ("momentum", {}, 2.0**22, 3, networks.mlp, {"scheme": "gpipe", **ONE}),
        *parameters.rarely(
            ("momentum", BOTH, 2.0**22, 3, networks.tied_autoencoder, {"scheme": "1f1b", **ONE}),
            ("adam", {}, 2.0**22, 3, networks.mlp, {"scheme": "1f1b", **ONE}),
            ("momentum", {}, 1000.0, 2, penalized, {"scheme": "gpipe", **ONE}),
            ("adam", CLIPPED, 2.0**22, 3, penalized, {"scheme": "single"}),
            ("momentum", CLIPPED, 2.0**22, 3, networks.tied_autoencoder, {"scheme": "1f1b", **ONE}),
            ("adam", {**BOTH, "clipnorm": 0.3}, 1000.0, 2, penalized, {"scheme": "gpipe", **ONE}),
            ("adam", ACCUMULATING, 2.0**22, 3, networks.mlp, {"scheme": "single"}),
            ("momentum", OVERWRITING, 2.0**22, 3, networks.mlp, {"scheme": "gpipe", **ONE}),
            ("momentum", {**AVERAGES, **CLIPPED}, 2.0**22, 3, networks.mlp, {"scheme": "1f1b", **ONE}),
        ),
    ],
)
@pytest.mark.usefixtures("mixed")
def test_one_microbatch_trains_as_in_plain_keras(name, options, scale, growth, make, settings):
    """Some steps are skipped at first, or the scale grows.

    XLA compiles both: on processors that compute in float16, whether oneDNN's kernels round between a product and its
    activation depends on where the model is cut.
    """
    want = trained(scaled(name, scale, growth, **options), make, jit_compile=True)
    got = trained(scaled(name, scale, growth, **options), make, settings, jit_compile=True)
    assert_as(got, want)
    last, _, steps = scale_of(got[0])
    assert (steps < 10 and last < scale) if scale > 1e6 else (steps == 10 and last > scale)


SPLIT = [
    {"scheme": "1f1b", "cuts": ("d1", "d3"), "microbatches": 4},
    {"scheme": "gpipe", "cuts": ("d1",), "microbatches": 2, "replicas": (2, 1)},
    {"scheme": looped, "cuts": ("d0", "d2", "d3"), "microbatches": 2, "devices": ("CPU:0", "CPU:1")},
    {"scheme": "zb-v", "cuts": ("d0", "d2", "d3"), "microbatches": 2, "devices": ("CPU:0", "CPU:1")},
]


@pytest.mark.parametrize(
    ("make", "options", "settings"),
    [
        (penalized, {}, SPLIT[0]),
        *parameters.widely((networks.tied_autoencoder, {"global_clipnorm": 0.3}, SPLIT[3])),
        *parameters.rarely(
            (networks.mlp, {"global_clipnorm": 0.3}, SPLIT[1]),
            (networks.tied_autoencoder, {"global_clipnorm": 0.3}, SPLIT[2]),
            (networks.tied_autoencoder, BOTH, SPLIT[0]),
            (networks.mlp, BOTH, SPLIT[1]),
            (penalized, OVERWRITING, SPLIT[2]),
            (penalized, {}, {**SPLIT[0], "scheme": "zb-h1"}),
        ),
    ],
)
@pytest.mark.usefixtures("mixed")
def test_microbatches_replicas_and_several_stages_a_device(make, options, settings):
    """The second minibatch makes no step in any stage."""
    want = trained(scaled(**options), make, None, HUGE)
    got = trained(scaled(**options), make, settings, HUGE)
    assert scale_of(got[0])[2] == 8
    assert_as(got, want, rounding(want[0], make))


@pytest.mark.wide
@pytest.mark.usefixtures("mixed")
def test_keras_scales_the_loss_by_itself_and_anew_after_every_compile():
    models = [compiled(scaled(), settings=settings) for settings in (None, {"scheme": "1f1b", **ONE})]
    for model in models:
        inner = OPTIMIZERS["adam"]()
        for _ in range(2):
            model.compile(inner, networks.crossentropy())
            assert type(model.optimizer) is keras.optimizers.LossScaleOptimizer
            networks.fit(model, X, Y, sample_weight=HUGE)
    plain, pm = models
    assert scale_of(pm) == scale_of(plain) == (2.0**14, 3, 8)
    networks.assert_close(pm.get_weights(), plain.get_weights(), 1e-6)


@pytest.mark.wide
@pytest.mark.usefixtures("mixed")
def test_a_file_has_the_scale_and_trains_on(tmp_path):
    plain, pm = (trained(scaled(), settings=settings)[0] for settings in (None, {"scheme": "gpipe", **ONE}))
    pm.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert scale_of(loaded) == scale_of(plain)
    for model in (loaded, plain):
        networks.fit(model, X, Y)
    assert scale_of(loaded) == scale_of(plain)
    networks.assert_close(loaded.get_weights(), plain.get_weights(), 1e-6)


class Stop(keras.callbacks.Callback):
    """Ends training after the fifth minibatch."""

    def on_train_batch_end(self, batch, logs=None):
        if batch == 4:
            raise InterruptedError


@pytest.mark.wide
@pytest.mark.usefixtures("mixed")
def test_what_is_resumed_equals_an_uninterrupted_run(tmp_path):
    """The checkpoint is of minibatch 3, after a step that was skipped."""

    def run(folder, *callbacks):
        model = compiled(scaled("adam"), settings={"scheme": "1f1b", **ONE})
        saving = PipelineCheckpoint(folder, every_steps=3)
        networks.fit(model, X, Y, epochs=2, sample_weight=HUGE, callbacks=[saving, *callbacks])
        return model, saving

    whole, _ = run(tmp_path / "whole")
    with pytest.raises(InterruptedError):
        run(tmp_path / "stopped", Stop())
    resumed, saving = run(tmp_path / "stopped")
    assert saving.resumed_at == 3
    assert scale_of(resumed) == scale_of(whole) == (1024.0, 0, 8)
    networks.assert_equal(resumed.get_weights(), whole.get_weights())
    ours, theirs = ([each.numpy() for each in model.optimizer.variables] for model in (resumed, whole))
    networks.assert_equal(ours, theirs)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("factor", "options", "make", "settings"),
    [
        (0.3, {"global_clipnorm": 0.3}, networks.mlp, {"scheme": "gpipe", "cuts": ("d1",), "microbatches": 2}),
        (1024.0, BOTH, networks.tied_autoencoder, SPLIT[0]),
        *parameters.rarely(
            (1024.0, {"weight_decay": 0.01, "clipvalue": 0.01}, penalized, {**SPLIT[0], "microbatches": 3}),
            (1024.0, {"global_clipnorm": 0.3}, networks.tied_autoencoder, {"scheme": "gpipe", **ONE}),
            (0.3, {**ACCUMULATING, "clipnorm": 0.3}, penalized, SPLIT[1]),
            (0.3, {**OVERWRITING, "weight_decay": 0.01}, networks.mlp, {"scheme": "single"}),
            (1024.0, {**AVERAGES, "clipnorm": 0.3}, networks.mlp, COPIES),
        ),
    ],
)
def test_a_factor_changes_gradients_as_in_plain_keras(factor, options, make, settings):
    want, got = (
        trained(OPTIMIZERS["momentum"](loss_scale_factor=factor, **options), make, each) for each in (None, settings)
    )
    np.testing.assert_allclose(got[1]["loss"], want[1]["loss"], rtol=1e-5)
    networks.assert_close(got[0].get_weights(), want[0].get_weights())
    ours, theirs = ([each.numpy() for each in model.optimizer.variables] for model, _ in (got, want))
    networks.assert_close(ours, theirs)


@pytest.mark.wide
@pytest.mark.parametrize("make", parameters.by_default([networks.tied_autoencoder, penalized], penalized))
@pytest.mark.parametrize("scheme", parameters.by_default(["vanilla", "weight-stashing", "spectrain"], "spectrain"))
def test_a_power_of_two_changes_no_bit_of_an_asynchronous_scheme(scheme, make):
    """Gradients are divided by what multiplied the loss: in float32 a power of two rounds nothing."""
    settings = {"scheme": scheme, "cuts": ("d1", "d3")}
    (plain, _), (pm, _) = (
        trained(OPTIMIZERS["momentum"](loss_scale_factor=factor), make, settings) for factor in (None, 1024.0)
    )
    networks.assert_equal(pm.get_weights(), plain.get_weights())
    assert np.abs(pm.get_weights()[0] - make().get_weights()[0]).max() > 1e-3


@pytest.mark.usefixtures("mixed")
def test_asynchronous_schemes_are_refused_with_the_reason():
    message = r"wait for all stages.*'spectrain'.*'d0'.*mixed_float16.*Try the policy 'mixed_bfloat16'.*'1f1b'"
    with pytest.raises(ValueError, match=message):
        pipetrain.PipelineModel(networks.mlp(), cuts=("d1",), scheme="spectrain")


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        ("vanilla", r"wait for all stages.*scheme='vanilla', optimizer=LossScaleOptimizer.*'mixed_bfloat16'.*'1f1b'"),
        ("all-reduce", r"copy of the scale.*scheme='all-reduce', optimizer=LossScaleOptimizer"),
    ],
)
def test_an_optimizer_that_scales_the_loss_is_refused_where_no_step_can_be_skipped(scheme, message):
    with pytest.raises(ValueError, match=message):
        networks.compiled(scheme, optimizer=scaled())


@pytest.mark.usefixtures("mixed")
@pytest.mark.parametrize("name", ["momentum", pytest.param("adam", marks=pytest.mark.wide)])
def test_data_parallel_skips_a_step_on_all_devices_or_on_none(name, tmp_path):
    """Keras under MirroredStrategy asks the first device alone. A run that is resumed goes on with the scale."""
    plain, pm = (trained(scaled(name), settings=each, sample_weight=HUGE)[0] for each in (None, COPIES))
    assert scale_of(pm) == scale_of(plain) and scale_of(pm)[2] == 8
    networks.assert_close(pm.get_weights(), plain.get_weights(), rounding(plain, networks.mlp))
    for epochs in (1, 2):
        resumed, kept = compiled(scaled(name), settings=COPIES), PipelineCheckpoint(tmp_path, every_steps=2)
        networks.fit(resumed, X, Y, epochs=epochs, sample_weight=HUGE, callbacks=[kept])
    networks.assert_equal(resumed.get_weights(), pm.get_weights())
    assert scale_of(resumed) == scale_of(pm)


def test_two_scales_are_refused():
    with pytest.raises(ValueError, match="LossScaleOptimizer in LossScaleOptimizer"):
        networks.compiled("1f1b", optimizer=keras.optimizers.LossScaleOptimizer(scaled()))
