"""Layers whose outputs can be divided over devices, and a model of them as formulas of a grid's traffic know it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras

from pipetrain.compute.graph.blocks import Block, Chain
from pipetrain.compute.graph.segment import Call, is_differentiable
from pipetrain.plan.balance import LayerShape
from pipetrain.plan.grid_cost import GridLayer, GridNetwork

CONVOLUTIONS = (keras.layers.Conv1D, keras.layers.Conv2D, keras.layers.Conv3D)
# Which are computed of each output alone.
ELEMENTWISE = [
    "celu",
    "elu",
    "exponential",
    "gelu",
    "hard_shrink",
    "hard_sigmoid",
    "hard_silu",
    "hard_tanh",
    "leaky_relu",
    "linear",
    "log_sigmoid",
    "mish",
    "relu",
    "relu6",
    "selu",
    "sigmoid",
    "silu",
    "soft_shrink",
    "softplus",
    "softsign",
    "squareplus",
    "tanh",
    "tanh_shrink",
    "threshold",
]
REGULARIZERS = (keras.regularizers.L1, keras.regularizers.L2, keras.regularizers.L1L2)  # sums over elements
Divided = tuple[int, tuple[int, ...], int]  # the axis of the outputs, those of the weights, and their size
INITIALIZERS = ("kernel_initializer", "bias_initializer")
CONSTRAINTS = ("kernel_constraint", "bias_constraint")


class WideLayer(NamedTuple):
    """A block that is one call of a layer whose outputs can be divided.

    ``axis`` is that of the outputs' channels, ``axes`` those of the weights, in the order of the layer's trained ones,
    of which all devices together have ``size`` channels.
    """

    block: int
    name: str
    call: Call
    axis: int
    axes: tuple[int, ...]
    size: int

    def narrowed(self, channels: int) -> keras.Layer:
        """Such a layer with so many channels, not built. Its first weights do not matter, and are not drawn.

        Raises ValueError if the layer was changed since so that it cannot be divided any more.
        """
        layer = self.call.operation
        if not _is_plain(self.call):
            raise ValueError(
                "A layer was changed after the PipelineModel was made, so that its outputs cannot be divided any more. "
                f"Received: {self.name!r} with another regularizer, constraint or activation. Try changing it before."
            )
        config = layer.get_config() | dict.fromkeys(INITIALIZERS, "zeros") | dict.fromkeys(CONSTRAINTS)
        # Keras asks the weights, not their layer, which may have been given others later; constraints they have none.
        for name in ("kernel", "bias"):
            weight = getattr(layer, name)
            config[f"{name}_regularizer"] = None if weight is None else weight.regularizer
        if isinstance(layer, keras.layers.EinsumDense):
            shape = list(config["output_shape"])
            shape[self.axis - 1] = channels
            config["output_shape"] = shape
        else:
            config["units" if isinstance(layer, keras.layers.Dense) else "filters"] = channels
        return type(layer).from_config(config)

    @property
    def shape(self) -> LayerShape:
        """What formulas count of it; sizes that are open are taken to be 1."""
        (read,), (made,) = self.call.node.input_tensors, self.call.node.output_tensors
        layer = self.call.operation
        inputs, outputs = _elements(read), _elements(made)
        weights = sum(math.prod(each.shape) for each in self.call.weights)
        if not isinstance(layer, CONVOLUTIONS):
            channels = outputs // _shared_elements(layer, read, made)
            return LayerShape(
                self.name, channels, inputs, outputs, weights, 1, outputs // channels, outputs // channels
            )
        sizes = _spatial(made, layer.data_format)
        reach = [(n - 1) * rate + 1 for n, rate in zip(layer.kernel_size, layer.dilation_rate, strict=True)]
        read_sizes = [
            (size - 1) * stride + each for size, stride, each in zip(sizes, layer.strides, reach, strict=True)
        ]
        kernel, positions = math.prod(layer.kernel_size), math.prod(sizes)
        return LayerShape(self.name, layer.filters, inputs, outputs, weights, kernel, positions, math.prod(read_sizes))


def wide_layers(blocks: Sequence[Block]) -> list[WideLayer]:
    """The layers that can be divided, in the chain's order.

    Each is called once, shares no weight, trains all of its weights, and has nothing that depends on several of its
    channels together.
    """
    users = Counter(id(each) for block in blocks for call in block.calls for each in _variables(call))
    found = []
    for number, block in enumerate(blocks):
        if len(block.calls) != 1:
            continue
        (call,) = block.calls
        if _is_plain(call) and all(users[id(each)] == 1 for each in _variables(call)):
            divided = _dense(call) or _einsum(call) or _convolution(call)
            found += [WideLayer(number, block.name, call, *divided)] if divided else []
    return found


def _variables(call: Call) -> Sequence[Any]:
    return list(getattr(call.operation, "variables", ()))


def _is_plain(call: Call) -> bool:
    layer = call.operation
    if type(layer) not in (keras.layers.Dense, keras.layers.EinsumDense, *CONVOLUTIONS):
        return False
    weights = [layer.kernel, *([layer.bias] if layer.bias is not None else [])]
    whole = [*map(id, weights)] == [*map(id, call.weights)] == [*map(id, layer.variables)]  # else adapters, quantized
    return (
        whole
        and all(each.regularizer is None or type(each.regularizer) in REGULARIZERS for each in weights)
        and all(each.constraint is None for each in weights)
        and layer.activity_regularizer is None
        and keras.activations.serialize(layer.activation) in ELEMENTWISE
        and call.node.input_tensors[0].shape[0] is None  # the rows, which are divided too
        and is_differentiable(call.node.input_tensors[0].dtype)
        and len(call.node.input_tensors) == 1
    )


def _dense(call: Call) -> Divided | None:
    if not isinstance(call.operation, keras.layers.Dense):
        return None
    made = call.node.output_tensors[0]
    return len(made.shape) - 1, (1, 0)[: len(call.weights)], call.operation.units


def _convolution(call: Call) -> Divided | None:
    layer = call.operation
    if not isinstance(layer, CONVOLUTIONS) or layer.groups != 1:
        return None
    made = call.node.output_tensors[0]
    axis = len(made.shape) - 1 if layer.data_format == "channels_last" else 1
    return axis, (len(layer.kernel.shape) - 1, 0)[: len(call.weights)], layer.filters


def _einsum(call: Call) -> Divided | None:
    """By the first of the outputs' letters that is the kernel's and the bias's alone."""
    layer = call.operation
    if not isinstance(layer, keras.layers.EinsumDense) or "." in layer.equation:
        return None
    read, kernel, made = _letters(layer)
    bias = [each for each in made if each in (layer.bias_axes or "")]
    for axis, letter in enumerate(made):
        if axis == 0 or letter in read or letter not in kernel or (layer.bias is not None and letter not in bias):
            continue
        axes = (kernel.index(letter), *([_bias_axis(layer, made, letter)] if layer.bias is not None else []))
        return axis, axes, call.node.output_tensors[0].shape[axis]
    return None


