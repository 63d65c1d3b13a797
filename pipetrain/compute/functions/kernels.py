"""Functions of tensors as single ops, run by TensorFlow's kernels or compiled by XLA."""

from __future__ import annotations

import gc
import logging
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import chain
from typing import Any, NamedTuple

import tensorflow as tf

from pipetrain.compute.functions.graph_rewrite import operations, packer, unpacker
from pipetrain.compute.functions.stage_values import PACKED, SEPARATE, Packing
from pipetrain.compute.tensorflow_private import NOT_INLINED, UNORDERED, note_captured_shapes

PYTHON = ("PyFunc", "PyFuncStateless", "EagerPyFunc")
PATIENCE_S = 2.0  # of compiling, before a line says so
UNCOMPILABLE = (
    tf.errors.InvalidArgumentError,
    tf.errors.UnimplementedError,
    tf.errors.NotFoundError,
)
COMPILING = (*UNCOMPILABLE, tf.errors.InternalError)  # in a first call; later one may have other reasons

_logger = logging.getLogger(__name__)


@contextmanager
def gc_paused() -> Iterator[None]:
    """Switch Python's garbage collector off, if it is on: it would visit a graph repeatedly while that is traced.

    Threads may pause it at once. One that finds it off leaves it as it is, so that whoever switched it off is the one
    who switches it on again; where two find it on, it is on when both have ended.
    """
    if not gc.isenabled():
        yield
        return
    try:
        gc.disable()
        yield
    finally:
        gc.enable()


class Kernels:
    """Makes single ops of functions, each compiled by XLA or none.

    XLA compiles a function for the processor at hand when it is first called with tensors of these shapes. A function
    that it cannot compile runs on TensorFlow's kernels, as a warning says once.

    Args:
        compiled: whether XLA compiles.
        about: what the functions belong to, for the warning.
        remote: whether they run in another process.

    ``is_shown``: asked when compiling takes long, whether a line says so.
    """

    def __init__(self, compiled: bool = False, about: str = "", remote: bool = False) -> None:
        self.compiled, self.about, self._remote = compiled, about, remote
        self._has_warned = self._has_said = False
        self.is_shown: Callable[[], bool] = lambda: True

    @property
    def returns_tensors(self) -> bool:
        """Whether residuals leave a function as plain tensors, and no pack or list of them.

        XLA knows no others. A pack or list that a worker's function returns has its handle in this process, from which
        the worker would have to fetch it for the next function; and it may not reach this process.
        """
        return self.compiled or self._remote

    @property
    def packing(self) -> Packing:
        """How residuals leave a function."""
        return SEPARATE if self.returns_tensors else PACKED

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
        if not self._has_said and self.is_shown():
            self._has_said = True
            _logger.info("XLA compiles %s.", self.about)

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
    """The same function as a single op, run on the caller's thread; in a function that is being traced, a call.

    A concrete function's own call checks every argument against its spec and hands the work to another thread, which
    costs as much as a small stage. The functions called here have been traced for exactly these arguments.
    """
    captured, within = concrete.captured_inputs, list[Any]()  # what is called within other functions
    types = [tensor.dtype.as_datatype_enum for tensor in concrete.outputs]  # what TensorFlow would look up in each call
    unpack, pack = unpacker(concrete.structured_input_signature[0]), packer(concrete.structured_outputs)

    def call(*arguments: Any) -> Any:
        tensors: list[Any] = []
        unpack(arguments, tensors)
        if tf.inside_function():
            within[:] = within or [_as_operation(_staying_call(concrete))]
            return pack(iter(within[0](tensors)))
        tensors += captured
        return pack(iter(tf.raw_ops.StatefulPartitionedCall(args=tensors, Tout=types, f=concrete)))

    return call


def calls_python(concrete: Any) -> bool:
    """Whether a function, or one that it calls, calls Python.

    An error in a function that stays a call TensorFlow may take for a consequence of another device's, which has
    stopped because of it; and one in Python need not come a second time.
    """
    graph = concrete.graph.as_graph_def()
    nodes = chain(graph.node, *(each.node_def for each in graph.library.function))
    return any(node.op in PYTHON for node in nodes)


def _staying_call(concrete: Any) -> Any:
    """The function, of flat arguments, as one that TensorFlow does not inline where it is called.

    What calls many functions is then small, and prepared in a fraction of the time. TensorFlow optimizes each of them
    by itself, and as much as it would if Python called it: it is to know the shapes of variables, but none of
    arguments, by which it would add in another order, and round otherwise.
    """
    inputs = concrete.inputs[: len(concrete.inputs) - len(concrete.captured_inputs)]

    def flat(*tensors: tf.Tensor) -> list[tf.Tensor]:
        for tensor, like in zip(tensors, inputs, strict=True):
            tensor.set_shape(like.shape)
        graph = tf.compat.v1.get_default_graph()
        captured = [graph.capture(each) for each in concrete.captured_inputs]
        made = tf.nest.flatten(operations(concrete, [*tensors, *captured]), expand_composites=True)
        note_captured_shapes(graph)
        return [each for each in made if each is not None]

    # The copied operations are ordered already; without outputs it is TensorFlow's order that keeps them.
    attributes = NOT_INLINED | (UNORDERED if concrete.outputs else {})
    open_specs = [tf.TensorSpec(None, each.dtype) for each in inputs]
    return _traced(flat, *open_specs, experimental_attributes=attributes)


def _as_operation(concrete: Any) -> Callable[[list[Any]], list[tf.Tensor]]:
    """Makes calls of the function, as operations of the graph that is being traced."""
    types, captured = [each.dtype for each in concrete.outputs], concrete.captured_inputs
    executor = "" if _has_functions(concrete) else "SINGLE_THREADED_EXECUTOR"  # which has no control flow

    def call(tensors: list[Any]) -> list[tf.Tensor]:
        arguments = [*tensors, *captured]
        made = tf.raw_ops.StatefulPartitionedCall(args=arguments, Tout=types, f=concrete, executor_type=executor)
        outputs = list(made) if types else []
        for tensor, like in zip(outputs, concrete.outputs, strict=True):
            tensor.set_shape(like.shape)
        return outputs

    return call


def _has_functions(concrete: Any) -> bool:
    """Whether operations of a function have functions, such as loops and branches."""
    return any(each.HasField("func") for node in concrete.graph.as_graph_def().node for each in node.attr.values())
