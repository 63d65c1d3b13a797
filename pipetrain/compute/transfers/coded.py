"""What the workers, the parents and the root of a tree compute of one minibatch, as functions for any device.

Gradients travel as one flat message of each type, with the loss beside them: whatever combination gives the sum of the
gradients gives that of the losses.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from pipetrain.compute.functions.graph_rewrite import sharing_constants, unpacker
from pipetrain.compute.functions.kernels import direct
from pipetrain.compute.functions.split import specs
from pipetrain.compute.functions.stage_values import BoundaryTensors
from pipetrain.compute.graph.sharing import is_seed
from pipetrain.compute.transfers.message import MessageLayout
from pipetrain.compute.transfers.weights import Made, Shares, Weights
from pipetrain.schemes.transfers.plan import Pack

Messages = list[tf.Tensor]  # one for each type
MIXED = 2654435769  # an odd number, by which neighbouring streams of random numbers are far apart
DRAWING = {  # TensorFlow's random operations that have a generator of their own
    "Multinomial",
    "ParameterizedTruncatedNormal",
    "RandomGamma",
    "RandomPoissonV2",
    "RandomShuffle",
    "RandomStandardNormal",
    "RandomUniform",
    "RandomUniformInt",
    "TruncatedNormal",
}


class Computed(NamedTuple):
    """What a worker makes of its rows.

    Messages for its parent, the outputs and, if the loss is one for every row, the losses of all its rows in order, and
    the seeds that the minibatch leaves.
    """

    messages: Messages
    output: BoundaryTensors | None
    losses: tf.Tensor | None
    seeds: list[tf.Tensor]


class CodedUpdate(NamedTuple):
    """The new weights as messages, the minibatch's loss as far as it is one number, and the layers' own."""

    weights: Messages
    loss: tf.Tensor
    penalty: tf.Tensor


class WorkerInputs(NamedTuple):
    """What a worker is given of a minibatch, on its device.

    The rows of all its parts one after another, sorted as ``Weights.sorted`` gives them; how many each part has; for
    each its shares of the loss and of the layers' own losses, and its coefficient; its stream of random numbers.
    """

    inputs: tuple[list[Any], Any]
    sizes: tf.Tensor
    factors: tf.Tensor
    streams: tf.Tensor


def given_numbers(
    sizes: Sequence[int], shares: Sequence[float], of_loss: Sequence[float], coefficients: Sequence[float]
) -> list[Any]:
    """The sizes and the factors of parts as ``WorkerInputs`` has them, in this process."""
    factors = np.array([of_loss, shares, coefficients], np.float32).T
    return [np.array(sizes, np.int32), factors]


def streams_of(parts: Sequence[int]) -> Any:
    """The streams of parts with these numbers; that of the first is Keras' own."""
    return np.array([part * MIXED % 2**32 for part in parts], np.uint32)


class Root(Weights):
    """The weights that the root of a tree updates, and the state with which every step begins."""

    @property
    def seeds(self) -> list[int]:
        """The numbers of the state's variables that are seeds of random numbers."""
        return [n for n, variable in enumerate(self._state.variables) if is_seed(variable)]

    def trace(
        self, masks: Sequence[tf.TensorSpec | None], targets: Any = None, unreached: Collection[int] = ()
    ) -> list[tf.TensorSpec | None]:
        """As that of ``Weights``. Raises ValueError for layers that give equal rows different gradients elsewhere."""
        found = super().trace(masks, targets, unreached)
        variables, seeds = self._state.variables, self.seeds
        changed = [variables[n] for n in self.assigned if n not in seeds] + self.changed
        if changed:
            names = ", ".join(dict.fromkeys(each.path.rpartition("/")[0] or each.path for each in changed))
            raise ValueError(
                "Workers that have the same rows must make the same gradients of them, whoever has others: no layer "
                "may keep what it has seen of its rows, as BatchNormalization does. Received: "
                f"scheme='coded-reduce', layers that assign while they run: {names}. Try LayerNormalization or "
                "GroupNormalization instead, frozen layers, or scheme='all-reduce'."
            )
        self._check_embeddings()
        whole = self.made.graph.as_graph_def()
        types = {node.op for node in chain(whole.node, *(each.node_def for each in whole.library.function))}
        if drawing := sorted(types & DRAWING):
            raise ValueError(
                "Workers that have the same rows must draw the same random numbers for them. Received: "
                f"scheme='coded-reduce', a model with TensorFlow's {', '.join(drawing)}, which has no seed that could "
                "be told. Try keras.random with a keras.random.SeedGenerator, as Dropout has."
            )
        return found

    def _check_embeddings(self) -> None:
        """Raise ValueError where the sum of a word's gradients does not serve in place of those of all its places."""
        weights = self.segment.trainable_variables
        rows = [weights[n].path for n, like in self.gradients_like.items() if isinstance(like, tf.IndexedSlices)]
        if rows and not self._sums_rows:
            raise ValueError(
                "Workers send the sum of the gradients of each word, and this optimizer needs those of all places of "
                f"the word, which it squares or clips one by one. Received: scheme='coded-reduce', embeddings {rows}, "
                f"optimizer={self._told}. Try keras.optimizers.SGD without clipping, or scheme='all-reduce'."
            )

    def state(self) -> list[tf.Tensor]:
        """Taken from the model."""
        with tf.device(self.device):
            self._state.load(0)
            return self._state.values

    def store_state(self, values: Sequence[Any]) -> None:
        """Write it into the model."""
        self._state.store(values)


