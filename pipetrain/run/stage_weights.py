"""The weights that a stage's actions read: its own, and its copies of those that it shares with other stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from pipetrain.compute.functions.inference import Replica
from pipetrain.compute.functions.stage import Stage
from pipetrain.compute.functions.weight_binding import Newest, OfGroups
from pipetrain.run.shared_gradients import SharedGradients
from pipetrain.run.shared_weights import SharedWeights
from pipetrain.run.stage_id import StageId
from pipetrain.schemes.scheme import Scheme
from pipetrain.schemes.weight_versions import WeightVersions


class StageWeights:
    """What the forwards and backwards of one replica of a stage read, from one start of a pipeline to one drain.

    Args:
        identity: which replica of which stage.
        stage: its functions and weights.
        scheme: which versions are read.
        microbatches: of a minibatch.
        exchanges: for each group of weights that the stage shares, what the stages send each other.

    ``own`` are the versions of the stage's own weights, ``shared`` its copies of weights that others have too.
    """

    def __init__(
        self,
        identity: StageId,
        stage: Replica,
        scheme: Scheme,
        microbatches: int,
        exchanges: Sequence[SharedGradients],
    ) -> None:
        self._stage = cast(Stage, stage)  # one that trains, where its weights change
        place = scheme, identity.stage, identity.stages, microbatches
        self.own = WeightVersions(*place, Newest, lambda ahead: stage.weights(Newest(ahead)))
        self.shared = [
            SharedWeights(identity, self._stage, group, exchange, place)
            for group, exchange in zip(stage.shared, exchanges, strict=True)
        ]
        self._versions = [self.own, *(each.versions for each in self.shared)]

    def forward(self, microbatch: int) -> Any:
        """The weights of F(microbatch); waits for updates of shared weights that it finds."""
        return self._read(WeightVersions.forward, microbatch, backward=False)

    def backward(self, microbatch: int) -> Any:
        """The weights of B(microbatch); waits for updates of shared weights that it finds."""
        return self._read(WeightVersions.backward, microbatch, backward=True)

    def last(self, microbatch: int) -> bool:
        """Whether B(microbatch) reads the same weights as F(microbatch)."""
        return not self._stage.changed and all(each.lasts(microbatch) for each in self._versions)

    def catch_up(self) -> None:
        """After the last action: let all copies of shared weights be equal."""
        for each in self.shared:
            each.catch_up(self.own.version)

    def _read(self, read: Callable[[WeightVersions, int], Any], microbatch: int, backward: bool) -> Any:
        if not self.shared:
            return read(self.own, microbatch)
        for each in self.shared:
            each.catch_up(each.versions.found(microbatch, backward))
        return OfGroups(tuple(read(each, microbatch) for each in self._versions))
