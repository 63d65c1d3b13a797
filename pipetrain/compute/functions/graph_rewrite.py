"""Copies of a traced function's operations in the graph being traced, and nested values as flat lists for them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import tensorflow as tf

from pipetrain.compute.tensorflow_private import number_of, run_after, waiting_for


def unpacker(structure: Any) -> Callable[[Any, list[Any]], None]:
    """Make a function that appends the tensors of values with these specs to a list, as ``tf.nest`` orders them."""
    if isinstance(structure, tf.TensorSpec):
        return lambda value, flat: flat.append(value)
    if isinstance(structure, dict):
        return _all_of({key: structure[key] for key in sorted(structure)})
    if isinstance(structure, (list, tuple)):
        if all(isinstance(each, tf.TensorSpec) for each in structure):
            return lambda value, flat: flat.extend(value)
        return _all_of(dict(enumerate(structure)))

    def unpack_composite(value: Any, flat: list[Any]) -> None:
        if isinstance(value, tf.Tensor):  # what stands for it, as a call gave it
            flat.append(value)
        else:
            flat.extend(tf.nest.flatten(value, expand_composites=True))

    return unpack_composite


def _all_of(structures: dict[Any, Any]) -> Callable[[Any, list[Any]], None]:
    """The values of these keys in this order, without those that are None."""
    parts = [(key, unpacker(each)) for key, each in structures.items() if each is not None]

    def unpack_all(value: Any, flat: list[Any]) -> None:
        for key, unpack in parts:
            unpack(value[key], flat)

    return unpack_all


def packer(structure: Any) -> Callable[[Iterator[tf.Tensor]], Any]:
    """Make a function that puts flat tensors back into the structure that they were flattened from."""
    if structure is None:
        return lambda flat: None
    if isinstance(structure, dict):
        packers = {key: packer(structure[key]) for key in sorted(structure)}  # flattening goes by sorted keys
        return lambda flat: {key: pack(flat) for key, pack in packers.items()}
    if isinstance(structure, (list, tuple)):
        parts, make = [packer(each) for each in structure], getattr(structure, "_make", type(structure))
        if all(part is next for part in parts):
            return lambda flat: make(islice(flat, len(parts)))
        return lambda flat: make([pack(flat) for pack in parts])
    if isinstance(structure, tf.IndexedSlices):
        shaped = structure.dense_shape is not None
        return lambda flat: tf.IndexedSlices(next(flat), next(flat), next(flat) if shaped else None)
    return next


SOURCES = ("ReadVariableOp", "Placeholder", "Const")  # which take no time
COPIED = "pipetrain/copied"  # the collection of graphs whose operations a graph has
SAME_BUFFER = ("Identity", "Reshape", "ExpandDims", "Squeeze", "StopGradient")


def inlined(concrete: Any, *arguments: Any) -> Any:
    """The outputs of the concrete function, whose operations are copied into this graph.

    TensorFlow would inline a call too, but only later, when nothing can be ordered among its operations.
    """
    return operations(concrete, inputs_of(concrete, arguments))


def showing(concrete: Any, inner: Sequence[tf.Tensor], *arguments: Any) -> tuple[Any, list[tf.Tensor]]:
    """``inlined``, and the values of tensors within the function's graph."""
    made = _imported(concrete, inputs_of(concrete, arguments), {}, (), inner)
    return _results(concrete, made), [made[tensor.name] for tensor in inner]


def without(concrete: Any, gone: Collection[tf.Operation], instead: Mapping[str, tf.Tensor], *arguments: Any) -> Any:
    """``inlined`` without the operations ``gone``; the tensors ``instead`` replace their outputs, by name."""
    names = [operation.name for operation in gone]
    return _results(concrete, _imported(concrete, inputs_of(concrete, arguments), instead, names))


def some_of(
    concrete: Any,
    outputs: Sequence[tf.Tensor],
    without: Collection[str],
    inputs: Sequence[tf.Tensor | None],
    instead: Mapping[str, tf.Tensor],
) -> list[tf.Tensor]:
    """``operations`` whose names are not in ``without``: the values of these tensors within the function's graph."""
    made = _imported(concrete, inputs, instead, without, outputs=outputs)
    return [made[tensor.name] for tensor in outputs]


def operations(
    concrete: Any, inputs: Sequence[tf.Tensor | None], instead: Mapping[str, tf.Tensor] | None = None
) -> Any:
    """The function's operations for these arguments and captures; tensors in ``instead`` replace those of their names.

    None for an input that nothing else reads.
    """
    return _results(concrete, _imported(concrete, inputs, instead or {}))


def sharing_constants(concrete: Any, inputs: Sequence[tf.Tensor | None]) -> Any:
    """``operations``, in which equal constants are one; for copies among which nothing is ordered later.

    What orders operations takes those that read one tensor for neighbours. A quarter of a traced function's operations
    may be constants, each of which takes time when it is copied and when the function is compiled.
    """
    return _results(concrete, _imported(concrete, inputs, {}, shares_constants=True))


