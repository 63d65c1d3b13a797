"""Packs of a plan as messages on their way between devices, their times, and sums of them, in one traced function.

Sums are added in the order of the devices, whatever arrives first and however it was packed: all orders of transfers
give bitwise equal sums.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import tensorflow as tf

from pipetrain.compute.functions.backward import added
from pipetrain.schemes.splitting import rows_of
from pipetrain.schemes.transfers.plan import Pack, Phase

What = Literal["pull", "push", "late", "return", "gather", "scatter"]


class RecordedMessage(NamedTuple):
    """A part of a pack of a phase, sent from one device to another, with its bytes."""

    kind: What
    pack: int
    source: str
    sink: str
    size_bytes: int | None


class Record:
    """Collects times of day while a function is traced; its results are then returned by the function.

    ``messages`` are in the order in which they were added; each has two times, that of its leaving its source and that
    of its arrival.
    """

    def __init__(self) -> None:
        self.messages: list[RecordedMessage] = []
        self._times: list[tuple[tf.Tensor, tf.Tensor]] = []

    def add(self, kind: What, pack: int, source: str, sink: str, there: tf.Tensor) -> tf.Tensor:
        """A message has arrived as this tensor, a copy of the one that left; gives the time of that."""
        (leaving,) = there.op.inputs
        count = leaving.shape.num_elements()
        size_bytes = None if count is None else count * leaving.dtype.size
        self.messages.append(RecordedMessage(kind, pack, source, sink, size_bytes))
        number = len(self.messages)
        self._times.append((_time(source, leaving, 2 * number), _time(sink, there, 2 * number + 1)))
        return self._times[-1][1]

    def times(self, host: str) -> tf.Tensor:
        """The times of day of all messages, of shape (messages, 2), on this process's device."""
        by_device: dict[str, list[tuple[int, tf.Tensor]]] = {}
        for n, (message, pair) in enumerate(zip(self.messages, self._times, strict=True)):
            for side, (device, time) in enumerate(zip((message.source, message.sink), pair, strict=True)):
                by_device.setdefault(device, []).append((2 * n + side, time))
        stacked, places = [], list[int]()
        for device, times in by_device.items():  # one message from each device
            with tf.device(device):
                stacked.append(tf.stack([time for _, time in times]))
            places += [place for place, _ in times]
        with tf.device(host):
            if not stacked:
                return tf.zeros([0, 2], tf.float64)
            joined = tf.concat([tf.identity(each) for each in stacked], 0)
            order: Sequence[Any] = sorted(range(len(places)), key=lambda n: places[n])
            return tf.reshape(tf.gather(joined, order), [-1, 2])


def _time(device: str, tensor: tf.Tensor, number: int) -> tf.Tensor:
    """The time of day when the tensor was there, on its device.

    In a call that TensorFlow takes for one without side effects: it would let each time wait for the one before. The
    number, another for each call, keeps it from making one of them.
    """
    with tf.device(device), tf.control_dependencies([tensor.op]):
        (time,) = tf.raw_ops.PartitionedCall(args=[tf.constant(number)], Tout=[tf.float64], f=_clock())
    return time


def _clock() -> Any:
    def now(number: tf.Tensor) -> tf.Tensor:
        with tf.control_dependencies([number]):
            return tf.timestamp()

    return tf.function(now, autograph=False).get_concrete_function(tf.TensorSpec([], tf.int32))


class MessageLayout:
    """How a pack's values become one flat message for each of their types, and values again.

    A value that is alone in its message travels as it is.

    Args:
        pack: the variables' numbers.
        like: the spec of each variable, by its number.
    """

    def __init__(self, pack: Pack, like: Mapping[int, tf.TensorSpec]) -> None:
        self._pack, self._like = pack, like
        types = dict.fromkeys(like[n].dtype for n in pack.variables)
        self._together = [[n for n in pack.variables if like[n].dtype == dtype] for dtype in types]

    def messages(self, values: Mapping[int, tf.Tensor]) -> list[tf.Tensor]:
        """Of the values by the variables' numbers."""
        for n in self._pack.variables:
            values[n].set_shape(self._like[n].shape)  # which a trace need not have found
        if self._pack.chunks > 1:
            (n,) = self._pack.variables
            rows = rows_of(_elements(self._like[n]), self._pack.chunk, self._pack.chunks)
            return [tf.slice(flat(values[n]), [rows.start], [len(rows)])]
        return [
            values[numbers[0]] if len(numbers) == 1 else tf.concat([flat(values[n]) for n in numbers], 0)
            for numbers in self._together
        ]

    def values(self, messages: Sequence[tf.Tensor]) -> dict[int, tf.Tensor]:
        """The values, or the chunk of one, by the variables' numbers."""
        if self._pack.chunks > 1:
            return {self._pack.variables[0]: messages[0]}
        found: dict[int, tf.Tensor] = {}
        for numbers, message in zip(self._together, messages, strict=True):
            if len(numbers) == 1:
                found[numbers[0]] = message
                continue
            # Of a second dimension TensorFlow copies the parts. Parts of the first share the message's memory, and what
            # is computed in place of such a part, and kept by a variable, would keep the whole message.
            parts = tf.split(message[tf.newaxis], [_elements(self._like[n]) for n in numbers], axis=1)
            found |= {n: tf.reshape(part, self._like[n].shape) for n, part in zip(numbers, parts, strict=True)}
        return found


