"""Functions of tensors as single ops, run by TensorFlow's kernels or compiled by XLA."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import tensorflow as tf

from pipetrain.compute.functions.flattening import packer, unpacker
from pipetrain.compute.functions.packed import PACKED, SEPARATE, Packing
from pipetrain.compute.gc_pause import gc_paused

PATIENCE_S = 2.0  # of compiling, before a line says so
UNCOMPILABLE = (
    tf.errors.InvalidArgumentError,
    tf.errors.UnimplementedError,
    tf.errors.NotFoundError,
)
COMPILING = (*UNCOMPILABLE, tf.errors.InternalError)  # in a first call; later one may have other reasons


class Kernels:
    """Makes single ops of functions, each compiled by XLA or none.

    XLA compiles a function for the processor at hand when it is first called with tensors of these shapes. A function
    that it cannot compile runs on TensorFlow's kernels, as a warning says once.

    Args:
        compiled: whether XLA compiles.
        about: what the functions belong to, for the warning.

    ``is_quiet``: no line says that they are compiled.
    """

    is_quiet = False

    def __init__(self, compiled: bool = False, about: str = "") -> None:
        self.compiled, self.about = compiled, about
        self._has_warned = self._has_said = False

    @property
    def packing(self) -> Packing:
        """How residuals leave a function: XLA knows no packs."""
        return SEPARATE if self.compiled else PACKED

    def op(self, function: Callable[..., Any], *specs: Any) -> Callable[..., Any]:
        """The function, traced for arguments of these specs, as an op that runs on the caller's thread."""
        with gc_paused():
            if not self.compiled:
                return direct(_traced(function, *specs))
            compiled = by_xla(function, *specs).call
        plain: list[Callable[..., Any]] = []
        first = iter([(self._said_if_slow, COMPILING)])

        def call(*arguments: Any) -> Any:
            if plain:
                return plain[0](*arguments)
            context, failures = next(first, (nullcontext, UNCOMPILABLE))
            try:
                with context():
                    return compiled(*arguments)
            except failures as error:  # while compiling: nothing has been changed yet
                with gc_paused():
                    made = direct(_traced(function, *specs))
                results = made(*arguments)  # which raises again where it was no fault of XLA's
                plain.append(made)
                self._warn(error)
                return results

        return call

    @contextmanager
    def _said_if_slow(self) -> Iterator[None]:
        """Meanwhile something is compiled, as one line says if that takes long."""
        timer = threading.Timer(PATIENCE_S, self._say)
        timer.daemon = True  # should an interrupt come here
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()

    def _say(self) -> None:
        if not (self._has_said or self.is_quiet):
            self._has_said = True
            print(f"XLA compiles {self.about}.", flush=True)

    def of(self, concrete: Any) -> Callable[..., Any]:
        """A function that has been traced, as such an op."""
        return self.op(concrete, *concrete.structured_input_signature[0]) if self.compiled else direct(concrete)

    def _warn(self, error: Exception) -> None:
        if not self._has_warned:
            self._has_warned = True
            reason = str(error).strip().split("\n")[0]
            warnings.warn(f"XLA cannot compile {self.about}, which runs without it: {reason}", stacklevel=2)


class Compiled(NamedTuple):
    """A function that XLA compiles: to be called inside other functions, and as a single op."""

    inside: Callable[..., Any]
    call: Callable[..., Any]


def by_xla(function: Callable[..., Any], *specs: Any) -> Compiled:
    """The function, traced for arguments of these specs; XLA compiles it in its first call, which may fail."""
    inner = _traced(function, *specs, jit_compile=True)
    # XLA compiles what another function calls, not what is called by itself.
    return Compiled(inner, direct(_traced(lambda *arguments: inner(*arguments), *specs)))


def _traced(function: Callable[..., Any], *specs: Any, **settings: Any) -> Any:
    return tf.function(function, autograph=False, **settings).get_concrete_function(*specs)


def direct(concrete: Any) -> Callable[..., Any]:
    """The same function as a single op, run on the caller's thread.

    A concrete function's own call checks every argument against its spec and hands the work to another thread, which
    costs as much as a small stage. The functions called here have been traced for exactly these arguments.
    """
    captured = concrete.captured_inputs
    types = [tensor.dtype.as_datatype_enum for tensor in concrete.outputs]  # what TensorFlow would look up in each call
    unpack, pack = unpacker(concrete.structured_input_signature[0]), packer(concrete.structured_outputs)

    def call(*arguments: Any) -> Any:
        tensors: list[Any] = []
        unpack(arguments, tensors)
        tensors += captured
        return pack(iter(tf.raw_ops.StatefulPartitionedCall(args=tensors, Tout=types, f=concrete)))

    return call
