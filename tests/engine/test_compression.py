"""What gradients become on their way: every compression against NumPy, its bytes, what is right on average."""

from __future__ import annotations

import math
from dataclasses import replace

import keras
import networks
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from transfer_models import words

from pipetrain.checkpoint.state import handed_on
from pipetrain.compute.functions.stage_values import BoundaryTensors
from pipetrain.compute.profiling import timing
from pipetrain.compute.profiling.profiler import profile
from pipetrain.compute.transfers.compression import CODECS, TENSORS, CutMessages, OwnCodec, codec_of, uniform
from pipetrain.schemes.compression import (
    COMPRESSIONS,
    CUTS,
    BFloat16,
    Compression,
    Float16,
    Int4,
    Int8,
    PowerSGD,
    RandomK,
    Sign,
    TopK,
    compression_of,
)

SEED = tf.constant(3, tf.int64), 5
WORKER = 2
SHAPES = ((1,), (7,), (300,), (24, 31), (3, 3, 4, 8))
EVERY = (
    *(BFloat16(), Float16(), Int8(), Int8(block=16), Int4(), Int4(block=3), Sign(), Sign(majority=True)),
    *(
        TopK(),
        TopK(share=0.2),
        RandomK(share=0.2),
        RandomK(share=0.2, error_feedback=False),
        PowerSGD(),
        PowerSGD(rank=1),
    ),
)


def values(shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def arrived(options, given, seed=SEED, memory=None):
    """What a message brings, and the bytes of its parts."""
    codec = codec_of(options, tf.TensorSpec(given.shape, tf.float32))
    if codec.memory_like is not None:
        memory = tf.zeros(codec.memory_like.shape)
    parts, _ = codec.encode(tf.constant(given), seed, WORKER, memory)
    for part, spec in zip(parts, codec.parts, strict=True):
        assert part.shape == spec.shape and part.dtype == spec.dtype
    size_bytes = sum(int(tf.size(part)) * part.dtype.size for part in parts)
    return codec.decode(parts, seed).numpy().reshape(given.shape), size_bytes


def drawn(stream, count):
    return uniform(SEED, stream, [count]).numpy()


def by_numpy(options, given):
    """The same, computed here."""
    flat = given.ravel()
    if isinstance(options, Float16):
        return np.clip(given, -65504, 65504).astype(np.float16).astype(np.float32)
    if isinstance(options, BFloat16):  # round to nearest, ties to even, of the upper 16 bits
        bits = given.view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
    if isinstance(options, Int8):
        made, random = np.empty_like(flat), drawn(WORKER + 1, flat.size)
        for first in range(0, flat.size, options.block):
            part = slice(first, first + options.block)
            step = np.abs(flat[part]).max() / np.float32(options.levels)
            made[part] = np.floor(flat[part] / step + random[part]) * step
        return made.reshape(given.shape)
    if isinstance(options, Sign) and options.majority:
        return np.sign(given)
    if isinstance(options, Sign):
        return np.where(given >= 0, 1, -1) * np.abs(given).mean()
    if isinstance(options, RandomK):
        count, made = math.ceil(options.share * flat.size), np.zeros_like(flat)
        places = np.argsort(-drawn(0, flat.size), kind="stable")[:count]
        made[places] = flat[places] * (1 if options.error_feedback else flat.size / count)
        return made.reshape(given.shape)
    if isinstance(options, TopK):
        made, places = np.zeros_like(flat), np.argsort(-np.abs(flat))[: math.ceil(options.share * flat.size)]
        made[places] = flat[places]
        return made.reshape(given.shape)
    assert isinstance(options, PowerSGD), options
    matrix = given.reshape(-1, given.shape[-1])
    beginning = tf.zeros([], tf.int64), SEED[1]
    start = uniform(beginning, 0, [matrix.shape[1], options.rank]).numpy() - 0.5
    columns, _ = np.linalg.qr(matrix @ start)
    return (columns @ (columns.T @ matrix)).reshape(given.shape)


@pytest.mark.parametrize("options", EVERY, ids=repr)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_message_brings_what_numpy_says_in_as_many_bytes_as_planned(options, shape):
    sent = values(shape)
    there, size_bytes = arrived(options, sent)
    assert size_bytes == options.sent_bytes(shape) <= sent.nbytes
    if size_bytes == sent.nbytes:
        np.testing.assert_array_equal(there, sent)
    else:
        np.testing.assert_allclose(there, by_numpy(options, sent), rtol=2e-5, atol=2e-6)


def test_a_block_is_no_larger_than_what_it_is_of():
    """Of one that is larger only as much is made as there is: the same message as by a block of all elements."""
    sent = values((5, 7))
    for kind in (Int8, Int4):
        found, size_bytes = arrived(kind(block=10**9), sent)
        assert size_bytes == kind(block=10**9).sent_bytes(sent.shape)
        np.testing.assert_array_equal(found, arrived(kind(block=sent.size), sent)[0])


@settings(max_examples=30)
@given(
    st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=70),
    st.sampled_from([each for each in EVERY if not isinstance(each, PowerSGD)]),
)
def test_every_number_arrives_finite_and_zeros_as_zeros(numbers, options):
    sent = np.array(numbers, np.float32)
    assert np.isfinite(arrived(options, sent)[0]).all()
    assert not arrived(options, np.zeros_like(sent))[0].any()


