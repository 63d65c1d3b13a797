"""Stages that XLA compiles: the same training, and TensorFlow's kernels for what XLA cannot compile."""

from __future__ import annotations

import threading
import warnings
from dataclasses import replace

import keras
import networks
import numpy as np
import parameters
import pytest
import reference
import tensorflow as tf
from against_reference import ASYNCHRONOUS, LATER, compare, constantly
from compiled_models import MODELS, L, inputs, layered, made

import pipetrain
from pipetrain.compute.cores import OWN_POOLS
from pipetrain.compute.functions import kernels
from pipetrain.compute.graph.blocks import Chain
from pipetrain.compute.profiling import block_costs, block_functions, profiler
from pipetrain.frontend import planner
from pipetrain.plan.memory import Training
from pipetrain.plan.partition import plan
from pipetrain.plan.profile import BlockProfile, Profile, Seconds


@pytest.fixture
def ops(monkeypatch):
    """The kernels of what XLA was asked to compile."""
    made, op = [], kernels.Kernels.op

    def noted(self, function, *specs):
        if self.compiled:
            made.append(self)
        return op(self, function, *specs)

    monkeypatch.setattr(kernels.Kernels, "op", noted)
    return made


@pytest.mark.wide
@pytest.mark.parametrize("scheme", parameters.by_default([*ASYNCHRONOUS, *LATER], "spectrain"))
def test_asynchronous_schemes_equal_the_reference(scheme, ops, recwarn):
    settings = reference.Settings(scheme, constantly(0.05))
    compare(settings, 3, keras.optimizers.SGD(0.05, momentum=0.9), jit_compile=True)
    assert ops
    assert not [each for each in recwarn if "XLA" in str(each.message)]


