"""What parts of wide layers' outputs take: measured, so that a grid of devices is predicted from what each computes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import keras

from pipetrain.compute.graph.blocks import Chain
from pipetrain.compute.graph.wide_layers import WideLayer, wide_layers
from pipetrain.compute.profiling.profiler import profile
from pipetrain.plan.profile import Profile

CHANGING_NOTHING = ("kernel_initializer", "bias_initializer", "name")  # which change no seconds


def with_slices(measured: Profile, model: keras.Model, parts: Sequence[int], device: str = "CPU:0") -> Profile:
    """The profile with the seconds of one of so many equal parts of each wide layer's outputs.

    A layer of such a part is measured behind one that is trained, so that it makes the gradients of its inputs as in
    the model. Layers that are alike are measured once. Layers with open dimensions, and with fewer outputs than parts,
    are left out.

    Args:
        measured: of the model, whole minibatches.
        model: whose layers are measured.
        parts: numbers of parts.
        device: the TensorFlow device to measure on.
    """
    known: dict[str, tuple[float, float]] = {}
    slices: dict[str, tuple[tuple[int, float, float], ...]] = {}
    for layer in wide_layers(Chain(model).blocks):
        found = []
        for count in sorted({*parts} - {1}):
            channels = -(-layer.size // count)
            if count <= layer.size and None not in layer.call.node.input_tensors[0].shape[1:]:
                key = _key(layer, channels)
                if key not in known:
                    known[key] = _measured_s(layer, channels, measured.batch_size, device)
                found.append((count, *known[key]))
        slices[layer.name] = tuple(found)
    blocks = tuple(replace(block, slices=slices.get(block.name, ())) for block in measured.blocks)
    return replace(measured, blocks=blocks)


def _key(layer: WideLayer, channels: int) -> str:
    config = layer.narrowed(channels).get_config()
    config = {name: value for name, value in config.items() if name not in CHANGING_NOTHING}
    shape = layer.call.node.input_tensors[0].shape[1:]
    return json.dumps([type(layer.call.operation).__name__, list(shape), config], default=str, sort_keys=True)


def _measured_s(layer: WideLayer, channels: int, rows: int, device: str) -> tuple[float, float]:
    read = keras.Input(layer.call.node.input_tensors[0].shape[1:], dtype=layer.call.node.input_tensors[0].dtype)
    narrow = layer.narrowed(channels)
    alone = keras.Model(read, narrow(keras.layers.PReLU(dtype=read.dtype)(read)))
    block = profile(alone, rows, device, verbose=False).blocks[-1]
    return block.forward_s, block.backward_s
