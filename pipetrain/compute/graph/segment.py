"""Any run of neighbouring layer calls of a model as a layer of its own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from pipetrain.compute.graph.inputs import memories
from pipetrain.compute.keras_private import global_seed, mask_of, set_mask

NONE: Mapping[int, int] = MappingProxyType({})
DIFFERENTIABLE = ("bfloat16", "float16", "float32", "float64", "complex64", "complex128")


class Call(NamedTuple):
    """One call of a layer or operation, on the values ``reads``, making the values ``writes``.

    ``node`` is Keras' record of the call: its arguments, and the symbolic tensors in and out. ``unread`` are those of
    the layer's weights that other calls read and this one does not, by their ``id``.
    """

    name: str
    operation: Any
    node: Any
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    unread: frozenset[int] = frozenset()

    @property
    def weights(self) -> list[keras.Variable]:
        """The trained weights that it reads.

        A frozen layer lists none itself, though layers inside it may be trained, such as those that have adapters.
        """
        variables = getattr(self.operation, "variables", ())
        return [each for each in variables if each.trainable and id(each) not in self.unread]


class Sides:
    """Variables that are trained, and others; no list of Keras', which would make them a layer's own.

    Args:
        trained, fixed: the variables.
    """

    def __init__(self, trained: Sequence[keras.Variable], fixed: Sequence[keras.Variable]) -> None:
        self.trained, self.fixed = trained, fixed


class Segment(keras.Layer):
    """Layer calls as one layer, which uses the model's own layers: nothing is copied.

    Takes a list of tensors, the values ``reads``, and returns one, the values ``writes``; a value may pass unchanged.
    Calling the layers from their recorded nodes leaves the model's own graph as it is, where a sub-model over the same
    layers would add to it.

    Args:
        calls: in an order in which they can run.
        reads: the values that come in.
        writes: the values that go out.
        symbols: the symbolic tensor of every value.
        differentiable: which values that come in need a gradient.
        returns: which values that go out need one.
        before: how many earlier calls have each variable, by its ``id``. A weight's regularizer counts at its first.
        earlier: the calls before these.
        draws: which of the chain's calls draw from Keras' global seed, as traces have found.

    ``memories`` are the states of its stateful recurrent layers. Which variables are trained is as it was when the
    segment was made: as in plain Keras, ``trainable`` takes effect with the next ``compile``.
    """

    def __init__(
        self,
        calls: Sequence[Call],
        reads: Sequence[int],
        writes: Sequence[int],
        symbols: Sequence[Any],
        differentiable: Sequence[bool],
        returns: Sequence[bool],
        before: Mapping[int, int] = NONE,
        earlier: Sequence[Call] = (),
        draws: GlobalDraws | None = None,
    ) -> None:
        super().__init__(autocast=False)
        self.supports_masking = True
        self._calls = list(calls)
        read = {id(each) for call in calls for each in call.weights}
        self._unread = {each for call in calls for each in call.unread} - read
        self._operations = [call.operation for call in calls]  # a list of layers, so that Keras finds their variables
        self._trains = [_takes_training(operation) for operation in self._operations]
        self.reads, self.writes = list(reads), list(writes)
        self.inputs = [symbols[value] for value in reads]
        self.outputs = [symbols[value] for value in writes]
        self.differentiable, self.returns, self.before = list(differentiable), list(returns), before
        self.memories = memories(self._operations)  # which Keras then finds among its variables
        self._global = draws or GlobalDraws()
        self._earlier = [id(call.node) for call in earlier]
        self.built = True
        trained = [each for each in super().trainable_variables if id(each) not in self._unread]
        self._sides = Sides(trained, super().non_trainable_variables)

    @classmethod
    def of_call(cls, call: Call, symbols: Sequence[Any]) -> Segment:
        """One call alone, of which nothing needs a gradient."""
        reads = list(dict.fromkeys(call.reads))
        return cls([call], reads, call.writes, symbols, [False] * len(reads), [False] * len(call.writes))

    @property
    def trainable_variables(self) -> list[keras.Variable]:
        """Keras', without weights that no call here reads."""
        return list(self._sides.trained)

    @property
    def trainable_weights(self) -> list[keras.Variable]:
        """The same, from which Keras makes the losses of regularizers."""
        return list(self._sides.trained)

    @property
    def non_trainable_variables(self) -> list[keras.Variable]:
        """Keras', as of when the segment was made."""
        return list(self._sides.fixed)

    @property
    def about(self) -> str:
        """Its layers, as text."""
        names = [operation.name for operation in self._operations if isinstance(operation, keras.Layer)]
        return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}" if names else "the stage"

    def call(self, inputs: Sequence[Any], training: bool | None = None) -> list[Any]:
        """Run the calls as a Functional model would: its training mode overrides that of the recorded calls."""
        outputs = self.values(inputs, training)
        for value, symbol in zip(outputs, self.outputs, strict=True):
            if is_composite(value):
                raise ValueError(
                    "A ragged or sparse tensor crosses no cut and is no output of a model that is cut. Received: "
                    f"{symbol.name!r}, a {type(value).__name__}. Try to_tensor() or tf.sparse.to_dense before the cut."
                )
        return [_typed(value, symbol) for value, symbol in zip(outputs, self.outputs, strict=True)]

    def values(self, inputs: Sequence[Any], training: bool | None = None) -> list[Any]:
        """The values ``writes`` as the calls make them."""
        values = dict(zip(self.reads, inputs, strict=True))
        for call, trains in zip(self._calls, self._trains, strict=True):
            self._global.running = id(call.node)
            tensors = zip(call.node.input_tensors, call.reads, strict=True)
            args, kwargs = call.node.arguments.fill_in({id(t): adapted(values[value], t) for t, value in tensors})
            if trains and training is not None:
                kwargs["training"] = training
            outputs = keras.tree.flatten(call.operation(*args, **kwargs))
            values.update(zip(call.writes, outputs, strict=True))
        return [values[value] for value in self.writes]

    def state(self, training: bool) -> list[keras.Variable]:
        """The variables that are no trained weights, with Keras' global seed where a trace has found that it is drawn.

        That is the last of them.
        """
        drawn = self._global.count((id(call.node) for call in self._calls), training)
        return [*self.non_trainable_variables, *([global_seed()] if drawn else [])]

    def users_before(self, variable: keras.Variable, training: bool) -> int:
        """How many earlier calls have a variable, or draw from Keras' global seed."""
        if variable is global_seed(make=False):
            return self._global.count(self._earlier, training)
        return self.before.get(id(variable), 0)

    def compute_mask(self, inputs: Any, previous_mask: Any) -> None:
        """Nothing is computed here: every output has the mask that its layer gave it."""

    def run(
        self,
        weights: Sequence[Any],
        state: Sequence[Any],
        differentiable: Sequence[Any],
        others: Sequence[Any],
        masks: Any,
    ) -> SegmentResult:
        """The calls in training mode as a pure function.

        ``weights`` and ``state`` stand for the trainable and the other variables, ``differentiable`` are the inputs
        that want a gradient and ``others`` the rest, ``masks`` those of all inputs. As in plain Keras, no gradient goes
        through what a layer assigns to its state or weights. Raises ValueError for a layer that assigns to anything
        else.
        """
        flowing, still = iter(differentiable), iter(others)
        tensors = [next(flowing if flow else still) for flow in self.differentiable]
        return self._pure(weights, state, tensors, masks, training=True)

    def infer(self, weights: Sequence[Any], state: Sequence[Any], tensors: Sequence[Any], masks: Any) -> SegmentResult:
        """``run`` in inference mode, for inputs that want no gradient."""
        return self._pure(weights, state, tensors, masks, training=False)

    def added_losses(
        self, weights: Sequence[Any], state: Sequence[Any], tensors: Sequence[Any], masks: Any, training: bool
    ) -> list[Any]:
        """The layers' own losses without those of weights, which are the last of ``run``'s."""
        penalties = self._pure(weights, state, tensors, masks, training).penalties
        return penalties[: self.added(penalties)]

    def added(self, penalties: Sequence[Any]) -> int:
        """How many of the layers' own losses are not regularizers of weights."""
        return len(penalties) - sum(id(variable) not in self.before for variable in self._regularized())

    def _regularized(self) -> list[keras.Variable]:
        """In Keras' order of their losses, which come after all others."""
        return [variable for variable in self.trainable_variables if variable.regularizer is not None]

    def _pure(
        self, weights: Sequence[Any], state: Sequence[Any], tensors: Sequence[Any], masks: Any, training: bool
    ) -> SegmentResult:
        for tensor, mask in zip(tensors, masks, strict=True):
            set_mask(tensor, mask)
        changing = self.state(training)[: len(state)]  # a first trace may be without a seed that it will find
        trained = list(zip(self.trainable_variables, weights, strict=True))
        other = list(zip(changing, state, strict=True))
        scope = _Scope(trained if training else [], other, lambda: self._global.found(training))
        scope.set([] if training else trained)
        with scope:
            outputs = self(tensors, training=training)  # a call of Keras' own: what is inside the layers knows it too
            penalties = list(self.losses)
        regularized = self._regularized()
        own = penalties[: len(penalties) - len(regularized)]
        pairs = zip(regularized, penalties[len(own) :], strict=True)
        penalties = [*own, *(loss for variable, loss in pairs if id(variable) not in self.before)]
        after, left = ([scope.get_current_value(variable) for variable, _ in pairs] for pairs in (other, trained))
        return SegmentResult(outputs, after, penalties, left)


