"""The memory that a stage needs on a device during training."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from pipetrain.schemes.actions import Action, completes
from pipetrain.schemes.schedules import groups_of, peak_in_flight
from pipetrain.schemes.scheme import Scheme
from pipetrain.schemes.table import HORIZONS, scheme, takes
from pipetrain.schemes.validation import check_own
from pipetrain.schemes.weight_versions import WeightVersions


class Training(NamedTuple):
    """The settings of training that determine its memory and its time.

    ``slots`` are the optimizer's variables per weight: 1 for SGD with momentum, 2 for Adam, one more where it averages
    weights or accumulates gradients; ``gathers``: whether all gradients of a stage are there before the first is used,
    as with all optimizers but SGD with momentum, and there too where gradients are clipped or accumulated, weights
    constrained or overwritten by averages, spikes compensated or Nesterov momentum predicted.
    ``jit_compile``: whether XLA compiles the stages, as in Keras; ``"auto"``: those that it makes clearly faster.
    ``stretch_momentum``: as ``schemes.table.scheme`` takes it; ``"auto"`` counts as for an optimizer with a momentum.
    """

    scheme: str | Scheme = "spectrain"
    slots: int = 1
    microbatches: int = 1
    recompute: bool = False
    horizon: str | float = HORIZONS[0]
    gathers: bool = False
    jit_compile: bool | str = "auto"
    stretch_momentum: bool | str = "auto"

    @property
    def chosen(self) -> Scheme:
        """The scheme itself."""
        return scheme(self.scheme, self.horizon, stretch_momentum=self.stretch_momentum)

    def microbatches_of(self, stages: int) -> int:
        """How many microbatches a minibatch has in a pipeline of so many stages."""
        chosen = self.chosen
        return max(self.microbatches, chosen.least_microbatches(stages)) if chosen.splits else 1

    def under(self, scheme: str | Scheme) -> Training:
        """The same with another scheme, which may not have this horizon."""
        if takes(scheme, self.horizon):
            return self._replace(scheme=scheme)
        return self._replace(scheme=scheme, horizon=HORIZONS[0], stretch_momentum="auto")


class Demand(NamedTuple):
    """What a stage keeps at its fullest, in multiples of its weights' bytes and of one minibatch's activations.

    ``inputs`` counts minibatches of which only the stage's inputs are kept, ``work`` those a block works on at once.
    ``passing`` are what a block needs beside in multiples of its own weights, while it is at work: gradients and
    predicted weights; all blocks at once where replicas sum their gradients. ``sums`` are the gradients of weights that
    other stages have too, in multiples of these weights, that wait to be summed or used.
    """

    weights: float
    activations: float
    inputs: float = 0.0
    work: float = 1.0
    passing: float = 0.0
    sums: float = 0.0


def demand(training: Training, stage: int, stages: int) -> Demand:
    """The demand of stage k of N: a dry run of its schedule, with integers for weights.

    Weights: the newest, the optimizer's slots, every old version that is still to be read, as it will be read; where
    the multiple of the velocity is fitted, the weights and the velocity that the observation under
    way began with, and at its end how far the weights have gone. Gradients are there while their block is at work and
    until its weights are updated, unless the optimizer gathers them or those of several microbatches are summed, and
    likewise what is predicted to be read once. Sums of shared weights' gradients go up and down the pipeline, each
    way in the time of ``N-1`` actions, and wait on the devices between which they go, half of them on each.
    Activations: of all microbatches in flight; with recomputation of one, and the inputs of the others.

    Raises ScheduleError, a ValueError, for a scheme of one's own that cannot run.
    """
    training.chosen.check()
    return _demand(training, stage, stages)


@cache
def _demand(training: Training, stage: int, stages: int) -> Demand:
    trained, microbatches = training.chosen, training.microbatches_of(stages)
    check_own(trained, stages, microbatches)
    order = _order(training, stage, stages)
    in_flight = peak_in_flight(order) / microbatches
    versions = WeightVersions(trained, stage, stages, microbatches, newest=lambda ahead: ahead, keep=lambda ahead: 0)
    observed = 2 if trained.rule(stage, stages, microbatches).fit_horizon else 0
    gathers = microbatches > 1 or training.gathers or trained.spikes
    more, passing = _beside(order, versions, microbatches, gathers, stage == stages - 1, observed)
    weights: float = 1 + training.slots + observed + more
    sums = 1 + ((stages - 1) / 2 if trained.asynchronous and microbatches == 1 else 0)
    if not training.recompute:
        return Demand(weights, in_flight, work=1 / microbatches, passing=passing, sums=sums)
    if not versions.lasts(3 * stages * microbatches):  # every forward's weights are kept for running it again
        weights += in_flight - (0 if trained.policy.predicts else 1)
    return Demand(weights, 1 / microbatches, in_flight, 1 / microbatches, passing, sums)


def _order(training: Training, stage: int, stages: int) -> list[Action]:
    """The stage's own actions in its device's order, for as many minibatches as fill the pipeline."""
    schedule, groups = training.chosen.schedule, groups_of(3 * stages, training.microbatches_of(stages))
    devices = schedule.devices(stages)
    return [each for each in schedule.order(schedule.place(stage, devices), devices, groups) if each.stage == stage]


def _beside(
    order: list[Action], versions: WeightVersions, microbatches: int, gathers: bool, last: bool, observed: int
) -> tuple[int, int]:
    """The most copies beside the newest weights, and the most that pass while a block is at work.

    Of weights: old versions, and predicted ones. Of gradients: this microbatch's, the sum so far, and the new sum.
    """
    more, passing, gathered = 0, 0, 0
    for action, completed in zip(order, completes(order, microbatches), strict=True):
        before, held, predicted = versions.kept, versions.old, 0
        for way in action.operation.reads:
            read = (versions.forward if way == "forward" else versions.backward)(action.microbatch)
            predicted = 1 if read else predicted  # and not kept
        gradients = 1 + 2 * gathered if action.updates else gathered
        whole = gradients if gathers else 0
        if predicted and last:  # for the forward, and the backward in the same call
            whole, predicted = whole + predicted, 0
        passing = max(passing, predicted + (1 if action.updates and not gathers else 0))
        more = max(more, max(before, versions.kept) + whole)  # it may be given what was kept for it
        gathered = 1 if action.updates else gathered
        if completed:
            gathered = 0
            versions.before_update()
            held |= versions.old  # what the update's own backward has read is there until it ends
            more = max(more, len(held) + (1 if gathers or observed else 0))
    return more, passing