class Received:
    """The values of a phase's packs as they arrive at one device; chunks are put together.

    Args:
        like: the spec of each variable, by its number.
    """

    def __init__(self, like: Mapping[int, tf.TensorSpec]) -> None:
        self._like, self._values = like, dict[int, Any]()
        self._chunks: dict[int, dict[int, tf.Tensor]] = {}

    def add(self, pack: Pack, values: Mapping[int, Any]) -> None:
        """What a pack brought."""
        if pack.chunks == 1:
            self._values.update(values)
            return
        (n,) = pack.variables
        chunks = self._chunks.setdefault(n, {})
        chunks[pack.chunk] = values[n]
        if len(chunks) == pack.chunks:
            whole = tf.concat([chunks[k] for k in range(pack.chunks)], 0)
            self._values[n] = shaped(whole, self._like[n].shape)

    @property
    def values(self) -> dict[int, Any]:
        """Those that are complete, by the variables' numbers."""
        return self._values


class Order:
    """Sends a phase's packs one after another, each after the acknowledgements that it waits for.

    A message leaves when the pack that it awaits has arrived at all its receivers. They say so by control
    edges to the sender's device: an edge on the sender's side alone would order nothing, as a message that is ready is
    sent when it is asked for.

    Args:
        phase: whose packs are sent.
        kind: what is sent, for the record.
        record: of what is sent and arrives, if there is to be one.
    """

    def __init__(self, phase: Phase, kind: What, record: Record | None = None) -> None:
        self.phase, self._kind, self._record = phase, kind, record
        self._awaited = phase.awaited
        self._arrived: list[list[tf.Operation]] = []

    def packs(self) -> Iterator[Pack]:
        """The packs; what is sent after each of them is given, is of it."""
        for pack in self.phase.packs:
            self._arrived.append([])
            yield pack

    def send(self, tensor: tf.Tensor, source: str, sink: str, waits: bool = True) -> tf.Tensor:
        """The tensor, a part of the current pack, on another device; there at once if it ``waits`` for no others."""
        if source == sink:
            return tensor
        place = self._awaited[len(self._arrived) - 1]
        awaited = self._arrived[place] if waits and place is not None else []
        there = sent(tensor, source, sink, awaited)
        arrived = there
        if self._record is not None:  # the acknowledgement then waits for the time to be noted
            arrived = self._record.add(self._kind, len(self._arrived) - 1, source, sink, there)
        self._arrived[-1].append(arrived.op)
        return there


def sent(tensor: tf.Tensor, source: str, sink: str, awaited: Sequence[tf.Operation]) -> tf.Tensor:
    """The tensor on another device, sent after what is awaited; on its own device it is there already."""
    if source == sink:
        return tensor
    with tf.device(source), tf.control_dependencies(awaited):
        leaving = tf.identity(tensor)
    with tf.device(sink):
        return tf.identity(leaving)


def flat(tensor: tf.Tensor) -> tf.Tensor:
    """The tensor's values in one dimension, without an operation if they are that already."""
    return tensor if tensor.shape.rank == 1 else tf.reshape(tensor, [-1])


def shaped(values: tf.Tensor, shape: tf.TensorShape) -> tf.Tensor:
    """Values of one dimension in this shape, without an operation if it has one dimension, too."""
    return values if shape.rank == 1 else tf.reshape(values, shape)


def _elements(spec: tf.TensorSpec) -> int:
    return int(spec.shape.num_elements())


