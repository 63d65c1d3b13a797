"""The memory that a stage needs on a device during training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

from pipetrain.schemes.actions import Action, completes
from pipetrain.schemes.options import AnyScheme, built, scheduled
from pipetrain.schemes.policies import FlushPolicy
from pipetrain.schemes.schedules import groups_of, has_halves
from pipetrain.schemes.scheme import Scheme
from pipetrain.schemes.text_form import microbatches_of
from pipetrain.schemes.validation import check_own
from pipetrain.schemes.weight_versions import WeightVersions


class Training(NamedTuple):
    """The settings of training that determine its memory and its time.

    ``slots`` are the optimizer's variables per weight: 1 for SGD with momentum, 2 for Adam, one more where it averages
    weights or accumulates gradients; ``gathers``: whether all gradients of a stage are there before the first is used,
    as with all optimizers but SGD with momentum, and there too where gradients are clipped or accumulated,
    weights constrained or overwritten by averages, spikes compensated or Nesterov momentum predicted; ``temporaries``:
    what the update of a weight makes beside its gradient, in multiples of the weight: two with Keras' operations
    (Adam's ``m * rate`` and ``sqrt(v) + epsilon``), none where one kernel does it all, as for SGD with momentum.
    ``jit_compile``: whether XLA compiles the stages, as in Keras; ``"auto"``: those that it makes clearly faster, none
    where backwards are in halves.
    ``scheme`` has its options; a momentum that is stretched where the optimizer's is known counts as known.
    """

    scheme: AnyScheme = "spectrain"
    slots: int = 1
    microbatches: int = 1
    recompute: bool = False
    gathers: bool = False
    jit_compile: bool | str = "auto"
    temporaries: int = 0

    @property
    def chosen(self) -> Scheme:
        """The scheme itself."""
        return built(self.scheme)

    def microbatches_of(self, stages: int) -> int:
        """How many microbatches a minibatch has in a pipeline of so many stages."""
        chosen = self.chosen
        return max(self.microbatches, chosen.least_microbatches(stages)) if chosen.splits else 1

    def kernels(self, stages: int) -> bool | str:
        """``jit_compile`` for so many stages; False where it is open and backwards are in halves.

        A profile says what XLA makes of a whole backward. Its halves share less: with them no network that was measured
        trained faster than with TensorFlow's kernels.
        """
        schedule, pieces = self.chosen.schedule, self.microbatches_of(stages)
        is_open = self.jit_compile == "auto"
        halved = is_open and has_halves(schedule.order, schedule.devices(stages), pieces)
        return False if halved else self.jit_compile

    def under(self, scheme: AnyScheme) -> Training:
        """The same with another scheme, if of a file with its own microbatches; this one's name keeps its options."""
        if isinstance(scheme, str) and scheme == str(self.scheme):
            return self
        return self._replace(scheme=scheme, microbatches=microbatches_of(scheduled(scheme)) or self.microbatches)


class Demand(NamedTuple):
    """What a stage keeps at its fullest, in multiples of its weights' bytes and of one minibatch's activations.

    ``inputs`` counts minibatches of which only the stage's inputs are kept, ``work`` those a block works on at once.
    ``passing`` are what a block needs beside in multiples of its own weights, while it is at work: gradients and
    predicted weights; all blocks at once where replicas sum their gradients. ``sums`` are the gradients of weights that
    other stages have too, in multiples of these weights, that wait to be summed or used. ``gradients`` are sums over
    the microbatches so far; ``factors`` the minibatches of which, in place of such sums, the factors of products over
    rows wait to be joined, where the gradients of a block are made of these once for all microbatches. ``beside`` is
    what the update of a block's weights makes beside their gradients, in multiples of them.
    """

    weights: float
    activations: float
    inputs: float = 0.0
    work: float = 1.0
    passing: float = 0.0
    sums: float = 0.0
    gradients: float = 0.0
    factors: float = 0.0
    beside: float = 0.0


def demand(training: Training, stage: int, stages: int) -> Demand:
    """The demand of stage k of N: a dry run of its schedule, with integers for weights.

    Weights: the newest, the optimizer's slots, every old version that is still to be read, as it will be read; where
    the multiple of the velocity is fitted, the weights and the velocity that the observation under
    way began with, and at its end how far the weights have gone. Gradients are there while their block is at work and
    until its weights are updated, unless the optimizer gathers them, and likewise what is predicted to be read once,
    and what an update makes beside. Of several microbatches the sum so far and the new one are there; of products over
    rows their factors instead, as many as there have been microbatches. Sums of shared weights' gradients go up and
    down the pipeline, each way in the time of ``N-1`` actions, and wait on the devices between which they go, half of
    them on each.
    Activations: of all microbatches in flight; with recomputation of one, and the inputs of the others.

    Raises ScheduleError, a ValueError, for a scheme of one's own that cannot run.
    """
    training.chosen.check()
    return _demand(training, stage, stages)


class Holding(NamedTuple):
    """What a stage holds beside what it always does.

    Of microbatches the activations, or operands for W; copies of its weights: old versions, gathered gradients; of each
    block's weights while the block is at work; sums of gradients over microbatches; and of microbatches the factors of
    weight gradients that are made later; what an update makes beside.
    """

    microbatches: float
    copies: float
    passing: int = 0
    gradients: float = 0
    factors: float = 0
    beside: int = 0


class Moment(NamedTuple):
    """What a device holds during an action of a stage: of all its stages in order."""

    stage: int
    holdings: tuple[Holding, ...]


@cache
def _demand(training: Training, stage: int, stages: int) -> Demand:
    trained, microbatches = training.chosen, training.microbatches_of(stages)
    check_own(trained, stages, microbatches)
    order = [
        each
        for each in _order(training, trained.schedule.place(stage, trained.schedule.devices(stages)), stages)
        if each.stage == stage
    ]
    during = (during for during, _ in _holdings(training, stage, stages, order))
    return demand_of(training, stage, stages, Holding(*map(max, zip(*during, strict=True))))


def even_demand(training: Training, stage: int, stages: int) -> Demand:
    """The demand of each of a device's stages if they hold equal parts of the most that they hold together.

    ``demand`` is that of a stage at its own fullest, which is when the others hold less.
    """
    schedule = training.chosen.schedule
    each = [moment.holdings for moment in moments(training, schedule.place(stage, schedule.devices(stages)), stages)]
    microbatches = max(sum(holding.microbatches for holding in holdings) for holdings in each)
    copies = max(sum(holding.copies for holding in holdings) for holdings in each)
    passing = max(holding.passing for holdings in each for holding in holdings)
    gradients = max(sum(holding.gradients for holding in holdings) for holdings in each)
    factors = max(sum(holding.factors for holding in holdings) for holdings in each)
    most = (each / schedule.chunks for each in (microbatches, copies, gradients, factors))
    microbatches, copies, gradients, factors = most
    holding = Holding(microbatches, copies, passing, gradients, factors, training.temporaries)
    return demand_of(training, stage, stages, holding)


@cache
def moments(training: Training, device: int, stages: int) -> tuple[Moment, ...]:
    """What a device holds during its actions, each different moment once."""
    schedule = training.chosen.schedule
    check_own(training.chosen, stages, training.microbatches_of(stages))
    order = _order(training, device, stages)
    own = {
        stage: _holdings(training, stage, stages, [each for each in order if each.stage == stage])
        for stage in schedule.stages_on(device, stages)
    }
    now = dict.fromkeys(own, Holding(0, 0))
    found: dict[Moment, None] = {}
    for action in order:
        during, after = next(own[action.stage])
        found[Moment(action.stage, tuple((now | {action.stage: during}).values()))] = None
        now[action.stage] = after
    return tuple(found)


def demand_of(training: Training, stage: int, stages: int, holding: Holding, works: bool = True) -> Demand:
    """The demand of stage k of N while it holds this, and one of its actions ``works`` or none does."""
    trained, microbatches = training.chosen, training.microbatches_of(stages)
    observed = _observed(training, stage, stages)
    weights: float = 1 + training.slots + observed + holding.copies
    sums = 1 + ((stages - 1) / 2 if trained.asynchronous and microbatches == 1 else 0)
    in_flight, work = holding.microbatches / microbatches, works / microbatches
    summed = holding.gradients, holding.factors / microbatches
    others = holding.passing, sums, *summed, *holding[5:]
    if not training.recompute:
        return Demand(weights, in_flight, 0.0, work, *others)
    if not _versions(training, stage, stages).lasts(3 * stages * microbatches):
        weights += in_flight - (0 if trained.policy.predicts else 1)  # every forward's, for running it again
    return Demand(weights, work, in_flight, work, *others)


def _versions(training: Training, stage: int, stages: int) -> WeightVersions:
    """Integers for weights."""
    microbatches = training.microbatches_of(stages)
    return WeightVersions(
        training.chosen, stage, stages, microbatches, newest=lambda ahead: ahead, keep=lambda ahead: 0
    )


def _observed(training: Training, stage: int, stages: int) -> int:
    """The copies that fitting a multiple of the velocity takes."""
    return 2 if training.chosen.rule(stage, stages, training.microbatches_of(stages)).fit_horizon else 0


def _order(training: Training, device: int, stages: int) -> list[Action]:
    """A device's order, for as many minibatches as fill the pipeline, or show what lasts from one to the next."""
    schedule, policy = training.chosen.schedule, training.chosen.policy
    minibatches = 2 if schedule.flushes and isinstance(policy, FlushPolicy) else 3 * stages
    groups = groups_of(minibatches, training.microbatches_of(stages))
    return [*schedule.order(device, schedule.devices(stages), groups)]


def _holdings(
    training: Training, stage: int, stages: int, order: Sequence[Action]
) -> Iterator[tuple[Holding, Holding]]:
    """What a stage holds at most during each of its actions, and after it.

    Copies of weights: old versions, and predicted ones. Where one device's backwards are whole, factors of a
    microbatch's weight gradients wait from its backward to the update, its activations not.
    """
    trained, microbatches = training.chosen, training.microbatches_of(stages)
    versions = _versions(training, stage, stages)
    gathers = training.gathers or trained.spikes
    halved = has_halves(trained.schedule.order, trained.schedule.devices(stages), microbatches)
    observed, last = _observed(training, stage, stages), stage == stages - 1
    in_flight, gathered, waiting = 0, 0, 0
    for action, completed in zip(order, completes(order, microbatches), strict=True):
        before, held, predicted = versions.kept, versions.old, 0
        for way in action.operation.reads:
            read = (versions.forward if way == "forward" else versions.backward)(action.microbatch)
            predicted = 1 if read else predicted  # and not kept
        # Sums of microbatches' gradients are whole already; factors of products are joined for the update.
        joined = whole = 1 if gathers and action.updates and (microbatches == 1 or (completed and not halved)) else 0
        if predicted and last:  # for the forward, and the backward in the same call
            whole, predicted = whole + predicted, 0
        passing = predicted + (1 if action.updates and not (gathers and microbatches == 1) else 0)
        beside = training.temporaries if completed else 0
        copies = max(before, versions.kept) + whole
        sums = factors = 0
        if microbatches > 1:
            sums = 1 + gathered if action.updates else gathered  # the call has the old sum until it ends
            gathered = 1 if action.updates else gathered
            waiting += 1 if action.updates and not halved else 0
            factors = waiting
        if completed:
            gathered, waiting = 0, 0
            versions.before_update()
            held |= versions.old  # what the update's own backward has read is there until it ends
            copies = max(copies, len(held) + (1 if joined or observed else 0))
        during, after = action.operation.holds
        yield (
            Holding(in_flight + during, copies, passing, sums, factors, beside),
            Holding(in_flight + after, versions.kept, 0, gathered, waiting),
        )
        in_flight += after
