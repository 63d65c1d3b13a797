"""One step of a stage's optimizer, and the prediction of weights some steps ahead."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from pipetrain.compute.keras_private import averages_of, count_of, decay_of, rate_of
from pipetrain.compute.optimizer.clone import Rescaled, SpikeCompensated, clone, whole_step
from pipetrain.compute.optimizer.slots import Slot, slots
from pipetrain.compute.optimizer.velocity import HorizonFit, Velocity, is_adam, velocity_of
from pipetrain.compute.tensorflow_private import without_gradients
from pipetrain.schemes.policies import decayed, predict
from pipetrain.schemes.scheme import UpdateRule

LEAST_DECAY = 1e-12  # ``decayed`` divides by it


class Update:
    """Applies gradients to variables and predicts them: ``W[t+s] ~ W[t] + s * v`` (see ``schemes.policies``).

    Args:
        optimizer: built for the variables.
        variables: what it updates.
        rule: what an update does in addition; by default nothing.
        untrained: gives the variables that no gradient reaches, which Keras does not change.
    """

    def __init__(
        self,
        optimizer: keras.optimizers.Optimizer,
        variables: Sequence[keras.Variable],
        rule: UpdateRule = UpdateRule(),  # noqa: B008 - a tuple, never changed
        untrained: Callable[[], Sequence[keras.Variable]] = tuple,
    ) -> None:
        self._optimizer, self._variables = optimizer, list(variables)
        self._every = optimizer.gradient_accumulation_steps or 1  # minibatches an update
        self._is_whole = bool(whole_step(optimizer))
        self._by_one = rule.horizons == {1} and self._every == 1
        self._rate: tf.Variable | None = None
        self._velocity: Velocity | None = None
        self.fit: HorizonFit | None = None
        self._untrained = untrained
        if rule.predicts and (is_adam(optimizer) or optimizer.weight_decay):
            self._rate = tf.Variable(0.0, trainable=False)  # of the last step, which slots or decay do not carry
        if rule.predicts:
            self._velocity = velocity_of(optimizer, self._variables, self._rate, self._after_decay)
        if rule.fit_horizon and self._variables:
            self.fit = HorizonFit(self._variables, self.velocity, self._ahead, rule.fit_horizon)

    def slots(self, weights: Sequence[keras.Variable], holder: int | None = None) -> Iterator[Slot]:
        """The optimizer's slots and what predictions need in addition, each with its one of ``weights``.

        ``holder`` is the stage, where an earlier one has these weights too and fits another multiple.
        """
        yield from slots(self._optimizer, weights)
        if self._velocity is None:
            return
        for weight, variable in zip(weights, self._velocity.kept, strict=False):
            yield Slot(weight, "displacement", variable)
        for weight in weights:  # of the stage, but kept with every weight, which another cut may part
            if self._rate is not None:
                yield Slot(weight, "last_rate", self._rate)
            if self.fit:
                yield Slot(weight, "fit" if holder is None else f"fit_{holder}", self.fit.sums)

    def apply(self, gradients: list[Any], staleness: tf.Tensor | None = None) -> None:
        """One optimizer step; keeps what the next prediction needs and no slot holds.

        An optimizer that accumulates gradients only adds them, unless this is the last minibatch before an update.
        """
        every = [*zip(gradients, self._variables, strict=True)]
        present = [(gradient, variable) for gradient, variable in every if gradient is not None]
        for gradient, variable in present:
            if isinstance(gradient, tf.Tensor):
                gradient.set_shape(variable.shape)  # which some optimizers ask for
        self._correct_by(staleness)
        updates = self._updates_within(tf.constant(1.0)) > 0 if self._every > 1 else None
        if self._rate is not None:
            rate = tf.cast(self._optimizer.learning_rate, tf.float32)
            self._rate.assign(rate if updates is None else tf.where(updates, rate, self._rate))
        before = self._velocity.before() if self._velocity else []
        if _is_momentum(self._optimizer) and self._plain(gradients):
            self._momentum_step(gradients)
        elif present:  # a class of the user's may look at what is missing, too
            with without_gradients():
                self._optimizer.apply_gradients(every if self._is_whole else present)
        else:  # which Keras' own ``apply`` refuses: the weights that are trained may be other stages'
            self._end_step()
        if velocity := self._velocity:
            if updates is None:
                velocity.after(before)
            else:
                tf.cond(updates, lambda: velocity.after(before), lambda: None)
        self._correct_by(None)  # a symbolic tensor is of no use outside its function

    def velocity(self) -> list[tf.Tensor]:
        """The last update of each variable, weight decay left out; zeros before the first step."""
        assert self._velocity is not None  # asked for only where the rule predicts
        return self._velocity.read()

    def predicted(self, horizon: tf.Tensor) -> list[tf.Tensor]:
        """The variables ``horizon`` minibatches ahead."""
        ratio, horizon = self.fit.ratio() if self.fit else None, self._updates_within(horizon)
        predicted = []
        for variable, velocity in zip(self._variables, self.velocity(), strict=True):
            value = variable.value.read_value()
            if self._by_one and ratio is None and not self._decay(variable):
                predicted.append(value + velocity)  # what ``predict`` says of one update, in one pass over memory
                continue
            left, steps = self._ahead(variable, value, horizon)
            if ratio is not None:
                steps = steps * tf.cast(ratio, steps.dtype)
            predicted.append(predict(left, velocity, steps))
        return predicted

    def _updates_within(self, minibatches: tf.Tensor) -> tf.Tensor:
        """How many updates the next minibatches make: as many, unless gradients are accumulated."""
        if self._every == 1:
            return minibatches
        since = tf.convert_to_tensor(count_of(self._optimizer)) % self._every  # the last update
        return tf.floor((tf.cast(since, minibatches.dtype) + minibatches) / self._every)

    def _ahead(self, variable: keras.Variable, value: tf.Tensor, horizon: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """The value that weight decay leaves after ``horizon`` updates, and how many velocities they add to it."""
        if not (by := self._decay(variable)):
            return value, tf.cast(horizon, value.dtype)
        decay = tf.cast(self._rate, tf.float64) * by
        kept, steps = decayed(tf.maximum(decay, LEAST_DECAY), tf.cast(horizon, tf.float64))
        return tf.cast(kept, value.dtype) * value, tf.cast(steps, value.dtype)

    def _correct_by(self, staleness: tf.Tensor | None) -> None:
        for each in (self._optimizer, rate_of(self._optimizer)):
            if isinstance(each, (SpikeCompensated, Rescaled)):
                each.staleness = staleness

    def _decay(self, variable: keras.Variable) -> float:
        """The weight decay of a variable; 0 for none."""
        return 0.0 if any(variable is each for each in self._untrained()) else decay_of(self._optimizer, variable)

    def _after_decay(self, variable: keras.Variable, value: tf.Tensor) -> tf.Tensor:
        """The variable's value after weight decay, with which Keras begins a step."""
        if not (by := self._decay(variable)):
            return value
        decay, rate = (tf.cast(each, value.dtype) for each in (by, self._rate))
        return value - value * decay * rate

    def _plain(self, gradients: list[Any]) -> bool:
        """Whether the step is Keras' momentum rule and nothing else."""
        present = all(gradient is not None for gradient in gradients)
        return present and not _clips(self._optimizer) and not _constrained(self._variables)

    def _momentum_step(self, gradients: list[Any]) -> None:
        """TensorFlow's fused kernel of Keras' rule: one pass over memory, where Keras' operations need several.

        An embedding's momentum is dense, so all its rows are read and written even if its gradient has few rows.
        """
        optimizer = self._optimizer
        dense = [*map(tf.convert_to_tensor, gradients)]
        types = dict.fromkeys(gradient.dtype for gradient in dense)
        numbers = {each: (tf.cast(optimizer.learning_rate, each), tf.cast(optimizer.momentum, each)) for each in types}
        for variable, slot, gradient in zip(self._variables, optimizer.momentums, dense, strict=True):
            rate, momentum = numbers[gradient.dtype]
            tf.raw_ops.ResourceApplyKerasMomentum(
                var=variable.value.handle,
                accum=slot.value.handle,
                lr=rate,
                grad=gradient,
                momentum=momentum,
                use_nesterov=optimizer.nesterov,
            )
        self._end_step()

    def _end_step(self) -> None:
        """What Keras does after a step: average, and count."""
        if averages := averages_of(self._optimizer):
            self._average(averages)
        count_of(self._optimizer).assign_add(1)

    def _average(self, averages: Sequence[Any]) -> None:
        """Keras' rule, one weight at a time: else copies of all would be made. The first average is the weight."""
        optimizer = self._optimizer
        later, before = tf.not_equal(tf.convert_to_tensor(optimizer.iterations), 0), list[Any]()
        for variable, average in zip(self._variables, averages, strict=True):
            if average is not None:
                momentum = tf.where(later, tf.constant(optimizer.ema_momentum, variable.dtype), 0)
                with tf.control_dependencies(before):
                    change = (1 - momentum) * (average.value.read_value() - variable.value.read_value())
                    before = [average.value.assign_sub(change, read_value=False)]


