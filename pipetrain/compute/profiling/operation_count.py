"""The operations of each block of a model: matrix products and bytes, counted from shapes without running anything."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras

from pipetrain.compute.graph.blocks import Block, Chain
from pipetrain.compute.graph.segment import Call
from pipetrain.compute.graph.sharing import shared_by_blocks
from pipetrain.plan.profile import Profile
from pipetrain.plan.roofline import FLOAT_BYTES, Device, Product, Work, roofline

ONE_CORE = Device("a core", 50e9, 10e9, 1, tile=1, launch_s=0.0)
LITTLE_S = 2e-3  # of a minibatch: compiling would take longer than it could ever save
NOTHING = ("Flatten", "Reshape", "Identity")  # what only gives a tensor another shape


def analytic(model: keras.Model, batch_size: int, device: Device) -> Profile:
    """The profile of a model on a described device, by counting and a roofline; see ``plan.roofline``."""
    return roofline(model.name, batch_size, operation_counts(model, batch_size), device)


def operation_counts(model: keras.Model, batch_size: int) -> list[Work]:
    """The operations of every block's forward for a number of rows, and its bytes.

    Matrix products are those of dense, convolution, LSTM and attention layers. All other operations, activations within
    those layers included, are counted by the bytes that they read and write. A block keeps all that it writes until its
    backward.
    """
    return _works(Chain(model), batch_size)


def estimated_counts(chain: Chain, rows: int) -> list[Work]:
    """The same of a chain; of layers that are not as Keras' own of their kind are, bytes read and written alone."""
    return _works(chain, rows, _counted_or_moved)


def is_little(chain: Chain, batch_size: int) -> bool:
    """Whether one processor core has done a minibatch in 2 ms, by estimate; not where dimensions are open."""
    if any(None in symbol.shape[1:] for symbol in chain.specs(0)):
        return False
    try:
        works = _works(chain, batch_size)
    except (AttributeError, TypeError, ValueError):  # a layer that is not as Keras' own of its kind are
        return False
    return roofline("", batch_size, works, ONE_CORE).total_s < LITTLE_S


def estimated_s(chain: Chain, rows: int) -> float:
    """What one processor core takes for a minibatch, by estimate: the same on every machine."""
    return roofline("", rows, estimated_counts(chain, rows), ONE_CORE).total_s


Count = Callable[[Call, int], "_Count"]


def _works(chain: Chain, batch_size: int, count: Count | None = None) -> list[Work]:
    shared = shared_by_blocks([block.calls for block in chain.blocks])
    sent = [sum(_bytes(symbol, batch_size) for symbol in chain.specs(n + 1)) for n in range(len(chain.blocks))]
    return [
        _work(block, output_bytes, [(count or _counted)(call, batch_size) for call in block.calls], batch_size, weights)
        for block, output_bytes, weights in zip(chain.blocks, sent, shared, strict=True)
    ]


@dataclass
class _Count:
    """Counts of one layer call: products, other bytes, kernels for these, and bytes kept that are not outputs."""

    products: list[Product] = field(default_factory=list)
    moved_bytes: int = 0
    kernels: int = 0
    kept_bytes: int = 0


def _work(
    block: Block, output_bytes: int, counts: Sequence[_Count], rows: int, shared: Sequence[tuple[int, Any]]
) -> Work:
    written = sum(
        _bytes(symbol, rows)
        for call in block.calls
        for symbol in call.node.output_tensors
        if type(call.operation).__name__ not in NOTHING
    )
    variables = {id(v): v for call in block.calls for v in call.weights}
    fixed = {id(v): v for call in block.calls for v in getattr(call.operation, "non_trainable_variables", ())}
    return Work(
        name=block.name,
        products=tuple(product for count in counts for product in count.products),
        moved_bytes=sum(count.moved_bytes for count in counts),
        kernels=sum(count.kernels for count in counts),
        weight_bytes=sum(FLOAT_BYTES * math.prod(variable.shape) for variable in variables.values()),
        output_bytes=output_bytes,
        activation_bytes=written + sum(count.kept_bytes for count in counts),
        shared=tuple((number, FLOAT_BYTES * math.prod(variable.shape)) for number, variable in shared),
        fixed_bytes=sum(FLOAT_BYTES * math.prod(variable.shape) for variable in fixed.values()),
    )


def _counted(call: Call, rows: int) -> _Count:
    for kind, count in COUNTS.items():
        if isinstance(call.operation, kind):
            return count(call, rows)
    return _Count() if type(call.operation).__name__ in NOTHING else _moved(call, rows)


def _counted_or_moved(call: Call, rows: int) -> _Count:
    try:
        return _counted(call, rows)
    except (AttributeError, TypeError, ValueError):
        return _moved(call, rows)


def _moved(call: Call, rows: int) -> _Count:
    return _Count(moved_bytes=_read(call, rows) + _written(call, rows), kernels=1)


