"""Every private name of TensorFlow that the package uses, each behind a name of its own, and why no public one serves.

Nobody else touches them, so that a new version of TensorFlow is met here. ``pyproject.toml`` bounds the versions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf


def number_of(operation: tf.Operation) -> int:
    """Operations are numbered as they are made; a graph's list of them gives it only by counting."""
    number: int = operation._id
    return number


def run_after(operation: tf.Operation, others: Sequence[tf.Operation]) -> None:
    """Let an operation that is made already wait for others; ``tf.control_dependencies`` is for those to be made."""
    operation._add_control_inputs(list(others))


def waiting_for(operation: tf.Operation) -> list[tf.Operation]:
    """Operations that wait for this one without reading what it makes."""
    return list(operation._control_outputs)


def body_of(graph: Any, name: str) -> Any:
    """The graph of a function that a graph calls, by its name."""
    return graph._get_function(name).graph


def elements_of(tensor: tf.Tensor) -> int:
    """How many elements an eager tensor has: asking for its shape gives up Python's lock for every dimension."""
    return int(tensor._num_elements())


def type_spec_of(iterator: Any) -> Any:
    """What a function takes an iterator of a data set as; ``tf.type_spec_from_value`` refuses some."""
    return iterator._type_spec


def one_replica(spec: Any) -> Any:
    """Of the spec of what a distributed data set gives, that of one replica's part."""
    return getattr(spec, "_value_specs", (spec,))[0]
