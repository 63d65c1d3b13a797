"""Which replica of which stage this is, and what of a microbatch it has."""

from __future__ import annotations

from pipetrain.compute.program.stage_trace import StagePlace
from pipetrain.run.messages import Microbatch
from pipetrain.schemes.splitting import rows_of


class StageId(StagePlace):
    """A place of a pipeline, and what it has of each microbatch."""

    def rows(self, microbatch: Microbatch) -> range:
        """Its rows of the microbatch."""
        return rows_of(microbatch.rows, self.replica, self.replicas)

    def with_own_share(self, microbatch: Microbatch) -> Microbatch:
        """The microbatch with the share of the minibatch that this replica's rows are."""
        if self.replicas == 1:
            return microbatch
        return microbatch._replace(share=microbatch.share * self._fraction(microbatch))

    def with_own_penalty(self, microbatch: Microbatch) -> Microbatch:
        """The microbatch with what this replica contributes to the penalty of all replicas' rows."""
        if microbatch.penalty is None or self.replicas == 1:
            return microbatch
        return microbatch._replace(penalty=microbatch.penalty * self._fraction(microbatch))

    def _fraction(self, microbatch: Microbatch) -> float:
        """Its share of the microbatch's rows."""
        return len(self.rows(microbatch)) / microbatch.rows if microbatch.rows else 1 / self.replicas
