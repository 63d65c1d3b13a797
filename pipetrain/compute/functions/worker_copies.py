"""Copies that a worker in another process has of values: only those that differ are sent to it again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from pipetrain.compute.cores import LOCAL_HOST, is_remote, processor_of
from pipetrain.compute.functions.flat_values import flat_here, packing_captures, packs_of, parted
from pipetrain.compute.functions.kernels import Kernels

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
