"""Optimizers that accumulate gradients over minibatches, or average the weights."""

from __future__ import annotations

import keras
import networks
import numpy as np
import parameters
import pytest
import reference
from checkpointed import Stop
from keras import optimizers

import pipetrain
from pipetrain.callbacks import PipelineCheckpoint
from pipetrain.compute.optimizer.update import gathers, slots_per_weight
from pipetrain.schemes.scheme import UpdateRule

X, Y = networks.data(100)  # five minibatches: neither of them nor of updates a multiple
BATCH = 16
AVERAGES = {"use_ema": True, "ema_momentum": 0.8}
OVERWRITING = {**AVERAGES, "ema_overwrite_frequency": 3}
ACCUMULATING = {"gradient_accumulation_steps": 3}
BOTH = {**AVERAGES, "gradient_accumulation_steps": 2}


def momentum(**settings):
    return optimizers.SGD(0.05, momentum=0.9, **settings)


def adamw(**settings):
    return optimizers.AdamW(0.01, clipnorm=0.5, **settings)


def assert_same(pm, plain):
    """Weights, and all that the optimizers have: the averages and the sums of gradients are among it."""
    networks.assert_close(pm.get_weights(), plain.get_weights())
    networks.assert_close(*([each.numpy() for each in model.optimizer.variables] for model in (pm, plain)))


def assert_same_logs(got, want):
    for one, other in zip(got, want, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            assert one[name] == pytest.approx(other[name], rel=1e-5)


def trained(model, **settings):
    """Two fits, and their logs."""
    first = networks.fit(model, X, Y).history
    histories = first, networks.fit(model, X, Y, epochs=2, **settings).history
    return tuple(map(networks.without_figures, histories))


def compiled(scheme, **settings):
    """As ``networks.compiled``, with as many copies as divide a batch evenly."""
    if scheme != "data-parallel":
        return networks.compiled(scheme, **settings)
    pm = pipetrain.PipelineModel(networks.small(), scheme=scheme, devices=("CPU:0", "CPU:1"))
    pm.compile(loss=networks.crossentropy(), **settings)
    return pm


def alike(scheme, optimizer, **settings):
    plain, pm = (compiled(each, **settings, optimizer=optimizer()) for each in ("keras", scheme))
    want, got = trained(plain), trained(pm)
    assert_same_logs(got, want)
    assert_same(pm, plain)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("scheme", "make", "settings"),
    parameters.combinations(
        ["1f1b", "gpipe", "single", "data-parallel"],
        [momentum, adamw],
        [AVERAGES, OVERWRITING, ACCUMULATING, BOTH],
        default=[
            ("1f1b", momentum, AVERAGES),
            ("gpipe", adamw, OVERWRITING),
        ],
    ),
)
def test_synchronous_schemes_equal_keras(scheme, make, settings):
    """Averages replace the weights at the end of each fit; a sum of gradients goes on in the next."""
    if scheme == "data-parallel" and settings is not AVERAGES:
        pytest.skip("refused")
    alike(scheme, lambda: make(**settings))


@pytest.mark.slow
@pytest.mark.parametrize("settings", [OVERWRITING, BOTH])
def test_stages_that_xla_compiles(settings):
    alike("1f1b", lambda: momentum(**settings), jit_compile=True)


def embedding():
    """With gradients that are rows, and a layer that no gradient reaches in a stage of its own."""
    keras.utils.set_random_seed(0)
    x = keras.Input((networks.FEATURES,))
    words = keras.ops.argmax(keras.layers.Dense(6, name="no_gradient")(x), axis=-1)
    y = keras.layers.Embedding(6, 6, name="embedding")(words)
    return keras.Model(x, keras.layers.Dense(networks.CLASSES, name="last")(y))


@pytest.mark.wide
@pytest.mark.filterwarnings("ignore:.*radient")
def test_rows_of_embeddings_and_weights_without_a_gradient():
    alike("1f1b", lambda: momentum(**BOTH), make=embedding)


REFERENCES = {
    "plain": (optimizers.SGD, {}, reference.Sgd(0.0)),
    "momentum": (optimizers.SGD, {"momentum": 0.9}, reference.Sgd()),
    "nesterov": (optimizers.SGD, {"momentum": 0.9, "nesterov": True}, reference.Sgd(nesterov=True)),
    "adamw": (optimizers.AdamW, {"weight_decay": 0.1}, reference.Adam(decay=0.1)),
}
KINDS = {
    "averages": (AVERAGES, {"average": 0.8}),
    "overwriting": (OVERWRITING, {"average": 0.8, "overwrites": 3}),
    "accumulating": (ACCUMULATING, {"every": 3}),
    "both": (BOTH, {"average": 0.8, "every": 2}),
}


def rates(name):
    """A schedule, which counts minibatches."""
    scale = 0.02 if name == "adamw" else 1.0
    return keras.optimizers.schedules.PiecewiseConstantDecay([4, 13], [scale * each for each in (0.05, 0.025, 0.1)])