Gradients = Mapping[int, Any]  # by the variables' numbers; rows of an embedding are IndexedSlices


def reduced(
    order: Order,
    made: Sequence[tuple[str, Gradients]],
    sinks: Sequence[str],
    like: Gradients,
    is_ring: bool = False,
) -> list[Any]:
    """The sums of a phase's gradients on each of the ``sinks``, by the variables' numbers, pack after pack.

    Args:
        order: in which the phase's packs are sent.
        made: of each device that has rows, its name and its gradients.
        sinks: the devices that need the sums.
        like: the specs of the gradients; those that are not there are not sent.
        is_ring: whether each of the ``sinks``, among which are all devices with rows, sends to the next one alone.
    """
    found = [Received(like) for _ in sinks]
    sums = _ring_sums if is_ring else _sums
    for pack in order.packs():
        present = [n for n in pack.variables if n in like]
        dense = [n for n in present if not isinstance(like[n], tf.IndexedSlices)]
        if dense:
            for place, values in enumerate(sums(order, pack._replace(variables=tuple(dense)), made, sinks, like)):
                _at(sinks[place], found[place].add, pack, values)  # chunks are put together there
        for n in (n for n in present if n not in dense):
            for place, sink in enumerate(sinks):
                found[place].add(
                    Pack((n,), 0), {n: summed_rows(order, [(at, each[n]) for at, each in made], sink, like[n])}
                )
    return [each.values for each in found]


def _at(device: str, function: Any, *arguments: Any) -> Any:
    with tf.device(device):
        return function(*arguments)


def _sums(
    order: Order, pack: Pack, made: Sequence[tuple[str, Gradients]], sinks: Sequence[str], like: Gradients
) -> list[dict[int, tf.Tensor]]:
    """On each sink the sums of a pack."""
    layout = MessageLayout(pack, like)
    messages = [_at(device, layout.messages, gradients) for device, gradients in made]
    summed = _summed(order, messages, [device for device, _ in made], sinks)
    return [_at(sink, layout.values, sums) for sink, sums in zip(sinks, summed, strict=True)]


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


class _RingLayout:
    """How a pack's values become as many messages of each type as the ring has devices, and values again.

    Every variable is divided into parts by the places of its elements, and message k has the k-th part of each: so the
    order in which an element is summed depends neither on its pack nor on chunks.

    Args:
        pack: the variables' numbers.
        like: the spec of each variable, by its number.
        count: of the devices.
    """

    def __init__(self, pack: Pack, like: Mapping[int, tf.TensorSpec], count: int) -> None:
        self._pack, self._like = pack, like
        types = dict.fromkeys(like[n].dtype for n in pack.variables)
        self.together = [[n for n in pack.variables if like[n].dtype == dtype] for dtype in types]
        self._rows = {n: rows_of(_elements(like[n]), pack.chunk, pack.chunks) for n in pack.variables}
        self._sizes = {n: [self._size(n, part, count) for part in range(count)] for n in pack.variables}

    def _size(self, n: int, part: int, count: int) -> int:
        mine, rows = rows_of(_elements(self._like[n]), part, count), self._rows[n]
        return max(0, min(mine.stop, rows.stop) - max(mine.start, rows.start))

    def messages(self, numbers: Sequence[int], values: Mapping[int, tf.Tensor]) -> list[tf.Tensor | None]:
        """One for each part, None where that has no elements."""
        pieces = []
        for n in numbers:
            values[n].set_shape(self._like[n].shape)  # which a trace need not have found
            whole = flat(values[n])
            if self._pack.chunks > 1:
                whole = tf.slice(whole, [self._rows[n].start], [len(self._rows[n])])
            pieces.append([*zip(tf.split(whole, self._sizes[n]), self._sizes[n], strict=True)])
        parts = [[piece for piece, size in each if size] for each in zip(*pieces, strict=True)]
        return [tf.concat(each, 0) if each else None for each in parts]

    def values(self, numbers: Sequence[int], messages: Sequence[tf.Tensor | None]) -> dict[int, tf.Tensor]:
        """The values, or the chunk of one, by the variables' numbers."""
        pieces: dict[int, list[tf.Tensor]] = {n: [] for n in numbers}
        for part, message in enumerate(messages):
            sizes = {n: self._sizes[n][part] for n in numbers if self._sizes[n][part]}
            if message is not None:  # of a second dimension TensorFlow copies the parts, see ``MessageLayout``
                for n, each in zip(sizes, tf.split(message[tf.newaxis], [*sizes.values()], axis=1), strict=True):
                    pieces[n].append(flat(each))
        wholes = {n: tf.concat(each or [tf.zeros([0], self._like[n].dtype)], 0) for n, each in pieces.items()}
        if self._pack.chunks > 1:
            return wholes
        return {n: shaped(whole, self._like[n].shape) for n, whole in wholes.items()}