def _dense(call: Call, rows: int) -> _Count:
    """(rows x inputs) by (inputs x units), then bias and activation on the result."""
    inputs, units = call.operation.kernel.shape
    lines = _elements(call.node.input_tensors[0], rows) // inputs
    return _with_activation(call, rows, [product(lines, inputs, units)])


def _convolution(call: Call, rows: int) -> _Count:
    """One product: every position of the outputs by every number under the kernel; groups are parallel products."""
    layer = call.operation
    *size, channels, filters = layer.kernel.shape
    outputs = call.node.output_tensors[0]
    positions = _elements(outputs, rows) // filters
    moved = _read(call, rows) + _written(call, rows) + FLOAT_BYTES * math.prod(layer.kernel.shape)
    one = Product(positions, math.prod(size) * channels, filters // layer.groups, moved, layer.groups)
    return _with_activation(call, rows, [one])


def _with_activation(call: Call, rows: int, products: list[Product]) -> _Count:
    layer = call.operation
    passes = bool(layer.use_bias) + (layer.activation is not keras.activations.linear)
    return _Count(products, 2 * passes * _written(call, rows), passes)


def _lstm(call: Call, rows: int) -> _Count:
    """The inputs' product for all steps at once, the memory's step by step; gates and cell in one kernel a step.

    Four gates, the cell and its tanh are kept.
    """
    units, steps = call.operation.units, call.node.input_tensors[0].shape[1]
    width = call.node.input_tensors[0].shape[-1]
    gates_bytes = FLOAT_BYTES * rows * steps * 4 * units
    each = product(rows, units, 4 * units)
    return _Count(
        [product(rows * steps, width, 4 * units), each._replace(times=steps)],
        moved_bytes=3 * gates_bytes,
        kernels=steps,
        kept_bytes=gates_bytes * 3 // 2,
    )


def _attention(call: Call, rows: int) -> _Count:
    """Four projections, scores and weighted sums per head, softmax; queries, keys, values and weights are kept."""
    layer, tensors = call.operation, call.node.input_tensors
    query, value = tensors[0], tensors[1] if len(tensors) > 1 else tensors[0]
    words, others, heads = query.shape[1], value.shape[1], layer.num_heads
    width, inner, values = query.shape[-1], heads * layer.key_dim, heads * layer.value_dim
    scores_bytes = FLOAT_BYTES * rows * heads * words * others
    between = FLOAT_BYTES * rows * (words * inner + others * (inner + values) + words * values)
    return _Count(
        [
            product(rows * words, width, inner),
            product(rows * others, value.shape[-1], inner),
            product(rows * others, value.shape[-1], values),
            product(words, layer.key_dim, others, together=rows * heads),
            product(words, others, layer.value_dim, together=rows * heads),
            product(rows * words, values, width),
        ],
        moved_bytes=2 * (between + 2 * scores_bytes),  # biases, and scaling and softmax of the scores
        kernels=6,
        kept_bytes=between + scores_bytes,
    )


def _normalization(call: Call, rows: int) -> _Count:
    """Reads everything twice: for its mean and variance, then to scale it."""
    return _Count(moved_bytes=2 * _read(call, rows) + _written(call, rows), kernels=2)


def _embedding(call: Call, rows: int) -> _Count:
    """Reads the words' vectors and writes them; called in reverse, one product of all vectors with the inputs."""
    if call.node.arguments.kwargs.get("reverse"):
        words, units = call.operation.embeddings.shape
        return _Count([product(_elements(call.node.input_tensors[0], rows) // units, units, words)])
    return _Count(moved_bytes=2 * _written(call, rows), kernels=1)


COUNTS: dict[type, Callable[[Call, int], _Count]] = {
    keras.layers.Dense: _dense,
    keras.layers.Conv1D: _convolution,
    keras.layers.Conv2D: _convolution,
    keras.layers.Conv3D: _convolution,
    keras.layers.LSTM: _lstm,
    keras.layers.MultiHeadAttention: _attention,
    keras.layers.BatchNormalization: _normalization,
    keras.layers.LayerNormalization: _normalization,
    keras.layers.Embedding: _embedding,
}


def product(rows: int, inner: int, columns: int, together: int = 1) -> Product:
    """A product that reads both factors once and writes its result."""
    moved = FLOAT_BYTES * together * (rows * inner + inner * columns + rows * columns)
    return Product(rows, inner, columns, moved, together)


def _read(call: Call, rows: int) -> int:
    return sum(_bytes(tensor, rows) for tensor in call.node.input_tensors)


def _written(call: Call, rows: int) -> int:
    return sum(_bytes(tensor, rows) for tensor in call.node.output_tensors)


def _bytes(symbol: Any, rows: int) -> int:
    return FLOAT_BYTES * _elements(symbol, rows)


def _elements(symbol: Any, rows: int) -> int:
    """Numbers of a tensor whose first dimension is the batch's; other unknown ones count as 1."""
    first, *others = symbol.shape or (1,)
    return (rows if first is None else first) * math.prod(size or 1 for size in others)
