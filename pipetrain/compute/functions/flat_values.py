"""Values between processes: many as a few flat tensors, and copies of which only those that differ are sent again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
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


WORTH_BYTES = 1024  # what takes fewer in all is sent in less time than the worker is asked
FEW = 4  # values that are sent one by one, for which no function is traced


class WorkerCopies:
    """What a device has of values that are elsewhere.

    A worker is asked for fingerprints of its copies' bytes, and given what has another one: whoever has assigned either
    side, or started the worker anew, need not be known. Two values that differ have the same 64 bits with a probability
    of 2**-64. On a device of this process nothing is compared: to copy costs less there.

    Values are iterables, whose items are computed on the device, or in this process if the device is not in it.

    Args:
        device: a TensorFlow device name; methods are called in its scope.
    """

    def __init__(self, device: str) -> None:
        self._device, self._is_remote = device, is_remote(device)
        self._functions: dict[Any, Any] = {}  # that make fingerprints, by where that is and of what

    def assign(self, variables: Sequence[Any], values: Iterable[Any]) -> None:
        """Let variables on the device have these values, which may be variables on other ones."""
        given: Iterable[tuple[Any, Any]] = zip(variables, values, strict=True)
        if self._is_remote:
            pairs = list(zip(variables, _here(values), strict=True))
            differ = self._differ(variables, [value for _, value in pairs])
            given = self._sent_together([pair for pair, differs in zip(pairs, differ, strict=True) if differs])
        for variable, value in given:
            variable.assign(tf.convert_to_tensor(value))

    def _sent_together(self, pairs: Sequence[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        """Assign those values that this process has, where they are many, and give the other pairs."""
        mine = [n for n, (_, value) in enumerate(pairs) if not is_remote(_held(value).device)]
        if len(mine) <= FEW:
            return list(pairs)
        variables = [_held(pairs[n][0]) for n in mine]
        specs = [tf.TensorSpec(*_spec(pairs[n][1])) for n in mine]
        packs = packs_of(specs)

        def assign(flats: Sequence[tf.Tensor]) -> None:
            for pack, whole in zip(packs, flats, strict=True):
                for n, value in zip(pack, parted(whole, [specs[n] for n in pack]), strict=True):
                    variables[n].assign(value, read_value=False)

        with tf.device(LOCAL_HOST):
            values = [tf.convert_to_tensor(pairs[n][1]) for n in mine]
        flats = [flat_here([values[n] for n in pack]) for pack in packs]
        if (known := (*map(id, variables), *specs)) not in self._functions:
            like = [tf.TensorSpec(each.shape, each.dtype) for each in flats]
            with tf.device(self._device):
                self._functions[known] = Kernels().op(packing_captures(assign), like)
        with tf.device(self._device):
            self._functions[known](flats)
        return [pair for n, pair in enumerate(pairs) if n not in set(mine)]

    def tensors(self, before: Sequence[Any], values: Iterable[Any]) -> list[tf.Tensor]:
        """The values on the device, for which those tensors on it serve that have been there ``before``."""
        if not self._is_remote:
            return list(values)
        given = _here(values)
        before = before if len(before) == len(given) else given
        return [
            tf.identity(value) if differs else known
            for known, value, differs in zip(before, given, self._differ(before, given), strict=True)
        ]

    def _differ(self, copies: Sequence[Any], values: Sequence[Any]) -> list[bool]:
        """Which of the worker's copies may not have the values; all of them where it is not worth asking."""
        asked = [
            n
            for n, (copy, value) in enumerate(zip(copies, values, strict=True))
            if is_remote(_held(copy).device) and _is_like(copy, value)
        ]
        differ = [True] * len(values)
        if sum(_size_bytes(values[n]) for n in asked) >= WORTH_BYTES:
            there, elsewhere = ([each[n] for n in asked] for each in (copies, values))
            different = self._of(there) != self._of(elsewhere)
            for n, is_other in zip(asked, different.any(1), strict=True):
                differ[n] = bool(is_other)
        return differ

    def _of(self, values: Sequence[Any]) -> np.ndarray:
        """The fingerprints of values on any devices, made where they are."""
        found = np.zeros([len(values), 8], np.uint8)
        processors = [processor_of(_held(each).device) for each in values]
        for processor in dict.fromkeys(processors):
            mine = [n for n, each in enumerate(processors) if each == processor]
            with tf.device(processor):
                found[mine] = self._made_by(processor, [_held(values[n]) for n in mine])
        return found

    def _made_by(self, processor: str, values: Sequence[Any]) -> Any:
        if not is_remote(processor):  # in one operation TensorFlow would make a function of it, and tell all workers
            return np.concatenate([_fingerprints([each]).numpy() for each in values])
        if isinstance(values[0], tf.Variable):
            if (known := (processor, *map(id, values))) not in self._functions:
                self._functions[known] = Kernels().op(packing_captures(lambda: _fingerprints(values)))
            return self._functions[known]().numpy()
        specs = [tf.TensorSpec(each.shape, each.dtype) for each in values]
        if (like := (processor, *specs)) not in self._functions:
            self._functions[like] = Kernels().op(_fingerprints, specs)
        return self._functions[like](values).numpy()


def _here(values: Iterable[Any]) -> list[Any]:
    with tf.device(LOCAL_HOST):
        return list(values)


def _held(value: Any) -> Any:
    """TensorFlow's own variable of Keras'."""
    return value.value if isinstance(value, keras.Variable) else value


def _spec(value: Any) -> tuple[tuple[int, ...], tf.DType]:
    return tuple(value.shape), tf.as_dtype(value.dtype)


def _is_like(copy: Any, value: Any) -> bool:
    """Whether a copy may have the value; of one that takes any shape, it is the bytes that tell."""
    shape, dtype = _spec(value)
    return tf.as_dtype(copy.dtype) == dtype and tf.TensorShape(copy.shape).is_compatible_with(shape) and 0 not in shape


def _size_bytes(value: Any) -> int:
    shape, dtype = _spec(value)
    return int(np.prod(shape)) * int(dtype.size)


def _fingerprints(values: Sequence[Any]) -> tf.Tensor:
    """Eight bytes of each."""
    flat = [tf.reshape(tf.convert_to_tensor(each), [1, -1]) for each in values]
    return tf.concat([tf.raw_ops.Fingerprint(data=each, method="farmhash64") for each in flat], 0)
