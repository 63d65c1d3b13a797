"""Bad input is refused before training starts, naming the argument, what was received and what to try."""

from __future__ import annotations

import sys
import threading

import inside
import keras
import networks
import numpy as np
import parameters
import pytest
from networks import fit, normal, one_layer

import pipetrain
from pipetrain.callbacks import PipelineCheckpoint, Snapshots
from pipetrain.cli.main import main
from pipetrain.schemes.table import SCHEMES

L = keras.layers


def refused(match, kind=ValueError):
    return pytest.raises(kind, match=match)


def test_unknown_scheme():
    with refused(r"scheme='fast'.*Try one of: single, data-parallel.*1f1b"):
        pipetrain.PipelineModel(networks.mlp(), stages=2, scheme="fast")


@pytest.mark.parametrize("stages", [0, 7, -1, 2.5, "4", True])
def test_impossible_numbers_of_stages(stages):
    with refused("6 layers.*stages="):
        pipetrain.PipelineModel(networks.mlp(6), stages=stages, scheme="spectrain")


@pytest.mark.parametrize(
    ("cuts", "match"),
    [
        (("d1", "nowhere"), "'nowhere'.*d0, d1, d2"),
        (("d3", "d1"), r"Try cuts=\('d1', 'd3'\)"),
        (("d1", "d1"), "order"),
        (("d1", "d5"), "last layer"),
    ],
)
def test_cuts_that_are_no_cuts(cuts, match):
    with refused(match):
        pipetrain.PipelineModel(networks.mlp(6), cuts=cuts, scheme="spectrain")


def test_stages_that_contradict_the_cuts():
    with refused("2 stages.*stages=3"):
        pipetrain.PipelineModel(networks.mlp(6), stages=3, cuts=("d1",), scheme="spectrain")


@pytest.mark.parametrize("microbatches", [0, -1, 1.5, True, "2", np.int64(0), np.float64(2)])
def test_impossible_numbers_of_microbatches(microbatches):
    with refused("microbatches="):
        pipetrain.PipelineModel(networks.mlp(), stages=2, scheme="gpipe", microbatches=microbatches)


def test_unknown_device():
    with refused("GPU:7.*CPU:0"):
        pipetrain.PipelineModel(networks.mlp(), stages=2, devices=("CPU:0", "GPU:7"), scheme="spectrain")


def test_models_whose_layers_cannot_be_seen():
    with refused("no input shape"):
        pipetrain.PipelineModel(keras.Sequential([keras.layers.Dense(2)]), stages=1, scheme="spectrain")

    class Subclassed(keras.Model):
        def call(self, x):
            return x

    with refused("subclassed.*one block", TypeError):
        pipetrain.PipelineModel(Subclassed(), stages=1, scheme="spectrain")

    class OwnStep(keras.Model):
        def train_step(self, data):
            return {}

    x = keras.Input((4,))
    with refused("OwnStep overrides train_step", TypeError):
        pipetrain.PipelineModel(OwnStep(x, keras.layers.Dense(2)(x)), stages=1, scheme="spectrain")
    with refused("Not a Keras model", TypeError):
        pipetrain.PipelineModel("model.keras", stages=1, scheme="spectrain")


def test_an_uncompiled_model():
    x, y = networks.data(64)
    with refused(r"compile\(\)"):
        pipetrain.PipelineModel(networks.mlp(), stages=2, scheme="spectrain").fit(x, y)


def test_compiled_without_a_loss():
    pm = pipetrain.PipelineModel(networks.mlp(), stages=2, scheme="spectrain")
    pm.compile("sgd")
    with refused("loss=None"):
        pm.fit(*networks.data(64))
    with refused("optimizer=None"):
        pm.compile(None, "mse")
    with refused(r"compile\(\)"):
        pm.fit(*networks.data(64))


def test_data_that_cannot_be_trained_on():
    x, y = networks.data(64)
    pm = networks.pipeline()
    with refused("x=None"):
        pm.fit()
    with refused("no rows"):
        pm.fit(x[:0], y[:0])
    with refused(r"\[63, 64\] rows"):
        pm.fit(x, y[:63])
    with refused(r"shape \(16, 5\).*Try shape \(None, 12\)"):
        pm.fit(x[:, :5], y, batch_size=16, verbose=0)