class SegmentResult(NamedTuple):
    """What a run of the calls gives: outputs, the new state, the layers' own losses, and the weights that it leaves.

    A weight that no layer assigns to is the given one.
    """

    outputs: list[Any]
    state: list[Any]
    penalties: list[Any]
    weights: list[Any]


class GlobalDraws:
    """Which calls of a chain draw from Keras' global seed, known from where traces have seen them do so.

    ``running`` is the call that is being traced, by the ``id`` of its node.
    """

    def __init__(self) -> None:
        self.running = 0
        self._drawing: set[tuple[int, bool]] = set()

    def found(self, training: bool) -> None:
        """The running call draws, in training or in inference."""
        self._drawing.add((self.running, training))

    def count(self, calls: Iterable[int], training: bool) -> int:
        """How many of these calls draw."""
        return sum((call, training) in self._drawing for call in calls)


class _Scope(keras.StatelessScope):
    """Collects what layers assign to trained weights and to state, given as pairs of a variable and its value.

    ``drawn`` is told of Keras' global seed, if it is none of the state.
    """

    def __init__(
        self, weights: Sequence[tuple[Any, Any]], state: Sequence[tuple[Any, Any]], drawn: Callable[[], None]
    ) -> None:
        super().__init__(collect_losses=True)
        self.set([*weights, *state])
        self._state, self._drawn = {id(variable) for variable, _ in state}, drawn
        self._weights = {id(variable): weight for variable, weight in weights}

    def set(self, values: Sequence[tuple[Any, Any]]) -> None:
        """What layers read of these variables. Not given to Keras, which would refuse some rows of recurrent states."""
        self.state_mapping.update((id(variable), value) for variable, value in values)

    def add_update(self, update: tuple[Any, Any]) -> None:
        variable, value = update
        if variable is global_seed(make=False):
            self._drawn()
        elif id(variable) in self._weights:
            value = _in_place_of(self._weights[id(variable)], tf.stop_gradient(value))
        elif id(variable) not in self._state:
            raise ValueError(
                "A layer assigns, while it runs, to a variable that is neither state nor a weight of its own, or in "
                "inference to a weight that is trained. A pipeline would lose it. "
                f"Received: variable {variable.path!r} of shape {tuple(variable.shape)}. Try a layer without it: "
                "add_weight(trainable=False)."
            )
        else:
            value = tf.stop_gradient(value)
        super().add_update((variable, value))


