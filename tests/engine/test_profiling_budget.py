"""A profile keeps to its budget: what it measures first, what it shares and estimates, and how it says so."""

from __future__ import annotations

import json
import math
from unittest.mock import Mock

import keras
import networks
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import pipetrain
from pipetrain.cli import given as given_options
from pipetrain.cli import main
from pipetrain.compute.graph.blocks import Chain
from pipetrain.compute.graph.inputs import checked_shapes
from pipetrain.compute.profiling import block_costs, profiler, progress
from pipetrain.compute.profiling.kinds import Kind, Kinds
from pipetrain.compute.profiling.limits import Budget
from pipetrain.compute.profiling.timing import MeasuredSeconds, until_steady
from pipetrain.plan.profile import BlockProfile, Profile, Seconds
from pipetrain.plan.roofline import USUAL, FittedRoofline, Measured, Product, Work

L = keras.layers
DEVICE = "/device:CPU:0"


class Clock:
    """A clock that a profile's phases advance, each kind by a second."""

    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


def perceptron():
    """Two equal wide layers, one of half the width, narrow ones: most operations in those of 64 units."""
    layers = [L.Dense(64, name="in"), L.Dense(64, name="a"), L.Dense(64, name="b"), L.Dense(32, name="c")]
    return keras.Sequential([keras.Input((8,)), *layers, L.Dense(16, name="d"), L.Dense(4, name="out")])


@pytest.fixture
def profiled(monkeypatch):
    """A function that profiles within a budget, where each kind takes a second to trace, and blocks 1 us a weight."""
    clock, timed = Clock(), []
    trace = Kind.trace

    def slow(kind):
        clock.now_s += kind.traced is None
        return trace(kind)

    def time_blocks(blocks, device, others, are_neighbours, has_time):
        timed.append((blocks, are_neighbours))
        weights = [
            sum(each.value.shape.num_elements() for each in block.segment.trainable_variables) for block in blocks
        ]
        each_s = 1e-6 * np.array(weights) + 1e-9 * np.arange(len(blocks))  # no two of them are equal
        return MeasuredSeconds(each_s, 2 * each_s, 1e-3 * len(blocks), 0.0)

    monkeypatch.setattr(Kind, "trace", slow)
    monkeypatch.setattr(block_costs, "time_blocks", time_blocks)
    monkeypatch.setattr(profiler, "Budget", lambda seconds: Budget(seconds, clock))

    def profiled(model, budget_s, rows=4, with_xla=False):
        clock.now_s, chain = 0.0, Chain(model)
        timed.clear()
        found = profiler.profile_chain(
            chain, rows, checked_shapes(model, None), DEVICE, verbose=True, with_xla=with_xla, budget_s=budget_s
        )
        return found, timed

    return profiled


def test_equal_blocks_are_measured_once_the_largest_first_and_the_rest_is_estimated(profiled):
    found, [(placed, are_neighbours)] = profiled(perceptron(), budget_s=4.0)
    measured = [block.name for block in found.blocks if not block.estimated]
    assert measured == ["a", "b", "c"]  # two seconds are 40% of the budget, and more are not begun
    assert [each.segment.about for each in placed] == ["a", "c"]
    assert not are_neighbours
    seconds = {block.name: block.seconds for block in found.blocks}
    assert seconds["a"] == seconds["b"]
    assert 0 < seconds["out"].forward_s < seconds["d"].forward_s < seconds["in"].forward_s < seconds["a"].forward_s
    assert seconds["out"].backward_s == pytest.approx(2 * seconds["out"].forward_s, rel=0.01)
    weights = {block.name: block.weight_bytes for block in found.blocks}
    assert seconds["d"].update_s / seconds["a"].update_s == pytest.approx(weights["d"] / weights["a"])
    assert found.budget_s == 4.0


@pytest.mark.parametrize("budget_s", [None, math.inf, 100.0])
def test_with_time_enough_every_block_is_measured_with_its_neighbours(budget_s, profiled):
    found, [(placed, are_neighbours)] = profiled(perceptron(), budget_s)
    assert len(placed) == len(found.blocks)
    assert are_neighbours
    assert found.budget_s is None
    assert not any(block.estimated for block in found.blocks)
    assert found.blocks[2].forward_s > found.blocks[1].forward_s  # equal ones have their own


def test_one_kind_is_measured_however_short_the_budget(profiled):
    found, _ = profiled(perceptron(), budget_s=1e-6)
    assert [block.name for block in found.blocks if not block.estimated] == ["a", "b"]  # the largest
    assert all(block.forward_s > 0 and block.backward_s > 0 for block in found.blocks)


