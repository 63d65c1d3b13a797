"""What stages and replicas exchange: copies of tensors, gradients before an update, their norms."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from itertools import chain
from queue import SimpleQueue
from typing import Any, Generic, NamedTuple, TypeVar, cast

import numpy as np
import tensorflow as tf

from pipetrain.compute.cores import HOST, is_remote
from pipetrain.compute.functions.backward import over_stages
from pipetrain.compute.functions.inference import Replica
from pipetrain.compute.functions.stage import Stage
from pipetrain.compute.functions.stage_values import Step
from pipetrain.compute.tensorflow_private import elements_of
from pipetrain.compute.transfers.compression import ReplicaSums
from pipetrain.schemes.splitting import shared_out
from pipetrain.trace.records import Recent, Transfer, Transfers

Item = TypeVar("Item")
_NOTHING: Any = object()


class Closed(Exception):
    """The mailbox was closed: the pipeline is being stopped."""


class Mailbox(Generic[Item]):
    """First in, first out, for one reader. ``close`` wakes it with ``Closed``, so that no thread waits for ever."""

    def __init__(self) -> None:
        self._items: SimpleQueue[Item] = SimpleQueue()
        self._next: Item = _NOTHING
        self._closed = False

    def put(self, item: Item) -> None:
        """Add an item. Raises Closed."""
        if self._closed:
            raise Closed
        self._items.put(item)

    def peek(self) -> Item:
        """The oldest item, left in place; waits while the mailbox is empty. Raises Closed."""
        if self._next is _NOTHING and not self._closed:
            self._next = self._items.get()
        if self._closed:
            raise Closed
        return self._next

    def get(self) -> Item:
        """Take the oldest item; waits while the mailbox is empty. Raises Closed."""
        item, self._next = self.peek(), _NOTHING
        return item

    def close(self) -> None:
        """Wake the reader; from now on every call raises Closed."""
        self._closed = True
        self._items.put(_NOTHING)

    def __len__(self) -> int:
        return self._items.qsize() + (self._next is not _NOTHING)


def transfer(tensor: tf.Tensor, device: str) -> tf.Tensor:
    """The tensor for a reader on another device; TensorFlow does the copy. CPU devices of one process need none.

    Devices of other processes need none either: the call that reads a tensor there copies it once. A separate copy
    would need two more messages, for a call and for the release of a tensor, and the sender would wait for all earlier
    calls of the reader's process.
    """
    if not _needs_copy(tensor.device, device):
        return tensor
    with tf.device(device):
        return tf.identity(tensor)


def moved(gradients: list[Any], device: str) -> list[Any]:
    """Gradients for a reader on another device; None, for a weight that has none, stays None."""

    def move(tensor: Any) -> Any:
        return None if tensor is None else transfer(tensor, device)

    return list(tf.nest.map_structure(move, gradients, expand_composites=True))


def here(tensors: Iterable[tf.Tensor]) -> list[tf.Tensor]:
    """The tensors, those on devices of other processes copied to this one."""
    return [transfer(each, HOST) if is_remote(each.device) else each for each in tensors]


@cache
def _needs_copy(source: str, device: str) -> bool:
    """Whether a tensor on the one device must be copied for a reader on the other."""
    if is_remote(device) or (source.endswith(device) and not is_remote(source)):
        return False
    return not (_shares_memory(source) and _shares_memory(device))


def _shares_memory(device: str) -> bool:
    return "device:CPU:" in device and not is_remote(device)


def size_bytes(tensors: Iterable[tf.Tensor | None]) -> int:
    """The bytes of all elements of the tensors.

    Reading a tensor's shape gives up Python's global lock for every dimension; reading its number of elements, once.
    """
    return sum(elements_of(each) * each.dtype.size for each in tensors if each is not None)


class Summary(NamedTuple):
    """Of one stage's gradients: whether they are finite, and their squared norm where it is wanted."""

    finite: bool
    squared_norm: tf.Tensor | None