@pytest.mark.parametrize("dtype", ("float32", "bfloat16", "float64"))
def test_a_vote_on_zero_is_for_either_sign_by_turns_and_a_variable_of_zeros_has_none(dtype):
    codec = codec_of(Sign(majority=True), tf.TensorSpec([11], dtype))
    given = tf.cast([0.0, -0.0, 1e-30, -3.0, 5.0, 0.0, 0.0, -1e-30, 2.0, 0.0, -1.0], dtype)

    def votes(worker, step, values=given):
        seed = tf.constant(step, tf.int64), 0
        message, _ = codec.message(values, seed, worker)
        return codec.value(message, seed)

    for worker in range(3):
        for step in range(3):
            of_zero = 1.0 if (worker + step) % 2 == 0 else -1.0
            assert votes(worker, step).numpy().tolist() == [each or of_zero for each in np.sign(given).tolist()]
    assert codec.summed([votes(0, 7), votes(1, 7)]).numpy().tolist() == np.sign(given).tolist()
    assert not votes(0, 0, tf.zeros_like(given)).numpy().any()
    for spoiled in (math.nan, math.inf):
        messages = [votes(0, 0), votes(1, 0, tf.concat([given[:-1], tf.cast([spoiled], dtype)], 0))]
        assert np.isnan(codec.summed(messages).numpy().astype("float64")).all()


@pytest.mark.parametrize(
    "options", (Int8(block=32), Int4(block=32), RandomK(share=0.25, error_feedback=False)), ids=repr
)
def test_random_messages_are_right_on_average(options):
    """The mean of n messages is within six standard errors, of at most half a step or of what is left out."""
    count, sent = 800, values((64,))
    codec = codec_of(options, tf.TensorSpec(sent.shape, tf.float32))

    @tf.function
    def message(step):
        parts, _ = codec.encode(tf.constant(sent), (step, 1), 0, None)
        return codec.decode(parts, (step, 1))

    found = np.stack([message(tf.constant(step, tf.int64)).numpy() for step in range(count)])
    spread = np.abs(sent) * 3**0.5 if isinstance(options, RandomK) else np.abs(sent).max() / options.levels / 2
    assert (np.abs(found.mean(axis=0) - sent) <= 6 * spread / math.sqrt(count)).all()


def test_power_sgd_comes_to_the_best_matrix_of_its_rank():
    sent = values((12, 20)) @ np.diag(0.6 ** np.arange(20)).astype(np.float32)
    options, spec = PowerSGD(rank=3), tf.TensorSpec(sent.shape, tf.float32)
    codec = codec_of(options, spec)
    memory = tf.zeros(codec.memory_like.shape)
    for _ in range(60):
        parts, memory = codec.encode(tf.constant(sent), SEED, WORKER, memory)
    left, singular, right = np.linalg.svd(sent)
    best = left[:, :3] * singular[:3] @ right[:3]
    np.testing.assert_allclose(codec.decode(parts, SEED).numpy().reshape(sent.shape), best, atol=1e-4)