def test_a_profile_says_what_it_estimates_and_is_read_back(profiled):
    found, _ = profiled(perceptron(), budget_s=4.0)
    said = str(found)
    assert "3 blocks estimated" in said.splitlines()[0]
    lines = {line.split()[0]: line.split()[-1] for line in said.splitlines()[1:] if line}
    assert {name: lines[name] for name in ("in", "a", "b", "c", "d", "out")} == {
        "in": "estimated", "a": "measured", "b": "measured", "c": "measured", "d": "estimated", "out": "estimated",
    }  # fmt: skip
    assert Profile.from_json(found.to_json()) == found
    whole, _ = profiled(perceptron(), None)
    assert "estimated" not in str(whole)


def test_a_profile_of_before_there_were_budgets_is_read():
    old = json.loads(Profile("m", 4, (BlockProfile("b", 1.0, 2.0, 0, 0),)).to_json())
    del old["budget_s"], old["blocks"][0]["estimated"]
    read = Profile.from_json(json.dumps(old))
    assert read.budget_s is None
    assert not read.blocks[0].estimated


def test_passes_end_with_the_time():
    left = iter([True, False])
    taken, _ = until_steady(lambda: 1e-3, lambda seconds: seconds, lambda: next(left))
    assert len(taken) == 2


@pytest.mark.wide
@pytest.mark.measures
@pytest.mark.parametrize("budget_s", [1e-3, None])
def test_a_measured_profile_within_a_budget(budget_s):
    """By the real clock: the least that is possible, and all of it."""
    model = keras.Sequential(networks.convolutional_layers())
    found = pipetrain.profile(model, 8, verbose=False, budget_s=budget_s)
    assert any(block.estimated for block in found.blocks) == (budget_s is not None)
    assert found.total_s > 0
    whole = pipetrain.profile(model, 8, verbose=False, budget_s=None)
    for key in ("name", "output_bytes", "weight_bytes", "fixed_bytes"):
        assert [getattr(block, key) for block in found.blocks] == [getattr(block, key) for block in whole.blocks]


@pytest.mark.parametrize(("budget_s", "error"), [(0, ValueError), (-1.0, ValueError), (math.nan, ValueError),
                                                 (True, ValueError), ("soon", TypeError), ([], TypeError)])  # fmt: skip
def test_budgets_that_are_none_are_refused(budget_s, error):
    with pytest.raises(error, match=r"Received: budget_s=.*Try 20, or None"):
        pipetrain.profile(networks.mlp(), 4, verbose=False, budget_s=budget_s)


@pytest.mark.wide
def test_the_bar_says_the_budget(monkeypatch, capsys):
    monkeypatch.setattr(progress, "PATIENCE_S", -1.0)
    pipetrain.profile(networks.mlp(), 4)
    assert "Profiling the model's layers, 20 s at most\n" in capsys.readouterr().out
    pipetrain.profile(networks.mlp(), 4, budget_s=None)
    assert "Profiling the model's layers\n" in capsys.readouterr().out


