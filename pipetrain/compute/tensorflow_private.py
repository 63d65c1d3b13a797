"""Every private name of TensorFlow that the package uses, each behind a name of its own, and why no public one serves.

No other module uses them, so a new version of TensorFlow requires changes only here. ``pyproject.toml`` bounds the
versions.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf
from tensorflow.core.framework.attr_value_pb2 import AttrValue
from tensorflow.python import pywrap_tfe
from tensorflow.python.client import pywrap_tf_session
from tensorflow.python.distribute.values import DistributedVariable
from tensorflow.python.eager import context
from tensorflow.python.framework import ops
from tensorflow.python.framework.config import is_op_determinism_enabled
from tensorflow.python.ops.control_flow_ops import XLAControlFlowContext
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

# What ``tf.function(experimental_attributes=...)`` takes, which is public; the names in it are not. A function that is
# called stays a call, and one that is traced orders no operations by itself, but as its control dependencies say.
NOT_INLINED = {"_noinline": True}
UNORDERED = {"_disable_acd": True}


def note_captured_shapes(graph: Any) -> None:
    """Let a function that is being traced say which shapes the variables have that it captures.

    TensorFlow knows them only where a function is called from Python. Called within another one, it would be optimized
    as if weights could have any shape.
    """
    for outer, inner in graph.captures:
        data = getattr(outer, "_handle_data", None)
        if inner.dtype == tf.resource and data is not None and data.is_set:
            (known,) = data.shape_and_type
            types = AttrValue.ListValue(type=[known.dtype])
            inner.op._set_attr("_handle_dtypes", AttrValue(list=types))
            inner.op._set_attr("_handle_shapes", AttrValue(list=AttrValue.ListValue(shape=[known.shape])))


@contextmanager
def without_gradients() -> Iterator[None]:
    """No operation that is traced within is differentiated.

    Else TensorFlow keeps what it has noted for a custom gradient as long as the process lives, and with it the graph
    and all variables that the graph captures. Keras' optimizers trace such an operation.
    """
    graph = tf.compat.v1.get_default_graph()
    before = len(graph.get_operations())
    yield
    for operation in graph.get_operations()[before:]:
        if operation.type == "IdentityN" and "_gradient_op_type" in operation.node_def.attr:
            name = operation.get_attr("_gradient_op_type").decode()
            ops.gradient_registry._registry.pop(name, None)


def call_of(concrete: Any, is_optimized: bool = True) -> Callable[[Sequence[tf.Tensor]], Sequence[tf.Tensor]]:
    """A concrete function's call, from flat arguments to flat results.

    The public call checks every argument and its structure, which takes as long as tens of small operations, and its
    errors do not tell the names of operations that are called. Without ``is_optimized`` TensorFlow optimizes only the
    functions that stay calls in it, each by itself.
    """
    name, captured, count = concrete.inference_fn.name, list(concrete.captured_inputs), len(concrete.outputs)
    here = context.context()

    def call(tensors: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
        made: Sequence[tf.Tensor] = here.call_function(name, [*tensors, *captured], count)
        return made

    if is_optimized:
        return call
    options = _not_optimized()

    def call_as_it_is(tensors: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
        own = here.function_call_options
        here.function_call_options = options  # of this thread alone
        try:
            return call(tensors)
        finally:
            here.function_call_options = own

    return call_as_it_is


def _not_optimized() -> Any:
    """How a function is called that TensorFlow is not to optimize; publicly that is one setting for all functions."""
    config = context.context().config
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    return context.FunctionCallOptions(config_proto=config)


def number_of(operation: tf.Operation) -> int:
    """An operation's number in order of creation; publicly it is found only by searching the graph's list."""
    number: int = operation._id
    return number


def run_after(operation: tf.Operation, others: Sequence[tf.Operation]) -> None:
    """Let an existing operation wait for others; ``tf.control_dependencies`` applies only to new ones."""
    operation._add_control_inputs(list(others))


def waiting_for(operation: tf.Operation) -> list[tf.Operation]:
    """Operations that wait for this one without reading its outputs."""
    return list(operation._control_outputs)


def read_instead(tensor: tf.Tensor, other: tf.Tensor, readers: Sequence[tf.Operation] | None = None) -> None:
    """Let these operations, by default all that read a tensor, read another one; publicly a graph only grows."""
    for operation in tensor.consumers() if readers is None else readers:
        for place, given in enumerate(operation.inputs):
            if given is tensor:
                operation._update_input(place, other)


def captured_variables(graph: Any) -> list[tuple[Any, tf.Tensor, tf.TensorShape]]:
    """The handles of the variables that a function captures which is being traced, what stands for them, their shapes.

    Publicly only the handles are known, without what they are of.
    """
    found = []
    for outer, inner in graph.captures:
        data = getattr(outer, "_handle_data", None)
        if isinstance(outer, ops.EagerTensor) and outer.dtype == tf.resource and data is not None and data.is_set:
            (known,) = data.shape_and_type
            found.append((outer, inner, tf.TensorShape(known.shape)))
    return found


def uncapture(graph: Any, tensor: Any) -> None:
    """A function that is being traced does not take a tensor any more that it has captured; nothing must read it."""
    graph._function_captures.pop(id(tensor), False)


def body_of(graph: Any, name: str) -> Any:
    """The graph of a function that a graph calls, by its name."""
    return graph._get_function(name).graph


def current_device() -> str:
    """The device of the ``tf.device`` that this thread is in, by its full name; empty outside of any."""
    name: str = context.context().device_name
    return name


@contextmanager
def ending_name_scopes() -> Iterator[None]:
    """If an exception leaves it, the thread is in no name scope that has begun within it; publicly none can be left."""
    here = context.context()
    before = here.scope_name
    try:
        yield
    except BaseException:
        here.scope_name = before
        raise


def memory_of_devices() -> dict[str, int]:
    """Bytes that TensorFlow may take of the memory of every device, those of joined workers too, by its full name.

    Publicly a memory limit can be set, and not read. That of a CPU is a number which means nothing.
    """
    here = context.context()
    here.ensure_initialized()
    devices = pywrap_tfe.TFE_ContextListDevices(here._context_handle)
    try:
        return {
            pywrap_tfe.TF_DeviceListName(devices, n): pywrap_tf_session.TF_DeviceListMemoryBytes(devices, n)
            for n in range(pywrap_tfe.TF_DeviceListCount(devices))
        }
    finally:
        pywrap_tfe.TF_DeleteDeviceList(devices)


def elements_of(tensor: tf.Tensor) -> int:
    """How many elements an eager tensor has: reading its shape gives up Python's global lock for every dimension."""
    return int(tensor._num_elements())