@pytest.mark.parametrize("scheme", ["gpipe", "1f1b"])
def test_a_batch_smaller_than_its_microbatches(scheme):
    x, y = networks.data(64)
    pm = networks.pipeline(scheme=scheme, microbatches=8)
    before = pm.get_weights()
    for arguments in ({"x": x, "y": y, "batch_size": 4}, {"x": x[:5], "y": y[:5]}):
        with refused("rows, microbatches=8"):
            pm.fit(verbose=0, **arguments)
    import tensorflow as tf

    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(3)
    with refused("3 rows, microbatches=8"):
        pm.fit(dataset, verbose=0)
    networks.assert_equal(before, pm.get_weights())


def test_optimizers_a_pipeline_cannot_do_exactly():
    def compiled(optimizer, scheme="spectrain"):
        return networks.pipeline(optimizer=optimizer, scheme=scheme)

    sgd = keras.optimizers.SGD
    with refused("LossScaleOptimizer"):
        compiled(keras.optimizers.LossScaleOptimizer(sgd(0.1)), "vanilla")


def test_loops_a_pipeline_does_not_have():
    pm = pipetrain.PipelineModel(networks.mlp(), stages=2, scheme="spectrain")
    with refused("run_eagerly=True"):
        pm.compile("sgd", "mse", run_eagerly=True)
    for steps in (0, -1, 2.5, True, "auto"):
        with refused(f"steps_per_execution={steps!r}"):
            pm.compile("sgd", "mse", steps_per_execution=steps)


@pytest.mark.parametrize("replicas", [(2,), (2, 0), (1, 1.5), (1, 1, 1), (True, 1), ("2", 1), 2])
def test_replicas_are_a_number_for_each_stage(replicas):
    with refused("2 stages.*replicas="):
        pipetrain.PipelineModel(networks.mlp(), stages=2, replicas=replicas, scheme="spectrain")


def test_profiles_need_a_row():
    with refused("batch_size=0"):
        pipetrain.profile(networks.mlp(), batch_size=0)


def test_cpu_devices_are_fixed_once_tensorflow_runs():
    np.testing.assert_equal(pipetrain.set_cpu_devices(6), None)  # the same number again
    with refused("already started.*count=3", RuntimeError):
        pipetrain.set_cpu_devices(3)
    with refused("count=0"):
        pipetrain.set_cpu_devices(0)


@pytest.mark.parametrize("every_steps", [0, 2.5, True, "4"])
def test_impossible_numbers_of_steps_between_snapshots(every_steps):
    with refused(r"every so many steps.*every_steps=.*Try every_steps=20"):
        Snapshots(every_steps, print)


def test_a_horizon_that_no_scheme_of_a_simulation_has(capsys):
    arguments = ["simulate", "model.keras", "--devices", "2", "--cluster", "nowhere.json", "--horizon", "local"]
    assert main([*arguments, "--scheme", "vanilla", "--scheme", "gpipe"]) == 2
    assert "horizon='local', scheme='vanilla'" in capsys.readouterr().err
    for chosen in ([], ["--scheme", "vanilla", "--scheme", "spectrain"]):  # one that has it will do
        assert main([*arguments, *chosen]) == 2
        assert "nowhere.json" in capsys.readouterr().err


@pytest.mark.parametrize("scheme", ["vanilla", "spectrain", "single", "data-parallel"])
def test_microbatches_of_a_scheme_that_does_not_split(scheme):
    with refused(f"microbatches=2, scheme='{scheme}'. Try leaving it out, or one of: 2bw, gpipe, 1f1b"):
        pipetrain.PipelineModel(None, scheme=scheme, microbatches=2)  # before the model is looked at
    for one in (None, 1):
        assert pipetrain.PipelineModel(networks.mlp(), scheme=scheme, stages=2, microbatches=one).scheme == scheme


def test_microbatches_of_a_scheme_of_one_s_own_that_does_not_split():
    own = SCHEMES["vanilla"]._replace(name="own")
    with refused("microbatches=2, scheme='own'"):
        pipetrain.PipelineModel(None, scheme=own, microbatches=2)
    assert pipetrain.PipelineModel(networks.mlp(), stages=2, scheme=own._replace(splits=True), microbatches=2).built


def test_recomputing_where_there_are_no_stages():
    with refused("recompute=True, scheme='data-parallel'. Try leaving it out"):
        pipetrain.PipelineModel(None, scheme="data-parallel", recompute=True)
    assert pipetrain.PipelineModel(networks.mlp(), stages=1, scheme="data-parallel", recompute=False).built


