"""A scheme: an order of actions, the weights that they read, and corrections of updates for staleness."""

from __future__ import annotations

from typing import NamedTuple

from pipetrain.schemes.policies import Policy, Reader
from pipetrain.schemes.schedules import Schedule


class UpdateRule(NamedTuple):
    """What the updates of one stage do in addition to the optimizer's own step.

    ``predicts``: the velocity is wanted; ``furthest``: for no more updates ahead than these (0: for any number);
    ``fit_horizon``: over so many updates its best multiple is learnt (0: not); ``spikes``, ``rescale_steps``: see
    ``staleness_corrections``.
    """

    predicts: bool = False
    furthest: int = 0
    fit_horizon: int = 0
    spikes: bool = False
    rescale_steps: int = 0

    @property
    def corrects(self) -> bool:
        """Whether an update depends on the staleness of its gradient."""
        return self.spikes or self.rescale_steps > 0


class Scheme(NamedTuple):
    """A way to train: the order of actions, the weights they read, and a line of description.

    Your own scheme is accepted wherever a name is: ``PipelineModel(model, scheme=Scheme(...))``.

    ``trains``: whether every forward is followed by a backward. ``splits``: whether minibatches are divided into
    microbatches. ``fits``: whether predictions use a fitted multiple of the velocity. ``spikes`` and ``rescale_steps``:
    spike compensation, and the steps over which rates are rescaled by staleness (0: not).
    """

    name: str
    schedule: Schedule
    policy: Policy
    about: str = ""
    trains: bool = True
    splits: bool = False
    fits: bool = False
    spikes: bool = False
    rescale_steps: int = 0

    def __str__(self) -> str:
        return self.name

    @property
    def asynchronous(self) -> bool:
        """Whether several minibatches are in flight at once."""
        return not self.schedule.flushes

    def reader(self, microbatch: int, stage: int, stages: int, microbatches: int) -> Reader:
        """Microbatch m at stage k of N, M of them being a minibatch, for the policy."""
        return Reader(microbatch, stage, stages, microbatches, self.schedule.found)

    def rule(self, stage: int, stages: int) -> UpdateRule:
        """The rule for the updates of stage k of N."""
        steady = self.reader(2 * stages, stage, stages, 1)  # a minibatch that finds the pipeline full
        furthest = self.policy.forward(steady).horizon
        return UpdateRule(self.policy.predicts, furthest, furthest if self.fits else 0, self.spikes, self.rescale_steps)

    def least_microbatches(self, stages: int) -> int:
        """The smallest number of microbatches with which every weight version is there in time."""
        return max(1, stages - 1) if self.splits and self.asynchronous else 1