class GradientExchange:
    """Exchanges summaries of all stages' gradients at a flush: from each stage to each other.

    They are read in the order of stages, whichever arrives first. Replicas of a stage have equal gradients, and the
    first replica makes the summary for all of them, so they stay bitwise equal whatever their devices are.

    There is no deadlock: a stage sends its summary after it has sent everything that others need of the minibatch, a
    device waits only after all of its stages have sent theirs, and in a synchronous schedule none of this depends on
    the update. In an asynchronous schedule all stages would wait until the first one is done.

    Args:
        stages: the replicas of every stage.
        scales: whether steps with gradients that are not finite are skipped, see ``LossScale``.
    """

    def __init__(self, stages: Sequence[Sequence[Stage]], scales: bool) -> None:
        self._stages, self._scales = [list(replicas) for replicas in stages], scales
        self._to: list[list[list[Mailbox[Summary]]]] = [
            [[Mailbox() for _ in stages] for _ in replicas] for replicas in stages
        ]

    @property
    def mailboxes(self) -> list[Mailbox[Any]]:
        """All mailboxes at which stages may wait."""
        return [box for stage in self._to for boxes in stage for box in boxes]

    def send(self, stage: int, replica: int, gradients: list[Any], step: Step) -> None:
        """Tell all stages of this one's gradients."""
        if replica:
            return
        mine = self._stages[stage][replica]
        finite = not self._scales or bool(here([mine.all_finite(gradients)])[0])
        summary = Summary(finite, mine.squared_norm(gradients, step) if mine.global_clipnorm and finite else None)
        for boxes in self._to:
            for box in boxes:
                box[stage].put(summary)

    def receive(self, stage: int, replica: int) -> tuple[bool, tf.Tensor | None]:
        """Whether all gradients of all stages are finite and, if their norm is wanted, its squares; waits for them."""
        mine = self._stages[stage][replica]
        summaries = [box.get() for box in self._to[stage][replica]]
        if not all(each.finite for each in summaries):
            return False, None
        squares = [transfer(each.squared_norm, mine.device) for each in summaries if each.squared_norm is not None]
        with tf.device(mine.device):
            return True, tf.stack(squares) if squares else None


class Reduction:
    """Every replica sums about an r-th of the weights' gradients and sends the sums to the others.

    Sums are added in the order of the replicas, whichever arrives first, so all replicas have bitwise equal sums.
    ``shared_out`` says which replica sums which gradients, ``reduction_bytes`` what each sends.

    Where sums are compressed, each sends a message of its own gradients to all others, see ``ReplicaSums``.

    Args:
        stages: the stage's replicas.
        kept: how many transfers of a replica are recorded, the newest.
        number_of: gives the number of a microbatch's minibatch since training began.
    """

    def __init__(self, stages: Sequence[Replica], kept: int, number_of: Callable[[int], int] = lambda _: 0) -> None:
        self._stages, count, self._number_of = list(stages), len(stages), number_of
        self._messages: ReplicaSums | None = stages[0].sums
        coded = () if self._messages is None else self._messages.numbers
        apart = [n for n, _ in enumerate(stages[0].variables) if n not in coded]
        owned = shared_out([stages[0].variables[n].shape.num_elements() for n in apart], count)
        self._owned = [[apart[place] for place in mine] for mine in owned]
        self._to: list[list[Mailbox[Any]]] = [[Mailbox() for _ in range(count)] for _ in range(count)]
        self._done = [Recent(Transfers, kept) for _ in range(count)]

    @property
    def mailboxes(self) -> list[Mailbox[Any]]:
        """All mailboxes at which replicas may wait."""
        return [box for boxes in self._to for box in boxes]

    def sum(self, replica: int, gradients: list[Any] | None, microbatch: int) -> list[Any]:
        """This replica's gradients in, the sum of all replicas' out; None for a replica that had no rows.

        ``microbatch`` is the number under which it is recorded.
        """
        if len(self._stages) == 1:
            return gradients or []
        start_s = time.perf_counter()
        of, size = self._exactly(replica, gradients) if any(self._owned) else ({}, 0)
        if self._messages is not None:
            coded, message_bytes = self._by_messages(self._messages, replica, gradients, microbatch)
            of, size = of | coded, size + message_bytes
        end_s = time.perf_counter()
        self._done[replica].append(Transfer("R", microbatch, 0, replica, 0, replica, size, start_s, end_s))
        return [of[n] for n in range(len(of))]

    def _exactly(self, replica: int, gradients: list[Any] | None) -> tuple[dict[int, Any], int]:
        """The sums of gradients that are sent as they are, by number, and the bytes that this replica has sent."""
        shares = [None if gradients is None else [gradients[n] for n in owned] for owned in self._owned]
        total, owned = None, self._owned[replica]
        for share in self._exchanged(replica, shares):
            total = total if share is None else cast(Stage, self._stages[replica]).accumulate(total, share, owned)
        sums = self._exchanged(replica, [total] * len(self._stages))
        sent = [*shares[:replica], *shares[replica + 1 :], *[total] * (len(shares) - 1)]
        size = size_bytes(tf.nest.flatten(sent, expand_composites=True))
        return dict(zip(chain(*self._owned), chain(*sums), strict=True)), size

    def _by_messages(
        self, messages: ReplicaSums, replica: int, gradients: list[Any] | None, microbatch: int
    ) -> tuple[dict[int, Any], int]:
        """The same of those that are compressed."""
        step = tf.constant(self._number_of(microbatch), tf.int64)
        given = messages.of_no_rows(replica) if gradients is None else gradients
        mine = None if given is None else [messages.encoded(replica, given, step)]
        there = self._exchanged(replica, [mine] * len(self._stages))
        found = messages.added(replica, [each for sent in there if sent is not None for each in sent], step)
        return found, 0 if mine is None else (len(there) - 1) * messages.sent_bytes

    def transfers(self, stage: int, replica: int) -> Transfers:
        """The transfers of this replica's sums, recorded for this stage."""
        done = self._done[replica].columns()
        stages = np.full_like(done.from_stage, stage)
        return replace(done, from_stage=stages, to_stage=stages)

    def _exchanged(self, replica: int, shares: list[Any]) -> list[Any]:
        """Send every replica its share; receive what each of them sends, in the order of replicas."""
        for other, share in enumerate(shares):
            self._to[other][replica].put(share)
        device = self._stages[replica].device
        return [None if (each := box.get()) is None else moved(each, device) for box in self._to[replica]]


