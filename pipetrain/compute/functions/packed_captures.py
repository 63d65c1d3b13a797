"""Functions over several processes that take the variables of each worker as one argument."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from pipetrain.compute.cores import finish, is_processor, is_remote
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
