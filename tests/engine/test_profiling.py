"""What layers take: measured, kept in the cache, and told apart from what a busy machine adds."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import keras
import networks
import numpy as np
import pytest
import tensorflow as tf

import pipetrain
from pipetrain.compute.graph.blocks import Chain
from pipetrain.compute.profiling import block_costs, block_passes, profiler, progress, timing
from pipetrain.compute.profiling import kinds as block_kinds
from pipetrain.compute.profiling.kinds import Kinds
from pipetrain.frontend import planner
from pipetrain.plan.cluster import SHARED_MEMORY, Cluster, Level
from pipetrain.plan.partition import partition
from pipetrain.plan.profile import BlockProfile, Profile, Seconds
from pipetrain.simulation.simulator import simulate

L = keras.layers


@pytest.mark.wide
@pytest.mark.measures
def test_a_profile_measures_and_touches_nothing():
    model = keras.Sequential(networks.convolutional_layers())
    before = [variable.numpy().copy() for variable in model.variables]
    measured = pipetrain.profile(model, batch_size=16, verbose=False, budget_s=None)
    networks.assert_equal([variable.numpy() for variable in model.variables], before)
    assert [block.name for block in measured.blocks] == [layer.name for layer in model.layers]
    convolution = measured.blocks[0]
    assert convolution.weight_bytes == 4 * (3 * 3 * 3 * 4 + 4)
    assert convolution.output_bytes == 4 * 16 * 8 * 8 * 4
    assert convolution.forward_s > 0
    assert convolution.backward_s > 0
    assert measured.batch_size == 16


class Clock:
    """Time that passes while a layer sleeps, and a little whenever somebody looks."""

    def __init__(self):
        self.now_s = 0.0

    def perf_counter(self):
        self.sleep(1e-6)
        return self.now_s

    def sleep(self, seconds):
        self.now_s += seconds


class Sleeper(L.Layer):
    def __init__(self, clock, forward_s=0.0, backward_s=0.0):
        super().__init__()
        self.clock, self.forward_s, self.backward_s = clock, forward_s, backward_s

    def call(self, x):
        def sleep(seconds):
            self.clock.sleep(float(seconds))
            return np.float32(0)

        @tf.custom_gradient
        def slow(x):
            def gradient(dy):
                return dy + tf.numpy_function(sleep, [self.backward_s], tf.float32)

            return x + tf.numpy_function(sleep, [self.forward_s], tf.float32), gradient

        outputs = slow(x)
        outputs.set_shape(x.shape)
        return outputs

    def compute_output_shape(self, shape):
        return shape


@pytest.mark.measures
def test_the_profile_finds_the_sleepers(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(block_passes, "time", clock)
    monkeypatch.setattr(block_costs, "others", lambda device: [])  # which would sleep meanwhile
    layers = [Sleeper(clock, *each) for each in [(), (0.02,), (), (0, 0.03), ()]]
    model = keras.Sequential([keras.Input((4,)), L.Dense(4), *layers, L.Dense(2)])
    measured = pipetrain.profile(model, batch_size=8, verbose=False, budget_s=None)
    forward, backward = ([getattr(b, key) for b in measured.blocks] for key in ("forward_s", "backward_s"))
    assert np.argmax(forward) == 2
    assert np.argmax(backward) == 4
    assert forward[2] == pytest.approx(0.02, abs=1e-4)
    assert backward[4] == pytest.approx(0.03, abs=1e-4)
    cut = pipetrain.partition(measured, num_devices=2)
    assert cut.slowest_s < 0.031  # one sleeper a stage


def test_the_same_model_is_always_cut_the_same_way():
    cuts = set()
    for _ in range(3):
        pm = pipetrain.PipelineModel(networks.mlp(), stages=3, scheme="spectrain")
        cuts.add(pm.partition(batch_size=16).cuts)
    assert len(cuts) == 1


@pytest.mark.wide
def test_a_damaged_profile_cache_is_measured_anew(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = pipetrain.PipelineModel(networks.mlp(), stages=3, scheme="spectrain").partition(batch_size=16)
    (file,) = (tmp_path / "pipetrain").iterdir()
    file.write_text(file.read_text()[:100])
    second = pipetrain.PipelineModel(networks.mlp(), stages=3, scheme="spectrain").partition(batch_size=16)
    assert first.stages[0].first == second.stages[0].first == "d0"
    assert len(file.read_text()) > 100


@pytest.mark.wide
def test_the_profile_cache_tells_kernels_apart(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for setting in ("0", "1", "0"):
        monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", setting)
        pipetrain.PipelineModel(networks.mlp(), stages=3, scheme="spectrain").partition(batch_size=16)
    assert len(list((tmp_path / "pipetrain").iterdir())) == 2


@pytest.mark.parametrize("microbatches", [1, 3])
def test_a_profile_of_microbatches_is_measured_with_the_rows_of_one(microbatches, monkeypatch):
    """The largest has 7 of 20 rows; all together take 20/7 of its time, and weights are updated once."""
    measured = []

    def time_blocks(blocks, *_):
        measured.append([spec.shape[0] for spec in blocks[0].inputs])
        return timing.MeasuredSeconds(np.ones(len(blocks)), 2 * np.ones(len(blocks)), 6.0, 0.0)

    monkeypatch.setattr(block_costs, "time_blocks", time_blocks)
    monkeypatch.setattr(profiler, "may_be_compiled", lambda *_: False)
    model, rows = networks.mlp(), 7 if microbatches == 3 else 20
    got = pipetrain.profile(model, 20, verbose=False, budget_s=None, microbatches=microbatches)
    assert measured == [[rows]]
    assert got.batch_size == 20
    assert got.blocks[0].forward_s == pytest.approx(20 / rows)
    assert got.blocks[0].backward_s == pytest.approx(2 * 20 / rows)
    assert sum(block.update_s for block in got.blocks) == pytest.approx(6.0)
    whole = pipetrain.profile(model, 20, verbose=False, budget_s=None)
    assert [block.output_bytes for block in got.blocks] == [block.output_bytes for block in whole.blocks]
    assert [block.product_bytes for block in got.blocks] == [block.product_bytes for block in whole.blocks]


@pytest.mark.wide
def test_pipelines_that_split_minibatches_are_planned_for_their_microbatches(monkeypatch):
    asked = []

    def noted(*given):
        asked.append(given[-1])
        return profiler.cached_profile(*given)

    monkeypatch.setattr(planner, "cached_profile", noted)
    for scheme, microbatches in (("1f1b", 4), ("spectrain", None)):
        pipetrain.PipelineModel(networks.mlp(), 2, scheme, microbatches=microbatches).partition(12)
    assert asked == [4, 1]


def test_more_microbatches_than_rows_are_refused():
    with pytest.raises(ValueError, match=r"Received: microbatches=5, batch_size=4\. Try at most 4"):
        pipetrain.profile(networks.mlp(), 4, verbose=False, budget_s=None, microbatches=5)


@pytest.mark.parametrize("links", [True, False])
def test_of_two_processes_that_measure_at_once_the_first_ones_profile_counts(links, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if not links:
        monkeypatch.setattr(Path, "hardlink_to", Mock(side_effect=PermissionError))
    chain, numbers = Chain(networks.mlp()), itertools.count(1)

    def profile_chain(*_):
        """While one measures, another does so too, from its beginning to its end."""
        number = next(numbers)
        if number == 1:
            assert profile().blocks[0].forward_s == 2.0
        return Profile("m", 16, tuple(BlockProfile(block.name, number, 1.0, 0, 0) for block in chain.blocks))

    def profile():
        return profiler.cached_profile(chain, 16, ((networks.FEATURES,),), "CPU:0")

    monkeypatch.setattr(profiler, "profile_chain", profile_chain)
    mine, later = profile(), profile()
    assert mine == later
    assert mine.blocks[0].forward_s == 2.0
    assert next(numbers) == 3
    assert len(list((tmp_path / "pipetrain").iterdir())) == 1


@pytest.mark.parametrize(
    ("spreads", "seconds", "kept"),
    [((0.3, 0.2), 1.0, 2), ((0.3, 0.4), 1.0, 1), ((0.1, 0.0), 1.0, 1), ((0.3, 0.2), 1e-5, 1)],
)
def test_a_disturbed_profile_is_measured_once_more_by_another_process(spreads, seconds, kept, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    chain, numbers = Chain(networks.mlp()), itertools.count(1)

    def profile_chain(*_):
        number = next(numbers)
        blocks = tuple(BlockProfile(block.name, number * seconds, 0.0, 0, 0) for block in chain.blocks)
        return Profile("m", 16, blocks, spreads[number - 1])

    def measured():
        profile = profiler.cached_profile(chain, 16, ((networks.FEATURES,),), "CPU:0")
        return round(profile.blocks[0].forward_s / seconds)

    monkeypatch.setattr(profiler, "profile_chain", profile_chain)
    assert [measured(), measured()] == [1, 1]
    profiler._trusted.clear()  # as in another process
    assert [measured(), measured()] == [kept, kept]
    assert len(list((tmp_path / "pipetrain").iterdir())) == 1


@pytest.mark.measures
def test_a_noisy_machine_is_measured_longer_and_said_so():
    rng = np.random.default_rng(0)

    def whole(taken):
        return taken.whole

    steady, found = timing.until_steady(lambda: block_passes.TimedBlocks([0.01], [0.02], 0.03, []), whole)
    assert found == pytest.approx((0.06, 0.0))
    assert len(steady) == timing.PASSES
    noisy, found = timing.until_steady(
        lambda: block_passes.TimedBlocks([rng.choice([0.1, 0.3])], [0.0], 0.0, []), whole
    )
    assert found.error_s > timing.STEADY * found.median_s
    assert sum(each.whole for each in noisy) == pytest.approx(timing.AT_MOST_S, abs=0.3)
    profile = Profile("m", 1, (BlockProfile("b", 0.1, 0.1, 0, 0),), spread=0.2)
    assert "(within 20%)" in str(profile)
    assert "too busy" in str(profile)
    assert Profile.from_json(profile.to_json()) == profile


class Counted(L.Dense):
    """Counts how often the gradient of its inputs is computed, by an operation that TensorFlow may leave out."""

    count = 0

    def call(self, x):
        def counted(dx):
            self.count += 1
            return dx

        @tf.custom_gradient
        def same(x):
            return tf.identity(x), lambda dy: tf.ensure_shape(
                tf.numpy_function(counted, [dy], tf.float32, stateful=False), dy.shape
            )

        return super().call(same(x))


def test_a_backward_timed_on_a_worker_has_both_its_products():
    """Of weights and of inputs; the latter nothing reads there."""
    counting = Counted(8)
    model = keras.Sequential([keras.Input((8,)), L.Dense(8), counting, L.Dense(8)])
    kinds = Kinds(Chain(model), 4, ((8,),))
    for kind in kinds.all:
        kind.trace()
    once = block_passes.remote_pass([kinds.placed(n) for n in range(3)], "/device:CPU:0")
    before = counting.count
    for _ in range(5):
        once()
    assert counting.count == before + 5


@pytest.mark.wide
def test_the_loss_of_large_outputs_is_measured():
    """By the last stage's device, and what a metric takes by the caller; of small outputs neither is."""
    x = keras.Input((16,), dtype="int32")
    scores = L.Dense(4000, name="scores")(L.Embedding(4000, 4, name="words")(x))
    found = pipetrain.profile(keras.Model(x, scores), batch_size=8, verbose=False, budget_s=None)
    assert found.loss_s > 0
    assert found.metric_s > 0
    assert found.trained[-1].forward_s == found.blocks[-1].forward_s + found.loss_s
    assert found.total_s > sum(block.forward_s + block.backward_s for block in found.blocks)
    assert "(loss)" in str(found)
    small = pipetrain.profile(networks.mlp(), batch_size=8, verbose=False, budget_s=None)
    assert (small.loss_s, small.metric_s) == (0.0, 0.0)
    assert "(loss)" not in str(small)


