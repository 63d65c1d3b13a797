"""Gradients, and what crosses a pipeline's cuts, as messages of a compression, and values again, while it is traced."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, cached_property, partial
from itertools import pairwise
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from pipetrain.compute.functions.kernels import Kernels
from pipetrain.compute.functions.split import size_bytes, specs
from pipetrain.compute.functions.stage import Stage
from pipetrain.compute.functions.stage_values import BoundaryTensors
from pipetrain.compute.functions.weight_binding import any_rows
from pipetrain.compute.optimizer.slots import Slot
from pipetrain.compute.transfers.message import Gradients, MessageLayout, Order, Received, flat, in_order, summed_rows
from pipetrain.schemes.compression import (
    VOTE_BITS,
    BFloat16,
    Compression,
    Float16,
    Int4,
    Int8,
    PowerSGD,
    RandomK,
    Sign,
    TopK,
)

Parts = list[tf.Tensor]  # of a message, as its bytes are
Seed = tuple[tf.Tensor, int]  # the numbers of a step and of a variable
Length = tuple[Any, tf.DType]  # of a part of a message: how many numbers, and of which type
StepNumber = Callable[[str], tf.Tensor]  # on a device
OfWorker = tuple[int, str, Gradients]  # its number, its device, and what it has made
OF_REPLICAS = 1 << 40  # numbers of gradients that replicas sum begin with it; those of what crosses cuts are less
FINITE = 65504.0  # the largest number of float16
DIVISIBLE = math.lcm(1 << 12, *range(1, 12))  # elements, which make whole blocks of most sizes
BITS = [1 << n for n in range(8)]
# What a device has not sent yet, as its slots are called: of gradients, of sums of these by momentum, which are applied
# otherwise, or of how far weights have moved; and the sums that momentum goes on with. Of each only the sum over a
# weight's devices counts, so another device may go on with it.
RESIDUAL, OF_MOMENTUM, OF_MOVES, MOMENTUM = "residual", "residual_of_momentum", "residual_of_moves", "device_momentum"
RESIDUALS = (RESIDUAL, OF_MOMENTUM, OF_MOVES)
UNSENT = (*RESIDUALS, MOMENTUM)


class Codec:
    """Makes messages of the gradients of one variable, or of one of the tensors that cross a cut.

    Args:
        options: how.
        spec: of the values.
        count: how many elements there are, where the spec does not tell; a tensor of the function that is traced.

    ``memory_like`` is the spec of what the encoder remembers from step to step, None for nothing.
    """

    memory_like: tf.TensorSpec | None = None

    def __init__(self, options: Any, spec: tf.TensorSpec, count: Any = None) -> None:
        self.options, self.spec = options, spec
        self.count = int(spec.shape.num_elements()) if count is None else count

    @cached_property
    def parts(self) -> list[tf.TensorSpec]:
        """The specs of what a message has."""
        return [tf.TensorSpec([length], dtype) for length, dtype in self._lengths()]

    @property
    def sent_bytes(self) -> int:
        """Of a message."""
        return sum(map(size_bytes, self.parts))

    def summed(self, values: Sequence[tf.Tensor]) -> tf.Tensor:
        """What messages of several devices bring together."""
        return in_order(values)

    def _lengths(self) -> list[Length]:
        return [(self.count, self.spec.dtype)]

    def message(self, value: tf.Tensor, seed: Seed, stream: Any, memory: Any = None) -> tuple[tf.Tensor, Any]:
        """The bytes of the message, and the new memory.

        ``seed`` and ``stream`` say which random numbers it is made with: of a gradient the stream is the number of the
        worker, of what crosses a cut that of the microbatch and of the two replicas, see ``stream_of``.
        """
        parts, memory = self.encode(value, seed, stream, memory)
        return tf.concat([_as_bytes(part) for part in parts], 0), memory

    def value(self, message: tf.Tensor, seed: Any) -> tf.Tensor:
        """What a message's bytes bring, of one dimension."""
        lengths = self._lengths()
        pieces = tf.split(message, [length * dtype.size for length, dtype in lengths])
        pairs = zip(pieces, lengths, strict=True)
        return self.decode([_of_bytes(piece, dtype) for piece, (_, dtype) in pairs], seed)

    def encode(self, value: tf.Tensor, seed: Seed, stream: Any, memory: Any) -> tuple[Parts, Any]:
        """The parts of the message, and the new memory."""
        return [flat(value)], memory

    def decode(self, parts: Parts, seed: Seed) -> tf.Tensor:
        """A message's gradient, of one dimension."""
        return parts[0]


class CastCodec(Codec):
    """The nearest numbers of a smaller type."""

    @property
    def _dtype(self) -> tf.DType:
        return tf.as_dtype(self.options.name)

    def _lengths(self) -> list[Length]:
        return [(self.count, self._dtype)]

    def encode(self, value: tf.Tensor, seed: Seed, stream: Any, memory: Any) -> tuple[Parts, Any]:
        """See ``Codec``."""
        if self.options.name == Float16.name:
            value = tf.where(tf.math.is_finite(value), tf.clip_by_value(value, -FINITE, FINITE), value)
        return [tf.cast(flat(value), self._dtype)], memory

    def decode(self, parts: Parts, seed: Seed) -> tf.Tensor:
        """See ``Codec``."""
        return tf.cast(parts[0], self.spec.dtype)