def test_a_compression_of_ones_own():
    class Halves(Compression):
        """Every second element."""

        name = "halves"
        error_feedback = False

        def encode(self, values):
            return [values[::2]]

        def decode(self, parts):
            return tf.repeat(parts[0], 2)

    codec = codec_of(Halves(), tf.TensorSpec([8], tf.float32))
    assert isinstance(codec, OwnCodec)
    parts, _ = codec.encode(tf.range(8.0), SEED, 0, None)
    assert codec.decode(parts, SEED).numpy().tolist() == [0, 0, 2, 2, 4, 4, 6, 6]


def test_messages_of_ones_own_have_as_many_bytes_in_every_step():
    class Positive(Compression):
        def encode(self, given):
            return [tf.boolean_mask(given, given > 0)]

        def decode(self, parts):
            return parts[0]

    with pytest.raises(ValueError, match=r"Received: compression=Positive\(\), whose encode gives .* Try tensors of"):
        _ = codec_of(Positive(), tf.TensorSpec([8], tf.float32)).sent_bytes


def test_names_and_values():
    assert compression_of(None) is compression_of("none") is None
    assert compression_of("top-k:0.5") == TopK(0.5) and str(TopK(0.5)) == "top-k:0.5"
    assert {name: str(compression_of(name)) for name in COMPRESSIONS} == {name: name for name in COMPRESSIONS}
    voted = compression_of("sign:majority")
    assert voted == Sign(majority=True) and str(voted) == "sign:majority" and not voted.error_feedback
    assert str(Sign(error_feedback=False)) == "sign, error_feedback=False" and Sign().error_feedback
    with pytest.raises(ValueError, match=r"majority=True, error_feedback=True. Try error_feedback=False"):
        Sign(majority=True, error_feedback=True)
    assert replace(Sign(), majority=True, error_feedback=False) == voted
    for wrong, said in (
        ("top-2", "random-k"),
        ("sign:2", "Try sign, or sign:majority"),
        ("sign:True", "Try sign, or sign:majority"),
        ("int8:x", "int8:256"),
        ("power-sgd:0", "rank=0"),
    ):
        with pytest.raises(ValueError, match=said):
            compression_of(wrong)
    for share in (0, 1.5, True, "1"):
        with pytest.raises(ValueError, match="share"):
            TopK(share)
    with pytest.raises(TypeError, match="TopK"):
        compression_of(keras.Input)


@pytest.mark.parametrize("options", (*(each() for each in CUTS), Int8(block=16), Int4(block=3)), ids=repr)
@pytest.mark.parametrize("dtype", ("float64", "float32", "float16", "bfloat16"))
@pytest.mark.parametrize("rows", (0, 1, 9))
def test_messages_over_a_cut_bring_what_those_of_known_sizes_do(options, dtype, rows):
    """Whatever lengths are open. What has no gradients, is no smaller, or is no number of floating point stays."""
    value = tf.cast(values((rows, 5, 7)), dtype)
    beside = [tf.ones([rows, 2], tf.int32), tf.ones([rows]), value]
    specs = [tf.TensorSpec([None, None, 7], dtype), *(tf.TensorSpec([None, *x.shape[1:]], x.dtype) for x in beside)]
    cut = CutMessages(options, 1, specs, [True, True, False, True], [1])
    masks = [tf.ones([rows, 5], tf.bool), None, None, None]
    sent = cut.encoded(BoundaryTensors([value, *beside], masks), SEED[0], WORKER)
    there = cut.decoded(sent)
    assert [a is b for a, b in zip(there.tensors[1:3], beside[:2], strict=True)] == [True, True]
    assert there.masks[0] is masks[0]
    bits = options.bits if isinstance(options, Int8) else 16
    if bits >= 8 * value.dtype.size:
        assert sent.tensors[0] is there.tensors[0] is value
        return
    for n, got in ((0, there.tensors[0]), (3, there.tensors[3])):
        seed = SEED[0], 2 * TENSORS + n
        codec = CODECS[type(options)](options, tf.TensorSpec(value.shape, dtype))
        parts, _ = codec.encode(value, seed, WORKER, None)
        np.testing.assert_array_equal(got, tf.reshape(codec.decode(parts, seed), value.shape))
    assert tf.size(sent.tensors[0]) == 8 + sum(int(tf.size(part)) * part.dtype.size for part in parts)
    (up, other) = cut.decoded(cut.encoded([value, value], SEED[0], WORKER))
    assert (
        up.dtype == value.dtype
        and other.shape == value.shape
        and (options.name[0] != "i" or rows == 0 or (up != other).numpy().any())
    )


