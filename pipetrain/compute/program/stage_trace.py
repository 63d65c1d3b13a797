"""One replica of one stage while a program is traced: what each action takes, computes and leaves, as tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import tensorflow as tf

from pipetrain.compute.functions.stage import Stage
from pipetrain.compute.functions.stage_function import as_mean
from pipetrain.compute.functions.stage_values import (
    BackwardResult,
    BoundaryTensors,
    Forward,
    Inputs,
    Operands,
    SavedForBackward,
    Step,
)
from pipetrain.compute.functions.weight_binding import Newest, OfGroups
from pipetrain.schemes.scheme import Scheme
from pipetrain.schemes.weight_versions import HeldVersions, WeightVersions


class StagePlace(NamedTuple):
    """One replica of one stage, and of how many."""

    stage: int
    stages: int
    replica: int
    replicas: int

    def __str__(self) -> str:
        return f"stage {self.stage}" + (f", replica {self.replica}" if self.replicas > 1 else "")

    @property
    def is_last(self) -> bool:
        """Whether the stage is the last one, which has the loss."""
        return self.stage == self.stages - 1


class Share(NamedTuple):
    """What a replica's rows of a microbatch are: of the minibatch, of its loss, and of the microbatch.

    ``start`` is the gradient of the loss with which a backward begins: the share of the loss times the loss scale;
    ``scaled`` the share of the minibatch times that.
    """

    of_minibatch: Any = 1.0
    of_loss: Any = 1.0
    of_microbatch: Any = 1.0
    start: Any = 1.0
    scaled: Any = 1.0


class ForwardMessage(NamedTuple):
    """What goes down with a microbatch: its values, and the losses of the layers of the stages before."""

    values: BoundaryTensors | None
    penalty: tf.Tensor | None


class Output(NamedTuple):
    """What the last stage has made of a microbatch, with the share of it that counts."""

    loss: tf.Tensor
    penalty: tf.Tensor | None
    predictions: BoundaryTensors
    share: Share


class HeldStage(NamedTuple):
    """What a replica of a stage has between two functions of a course, minibatches counted from the next one's first.

    ``saved`` is what its forwards have left for backwards, ``gathered`` the gradients of a minibatch that is under way,
    ``versions`` what it holds of its own weights and of each group of shared ones; ``turn``: which microbatch's state
    is next, see ``State``.
    """

    saved: dict[int, Any]
    gathered: Any
    versions: list[HeldVersions]
    outputs: dict[int, Output]
    turn: int


class StageTrace:
    """Makes the operations of the stage's actions, in the order of its device's program.

    The methods are called in the scope of the stage's ``device``.

    Args:
        place: which replica of which stage.
        stage: its functions.
        scheme: which weights are read.
        microbatches: of a minibatch.
        share: gives that of each microbatch.
        scale: by which the loss is multiplied.
        base: the number of minibatch 0, since the pipeline was empty.
        rates: the learning rates of minibatches; none where they are in the optimizer's variable.

    ``gathered`` are the sums of the weights' gradients so far, None before the first of them.
    """

    def __init__(
        self,
        place: StagePlace,
        stage: Stage,
        scheme: Scheme,
        microbatches: int,
        share: Callable[[int], Share],
        scale: Any,
        base: int,
        rates: Mapping[int, Any],
    ) -> None:
        self.place, self.stage, self.device = place, stage, stage.device
        self._microbatches, self._share, self.scale, self.base, self._rates = microbatches, share, scale, base, rates
        self._first = base * microbatches  # the number of microbatch 0
        at = scheme, place.stage, place.stages, microbatches
        self._own = WeightVersions(*at, Newest, lambda ahead: stage.weights(Newest(ahead)))
        self.shared = [WeightVersions(*at, Newest, _keep(group), min(group.holders)) for group in stage.shared]
        self._saved: dict[int, SavedForBackward | Operands | None] = {}
        self.gathered: list[Any] | None = None
        self.has_updated = False  # the stage's own weights, in the call of the last backward
        self.outputs: dict[int, Output] = {}

    @property
    def version(self) -> int:
        """That of the stage's own weights, which is 0 when minibatch 0 is next."""
        return self._own.version - self.base

    def held(self, since: int) -> HeldStage:
        """What the next function goes on with, minibatches counted from this one on."""
        by = since * self._microbatches
        versions = [each.held(self.base + since) for each in (self._own, *self.shared)]
        saved = {m - by: kept for m, kept in self._saved.items()}
        outputs = {m - by: output for m, output in self.outputs.items() if m >= by}
        return HeldStage(saved, self.gathered, versions, outputs, self.stage.turn)

    def resume(self, held: HeldStage) -> None:
        """Go on with what an earlier function has left."""
        self._saved, self.gathered, self.outputs = dict(held.saved), held.gathered, dict(held.outputs)
        for versions, each in zip((self._own, *self.shared), held.versions, strict=True):
            versions.resume(each, self.base)
        self.stage.turn = held.turn

    def begin_update(self, microbatch: int, versions: WeightVersions | None = None) -> list[tf.Operation]:
        """Before an update by this microbatch's minibatch: its rate, and old versions that are still read."""
        effects = effects_from_here()
        if (rate := self._rates.get(microbatch // self._microbatches)) is not None:
            self.stage.assign_rate(rate, None if versions is None else self.shared.index(versions))
        (versions or self._own).before_update()
        return effects()

    def _weights(self, microbatch: int, backward: bool = False) -> Any:
        read = WeightVersions.backward if backward else WeightVersions.forward
        number = self._first + microbatch
        if not self.shared:
            return read(self._own, number)
        return OfGroups(tuple(read(each, number) for each in (self._own, *self.shared)))

    def found(self, group: int, microbatch: int, backward: bool) -> int:
        """How many updates of a group of shared weights an action finds, 0 being the version of minibatch 0."""
        return self.shared[group].found(self._first + microbatch, backward) - self.base

    def _lasts(self, microbatch: int) -> bool:
        """Whether the backward reads the same weights as the forward."""
        number = self._first + microbatch
        return not self.stage.changed and all(each.lasts(number) for each in (self._own, *self.shared))

    def forward(self, microbatch: int, given: ForwardMessage, targets: Any = None) -> ForwardMessage:
        """F; gives what goes down."""
        if given.values is None:
            self._saved[microbatch] = None
            return self._passed(microbatch, given, None)
        weights = self._weights(microbatch)
        if self.stage.recompute and not self._lasts(microbatch):
            weights = self.stage.weights(weights)
        result = self.stage.forward(weights, *Inputs(given.values, targets))
        self._saved[microbatch] = result.kept
        return self._passed(microbatch, given, result)

    def _passed(self, microbatch: int, given: ForwardMessage, result: Forward | None) -> ForwardMessage:
        """What goes down after a forward; the last stage's results are kept."""
        penalty, share = given.penalty, self._share(microbatch)
        if result is not None and result.penalty is not None:
            own = as_mean(result.penalty, share.of_minibatch)
            penalty = own if penalty is None else penalty + own
        if result is None:
            return ForwardMessage(None, self._mine(penalty, share))
        if self.place.is_last:
            self.outputs[microbatch] = Output(cast(Any, result.loss), penalty, result.output, share)
        return ForwardMessage(result.output, self._mine(penalty, share))

    def _mine(self, penalty: tf.Tensor | None, share: Share) -> tf.Tensor | None:
        """What this replica contributes to the penalty of all replicas' rows."""
        if penalty is None or self.place.replicas == 1:
            return penalty
        return penalty * share.of_microbatch

    def backward(self, microbatch: int, returned: list[tf.Tensor] | None, updates: bool) -> list[tf.Tensor] | None:
        """B; gives the inputs' gradients. ``updates``: its call updates the stage's own weights, too."""
        kept = self._saved.pop(microbatch)
        weights = self._weights(microbatch, backward=True)
        if kept is None:
            return None
        return self._backward(microbatch, weights, kept, returned, updates).by_input

    def input_gradients(self, microbatch: int, returned: list[tf.Tensor] | None) -> list[tf.Tensor] | None:
        """I; gives the inputs' gradients."""
        kept = cast("SavedForBackward | None", self._saved.pop(microbatch))
        weights = self._weights(microbatch, backward=True)
        if kept is None:
            self._saved[microbatch] = None
            return None
        return self._first_half(microbatch, weights, kept, returned).by_input

    def weight_gradients(self, microbatches: Sequence[int], updates: bool) -> None:
        """Some W in one call."""
        halves = [self._saved.pop(each) for each in microbatches]
        weights = self._weights(microbatches[-1], backward=True)
        packed = [each for kept in halves if isinstance(kept, Operands) for each in kept.packed]
        if packed:
            self._backward(microbatches[-1], weights, Operands(packed), [], updates)

    def forward_backward(
        self, microbatch: int, given: ForwardMessage, targets: Any, is_half: bool, updates: bool
    ) -> tuple[list[tf.Tensor] | None, Any]:
        """FB or FI, one call where both read the same weights; gives the inputs' gradients.

        And the time of day when the forward was finished, if that is known.
        """
        if given.values is None or not self._lasts(microbatch):
            self.forward(microbatch, given, targets)
            if is_half:
                return self.input_gradients(microbatch, None), None
            return self.backward(microbatch, None, updates), None
        weights = self._weights(microbatch)
        self._weights(microbatch, backward=True)  # the same
        inputs = Inputs(given.values, targets)
        if is_half:
            result = self._first_half(microbatch, weights, inputs, None)
        else:
            result = self._backward(microbatch, weights, inputs, None, updates)
        self._passed(microbatch, given, cast(Forward, result.forward))
        return result.by_input, result.forward_end_s

    def _backward(
        self,
        microbatch: int,
        weights: Any,
        given: SavedForBackward | Inputs | Operands,
        returned: list[tf.Tensor] | None,
        updates: bool,
    ) -> BackwardResult:
        share, step, begun = self._share(microbatch), None, list[tf.Operation]()
        if updates:
            step, begun = self.step(microbatch), self.begin_update(microbatch)
        gradients = [share.start] if returned is None else returned
        total, self.gathered = self.gathered, None
        with tf.control_dependencies(begun):
            result = self.stage.backward(weights, given, gradients, share.scaled, total, step, self.scale)
        self.gathered, self.has_updated = result.gradients, result.updated
        return result

    def _first_half(
        self, microbatch: int, weights: Any, given: SavedForBackward | Inputs, returned: list[tf.Tensor] | None
    ) -> BackwardResult:
        share = self._share(microbatch)
        gradients = [share.start] if returned is None else returned
        result, operands = self.stage.input_gradients(weights, given, gradients, share.scaled, self.scale)
        self._saved[microbatch] = operands
        return result

    def step(self, microbatch: int, versions: WeightVersions | None = None) -> Step:
        """The inputs of the update by this microbatch's minibatch; the rate is in the optimizer's variable."""
        return Step(None, (versions or self._own).staleness(self._first + microbatch), self.scale)


def effects_from_here() -> Callable[[], list[tf.Operation]]:
    """Gives a function that tells which operations with an effect have been traced since; none if nothing is traced.

    Not those that read the clock: they wait for what they time alone, which may be nothing of the calls before.
    """
    graph = tf.compat.v1.get_default_graph()
    before = len(graph.get_operations())

    def made() -> list[tf.Operation]:
        since = graph.get_operations()[before:]
        return [each for each in since if each.op_def.is_stateful and each.type != "Timestamp"]

    return made


def _keep(group: Any) -> Any:
    return lambda ahead: group.weights(Newest(ahead))