def type_spec_of(iterator: Any) -> Any:
    """The type spec of a data set's iterator as an argument of a function; ``tf.type_spec_from_value`` refuses some."""
    return iterator._type_spec


@contextmanager
def traced_for_xla() -> Iterator[None]:
    """What is traced meanwhile suits XLA; publicly that comes only with a function that XLA must compile.

    Loops then give what XLA has to know, such as sizes, to their gradients as constants, not as lists of numbers.
    """
    scope = XLAControlFlowContext()
    scope.Enter()
    try:
        yield
    finally:
        scope.Exit()


def one_replica(spec: Any) -> Any:
    """The spec of one replica's part, from the spec of a distributed data set's element."""
    return getattr(spec, "_value_specs", (spec,))[0]


def is_deterministic() -> bool:
    """Whether the program has enabled deterministic operations; there is a public name to do so, none to ask."""
    return bool(is_op_determinism_enabled())


def gpu_options() -> Any:
    """How this process uses its GPUs: which are visible, their logical devices and limits, whether memory grows.

    Public names tell the parts for each GPU, but only TensorFlow makes of them what a session takes.
    """
    return context.context().config.gpu_options


def is_distributed(variable: Any) -> bool:
    """Whether a distribution strategy has made a variable; the public type is only that of its parts."""
    return isinstance(variable, DistributedVariable)


