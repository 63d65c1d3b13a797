"""Minibatches of which each worker reads its part, from a dataset of its own and on its own host."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import tensorflow as tf

from pipetrain.compute.cores import HOST, LOCAL_HOST, finish, is_remote
from pipetrain.compute.tensorflow_private import UNORDERED
from pipetrain.run.control import LostWorker, add_note
from pipetrain.run.worker_rows import RowsOnWorkers

READER = re.compile(r"reader_(\d+)")  # as TensorFlow names in its errors what has failed

Parts = list[Any]  # of a minibatch: every worker's nested tensors, on its host


def read_function(
    devices: Sequence[str], element_spec: Any, prepared: Callable[[Any], Any], together: Callable[..., Parts]
) -> Any:
    """A function of the workers' iterators: the parts of the next minibatch, and which workers have one.

    It is one function over all hosts, so that they read at the same time, and this process makes one call.

    Args:
        devices: the processors of the hosts.
        element_spec: of every dataset.
        prepared: makes nested tensors of an element, on the host that has read it.
        together: given all parts and the devices, makes of each what depends on the others.
    """
    host = LOCAL_HOST if any(map(is_remote, devices)) else HOST
    like = tf.function(prepared, autograph=False).get_concrete_function(element_spec).structured_outputs
    leaves = [each for each in tf.nest.flatten(like) if each is not None]

    def whole(optional: Any) -> list[tf.Tensor]:
        return [each for each in tf.nest.flatten(prepared(optional.get_value())) if each is not None]

    def empty() -> list[tf.Tensor]:
        return [tf.zeros([size or 0 for size in each.shape], each.dtype) for each in leaves]

    def packed(tensors: Sequence[tf.Tensor]) -> Any:
        given = iter(tensors)
        return tf.nest.pack_sequence_as(like, [None if each is None else next(given) for each in tf.nest.flatten(like)])

    def read(iterators: Sequence[Any]) -> tuple[Parts, tf.Tensor]:
        parts, there = [], []
        for n, (device, iterator) in enumerate(zip(devices, iterators, strict=True)):
            with tf.device(device), tf.name_scope(f"reader_{n}"):
                optional = iterator.get_next_as_optional()
                there.append(optional.has_value())
                parts.append(packed(tf.cond(there[n], partial(whole, optional), empty)))
        parts = together(parts, devices)
        with tf.device(host):
            return parts, tf.stack([tf.identity(each) for each in there])

    # TensorFlow's own order of a function's operations would let all results go by way of this process.
    function = tf.function(read, autograph=False, experimental_attributes=UNORDERED)
    return function.get_concrete_function([tf.data.IteratorSpec(element_spec)] * len(devices))


def named(devices: Sequence[str], worker: int) -> str:
    """A worker, for a message."""
    return f"worker {worker} ({devices[worker]})"


class WorkersIterator:
    """One pass over the workers' datasets; ``next`` passes over a minibatch, whose rows stay where they are.

    Args:
        devices: the processors of the workers' hosts.
        datasets: every worker's, on its host.
        element_spec: of each.
        lost: what is known of a lost worker.
    """

    def __init__(self, devices: Sequence[str], datasets: Sequence[Any], element_spec: Any, lost: LostWorker) -> None:
        self.devices, self.element_spec, self._lost = tuple(devices), element_spec, lost
        self._iterators = lost.unless_lost(lambda: _iterators(devices, datasets))
        self._passed: Any = None  # the function that passes over a minibatch
        self._minibatches = 0  # that have been read

    def __iter__(self) -> WorkersIterator:
        return self

    def __next__(self) -> None:
        self._passed = self._passed or read_function(self.devices, self.element_spec, lambda _: (), _apart)
        if self.read(self._passed) is None:
            raise StopIteration

    def read(self, function: Any) -> Any:
        """The next minibatch, as ``read_function`` makes it for one such iterator of each worker; None at the end.

        With several workers, of nested ``RowsOnWorkers``. Raises ValueError if only some of the workers have a part,
        and what reading raises, with a note on the worker.
        """
        try:
            parts, there = self._lost.unless_lost(lambda: _called(function, self._iterators))
        except tf.errors.OpError as error:
            if found := READER.findall(error.message or ""):
                add_note(error, f"Raised in reading the data of {named(self.devices, int(found[-1]))}.")
            raise
        if not any(there):
            return None
        if not all(there):
            first, other = there.index(False), there.index(True)
            raise ValueError(
                f"The data of a worker end before those of others. Received: pipetrain.data with {self._minibatches} "
                f"elements of {named(self.devices, first)}, and more of {named(self.devices, other)}. "
                "Try as many minibatches of every worker: take(n) with the smallest number, or repeat() and "
                "steps_per_epoch."
            )
        self._minibatches += 1
        return parts[0] if len(parts) == 1 else tf.nest.map_structure(_rows, *parts)


def _iterators(devices: Sequence[str], datasets: Sequence[Any]) -> list[Any]:
    found = []
    for device, dataset in zip(devices, datasets, strict=True):
        with tf.device(device):
            found.append(iter(dataset))
    for device in devices:
        finish(device)  # a function over several hosts would not wait until they are there
    return found


def _called(function: Any, iterators: Sequence[Any]) -> tuple[Parts, list[bool]]:
    parts, there = function(iterators)
    return parts, there.numpy().tolist()


def _apart(parts: Parts, devices: Sequence[str]) -> Parts:
    """Parts that do not depend on others."""
    return parts


def _rows(*parts: Any) -> Any:
    return None if parts[0] is None else RowsOnWorkers(parts)