def _bias_axis(layer: keras.layers.EinsumDense, made: str, letter: str) -> int:
    """Where the bias, whose shape ends as the outputs' do, has this letter."""
    return made.index(letter) - (len(made) - len(layer.bias.shape))


def _letters(layer: keras.layers.EinsumDense) -> list[str]:
    inputs, _, made = layer.equation.replace(" ", "").partition("->")
    return [*inputs.split(","), made]


def _shared_elements(layer: Any, read: Any, made: Any) -> int:
    """The outputs of one row that one set of weights makes: the positions of a dense layer."""
    if isinstance(layer, keras.layers.EinsumDense):
        if "." in layer.equation:
            return max(1, _elements(made) // layer.kernel.shape[-1])
        _, kernel, letters = _letters(layer)
        return math.prod(made.shape[n] or 1 for n, each in enumerate(letters) if n and each not in kernel)
    return _elements(read) // int(layer.kernel.shape[0])


def _spatial(made: Any, data_format: str) -> list[int]:
    sizes = made.shape[1:-1] if data_format == "channels_last" else made.shape[2:]
    return [size or 1 for size in sizes]


def _elements(symbol: Any) -> int:
    return math.prod(size or 1 for size in symbol.shape[1:])


def network_of(chain: Chain, wide: Sequence[WideLayer] | None = None) -> GridNetwork:
    """Its blocks, the weights of each that no earlier one has, and its values; sizes that are open count as 1."""
    wide = wide_layers(chain.blocks) if wide is None else wide
    by_block = {layer.block: layer for layer in wide}
    seen: set[int] = set()
    layers = []
    for number, block in enumerate(chain.blocks):
        weights = {id(each): each for call in block.calls for each in call.weights if id(each) not in seen}
        seen |= set(weights)
        writes = [value for call in block.calls for value in call.writes]
        reads = {value for call in block.calls for value in call.reads} - {*writes}
        layers.append(
            GridLayer(
                block.name,
                sum(_elements(chain.symbol(value)) for value in writes),
                sum(math.prod(each.shape) for each in weights.values()),
                by_block[number].size if number in by_block else 0,
                tuple(sorted(reads)),
                tuple(writes),
                tuple(math.prod(each.shape) for each in weights.values()),
            )
        )
    count = 1 + max((value for layer in layers for value in (*layer.reads, *layer.writes)), default=-1)
    inputs, outputs = chain.crossing(0), chain.crossing(len(chain.blocks))
    elements = [_elements(chain.symbol(value)) for value in range(max(count, *(n + 1 for n in (*inputs, *outputs))))]
    return GridNetwork(tuple(layers), tuple(elements), tuple(inputs), tuple(outputs), tuple(sorted(chain.trained())))