def test_what_is_gone_is_handed_on():
    """Sums over a weight's devices stay, whatever stage these are of; what is each one's own counts for no other."""
    one = np.ones(2, np.float32)
    arrays = {f"slot/0/residual_of_worker_{n}": 10**n * one for n in range(4)}
    arrays |= {f"slot/0/memory_of_worker_{n}": one for n in range(4)}
    arrays |= {"slot/1/residual_of_stage_2_of_worker_1": one, "slot/2/device_momentum_of_worker_0": one}
    arrays |= {"slot/3/_momentums_of_worker_1": one, "slot/3/_momentums": one, "weight/0": one}
    names = [f"slot/0/residual_of_worker_{n}" for n in (0, 2)] + ["slot/1/residual_of_worker_0", "slot/3/_momentums"]
    found, left = handed_on(arrays, names)
    assert {name: each.tolist() for name, each in found.items()} == {
        "slot/0/residual_of_worker_0": [11, 11],
        "slot/0/residual_of_worker_2": [1100, 1100],
        "slot/1/residual_of_worker_0": [1, 1],
    }
    assert left == [
        "device_momentum of 1 device left out",
        "memory of 4 devices left out",
        "momentums of 1 device left out",
    ]
    assert handed_on(arrays, [*arrays])[1] == []


def test_what_a_call_takes_is_not_a_message_s(monkeypatch):
    """Calls take 20 us beside 3 us and 2 ns an element of each of their messages; values are there in half of that."""

    def coding_of(compression, coded, count, device):
        seconds = 20e-6 + count * (3e-6 + 2e-9 * coded.side**2)
        return seconds, seconds / 2

    monkeypatch.setattr(timing, "_coding_of", coding_of)
    found = timing.time_coding(Int8(), "CPU:0")
    assert found.encode_s == pytest.approx((3e-6, 2e-9)) and found.decode_s == pytest.approx((1.5e-6, 1e-9))


@pytest.mark.parametrize("budget_s", [None, 1e-9])
def test_a_profile_knows_whose_gradients_are_rows(budget_s):
    """Measured, or estimated for want of time."""
    blocks = profile(words(), 8, verbose=False, budget_s=budget_s).blocks
    assert {each.name: each.rows_bytes for each in blocks if each.weight_bytes} == {
        each.name: 20 * 4 * 4 * ("embedding" in each.name) for each in blocks if each.weight_bytes
    }
    blocks = profile(tied_words(), 8, verbose=False, budget_s=budget_s).blocks
    assert not any(each.rows_bytes for each in blocks)
    assert {each.uncoded_bytes for each in blocks if "embedding" in each.name} == {20 * 4 * 4}


def tied_words():
    """An embedding of two layers, whose gradients may be added to each other."""
    words = keras.Input((6,), dtype="int32")
    table = keras.layers.Embedding(20, 4)
    return keras.Model(words, keras.layers.Dense(5)(table(keras.ops.abs(words)) + table(words)))


def test_a_profile_says_what_compressions_take():
    """A million numbers take longer than a few, and no time is negative."""
    made = profile(networks.mlp(2, 16), 8, verbose=False, compressions=("bfloat16", "int8:64", "none"))
    assert [each.compression for each in made.codings] == ["bfloat16", "int8:64"]
    for each in made.codings:
        assert 0 <= each.encoding_s(1000) < each.encoding_s(1e7) and 0 <= each.decoding_s(1000) < each.decoding_s(1e7)