def inputs_of(concrete: Any, arguments: Any) -> list[tf.Tensor]:
    """The values of a function's graph's inputs for these arguments, captures included."""
    flat: list[tf.Tensor] = []
    unpacker(concrete.structured_input_signature[0])(arguments, flat)
    graph = tf.compat.v1.get_default_graph()
    return [*flat, *(graph.capture(each) for each in concrete.captured_inputs)]


def _results(concrete: Any, values: Mapping[str, tf.Tensor]) -> Any:
    return packer(concrete.structured_outputs)(iter([values[tensor.name] for tensor in concrete.graph.outputs]))


def _imported(
    concrete: Any,
    inputs: Sequence[tf.Tensor | None],
    instead: Mapping[str, tf.Tensor],
    without: Collection[str] = (),
    inner: Sequence[tf.Tensor] = (),
    outputs: Sequence[tf.Tensor] | None = None,
    shares_constants: bool = False,
) -> dict[str, tf.Tensor]:
    """Copies of the function's outputs, its ``inner`` tensors and replacements, by names in its graph.

    Of the ``outputs`` alone, if these are given.

    Operations in ``without``, those that make the tensors replaced by ``instead``, and those that nothing needs are
    left out: what orders operations among the copies would wait for them.
    """
    graph = concrete.graph
    # TensorFlow forgets the bodies of a graph's loops and branches with it, and the copies call them.
    tf.compat.v1.get_default_graph().add_to_collection(COPIED, graph)
    given = {inner.name: value for inner, value in zip(graph.inputs, inputs, strict=True) if value is not None}
    given.update(instead)
    gone = {inner.op.name for inner in graph.inputs} | {name.partition(":")[0] for name in instead} | {*without}
    sought = [*(graph.outputs if outputs is None else outputs), *inner]
    needed = _needed([*(each.op for each in sought), *graph.control_outputs], gone)
    whole = graph.as_graph_def()
    part = tf.compat.v1.GraphDef(versions=whole.versions, library=whole.library)
    nodes = [node for node in whole.node if node.name in needed]
    part.node.extend(_with_shared_constants(nodes, {each.op.name for each in sought}) if shares_constants else nodes)
    for node in part.node:
        node.input[:] = [name for name in node.input if name.removeprefix("^") not in gone or not name.startswith("^")]
        node.attr.pop("_class", None)  # wishes to be where another node is, which may be gone
    used = {name if ":" in name else f"{name}:0" for node in part.node for name in node.input}
    wanted = [tensor.name for tensor in sought if tensor.name not in given]
    feeds = {name: value for name, value in given.items() if name in used}
    made = dict(zip(wanted, tf.graph_util.import_graph_def(part, feeds, return_elements=wanted), strict=True))
    return {**given, **made}


def _with_shared_constants(nodes: Sequence[Any], sought: Collection[str]) -> list[Any]:
    """The nodes without constants that equal an earlier one on their device, which others read instead.

    Those that are ``sought`` by their names remain.
    """
    first: dict[tuple[str, bytes], str] = {}
    instead: dict[str, str] = {}
    for node in nodes:
        if node.op == "Const" and not node.input and node.name not in sought:
            value = node.attr["value"].SerializeToString(deterministic=True)
            same = first.setdefault((node.device, value), node.name)
            if same != node.name:
                instead |= {node.name: same, f"^{node.name}": f"^{same}"}
    left = [node for node in nodes if node.name not in instead]
    for node in left:
        node.input[:] = [instead.get(name, name) for name in node.input]
    return left


def _needed(operations: Sequence[tf.Operation], gone: Collection[str]) -> set[str]:
    """The names of these operations and of all that they need, none of which is in ``gone``."""
    ends = [each for each in operations if each.name not in gone]
    found = {*gone, *(each.name for each in ends)}
    _add_earlier(ends, found, _inputs)
    return found - {*gone}


def _add_earlier(
    operations: Sequence[tf.Operation], names: set[str], before: Callable[[tf.Operation], list[tf.Operation]]
) -> None:
    """Add the names of all operations that come before these, as ``before`` says of each; not beyond names there."""
    waiting = list(operations)
    while waiting:
        for each in before(waiting.pop()):
            if each.name not in names:
                names.add(each.name)
                waiting.append(each)


def _inputs(operation: tf.Operation) -> list[tf.Operation]:
    return [*(tensor.op for tensor in operation.inputs), *operation.control_inputs]