@pytest.mark.parametrize("remote", [False, True])
def test_a_loss_is_timed_for_outputs_of_several_kinds(remote, monkeypatch):
    """On a worker by its own clock; numbers of examples, which have no scores, take nothing."""
    monkeypatch.setattr(timing, "is_remote", lambda device: remote)
    outputs = [
        tf.TensorSpec([64, 5000], tf.float32),
        tf.TensorSpec([8, 4, 100], tf.bfloat16),
        tf.TensorSpec([], tf.float32),
        tf.TensorSpec([64, 10], tf.int32),
    ]
    for seconds in timing.time_loss(outputs, "/device:CPU:0", []):
        assert 0 < seconds < 10
    assert timing.time_loss(outputs[1:], "/device:CPU:0", []) == (0.0, 0.0)


def test_a_profile_keeps_and_scales_its_loss():
    compiled = Seconds(0.1, 0.2, 0.0)
    profile = Profile("m", 10, (BlockProfile("b", 0.5, 0.5, 0, 0, compiled=compiled),), loss_s=0.25, metric_s=0.125)
    assert Profile.from_json(profile.to_json()) == profile
    assert profile.trained[0].compiled.forward_s == pytest.approx(0.35)
    assert (profile.scaled(20).loss_s, profile.scaled(20).metric_s) == (0.5, 0.25)
    assert (profile.faster(2).loss_s, profile.faster(2).metric_s) == (0.125, 0.0625)