Gradients = list[Any]


class SharedUpdate(NamedTuple):
    """The gradients of a minibatch summed over all stages, and the other inputs of the update that they make.

    There are no gradients where the step is skipped.
    """

    gradients: Gradients
    step: Step


class SharedGradients:
    """What the stages that have the same weights send each other.

    Every stage adds its gradients of a minibatch to the sum of the later ones, and sends the sum to the one before. The
    first completes it, makes its update, and sends what it has completed to all others, which make the same update when
    the rule of versions says so. Each sum is sent to every replica by the first replica: replicas have equal gradients.

    There is no deadlock: a stage has sent its sum before an earlier one completes the minibatch, and a stage that waits
    for a completed sum waits for an earlier minibatch than its own, or a forward of the first stage that came first.

    Args:
        holders: the stages that have the weights, in order.
        stages: the replicas of every stage of the pipeline.
        kept: how many transfers of a stage are recorded, the newest.
    """

    def __init__(self, holders: Sequence[int], stages: Sequence[Sequence[Stage]], kept: int) -> None:
        self.holders = tuple(holders)
        self._stages = {stage: list(stages[stage]) for stage in holders}
        self._up: dict[int, list[Mailbox[Gradients]]] = {k: [Mailbox() for _ in stages[k]] for k in holders[:-1]}
        self._down: dict[int, list[Mailbox[SharedUpdate]]] = {k: [Mailbox() for _ in stages[k]] for k in holders[1:]}
        self._sent = {k: Recent(Transfers, kept) for k in holders}

    @property
    def mailboxes(self) -> list[Mailbox[Any]]:
        """All mailboxes at which stages may wait."""
        return [box for way in (self._up, self._down) for boxes in way.values() for box in boxes]

    @property
    def first(self) -> int:
        """The stage that completes the sums."""
        return self.holders[0]

    def sum(self, stage: int, replica: int, gradients: Gradients, microbatch: int) -> Gradients | None:
        """Add a stage's gradients to those of the later ones: the sum over all stages for the first, None for others.

        ``microbatch`` is the number under which it is recorded.
        """
        if stage in self._up:
            later = moved(self._up[stage][replica].get(), self._stages[stage][replica].device)
            gradients = [over_stages(a, b) for a, b in zip(later, gradients, strict=True)]
        if stage == self.first:
            return gradients
        above = self.holders[self.holders.index(stage) - 1]
        if replica == 0:
            self._send(self._up[above], gradients, gradients, (stage, above, microbatch))
        return None

    def hand_down(self, replica: int, completed: SharedUpdate, microbatch: int) -> None:
        """Send what the first stage has completed to all others."""
        for stage in self.holders[1:] if replica == 0 else ():
            self._send(self._down[stage], completed, completed.gradients, (self.first, stage, microbatch))

    def completed(self, stage: int, replica: int) -> SharedUpdate:
        """The next minibatch's sum, for a stage that is not the first; waits for it."""
        completed = self._down[stage][replica].get()
        return completed._replace(gradients=moved(completed.gradients, self._stages[stage][replica].device))

    def transfers(self, stage: int, replica: int) -> Transfers:
        """The transfers that this replica of the stage has made."""
        return self._sent[stage].columns() if replica == 0 else Transfers.of(())

    def _send(
        self, boxes: Sequence[Mailbox[Any]], message: Any, gradients: Gradients, way: tuple[int, int, int]
    ) -> None:
        stage, other, microbatch = way
        size = size_bytes(tf.nest.flatten(gradients, expand_composites=True))
        for replica, box in enumerate(boxes):
            start_s = time.perf_counter()
            box.put(message)
            sent = Transfer("S", microbatch, stage, 0, other, replica, size, start_s, time.perf_counter())
            self._sent[stage].append(sent)