class IntegerCodec(Codec):
    """Multiples of a block's step, as signed numbers of 8 bits, or two of 4 bits in a byte."""

    @property
    def _blocks(self) -> Any:
        return -(-self.count // self._block)

    @property
    def _block(self) -> Any:
        """The elements of a block: no more than there are."""
        if isinstance(self.count, int):
            return max(1, min(self.options.block, self.count))
        return tf.clip_by_value(self.count, 1, self.options.block)

    def _lengths(self) -> list[Length]:
        return [(-(-self.count // (8 // self.options.bits)), tf.uint8), (self._blocks, tf.float32)]

    def encode(self, value: tf.Tensor, seed: Seed, stream: Any, memory: Any) -> tuple[Parts, Any]:
        """See ``Codec``."""
        blocks = self._in_blocks(tf.cast(flat(value), tf.float32))
        steps = tf.reduce_max(tf.abs(blocks), axis=1) / float(self.options.levels)
        drawn = uniform(seed, stream + 1, [self.count])
        multiples = tf.floor(tf.math.divide_no_nan(blocks, steps[:, tf.newaxis]) + self._in_blocks(drawn))
        numbers = tf.cast(tf.clip_by_value(multiples, -self.options.levels, self.options.levels), tf.int8)
        return [self._packed(tf.reshape(numbers, [-1])[: self.count]), steps], memory

    def decode(self, parts: Parts, seed: Seed) -> tf.Tensor:
        """See ``Codec``."""
        numbers, steps = parts
        multiples = self._in_blocks(tf.cast(self._unpacked(numbers), tf.float32))
        values = tf.reshape(multiples * steps[:, tf.newaxis], [-1])[: self.count]
        return tf.cast(values, self.spec.dtype)

    def _in_blocks(self, values: tf.Tensor) -> tf.Tensor:
        """Rows of a block each, the last one filled with zeros."""
        block, blocks = self._block, self._blocks
        return tf.reshape(tf.pad(values, [[0, blocks * block - self.count]]), [blocks, block])

    def _packed(self, numbers: tf.Tensor) -> tf.Tensor:
        if self.options.bits == 8:
            return tf.bitcast(numbers, tf.uint8)
        halves = tf.cast(numbers + 8, tf.uint8)
        pairs = tf.reshape(tf.pad(halves, [[0, self.count % 2]]), [-1, 2])
        return pairs[:, 0] + pairs[:, 1] * tf.constant(16, tf.uint8)

    def _unpacked(self, numbers: tf.Tensor) -> tf.Tensor:
        if self.options.bits == 8:
            return tf.bitcast(numbers, tf.int8)
        pairs = tf.stack([numbers % 16, numbers // 16], axis=1)
        return tf.cast(tf.reshape(pairs, [-1])[: self.count], tf.int8) - 8


class SignCodec(Codec):
    """A bit an element, and their mean absolute value."""

    def _lengths(self) -> list[Length]:
        return [(math.ceil(self.count / 8), tf.uint8), (1, tf.float32)]

    def encode(self, value: tf.Tensor, seed: Seed, stream: Any, memory: Any) -> tuple[Parts, Any]:
        """See ``Codec``."""
        values = tf.cast(flat(value), tf.float32)
        return [_packed(values >= 0, self.count), tf.reduce_mean(tf.abs(values))[tf.newaxis]], memory

    def decode(self, parts: Parts, seed: Seed) -> tf.Tensor:
        """See ``Codec``."""
        numbers, scale = parts
        signs = tf.where(_unpacked(numbers)[: self.count], 1.0, -1.0)
        return tf.cast(signs * scale, self.spec.dtype)


class VoteCodec(Codec):
    """A bit an element, its sign, and two for all: whether they are finite, and whether any is not 0."""

    def _lengths(self) -> list[Length]:
        return [(math.ceil((self.count + VOTE_BITS) / 8), tf.uint8)]

    def encode(self, value: tf.Tensor, seed: Seed, stream: Any, memory: Any) -> tuple[Parts, Any]:
        """See ``Codec``."""
        values = flat(value)
        # A bit cannot say 0. The same sign for it in every step would move weights that have no gradient.
        is_even = (tf.cast(seed[0], tf.int64) + tf.cast(stream, tf.int64)) % 2 == 0
        signs = tf.where(values == 0, is_even, values > 0)
        about = tf.stack([tf.reduce_all(tf.math.is_finite(values)), tf.reduce_any(values != 0)])
        return [_packed(tf.concat([signs, about], 0), self.count + VOTE_BITS)], memory

    def decode(self, parts: Parts, seed: Seed) -> tf.Tensor:
        """See ``Codec``."""
        bits = _unpacked(parts[0])
        are_finite, votes = bits[self.count], bits[self.count + 1]
        vote = tf.where(are_finite, tf.cast(votes, tf.float32), math.nan)
        return tf.cast(tf.where(bits[: self.count], vote, -vote), self.spec.dtype)

    def summed(self, values: Sequence[tf.Tensor]) -> tf.Tensor:
        """The signs of the sum: those of the majority, 0 at a tie."""
        return tf.sign(super().summed(values))


def _packed(bits: tf.Tensor, count: int) -> tf.Tensor:
    """So many truth values, eight in a byte."""
    padded = tf.pad(tf.cast(bits, tf.int32), [[0, -count % 8]])
    return tf.cast(tf.reduce_sum(tf.reshape(padded, [-1, 8]) * BITS, axis=1), tf.uint8)


def _unpacked(numbers: tf.Tensor) -> tf.Tensor:
    """The truth values of bytes."""
    bits = tf.bitwise.bitwise_and(numbers[:, tf.newaxis], tf.constant(BITS, tf.uint8)) > 0
    return tf.reshape(bits, [-1])


class TopKCodec(Codec):
    """The largest elements, and their places."""

    @property
    def _kept(self) -> int:
        return int(self.options.count(self.spec.shape.as_list()))

    def _lengths(self) -> list[Length]:
        return [(self._kept, self.spec.dtype), (self._kept, tf.int32)]

    def encode(self, value: tf.Tensor, seed: Seed, stream: Any, memory: Any) -> tuple[Parts, Any]:
        """See ``Codec``."""
        values = flat(value)
        places = tf.math.top_k(tf.abs(values), self._kept, sorted=False).indices
        return [tf.gather(values, places), places], memory

    def decode(self, parts: Parts, seed: Seed) -> tf.Tensor:
        """See ``Codec``."""
        values, places = parts
        return tf.scatter_nd(places[:, tf.newaxis], values, [self.count])


class RandomKCodec(TopKCodec):
    """Elements in places that all devices draw alike."""

    def _lengths(self) -> list[Length]:
        return super()._lengths()[:1]

    def encode(self, value: tf.Tensor, seed: Seed, stream: Any, memory: Any) -> tuple[Parts, Any]:
        """See ``Codec``."""
        values = tf.gather(flat(value), self._places(seed))
        if not self.options.error_feedback:
            values *= tf.cast(self.count / self._kept, values.dtype)
        return [values], memory

    def decode(self, parts: Parts, seed: Seed) -> tf.Tensor:
        """See ``Codec``."""
        return super().decode([parts[0], self._places(seed)], seed)

    def _places(self, seed: Seed) -> tf.Tensor:
        return tf.math.top_k(uniform(seed, 0, [self.count]), self._kept, sorted=False).indices


class LowRankCodec(Codec):
    """A matrix of low rank, as the product of two."""

    def __init__(self, options: PowerSGD, spec: tf.TensorSpec) -> None:
        self._sides = options.sides(spec.shape.as_list())
        super().__init__(options, spec)
        if self._sides:
            self.memory_like = tf.TensorSpec([self._sides[1], options.rank], tf.float32)

    def _lengths(self) -> list[Length]:
        if not self._sides:
            return super()._lengths()
        return [(side * self.options.rank, tf.float32) for side in self._sides]

    def encode(self, value: tf.Tensor, seed: Seed, stream: Any, memory: Any) -> tuple[Parts, Any]:
        """See ``Codec``."""
        if not self._sides:
            return super().encode(value, seed, stream, memory)
        matrix = tf.cast(tf.reshape(value, self._sides), tf.float32)
        # Of a memory of zeros, as at the beginning, nothing would come.
        drawn = uniform((tf.zeros([], tf.int64), seed[1]), 0, memory.shape) - 0.5
        begun = tf.reduce_any(memory != 0.0, axis=0)
        start = tf.where(begun, memory, drawn)
        columns, _ = tf.linalg.qr(matrix @ start)
        others = tf.matmul(matrix, columns, transpose_a=True)
        return [flat(columns), flat(others)], others

    def decode(self, parts: Parts, seed: Seed) -> tf.Tensor:
        """See ``Codec``."""
        if not self._sides:
            return super().decode(parts, seed)
        rank = self.options.rank
        columns, others = (tf.reshape(part, [side, rank]) for part, side in zip(parts, self._sides, strict=True))
        return tf.cast(flat(tf.matmul(columns, others, transpose_b=True)), self.spec.dtype)


class OwnCodec(Codec):
    """By an object of the user's: ``encode(values)`` gives a list of tensors of fixed shapes, ``decode(parts)`` values.

    Both are given, and give, tensors of one dimension.
    """

    def _made(self, count: int | None) -> list[tf.TensorSpec]:
        """The specs of what ``encode`` gives for so many elements, None for any number."""
        made = tf.function(lambda value: self.options.encode(value)).get_concrete_function(
            tf.TensorSpec([count], self.spec.dtype)
        )
        return [tf.TensorSpec(each.shape, each.dtype) for each in tf.nest.flatten(made.structured_outputs)]

    @cached_property
    def parts(self) -> list[tf.TensorSpec]:
        """See ``Codec``."""
        found = self._made(self.count)
        self.check_sizes(found)
        return found

    def check_sizes(self, found: Sequence[tf.TensorSpec]) -> None:
        """Raise ValueError for parts whose sizes the number of elements does not tell."""
        if any(each.shape.num_elements() is None for each in found):
            raise ValueError(
                "All messages of as many elements have the same number of bytes. Received: "
                f"compression={self.options}, whose encode gives {[str(each.shape) for each in found]} for "
                f"{self.count} elements. Try tensors of fixed shapes."
            )

    def _lengths(self) -> list[Length]:
        return [(each.shape.num_elements(), each.dtype) for each in self.parts]

    def encode(self, value: tf.Tensor, seed: Seed, stream: Any, memory: Any) -> tuple[Parts, Any]:
        """See ``Codec``."""
        return list(self.options.encode(flat(value))), memory

    def decode(self, parts: Parts, seed: Seed) -> tf.Tensor:
        """See ``Codec``."""
        shaped = [tf.reshape(part, spec.shape) for part, spec in zip(parts, self.parts, strict=True)]
        return tf.cast(self.options.decode(shaped), self.spec.dtype)


class OwnCutCodec(OwnCodec):
    """The same for any number of elements: a message begins with the sizes of its parts, which may depend on it."""

    def __init__(self, options: Any, dtype: tf.DType) -> None:
        self.options, self.spec, self.count = options, tf.TensorSpec([None], dtype), None
        # Now: what cannot be is to be refused before anything is sent. Bytes are planned by the number of elements.
        self.parts = self._of_any_size()
        of_known_size = OwnCodec(options, tf.TensorSpec([DIVISIBLE], dtype))
        with self._explaining(
            "The bytes of what crosses a cut are planned by its number of elements",
            f"{DIVISIBLE} elements",
            "Try tf.pad in encode, for a last block that is not whole",
        ):
            traced = of_known_size._made(DIVISIBLE)
        of_known_size.check_sizes(traced)

    @contextmanager
    def _explaining(self, why: str, what: str, remedy: str) -> Iterator[None]:
        """Raise ValueError for what ``encode`` raises while it is traced with these."""
        try:
            yield
        except Exception as error:  # told by TensorFlow with the lines of its own that led there
            *_, told = [type(error).__name__, *str(error).split("\n\n")[-1].strip().splitlines()]
            raise ValueError(
                f"{why}. Received: compression={self.options}, whose encode does not take {what} ({told.strip()}). "
                f"{remedy}, or one of: 'bfloat16', 'int8'."
            ) from error

    def _of_any_size(self) -> list[tf.TensorSpec]:
        with self._explaining(
            "What crosses a cut has a number of elements that is not known while functions are traced",
            "them",
            "Try tf.shape(values) in place of values.shape",
        ):
            found = self._made(None)
        if any(each.shape.rank is None for each in found):
            raise ValueError(
                "The parts of a message have a known number of dimensions each. Received: "
                f"compression={self.options}, whose encode gives {[str(each.shape) for each in found]}. "
                "Try tf.reshape(part, [-1]) in encode."
            )
        return found

    def message(self, value: tf.Tensor, seed: Seed, stream: Any, memory: Any = None) -> tuple[tf.Tensor, Any]:
        """See ``Codec``."""
        parts, memory = self.encode(value, seed, stream, memory)
        sizes = [_open_sizes(each, spec) for each, spec in zip(parts, self.parts, strict=True)]
        return tf.concat([*sizes, *map(_as_bytes, parts)], 0), memory

    def value(self, message: tf.Tensor, seed: Any) -> tf.Tensor:
        """See ``Codec``."""
        shapes = []
        for spec in self.parts:
            shape, message = _shape_and_rest(message, spec)
            shapes.append(shape)
        pairs = [*zip(shapes, self.parts, strict=True)]
        pieces = tf.split(message, [math.prod(shape) * spec.dtype.size for shape, spec in pairs])
        shaped = [
            tf.ensure_shape(tf.reshape(_of_bytes(piece, spec.dtype), shape), spec.shape)
            for piece, (shape, spec) in zip(pieces, pairs, strict=True)
        ]
        return flat(tf.cast(self.options.decode(shaped), self.spec.dtype))


CODECS: dict[type[Compression], type[Codec]] = {
    **{BFloat16: CastCodec, Float16: CastCodec, Int8: IntegerCodec, Int4: IntegerCodec, Sign: SignCodec},
    **{TopK: TopKCodec, RandomK: RandomKCodec, PowerSGD: LowRankCodec},
}


def codec_of(options: Compression, spec: tf.TensorSpec) -> Codec:
    """What makes messages of such gradients: whole ones, where these are no larger."""
    if hasattr(options, "encode"):
        return OwnCodec(options, spec)
    kind = VoteCodec if options.majority else next(CODECS[each] for each in type(options).__mro__ if each in CODECS)
    made = kind(options, spec)
    return made if made.sent_bytes < size_bytes(spec) else Codec(None, spec)


def uniform(seed: Seed, stream: Any, shape: Any) -> tf.Tensor:
    """Numbers in [0, 1) of a step, a variable and a stream, the same wherever they are drawn."""
    step, number = seed
    key = tf.stack([tf.cast(step, tf.int64), tf.constant(number << 20, tf.int64) | tf.cast(stream, tf.int64)])
    return tf.random.stateless_uniform(shape, key, alg="philox")


class KeptGradient(NamedTuple):
    """What a worker keeps of one variable's gradients from step to step; None where there is nothing to keep."""

    residual: Any = None
    memory: Any = None
    velocity: Any = None


class Compressor:
    """Sums gradients that are sent as messages of a compression: every sink has every source's, and adds these.

    Rows of embeddings are sent as they are.

    Args:
        options: the compression.
        specs: of the weights whose gradients are compressed, by their numbers.
        devices: of the workers.
        originals: the model's own variables by their numbers.
        momentum: by which workers sum their gradients before these are sent; 0 where the optimizer has it.
        first: the number of the first variable, for random numbers.
        of_moves: whether it is not gradients that are sent, but how far weights have moved.
        argument: what errors call the compression.

    ``phase`` is the compression's, which what is traced then is made for.
    """

    def __init__(
        self,
        options: Compression,
        specs: Mapping[int, tf.TensorSpec],
        devices: Sequence[str],
        originals: Sequence[keras.Variable],
        momentum: float = 0.0,
        first: int = 0,
        of_moves: bool = False,
        argument: str = "compression",
    ) -> None:
        self._argument = argument
        self.options, self._momentum, self._first = options, momentum, first
        self._kinds = KeptGradient(OF_MOVES if of_moves else OF_MOMENTUM if momentum else RESIDUAL, "memory", MOMENTUM)
        self._specs, self._of_phases = dict(specs), dict[int, dict[int, Codec]]()
        self.phase = options.phase(sys.maxsize)  # the last one
        self._originals, self._devices = originals, devices
        self._kept = [{n: self._new(device, each) for n, each in self._codecs.items()} for device in devices]

    @property
    def _codecs(self) -> dict[int, Codec]:
        """What makes messages of the gradients, by the variables' numbers."""
        if self.phase not in self._of_phases:
            options = self.options.in_phase(self.phase)
            self._of_phases[self.phase] = {n: codec_of(options, each) for n, each in self._specs.items()}
        return self._of_phases[self.phase]

    def _new(self, device: str, codec: Codec) -> KeptGradient:
        feeds = self.options.error_feedback and type(codec) is not Codec
        with tf.device(device):
            return KeptGradient(
                zeros_of(codec.spec) if feeds else None,
                codec.memory_like and zeros_of(codec.memory_like),
                zeros_of(codec.spec) if self._momentum else None,
            )

    def check_dense(self, rows: Collection[int]) -> None:
        """Raise ValueError for gradients that are rows where messages have the momentum, or votes: these have none."""
        if self._momentum and rows:
            names = [self._originals[n].path for n in sorted(rows)]
            raise ValueError(
                f"Momentum correction needs gradients that are no rows. Received: {self._argument}={self.options!r}, "
                f"rows for {names}. Try momentum_correction=False."
            )
        if self.options.majority and rows:
            names = [self._originals[n].path for n in sorted(rows)]
            raise ValueError(
                "Workers vote on all elements of a variable, and a gradient that is rows has some. Received: "
                f"{self._argument}={str(self.options)!r}, rows for {names}. Try {self.options.name!r}."
            )

    def slots(self) -> list[Slot]:
        """What workers keep from step to step, as slots of the weights that it belongs to."""
        return [slot for worker, _ in enumerate(self._kept) for slot in self.slots_of(worker)]

    def slots_of(self, worker: int) -> list[Slot]:
        """What one worker keeps."""
        return [
            Slot(self._originals[n], f"{kind}_of_worker_{worker}", variable)
            for n, kept in self._kept[worker].items()
            for kind, variable in zip(self._kinds, kept, strict=True)
            if variable is not None
        ]

    def reduced(
        self,
        order: Order,
        made: Sequence[OfWorker],
        sinks: Sequence[str],
        like: Gradients,
        step: StepNumber,
        mixing: float = 0.0,
    ) -> list[Any]:
        """The sums of a phase's gradients on each of the ``sinks``, by the variables' numbers, pack after pack.

        Args:
            order: in which the phase's packs are sent.
            made: of each worker that has rows, its number, its device and its gradients.
            sinks: the devices that need the sums.
            like: the specs of the gradients; those that are not there are not sent.
            step: gives the number of the step on a device.
            mixing: of how far weights have moved, the part of its own weights that each worker then keeps.
        """
        step = cache(step)
        variables = [n for n in order.phase.variables if n in like]
        dense = [n for n in variables if not isinstance(like[n], tf.IndexedSlices)]
        self.check_dense({*variables} - {*dense})
        self.learn({n: like[n] for n in dense})
        wires = {n: tf.TensorSpec([self._codecs[n].sent_bytes], tf.uint8) for n in dense}
        makers = self._with_momentum(made, {n: like[n] for n in dense})
        sent = [
            {n: self.encoded(worker, device, gradients[n], n, step(device), mixing) for n in dense}
            for worker, device, gradients in makers
        ]
        received = [[Received(wires) for _ in makers] for _ in sinks]
        others: list[dict[int, Any]] = [{} for _ in sinks]
        for pack in order.packs():
            mine = tuple(n for n in pack.variables if n in wires)
            if mine:
                layout = MessageLayout(pack._replace(variables=mine), wires)
                for number, (_, source, _) in enumerate(makers):
                    with tf.device(source):
                        messages = layout.messages(sent[number])
                    for place, sink in enumerate(sinks):
                        there = [order.send(each, source, sink) for each in messages]
                        with tf.device(sink):
                            received[place][number].add(pack._replace(variables=mine), layout.values(there))
            for n in (n for n in pack.variables if n in like and n not in wires):
                for place, sink in enumerate(sinks):
                    rows = [(device, each[n]) for _, device, each in made]
                    others[place][n] = summed_rows(order, rows, sink, like[n])
        sums = []
        for sink, of_sources, rest in zip(sinks, received, others, strict=True):
            with tf.device(sink):
                found = {n: self.summed([each.values[n] for each in of_sources], n, step(sink)) for n in dense}
            sums.append({**found, **rest})
        return sums

    def _with_momentum(self, made: Sequence[OfWorker], like: Gradients) -> Sequence[OfWorker]:
        """What workers have made, and what those without rows send beside."""
        of = {worker: gradients for worker, _, gradients in made}
        every = [(n, device, of[n] if n in of else self.of_no_rows(n, like)) for n, device in enumerate(self._devices)]
        return [(worker, device, gradients) for worker, device, gradients in every if gradients is not None]

    def of_no_rows(self, worker: int, like: Gradients) -> Gradients | None:
        """The gradients of a worker without rows, if it has momentum to send: zeros."""
        if not self._momentum:
            return None
        with tf.device(self._devices[worker]):
            return {n: tf.zeros(spec.shape, spec.dtype) for n, spec in like.items()}

    def learn(self, like: Mapping[int, tf.TensorSpec]) -> None:
        """Gradients of these variables are sent, too, as they are: an embedding's that are not of rows."""
        for n, each in like.items():
            self._codecs.setdefault(n, Codec(None, each))

    def sent_bytes(self, n: int) -> int:
        """Of a message of a variable's gradient."""
        return self._codecs[n].sent_bytes

    def encoded(
        self, worker: int, device: str, gradient: Any, n: int, step: tf.Tensor, mixing: float = 0.0
    ) -> tf.Tensor:
        """The message of a worker's gradient; what it lacks is kept. One that is not finite arrives as NaN.

        With a ``mixing`` the next difference of the worker's weights has this part of the unsent rest already, less
        that part of what was kept before, which was sent though its weights had not moved by it.
        """
        codec = self._codecs[n]
        kept = self._kept[worker].get(n, KeptGradient())
        with tf.device(device):
            seed = step, self._first + n
            value = tf.ensure_shape(gradient, codec.spec.shape)
            if kept.velocity is not None:
                velocity = self._momentum * kept.velocity.value.read_value() + value
                value = velocity
            if kept.residual is not None:
                value += kept.residual.value.read_value()
            if type(codec) is not Codec:
                value = _finite_or_nan(value)
            memory = None if kept.memory is None else kept.memory.value.read_value()
            message, memory = codec.message(value, seed, worker, memory)
            if kept.memory is not None:
                kept.memory.value.assign(memory, read_value=False)
            if kept.residual is None and kept.velocity is not None:  # all of it arrives
                kept.velocity.value.assign(velocity, read_value=False)
            if kept.residual is not None:
                arrives = tf.reshape(codec.value(message, seed), value.shape)
                rest = value - arrives
                if mixing:
                    rest = (1 - mixing) * rest + mixing * kept.residual.value.read_value()
                kept.residual.value.assign(rest, read_value=False)
                if kept.velocity is not None:
                    is_whole = type(codec) is Codec  # the momentum of what is sent whole goes on, as an optimizer's
                    left = velocity if is_whole else tf.where(arrives == 0, velocity, tf.zeros_like(velocity))
                    kept.velocity.value.assign(left, read_value=False)
            return message

    def summed(self, messages: Sequence[tf.Tensor], n: int, step: tf.Tensor) -> tf.Tensor:
        """What the messages of a variable's gradients bring together."""
        codec, seed = self._codecs[n], (step, self._first + n)
        return codec.summed([tf.reshape(codec.value(each, seed), codec.spec.shape) for each in messages])


class ReplicaSums:
    """Sums the gradients of a stage's replicas, each of which sends its own to all others as one message.

    Every replica decodes all messages, its own too, and adds what they bring in the order of the replicas: all have
    bitwise equal sums. Rows of embeddings, and gradients that are not there, are not its matter.

    Args:
        options: the compression.
        stages: the replicas.
        weights: the model's trained variables, on whose order random numbers depend.
        apart: the numbers of embeddings among them, of which nothing is kept.
        momentum: see ``Compressor``.
        number: the stage's.
        later: the identities of those of its weights that an earlier stage has, too.
    """

    def __init__(
        self,
        options: Compression,
        stages: Sequence[Stage],
        weights: Sequence[keras.Variable],
        apart: Collection[int],
        momentum: float,
        number: int = 0,
        later: Collection[int] = (),
    ) -> None:
        self._later, self._kind = later, f"_of_stage_{number}_of_worker_"
        places = {id(each): n for n, each in enumerate(weights)}
        self._stages, mine = list(stages), stages[0].segment.trainable_variables
        self._number = [places[id(each)] for each in mine]
        self._like = dict(zip(self._number, specs(mine), strict=True))
        like = {n: each for n, each in self._like.items() if n not in apart}
        devices = [each.device for each in stages]
        self._compressor = Compressor(
            options, like, devices, weights, momentum, first=OF_REPLICAS, argument="replica_compression"
        )
        self._encode: dict[int, Callable[..., tf.Tensor]] = {}
        self._add: dict[tuple[int, int], Callable[..., list[tf.Tensor]]] = {}

    def slots_of(self, replica: int) -> list[Slot]:
        """What a replica keeps from step to step; of a weight that an earlier stage has, too, in other slots."""
        return [
            slot._replace(kind=slot.kind.replace("_of_worker_", self._kind)) if id(slot.weight) in self._later else slot
            for slot in self._compressor.slots_of(replica)
        ]

    @cached_property
    def numbers(self) -> list[int]:
        """Which of the stage's gradients are sent so, once the stage has been traced: those that are no rows."""
        given = dict(enumerate(self._stages[0].gradients_given))
        found = [n for n, each in given.items() if isinstance(each, tf.TensorSpec)]
        self._compressor.check_dense([self._number[n] for n in given if n not in found and given[n] is not None])
        self._compressor.learn({self._number[n]: self._like[self._number[n]] for n in found})
        return found

    @property
    def sent_bytes(self) -> int:
        """Of a message."""
        return sum(self._compressor.sent_bytes(self._number[n]) for n in self.numbers)

    def of_no_rows(self, replica: int) -> Gradients | None:
        """The gradients of a replica without rows, if it has momentum to send."""
        return self._compressor.of_no_rows(replica, {n: self._like[self._number[n]] for n in self.numbers})

    def encoded(self, replica: int, gradients: Any, step: tf.Tensor) -> tf.Tensor:
        """A replica's message; in the scope of its device. What it lacks is kept."""
        if replica not in self._encode:
            like = [self._like[self._number[n]] for n in self.numbers]
            function = partial(self._message, replica)
            self._encode[replica] = Kernels().op(function, like, tf.TensorSpec([], tf.int64))
        return self._encode[replica]([gradients[n] for n in self.numbers], step)

    def _message(self, replica: int, gradients: Sequence[Any], step: tf.Tensor) -> tf.Tensor:
        device, numbers = self._stages[replica].device, [self._number[n] for n in self.numbers]
        pairs = zip(gradients, numbers, strict=True)
        return tf.concat([self._compressor.encoded(replica, device, each, n, step) for each, n in pairs], 0)

    def added(self, replica: int, messages: Sequence[tf.Tensor], step: tf.Tensor) -> dict[int, tf.Tensor]:
        """The sums of what the messages bring, by the stage's numbers; in the scope of the replica's device."""
        key = replica, len(messages)
        if key not in self._add:
            like = [tf.TensorSpec([self.sent_bytes], tf.uint8) for _ in messages]
            self._add[key] = Kernels().op(self._sums, like, tf.TensorSpec([], tf.int64))
        return dict(zip(self.numbers, self._add[key]([*messages], step), strict=True))

    def _sums(self, messages: Sequence[tf.Tensor], step: tf.Tensor) -> list[tf.Tensor]:
        numbers = [self._number[n] for n in self.numbers]
        sizes = [self._compressor.sent_bytes(n) for n in numbers]
        parts = [tf.split(each, sizes) for each in messages]
        return [
            self._compressor.summed(of_variable, n, step)
            for n, of_variable in zip(numbers, zip(*parts, strict=True), strict=True)
        ]


def zeros_of(spec: tf.TensorSpec) -> keras.Variable:
    """A variable of zeros that a worker keeps from step to step, on the device of this scope."""
    return keras.Variable(tf.zeros(spec.shape, spec.dtype), trainable=False, dtype=spec.dtype.name)


def _as_bytes(part: tf.Tensor) -> tf.Tensor:
    return flat(part if part.dtype == tf.uint8 else tf.bitcast(part, tf.uint8))


def _of_bytes(piece: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    if dtype == tf.uint8:
        return piece
    return tf.bitcast(tf.reshape(piece, [-1, dtype.size] if dtype.size > 1 else [-1]), dtype)


def _finite_or_nan(value: tf.Tensor) -> tf.Tensor:
    """The value, or NaN everywhere if any of it is not finite."""
    is_finite = tf.reduce_all(tf.math.is_finite(value))
    return tf.where(is_finite, value, tf.constant(math.nan, value.dtype))


TENSORS = 1 << 12  # of a cut, at most: each has a number of its own
MANY = 1 << 20  # elements, of which a message's bytes are in proportion


class CutMessages:
    """What crosses a cut of a pipeline as messages: activations down (F), their gradients up (B).

    Tensors that have no gradients, such as tokens, and masks are sent as they are.

    Args:
        options: the compression.
        number: of the cut.
        specs: of the tensors that cross it, for any rows.
        flows: which of them want a gradient.
        unreached: the numbers of those among them that get none.
    """

    def __init__(
        self, options: Compression, number: int, specs: Any, flows: Sequence[bool], unreached: Sequence[int]
    ) -> None:
        self._options, self._number = options, number
        self._down = [(spec, flow and self._is_smaller(spec)) for spec, flow in zip(specs, flows, strict=True)]
        wanted = [n for n, flow in enumerate(flows) if flow and n not in unreached]
        self._up = [self._down[n] for n in wanted]
        types = {spec.dtype for spec, coded in self._down if coded}
        self._own = {each: OwnCutCodec(options, each) for each in types if hasattr(options, "encode")}

    def _is_smaller(self, spec: tf.TensorSpec) -> bool:
        is_less = spec.dtype.is_floating and self._options.encodes((MANY,), spec.dtype.size)
        return bool(is_less and spec.shape.rank)

    def encoded(self, values: Any, step: tf.Tensor, stream: Any) -> Any:
        """The values that one replica sends another, as they are sent; on the sender's device.

        Args:
            values: down ``BoundaryTensors``, up the gradients.
            step: the number of the minibatch.
            stream: that of the microbatch and of the two replicas.
        """
        is_up = not isinstance(values, BoundaryTensors)

        def message(value: tf.Tensor, spec: tf.TensorSpec, n: int) -> tf.Tensor:
            seed = step, (2 * self._number + is_up) * TENSORS + n
            return self._message(value, spec, seed, stream)

        if is_up:
            return self._each(self._up, values, message)
        return BoundaryTensors(self._each(self._down, values.tensors, message), values.masks)

    def decoded(self, messages: Any) -> Any:
        """The values again, on the receiver's device."""
        if not isinstance(messages, BoundaryTensors):
            return self._each(self._up, messages, self._value)
        return BoundaryTensors(self._each(self._down, messages.tensors, self._value), messages.masks)

    @staticmethod
    def _each(
        kinds: Any, tensors: Sequence[tf.Tensor], function: Callable[[tf.Tensor, tf.TensorSpec, int], tf.Tensor]
    ) -> list[tf.Tensor]:
        return [
            function(tensor, spec, n) if coded else tensor
            for n, (tensor, (spec, coded)) in enumerate(zip(tensors, kinds, strict=True))
        ]

    def _message(self, value: tf.Tensor, spec: tf.TensorSpec, seed: Seed, stream: Any) -> tf.Tensor:
        """The sizes that the spec leaves open, and the codec's message."""
        codec = self._codec(spec, tf.size(value))
        value = value if isinstance(codec, CastCodec) else _finite_or_nan(value)
        message, _ = codec.message(value, seed, stream)
        return tf.concat([_open_sizes(value, spec), message], 0)

    def _value(self, message: tf.Tensor, spec: tf.TensorSpec, number: int) -> tf.Tensor:
        shape, rest = _shape_and_rest(message, spec)
        value = self._codec(spec, math.prod(shape)).value(rest, None)
        return tf.ensure_shape(tf.reshape(value, shape), spec.shape)

    def _codec(self, spec: tf.TensorSpec, count: Any) -> Codec:
        if spec.dtype in self._own:
            return self._own[spec.dtype]
        return CODECS[type(self._options)](self._options, spec, count)


def _open(spec: tf.TensorSpec) -> list[int]:
    """Which dimensions a spec leaves open: of what crosses a cut the rows at least, see ``any_rows``."""
    return [n for n, size in enumerate(spec.shape) if size is None]


def _open_sizes(value: tf.Tensor, spec: tf.TensorSpec) -> tf.Tensor:
    """The bytes of the sizes that a spec leaves open."""
    return _as_bytes(tf.gather(tf.shape(value), tf.constant(_open(spec), tf.int32)))


def _shape_and_rest(message: tf.Tensor, spec: tf.TensorSpec) -> tuple[list[Any], tf.Tensor]:
    """The shape, by such sizes at a message's beginning, and what follows them."""
    places = _open(spec)
    head = len(places) * tf.int32.size
    sizes = dict(zip(places, tf.unstack(_of_bytes(message[:head], tf.int32), len(places)), strict=True))
    return [sizes.get(n, size) for n, size in enumerate(spec.shape)], message[head:]


def messages_of_cuts(options: Compression | None, stages: Sequence[Any]) -> list[CutMessages] | None:
    """Of every cut between stages that have been traced; None without compression."""
    if options is None:
        return None
    return [
        CutMessages(options, n, any_rows(stage.segment.outputs), stage.segment.returns, after.unreached)
        for n, (stage, after) in enumerate(pairwise(stages))
    ]