def test_a_plan_gives_the_loss_to_the_last_stage_and_the_metric_to_the_caller():
    """Three blocks of 1 s: the loss moves the cut; the metric takes a processor's time beside the stages'."""
    blocks = tuple(BlockProfile(name, 0.4, 0.6, 0, 0) for name in "abc")
    profile = Profile("m", 10, blocks, loss_s=1.5, metric_s=0.75)
    links = (Level(SHARED_MEMORY),)
    plain, cut = (partition(each, 2, Cluster(links)) for each in (replace(profile, loss_s=0.0), profile))
    assert plain.cuts == ("a",)
    assert cut.cuts == ("b",)
    assert [stage.total_s for stage in cut.stages] == pytest.approx([2.0, 2.5])
    assert cut.step_s == pytest.approx(2.5)  # the metric hides
    assert partition(profile, 2, Cluster(links, processors=2)).step_s == pytest.approx((2.0 + 2.5 + 0.75) / 2)
    assert simulate(cut, "gpipe", Cluster(links), 20, microbatches=1).step_s == pytest.approx(4.5 + 0.75)


def test_bytes_of_a_block_whose_first_dimension_is_not_the_batch():
    x = keras.Input((8, 8, 4))
    windows = keras.ops.reshape(x, (-1, 16, 4))
    inner = L.Dense(4, name="inner")(windows)
    model = keras.Model(x, L.Dense(2)(L.Flatten()(keras.ops.reshape(inner, (-1, 8, 8, 4)))))
    profile = pipetrain.profile(model, batch_size=3, verbose=False, budget_s=None)
    sizes = {block.name: block.output_bytes for block in profile.blocks}
    assert sizes["inner"] == 3 * 8 * 8 * 4 * 4