def test_a_kept_profile_serves_no_larger_budget(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    chain, asked = Chain(networks.mlp()), []

    def profile_chain(*given):
        """Whole from 50 s on."""
        asked.append(given[-1])
        left_out = given[-1] if given[-1] is not None and given[-1] < 50 else None
        blocks = tuple(BlockProfile(block.name, len(asked), 1.0, 0, 0) for block in chain.blocks)
        return Profile("m", 4, blocks, budget_s=left_out)

    monkeypatch.setattr(profiler, "profile_chain", profile_chain)

    def kept(budget_s):
        profile = profiler.cached_profile(chain, 4, ((networks.FEATURES,),), DEVICE, budget_s=budget_s)
        return round(profile.blocks[0].forward_s)

    assert [kept(20.0), kept(20.0), kept(5.0)] == [1, 1, 1]
    assert [kept(30.0), kept(20.0), kept(5.0)] == [2, 2, 2]
    assert [kept(None), kept(math.inf), kept(100.0), kept(5.0)] == [3, 3, 3, 3]
    assert asked == [20.0, 30.0, None]
    assert len(list((tmp_path / "pipetrain").iterdir())) == 1


@pytest.mark.wide
def test_fit_and_explain_profile_within_the_default_budget(monkeypatch):
    asked = Mock(side_effect=profiler.profile_chain)
    monkeypatch.setattr(profiler, "profile_chain", asked)
    monkeypatch.setattr(profiler, "_read", lambda path: None)
    pipetrain.PipelineModel(networks.mlp(), stages=2, scheme="spectrain").explain(8)
    assert {call.args[-1] for call in asked.call_args_list} == {20.0}


@pytest.mark.wide
@pytest.mark.parametrize(("given", "expected"), [([], 20.0), (["--budget", "3"], 3.0), (["--budget", "inf"], math.inf)])
def test_the_command_line_takes_a_budget(given, expected, monkeypatch, tmp_path, capsys):
    path = tmp_path / "m.keras"
    networks.mlp().save(path)
    asked = Mock(side_effect=profiler.profile_chain)
    monkeypatch.setattr(profiler, "profile_chain", asked)
    monkeypatch.setattr(given_options, "start_tensorflow", lambda devices: None)
    main.main(["plan", str(path), "--devices", "2", "--batch-size", "8", *given])
    assert {call.args[-1] for call in asked.call_args_list} == {expected}


def skips():
    """Shapes that Keras' layers declare, and some that only a trace tells."""
    x = keras.Input((8, 8, 4))
    windows = L.Dense(4)(keras.ops.reshape(x, (-1, 16, 4)))
    y = L.Conv2D(6, 3, strides=2, padding="same")(keras.ops.reshape(windows, (-1, 8, 8, 4)))
    y = L.BatchNormalization()(y)
    y = L.Concatenate()([y, L.MaxPooling2D()(x)])
    return keras.Model(x, L.Dense(3)(L.Flatten()(L.Add()([y, L.Dropout(0.1)(y)]))))


def recurrent():
    words = keras.Input((5,), dtype="int32")
    y = L.LSTM(3, return_sequences=True)(L.Embedding(9, 4)(words))
    y = L.MultiHeadAttention(2, 3)(y, y)
    return keras.Model(words, [L.LayerNormalization()(y), L.GlobalAveragePooling1D()(y)])


def half():
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        return keras.Sequential([keras.Input((8,)), L.Dense(4), L.Activation("softmax", dtype="float32")])
    finally:
        keras.config.set_dtype_policy("float32")


def open_lengths():
    x = keras.Input((None, 4))
    return keras.Model(x, L.Dense(2)(L.Conv1D(3, 3, padding="same")(x)))


@pytest.mark.parametrize("make", [skips, recurrent, half, open_lengths, perceptron])
def test_outputs_are_as_declared(make):
    """What is not traced has the shapes and types that running it gives."""
    model, rows = make(), 3
    chain = Chain(model)
    kinds = Kinds(chain, rows, checked_shapes(model, (6, 4) if make is open_lengths else None))
    declared = [list(kind.outputs) for kind in kinds.all]
    if make is open_lengths:
        assert all(kind.traced for kind in kinds.all)
    assert [kind.trace().outputs for kind in kinds.all] == declared


def work(flops, moved_bytes, kernels):
    return Work("w", (Product(1, flops // 2, 1, 0),) if flops else (), moved_bytes, kernels)


SIZES = st.tuples(st.integers(0, 10**9), st.integers(1, 10**8), st.integers(1, 9))


@settings(suppress_health_check=[HealthCheck.too_slow], max_examples=50)
@given(st.lists(SIZES, min_size=1, max_size=9), SIZES, st.tuples(*[st.floats(0.2, 5)] * 3), st.floats(0.25, 4.0))
def test_a_fitted_roofline_is_that_of_the_device(sizes, other, rates, slower):
    """Exact where the device is as it is expected, but for its speed, or where enough different blocks were measured.

    Blocks of a label that is slower by a factor are estimated so.
    """

    def measured(size, rates, label="a", factor=1.0):
        one = work(*size)
        features = one.flops, one.moved_bytes, one.kernels + len(one.products)
        seconds = factor * float(np.dot(rates * USUAL, features))
        return Measured(label, one, seconds, 2 * seconds)

    usual = [measured(size, slower) for size in sizes]
    wanted = measured(other, slower)
    estimate = pytest.approx((wanted.forward_s, wanted.backward_s), rel=1e-6)
    assert FittedRoofline(usual).seconds("a", wanted.work) == estimate
    assert FittedRoofline(usual).seconds("new", wanted.work) == estimate
    own = measured(other, slower, "b", factor=3.0)
    assert FittedRoofline([*usual, own]).seconds("b", own.work)[0] == pytest.approx(own.forward_s, rel=1e-6)
    apart = [(10**9, 1, 1), (2, 10**9, 1), (2, 1, 10**5), *sizes]
    fitted = FittedRoofline([measured(size, np.array(rates)) for size in apart])
    wanted = measured(other, np.array(rates))
    # Nearly: small blocks that are measured several times weigh more than the three that tell rates apart.
    assert fitted.seconds("a", wanted.work)[0] == pytest.approx(wanted.forward_s, rel=0.1)


def test_a_block_takes_after_the_most_similar_ones_of_its_kind_of_layer():
    """However the sizes of blocks and what the roofline says of them belong together."""
    sizes, factors = [10**n for n in (5, 6, 7, 8, 9)], (0.5, 2.0, 0.5, 2.0, 0.5)
    blocks = [work(size, size // 10, 2) for size in sizes]
    taken_s = [
        factor * float(np.dot(USUAL, (each.flops, each.moved_bytes, 3)))
        for each, factor in zip(blocks, factors, strict=True)
    ]
    fitted = FittedRoofline([Measured("a", each, s, s) for each, s in zip(blocks, taken_s, strict=True)])
    for size, s in zip(sizes, taken_s, strict=True):
        assert fitted.seconds("a", work(size + size // 50, size // 10, 2))[0] == pytest.approx(s, rel=0.05)


UNLIKELY = [  # the best fit is one in which bytes and kernels cost nothing
    ((11341084, 24041, 19), 6.6e-4, 1.2e-5),
    ((2612914, 8172441, 30), 5.6e-6, 8.9e-6),
    ((1423310, 69136115, 24), 1.5e-6, 1.1e-3),
    ((0, 127318, 1), 4.3e-5, 1e-6),
]
TAKEN = st.tuples(SIZES, st.floats(1e-6, 1e-2), st.floats(1e-6, 1e-2))


@settings(suppress_health_check=[HealthCheck.too_slow], max_examples=50)
@given(st.lists(TAKEN, min_size=1, max_size=5), SIZES)
@example(UNLIKELY, (0, 127318, 1))
def test_whatever_was_measured_no_block_takes_no_time(taken, other):
    """On a busy machine operations, bytes or kernels may seem to cost nothing."""
    fitted = FittedRoofline([Measured(str(n), work(*size), *seconds) for n, (size, *seconds) in enumerate(taken)])
    assert all(0 < each < math.inf for each in fitted.seconds("new", work(*other)))


@pytest.mark.parametrize(
    ("plain_s", "compiled_s", "expected"),
    [
        ([1, 1, 1, 1], [1, 1, 1, 1], False),
        ([1, 1, 1, 1], [0.9, 0.9, 0.9, 0.9], True),
        ([1, 1, 1, 1], [2, 2, 2, 0.9], True),  # a stage of its own
        ([1] * 99 + [0.1], [2] * 99 + [0.01], False),  # too short for a stage
        ([1, 1, 1, 1], [0.99, 0.99, 0.99, 0.99], False),  # not clearly
        ([0.01] * 50 + [9], [0.001] * 50 + [9], False),
        ([0.1] * 50 + [5], [0.05] * 50 + [9], True),
    ],
)
def test_xla_may_win_where_a_stage_may(plain_s, compiled_s, expected):
    assert block_costs.may_win(plain_s, compiled_s) == expected


@pytest.mark.parametrize(("part", "tried"), [(10.0, 2), (1.0, 4), (0.5, 5)])
def test_xla_is_tried_only_while_it_can_win(part, tried, profiled, monkeypatch):
    """The longest kind first: here blocks take 5%, 36%, 36%, 18%, 5% and 1%, and stages at least 20%."""
    trial = Mock(side_effect=lambda block, device: block_costs._Trial(object(), part))
    monkeypatch.setattr(block_costs, "_trial", trial)
    monkeypatch.setattr(block_costs, "STAGE", 0.2)
    monkeypatch.setattr(profiler, "LITTLE_S", 0.0)
    found, _ = profiled(perceptron(), 13.0, with_xla=True)
    assert not any(block.estimated for block in found.blocks)
    assert trial.call_count == tried
    for block in found.blocks:
        forward_s, backward_s = part * block.forward_s, part * block.backward_s
        assert block.compiled == (Seconds(forward_s, backward_s, block.update_s) if part < 1 else None)


def test_what_cannot_be_compiled_is_in_no_compiled_stage(profiled, monkeypatch):
    monkeypatch.setattr(profiler, "LITTLE_S", 0.0)

    def trial(block, device):
        name = block.segment.about
        return block_costs._Trial(None if name == "c" else object(), 1.0 if name == "c" else 0.5)

    monkeypatch.setattr(block_costs, "_trial", trial)
    found, _ = profiled(perceptron(), 13.0, with_xla=True)
    assert [block.compiled is None for block in found.blocks] == [False, False, False, True, False, False]


@pytest.mark.measures
def test_a_block_is_tried_with_either_kernels():
    model = perceptron()
    kinds = Kinds(Chain(model), 4, ((8,),))
    kinds.all[0].trace()
    with tf.device(DEVICE):
        trial = block_costs._trial(kinds.placed(0), DEVICE)
    assert trial.functions.compiled
    assert trial.part > 0
