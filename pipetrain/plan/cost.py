"""What stages cost in seconds and bytes, with the one copy that a stage holds of weights which several blocks have."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipetrain.plan.cluster import Cluster, Link
from pipetrain.plan.memory import Demand
from pipetrain.plan.profile import BlockProfile, Profile, Seconds
from pipetrain.plan.roofline import PREDICTION_PASSES, UPDATE_PASSES
from pipetrain.schemes.compression import Compression

Floats = NDArray[np.float64]


class SharingCosts:
    """Of every stage of blocks i to j-1, by two indices i and j, shape (blocks + 1, blocks + 1).

    ``repeated_bytes`` are the weights that its blocks count more than once, ``repeated_part`` what this is of the
    updates' seconds, given each block's; ``shared_bytes`` the weights that blocks outside of it have too.
    """

    def __init__(self, blocks: Sequence[BlockProfile]) -> None:
        users: defaultdict[int, list[int]] = defaultdict(list)
        size_bytes: dict[int, int] = {}
        for n, block in enumerate(blocks):
            for number, each_bytes in block.shared:
                users[number].append(n)
                size_bytes[number] = each_bytes
        together: defaultdict[tuple[int, ...], int] = defaultdict(int)
        for number, using in users.items():
            together[tuple(using)] += size_bytes[number]
        self._blocks, self._together = blocks, dict(together)
        shape = (len(blocks) + 1, len(blocks) + 1)
        self.repeated_bytes, self.shared_bytes = np.zeros(shape), np.zeros(shape)
        for places, each_bytes in together.items():
            inside = self._inside(places)
            self.repeated_bytes += each_bytes * np.maximum(inside - 1, 0)
            self.shared_bytes += each_bytes * ((inside > 0) & (inside < len(places)))

    def repeated_s(self, update_s: Sequence[float]) -> Floats:
        """The seconds of updates that blocks i to j-1 count more than once, from those of every block."""
        seconds = np.zeros_like(self.repeated_bytes)
        for places, each_bytes in self._together.items():
            parts = [update_s[n] * each_bytes / max(self._blocks[n].weight_bytes, 1) for n in places]
            seconds += float(np.mean(parts)) * np.maximum(self._inside(places) - 1, 0)
        return seconds

    def _inside(self, places: Sequence[int]) -> NDArray[np.int64]:
        """How many of these blocks are among blocks i to j-1."""
        before = np.searchsorted(np.asarray(places), np.arange(len(self._blocks) + 1))
        inside: NDArray[np.int64] = np.maximum(before[None, :] - before[:, None], 0)
        return inside


PREDICTING = PREDICTION_PASSES / UPDATE_PASSES  # of an update's seconds: both go by the bytes that they read and write
CLEAR = 1.05  # how many times faster a compiled stage must be to be chosen, beyond the profile's spread
IMPOSSIBLE_S = 1e5  # of a block that XLA cannot compile: no stage that is compiled has it


class Place(NamedTuple):
    """Where a stage is, and how it works there.

    Its first device, how many it has, and the first device of the stage after it; whether XLA compiles it, and how many
    times a minibatch it predicts weights.
    """

    device: int
    replicas: int
    after: int
    compiled: bool = False
    predictions: int = 0


class Affine(NamedTuple):
    """A quantity of every stage of blocks i to j-1 that is ``to_end[j] - to_start[i]``; shapes (blocks + 1,).

    Where blocks share weights, what they change is added: ``beside[i, j]``.
    """

    to_end: Floats
    to_start: Floats
    beside: Floats | None = None

    def of(self, i: int, j: int) -> float:
        """The quantity of blocks i to j-1."""
        return float(self.to_end[j] - self.to_start[i]) + (0.0 if self.beside is None else float(self.beside[i, j]))

    def of_all(self, i: NDArray[np.int64], j: NDArray[np.int64]) -> Floats:
        """The quantity of every start in i with every end in j: shape (len(i), len(j))."""
        quantity: Floats = self.to_end[j][None, :] - self.to_start[i][:, None]
        return quantity if self.beside is None else quantity + self.beside[np.ix_(i, j)]

    def times(self, factor: float) -> Affine:
        """The quantity multiplied by a number."""
        return Affine(*(None if each is None else factor * each for each in self))  # type: ignore[arg-type]


class Memory:
    """Bytes that one device of every possible stage keeps at its fullest.

    ``running.of(i, j)``, what grows with every block, and the largest ``work`` of blocks i to j-1, shape (blocks,).
    """

    def __init__(self, running: Affine, work: Floats) -> None:
        self._running, self._work = running, work
        self._ends: dict[float, NDArray[np.int64]] = {}

    def of(self, i: int, j: int) -> float:
        """The bytes of blocks i to j-1."""
        return self._running.of(i, j) + float(self._work[i:j].max())

    def fits(self, limit_bytes: float) -> NDArray[np.bool_]:
        """Whether blocks i to j-1 keep to the limit, for every i and j: shape (blocks, blocks + 1).

        Where blocks share weights, more of them may need less: then none of the sums wait for another stage.
        """
        every = np.arange(len(self._work) + 1)
        work = np.zeros((len(self._work), len(every)))
        for i in range(len(self._work)):
            work[i, i + 1 :] = np.maximum.accumulate(self._work[i:])
        fits: NDArray[np.bool_] = self._running.of_all(every[:-1], every) + work <= limit_bytes
        return fits & (every[None, :] > every[:-1, None])

    def ends(self, limit_bytes: float) -> NDArray[np.int64]:
        """For every i, the largest j whose blocks i to j-1 keep to the limit; i where none does.

        For chains without shared weights, of which more blocks never need less.
        """
        if limit_bytes not in self._ends:
            self._ends[limit_bytes] = self._searched(limit_bytes)
        return self._ends[limit_bytes]

    def _searched(self, limit_bytes: float) -> NDArray[np.int64]:
        """By halves: maxima of ``work`` over powers of two blocks, the longest first."""
        maxima = [self._work]
        while len(maxima[-1]) > (size := 1 << len(maxima) - 1):
            maxima.append(np.maximum(maxima[-1][:-size], maxima[-1][size:]))
        start = np.arange(len(self._work))
        end, most = start.copy(), np.zeros(len(start))
        for power in range(len(maxima) - 1, -1, -1):
            here = np.flatnonzero(end + (1 << power) <= len(start))
            further = end[here] + (1 << power)
            more = np.maximum(most[here], maxima[power][end[here]])
            fits = self._running.to_end[further] - self._running.to_start[here] + more <= limit_bytes
            end[here[fits]], most[here[fits]] = further[fits], more[fits]
        return end


class Costs:
    """Seconds and bytes of every possible stage of a profiled chain on a cluster.

    A stage of blocks i to j-1 on r devices takes, per minibatch of b rows,

    ``ceil(b/r)/b * (sum(forward + backward) + transfer(activations out of j-1) + transfer(gradients out of i))
    + (1 + 3/5 * predictions) * sum(update) + reduce(weights) + 2 * microbatches * overhead``

    : what one of its devices computes and sends, and what its actions take beside. Weights that several of its blocks
    have are updated once; what other stages have too is summed with them: their bytes are sent once more.

    Args:
        profile: of the chain.
        cluster: the devices.
        microbatches: of a minibatch.
        jit_compile: whether XLA compiles the stages, or ``"auto"``: those that it makes clearly faster.
        compression: of what crosses the cuts.
        replica_compression: of the gradients that replicas sum. What either takes is counted where it was measured.
    """

    def __init__(
        self,
        profile: Profile,
        cluster: Cluster,
        microbatches: int = 1,
        jit_compile: bool | str = False,
        compression: Compression | None = None,
        replica_compression: Compression | None = None,
    ) -> None:
        blocks = profile.trained
        self._chain, self.blocks, self.cluster, self._batch_size = blocks, len(blocks), cluster, profile.batch_size
        self._first_trained = next((n for n, block in enumerate(blocks) if block.weight_bytes), 0)
        self._jit_compile, self._margin = jit_compile, CLEAR + profile.spread
        plain = [block.seconds for block in blocks]
        self._seconds = {False: _Sums(plain)}
        if jit_compile is True:
            self._seconds[True] = _Sums([block.compiled or block.seconds for block in blocks])
        elif jit_compile and profile.is_compiled:
            never = Seconds(IMPOSSIBLE_S, IMPOSSIBLE_S, IMPOSSIBLE_S)
            self._seconds[True] = _Sums([block.compiled or never for block in blocks])
        self._weights = _sums([block.weight_bytes for block in blocks])
        self._steps_s = _sums([block.step_s for block in blocks])
        # Of gradients that replicas send as messages: their bytes, and what each replica holds for them in multiples of
        # the weights: what messages lacked, and what is made of those that come.
        self._summed: Floats | None = None
        if replica_compression is not None:
            self._summed = _sums([block.summed_bytes(replica_compression) for block in blocks])
        self._by, self._sums_by = compression, replica_compression
        self._rows = _sums([block.uncoded_bytes for block in blocks])
        self._coding, self._summing = profile.coding(compression), profile.coding(replica_compression)
        self._feeds = replica_compression is not None and replica_compression.error_feedback
        self._microbatches = microbatches
        self._of_messages = 0 if replica_compression is None else 1 + replica_compression.error_feedback
        self._kept = _sums([block.activation_bytes for block in blocks])
        self._fixed = _sums([block.fixed_bytes for block in blocks])
        self._products = _sums([block.product_bytes for block in blocks])
        self._sharing = SharingCosts(blocks) if any(block.shared for block in blocks) else None
        self._memory: dict[tuple[int, Demand], Memory] = {}
        self._overhead_s = 2 * microbatches * cluster.overhead_s
        # nothing is sent before the first block and after the last one
        self._crossing = np.array([0.0, *(float(block.output_bytes) for block in blocks[:-1]), 0.0])
        self._sent = np.array([0.0, *(float(block.crossing_bytes(compression)) for block in blocks[:-1]), 0.0])
        self._outputs = np.array([float(block.output_bytes) for block in blocks])
        # of products over rows, whose factors are the inputs and the gradients of the outputs
        factors = np.where([block.product_bytes > 0 for block in blocks], self._crossing[:-1] + self._outputs, 0.0)
        self._factors = _sums(factors.tolist())

    def ways(self, place: Place) -> list[Place]:
        """The same place with the kernels that a stage may have there."""
        if self._jit_compile is True:
            return [place._replace(compiled=True)]
        return [place._replace(compiled=compiled) for compiled in self._seconds]

    def chosen(self, place: Place, i: int, j: int) -> Place:
        """The same place with the kernels that blocks i to j-1 are to have there."""
        return min(self.ways(place), key=lambda way: self.compared(way).of(i, j))

    def compared(self, place: Place) -> Affine:
        """``seconds``, of compiled stages with a margin where there is a choice, so that noise does not decide."""
        seconds = self.seconds(place)
        if not place.compiled or self._jit_compile is True:
            return seconds
        return seconds.times(self._margin)

    def seconds(self, place: Place) -> Affine:
        """Seconds per minibatch of any blocks at this place."""
        device, replicas, after, compiled, predictions = place
        cluster, share = self.cluster, self._share(replicas)
        within = cluster.link(device, device + replicas - 1)
        latency_s = float(self._reduce_s(within, 0.0, None if self._summed is None else 0.0, replicas))
        sums = self._seconds[compiled]
        running = share * sums.compute_s + (1 + PREDICTING * predictions) * sums.update_s + self._steps_s
        running = running + _sums([sum(self.messages_s(block, replicas)) for block in self._chain])
        running = running + (self._reduce_s(within, self._weights, self._messages(replicas), replicas) - latency_s)
        # the widest way that rows may have to go; how far the next stage reaches, its own gradients' way says
        gradients = self._transfer(cluster.link(max(device - 1, 0), device + replicas - 1), share)
        activations = self._transfer(cluster.link(device, after), share)
        if self._coding is not None:  # either end of a cut encodes what it sends, and decodes what comes
            coding_s = np.array([0.0, *(share * sum(self.coding_s(block)) for block in self._chain[:-1]), 0.0])
            gradients, activations = gradients + coding_s, activations + coding_s
        beside = None
        if self._sharing:
            repeated_s = self._sharing.repeated_s([each.update_s for each in self._each(compiled)])
            more_s = self._sharing.repeated_s([each.step_s for each in self._chain])
            beside = self._summing_s(place) - (1 + PREDICTING * predictions) * repeated_s - more_s
        return Affine(running + activations + latency_s + self._overhead_s, running - gradients, beside)

    def coding_s(self, block: BlockProfile) -> tuple[float, float]:
        """Seconds to encode, and to decode, what crosses a cut right after a block, of a minibatch."""
        elements = block.crossing_elements(self._by)
        if self._coding is None or not elements:
            return 0.0, 0.0
        both = self._coding.encoding_s, self._coding.decoding_s
        encoding_s, decoding_s = (each(elements, self._microbatches) for each in both)
        return encoding_s, decoding_s

    def messages_s(self, block: BlockProfile, replicas: int) -> tuple[float, float]:
        """Seconds to make a message of a block's gradients, and of so many replicas' messages their sum."""
        elements = block.summed_elements(self._sums_by)
        if self._summing is None or replicas == 1 or not elements:
            return 0.0, 0.0
        return self._summing.summing_s(elements, replicas, self._feeds)

    def _messages(self, replicas: int) -> Floats | None:
        """What each of so many replicas sends each other, where gradients are compressed, by ``sent_to_each``."""
        return None if self._summed is None else self._summed + sent_to_each(self._rows, replicas)

    @staticmethod
    def _reduce_s(link: Link, size_bytes: Any, message_bytes: Any, replicas: int) -> Any:
        """Seconds in which replicas sum gradients of these sizes, or of such messages where they are compressed."""
        if message_bytes is None:
            return link.reduce_seconds(size_bytes, replicas)
        return link.exchange_seconds(message_bytes, replicas)

    def summing_s(self, place: Place, i: int, j: int) -> float:
        """Seconds in which blocks i to j-1 send gradients of weights that other stages have too, per minibatch."""
        return float(self._summing_s(place)[i, j]) if self._sharing else 0.0

    def _summing_s(self, place: Place) -> Floats:
        assert self._sharing is not None
        link = self.cluster.link(max(place.device - 1, 0), place.after)
        return np.where(self._sharing.shared_bytes > 0, link.seconds(self._sharing.shared_bytes), 0.0)

    def _each(self, compiled: bool) -> list[Seconds]:
        return [block.with_kernels(compiled) for block in self._chain]

    def memory(self, replicas: int, demand: Demand) -> Memory:
        """What one device of any blocks keeps.

        While a block runs backward, its inputs and outputs and the gradients of both are there too, and what passes of
        its weights, gradients and predicted ones; where replicas sum gradients, those of all blocks. So is what its
        kernels have for themselves. Where gradients are made once for all microbatches, the factors of which they are
        made take the place of their sums.
        """
        if (replicas, demand) not in self._memory:
            share = self._share(replicas)
            stays, passes = (0.0, demand.passing) if replicas == 1 else (demand.passing + self._of_messages, 0.0)
            running = (demand.weights + stays) * self._weights + self._fixed
            if replicas > 1:  # of rows nothing is kept or decoded
                running = running - self._of_messages * self._rows
            products = self._products if demand.factors and replicas == 1 else 0.0 * self._products
            running = running + demand.gradients * (self._weights - products)
            if demand.factors and replicas == 1:
                running = running + demand.factors * self._factors
            running = running + share * demand.activations * self._kept
            start = running - share * (demand.activations + demand.inputs) * self._crossing
            work = 2 * share * demand.work * (self._crossing[:-1] + self._outputs)
            rows = share * demand.work * self._batch_size
            work = work + [block.workspace_of(rows, self._batch_size) for block in self._chain]
            work = work + (passes + demand.beside) * np.diff(self._weights)
            beside = None
            if self._sharing:
                sums = demand.sums * self._sharing.shared_bytes
                beside = sums - (demand.weights + stays + demand.gradients) * self._sharing.repeated_bytes
            self._memory[replicas, demand] = Memory(Affine(running, start, beside), work)
        return self._memory[replicas, demand]

    def computing(self, i: int, j: int, compiled: bool) -> Seconds:
        """What blocks i to j-1 compute for a minibatch, with these kernels."""
        each = [block.with_kernels(compiled) for block in self._chain[i:j]]
        forward_s, backward_s, update_s = (
            sum(parts) for parts in zip(*((one.forward_s, one.backward_s, one.update_s) for one in each), strict=True)
        )
        if self._sharing:
            update_s -= self._sharing.repeated_s([one.update_s for one in self._each(compiled)])[i, j]
        return Seconds(forward_s, backward_s, update_s)

    def step_s(self, i: int, j: int) -> float:
        """What the optimizer's step for the weights of blocks i to j-1 takes beyond that of SGD with momentum."""
        repeated_s = self._sharing.repeated_s([each.step_s for each in self._chain])[i, j] if self._sharing else 0.0
        return float(self._steps_s[j] - self._steps_s[i] - repeated_s)

    def weight_bytes(self, i: int, j: int) -> int:
        """The trained weights of blocks i to j-1, each counted once."""
        repeated = self._sharing.repeated_bytes[i, j] if self._sharing else 0
        return sum(block.weight_bytes for block in self._chain[i:j]) - int(repeated)

    def shared_bytes(self, i: int, j: int) -> int:
        """Those of them that other blocks have too."""
        return int(self._sharing.shared_bytes[i, j]) if self._sharing else 0

    def products_s(self, i: int, j: int, compiled: bool) -> float:
        """What those weight gradients of blocks i to j-1 take that are made once a minibatch, with these kernels.

        Of a block's weights whose gradients are not all products over rows, it is as large a part as that of the bytes.
        """
        return sum(
            block.product_bytes / block.weight_bytes * self._weight_gradients_s(n, compiled)
            for n, block in enumerate(self._chain[i:j], i)
            if block.product_bytes
        )

    def late_s(self, i: int, j: int, compiled: bool) -> float:
        """What those weight gradients of blocks i to j-1 take that may be made after the inputs' gradients.

        Of a block's weights whose gradients cannot all wait, it is as large a part as that of the bytes.
        """
        seconds = 0.0
        for n, block in enumerate(self._chain[i:j], i):
            part = 1.0 if block.late_bytes is None else block.late_bytes / max(block.weight_bytes, 1)
            seconds += part * self._weight_gradients_s(n, compiled)
        return seconds

    def _weight_gradients_s(self, n: int, compiled: bool) -> float:
        """What the gradients of block n's weights take.

        They are taken to be half of its backward, the other half being the gradients of its inputs: as in a product or
        a convolution, whose two gradients take as many operations. The first block that is trained has no gradients of
        its inputs; where nothing is known of a block's weight gradients, it has.
        """
        block = self._chain[n]
        alone = n == self._first_trained and block.late_bytes is not None
        return block.with_kernels(compiled).backward_s * (1.0 if alone else 0.5)

    def sent_bytes(self, i: int, j: int, replicas: int) -> float:
        """Bytes that all devices of the stage send per minibatch: activations, gradients, and gradients to sum."""
        summed, messages = float(2 * (replicas - 1) * self.weight_bytes(i, j)), self._messages(replicas)
        if messages is not None:
            summed = replicas * (replicas - 1) * (messages[j] - messages[i])
        return float(self._sent[i] + self._sent[j] + summed + self.shared_bytes(i, j))

    def _share(self, replicas: int) -> float:
        """The largest part of a minibatch's rows that one of so many replicas gets."""
        return math.ceil(self._batch_size / replicas) / self._batch_size

    def _transfer(self, link: Link, share: float) -> Floats:
        """Seconds to send what crosses each cut; none at the ends of the chain."""
        seconds = np.asarray(link.seconds(self._sent * share))
        seconds[[0, -1]] = 0.0
        return seconds


def sent_to_each(rows_bytes: Any, replicas: int) -> Any:
    """What each of so many replicas sends each other of gradients that are sent as they are: a part, and its sum."""
    return 2 / replicas * rows_bytes


class _Sums:
    """Of the seconds of blocks, from the first one on: of forward and backward, and of updates."""

    def __init__(self, seconds: Sequence[Seconds]) -> None:
        self.compute_s = _sums([each.forward_s + each.backward_s for each in seconds])
        self.update_s = _sums([each.update_s for each in seconds])


def _sums(values: Sequence[float]) -> Floats:
    return np.concatenate([[0.0], np.cumsum(np.asarray(values, dtype=np.float64))])
