"""The sum of the gradients of several devices, on each of them or on one, within one traced function.

Sums are added in the order of the devices, whatever arrives first and however it was packed: all orders of transfers
give bitwise equal sums.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from pipetrain.compute.functions.backward import added
from pipetrain.compute.transfers.message import MessageLayout, Order, Received, flat, shaped
from pipetrain.schemes.splitting import rows_of
from pipetrain.schemes.transfers.plan import Pack

Gradients = Mapping[int, Any]  # by the variables' numbers; rows of an embedding are IndexedSlices


def reduced(order: Order, made: Sequence[tuple[str, Gradients]], sinks: Sequence[str], like: Gradients) -> list[Any]:
    """The sums of a phase's gradients on each of the ``sinks``, by the variables' numbers, pack after pack.

    Args:
        order: in which the phase's packs are sent.
        made: of each device that has rows, its name and its gradients.
        sinks: the devices that need the sums.
        like: the specs of the gradients; those that are not there are not sent.
    """
    found = [Received(like) for _ in sinks]
    for pack in order.packs():
        present = [n for n in pack.variables if n in like]
        dense = [n for n in present if not isinstance(like[n], tf.IndexedSlices)]
        if dense:
            layout = MessageLayout(pack._replace(variables=tuple(dense)), like)
            messages = [_at(device, layout.messages, gradients) for device, gradients in made]
            for place, sums in enumerate(_summed(order, messages, [device for device, _ in made], sinks)):
                values = _at(sinks[place], layout.values, sums)
                _at(sinks[place], found[place].add, pack, values)  # chunks are put together there
        for n in (n for n in present if n not in dense):
            for place, sink in enumerate(sinks):
                found[place].add(Pack((n,), 0), {n: _rows(order, [(at, each[n]) for at, each in made], sink, like[n])})
    return [each.values for each in found]


def _at(device: str, function: Any, *arguments: Any) -> Any:
    with tf.device(device):
        return function(*arguments)


def _summed(
    order: Order, messages: Sequence[list[tf.Tensor]], sources: Sequence[str], sinks: Sequence[str]
) -> list[list[tf.Tensor]]:
    """On each sink the sums of the sources' messages, of which there is one for each type."""
    reduce = _scattered if len(sinks) > 2 and len(sources) > 2 else _direct
    sums = [reduce(order, each, sources, sinks) for each in zip(*messages, strict=True)]
    return [list(each) for each in zip(*sums, strict=True)]


def _direct(
    order: Order, messages: Sequence[tf.Tensor], sources: Sequence[str], sinks: Sequence[str]
) -> list[tf.Tensor]:
    """Every source sends all to every sink, which adds: as many bytes as need be, to one sink or between two."""
    sums = []
    for sink in sinks:
        there = [order.send(each, source, sink) for each, source in zip(messages, sources, strict=True)]
        with tf.device(sink):
            sums.append(in_order(there))
    return sums


def in_order(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Their sum, added one after another."""
    total = tensors[0]
    for each in tensors[1:]:  # what is between keeps TensorFlow from adding all at once, in an order of its own
        total = tf.raw_ops.Snapshot(input=total + each)
    return total


def _scattered(
    order: Order, messages: Sequence[tf.Tensor], sources: Sequence[str], sinks: Sequence[str]
) -> list[tf.Tensor]:
    """Reduce-scatter and gather: each of r sources adds an r-th and sends it to all, ``2 (r-1)/r`` of the bytes."""
    shape, count = messages[0].shape, len(sources)
    values = [_at(source, flat, each) for source, each in zip(sources, messages, strict=True)]
    parts: list[list[tf.Tensor]] = [[] for _ in sinks]
    for part, owner in enumerate(sources):
        rows = rows_of(int(shape.num_elements()), part, count)
        if not rows:
            continue
        slices = [_at(at, tf.slice, each, [rows.start], [len(rows)]) for each, at in zip(values, sources, strict=True)]
        (total,) = _direct(order, slices, sources, [owner])
        for place, sink in enumerate(sinks):
            parts[place].append(order.send(total, owner, sink, waits=False))
    return [_at(sink, _joined, each, shape) for sink, each in zip(sinks, parts, strict=True)]


def _joined(parts: Sequence[tf.Tensor], shape: tf.TensorShape) -> tf.Tensor:
    return shaped(tf.concat(parts, 0), shape)


def _rows(order: Order, made: Sequence[tuple[str, Any]], sink: str, like: tf.IndexedSlices) -> tf.IndexedSlices:
    """An embedding's gradient on a sink: the rows of all sources, as the whole minibatch would give them."""
    total = None
    for device, rows in made:
        there = [order.send(each, device, sink) for each in tf.nest.flatten(rows, expand_composites=True)]
        with tf.device(sink):
            mine = tf.IndexedSlices(*there)
            total = mine if total is None else added([total], [mine], [like])[0]
    return total
