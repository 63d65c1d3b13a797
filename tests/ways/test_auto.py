"""The way to train that ``scheme="auto"`` takes: predicted for all, the fastest that fits, chosen once."""

from __future__ import annotations

import itertools
import random
import re
from dataclasses import replace

import inside
import keras
import networks
import numpy as np
import parameters
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import pipetrain
from pipetrain.compute.profiling import limits
from pipetrain.frontend.auto import AutoStrategy, WayTrial, compared_s, kept
from pipetrain.frontend.input_data import sample_of
from pipetrain.plan.choice import MARGIN, Choice, Way, least_slowest_s
from pipetrain.plan.cluster import Cluster, Level, Link
from pipetrain.plan.grid_cost import GridNetwork
from pipetrain.plan.memory import Training
from pipetrain.plan.partition import partition, plan
from pipetrain.plan.profile import BlockProfile, Profile, bounds_of, merged, undisturbed
from pipetrain.run import window
from pipetrain.run.window import TrialClock
from pipetrain.schemes.grid import Grid
from pipetrain.schemes.options import Interleaved, SpecTrain, name_of
from pipetrain.simulation.every_way import choose

MIB = 2**20
ETHERNET = Cluster((Level(Link(125e6, 1e-4)),))


def chain(blocks, output_bytes, weight_bytes, seconds=1e-3, batch_size=64):
    block = BlockProfile("", seconds, 2 * seconds, output_bytes, weight_bytes, 2 * output_bytes, 1e-10 * weight_bytes)
    named = tuple(BlockProfile(f"b{n}", *list(vars(block).values())[1:7]) for n in range(blocks))
    return Profile("chain", batch_size, named, spread=0.01)