@pytest.mark.parametrize("wrong", ["no", 1, None])
def test_what_is_on_or_off_is_a_bool(wrong):
    """A word is true, "no" too."""
    with refused(f"either.*Received: recompute={wrong!r}. Try recompute=True"):
        pipetrain.PipelineModel(None, recompute=wrong, scheme="spectrain")
    with refused(f"either.*Received: spike_compensation={wrong!r}. Try"):
        pipetrain.PipelineModel(None, scheme=pipetrain.SpecTrain(spike_compensation=wrong))
    pm = pipetrain.PipelineModel(networks.small(), stages=2, scheme="spectrain")
    with refused(f"either.*Received: exact_trace={wrong!r}. Try exact_trace=True"):
        pm.exact_trace = wrong
    assert pm.exact_trace is False


def test_numbers_of_numpy_are_numbers(tmp_path):
    """They come from arithmetic on shapes; a checkpoint, which is JSON, has them as Python's."""
    how = {"stages": 2, "replicas": (np.int64(2), np.int32(1)), "recompute": np.bool_(True)}
    pm = networks.pipeline(**how, scheme="gpipe", microbatches=np.int64(3))
    assert inside.microbatches(pm) == 3 and inside.layout(pm).replicas == (2, 1)
    pm = networks.pipeline(scheme="vanilla", spike_compensation=np.bool_(True), rescale_steps=np.int64(8))
    saving = PipelineCheckpoint(tmp_path, every_steps=np.int64(2), keep=np.int64(1))
    networks.fit(pm, *networks.data(80), callbacks=[saving, Snapshots(np.int64(2), lambda *_: None)])
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000004.npz"]


@pytest.mark.parametrize("name", ["every_steps", "keep"])
@pytest.mark.parametrize("wrong", [0, True, 2.0])
def test_impossible_numbers_of_checkpoints(name, wrong):
    with refused(f"checkpoints.*Received: {name}={wrong!r}. Try {name}=".replace("checkpoints", "[Cc]heckpoints")):
        PipelineCheckpoint("nowhere", **{name: wrong})


def test_cuts_of_a_model_that_every_device_has_whole():
    with refused(r"cuts=\('d1',\), scheme='data-parallel'. Try devices="):
        pipetrain.PipelineModel(None, scheme="data-parallel", cuts=("d1",))


@pytest.mark.parametrize("stages", [1, 3])
def test_stages_and_devices_that_contradict_each_other_where_each_has_a_copy(stages):
    devices = ("CPU:0", "CPU:1")
    with refused(rf"Received: stages={stages}, devices=\('CPU:0', 'CPU:1'\). Try leaving stages out"):
        pipetrain.PipelineModel(None, stages, "data-parallel", devices=devices)
    for how in ({"devices": devices}, {"stages": 2}, {"stages": 2, "devices": devices}):
        pm = pipetrain.PipelineModel(networks.small(), scheme="data-parallel", **how)
        assert inside.distribution(pm).num_replicas_in_sync == 2


def test_cuts_of_the_unsplit_model():
    with refused(r"cuts=\('d1',\), scheme='single'. Try leaving it out"):
        pipetrain.PipelineModel(None, scheme="single", cuts=("d1",))


@pytest.mark.parametrize("callback", [Snapshots(2, print), PipelineCheckpoint("nowhere")])
def test_callbacks_for_pipelines_in_a_plain_model_s_fit(callback):
    model, (x, y) = networks.small(), networks.data(20)
    model.compile("sgd", networks.crossentropy())
    with refused(f"{type(callback).__name__} is for pipelines.*class Sequential", TypeError):
        networks.fit(model, x, y, callbacks=[callback])


@pytest.mark.parametrize("compiled", [False, True])
def test_train_on_batch_says_what_is_missing(compiled):
    pm = pipetrain.PipelineModel(networks.mlp(), stages=2, scheme="spectrain")
    if compiled:
        pm.compile(keras.optimizers.SGD(0.1))
    with pytest.raises(ValueError, match="loss=None" if compiled else r"compile\(\)"):
        pm.train_on_batch(*networks.data(20))


def test_a_schedule_set_after_compile_is_refused():
    pm = networks.pipeline()
    pm.optimizer.learning_rate = keras.optimizers.schedules.ExponentialDecay(0.1, 5, 0.5)
    with pytest.raises(ValueError, match=r"became a schedule.*compile again"):
        fit(pm, *networks.data(40))


