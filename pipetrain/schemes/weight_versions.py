"""The versions of one stage's weights that are held, and for how long."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from pipetrain.schemes.policies import Read
from pipetrain.schemes.scheme import Scheme


class WeightVersions:
    """The versions of one stage's weights that some action still has to read.

    Weights may be anything: integers, arrays, tensors. ``newest(horizon)`` gives the newest version, moved that many
    updates ahead, which only the newest can be, for the velocity belongs to it; ``keep(horizon)`` gives it in a form
    that later updates leave alone. Memory: an old version is held only while an action will still read it, and a
    predicted one only if a later version's action reads it again. So weight stashing holds ``N-k-1`` besides the newest
    at stage k, ``2bw`` one, and vanilla and SpecTrain none.

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
        newest: Callable[[int], Any],
        keep: Callable[[int], Any],
        first: int | None = None,
    ) -> None:
        policy = scheme.policy

        @lru_cache(maxsize=4 * stages * microbatches)  # they are asked for often
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
        self._kept: dict[int, Any] = {}
        self._predicted: dict[int, Any] = {}  # by microbatch, for its backward
        self._next_forward = self._next_backward = 0
        self.version = 0

    def forward(self, microbatch: int) -> Any:
        """The weights of F(microbatch)."""
        self._next_forward = max(self._next_forward, microbatch + 1)
        read, again, _, current = self._reads(microbatch)
        if read.horizon and read.version < current and read == again:
            self._predicted[microbatch] = self._keep(read.horizon)
            return self._predicted[microbatch]
        return self._resolve(read)

    def backward(self, microbatch: int) -> Any:
        """The weights of B(microbatch)."""
        self._next_backward = max(self._next_backward, microbatch + 1)
        if microbatch in self._predicted:
            return self._predicted.pop(microbatch)
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
        """Call just before the weights change: keeps the newest if an action still reads it, forgets what none will."""
        read = self._reads(self._next_backward)[1]
        oldest = self.version + 1 if read.horizon else read.version  # what is predicted comes from the newest then
        forward, _, found, _ = self._reads(self._next_forward)
        if found > self.version:  # else the schedule has the next forward before this update: there is none, it drains
            oldest = min(oldest, forward.version)
        if self.version >= oldest:
            self._kept[self.version] = self._keep(0)
        if self._kept:
            self._kept = {version: weights for version, weights in self._kept.items() if version >= oldest}
        self.version += 1

    @property
    def old(self) -> set[int]:
        """Old versions that are held."""
        return set(self._kept)

    @property
    def kept(self) -> int:
        """Versions held besides the newest."""
        return len(self._kept) + len(self._predicted)

    def _resolve(self, read: Read) -> Any:
        return self._newest(read.horizon) if read.version == self.version else self._kept[read.version]