class CodedFunctions:
    """The functions for weights that are traced, each made when it is first called for.

    Args:
        weights: the root's.
    """

    def __init__(self, weights: Root) -> None:
        self._weights = weights
        variables = dict(enumerate(specs(weights.variables)))
        reached = [*weights.gradients_like]
        self._loss, self._penalty = len(variables), len(variables) + 1
        figures = dict.fromkeys((self._loss, self._penalty), tf.TensorSpec([]))
        self._of_weights = MessageLayout(Pack(tuple(variables), 0), variables)
        self._sent = MessageLayout(Pack((*reached, self._loss, self._penalty), 0), variables | figures)
        self._numbers, self.seeds = reached, weights.seeds
        self._functions: dict[Any, Any] = {}
        self._tracing = threading.RLock()
        _, self._state, self._differentiable, self._constants, _ = weights.made.structured_input_signature[0]
        nothing = {n: tf.zeros(spec.shape, spec.dtype) for n, spec in (variables | figures).items()}
        self._nothing = [each.numpy() for each in self._sent.messages(nothing)]
        of_weights = {n: tf.zeros(spec.shape, spec.dtype) for n, spec in variables.items()}
        self._weight_specs = _specs_of(self._of_weights.messages(of_weights))
        self.captured = [each for each in weights.made.captured_inputs if each.dtype not in (tf.resource, tf.variant)]

    @property
    def size_bytes(self) -> int:
        """Of what a worker sends its parent."""
        return sum(each.nbytes for each in self._nothing)

    def _function(self, key: Any, body: Any, *arguments: Any) -> Any:
        with self._tracing, tf.device(None):  # all threads want the first ones at the same time, for any device
            if key not in self._functions:
                traced = tf.function(body, autograph=False).get_concrete_function(*arguments)
                self._functions[key] = direct(traced)
            return self._functions[key]

    def _message_specs(self) -> list[tf.TensorSpec]:
        return [tf.TensorSpec(each.shape, each.dtype) for each in self._nothing]

    def nothing(self) -> Messages:
        """The messages of a worker without rows, on the current device."""
        return [tf.constant(each) for each in self._nothing]

    def read(self) -> Messages:
        """The root's weights as messages."""
        return list(self._function("read", self._read)())

    def _read(self) -> Messages:
        with tf.device(self._weights.device):
            values = {n: each.value.read_value() for n, each in enumerate(self._weights.variables)}
            return self._of_weights.messages(values)

    def compute(
        self,
        weights: Messages,
        state: Sequence[Any],
        seeds: Sequence[Any],
        captured: Sequence[Any],
        given: WorkerInputs,
    ) -> Computed:
        """The gradients of a worker's rows, on the current device, where all arguments are.

        ``state`` are the values of what is no weight, without the seeds.
        """
        parts = int(given.sizes.shape[0])
        function = self._function(("compute", parts), self._compute, *self._argument_specs(parts))
        found: Computed = function(weights, state, seeds, captured, given)
        return found

    def _argument_specs(self, parts: int) -> tuple[Any, ...]:
        numbers = tf.TensorSpec([parts], tf.int32), tf.TensorSpec([parts, 3]), tf.TensorSpec([parts], tf.uint32)
        return (
            self._weight_specs,
            [each for n, each in enumerate(self._state) if n not in self.seeds],
            [self._state[n] for n in self.seeds],
            specs(self.captured),
            WorkerInputs((self._differentiable, self._constants), *numbers),
        )

    def _part(self, weights: Any, state: Any, differentiable: Any, constants: Any, shares: Any, captured: Any) -> Made:
        made = self._weights.made
        flat: list[tf.Tensor] = []
        unpacker(made.structured_input_signature[0])((weights, state, differentiable, constants, shares), flat)
        graph, others = tf.compat.v1.get_default_graph(), iter(captured)
        resources = (tf.resource, tf.variant)
        flat += [graph.capture(each) if each.dtype in resources else next(others) for each in made.captured_inputs]
        found: Made = sharing_constants(made, flat)
        return found

    def _compute(self, weights: Messages, rest: Any, seeds: Any, captured: Any, given: WorkerInputs) -> Computed:
        part = tf.function(self._part, autograph=False)
        values, total = self._of_weights.values(weights), None
        in_order, count = [values[n] for n in range(len(values))], int(given.sizes.shape[0])
        leaves = [_divided(each, given.sizes, count) for each in tf.nest.flatten(given.inputs)]
        made: list[Made] = []
        left: list[tf.Tensor] = []
        for n in range(count):
            differentiable, constants = tf.nest.pack_sequence_as(given.inputs, [each[n] for each in leaves])
            state, offset = iter(rest), tf.stack([given.streams[n], tf.constant(0, tf.uint32)])
            own = iter([seed + tf.cast(offset, seed.dtype) for seed in seeds])
            mine = [next(own if k in self.seeds else state) for k in range(len(self._state))]
            shares = Shares(given.factors[n, 0], given.factors[n, 1])
            made.append(part(in_order, mine, differentiable, constants, shares, captured))
            messages = [each * tf.cast(given.factors[n, 2], each.dtype) for each in self._messages(made[-1])]
            total = messages if total is None else [a + b for a, b in zip(total, messages, strict=True)]
            if not left:
                after = dict(zip(self._weights.assigned, made[0].state, strict=True))
                left = [after.get(k, mine[k]) - tf.cast(offset, mine[k].dtype) for k in self.seeds]
        outputs = [each.output for each in made]
        losses = tf.concat([each.loss for each in made], 0) if made[0].loss.shape.rank else None
        return Computed(total or [], _joined(outputs), losses, left)

    def _messages(self, made: Made) -> Messages:
        gradients: dict[int, Any] = {n: tf.convert_to_tensor(made.gradients[n]) for n in self._numbers}
        gradients[self._loss] = tf.zeros([]) if made.loss.shape.rank else made.loss
        gradients[self._penalty] = tf.zeros([]) if made.penalty is None else made.penalty
        return self._sent.messages(gradients)

    def combined(self, own: Messages, children: Sequence[Messages], coefficients: tuple[float, ...]) -> Messages:
        """The parent's own messages, and the sum that follows from its children's; on the current device.

        ``children`` may be on others.
        """
        like = self._message_specs()
        function = self._function(
            ("combined", coefficients), partial(self._combined, coefficients), like, [like] * len(children)
        )
        return list(function(own, children))

    @staticmethod
    def _combined(coefficients: Sequence[float], own: Messages, children: Sequence[Messages]) -> Messages:
        return [a + b for a, b in zip(own, _decoded(coefficients, children), strict=True)]

    def update(self, children: Sequence[Messages], coefficients: tuple[float, ...]) -> CodedUpdate:
        """One step of the root's optimizer, by the sum that follows from the messages of its children, which it has."""
        like = [self._message_specs()] * len(children)
        function = self._function(("update", coefficients), partial(self._update, coefficients), like)
        found: CodedUpdate = function(children)
        return found

    def _update(self, coefficients: Sequence[float], children: Sequence[Messages]) -> CodedUpdate:
        with tf.device(self._weights.device):
            values = self._sent.values(_decoded(coefficients, children))
            loss, penalty = values.pop(self._loss), values.pop(self._penalty)
            self._weights.apply(self._weights.groups, lambda group: values)
            return CodedUpdate(self._read(), loss, penalty)


def _decoded(coefficients: Sequence[float], children: Sequence[Messages]) -> Messages:
    found = []
    for messages in zip(*children, strict=True):
        total = None
        for coefficient, message in zip(coefficients, messages, strict=True):
            scaled = message if coefficient == 1.0 else message * tf.constant(coefficient, message.dtype)
            total = scaled if total is None else tf.raw_ops.Snapshot(input=total + scaled)
        found.append(total)
    return found


def _divided(tensor: Any, sizes: tf.Tensor, count: int) -> list[Any]:
    if tensor is None or count == 1:
        return [tensor] * count
    return list(tf.split(tensor, sizes, num=count))


def _joined(outputs: Sequence[BoundaryTensors]) -> BoundaryTensors:
    tensors = [tf.concat(each, 0) for each in zip(*(output.tensors for output in outputs), strict=True)]
    masks = [
        None if each[0] is None else tf.concat(each, 0)
        for each in zip(*(output.masks for output in outputs), strict=True)
    ]
    return BoundaryTensors(tensors, masks)


def _specs_of(tensors: Sequence[tf.Tensor]) -> list[tf.TensorSpec]:
    return [tf.TensorSpec(each.shape, each.dtype) for each in tensors]