def _clips(optimizer: keras.optimizers.Optimizer) -> bool:
    return bool(optimizer.clipnorm or optimizer.clipvalue or optimizer.global_clipnorm)


def _constrained(variables: Sequence[keras.Variable]) -> bool:
    return any(variable.constraint for variable in variables)


def _is_momentum(optimizer: keras.optimizers.Optimizer) -> bool:
    if optimizer.gradient_accumulation_steps or overwrites(optimizer):
        return False
    return type(optimizer) is keras.optimizers.SGD and bool(optimizer.momentum) and not optimizer.weight_decay


def overwrites(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether the weights are replaced by their averages from time to time."""
    return bool(optimizer.use_ema and optimizer.ema_overwrite_frequency)


def gathers(optimizer: keras.optimizers.Optimizer, rule: UpdateRule, variables: Sequence[keras.Variable]) -> bool:
    """Whether all gradients of a stage are there before the first is used."""
    if rule.spikes or not _is_momentum(optimizer) or _clips(optimizer) or _constrained(variables):
        return True
    return rule.predicts and bool(getattr(optimizer, "nesterov", False))  # the slots are then kept as before the step


def temporaries(optimizer: keras.optimizers.Optimizer) -> int:
    """What the update of a weight makes beside its gradient, in multiples of the weight: two with Keras' operations."""
    return 0 if _is_momentum(optimizer) and not _clips(optimizer) else 2


def slots_per_weight(optimizer: keras.optimizers.Optimizer, rule: UpdateRule) -> int:
    """How many variables an optimizer keeps for each weight, those that predictions need included."""
    kept = _kept(optimizer, rule)
    return sum(tuple(slot.variable.shape) == tuple(slot.weight.shape) for slot in kept)


def kinds_beside(optimizer: keras.optimizers.Optimizer, rule: UpdateRule) -> set[str]:
    """The variables that predictions need and the optimizer has no slots for."""
    return {slot.kind for slot in _kept(optimizer, rule) if not hasattr(optimizer, slot.kind)}


def _kept(optimizer: keras.optimizers.Optimizer, rule: UpdateRule) -> list[Slot]:
    """The slots of one weight."""
    weight = keras.Variable(tf.zeros([2, 3]))
    mine = clone(optimizer, [weight], [weight], rule)
    mine.build([weight])
    return list(Update(mine, [weight], rule).slots([weight]))
