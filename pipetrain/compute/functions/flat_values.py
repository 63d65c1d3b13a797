"""Many values as a few flat tensors: what is sent between processes costs by the number of tensors, too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from pipetrain.compute.cores import LOCAL_HOST, finish, is_processor, is_remote, processor_of
from pipetrain.compute.functions.kernels import Kernels
from pipetrain.compute.tensorflow_private import captured_variables, read_instead, uncapture

WORTH = 2  # variables of a worker that are packed: one is as many arguments as a pack


def packing_captures(body: Callable[..., Any]) -> Callable[..., Any]:
    """The body of a function over several processes, which then takes all variables of each worker together.

    A call of such a function tells each process every variable that the function captures there, about 100 bytes each.
    What it is given instead is one tensor of their handles, which is on the worker.

    Variables on GPUs are left as they are: TensorFlow unpacks handles on processors only, and wants what makes a
    variable's handle on the variable's own device.
    """

    def packing(*arguments: Any) -> Any:
        results = body(*arguments)
        _pack_captures()
        return results

    return packing


def _pack_captures() -> None:
    known: dict[str, list[tuple[Any, tf.Tensor, tf.TensorShape]]] = {}
    for handle, inner, shape in captured_variables(tf.compat.v1.get_default_graph()):
        if is_remote(handle.device) and is_processor(handle.device):
            known.setdefault(handle.device, []).append((handle, inner, shape))
    for device, captured in known.items():
        if len(captured) >= WORTH:
            _pack(device, captured)


def _pack(device: str, captured: Sequence[tuple[Any, tf.Tensor, tf.TensorShape]]) -> None:
    graph = tf.compat.v1.get_default_graph()
    with tf.init_scope():
        with tf.device(device):
            together = tf.stack([handle for handle, *_ in captured])
        finish(device)  # a function over several processes would not wait until it is there
    with tf.device(device), tf.control_dependencies(None):
        handles = tf.unstack(graph.capture(together), len(captured))
    for (handle, inner, shape), unpacked in zip(captured, handles, strict=True):
        for read in [each for each in inner.consumers() if each.type == "ReadVariableOp"]:
            _keep_shape(read, shape, device)
        read_instead(inner, unpacked)
        uncapture(graph, handle)


def _keep_shape(read: tf.Operation, shape: tf.TensorShape, device: str) -> None:
    """TensorFlow takes the shape of what is read from the handle, where that is an argument; it optimizes by it."""
    (value,) = read.outputs
    readers = value.consumers()
    if readers:
        with tf.device(device), tf.control_dependencies(None):
            shaped = tf.ensure_shape(value, shape)
        read_instead(value, shaped, readers)


MOST_BYTES = 32 * 2**20  # of several values in a flat tensor, which a device has beside them for a while


def packs_of(specs: Sequence[tf.TensorSpec]) -> list[list[int]]:
    """Which values are one flat tensor, by number: those of one type. What is large, or has any shape, is alone."""
    packs: list[list[int]] = []
    last: dict[tf.DType, tuple[list[int], int]] = {}  # of each type the pack that is not full, and its bytes
    for n, spec in enumerate(specs):
        size = int(np.prod(spec.shape)) * int(spec.dtype.size) if _is_fixed(spec) else MOST_BYTES
        pack, before = last.get(spec.dtype, ([], MOST_BYTES))
        if before + size > MOST_BYTES:
            pack, before = [], 0
            packs.append(pack)
        pack.append(n)
        last[spec.dtype] = pack, before + size
    return packs


def _is_fixed(spec: tf.TensorSpec) -> bool:
    return bool(spec.shape.is_fully_defined())


def flat(values: Sequence[tf.Tensor], device: str) -> tf.Tensor:
    """The values of a pack, which are on the device, in one tensor.

    GPUs do not have the operations for all types of numbers; their processors have.
    """
    with tf.device(device if values[0].dtype.is_floating else processor_of(device)):
        parts = [tf.reshape(each, [-1]) for each in values]
        return parts[0] if len(parts) == 1 else tf.concat(parts, 0)


def parted(whole: tf.Tensor, specs: Sequence[tf.TensorSpec]) -> list[tf.Tensor]:
    """The values that are in a tensor which ``flat`` has made."""
    if not all(map(_is_fixed, specs)):
        return [whole]
    parts = tf.split(whole, [int(np.prod(spec.shape)) for spec in specs])
    return [tf.reshape(part, spec.shape) for part, spec in zip(parts, specs, strict=True)]


class FlatReader:
    """Reads a worker's variables from this process: one call, and a message for each flat tensor.

    Args:
        device: TensorFlow's name of the worker's device.
        variables: on the device.
        specs: of their values.
    """

    def __init__(self, device: str, variables: Sequence[Any], specs: Sequence[tf.TensorSpec]) -> None:
        self._device, self._specs, self._packs = device, list(specs), packs_of(specs)

        def read() -> list[tf.Tensor]:
            values = [variable.read_value() for variable in variables]
            return [
                flat([values[n] for n in pack], device) if _is_fixed(self._specs[pack[0]]) else values[pack[0]]
                for pack in self._packs
            ]

        with tf.device(device):
            self._read = Kernels().op(packing_captures(read))
            self._read()  # the worker is sent the function now, not when an epoch ends

    def __call__(self) -> list[tf.Tensor]:
        """The values, in this process."""
        with tf.device(self._device):
            there = self._read()
        return joined(self._packs, there, self._specs)


def joined(packs: Sequence[Sequence[int]], flats: Sequence[tf.Tensor], specs: Sequence[tf.TensorSpec]) -> list[Any]:
    """The values by number, from the flat tensors of their packs; outside a function that is traced, in this process.

    NumPy divides them here: of an operation with many inputs or outputs, called by itself, TensorFlow makes a function,
    of which it tells all workers.
    """
    values: dict[int, Any] = {}
    for pack, whole in zip(packs, flats, strict=True):
        of_pack = [specs[n] for n in pack]
        parts = parted(whole, of_pack) if tf.inside_function() else _parted_here(whole, of_pack)
        values.update(zip(pack, parts, strict=True))
    return [values[n] for n in range(len(specs))]


def _parted_here(whole: tf.Tensor, specs: Sequence[tf.TensorSpec]) -> list[tf.Tensor]:
    array = whole.numpy()
    ends = np.cumsum([int(np.prod(spec.shape)) for spec in specs[:-1]], dtype=int)
    fixed = [spec.shape if _is_fixed(spec) else array.shape for spec in specs]
    with tf.device(LOCAL_HOST):
        parts = zip(np.split(array, ends) if len(specs) > 1 else [array], fixed, strict=True)
        return [tf.constant(part.reshape(shape)) for part, shape in parts]


def flat_here(values: Sequence[tf.Tensor]) -> tf.Tensor:
    """The values of a pack, which this process has, in one tensor here."""
    with tf.device(LOCAL_HOST):
        return tf.constant(np.concatenate([each.numpy().reshape([-1]) for each in values]))
