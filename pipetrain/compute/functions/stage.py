"""One stage: a segment of the model on one device, with its own copy of the weights and its own optimizer."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from pipetrain.compute.cores import is_prompt, is_remote
from pipetrain.compute.functions.backward import Backward, Parts, added
from pipetrain.compute.functions.graph_rewrite import updated_one_by_one
from pipetrain.compute.functions.kernels import Kernels
from pipetrain.compute.functions.penalties import penalty_gradient, summed_over_rows, total_penalty
from pipetrain.compute.functions.repeat import repeatable
from pipetrain.compute.functions.split import SplitFunction, specs, split, symbolic_gradients
from pipetrain.compute.functions.stage_values import (
    BackwardResult,
    BoundaryTensors,
    Forward,
    Inputs,
    SavedForBackward,
    Step,
)
from pipetrain.compute.functions.state import Division, State
from pipetrain.compute.functions.weight_binding import BoundFunction, Newest, OfGroups, Weights
from pipetrain.compute.functions.weight_group import Shared, WeightGroup
from pipetrain.compute.functions.weight_products import counted, made, of_parts, over_any_rows, products
from pipetrain.compute.graph.segment import Segment, assigned_to
from pipetrain.compute.keras_private import mask_of
from pipetrain.compute.optimizer.adoption import Part
from pipetrain.compute.optimizer.clipping import SQUARED_NORM, clipped, limit, squared_norm
from pipetrain.compute.optimizer.loss_scaling import SCALE, all_finite, is_dynamic, stepping, unscaled
from pipetrain.compute.optimizer.slots import Slot
from pipetrain.compute.tensorflow_private import is_deterministic
from pipetrain.schemes.scheme import UpdateRule

KNOWN_ROWS = 2  # of a trace that tells how many rows of a matrix belong to an example
LossFunction = Callable[[Any, list[tf.Tensor], Any], tf.Tensor]
Numbers = tuple[tf.Tensor | None, tf.Tensor | None]  # of a step: staleness and loss scale, None where it has no use


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

    Args:
        segment: the blocks.
        device: a TensorFlow device name.
        optimizer: the compiled optimizer, of which the stage takes a clone over its own variables.
        loss: ``loss(y, outputs, sample_weight)`` for the last stage, None for the others.
        recompute: keep a forward's inputs instead of its residuals, and run it again before its backward.
        rule: what its updates do in addition to the optimizer's own step.
        division: into which parts minibatches are divided of which it is given some.
        summed_rows: of a minibatch of several microbatches; 0 where there is one, where other replicas need gradients,
            or where the number is not known.
        compiled: whether XLA compiles its functions.
        shared: the weights that other stages have too.
    """

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
        self._divided, self._kernels = division.parts > 1, Kernels(compiled, segment.about)
        self.segment, self.device, self.recompute, self._loss = segment, device, recompute, loss
        self._rule = rule
        self._missing: list[int] = []  # numbers of the weights that no gradient reaches
        self._weights, self._division = segment.trainable_variables, division
        self._state = State(segment, True, division)
        steps = stepping(optimizer)
        self.global_clipnorm = limit(steps.global_clipnorm)
        self._scales = is_dynamic(optimizer) or steps.loss_scale_factor is not None
        self._summed_rows = 0 if self.global_clipnorm or is_dynamic(optimizer) else summed_rows
        self._own, self.shared = self._grouped(steps, rule, shared)
        copies = {n: copy for group in self._groups for n, copy in zip(group.numbers, group.variables, strict=True)}
        self.variables = [copies[n] for n in range(len(copies))]
        self._assigned: list[int] = []  # numbers of the state's variables that layers assign to
        self._changed: list[int] = []  # numbers of the weights that layers assign to
        self._constants: dict[Any, tf.Tensor] = {}

    def _grouped(
        self, optimizer: keras.optimizers.Optimizer, rule: UpdateRule, shared: Sequence[Shared]
    ) -> tuple[WeightGroup, list[WeightGroup]]:
        """The stage's own weights, and those that it shares, by the stages that have them."""
        number = {id(variable): n for n, variable in enumerate(self._weights)}
        numbers = [[number.pop(id(variable)) for variable in each.weights] for each in shared]
        own = sorted(number.values())
        mine = [self._weights[n] for n in own]

        def untrained() -> list[keras.Variable]:
            return [self.variables[n] for n in own if n in self._missing]

        return WeightGroup(mine, own, self.device, optimizer, rule, untrained), [
            WeightGroup(each.weights, places, self.device, optimizer, each.rule, tuple, each.holders, each.stage)
            for each, places in zip(shared, numbers, strict=True)
        ]

    @property
    def _groups(self) -> list[WeightGroup]:
        return [self._own, *self.shared]

    @property
    def optimizer(self) -> keras.optimizers.Optimizer:
        """The clone of the compiled optimizer that updates the stage's own weights."""
        return self._own.optimizer

    @property
    def reached(self) -> list[keras.Variable]:
        """The model's trainable variables that a gradient reaches in this stage, as ``trace`` found."""
        return [variable for n, variable in enumerate(self._weights) if n not in self._missing]

    @property
    def changed(self) -> list[keras.Variable]:
        """The model's weights that a forward changes, because layers assign to them, as ``trace`` found."""
        return [self._weights[n] for n in self._changed]

    def slots(self) -> Iterator[Slot]:
        """The slots of the stage's optimizers, by the model's own variables."""
        return (slot for group in self._groups for slot in group.slots())

    def parts(self) -> list[Part]:
        """The stage's optimizers, by the model's own variables."""
        return [group.part() for group in self._groups if group.variables]

    def load(self, iterations: int = 0, replica: int = 0) -> None:
        """Take weights and state from the model, and set the optimizer's count of minibatches.

        Every replica of a stage draws different random numbers, because it has different rows.
        """
        self._constants.clear()
        with tf.device(self.device):
            for group in self._groups:
                group.load(iterations)
            self._state.load(replica)

    def store(self, values: Sequence[tf.Tensor]) -> None:
        """Write weights and state, as ``outcome`` or ``snapshot`` gave them, into the model."""
        weights = [variable for group in self._groups if group.is_first for variable in group.originals]
        for variable, value in zip(weights, values, strict=False):
            variable.assign(value)
        self._state.store(values[len(weights) :])

    def outcome(self, others: Sequence[Stage]) -> list[tf.Tensor]:
        """The final weights, and the final state of all replicas: what layers assign is averaged, see ``State``."""
        with tf.device(self.device):
            return [*self._stored(), *self._state.whole([other._state for other in others], self._assigned)]

    def snapshot(self) -> list[tf.Tensor]:
        """The current weights and state, as tensors that later updates do not change.

        A state of which other replicas have rows is None, which ``store`` leaves as it is.
        """
        return [*self._stored(), *self._state.whole()]

    def _stored(self) -> list[tf.Tensor]:
        """The weights that no earlier stage has, which may have made fewer updates by now."""
        return [value for group in self._groups if group.is_first for value in group.weights()]

    def weights(self, wanted: Weights = Newest()) -> Any:  # noqa: B008 - a tuple, never changed
        """The described weights as tensors; holding them keeps this version, as a later update then copies."""
        if isinstance(wanted, OfGroups):
            pairs = zip(self._groups, wanted.groups, strict=True)
            return OfGroups(tuple(group.weights(each) for group, each in pairs))
        return self._own.weights(wanted)

    def trace(
        self, masks: Sequence[tf.TensorSpec | None], targets: Any = None, unreached: Collection[int] = ()
    ) -> list[tf.TensorSpec | None]:
        """Trace forward and backward for inputs with these masks and, for the last stage, these targets.

        ``targets`` are the specs of labels and sample weights, ``unreached`` the outputs on which, as the next stage
        found, the loss does not depend. Gives the specs of the outputs' masks.
        """
        self._returns = [returned and n not in unreached for n, returned in enumerate(self.segment.returns)]
        inputs = [_any_rows(spec) for spec in specs(self.segment.inputs)]
        differentiable, constants = self._sorted(BoundaryTensors(inputs, list(masks)), targets)
        with tf.device(self.device):
            halves = self._split(masks, differentiable, constants)
            once = self._once(halves, masks, differentiable, constants)
            twice = repeatable(halves.forward, self._kernels.packing) if self.recompute else None
            self._forward, self._gradient_specs = self._bound(twice.first if twice else halves.forward), halves.outputs
            self._again = self._bound(twice.again) if twice else self._forward
            self._draws = twice is not None
            self._handles = [variable.value.handle for variable in self._own.variables]
            packing = self._kernels.packing
            # XLA has no clock, and TensorFlow refuses one where operations are to be deterministic.
            own = self._own.numbers
            timed = is_prompt(self.device) and not self._kernels.compiled and not is_deterministic()
            self._backward = Backward(
                halves, self._bound, self._step, own, self._handles, self._numbers, timed, packing, once
            )
            self._gradients, self._fixed = self._backward.like, halves.fixed
            reached = iter(halves.reached)
            self.unreached = [n for n, flow in enumerate(self.segment.differentiable) if flow and not next(reached)]
            self._missing = [n for n, gradient in enumerate(self._gradients) if gradient is None]
            self._updates: dict[int, Any] = {}  # by the number of microbatches, traced when they are needed
            self._squared_norm: Any = None
            self._all_finite: Any = None
        output, _, penalty, _ = halves.forward.structured_outputs[0]
        self.is_penalized = penalty is not None
        return [mask if mask is None else tf.TensorSpec(mask.shape, mask.dtype) for mask in output.masks]

    def _split(self, masks: Any, differentiable: Any, constants: Any) -> SplitFunction:
        self._added, self._summed = 0, []
        kernels = self._kernels
        handed = kernels.packing.pack, kernels.compiled, self._staying, lambda: self._changed
        given = specs(self._weights), self._state.specs(), differentiable, constants, *handed
        halves = split(self._run, *given)
        if not self._state.is_complete:
            self._state = State(self.segment, True, self._division)
            return self._split(masks, differentiable, constants)
        if self._divided and self._added:
            self._summed = summed_over_rows(self.segment, masks, training=True)
            halves = split(self._run, *given) if any(self._summed) else halves
        return halves

    def _staying(self) -> list[int]:
        """The numbers of the state that no layer assigns to, as the last trace has found."""
        return [n for n in range(len(self._state.variables)) if n not in self._assigned]

    def _once(self, halves: SplitFunction, masks: Any, differentiable: Any, constants: Any) -> set[int]:
        """The weights whose gradients are made once for all microbatches.

        How many rows the factors have for each example is seen in a second trace, for a known number of examples.
        """
        if not self._summed_rows or not (possible := over_any_rows(symbolic_gradients(halves))):
            return set()
        known = tf.nest.map_structure(_with_rows, (differentiable, constants))
        try:
            exact = self._split([_with_rows(mask) for mask in masks], *known)
        except Exception:  # whatever layers raise that take other numbers of examples alone
            return set()
        own = {*self._own.numbers}  # what other stages' gradients are added to is made here
        return own & possible & products(symbolic_gradients(exact), KNOWN_ROWS, self._summed_rows)

    def _trace_update(self, microbatches: int) -> Any:
        squares = tf.TensorSpec([None], SQUARED_NORM.dtype) if self.global_clipnorm else None
        gradients = of_parts([self._gradients[n] for n in self._own.numbers], microbatches)
        return self._kernels.op(self._one_by_one, gradients, squares, self._numbers)

    def _one_by_one(self, gradients: list[Any], squared_norms: tf.Tensor | None, numbers: Numbers) -> None:
        gradients = made(gradients)
        self._step(gradients, squared_norms, numbers)
        updated_one_by_one(gradients, self._handles)

    def _step(self, gradients: list[Any], squared_norms: tf.Tensor | None, numbers: Numbers) -> None:
        staleness, scale = numbers
        self._own.update.apply(self._prepared(gradients, squared_norms, scale), staleness)

    def _prepared(self, gradients: list[Any], squared_norms: tf.Tensor | None, scale: tf.Tensor | None) -> list[Any]:
        """The gradients of the loss itself, clipped."""
        gradients = gradients if scale is None else unscaled(gradients, scale)
        if squared_norms is None or not self.global_clipnorm:
            return gradients
        return clipped(gradients, squared_norms, self.global_clipnorm)

    def forward(self, weights: Weights, values: BoundaryTensors, targets: Any = None) -> Forward:
        """Run the blocks with these weights and the stage's current state, which is updated.

        With recomputation, ``Newest`` stands for the same weights that the backward will be given.
        """
        state, inputs = self._state.values, self._sorted(values, targets)
        (output, loss, penalty, (after, left)), residuals = self._forward(weights, state, *inputs)
        self._state.assign(self._assigned, after)
        for n, value in zip(self._changed, left, strict=True):
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
        given: SavedForBackward | Inputs,
        gradients: Sequence[Any],
        share: float,
        total: list[Any] | None = None,
        step: Step | None = None,
        scale: float = 1.0,
    ) -> BackwardResult:
        """Gradients of the weights and of the differentiable inputs, with these weights and what the forward kept.

        Given a forward's inputs, the forward is run in the same call, with the same weights, which it must leave as
        they are (see ``changed``). ``gradients`` are those of
        the outputs that want one (of the loss, for the last stage), ``share`` that of the penalty in a loss that is
        multiplied by the ``scale``. Those of the weights are added to a ``total``, if there is one; with a ``step``
        those of the stage's own weights are used for an update in the same call.
        """
        runs = isinstance(given, Inputs)
        parts, numbers = Parts(runs, total is not None, step is not None), None
        specs_of, penalties = self._gradient_specs[: len(gradients)], self._gradient_specs[len(gradients) :]
        output_gradients = [self._constant(each, spec.dtype) for each, spec in zip(gradients, specs_of, strict=False)]
        output_gradients += [self._constant(penalty_gradient(spec, share, scale), spec.dtype) for spec in penalties]
        if step is not None:
            self._own.set_rate(step.learning_rate)
            numbers = self._numbers_of(step)
        state = self._state.values
        taken = [state, *self._sorted(*given)] if isinstance(given, Inputs) else self._residuals(weights, given)
        fixed = [] if runs else [state[n] for n in self._fixed]
        results = self._backward(parts, weights, taken, fixed, output_gradients, numbers, total)
        if step is not None:
            self._own.updated()
        if not runs:
            return BackwardResult(results.gradients, results.by_input, parts.updates)
        output, loss, penalty, (after, _) = results.ran
        self._state.assign(self._assigned, after)
        forward = Forward(output, loss, penalty, None)
        return BackwardResult(results.gradients, results.by_input, parts.updates, forward, _time_s(results.ran_at_s))

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

    def accumulate(self, total: list[Any] | None, gradients: list[Any], of: Sequence[int]) -> list[Any]:
        """The sum of two lists of gradients, which are those ``of`` the variables with these numbers."""
        if total is None:
            return gradients
        return added(total, gradients, [self._gradients[n] for n in of])

    def squared_norm(self, gradients: list[Any], step: Step) -> tf.Tensor:
        """The squared norm of the stage's gradients, a part of that of all stages; with ``global_clipnorm`` only.

        Of weights that several stages have, these are the sums over all stages, at the first of them, and None at the
        others.
        """
        _, scale = self._numbers_of(step)
        if self._squared_norm is None:
            self._squared_norm = self._kernels.op(self._norm, self._like(gradients), self._scale)
        return self._squared_norm(gradients, scale)

    def _norm(self, gradients: list[Any], scale: tf.Tensor | None) -> tf.Tensor:
        return squared_norm(self._prepared(gradients, None, scale))

    def all_finite(self, gradients: list[Any]) -> tf.Tensor:
        """Whether every element of the stage's gradients is finite, with loss scaling."""
        if self._all_finite is None:
            self._all_finite = self._kernels.op(all_finite, self._like(gradients))
        return self._all_finite(gradients)

    def _like(self, gradients: list[Any]) -> list[Any]:
        """The specs of these gradients, of which those of shared weights are sums over stages, or None."""
        like = list(self._gradients)
        for n in (n for group in self.shared for n in group.numbers):
            like[n] = None if gradients[n] is None else tf.type_spec_from_value(gradients[n])
        return like

    def prepared(self, gradients: list[Any], step: Step, squared_norms: tf.Tensor | None = None) -> list[Any]:
        """The gradients of the loss itself, from those of the loss that was multiplied; clipped as in ``update``."""
        _, scale = self._numbers_of(step)
        return self._prepared(gradients, squared_norms, scale)

    def update(self, gradients: list[Any], step: Step, squared_norms: tf.Tensor | None = None) -> None:
        """One step of the stage's optimizer on its own weights, which makes their next version.

        With ``global_clipnorm`` the gradients are clipped by the norm that follows from the ``squared_norms`` of all
        stages. Rules that correct for staleness use that of the gradients.
        """
        self._own.set_rate(step.learning_rate)
        if self._own.variables:
            gradients = [gradients[n] for n in self._own.numbers]
            microbatches = counted(gradients)
            if microbatches not in self._updates:
                self._updates[microbatches] = self._trace_update(microbatches)
            self._updates[microbatches](gradients, squared_norms, self._numbers_of(step))
            self._own.updated()

    @property
    def _scale(self) -> tf.TensorSpec | None:
        return SCALE if self._scales else None

    @property
    def _numbers(self) -> tuple[tf.TensorSpec | None, tf.TensorSpec | None]:
        return tf.TensorSpec([]) if self._rule.corrects else None, self._scale

    def _numbers_of(self, step: Step) -> Numbers:
        staleness = self._constant(float(step.staleness), tf.float32) if self._rule.corrects else None
        return staleness, self._constant(step.loss_scale, SCALE.dtype) if self._scales else None

    def _constant(self, value: Any, dtype: tf.DType) -> tf.Tensor:
        """A number as a tensor on the stage's device, kept for later calls; a tensor is returned as it is."""
        if isinstance(value, tf.Tensor):
            return value
        if (value, dtype) not in self._constants:
            self._constants[value, dtype] = tf.constant(value, dtype)
        return self._constants[value, dtype]

    def _bound(self, concrete: Any, kernels: Kernels | None = None) -> BoundFunction:
        return BoundFunction(concrete, self._groups, self._constant, kernels or self._kernels)

    def _sorted(self, values: BoundaryTensors, targets: Any) -> tuple[list[Any], Any]:
        """The inputs that need a gradient, and all other inputs."""
        differentiable = [
            tensor for tensor, flow in zip(values.tensors, self.segment.differentiable, strict=True) if flow
        ]
        others = [tensor for tensor, flow in zip(values.tensors, self.segment.differentiable, strict=True) if not flow]
        return differentiable, (others, values.masks, targets)

    def _run(self, weights: Any, state: Any, differentiable: Any, constants: Any) -> Any:
        others, masks, targets = constants
        outputs, after, penalties, left = self.segment.run(weights, state, differentiable, others, masks)
        self._assigned, self._changed = assigned_to(state, after), assigned_to(weights, left)
        differentiated = [tensor for tensor, returned in zip(outputs, self._returns, strict=True) if returned]
        loss = None
        if self._loss:
            loss = self._loss_of(outputs, targets)
            differentiated = [loss if loss.shape.rank == 0 else tf.reduce_sum(loss)]  # a number, or one for each row
        self._added = self.segment.added(penalties)
        penalty = total_penalty(penalties, self._summed)
        values = BoundaryTensors(outputs, [mask_of(output) for output in outputs])
        starts = differentiated if penalty is None else [*differentiated, penalty]
        new = [after[n] for n in self._assigned], [left[n] for n in self._changed]
        return starts, (values, loss, penalty, new)

    def _loss_of(self, outputs: list[tf.Tensor], targets: Any) -> tf.Tensor:
        y, sample_weight = targets
        try:
            with keras.StatelessScope():  # trackers of single losses are the caller's to update
                assert self._loss is not None  # asked for by the last stage alone
                return self._loss(y, outputs, sample_weight)
        except (TypeError, ValueError) as error:
            labels, shapes = tf.nest.map_structure(lambda each: tuple(each.shape), (y, outputs))
            raise ValueError(
                f"The loss cannot be computed: {error} Received: y of shape {labels} for outputs of shape {shapes}. "
                "Try labels of the shape that the loss takes."
            ) from error


def _time_s(of_day_s: tf.Tensor | None) -> float | None:
    """A time of day converted to the clock of ``time.perf_counter``."""
    return None if of_day_s is None else time.perf_counter() - (time.time() - float(of_day_s))


def _with_rows(spec: Any) -> Any:
    """The spec of a tensor, with ``KNOWN_ROWS`` where the number of rows is open; anything else as it is."""
    if not isinstance(spec, tf.TensorSpec) or not spec.shape.rank or spec.shape[0] is not None:
        return spec
    return tf.TensorSpec([KNOWN_ROWS, *spec.shape[1:]], spec.dtype)


def _any_rows(spec: tf.TensorSpec) -> tf.TensorSpec:
    """The specs for any number of rows: microbatches may be smaller than a model's fixed batch size."""
    return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype) if spec.shape.rank else spec