@tf.custom_gradient
def _in_place_of(weight: tf.Tensor, value: tf.Tensor) -> Any:
    """The value that a layer assigns to a weight; gradients by it are gradients by the weight, as by a variable."""
    return tf.identity(value), lambda gradient: (gradient, None)


def assigned_to(given: Sequence[Any], after: Sequence[Any]) -> list[int]:
    """The numbers of the variables that a run has assigned to, from their values before and after it."""
    return [n for n, (old, new) in enumerate(zip(given, after, strict=True)) if new is not old]


def is_composite(value: Any) -> bool:
    """Whether this is a ragged or sparse tensor, or the spec of one."""
    return isinstance(value, tf.RaggedTensor | tf.SparseTensor | tf.RaggedTensorSpec | tf.SparseTensorSpec)


def is_differentiable(dtype: Any) -> bool:
    """Whether TensorFlow makes gradients of tensors of this type."""
    return tf.as_dtype(dtype).name in DIFFERENTIABLE


def _typed(value: Any, symbol: Any) -> Any:
    """The value in the type that its layer declares: some of Keras' layers give another."""
    if value.dtype == symbol.dtype:
        return value
    typed = tf.cast(value, symbol.dtype)
    set_mask(typed, mask_of(value))
    return typed


def _takes_training(operation: Any) -> bool:
    return isinstance(operation, keras.Layer) and "training" in inspect.signature(operation.call).parameters


def adapted(value: Any, symbol: Any) -> Any:
    """The value in a symbolic input's type and rank, as a Functional model takes it; its mask stays with it."""
    shaped, rank, expected = value, len(value.shape), len(symbol.shape)
    if rank == expected - 1 and symbol.shape[-1] == 1:
        shaped = value[..., None]
    elif rank == expected + 1 and value.shape[-1] == 1:
        shaped = tf.squeeze(value, -1)
    if shaped.dtype != symbol.dtype:
        shaped = tf.cast(shaped, symbol.dtype)
    if shaped is not value:
        set_mask(shaped, mask_of(value))
    return shaped