@pytest.mark.wide
@pytest.mark.parametrize("scheme", ["spectrain", "vanilla"])
def test_a_layer_that_assigns_to_a_trained_weight_is_refused_in_asynchronous_schemes(scheme):
    """The normalized kernel was silently dropped."""
    model, x = one_layer(L.SpectralNormalization(L.Dense(4))), normal(8, 4)
    pm = pipetrain.PipelineModel(model, stages=2, scheme=scheme)
    pm.compile("sgd", "mse")
    with pytest.raises(ValueError, match=r"assigns, while it runs.*Received: scheme.*variable.*Try a synchronous"):
        pm.fit(x, normal(8, 2), batch_size=4, verbose=0)


def test_refusals_of_models_cuts_and_labels_say_what_to_do():
    x = keras.Input((4,))
    with pytest.raises(ValueError, match=r"nothing to cut.*Received: model="):
        pipetrain.PipelineModel(keras.Model(x, x), scheme="spectrain")
    with pytest.raises(ValueError, match=r"cuts='first'.*Try cuts=\('first',\)"):
        pipetrain.PipelineModel(one_layer(L.ReLU()), cuts="first", scheme="spectrain")
    pm = pipetrain.PipelineModel(one_layer(L.ReLU()), stages=2, scheme="vanilla")
    pm.compile("sgd", "mse")
    with pytest.raises(ValueError, match=r"The loss cannot be computed.*Received: y of shape \(None, 3\)"):
        fit(pm, normal(8, 4), normal(8, 3))


DISTURBING = {
    "train_on_batch": lambda pm, x, y: pm.train_on_batch(x, y),
    "fit": lambda pm, x, y: pm.fit(x, y, verbose=0),
    "compile": lambda pm, x, y: pm.compile("adam", networks.crossentropy()),
}


@pytest.mark.wide
@pytest.mark.parametrize(
    ("scheme", "method"),
    parameters.combinations(
        ["spectrain", "gpipe", "data-parallel"],
        list(DISTURBING),
        default=[("spectrain", "fit"), ("spectrain", "compile"), ("gpipe", "train_on_batch")],
    ),
)
def test_what_would_disturb_a_fit_is_refused_within_it(scheme, method):
    call = DISTURBING[method]
    pm, interval, threads = networks.pipeline(scheme=scheme), sys.getswitchinterval(), threading.active_count()
    x, y = networks.data(64)
    again = keras.callbacks.LambdaCallback(on_train_batch_end=lambda step, logs: call(pm, x, y))
    with pytest.raises(RuntimeError, match=f"{method} within fit"):
        pm.fit(x, y, batch_size=16, verbose=0, callbacks=[again])
    assert sys.getswitchinterval() == interval
    if scheme != "data-parallel":
        assert threading.active_count() == threads
    call(pm, x, y)


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__(name="subclassed")
        self.inner = L.Dense(4, name="inner")

    def call(self, x):
        return self.inner(x)


def test_nested_models_that_are_not_opened_say_why():
    x = keras.Input((4,))
    closed = keras.Model(x, Subclassed()(x))
    with pytest.raises(ValueError, match=r"can only be one stage \('subclassed' is a subclassed model.*Try stages=1"):
        pipetrain.PipelineModel(closed, stages=2, scheme="spectrain")
    words = keras.Input((4,), dtype="int32")
    nested = keras.Sequential([keras.Input((4, 3)), L.Dense(3, name="deep"), L.Dense(3)], name="nested")
    masked = keras.Model(words, L.Dense(2)(nested(L.Embedding(9, 3, mask_zero=True)(words))))
    with pytest.raises(ValueError, match="Unknown layer in cuts: 'nested' is called with a mask"):
        pipetrain.PipelineModel(masked, cuts=("deep",), scheme="spectrain")


@pytest.mark.parametrize("settings", [{"scheme": "zb-v"}, {"scheme": "interleaved", "chunks": 3}], ids=str)
def test_a_schedule_of_more_stages_a_device_than_there_are_layers_is_named(settings):
    model = keras.Sequential([keras.Input((4,)), L.Dense(3)])
    with pytest.raises(ValueError, match=r"stages on each device, and the model .* only 1 layer .*scheme='1f1b'"):
        networks.in_way(model, **settings)