def _ring_sums(
    order: Order, pack: Pack, made: Sequence[tuple[str, Gradients]], sinks: Sequence[str], like: Gradients
) -> list[dict[int, tf.Tensor]]:
    """Reduce-scatter and gather on a ring, ``2 (r-1)/r`` of the bytes, all from each device to the next one.

    Part k of r begins at device k, each device after it adds its own, and the sum goes round to all others.
    """
    layout, left = _RingLayout(pack, like, len(sinks)), list(made)
    held = [left.pop(0)[1] if left and left[0][0] == sink else None for sink in sinks]
    found: list[dict[int, tf.Tensor]] = [{} for _ in sinks]
    for numbers in layout.together:
        mine = [
            None if each is None else _at(sink, layout.messages, numbers, each)
            for sink, each in zip(sinks, held, strict=True)
        ]
        parts = [
            _around(order, [each if each is None else each[part] for each in mine], part, sinks)
            for part in range(len(sinks))
        ]
        for place, sink in enumerate(sinks):
            found[place] |= _at(sink, layout.values, numbers, [each[place] for each in parts])
    return found


def _around(
    order: Order, parts: Sequence[tf.Tensor | None], first: int, sinks: Sequence[str]
) -> list[tf.Tensor | None]:
    """The sum of a part, on each device, that begins with the first one; some have nothing to add."""
    count, total = len(sinks), None
    sums: list[tf.Tensor | None] = [None] * count
    for hop in range(2 * count - 1):
        place = (first + hop) % count
        if total is not None:
            total = order.send(total, sinks[place - 1], sinks[place], waits=hop == 1)
        if hop < count and parts[place] is not None:
            total = parts[place] if total is None else _at(sinks[place], in_order, [total, parts[place]])
        if hop >= count - 1:
            sums[place] = total
    return sums


def mixed(
    order: Order, made: Sequence[tuple[str, Gradients]], like: Gradients, factors: Sequence[Mapping[int, float]]
) -> list[dict[int, tf.Tensor]]:
    """On each device the sum of its own and others' values, each times a factor, in the order of the devices.

    Args:
        order: in which the phase's packs are sent.
        made: of each device its name and its values by number.
        like: the specs of the values.
        factors: of each device those of the values that it needs, by the places of the devices that have them.
    """
    found = [Received(like) for _ in made]
    for pack in order.packs():
        layout = MessageLayout(pack, like)
        messages = [_at(device, layout.messages, values) for device, values in made]
        for place, needed in enumerate(factors):
            sink = made[place][0]
            there = [[order.send(each, made[other][0], sink) for each in messages[other]] for other in needed]
            sums = [_at(sink, _weighted, terms, [*needed.values()]) for terms in zip(*there, strict=True)]
            _at(sink, found[place].add, pack, _at(sink, layout.values, sums))
    return [each.values for each in found]


def _weighted(terms: Sequence[tf.Tensor], factors: Sequence[float]) -> tf.Tensor:
    if len({*factors}) == 1:  # as an average is made
        return in_order(terms) * tf.constant(factors[0], terms[0].dtype)
    return in_order([each * tf.constant(factor, each.dtype) for each, factor in zip(terms, factors, strict=True)])


def _joined(parts: Sequence[tf.Tensor], shape: tf.TensorShape) -> tf.Tensor:
    return shaped(tf.concat(parts, 0), shape)


def summed_rows(order: Order, made: Sequence[tuple[str, Any]], sink: str, like: tf.IndexedSlices) -> tf.IndexedSlices:
    """An embedding's gradient on a sink: the rows of all sources, as the whole minibatch would give them."""
    total = None
    for device, rows in made:
        there = [order.send(each, device, sink) for each in tf.nest.flatten(rows, expand_composites=True)]
        with tf.device(sink):
            mine = tf.IndexedSlices(*there)
            total = mine if total is None else added([total], [mine], [like])[0]
    return total