def like(variable: tf.Variable) -> Any:
    """A new variable with the settings and the value of another one, and its identity: Keras' optimizers know by that
    which slots belong to a variable.
    """
    made = tf.Variable(
        variable.read_value(),
        trainable=variable.trainable,
        name=variable.name.split(":")[0],
        dtype=variable.dtype,
        synchronization=variable.synchronization,
        aggregation=variable.aggregation,
        shape=variable.shape,
    )
    for part in getattr(made, "values", (made,)):
        part._unique_id = variable._unique_id
    return made


class WatchedVariable(ResourceVariable):
    """A variable that tells of every use from Python, before it; TensorFlow has no public hook for that.

    Whatever reads it, assigns to it or captures it asks for its handle first.
    """

    @property
    def _handle(self) -> Any:
        if told := vars(self).get("told_of_use"):  # none if another thread has just ended the watch
            told(self)
        return vars(self)["_handle"]


class WatchedCount(ResourceVariable):
    """A variable that tells of every assignment from Python, before it, and of nothing else."""

    def assign(self, *args: Any, **settings: Any) -> Any:
        """TensorFlow's own."""
        return self._told().assign(*args, **settings)

    def assign_add(self, *args: Any, **settings: Any) -> Any:
        """TensorFlow's own."""
        return self._told().assign_add(*args, **settings)

    def assign_sub(self, *args: Any, **settings: Any) -> Any:
        """TensorFlow's own."""
        return self._told().assign_sub(*args, **settings)

    def _told(self) -> Any:
        vars(self)["told_of_use"](self)
        return super() if isinstance(self, WatchedCount) else self


def watch(variable: Any, told: Callable[[Any], None], reads: bool = True) -> None:
    """Let ``told(variable)`` be called before every use of a variable, or before assignments alone.

    One of a distribution strategy is left alone.
    """
    if type(variable) is ResourceVariable:
        vars(variable)["told_of_use"] = told
        variable.__class__ = WatchedVariable if reads else WatchedCount


def unwatch(variable: Any) -> None:
    """Nobody is told any more; for a variable that is not watched, too."""
    if type(variable) in (WatchedVariable, WatchedCount):
        variable.__class__ = ResourceVariable
        del variable.told_of_use


def handle_of(variable: Any) -> Any:
    """By which TensorFlow knows a variable, without its being a use of it; None for one of a distribution strategy."""
    return vars(variable).get("_handle")


class WatchedCalls:
    """In place of TensorFlow's call of an eager function: tells listeners of the inputs, what it captured among them.

    A function that has been traced uses variables without asking them for their handles, and no public hook is called
    before it runs.
    """

    _changing = threading.Lock()

    def __init__(self, own: Callable[..., Any]) -> None:
        self._own = own
        self.listeners: tuple[Callable[[Sequence[Any]], None], ...] = ()

    def __call__(self, name: Any, tensor_inputs: Sequence[Any], num_outputs: int) -> Any:
        """Call the function."""
        for listener in self.listeners:
            listener(tensor_inputs)
        return self._own(name, tensor_inputs, num_outputs)

    @classmethod
    def listen(cls, listener: Callable[[Sequence[Any]], None]) -> None:
        """Let ``listener(inputs)`` be called before every call of an eager function, in the caller's thread."""
        with cls._changing:
            here = context.context()
            if "call_function" not in vars(here):
                here.call_function = cls(here.call_function)
            here.call_function.listeners += (listener,)

    @classmethod
    def cease(cls, listener: Callable[[Sequence[Any]], None]) -> None:
        """The listener is not called any more; without listeners the call is TensorFlow's own again."""
        with cls._changing:
            here = context.context()
            calls = vars(here).get("call_function")
            if isinstance(calls, cls):
                calls.listeners = tuple(each for each in calls.listeners if each != listener)
                if not calls.listeners:
                    del here.call_function


def parts_of_slices_spec(spec: tf.IndexedSlicesSpec) -> tuple[Any, ...]:
    """The arguments of the spec's class, in their order: it has no public properties, and its dense shape is no part of
    the specs of its components.
    """
    parts: tuple[Any, ...] = spec._serialize()
    return parts
