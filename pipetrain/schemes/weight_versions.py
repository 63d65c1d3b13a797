"""The versions of one stage's weights that are held, and for how long."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

from pipetrain.schemes.policies import Read
from pipetrain.schemes.scheme import Scheme


class HeldVersions(NamedTuple):
    """What ``WeightVersions`` knows between two actions, counted from some minibatch on: so it is the same again.

    ``kept`` are the old weights, by version and horizon; the others are the newest version, and the next microbatches.
    """

    version: int
    next_forward: int
    next_backward: int
    kept: dict[tuple[int, float], Any]


def steady_staleness(scheme: Scheme, stage: int, stages: int, microbatches: int) -> int:
    """What ``WeightVersions.staleness`` is of a minibatch that finds all stages full, of a stage's own weights."""

    def nothing(horizon: float) -> None:
        return None

    versions = WeightVersions(scheme, stage, stages, microbatches, nothing, nothing)
    return versions.staleness(2 * stages * microbatches)


class WeightVersions:
    """The versions of one stage's weights that some action still has to read.

    Weights may be anything: integers, arrays, tensors. ``newest(horizon)`` gives the newest version, moved that many
    updates ahead; ``keep(horizon)`` gives it in a form that later updates leave alone. Only the newest can be moved,
    for the velocity belongs to it: what will be read of it when it is old is kept as it will be read. Memory: an old
    version is held only while an action will still read it. So weight stashing holds ``N-k-1`` besides the newest at
    stage k, ``2bw`` one, predicted or not, and vanilla and SpecTrain none.

    Of weights that stages share the newest is read where a policy asks for a later version than has come to the stage.

    Args:
        scheme: whose policy chooses and whose schedule says what a forward finds.
        stage: k.
        stages: N.
        microbatches: M, of a minibatch.
        newest: see above.
        keep: see above.
        first: the first of the stages that share the weights; None for the stage's own.
    """

    def __init__(
        self,
        scheme: Scheme,
        stage: int,
        stages: int,
        microbatches: int,
        newest: Callable[[float], Any],
        keep: Callable[[float], Any],
        first: int | None = None,
    ) -> None:
        policy = scheme.policy
        self._ahead = 4 * stages * microbatches  # no action reads a version that is so many microbatches old

        @lru_cache(maxsize=2 * self._ahead)  # they are asked for often
        def reads(microbatch: int) -> tuple[Read, Read, int, int]:
            """Of F(m) and of B(m), and the versions that these find."""
            reader = scheme.reader(microbatch, stage, stages, microbatches, first)
            forward, backward = policy.forward(reader), policy.backward(reader)
            newest, current = reader.newest(), reader.current()
            if first is not None:  # a policy that knows nothing of shared weights asks for what has not come yet
                forward = forward._replace(version=min(forward.version, newest))
                backward = backward._replace(version=min(backward.version, current))
            return forward, backward, newest, current

        self._reads, self._microbatches = reads, microbatches
        self._newest, self._keep = newest, keep
        self._kept: dict[Read, Any] = {}
        self._next_forward = self._next_backward = 0
        self.version = 0

    def held(self, since: int) -> HeldVersions:
        """What is known now, counted from this minibatch on."""
        kept = {(read.version - since, read.horizon): weights for read, weights in self._kept.items()}
        first = since * self._microbatches
        return HeldVersions(self.version - since, self._next_forward - first, self._next_backward - first, kept)

    def resume(self, held: HeldVersions, since: int) -> None:
        """Go on from there, counted from this minibatch on."""
        first = since * self._microbatches
        self.version = held.version + since
        self._next_forward, self._next_backward = held.next_forward + first, held.next_backward + first
        self._kept = {Read(version + since, horizon): weights for (version, horizon), weights in held.kept.items()}

    def reads(self, microbatch: int) -> tuple[Read, Read]:
        """What F(microbatch) and B(microbatch) read, versions counted from their minibatch on."""
        forward, backward, *_ = self._reads(microbatch)
        since = microbatch // self._microbatches
        return Read(forward.version - since, forward.horizon), Read(backward.version - since, backward.horizon)

    def forward(self, microbatch: int) -> Any:
        """The weights of F(microbatch)."""
        self._next_forward = max(self._next_forward, microbatch + 1)
        return self._resolve(self._reads(microbatch)[0])

    def backward(self, microbatch: int) -> Any:
        """The weights of B(microbatch)."""
        self._next_backward = max(self._next_backward, microbatch + 1)
        return self._resolve(self._reads(microbatch)[1])

    def found(self, microbatch: int, backward: bool) -> int:
        """The version that F(microbatch) finds, or B(microbatch)."""
        *_, newest, current = self._reads(microbatch)
        return current if backward else newest

    def lasts(self, microbatch: int) -> bool:
        """Whether B(microbatch) reads the same weights as F(microbatch), the newest both times."""
        forward, backward, *_ = self._reads(microbatch)
        return forward == backward

    def staleness(self, microbatch: int) -> int:
        """Updates between the version that F(microbatch) reads and the one that its gradient is applied to."""
        return microbatch // self._microbatches - self._reads(microbatch)[0].version

    def before_update(self) -> None:
        """Call just before the weights change: keeps the newest as actions still read it, forgets what none will."""
        reads = {*self._still_read()}
        if self._kept:
            self._kept = {read: weights for read, weights in self._kept.items() if read in reads}
        for read in reads:
            if read.version == self.version:
                self._kept[read] = self._keep(read.horizon)
        self.version += 1

    def _still_read(self) -> Iterator[Read]:
        """What actions to come read of the versions up to this one. Later actions read later versions, or the same."""
        for microbatch in range(self._next_backward, self._next_backward + self._ahead):
            read = self._reads(microbatch)[1]
            if read.version > self.version:
                break
            yield read
        for microbatch in range(self._next_forward, self._next_forward + self._ahead):
            read, _, found, _ = self._reads(microbatch)
            if found <= self.version or read.version > self.version:
                break  # the schedule has a forward that finds this version before the update: there is none, it drains
            yield read

    @property
    def old(self) -> set[Read]:
        """What is held of old versions."""
        return set(self._kept)

    @property
    def kept(self) -> int:
        """Copies held besides the newest version."""
        return len(self._kept)

    def _resolve(self, read: Read) -> Any:
        return self._newest(read.horizon) if read.version == self.version else self._kept[read]
