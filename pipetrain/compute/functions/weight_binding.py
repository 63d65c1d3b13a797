"""A stage's forward and backward bound to its variables: calls read and predict the newest weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import keras
import tensorflow as tf

from pipetrain.compute.functions.graph_rewrite import inlined, made_when_needed
from pipetrain.compute.functions.kernels import Kernels


class Newest(NamedTuple):
    """The stage's newest weights, ``horizon`` minibatches ahead along the velocity: a description, not yet tensors."""

    horizon: float = 0


Tensors = list[tf.Tensor]


class OfGroups(NamedTuple):
    """The weights of a stage that has several groups of them: for each the newest, or tensors."""

    groups: tuple[Newest | Tensors, ...]

    @property
    def are_tensors(self) -> bool:
        """Whether nothing is described only."""
        return not any(isinstance(each, Newest) for each in self.groups)


Weights = Newest | Tensors | OfGroups


class Bindable(Protocol):
    """Variables that are updated together: which of a stage's weights they are, and their values so far ahead."""

    variables: list[keras.Variable]
    numbers: list[int]

    def predicted(self, horizon: tf.Tensor) -> list[tf.Tensor]:
        """The values ``horizon`` minibatches ahead."""


class BoundFunction:
    """``call(weights, *others)`` for weights that are tensors, the newest, or predicted from the newest.

    Reading variables one by one from Python would cost more than a small stage's whole forward, and predicted
    weights need not exist outside the call that uses them.

    Args:
        call: a concrete function whose first argument are the weights.
        groups: the stage's variables.
        constant: a number as a tensor of a type, on the stage's device.
        kernels: what runs it.
    """

    def __init__(
        self,
        call: Any,
        groups: Sequence[Bindable],
        constant: Callable[[float, tf.DType], tf.Tensor],
        kernels: Kernels,
    ) -> None:
        self._kernels = kernels
        self._given = kernels.of(call)
        self._call, self._groups, self._constant = call, list(groups), constant
        self._weights, *self._others = call.structured_input_signature[0]
        self._newest: Any = None
        self._ahead: Any = None
        self._mixed: dict[tuple[bool | None, ...], Any] = {}

    def __call__(self, weights: Weights, *others: Any) -> Any:
        """Call with these weights."""
        if isinstance(weights, OfGroups):
            return self._call_with(weights.groups, others)
        if not isinstance(weights, Newest):
            return self._given(weights, *others)
        if not weights.horizon:
            if self._newest is None:
                self._newest = self._trace(self._with_newest)
            return self._newest(*others)
        if self._ahead is None:
            self._ahead = self._trace(self._with_predicted, tf.TensorSpec([]))
        return self._ahead(self._constant(float(weights.horizon), tf.float32), *others)

    def _call_with(self, weights: Sequence[Newest | Tensors], others: Sequence[Any]) -> Any:
        """Call with weights of every group; functions are traced for what is predicted and what is given."""
        kinds = tuple(bool(each.horizon) if isinstance(each, Newest) else None for each in weights)
        horizons = [
            self._constant(float(each.horizon), tf.float32)
            for each in weights
            if isinstance(each, Newest) and each.horizon
        ]
        given = [each for each in weights if not isinstance(each, Newest)]
        if kinds not in self._mixed:
            pairs = zip(kinds, self._groups, strict=True)
            specs = [[self._weights[n] for n in group.numbers] for kind, group in pairs if kind is None]
            horizon_specs = [tf.TensorSpec([]) for _ in horizons]
            self._mixed[kinds] = self._trace(partial(self._with_groups, kinds), horizon_specs, specs)
        return self._mixed[kinds](horizons, given, *others)

    def _with_groups(self, kinds: Sequence[bool | None], horizons: Any, given: Any, *others: Any) -> Any:
        ahead, tensors = iter(horizons), iter(given)
        weights: dict[int, tf.Tensor] = {}
        predicted: list[tf.Tensor] = []
        for kind, group in zip(kinds, self._groups, strict=True):
            values = next(tensors) if kind is None else group.predicted(next(ahead)) if kind else _read(group)
            predicted += values if kind else []
            weights.update(zip(group.numbers, values, strict=True))
        in_order = [weights[n] for n in range(len(weights))]
        if not predicted:
            return self._call(in_order, *others)
        result = inlined(self._call, in_order, *others)
        made_when_needed(predicted)
        return result

    def _with_newest(self, *others: Any) -> Any:
        (group,) = self._groups
        return self._call(_read(group), *others)

    def _with_predicted(self, horizon: tf.Tensor, *others: Any) -> Any:
        (group,) = self._groups
        predicted = group.predicted(horizon)
        result = inlined(self._call, predicted, *others)
        made_when_needed(predicted)
        return result

    def _trace(self, function: Callable[..., Any], *first: Any) -> Any:
        return self._kernels.op(function, *first, *self._others)


def _read(group: Bindable) -> list[tf.Tensor]:
    return [variable.value.read_value() for variable in group.variables]


def any_rows(values: Any) -> Any:
    """Specs of nested tensors for any number of rows; None stays None."""

    def spec(value: Any) -> Any:
        if value is None:
            return None
        return tf.TensorSpec([None, *value.shape[1:]] if len(value.shape) else [], value.dtype)

    return tf.nest.map_structure(spec, values)