def test_heavy_weights_make_a_pipeline_and_heavy_activations_data_parallelism():
    pipeline = choose(chain(8, output_bytes=MIB // 16, weight_bytes=16 * MIB), 4, ETHERNET)
    assert pipeline.taken.kind == "pipeline" and len(pipeline.taken.arguments["cuts"]) >= 3
    copies = choose(chain(8, output_bytes=64 * MIB, weight_bytes=MIB // 64), 4, ETHERNET)
    assert copies.taken.kind == "data parallelism"


def test_the_baseline_is_predicted_and_told_and_not_taken():
    """However fast it is; all-reduce and a parameter server do the same, exactly."""
    choice = choose(chain(8, output_bytes=64 * MIB, weight_bytes=MIB // 64), 4, ETHERNET)
    mirrored = [way for way in choice.ways if way.arguments["scheme"] == "data-parallel"]
    assert [str(way) for way in mirrored] == ["data-parallel"] and re.search("data-parallel .* to compare", str(choice))
    fast = replace(choice, ways=[*choice.ways, mirrored[0]._replace(step_s=1e-9)])
    assert fast.taken.arguments["scheme"] in ("all-reduce", "parameter-server")
    assert not [way for way in fast.near if way.arguments["scheme"] == "data-parallel"]
    assert "data-parallel" not in fast.reason
    with pytest.raises(ValueError, match="No way to train fits"):
        replace(choice, ways=[each._replace(fits=each in mirrored) for each in choice.ways])


def test_a_slow_link_leaves_one_device():
    alone = choose(chain(4, output_bytes=64 * MIB, weight_bytes=64 * MIB), 4, Cluster((Level(Link(1e6)),)))
    assert alone.taken.arguments == {"scheme": "single"}
    assert alone.gap is None


def test_weights_are_predicted_only_where_that_is_allowed():
    profile = chain(8, output_bytes=MIB // 16, weight_bytes=16 * MIB)
    assert not [way for way in choose(profile, 4, ETHERNET).ways if "horizon" in way.told]
    allowed = choose(profile, 4, ETHERNET, staleness="predicted").taken
    assert allowed.arguments["scheme"] == SpecTrain(horizon="target") and 4 * allowed.arguments["microbatches"] >= 4
    with pytest.raises(ValueError, match="staleness='some'"):
        choose(profile, 4, ETHERNET, staleness="some")


def test_what_does_not_fit_is_said_and_not_taken():
    profile = chain(8, output_bytes=MIB, weight_bytes=16 * MIB)
    limited = Cluster(ETHERNET.levels, memory_bytes=150 * MIB)
    choice = choose(profile, 4, limited)
    assert choice.taken.kind == "pipeline" and choice.taken.memory_bytes <= 150 * MIB
    assert not choice.ways[0].fits and "too much" in str(choice)
    with pytest.raises(ValueError, match="No way to train fits the devices"):
        choose(profile, 4, Cluster(ETHERNET.levels, memory_bytes=MIB))


def test_the_table_says_what_is_taken_and_why():
    text = " ".join(str(choose(chain(8, output_bytes=MIB // 16, weight_bytes=16 * MIB), 4, ETHERNET)).split())
    assert "Taken: scheme=" in text and "as fast as one device" in text
    assert "Another cut could make the slowest stage" in text


def test_the_simplest_of_equally_fast_ways_is_taken():
    ways = [Way("single", {"scheme": "single"}, 1, 1.0, 1), Way("pipeline", {"scheme": "1f1b"}, 2, 1 / MARGIN, 1)]
    assert Choice(8, ways).taken.kind == "single"
    assert Choice(8, [ways[0], ways[1]._replace(step_s=0.9)]).taken.kind == "pipeline"


@settings(max_examples=30)
@given(
    st.lists(st.tuples(st.floats(1e-4, 1e-2), st.integers(1, 10 * MIB)), min_size=2, max_size=7),
    st.integers(2, 3),
    st.booleans(),
)
def test_the_gap_holds_against_every_cut(blocks, devices, replicate):
    profile = Profile("p", 12, tuple(BlockProfile(f"b{n}", s, s, b, b) for n, (s, b) in enumerate(blocks)))
    devices = min(devices, len(blocks))
    training = Training("1f1b", microbatches=2)
    found = partition(profile, devices, ETHERNET, replicate=replicate, training=training)
    least_s = least_slowest_s(profile, devices, replicate)
    gap = found.slowest_s / least_s - 1
    every = []
    for stages in range(1, devices + 1):
        for cuts in itertools.combinations(range(1, len(blocks)), stages - 1):
            for replicas in itertools.product(range(1, devices + 1), repeat=stages):
                if sum(replicas) == devices and (replicate or max(replicas) == 1):
                    every.append(plan(profile, [*cuts, len(blocks)], ETHERNET, replicas, training).slowest_s)
    assert least_s <= min(every) * (1 + 1e-9)
    assert found.slowest_s <= min(every) * (1 + gap + 1e-9)


@pytest.mark.wide
def test_a_long_chain_is_compared_in_few_blocks_and_cut_in_all():
    random = np.random.default_rng(1)
    blocks = [
        BlockProfile(
            f"b{n}", *random.uniform(1e-5, 1e-3, 2), *map(int, random.integers(1, 10**6, 3)), 1e-6, late_bytes=n
        )
        for n in range(300)
    ]
    profile = Profile("long", 64, tuple(blocks))
    few = merged(profile, bounds := bounds_of(profile, 96))
    assert len(few.blocks) <= 96 and len(bounds) == len(few.blocks) + 1
    assert few.total_s == pytest.approx(profile.total_s)
    for name in ("weight_bytes", "activation_bytes", "late_bytes"):
        assert sum(getattr(block, name) for block in few.blocks) == sum(getattr(block, name) for block in blocks)
    assert [block.name for block in few.blocks] == [f"b{end - 1}" for end in bounds[1:]]
    assert few.blocks[3].output_bytes == blocks[bounds[4] - 1].output_bytes
    choice = choose(profile, 4, ETHERNET)
    assert sum(stage.blocks for stage in choice.cut.stages) == 300
    assert merged(profile, bounds_of(profile, 300)) == profile


def test_a_grid_is_among_the_ways_where_it_divides_a_layer():
    network = GridNetwork.chain((64, 4096, 4096, 4096))
    blocks = [BlockProfile(each.name, 1e-4, 2e-4, 4 * 32 * 4096, 4 * each.weights) for each in network.layers]
    profile = Profile("wide", 32, tuple(blocks), network=network)
    (way,) = [way for way in choose(profile, 4, ETHERNET).ways if way.kind == "grid"]
    assert way.arguments["scheme"].outputs > 1
    copies = next(way for way in choose(profile, 4, ETHERNET).ways if way.arguments["scheme"] == "all-reduce")
    assert way.step_s < copies.step_s and way.memory_bytes < copies.memory_bytes
    assert not [way for way in choose(replace(profile, network=None), 4, ETHERNET).ways if way.kind == "grid"]


def test_seconds_of_whole_minibatches_that_something_disturbed_do_not_count():
    steady = chain(8, output_bytes=MIB, weight_bytes=MIB)
    disturbed = replace(steady, blocks=tuple(block.longer(5.0, 5.0) for block in steady.blocks), spread=0.2)
    pieces = replace(steady, microbatches=4)
    assert [b.seconds for b in undisturbed(disturbed, pieces).blocks] == [b.seconds for b in steady.blocks]
    assert undisturbed(steady, replace(disturbed, microbatches=4)) == steady
    assert undisturbed(disturbed, None) is disturbed
    assert "too busy" in str(choose(disturbed, 2, ETHERNET, of_microbatches=pieces))


WAYS = {
    "single": {"scheme": "single"},
    "all-reduce": {"scheme": "all-reduce"},
    "grid": {"scheme": Grid(2, 1)},
    "zb-h2": {"scheme": "zb-h2", "microbatches": 2, "cuts": ("dense_1",)},
    "interleaved": {"scheme": Interleaved(chunks=2), "microbatches": 2, "cuts": ("dense_0", "dense_1", "dense_2")},
    "hybrid": {"scheme": "1f1b", "microbatches": 2, "replicas": (2, 1), "cuts": ("dense_1",)},
}


def network():
    keras.utils.set_random_seed(3)
    layers = [keras.layers.Dense(8, activation="tanh", name=f"dense_{n}") for n in range(4)]
    return keras.Sequential([keras.Input((6,)), *layers])


def data():
    random = np.random.default_rng(0)
    return random.normal(size=(40, 6)).astype("float32"), random.normal(size=(40, 8)).astype("float32")


def trained(model, epochs=2, callbacks=None, compiles=True):
    if compiles:
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss="mse", metrics=["mae"])
    return model.fit(*data(), batch_size=8, epochs=epochs, shuffle=False, verbose=0, callbacks=callbacks).history


@pytest.mark.wide
@pytest.mark.parametrize("name", parameters.by_default(WAYS, "all-reduce", "grid", "zb-h2", "hybrid"))
def test_every_way_that_may_be_taken_trains_as_plain_keras(name, monkeypatch):
    plain, ours = network(), network()
    expected = trained(plain)
    kind = {"hybrid": "hybrid", "single": "single"}.get(name, "pipeline")
    choice = Choice(8, [Way(kind, WAYS[name], 2, 1.0, 1)])
    monkeypatch.setattr(AutoStrategy, "choice", lambda self, rows, shapes: choice)
    pm = pipetrain.PipelineModel(
        ours, scheme="auto", devices=("CPU:0", "CPU:1", "CPU:2")[: 3 if name == "hybrid" else 2]
    )
    before = pm.predict(data()[0], verbose=0)
    found = trained(pm)
    assert pm.scheme == name_of(WAYS[name]["scheme"]) and pm.choice is choice
    assert not np.allclose(before, pm.predict(data()[0], verbose=0))
    networks.assert_close(ours.get_weights(), plain.get_weights())
    for key, values in expected.items():
        np.testing.assert_allclose(found[key], values, rtol=1e-4)
    trained(pm, compiles=False), trained(plain, compiles=False)
    networks.assert_close(ours.get_weights(), plain.get_weights())


@pytest.mark.wide
def test_only_stages_run_their_forward_again(monkeypatch):
    for name, again in (("all-reduce", False), ("zb-h2", True), ("single", True)):
        choice = Choice(8, [Way("pipeline", WAYS[name], 2, 1.0, 1)])
        monkeypatch.setattr(AutoStrategy, "choice", lambda self, rows, shapes, choice=choice: choice)
        pm = pipetrain.PipelineModel(network(), scheme="auto", devices=("CPU:0", "CPU:1"), recompute=True)
        trained(pm, epochs=1)
        assert inside.planner(pm).training.recompute == again


@pytest.mark.wide
def test_it_is_measured_and_chosen_at_the_first_fit_alone(monkeypatch):
    plain, ours = network(), network()
    trained(plain)
    pm = pipetrain.PipelineModel(ours, scheme="auto", devices=("CPU:0", "CPU:1"))
    assert pm.choice is None and pm.scheme == "auto"
    trained(pm)
    assert "Taken: scheme=" in str(pm.choice)
    networks.assert_close(ours.get_weights(), plain.get_weights())
    monkeypatch.setattr(AutoStrategy, "choice", None)
    trained(pm)


@pytest.mark.wide
def test_a_run_that_goes_on_keeps_its_way(tmp_path, monkeypatch, capsys):
    choice = Choice(8, [Way("pipeline", WAYS["zb-h2"], 2, 1.0, 1)])
    monkeypatch.setattr(AutoStrategy, "choice", lambda self, rows, shapes: choice)

    def run(epochs, directory):
        pm = pipetrain.PipelineModel(network(), scheme="auto", devices=("CPU:0", "CPU:1"))
        trained(pm, epochs, [pipetrain.callbacks.PipelineCheckpoint(tmp_path / directory, every_steps=2)])
        return pm

    whole = run(3, "whole")
    run(2, "stopped")
    monkeypatch.setattr(AutoStrategy, "choice", None)
    newest = max((tmp_path / "stopped").glob("step-*.npz"))
    newest.write_bytes(newest.read_bytes()[:-100])
    capsys.readouterr()
    with pytest.warns(UserWarning, match=f"{newest.name} is damaged"):
        resumed = run(3, "stopped")
    assert capsys.readouterr().out == ""
    assert resumed.scheme == "zb-h2" and resumed.choice is None
    for a, b in zip(resumed.get_weights(), whole.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.fixture
def no_trials(tmp_path, monkeypatch):
    """None is kept from before; they are short."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("WARM_UP_S", "TIMED_S"):
        monkeypatch.setattr(window, name, 0.0)


def near_ways(seconds=(1.0, 1.1, 1.2)):
    """One device, all-reduce and a pipeline, none of which is predicted to be much faster."""
    names = ("single", "all-reduce", "zb-h2")
    kinds = ("single", "data parallelism", "pipeline")
    return Choice(8, [Way(k, WAYS[n], 2, s, 1) for k, n, s in zip(kinds, names, seconds, strict=True)])


def test_ways_near_the_fastest_are_tried_one_of_each_scheme_and_one_device():
    choice = near_ways((1.9, 1.34, 1.0))
    assert [way.kind for way in choice.near] == ["single", "pipeline", "data parallelism"]
    assert [way.kind for way in near_ways((2.1, 1.36, 1.0)).near] == ["pipeline"]
    alike = choice.ways[-1]._replace(step_s=1.1, arguments={"scheme": "zb-h1"}, family="halves")
    first = replace(choice, ways=[*choice.ways[:2], choice.ways[-1]._replace(family="halves"), alike])
    assert [way.step_s for way in first.near] == [1.9, 1.0, 1.34]
    unfit = replace(choice, ways=[way._replace(fits=way.kind != "pipeline") for way in choice.ways])
    assert [way.kind for way in unfit.near] == ["single", "data parallelism"]


def test_of_ways_that_were_tried_the_fastest_is_taken():
    choice = near_ways()
    tried = choice.with_trials([*zip(choice.ways, (2.0, float("inf"), 1.0), strict=True)])
    assert choice.taken.kind == "single" and tried.taken.kind == "pipeline"
    text = " ".join(str(tried).split())
    assert "In a trial it was 2.00x as fast as one device" in text and "refused" in text and "tried" in text
    untried = choice.with_trials([(choice.ways[1], 5.0)])
    assert untried.taken.kind == "data parallelism"  # what was not tried is not known to be faster


@pytest.mark.wide
@pytest.mark.parametrize("fastest", ["single", "all-reduce", "zb-h2"])
def test_a_trial_leaves_nothing_in_the_model_and_the_fastest_way_trains(fastest, no_trials, monkeypatch):
    tried, own = [], WayTrial.turn_s

    def turn_s(self):
        assert 0 < own(self) < 60
        tried.append(self.model.scheme)
        return 1.0 if tried[-1] == fastest else 1.1

    monkeypatch.setattr(WayTrial, "turn_s", turn_s)
    monkeypatch.setattr(AutoStrategy, "choice", lambda self, rows, shapes: near_ways())
    expected = networks.in_way(network(), devices=("CPU:0", "CPU:1"), **WAYS[fastest])
    pm = pipetrain.PipelineModel(network(), scheme="auto", devices=("CPU:0", "CPU:1"))
    histories = [networks.without_figures(trained(model)) for model in (expected, pm)]
    assert tried[:3] == ["single", "all-reduce", "zb-h2"] and pm.scheme == fastest
    assert tried[3:] == 3 * tried[3:6] and sorted(tried[3:6]) == sorted(tried[:3])  # each is near the fastest
    assert histories[0] == histories[1]
    networks.assert_equal(pm.get_weights(), expected.get_weights())
    networks.assert_equal(*([np.asarray(v) for v in each.optimizer.variables] for each in (pm, expected)))


RATES = {
    "schedule": lambda: keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.8)),
    "function": lambda: keras.optimizers.Adam(lambda: 0.01),
    "ftrl": lambda: keras.optimizers.Ftrl(0.1),
    "accumulating": lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2),
}


@pytest.mark.wide
@pytest.mark.parametrize("name", RATES)
def test_optimizers_of_all_kinds_are_tried(name, no_trials, monkeypatch):
    monkeypatch.setattr(AutoStrategy, "choice", lambda self, rows, shapes: near_ways())
    weights = []
    for is_plain in (True, False):
        model = network()
        model = model if is_plain else pipetrain.PipelineModel(model, scheme="auto", devices=("CPU:0", "CPU:1"))
        model.compile(RATES[name](), loss="mse")
        trained(model, compiles=False)
        weights.append(model.get_weights())
    assert all(0 < way.trial_s < 60 for way in model.choice.ways)
    networks.assert_close(*weights)


def test_random_numbers_go_on_as_without_a_trial():
    def drawn():
        return random.getstate(), np.random.get_state()[1].tolist()

    model = network()
    before = drawn()
    with kept(model):
        random.random(), np.random.shuffle([1, 2, 3])
    assert drawn() == before


@pytest.mark.wide
def test_a_trial_is_made_once_for_a_profile(no_trials, monkeypatch):
    """And anew where something else was predicted, or what was kept is damaged."""
    tried = []

    def turn_s(self):
        tried.append(self)
        return 2.0 if len(tried) % 3 else 1.0

    def schemes(seconds):
        monkeypatch.setattr(AutoStrategy, "choice", lambda self, rows, shapes: near_ways(seconds))
        pm = pipetrain.PipelineModel(network(), scheme="auto", devices=("CPU:0", "CPU:1"))
        trained(pm, epochs=1)
        return pm.scheme, len(tried)

    monkeypatch.setattr(WayTrial, "turn_s", turn_s)
    assert schemes((1.0, 1.0, 1.01)) == schemes((1.0, 1.0, 1.01)) == ("zb-h2", 3)
    assert schemes((1.0, 1.0, 1.02)) == ("zb-h2", 6)
    for path in limits.folder().glob("trials-*.json"):
        path.write_text("[1.0,", encoding="utf-8")
    assert schemes((1.0, 1.0, 1.02)) == ("zb-h2", 9)


@pytest.mark.wide
@pytest.mark.parametrize(("together", "turns"), [(True, 2), (False, 0)])
def test_first_trials_hold_and_are_not_kept_where_ways_cannot_train_side_by_side(together, turns):
    """The second of the finalists fails in its turn, at which turns end; or they would not fit."""
    seconds = iter([1.0, 1.1, 2.0, 1.0, float("inf")])
    made = []

    class Trial:
        def __init__(self):
            made.append(self)

        def turn_s(self):
            return next(seconds)

    found, is_to_keep = compared_s([Trial] * 3, [1.0, 1.0, 1.0], lambda numbers: together)
    assert found == [1.0, 1.1, 2.0] and is_to_keep is not together
    assert len(made) == 3 + turns and len([*seconds]) == (0 if together else 2)


@pytest.mark.parametrize(("alone_s", "join_s"), [(0.1, 10.0), (0.05, 3.0), (0.3, 10.0), (4.0, 20.0), (0.01, 0.02)])
def test_a_trial_of_steps_that_repeat_times_whole_periods(alone_s, join_s, monkeypatch):
    now_s = itertools.accumulate(alone_s + join_s * (step % 8 == 0) for step in itertools.count(1))
    monkeypatch.setattr("pipetrain.run.window.time.perf_counter", lambda: next(now_s))
    clock = TrialClock(8)
    while not clock.is_enough:
        clock.tick()
    assert clock.minibatch_s == pytest.approx(alone_s + join_s / 8)


@pytest.mark.wide
def test_a_way_that_the_model_refuses_is_not_taken(no_trials, monkeypatch):
    """Of a model that draws with a layer's own state, whose loss no trial must leave changed."""
    monkeypatch.setattr(AutoStrategy, "choice", lambda self, rows, shapes: near_ways((1.0, 1.0, 0.9)))
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dropout(0.2), keras.layers.Dense(8)]
    model = keras.Sequential([keras.Input((6,)), *layers])  # has no layer dense_1 after which to cut
    pm = pipetrain.PipelineModel(model, scheme="auto", devices=("CPU:0", "CPU:1"))
    trained(pm)
    assert pm.scheme in ("single", "all-reduce") and "refused" in str(pm.choice)


@pytest.mark.wide
def test_an_interrupted_trial_leaves_the_model_as_it_was(no_trials, monkeypatch):
    monkeypatch.setattr(AutoStrategy, "choice", lambda self, rows, shapes: near_ways())
    pm = pipetrain.PipelineModel(network(), scheme="auto", devices=("CPU:0", "CPU:1"))
    before = pm.get_weights()

    def interrupted(self):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(TrialClock, "tick", interrupted)
        trained(pm)
    networks.assert_equal(pm.get_weights(), before)
    assert pm.scheme == "auto" and pm.choice is None
    plain = network()
    trained(plain), trained(pm)
    networks.assert_close(pm.get_weights(), plain.get_weights())


def test_data_are_not_read_for_a_trial():
    x, y = data()
    (some, labels) = sample_of(tf.data.Dataset.from_tensor_slices((x, y)).batch(8), None, 8)
    assert some.shape == (8, 6) and labels.shape == (8, 8) and some.dtype == tf.float32
    assert np.any(some) and not np.any(labels)
    first = sample_of({"a": x}, y, 8)
    np.testing.assert_array_equal(first[0]["a"], x[:8])
    assert sample_of(iter([(x, y)]), None, 8) is None
    assert sample_of(tf.data.Dataset.from_generator(lambda: [(x, y)], output_types=("float32",) * 2), None, 8) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"microbatches": 4}, "With scheme='auto' this is chosen, too. Received: microbatches=4"),
        ({"cuts": ("no such layer",)}, "no such layer"),
        ({"order": "tic"}, "With scheme='auto' this is chosen, too. Received: order='tic'"),
        ({"staleness": "much"}, "Received: staleness='much'"),
        ({"memory_bytes": 0}, "Received: memory_bytes=0"),
        ({"scheme": "1f1b", "staleness": "none"}, "Only scheme='auto' chooses by this. Received: staleness='none'"),
    ],
)
def test_what_it_does_not_take_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        networks.in_way(network(), **{"scheme": "auto", **options})