@pytest.mark.wide
@pytest.mark.parametrize("optimizer", parameters.by_default(["sgd", "adam"], "sgd"))
@pytest.mark.parametrize("name", parameters.by_default(MODELS, "dropout and BatchNormalization"))
def test_layers_train_as_in_keras_with_xla(name, optimizer):
    """The last batch is short. Nothing here runs without XLA: what it cannot compile would be warned of."""
    trained = []
    for pipelined in (False, True):
        model = made(name)
        optimizers = {"sgd": keras.optimizers.SGD(0.05, momentum=0.9), "adam": keras.optimizers.Adam(1e-2)}
        cut = model.layers[len(model.layers) // 2 - 1].name
        if pipelined:
            with warnings.catch_warnings():
                warnings.filterwarnings("error", "XLA cannot compile")
                settings = {"scheme": "gpipe", "cuts": [cut], "microbatches": 1, "jit_compile": True}
                pm = networks.pipeline(model, optimizers[optimizer], **settings)
                history = networks.fit(pm, *inputs(model), epochs=2, validation_data=inputs(model)).history
        else:
            model.compile(optimizers[optimizer], networks.crossentropy(), metrics=["accuracy"], jit_compile=True)
            history = networks.fit(model, *inputs(model), epochs=2, validation_data=inputs(model)).history
        trained.append((model.get_weights(), history))
    (ours, our_history), (theirs, their_history) = trained[::-1]
    networks.assert_close(ours, theirs, 2e-5)
    for key, values in their_history.items():
        np.testing.assert_allclose(our_history[key], values, rtol=1e-4, err_msg=key)


@pytest.mark.slow
def test_bfloat16_is_compiled():
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        losses = []
        for compiled in (False, True):
            pm = networks.pipeline(networks.mlp(), scheme="1f1b", microbatches=2, jit_compile=compiled)
            losses.append(networks.fit(pm, *networks.data(200), epochs=3).history["loss"])
        np.testing.assert_allclose(*losses, rtol=0.02)
        assert losses[1][-1] < losses[1][0]
    finally:
        keras.config.set_dtype_policy(policy)


class OfNumPy(L.Layer):
    """Adds zeros that NumPy computes, which XLA cannot."""

    def call(self, x):
        zeros = tf.numpy_function(np.zeros_like, [x], x.dtype, stateful=False)
        return x + tf.stop_gradient(tf.ensure_shape(zeros, x.shape))


def with_numpy():
    keras.utils.set_random_seed(0)
    return layered(L.Embedding(20, 8), L.LSTM(6), OfNumPy(), L.Dense(8), shape=(7,), dtype="int32")


@pytest.mark.wide
def test_what_xla_cannot_compile_is_named_once_and_trains():
    model = with_numpy()
    pm = networks.pipeline(model, scheme="gpipe", cuts=[model.layers[0].name], microbatches=2, jit_compile=True)
    with pytest.warns(UserWarning) as noted:
        networks.fit(pm, *inputs(model))
    (line,) = {str(each.message) for each in noted if "XLA" in str(each.message)}
    assert line.startswith(f"XLA cannot compile {model.layers[1].name} to {model.layers[-1].name}, which runs without")


ABOUT = ["d0 to d1", "d2 to d3", "d4 to d5"]


def faster_with_xla(*stages):
    """A partition of ``networks.mlp()`` by a profile that has XLA twice as fast, but for other stages' blocks."""
    model = networks.mlp()
    seconds = {True: Seconds(0.5, 0.5, 0.1), False: Seconds(1.0, 1.0, 0.1)}
    blocks = [
        BlockProfile(layer.name, 1.0, 1.0, 4, 4, update_s=0.1, compiled=seconds[n // 2 in stages])
        for n, layer in enumerate(model.layers)
    ]
    return model, plan(Profile(model.name, 20, tuple(blocks)), [2, 4, 6], training=Training("spectrain"))


@pytest.mark.wide
@pytest.mark.parametrize(
    ("jit_compile", "compiled"), [("auto", [False, True, False]), (True, [True] * 3), (False, [False] * 3)]
)
def test_each_stage_runs_the_kernels_that_are_faster_for_it(jit_compile, compiled, ops):
    model, cut = faster_with_xla(1)
    assert [stage.compiled for stage in cut.stages] == [False, True, False]
    assert [line.split()[-1] for line in f"{cut}".splitlines()[-3:]] == ["TensorFlow", "XLA", "TensorFlow"]
    pm = networks.pipeline(model, stages=cut, scheme="spectrain", jit_compile=jit_compile)
    networks.fit(pm, *networks.data(60), validation_data=networks.data(60))
    assert {each.about for each in ops} == {about for about, by_xla in zip(ABOUT, compiled, strict=True) if by_xla}
    assert [stage.compiled for stage in pm.partition(20).stages] == compiled  # measured again where it was otherwise
    assert pm.partition(20).cuts == cut.cuts


def test_other_kernels_asked_for_and_back():
    """The kernels of a given partition are those of ``"auto"``, whatever was asked for meanwhile."""
    model, cut = faster_with_xla(1)
    pm = networks.pipeline(model, stages=cut, scheme="spectrain", jit_compile=True)
    assert [stage.compiled for stage in pm.partition(20).stages] == [True] * 3
    pm.compile("sgd", networks.crossentropy(), jit_compile="auto")
    assert pm.partition(20) == cut


@pytest.mark.wide
def test_an_evaluation_before_training_runs_the_kernels_that_are_faster(ops, monkeypatch):
    """And those that are asked for, once they are."""
    model, cut = faster_with_xla(1)

    def measured(self, *arguments):
        asked = self.training.jit_compile
        return cut if asked == "auto" else replace(cut, stages=[replace(each, compiled=asked) for each in cut.stages])

    monkeypatch.setattr(planner.Planner, "_measured", measured)
    pm = networks.pipeline(model, stages=3, scheme="spectrain")
    for jit_compile, about in ((True, ABOUT), ("auto", ABOUT[1:2]), (False, []), ("auto", ABOUT[1:2])):
        pm.compile("sgd", networks.crossentropy(), jit_compile=jit_compile)
        ops.clear()
        pm.evaluate(*networks.data(60), verbose=0)
        assert {each.about for each in ops} == {*about}


@pytest.mark.wide
def test_data_parallel_says_that_its_devices_run_without():
    with pytest.warns(UserWarning, match="XLA cannot compile a step of several devices"):
        pm = networks.pipeline(networks.mlp(), scheme="data-parallel", jit_compile=True)
    networks.fit(pm, *networks.data(60), validation_data=networks.data(60))


def test_a_margin_decides_where_the_kernels_are_nearly_as_fast():
    def chosen(faster, spread):
        blocks = (BlockProfile("b", 1.0, 1.0, 4, 4, compiled=Seconds(1.0 / faster, 1.0 / faster, 0.0)),)
        return plan(Profile("m", 20, blocks, spread), [1]).stages[0].compiled

    assert [chosen(faster, 0.0) for faster in (0.5, 1.0, 1.04, 1.06, 2.0)] == [False, False, False, True, True]
    assert [chosen(faster, 0.1) for faster in (0.5, 1.0, 1.14, 1.16, 2.0)] == [False, False, False, True, True]


def test_a_block_that_xla_cannot_compile_keeps_its_stage_from_it():
    fast = Seconds(0.1, 0.1, 0.0)
    blocks = [BlockProfile(f"b{n}", 1.0, 1.0, 4, 4, compiled=None if n == 3 else fast) for n in range(4)]
    cut = plan(Profile("m", 20, tuple(blocks)), [2, 4])
    assert [stage.compiled for stage in cut.stages] == [True, False]
    assert cut.stages[1].forward_s == 2.0


@pytest.mark.wide
def test_little_work_is_not_profiled_and_not_compiled(ops, monkeypatch):
    monkeypatch.setattr(planner, "cached_profile", None)
    pm = networks.pipeline(networks.mlp(), scheme="spectrain")
    networks.fit(pm, *networks.data(60), validation_data=networks.data(60))
    assert not ops


def measure_all(monkeypatch):
    """Try XLA on the smallest model too, to the end."""
    monkeypatch.setattr(block_costs, "may_win", lambda *seconds: True)
    monkeypatch.setattr(profiler, "LITTLE_S", 0.0)
    monkeypatch.setattr(profiler, "is_little", lambda chain, batch_size: False)


@pytest.mark.wide
def test_a_profile_has_what_xla_compiles_if_there_is_enough_work(monkeypatch):
    model = with_numpy()
    assert not pipetrain.profile(model, 4, verbose=False, budget_s=None).is_compiled
    measure_all(monkeypatch)
    measured = pipetrain.profile(model, 4, verbose=False, budget_s=None)
    with_xla = {block.name: block.compiled is not None for block in measured.blocks}
    not_xlas = next(layer.name for layer in model.layers if isinstance(layer, OfNumPy))
    assert [name for name, compiled in with_xla.items() if not compiled] == [not_xlas]
    assert Profile.from_json(measured.to_json()) == measured
    names = f"{measured}".partition("---")[0].split()
    assert names.count("with") == names.count("XLA:") == 1 and names.count("forward") == names.count("backward") == 2
    assert measured.scaled(8).blocks[-1].compiled.forward_s == 2 * measured.blocks[-1].compiled.forward_s


@pytest.mark.wide
@pytest.mark.parametrize("patience_s", [0.0, 60.0])
def test_one_line_a_stage_says_that_it_is_compiled_if_that_takes_long(patience_s, capsys, monkeypatch):
    monkeypatch.setattr(kernels, "PATIENCE_S", patience_s)
    before = threading.active_count()
    pm = networks.pipeline(networks.mlp(), scheme="gpipe", microbatches=2, jit_compile=True)
    networks.fit(pm, *networks.data(60), verbose=2)
    lines = sorted(line for line in capsys.readouterr().out.splitlines() if "XLA" in line)
    assert lines == ([] if patience_s else [f"XLA compiles {about}." for about in ABOUT])
    assert threading.active_count() == before


@pytest.mark.parametrize(("threads", "enough"), [(1, False), (5, False), (6, True), (8, True)])
def test_xla_is_tried_where_each_device_has_a_thread(threads, enough, monkeypatch):
    """Of one pool, with six devices; or of its own pool, as these have, whatever the number of threads."""
    monkeypatch.setattr(profiler, "is_little", lambda chain, batch_size: False)
    monkeypatch.setattr(tf.config.threading, "get_intra_op_parallelism_threads", lambda: threads)
    device = tf.config.list_logical_devices("CPU")[0].name
    assert profiler.may_be_compiled(Chain(networks.mlp()), 20, device)
    monkeypatch.delenv(OWN_POOLS)
    assert profiler.may_be_compiled(Chain(networks.mlp()), 20, device) == enough


@pytest.mark.wide
def test_a_failure_of_xla_ends_no_profile(monkeypatch):
    def fails(*arguments):
        raise tf.errors.InternalError(None, None, "no compiler")

    measure_all(monkeypatch)
    monkeypatch.setattr(block_functions, "by_xla", lambda concrete, *specs: kernels.Compiled(concrete, fails))
    assert not pipetrain.profile(networks.mlp(), 20, verbose=False, budget_s=None).is_compiled


def test_an_internal_error_of_a_later_call_is_raised():
    """It was no compiler's; what the call has changed must not be changed again."""
    calls = []

    def fails(*arguments):
        calls.append(arguments)
        if len(calls) > 1:
            raise tf.errors.InternalError(None, None, "a kernel failed")
        return arguments

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(kernels, "by_xla", lambda function, *specs: kernels.Compiled(function, fails))
        op = kernels.Kernels(compiled=True).op(lambda x: x, tf.TensorSpec([]))
    op(tf.ones([]))
    with pytest.raises(tf.errors.InternalError):
        op(tf.ones([]))
    assert len(calls) == 2


@pytest.mark.parametrize("value", [None, 1, "always"])
def test_what_is_no_way_to_compile_is_refused(value):
    with pytest.raises(ValueError, match=r"Received: jit_compile=.*Try"):
        networks.pipeline(networks.mlp(), jit_compile=value)
    with pytest.raises(ValueError, match=r"Received: training.jit_compile=.*Try"):
        pipetrain.partition(
            Profile("m", 20, (BlockProfile("b", 1.0, 1.0, 4, 4),)), 1, training=Training(jit_compile=value)
        )


class Unsupported(L.Dense):
    """A layer that says that XLA is not for it."""

    def __init__(self, *arguments, **settings):
        super().__init__(*arguments, **settings)
        self.supports_jit = False


@pytest.mark.wide
@pytest.mark.parametrize("jit_compile", [True, "auto"])
@pytest.mark.filterwarnings("ignore:.*jit_compile")
def test_no_stage_is_compiled_where_a_layer_does_not_support_it(jit_compile, ops, monkeypatch):
    measure_all(monkeypatch)
    model = layered(L.Dense(4), Unsupported(4), shape=(3,))
    pm = networks.pipeline(model, stages=2, scheme="spectrain", jit_compile=jit_compile)
    networks.fit(pm, np.ones((40, 3), "float32"), np.zeros(40, int))
    assert not ops
    assert not pipetrain.profile(model, 20, verbose=False, budget_s=None).is_compiled


@pytest.mark.wide
def test_a_resumed_run_takes_the_same_kernels(tmp_path, ops, capsys):
    """Their choice is kept with the checkpoint; a run that was never stopped has bitwise the same weights."""
    x, y = networks.data(120)

    def trained(stages, epochs, folder, **settings):
        model, cut = faster_with_xla(1)
        where = {"stages": cut} if stages else {"cuts": [model.layers[1].name, model.layers[3].name]}
        pm = networks.pipeline(model, **where, scheme="spectrain", **settings)
        checkpoint = [] if folder is None else [pipetrain.callbacks.PipelineCheckpoint(folder, resume=True)]
        networks.fit(pm, x, y, epochs=epochs, verbose=2, callbacks=checkpoint)
        return pm.get_weights()

    want = trained(True, 3, None)
    trained(True, 2, tmp_path)
    ops.clear()
    networks.assert_equal(trained(False, 3, tmp_path), want)
    assert {each.about for each in ops} == {ABOUT[1]}
    assert "Different now" not in capsys.readouterr().out
    trained(False, 4, tmp_path, jit_compile=False)
    was = "compiled [False, False, False] instead of [False, True, False]"
    assert f"Different now: {was}." in capsys.readouterr().out


@pytest.mark.slow
def test_the_same_seed_gives_bitwise_the_same_weights():
    weights = []
    for _ in range(2):
        pm = networks.pipeline(networks.mlp(), scheme="spectrain", jit_compile=True)
        networks.fit(pm, *networks.data(110))
        weights.append(pm.get_weights())
    networks.assert_equal(*weights)
