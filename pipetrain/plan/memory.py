"""What a stage keeps in a device's memory while it trains."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from pipetrain.schemes.schedules import peak_in_flight
from pipetrain.schemes.table import HORIZONS, has, scheme
from pipetrain.schemes.weight_versions import WeightVersions


class Training(NamedTuple):
    """How a model is trained, as far as its memory goes.

    ``slots`` are the optimizer's variables per weight: 1 for SGD with momentum, 2 for Adam; ``gathers``: whether all
    gradients of a stage are there before the first is used, as with all optimizers but SGD with momentum, and there
    too where gradients are clipped, weights constrained, spikes compensated or Nesterov momentum predicted.
    """

    scheme: str = "spectrain"
    slots: int = 1
    microbatches: int = 1
    recompute: bool = False
    horizon: str = HORIZONS[0]
    gathers: bool = False

    def under(self, scheme: str) -> Training:
        """The same with another scheme, which may have no horizon."""
        return self._replace(scheme=scheme, horizon=self.horizon if has(scheme, "horizon") else HORIZONS[0])


class Demand(NamedTuple):
    """What a stage keeps at its fullest, in multiples of its weights' bytes and of one minibatch's activations.

    ``inputs`` counts minibatches of which only the stage's inputs are kept, ``work`` those a block works on at once.
    ``passing`` are what a block needs beside in multiples of its own weights, while it is at work: gradients and
    predicted weights; all blocks at once where replicas sum their gradients.
    """

    weights: float
    activations: float
    inputs: float = 0.0
    work: float = 1.0
    passing: float = 0.0


@cache
def demand(training: Training, stage: int, stages: int) -> Demand:
    """The demand of stage k of N: a dry run of its schedule, with integers for weights.

    Weights: the newest, the optimizer's slots, every old version that is still to be read, predicted copies that are
    read again; where the multiple of the velocity is fitted, the weights and the velocity that the observation under
    way began with, and at its end how far the weights have gone. Gradients are there while their block is at work and
    until its weights are updated, unless the optimizer gathers them or those of several microbatches are summed, and
    likewise what is predicted to be read once. Activations: of all microbatches in flight; with recomputation of one,
    and the inputs of the others.
    """
    trained = scheme(training.scheme, training.horizon)
    pieces = max(training.microbatches, trained.least_microbatches(stages)) if trained.splits else 1
    groups = [range(i * pieces, (i + 1) * pieces) for i in range(3 * stages)]
    order = list(trained.schedule(stage, stages, groups))
    in_flight = peak_in_flight(order) / pieces
    versions = WeightVersions(trained.policy, stage, stages, newest=lambda horizon: horizon, keep=lambda horizon: 0)
    observed = 2 if trained.rule(stage, stages).fit_horizon else 0
    gathers = pieces > 1 or training.gathers or trained.spikes
    more, passing, gathered = 0, 0, 0
    for action in order:
        minibatch, piece = divmod(action.minibatch, pieces)
        forward, before, held = action.op == "F", versions.kept, versions.old
        predicted = 1 if (versions.forward if forward else versions.backward)(minibatch) else 0  # and not kept
        gradients = gathered if forward else 1 + 2 * gathered  # this microbatch's, the sum so far, and the new sum
        whole = gradients if gathers else 0
        if predicted and stage == stages - 1:  # for the forward, and the backward in the same call
            whole, predicted = whole + predicted, 0
        passing = max(passing, predicted + (0 if gathers or forward else 1))
        more = max(more, max(before, versions.kept) + whole)  # it may be given what was kept for it
        if not forward:
            gathered = 1 if piece < pieces - 1 else 0
            if not gathered:
                versions.before_update()
                held |= versions.old  # what the update's own backward has read is there until it ends
                more = max(more, len(held) + (1 if gathers or observed else 0))
    weights: float = 1 + training.slots + observed + more
    if not training.recompute:
        return Demand(weights, in_flight, work=1 / pieces, passing=passing)
    if not versions.lasts(3 * stages):  # every forward's weights are kept for running it again
        weights += in_flight - (0 if trained.policy.predicts else 1)
    return Demand(weights, 1 / pieces, in_flight, 1 / pieces, passing)