@pytest.mark.parametrize(
    ("scheme", "name", "kind"),
    parameters.combinations(
        ["vanilla", "weight-stashing", "vertical-sync", "spectrain", "local", "2bw"],
        list(REFERENCES),
        list(KINDS),
        default=[],
        wide=[("spectrain", "adamw", "both")],
    ),
)
def test_asynchronous_schemes_equal_the_reference(scheme, name, kind):
    """Each stage counts its own minibatches; weights that several stages have, and others."""
    if kind == "overwriting" and scheme in ("spectrain", "local"):
        pytest.skip("refused")
    (make, own, expected), (given, more) = REFERENCES[name], KINDS[kind]
    schedule = rates(name)
    settings = reference.Settings(scheme, lambda t: float(schedule(t)), expected, **more)
    options = {"scheme": "spectrain", "horizon": "local"} if scheme == "local" else {"scheme": scheme}
    model = networks.tied_autoencoder()
    state = reference.State(networks.tied_layers(model), networks.TIED)
    pm = networks.pipeline(model, make(schedule, **own, **given), cuts=networks.cuts(6, 4), **options)
    x, _ = networks.data(11 * BATCH)
    y = x.argmax(axis=1).astype("int32")
    for _ in range(2):
        at_end = Weights()
        pm.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[at_end])
        batches = [(x[n : n + BATCH], y[n : n + BATCH]) for n in range(0, len(x), BATCH)]
        reference.train(settings, state, networks.ends(6, 4), batches)
        assert_layers(model, at_end.weights, state)
        if settings.average is not None:  # as Keras ends a fit
            for key, average in state.averages.items():
                state.assign(key, average)
        assert_layers(model, model.get_weights(), state)


class Weights(keras.callbacks.Callback):
    """The weights at the end of an epoch, before averages replace them."""

    def on_epoch_end(self, epoch, logs=None):
        self.weights = self.model.get_weights()


def assert_layers(model, weights, state):
    """The weights of ``tied_autoencoder`` are those of the reference."""
    expected = {}
    for n, (kernel, bias) in enumerate(state.layers):
        layer = model.get_layer(f"d{n}")
        expected[layer.bias.path] = bias
        if n not in networks.TIED:
            expected[layer.kernel.path] = kernel
    networks.assert_close(weights, [expected[variable.path] for variable in model.variables])


@pytest.mark.wide
@pytest.mark.parametrize("scheme", parameters.by_default(["1f1b", "data-parallel"], "1f1b"))
def test_averages_are_swapped_in_for_evaluations_and_files(scheme, tmp_path):
    def swapped(scheme):
        model = compiled(scheme, optimizer=momentum(**AVERAGES))
        swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
        keep = keras.callbacks.ModelCheckpoint(str(tmp_path / f"{scheme}-{{epoch}}.keras"))
        history = trained(model, callbacks=[swap, keep], validation_data=(X[:40], Y[:40]))
        saved = [keras.models.load_model(tmp_path / f"{scheme}-{epoch}.keras").get_weights() for epoch in (1, 2)]
        return model, history, saved

    (plain, want, files), (pm, got, ours) = map(swapped, ("keras", scheme))
    assert_same_logs(got, want)
    for one, other in zip(ours, files, strict=True):
        networks.assert_close(one, other)
    assert_same(pm, plain)


@pytest.mark.wide
@pytest.mark.parametrize("scheme", parameters.by_default(["1f1b", "spectrain", "weight-stashing"], "spectrain"))
def test_a_resumed_run_ends_with_the_same_weights(scheme, tmp_path):
    """Stopped between two updates."""

    def run(folder, *callbacks):
        pm = networks.compiled(scheme, optimizer=momentum(**AVERAGES, **ACCUMULATING))
        saving = PipelineCheckpoint(tmp_path / folder, every_steps=4)
        networks.fit(pm, X, Y, epochs=3, callbacks=[saving, *callbacks])
        return pm

    whole = run("whole")
    with pytest.raises(InterruptedError):
        run("stopped", Stop(6))
    again = run("stopped")
    networks.assert_equal(again.get_weights(), whole.get_weights())
    networks.assert_equal(*([each.numpy() for each in pm.optimizer.variables] for pm in (again, whole)))


@pytest.mark.wide
def test_replicas_accumulate_and_average_alike():
    plain = networks.compiled("keras", optimizer=adamw(**BOTH))
    pm = pipetrain.PipelineModel(networks.small(), stages=2, replicas=(2, 1), scheme="1f1b", microbatches=2)
    pm.compile(adamw(**BOTH), networks.crossentropy())
    for model in (plain, pm):
        trained(model)
    assert_same(pm, plain)


def test_the_memory_estimate_counts_averages_and_sums():
    rule, weights = UpdateRule(), [keras.Variable(np.zeros([2], "float32"))]
    for make, slots in ((momentum, 1), (adamw, 2)):
        for settings, more in (({}, 0), (AVERAGES, 1), (ACCUMULATING, 1), (BOTH, 2)):
            assert slots_per_weight(make(**settings), rule) == slots + more
    assert [gathers(momentum(**each), rule, weights) for each in (AVERAGES, OVERWRITING, ACCUMULATING)] == [
        False,
        True,
        True,
    ]


@pytest.mark.parametrize(
    ("options", "settings", "why"),
    [
        ({"scheme": "data-parallel"}, ACCUMULATING, "gradient_accumulation_steps.*MirroredStrategy"),
        ({"scheme": "data-parallel"}, OVERWRITING, "ema_overwrite_frequency.*MirroredStrategy"),
        ({"scheme": "spectrain"}, OVERWRITING, "ema_overwrite_frequency.*averages replace"),
        ({"scheme": "spectrain", "horizon": "fitted"}, ACCUMULATING, "gradient_accumulation_steps.*fitted"),
        ({"scheme": "spike-compensation"}, ACCUMULATING, "gradient_accumulation_steps.*different staleness"),
        ({"scheme": "vanilla", "rescale_steps": 9}, ACCUMULATING, "gradient_accumulation_steps.*different staleness"),
        ({"scheme": "1f1b"}, {**ACCUMULATING, "global_clipnorm": 1.0}, "gradient_accumulation_steps.*global_clipnorm"),
    ],
)
def test_what_is_refused(options, settings, why):
    with pytest.raises(ValueError, match=rf"{why}.*Received: scheme='{options['scheme']}'.*Try"):
        networks.pipeline(optimizer=momentum(**settings), **options)
