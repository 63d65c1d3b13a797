"""Training on GPUs: one card as four logical devices. ``docs/guide/gpu.md`` says how to run it.

``PIPETRAIN_TEST_DEVICES=CPU`` runs the same on logical CPU devices, which tests the tests.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import checkpointed
import keras
import networks
import numpy as np
import pytest
import reference
import tensorflow as tf
from against_reference import ASYNCHRONOUS, BATCH, LATER, PREDICTED, compare, constantly, plain_keras
from compiled_models import inputs, made
from tensorflow.python.framework import config

import pipetrain
from pipetrain.compute.profiling.profiler import profile
from pipetrain.frontend.data_parallel import _mirrored
from pipetrain.schemes.table import NAMES, SERVING, TRANSFERRING
from pipetrain.schemes.transfers.orders import orders

KIND = os.environ.get("PIPETRAIN_TEST_DEVICES", "GPU")
DEVICES = tuple(f"{KIND}:{n}" for n in range(4))
PIPELINES = [name for name in NAMES if name not in ("single", "data-parallel")]
COMPILED = pytest.mark.parametrize("jit_compile", [False, True], ids=["kernels", "xla"])

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("error:XLA cannot compile"),
    pytest.mark.filterwarnings("error:Model doesn't support"),
]


@pytest.fixture(autouse=True, scope="module")
def four_devices():
    if len(tf.config.list_logical_devices(KIND)) < len(DEVICES):
        cards = len(tf.config.list_physical_devices("GPU"))
        pytest.skip(f"needs four logical devices on a GPU, see docs/guide/gpu.md; TensorFlow sees {cards} GPUs")


@pytest.fixture(autouse=True)
def exact(four_devices, request):
    """Kernels are deterministic and multiply in float32: TF32 has 10 bits of mantissa.

    Keras compiles nothing while operations are to be deterministic; XLA has a flag of its own, see ``conftest.py``.
    """
    callspec = getattr(request.node, "callspec", None)
    before = tf.config.experimental.tensor_float_32_execution_enabled()
    tf.config.experimental.enable_tensor_float_32_execution(False)
    if not (callspec and callspec.params.get("jit_compile")):
        keras.utils.set_random_seed(0)
        tf.config.experimental.enable_op_determinism()
    yield
    config.disable_op_determinism()
    tf.config.experimental.enable_tensor_float_32_execution(before)


def four_stages(scheme, model=None, optimizer=None, **settings):
    """The MLP in four stages, one on each device."""
    settings = {"microbatches": 4 if scheme in ("gpipe", "1f1b") else None, **settings}
    return networks.pipeline(model, optimizer, scheme=scheme, cuts=networks.cuts(6, 4), devices=DEVICES, **settings)


@COMPILED
@pytest.mark.parametrize("scheme", [*ASYNCHRONOUS, *LATER])
def test_asynchronous_schemes_equal_the_reference(scheme, jit_compile):
    settings = reference.Settings(scheme, constantly(0.05))
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    compare(settings, 4, optimizer, devices=DEVICES, jit_compile=jit_compile)


@pytest.mark.parametrize("name", ["nesterov", "decay"])
def test_predictions_equal_the_reference(name):
    optimizer, expected = PREDICTED[name]
    settings = reference.Settings("spectrain", constantly(0.05), expected)
    compare(settings, 4, optimizer(0.05), devices=DEVICES)


@pytest.mark.parametrize("name", ["adamw", "rmsprop momentum"])
def test_predictions_of_adaptive_rates_equal_the_reference(name):
    optimizer, expected = PREDICTED[name]
    settings = reference.Settings("spectrain", constantly(2.5e-3), expected)
    compare(settings, 4, optimizer(2.5e-3), devices=DEVICES)


def assert_as_plain_keras(pm, x, y):
    """Against training on the CPU, by other kernels."""
    with tf.device("CPU:0"):
        weights, expected = plain_keras(len(x))
    history = pm.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, epochs=2).history
    networks.assert_close(pm.get_weights(), weights)
    for name, values in expected.items():
        np.testing.assert_allclose(history[name], values, rtol=1e-5)


@COMPILED
@pytest.mark.parametrize("microbatches", [1, 4, 7])
@pytest.mark.parametrize("scheme", ["gpipe", "1f1b"])
def test_synchronous_schemes_equal_plain_keras(scheme, microbatches, jit_compile):
    pm = four_stages(scheme, microbatches=microbatches, jit_compile=jit_compile)
    assert_as_plain_keras(pm, *networks.data(rows=5 * BATCH + 9))  # the last batch is short


@COMPILED
def test_one_device_equals_plain_keras(jit_compile):
    pm = networks.pipeline(scheme="single", stages=1, devices=DEVICES[:1], jit_compile=jit_compile)
    assert_as_plain_keras(pm, *networks.data(rows=5 * BATCH + 9))


def test_data_parallel_equals_plain_keras():
    pm = networks.pipeline(scheme="data-parallel", devices=DEVICES)
    assert_as_plain_keras(pm, *networks.data(rows=5 * BATCH))


def test_replicas_equal_plain_keras():
    pm = networks.pipeline(scheme="1f1b", cuts=networks.cuts(6, 2), replicas=(2, 2), devices=DEVICES, microbatches=2)
    assert_as_plain_keras(pm, *networks.data(rows=5 * BATCH + 9))


@pytest.mark.parametrize(
    ("scheme", "order"),
    [(scheme, order) for scheme in TRANSFERRING for order in (*orders(scheme == SERVING), "auto")],
)
def test_ordered_transfers_equal_plain_keras(scheme, order):
    pm = networks.pipeline(scheme=scheme, stages=2, devices=DEVICES[:2], order=order)
    assert_as_plain_keras(pm, *networks.data(rows=5 * BATCH + 9))


def test_coded_gradients_equal_plain_keras():
    pm = networks.pipeline(scheme="coded-reduce", stages=3, devices=DEVICES[:3], children=3, depth=1, stragglers=1)
    assert_as_plain_keras(pm, *networks.data(rows=5 * BATCH + 9))


def test_a_grid_equals_plain_keras():
    pm = networks.pipeline(scheme="grid", stages=4, devices=DEVICES, grid=(2, 2))
    assert_as_plain_keras(pm, *networks.data(rows=5 * BATCH + 9))


@COMPILED
@pytest.mark.parametrize("name", ["dropout and BatchNormalization", "convolutions", "an embedding"])
def test_layers_train_as_in_keras_on_the_same_device(name, jit_compile):
    """Random numbers, statistics and whole numbers, which TensorFlow keeps in the host's memory, cross devices."""
    trained = []
    for pipelined in (False, True):
        model, optimizer = None, keras.optimizers.SGD(0.05, momentum=0.9)
        with tf.device(DEVICES[0]):
            model = made(name)
            x, y = inputs(model)
            if pipelined:
                cut = model.layers[len(model.layers) // 2 - 1].name
                own = networks.pipeline(
                    model,
                    optimizer,
                    scheme="gpipe",
                    cuts=[cut],
                    microbatches=1,
                    devices=DEVICES[:2],
                    jit_compile=jit_compile,
                )
            else:
                own = model
                own.compile(optimizer, networks.crossentropy(), metrics=["accuracy"], jit_compile=jit_compile)
            history = networks.fit(own, x, y, epochs=2, validation_data=(x, y)).history
        trained.append((model.get_weights(), history))
    (theirs, their_history), (ours, our_history) = trained
    networks.assert_close(ours, theirs, 2e-5)
    for key, values in their_history.items():
        np.testing.assert_allclose(our_history[key], values, rtol=1e-4, err_msg=key)


@COMPILED
@pytest.mark.parametrize("scheme", PIPELINES)
def test_the_same_seed_gives_bitwise_the_same_weights(scheme, jit_compile):
    weights = []
    for _ in range(2):
        pm = four_stages(scheme, jit_compile=jit_compile)
        networks.fit(pm, *networks.data(210), epochs=2)
        weights.append(pm.get_weights())
    networks.assert_equal(*weights)


@COMPILED
@pytest.mark.parametrize("scheme", ["spectrain", "1f1b"])
def test_bfloat16_trains_as_on_the_cpu_up_to_rounding(scheme, jit_compile):
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        losses = []
        for devices in (("CPU:0",), DEVICES):
            settings = {"cuts": networks.cuts(6, 4), "microbatches": 2 if scheme == "1f1b" else None}
            pm = networks.pipeline(scheme=scheme, devices=devices, jit_compile=jit_compile, **settings)
            losses.append(networks.fit(pm, *networks.data(200), epochs=3).history["loss"])
        np.testing.assert_allclose(*losses, rtol=0.02)  # bfloat16 has 8 bits of mantissa
        assert losses[1][-1] < losses[1][0]
    finally:
        keras.config.set_dtype_policy(policy)


@pytest.mark.parametrize(  # MirroredStrategy with XLA is Keras' own, which fails on CPU devices
    ("scheme", "jit_compile"), [("spectrain", False), ("spectrain", True), ("data-parallel", False)]
)
def test_evaluate_and_predict_equal_plain_keras(scheme, jit_compile):
    x, y = networks.data(90)
    with tf.device("CPU:0"):
        plain = networks.mlp()
        plain.compile("sgd", networks.crossentropy(), metrics=["accuracy"])
        expected, outputs = plain.evaluate(x, y, batch_size=20, verbose=0), plain.predict(x, batch_size=20, verbose=0)
    if scheme == "data-parallel":
        pm = networks.pipeline(scheme=scheme, devices=DEVICES, jit_compile=jit_compile)
    else:
        pm = four_stages(scheme, jit_compile=jit_compile)
    np.testing.assert_allclose(pm.evaluate(x, y, batch_size=20, verbose=0), expected, rtol=1e-5)
    np.testing.assert_allclose(pm.predict(x, batch_size=20, verbose=0), outputs, atol=1e-5)


@pytest.mark.parametrize("scheme", ["spectrain", "weight-stashing", "2bw", "1f1b", "data-parallel"])
def test_stopped_and_resumed_is_bitwise_as_never_stopped(scheme, tmp_path):
    stages = {} if scheme == "data-parallel" else {"stages": 3}
    settings = {"scheme": scheme, "devices": DEVICES[: 2 if scheme == "data-parallel" else 3], **stages}
    whole, _ = checkpointed.run(tmp_path / "whole", **settings)
    _, stopped = checkpointed.run(tmp_path / "cut", stop_after=15, **settings)
    assert stopped is None
    again, _ = checkpointed.run(tmp_path / "cut", **settings)
    networks.assert_equal(again.get_weights(), whole.get_weights())


@COMPILED
@pytest.mark.parametrize("scheme", ["spectrain", "1f1b"])
def test_exact_traces(scheme, jit_compile):
    """Each device does one thing at a time; what a stage needs has been computed and sent before it begins."""
    steps, pieces = 8, 4 if scheme == "1f1b" else 1
    pm = four_stages(scheme, jit_compile=jit_compile)
    pm.exact_trace = True
    pm.fit(*networks.data(steps * BATCH), batch_size=BATCH, shuffle=False, verbose=0)
    trace, total = pm.trace, steps * pieces
    assert len(trace.spans) == 4 * 2 * total
    by_action = {(span.op, span.stage, span.microbatch): span for span in trace.spans}
    assert len(by_action) == len(trace.spans)  # the last stage's F and B among them
    for stage in range(4):
        mine = sorted((each for each in trace.spans if each.stage == stage), key=lambda each: each.start_s)
        assert {each.device.rsplit("/", 1)[-1].removeprefix("device:") for each in mine} == {DEVICES[stage]}
        assert all(each.start_s < each.end_s for each in mine)
        assert all(a.end_s <= b.start_s + 1e-9 for a, b in itertools.pairwise(mine))
    assert len(trace.transfers) == 2 * 3 * total
    for each in trace.transfers:
        source = by_action[each.op, each.from_stage, each.microbatch]
        reader = by_action[each.op, each.to_stage, each.microbatch]
        assert source.start_s <= each.start_s <= each.end_s <= source.end_s + 1e-9
        assert each.end_s <= reader.start_s + 1e-9
        assert each.size_bytes == BATCH // pieces * 16 * 4


def test_a_model_is_measured_cut_and_explained():
    """The kernels' own memory is told by TensorFlow on every device, the last one too."""
    model = made("convolutions")
    measured = profile(model, 32, device=DEVICES[-1], verbose=False, budget_s=None)
    assert all(block.forward_s > 0 for block in measured.blocks if block.weight_bytes)
    assert any(block.workspace_bytes > 0 for block in measured.blocks)
    pm = pipetrain.PipelineModel(model, 2, devices=DEVICES[:2], scheme="spectrain")
    assert "Recommended:" in pm.explain(batch_size=32)


def test_gradients_on_one_card_are_summed_without_nccl():
    """NCCL refuses two ranks on one card; MirroredStrategy then takes rings. CPU devices have no collectives."""
    extended = _mirrored(tuple(device.name for device in tf.config.list_logical_devices(KIND)[:2])).extended
    if KIND == "CPU":
        assert isinstance(extended._cross_device_ops, tf.distribute.ReductionToOneDevice)
    else:
        assert extended._communication_options.implementation.name == "RING"


def found(what, **environment):
    """What ``gpu_process.py`` says."""
    script = Path(__file__).with_name("gpu_process.py")
    command = [sys.executable, str(script), what, KIND]
    run = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def memory(four_devices, tmp_path_factory):
    settings = {"TF_CPU_ALLOCATOR_USE_BFC": "1"} if KIND == "CPU" else {}
    return found("memory", XDG_CACHE_HOME=str(tmp_path_factory.mktemp("cache")), **settings)


def test_memory_is_bounded_over_several_fits(memory):
    """Whatever a fit kept would be there in the next one too: a fifth fit needs what the first needed."""
    first, *later = memory["peaks"]
    assert max(later) <= first + 0.25 * memory["expected"]  # of which one minibatch's residuals are a quarter
    assert max(memory["left"]) <= memory["left"][0] + 0.1 * memory["expected"]


def test_residuals_are_freed_and_memory_is_what_the_plan_says(memory):
    """Within a factor of two: of what a plan cannot know, cuBLAS' workspace is the largest, up to 32 MiB a device.

    Residuals of the sixteen minibatches of a fit would be several times as much, were they not freed.
    """
    room = 2**25 if KIND == "GPU" else 0
    assert 0.5 * memory["expected"] <= max(memory["peaks"]) <= 2 * memory["expected"] + room


@pytest.mark.skipif(KIND == "CPU", reason="a CPU's memory always grows")
def test_memory_growth_leaves_the_card_to_others(memory):
    """The driver's own share of a process is some hundred MiB; without growth TensorFlow takes nearly all."""
    (before, after) = memory["cards"]
    if not after:
        pytest.skip("nvidia-smi cannot be asked")
    (was, total), (now, _) = before[0], after[0]
    needed = max(memory["peaks"]) / 2**20
    assert now - was <= 4 * needed + 2048
    assert now - was < total / 2


@pytest.mark.skipif(KIND == "GPU" and len(tf.config.list_physical_devices("GPU")) < 2, reason="needs two cards")
def test_gradients_of_two_cards_are_summed_by_nccl():
    told = found("nccl")
    if KIND == "GPU":
        assert told["summed by"] == "CollectiveAllReduce"
        assert told["asked for"] in ("AUTO", "NCCL")  # AUTO is NCCL where each logical GPU is a card
    networks.assert_close(*([np.array(each) for each in weights] for weights in told["weights"]))
