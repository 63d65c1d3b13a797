"""One stage: a segment of the model on one device, with its own copy of the weights and its own optimizer."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import keras
import tensorflow as tf

from pipetrain.compute.cores import LOCAL_HOST, is_processor, is_remote
from pipetrain.compute.functions.backward import Backward, BackwardAdditions, Results, added
from pipetrain.compute.functions.kernels import Kernels, calls_python
from pipetrain.compute.functions.split import specs
from pipetrain.compute.functions.stage_function import LossFunction, StageFunction, penalty_gradient
from pipetrain.compute.functions.stage_values import (
    BackwardResult,
    BoundaryTensors,
    Constants,
    Forward,
    Inputs,
    KeptStage,
    Operands,
    SavedForBackward,
    Step,
    repeatable,
)
from pipetrain.compute.functions.state import Division, State
from pipetrain.compute.functions.update_step import CompleteGradients, UpdateStep
from pipetrain.compute.functions.weight_binding import BoundFunction, Newest, OfGroups, Weights
from pipetrain.compute.functions.weight_groups import Shared, WeightGroups
from pipetrain.compute.graph.segment import Segment
from pipetrain.compute.keras_private import count_of, held_by
from pipetrain.compute.optimizer.gradient_scaling import is_dynamic, stepping
from pipetrain.compute.optimizer.slots import OptimizerPart, Slot
from pipetrain.compute.tensorflow_private import is_deterministic
from pipetrain.schemes.scheme import UpdateRule


class Stage:
    """A run of blocks on one device, its weights in variables that only this stage updates.

    Between ``load`` and ``store`` the weights and state of these blocks live here; outside, in the model. The methods
    that work on minibatches (``forward``, ``backward``, ``accumulate``, ``squared_norm``, ``all_finite``, ``update``)
    are called in the scope of the stage's ``device``; entering the scope in every call would take longer than some of
    the calls.

    After ``trace``, ``reached`` are the trainable variables that a gradient reaches, ``unreached`` the inputs that
    want a gradient and get none, and ``is_penalized`` says whether a layer adds a loss of its own.

    Weights that other stages have too are ``shared``: a copy of them is here, whose gradients are summed, and whose
    updates are made, apart from those of the stage's own weights. Where a stage has several groups of weights, its
    methods take and give ``OfGroups``.

    ``sums`` are what sums gradients over the stage's replicas where these are compressed, and ``worker_slots`` what
    this replica keeps for it, or of a whole model's what all workers do.

    Args:
        segment: the blocks.
        device: a TensorFlow device name.
        optimizer: the compiled optimizer, of which the stage takes a clone over its own variables.
        loss: ``loss(y, outputs, sample_weight)`` for the last stage, None for the others.
        recompute: keep a forward's inputs instead of its residuals, and run it again before its backward.
        rule: what its updates do in addition to the optimizer's own step.
        division: into which parts minibatches are divided of which it is given some.
        summed_rows: of a minibatch of several microbatches; 0 where there is one, where other replicas need gradients,
            where backwards are in halves, or where the number is not known.
        compiled: whether XLA compiles its functions.
        shared: the weights that other stages have too.
    """

    sums: Any = None
    worker_slots: Sequence[Slot] = ()

    def __init__(
        self,
        segment: Segment,
        device: str,
        optimizer: keras.optimizers.Optimizer,
        loss: LossFunction | None,
        recompute: bool = False,
        rule: UpdateRule = UpdateRule(),  # noqa: B008 - a tuple, never changed
        division: Division = Division(),  # noqa: B008 - a tuple, never changed
        summed_rows: int = 0,
        compiled: bool = False,
        shared: Sequence[Shared] = (),
    ) -> None:
        self.segment, self.device, self.recompute, self._loss = segment, device, recompute, loss
        self._kernels = Kernels(compiled, segment.about, is_remote(device))
        self._constants = Constants(device)
        self._state = State(segment, True, division, device)
        self._groups = self._grouped(shared, stepping(optimizer), rule)
        self.variables, self.shared = self._groups.variables, self._groups.shared
        self._step = UpdateStep(optimizer, self._groups.own, self._constants)
        self.global_clipnorm = self._step.global_clipnorm
        self._summed_rows = 0 if self.global_clipnorm or is_dynamic(optimizer) else summed_rows

    def show_compiling(self, is_shown: Callable[[], bool]) -> None:
        """Where XLA takes long to compile its functions, a line says so if that ``is_shown`` then."""
        self._kernels.is_shown = is_shown

    def _grouped(
        self, shared: Sequence[Shared], optimizer: keras.optimizers.Optimizer, rule: UpdateRule
    ) -> WeightGroups:
        return WeightGroups(self.segment.trainable_variables, shared, self.device, optimizer, rule)

    @property
    def reached(self) -> list[keras.Variable]:
        """The model's trainable variables that a gradient reaches in this stage, as ``trace`` found."""
        return self._groups.reached

    def learn_reached(self, reached: Iterable[keras.Variable]) -> None:
        """What gradients reach in any of the stages: of weights that these share, no stage alone can tell."""
        self._groups.reached_elsewhere = frozenset(map(id, reached))

    @property
    def changed(self) -> list[keras.Variable]:
        """The model's weights that a forward changes, because layers assign to them, as ``trace`` found."""
        return [self._groups.originals[n] for n in self._function.changed]

    def slots(self) -> Iterator[Slot]:
        """The slots of the stage's optimizers, and what workers keep of gradients, by the model's own variables."""
        return chain(self._groups.slots(), self.worker_slots)

    def parts(self) -> list[OptimizerPart]:
        """The stage's optimizers, by the model's own variables."""
        return self._groups.parts()

    def load(self, iterations: int = 0, replica: int = 0) -> None:
        """Take weights and state from the model, and set the optimizer's count of minibatches.

        Every replica of a stage draws different random numbers, because it has different rows.
        """
        self._constants.clear()
        with tf.device(self.device):
            self._groups.load(iterations)
            self._state.load(replica)

    def hold_state(self) -> bool:
        """Let variables have the state, for functions of whole minibatches; whether these are new ones."""
        with tf.device(self.device):
            return self._state.hold()

    def read_state(self) -> None:
        """The state is that of the variables; in a function that is traced, that of its beginning."""
        with tf.device(self.device):
            self._state.read()

    def written_state(self) -> list[tf.Operation]:
        """At the end of a function that is traced, let the variables have the state; gives what does that."""
        with tf.device(self.device):
            return self._state.written()

    def store(self, values: Sequence[tf.Tensor]) -> None:
        """Write weights and state, as ``outcome`` or ``snapshot`` gave them, into the model."""
        self._state.store(self._groups.store(values))

    def outcome(self, others: Sequence[Stage]) -> list[tf.Tensor]:
        """The final weights, and the final state of all replicas: what layers assign is averaged, see ``State``."""
        with tf.device(LOCAL_HOST if is_remote(self.device) else self.device):
            state = self._state.whole([other._state for other in others], self._function.assigned)
        with tf.device(self.device):
            return [*self._groups.brought(), *state]

    def snapshot(self) -> list[tf.Tensor]:
        """The current weights and state, as tensors that later updates do not change.

        A state of which other replicas have rows is None, which ``store`` leaves as it is.
        """
        return [*self._groups.values(), *self._state.whole()]

    def everything(self) -> list[Any]:
        """Each once, all variables that updates change; replicas have them in the same order."""
        return self._groups.everything()

    def held(self) -> list[Any]:
        """``everything``, and what this replica keeps of its own gradients."""
        return [*self.everything(), *(slot.variable for slot in self.worker_slots)]

    def firsts(self) -> list[tuple[keras.Variable, keras.Variable]]:
        """The copies of weights that no earlier stage has, each with the model's own."""
        return self._groups.firsts()

    def kept(self) -> KeptStage:
        """All that the stage holds between two calls of functions, with its state; later calls change none of it."""
        with tf.device(self.device):
            return KeptStage([held_by(each).read_value() for each in self.held()], self._state.kept())

    def keep(self, kept: KeptStage) -> None:
        """Hold again what was ``kept``, after ``load`` and ``hold_state``."""
        with tf.device(self.device):
            for variable, value in zip(self.held(), kept.variables, strict=True):
                variable.assign(tf.cast(value, variable.dtype))
            self._state.keep(kept.state)
        self._groups.forget_rates()

    def of_model(self, kept: Sequence[KeptStage]) -> Iterator[tuple[keras.Variable, tf.Tensor]]:
        """The model's variables whose values the stage has, with what all replicas of it have kept."""
        values = {id(each): value for each, value in zip(self.held(), kept[0].variables, strict=True)}
        yield from ((original, values[id(copy)]) for copy, original in self.firsts())
        with tf.device(self.device):
            whole = self._state.whole_of([each.state for each in kept], self._function.assigned)
        yield from self._state.pairs(whole)

    def weights(self, wanted: Weights = Newest()) -> Any:  # noqa: B008 - a tuple, never changed
        """The described weights as tensors; holding them keeps this version, as a later update then copies."""
        return self._groups.weights(wanted)

    def trace(
        self, masks: Sequence[tf.TensorSpec | None], targets: Any = None, unreached: Collection[int] = ()
    ) -> list[tf.TensorSpec | None]:
        """Trace forward and backward for inputs with these masks and, for the last stage, these targets.

        ``targets`` are the specs of labels and sample weights, ``unreached`` the outputs on which, as the next stage
        found, the loss does not depend. Gives the specs of the outputs' masks.
        """
        kernels, given = self._kernels, (masks, targets, unreached)
        self._function = StageFunction(self.segment, self._loss, self._state, kernels, *given)
        with tf.device(self.device):
            self._halves = halves = self._function.halves()
            # What other stages' gradients are added to is made here.
            once = self._function.products(halves, self._summed_rows) & {*self._groups.own.numbers}
            twice = repeatable(halves.forward, kernels.packing) if self.recompute else None
            self._forward = self._bound(twice.first if twice else halves.forward)
            self._again = self._bound(twice.again) if twice else self._forward
            self._draws = twice is not None
            # XLA has no clock, and TensorFlow refuses one where operations are to be deterministic.
            timed = is_processor(self.device) and not kernels.compiled and not is_deterministic()
            self._backward = Backward(halves, self._bound, self._step, timed, kernels.packing, once)
            like = self._backward.like
            self._groups.missing = [n for n, gradient in enumerate(like) if gradient is None]
            self._complete = CompleteGradients(self._step, like, self.shared, kernels)
        reached = iter(halves.reached)
        self.unreached = [n for n, flow in enumerate(self.segment.differentiable) if flow and not next(reached)]
        output, _, penalty, _ = halves.forward.structured_outputs[0]
        self.is_penalized = penalty is not None
        return specs(output.masks)

    def _bound(self, concrete: Any) -> BoundFunction:
        return BoundFunction(concrete, self._groups.all, self._constants, self._kernels)

    def forward(self, weights: Weights, values: BoundaryTensors, targets: Any = None) -> Forward:
        """Run the blocks with these weights and the stage's current state, which is updated.

        With recomputation, ``Newest`` stands for the same weights that the backward will be given.
        """
        state, inputs = self._state.values, self._function.arguments(values, targets)
        (output, loss, penalty, (after, left)), residuals = self._forward(weights, state, *inputs)
        self._state.assign(self._function.assigned, after)
        for n, value in zip(self._function.changed, left, strict=True):
            self.variables[n].assign(value)
        if not self.recompute:
            return Forward(output, loss, penalty, SavedForBackward(residuals))
        described = isinstance(weights, Newest) or (isinstance(weights, OfGroups) and not weights.are_tensors)
        given = None if described else weights
        again = (*inputs, residuals) if self._draws else inputs
        return Forward(output, loss, penalty, SavedForBackward(None, given, state, again))

    def backward(
        self,
        weights: Weights,
        given: SavedForBackward | Inputs | Operands,
        gradients: Sequence[Any],
        scaled_share: Any,
        total: list[Any] | None = None,
        step: Step | None = None,
        scale: Any = 1.0,
    ) -> BackwardResult:
        """Gradients of the weights and of the differentiable inputs, with these weights and what the forward kept.

        Given a forward's inputs, the forward is run in the same call, with the same weights, which it must leave as
        they are (see ``changed``); given what ``input_gradients`` has left, only the weights' gradients are made, with
        the same weights. ``gradients`` are those of the outputs that want one (of the loss, for the last stage),
        ``scaled_share`` that of the penalty in a loss that is multiplied by the ``scale``. Those of the weights are
        added to a ``total``, if there is one; with a ``step`` those of the stage's own weights are used for an update
        in the same call.
        """
        runs, late = isinstance(given, Inputs), len(given.packed) if isinstance(given, Operands) else 0
        additions, numbers = BackwardAdditions(runs, total is not None, step is not None, late), None
        output_gradients = self._output_gradients(gradients, scaled_share, scale)
        if step is not None:
            self._groups.own.set_rate(step.learning_rate)
            numbers = self._step.numbers_of(step)
        if isinstance(given, Operands):
            taken, fixed, output_gradients = given.packed, list[tf.Tensor](), []
        else:
            taken, fixed = self._taken(weights, given)
        results = self._backward(additions, weights, taken, fixed, output_gradients, numbers, total)
        if step is not None:
            self._groups.own.updated()
        return self._result(results, additions.updates)

    def input_gradients(
        self,
        weights: Weights,
        given: SavedForBackward | Inputs,
        gradients: Sequence[Any],
        scaled_share: Any,
        scale: Any = 1.0,
    ) -> tuple[BackwardResult, Operands]:
        """The gradients of the differentiable inputs, and what ``backward`` makes those of the weights from later.

        The arguments are those of ``backward``.
        """
        output_gradients = self._output_gradients(gradients, scaled_share, scale)
        taken, fixed = self._taken(weights, given)
        results = self._backward.input_gradients(isinstance(given, Inputs), weights, taken, fixed, output_gradients)
        return self._result(results._replace(gradients=[]), updated=False), Operands([results.gradients])

    def _taken(self, weights: Weights, given: SavedForBackward | Inputs) -> tuple[Any, list[tf.Tensor]]:
        """What a backward takes of the forward, or all that the forward takes, and the state that stays."""
        state = self._state.values
        if isinstance(given, Inputs):
            return [state, *self._function.arguments(*given)], []
        return self._residuals(weights, given), [state[n] for n in self._halves.fixed]

    def _result(self, results: Results, updated: bool) -> BackwardResult:
        """The results of a call; the state that a forward in it has left is kept."""
        if results.ran is None:
            return BackwardResult(results.gradients, results.by_input, updated)
        output, loss, penalty, (after, _) = results.ran
        self._state.assign(self._function.assigned, after)
        forward = Forward(output, loss, penalty, None)
        return BackwardResult(results.gradients, results.by_input, updated, forward, _time_s(results.ran_at_s))

    def _output_gradients(self, gradients: Sequence[Any], scaled_share: Any, scale: Any) -> list[tf.Tensor]:
        """The gradients of all that is differentiated: as they are given, and those of the penalty."""
        starts = self._halves.outputs
        given, penalties = zip(gradients, starts, strict=False), starts[len(gradients) :]
        made = [self._constants(each, spec.dtype) for each, spec in given]
        return [
            *made,
            *(self._constants(penalty_gradient(spec, scaled_share, scale), spec.dtype) for spec in penalties),
        ]

    @property
    def is_compiled(self) -> bool:
        """Whether XLA compiles its functions."""
        return self._kernels.compiled

    @property
    def calls_python(self) -> bool:
        """Whether its layers call Python while they run, as ``trace`` found."""
        return calls_python(self._halves.forward) or calls_python(self._halves.backward)

    @property
    def loss_dtype(self) -> tf.DType:
        """The type of the last stage's loss, as ``trace`` found."""
        return self._halves.outputs[0].dtype

    def counts(self) -> list[int]:
        """Of the optimizers that update weights which no earlier stage has, how many steps each has made."""
        mine = [group for group in self._groups.all if group.variables and group.is_first]
        return [int(count_of(group.optimizer).numpy()) for group in mine]

    @contextmanager
    def as_before(self) -> Iterator[None]:
        """In the end weights, optimizers and what is kept of gradients have their values, whatever was done."""
        kept = [*self.variables, *(each for group in self._groups.all for each in group.optimizer.variables)]
        kept += [slot.variable for slot in self.worker_slots]
        before = [tf.identity(variable.value) for variable in kept]
        try:
            yield
        finally:
            for variable, value in zip(kept, before, strict=True):
                variable.assign(value)

    @property
    def turn(self) -> int:
        """Which microbatch's state is next, see ``State``."""
        return self._state.turn

    @turn.setter
    def turn(self, turn: int) -> None:
        self._state.turn = turn

    def assign_rate(self, learning_rate: tf.Tensor, shared: int | None = None) -> None:
        """In a function that is traced, the learning rate of the next step of the own, or of some shared, weights."""
        group = self._groups.own if shared is None else self._groups.shared[shared]
        group.assign_rate(learning_rate)

    def set_rate(self, learning_rate: float | None) -> bool:
        """The learning rate of the next step, None leaves a schedule unchanged; whether it is another one."""
        return any([group.set_rate(learning_rate) for group in self._groups.all])

    def updated(self) -> None:
        """A function that is more than one of the stage's calls has made a step."""
        for group in self._groups.all:
            group.updated()

    def forwards_run(self) -> int:
        """How many calls that are a forward and a backward have done the forward so far."""
        return self._backward.runs()

    def had_run(self) -> bool | None:
        """Whether a ``backward`` that raised, given a forward's inputs, had done the forward.

        None where the device cannot be asked: it may be what has failed.
        """
        if is_remote(self.device):
            return None
        try:
            return self._backward.had_run()
        except tf.errors.OpError:
            return None

    def _residuals(self, weights: Weights, kept: SavedForBackward) -> list[tf.Tensor]:
        """What the forward computed for the backward; with recomputation it is computed now."""
        if kept.residuals is not None:
            return kept.residuals
        _, residuals = self._again(weights if kept.weights is None else kept.weights, kept.state, *kept.inputs)
        return residuals

    @property
    def gradients_given(self) -> list[Any]:
        """The specs of the weights' gradients, by number; None for those that there are not."""
        return [
            tf.TensorSpec(each.shape, each.dtype) if isinstance(each, tf.Tensor | tf.TensorSpec) else each
            for each in self._backward.like
        ]

    def accumulate(self, total: list[Any] | None, gradients: list[Any], of: Sequence[int]) -> list[Any]:
        """The sum of two lists of gradients, which are those ``of`` the variables with these numbers."""
        if total is None:
            return gradients
        return added(total, gradients, [self._backward.like[n] for n in of])

    def squared_norm(self, gradients: list[Any], step: Step) -> tf.Tensor:
        """The squared norm of the stage's gradients, a part of that of all stages; with ``global_clipnorm`` only.

        Of weights that several stages have, these are the sums over all stages, at the first of them, and None at the
        others.
        """
        return self._complete.squared_norm(gradients, step)

    def all_finite(self, gradients: list[Any]) -> tf.Tensor:
        """Whether every element of the stage's gradients is finite, with loss scaling."""
        return self._complete.all_finite(gradients)

    def prepared(self, gradients: list[Any], step: Step, squared_norms: tf.Tensor | None = None) -> list[Any]:
        """The gradients of the loss itself, from those of the loss that was multiplied; clipped as in ``update``."""
        return self._complete.prepared(gradients, step, squared_norms)

    def update(self, gradients: list[Any], step: Step, squared_norms: tf.Tensor | None = None) -> None:
        """One step of the stage's optimizer on its own weights, which makes their next version.

        With ``global_clipnorm`` the gradients are clipped by the norm that follows from the ``squared_norms`` of all
        stages. Rules that correct for staleness use that of the gradients.
        """
        self._complete.update(gradients, step, squared_norms)


def _time_s(of_day_s: tf.Tensor | None) -> Any:
    """A time of day converted to the clock of ``time.perf_counter``; as it is while a function is traced."""
    if of_day_s is None or tf.is_symbolic_tensor(of_day_s):
        return of_day_s
    return time.perf_counter() - (time.time() - float(of_day_s))