def test_the_bytes_of_a_block_are_those_of_all_values_that_cross_the_cut_after_it():
    x = keras.Input((6,))
    first = L.Dense(5, name="first")(x)
    second = L.Dense(3, name="second")(first)
    model = keras.Model(x, L.Dense(2, name="last")(L.Concatenate(name="joined")([first, second])))
    profile = pipetrain.profile(model, batch_size=4, verbose=False, budget_s=0.01)
    sizes = {block.name: block.output_bytes for block in profile.blocks}
    assert sizes == {"first": 4 * 4 * 5, "second": 4 * 4 * (5 + 3), "joined": 4 * 4 * 8, "last": 4 * 4 * 2}


def test_a_progress_bar_ends_where_xla_is_not_tried(monkeypatch, capsys):
    monkeypatch.setattr(progress, "PATIENCE_S", -1.0)
    monkeypatch.setattr(profiler, "LITTLE_S", float("inf"))
    chain = Chain(networks.mlp())
    profiler.profile_chain(chain, 4, ((networks.FEATURES,),), "/device:CPU:0", verbose=True, with_xla=True)
    steps = 4 * len(chain.blocks) + 1
    said = capsys.readouterr().out
    assert f"{steps}/{steps}" in said
    assert said.endswith("\n")


def test_workspaces_are_measured_on_gpus_as_the_process_uses_them(monkeypatch):
    """Sessions with other logical devices than the process are refused, and their operations put on a CPU."""
    used = block_kinds.gpu_options()
    assert block_kinds._config().gpu_options == used
    used.experimental.virtual_devices.add(memory_limit_mb=[64.0, 64.0])
    monkeypatch.setattr(block_kinds, "gpu_options", lambda: used)
    assert block_kinds._config().gpu_options == used


@pytest.mark.wide
def test_which_weight_gradients_may_wait():
    """Products, those after a recurrent loop too, and filter gradients; not normalizations', lookups' and biases'."""
    L = keras.layers
    x = keras.Input((5,), dtype="int32")
    y = L.LayerNormalization(name="n")(L.Dense(3, name="d")(L.Embedding(7, 4, name="e")(x)))
    y = L.LSTM(2, name="l")(L.Conv1D(2, 3, name="c")(y))
    found = pipetrain.profile(keras.Model(x, y), 2, verbose=False, budget_s=None)
    assert {block.name: block.late_bytes for block in found.blocks} == {
        "e": 0, "d": 4 * 3 * 4, "n": 0, "c": 3 * 3 * 2 * 4, "l": (2 + 2) * 4 * 2 * 4,
    }  # fmt: skip