def made_when_needed(tensors: Sequence[tf.Tensor]) -> None:
    """Delay making each tensor until all other inputs of the first operation that reads it are there.

    TensorFlow would make all of them first: they would all be in memory at once, and no longer in the processor's
    caches when they are read.
    """
    known = {tensor.ref() for tensor in tensors}
    for tensor in tensors:
        readers = tensor.consumers()
        if not readers:
            continue
        # Made first, it comes after nothing that needs the tensor: no circles.
        first = min(readers, key=number_of)
        awaited = [each.op for each in first.inputs if each.ref() not in known and each.op.type not in SOURCES]
        for operation in only_for(tensor):
            run_after(operation, awaited)


def updated_when_read(weights: Sequence[tf.Tensor], handles: Sequence[tf.Tensor]) -> None:
    """Update each variable after all operations that read its value; otherwise the update would write a copy."""
    for weight, writing in zip(weights, _writing(handles), strict=True):
        readers = _readers(weight)
        for operation in writing:
            run_after(operation, readers)


def updated_one_by_one(gradients: Sequence[Any], handles: Sequence[tf.Tensor]) -> None:
    """Update the variable of each handle as soon as its gradient is there, and go on only after that.

    A gradient is then read while it is in the processor's caches, and neither the weights' gradients nor the outputs'
    gradients from which they are made are all in memory at once. If an operation fails in between, some layers are
    updated and others are not.
    """
    made = zip(gradients, _writing(handles), strict=True)
    _one_by_one([(each, writing) for each, writing in made if each is not None and writing])


def made_one_by_one(gradients: Sequence[Any]) -> None:
    """Make each gradient as soon as that is possible, the last layer's first, and go on only after that.

    TensorFlow would put off some until the layers below have run backward, and they would be sent late.
    """
    _one_by_one([(each, [_dense(each).op]) for each in gradients if each is not None])


def _one_by_one(made: Sequence[tuple[Any, Sequence[tf.Operation]]]) -> None:
    """Let each gradient be made and these operations run before what reads the same tensors."""
    needed: set[str] = set()  # for the operations so far
    before: Sequence[tf.Operation] = []
    parts = [(_dense(gradient), operations) for gradient, operations in made]
    for gradient, last in sorted(parts, key=lambda each: number_of(origin(each[0]))):  # the last layer's first
        own = only_for(gradient)
        if not any(operation.name in needed for operation in own):  # else nothing of it can come before them
            for operation in own:
                run_after(operation, before)
        _add_earlier(last, needed, _inputs_and_values)
        for operation in _others_that_read(own):
            if operation.name not in needed:
                run_after(operation, last)
        before = last


def _dense(gradient: Any) -> tf.Tensor:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def _writing(handles: Sequence[tf.Tensor]) -> list[list[tf.Operation]]:
    """The operations in this graph that write the variable of each handle."""
    graph = tf.compat.v1.get_default_graph()
    return [[each for each in graph.capture(handle).consumers() if each.type != "ReadVariableOp"] for handle in handles]


def _inputs_and_values(operation: tf.Operation) -> list[tf.Operation]:
    """What must run before an operation, for its inputs or for the values of variables."""
    earlier = _inputs(operation)
    for tensor in operation.inputs:
        if tensor.dtype == tf.resource:  # whose order TensorFlow sees to when all is traced
            earlier += [each for each in tensor.consumers() if number_of(each) < number_of(operation)]
    return earlier


def _readers(tensor: tf.Tensor) -> list[tf.Operation]:
    """Operations that read a tensor's buffer."""
    readers: list[tf.Operation] = []
    for operation in tensor.consumers():
        readers.append(operation)
        if operation.type in SAME_BUFFER:
            readers += _readers(operation.outputs[0])
    return readers


def _others_that_read(operations: Sequence[tf.Operation]) -> list[tf.Operation]:
    """Other operations with an input of one of these, in the order in which they were made."""
    own = {each.name for each in operations}
    given = {tensor.ref(): tensor for each in operations for tensor in each.inputs if tensor.dtype != tf.resource}
    readers = {each.name: each for tensor in given.values() for each in tensor.consumers() if each.name not in own}
    return sorted(readers.values(), key=number_of)


def only_for(tensor: tf.Tensor) -> list[tf.Operation]:
    """The operations that make the tensor, as far as nothing else waits for them and they may run later."""
    found: dict[str, tf.Operation] = {tensor.op.name: tensor.op}
    waiting = [tensor.op]
    while waiting:
        for operation in (given.op for given in waiting.pop().inputs):
            readers = [each for output in operation.outputs for each in output.consumers()]
            alone = all(each.name in found for each in (*readers, *waiting_for(operation)))
            if alone and operation.name not in found:
                found[operation.name] = operation
                waiting.append(operation)
    return [each for each in found.values() if each.type not in SOURCES and not each.op_def.is_stateful]


def origin(tensor: tf.Tensor) -> tf.Operation:
    """The operation that made the tensor, of which functions return a copy."""
    operation = tensor.op
    while operation.type == "Identity":
        operation = operation.inputs[0].op
    return operation
