"""A stage for inference: a segment of the model on one device, in inference mode, and the tracing of all stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from pipetrain.compute.cores import is_prompt
from pipetrain.compute.functions.kernels import Kernels, calls_python
from pipetrain.compute.functions.split import specs
from pipetrain.compute.functions.stage import Stage
from pipetrain.compute.functions.stage_function import summed_over_rows, total_penalty
from pipetrain.compute.functions.stage_values import BoundaryTensors, Forward
from pipetrain.compute.functions.state import Division, HeldTensors, State, read_where_it_is
from pipetrain.compute.functions.weight_binding import Newest, Weights, any_rows
from pipetrain.compute.functions.weight_groups import WeightGroup
from pipetrain.compute.graph.segment import Segment, assigned_to
from pipetrain.compute.keras_private import mask_of


class Inference:
    """A run of blocks on one device, forwards only; the weights are on the device between ``load`` and ``outcome``.

    Functions of whole minibatches read the model's own weights instead, where these are on the device, else variables
    that have their values, from ``load_state`` and ``hold_state`` on. The state that a layer assigns in inference mode
    (the seed of a layer that samples) is kept from minibatch to minibatch, and written into the model at the end, as in
    plain Keras.

    Args:
        segment: the blocks.
        device: a TensorFlow device name.
        division: into which parts minibatches are divided of which it is given some.
        compiled: whether XLA compiles it.
    """

    recompute = False
    unreached: Sequence[int] = ()  # there are no gradients
    shared: Sequence[WeightGroup] = ()  # nor updates
    changed: Sequence[int] = ()
    global_clipnorm: float | None = None
    sums: None = None
    loss_dtype = tf.float32

    def __init__(self, segment: Segment, device: str, division: Division = Division(), compiled: bool = False) -> None:  # noqa: B008
        self.segment, self.device, self._division = segment, device, division
        self._kernels = Kernels(compiled, segment.about)
        self.variables: list[keras.Variable] = []  # none is updated here
        self._traced_for: Sequence[Any] | None = None
        self._weights: list[tf.Tensor] = []
        self._held = HeldTensors(device)  # what functions read instead of the model's weights
        self._state = State(segment, False, division, device)

    def show_compiling(self, is_shown: Callable[[], bool]) -> None:
        """Where XLA takes long to compile its functions, a line says so if that ``is_shown`` then."""
        self._kernels.is_shown = is_shown

    def trace(
        self, masks: Sequence[tf.TensorSpec | None], targets: Any = None, unreached: Sequence[int] = ()
    ) -> list[tf.TensorSpec | None]:
        """Trace for inputs with these masks, once. Gives the specs of the outputs' masks."""
        if self._traced_for != list(masks):
            segment = self.segment
            self._trained = list(segment.trainable_variables)
            self._state = State(segment, False, self._division, self.device)
            inputs = any_rows(segment.inputs)
            with tf.device(self.device):
                concrete = self._traced(inputs, list(masks))
            output = concrete.structured_outputs[0]
            self._masks = specs(output.masks)
            self._forward, self.calls_python = self._kernels.of(concrete), calls_python(concrete)
            self._traced_for = list(masks)  # at last: an interrupt may have come before
        return self._masks

    def _traced(self, inputs: list[tf.TensorSpec], masks: list[tf.TensorSpec | None]) -> Any:
        given = specs(self._trained), self._state.specs(), inputs, masks
        self._added, self._summed = 0, []
        concrete = tf.function(self._run, autograph=False).get_concrete_function(*given)
        if self._state.complete():
            return self._traced(inputs, masks)
        if self._state.is_divided and self._added:
            self._summed = summed_over_rows(self.segment, masks, training=False)
            concrete = tf.function(self._run, autograph=False).get_concrete_function(*given)
        return concrete

    def load(self, iterations: int = 0, replica: int = 0) -> None:
        """Take weights and state from the model; nothing else may write them until the work ends."""
        with tf.device(self.device):
            self._weights = [tf.identity(variable.value) for variable in self._trained]
        self.load_state(replica)

    def load_state(self, replica: int) -> None:
        """Take the state alone."""
        with tf.device(self.device):
            self._state.load(replica)

    def hold_state(self) -> bool:
        """Let variables have what functions of whole minibatches read on the device; whether these are new ones.

        They are the state that layers assign, and where the model's own weights are elsewhere, these and all state.
        """
        here = is_prompt(self.device) and all(is_prompt(variable.value.device) for variable in self._trained)
        staying = [n for n in range(len(self._state.variables)) if n not in self._assigned] if here else []
        values = [] if here else [variable.value for variable in self._trained]
        with tf.device(self.device):
            are_new = self._held.take(values, [value.shape for value in values])
            return self._state.hold(staying) or are_new

    def read_state(self) -> None:
        """Weights and state are those of the variables, or where these have none, of the model's own."""
        with tf.device(self.device):
            held = self._held.read()
        self._weights = held or [read_where_it_is(variable) for variable in self._trained]
        self.read_assigned()

    def read_assigned(self) -> None:
        """The state is that of the variables, for ``outcome``."""
        with tf.device(self.device):
            self._state.read()

    def empty(self) -> None:
        """Until ``hold_state`` the device need not have copies of the model's weights and state."""
        self._held.empty()
        self._state.empty()

    def written_state(self) -> list[tf.Operation]:
        """At the end of a function that is traced, let the variables have the state; gives what does that."""
        with tf.device(self.device):
            return self._state.written()

    @property
    def assigns(self) -> bool:
        """Whether a minibatch leaves state to the next one."""
        return bool(self._assigned)

    @property
    def is_compiled(self) -> bool:
        """Whether XLA compiles it."""
        return self._kernels.compiled

    def weights(self, wanted: Weights = Newest()) -> list[tf.Tensor]:  # noqa: B008 - a tuple, never changed
        """The weights on this device."""
        return self._weights

    def forward(self, weights: Weights, values: BoundaryTensors, targets: Any = None) -> Forward:
        """Run the blocks with the weights on this device; the loss is zero, and computed by the caller."""
        output, penalty, assigned = self._forward(self._weights, self._state.values, *values)
        self._state.assign(self._assigned, assigned)
        return Forward(output, tf.zeros([]), penalty, None)

    def outcome(self, others: Sequence[Inference]) -> list[tf.Tensor]:
        """End the work: the state that was assigned; the replicas release all tensors."""
        with tf.device(self.device):
            whole = self._state.whole([each._state for each in others])
        for each in (self, *others):
            each._weights = []
            each._state.release()
        return [whole[n] for n in self._assigned]

    def store(self, values: Sequence[tf.Tensor]) -> None:
        """Write the state that ``outcome`` gave into the model."""
        self._state.store(values, self._assigned)

    def _run(self, weights: Any, state: Any, tensors: Any, masks: Any) -> Any:
        outputs, after, penalties, _ = self.segment.infer(weights, state, tensors, masks)
        self._assigned = assigned_to(state, after)
        values = BoundaryTensors(outputs, [mask_of(output) for output in outputs])
        self._added = self.segment.added(penalties)
        return values, total_penalty(penalties, self._summed), [after[index] for index in self._assigned]


Replica = Stage | Inference  # what runs a stage's part of a pipeline: in training, and where only forwards run


def trace_stages(stages: Sequence[Sequence[Replica]], targets: Any) -> Sequence[Any]:
    """Trace all stages, the last one for labels and sample weights of these specs; gives the specs of outputs' masks.

    Stages on whose outputs the loss does not depend are traced again with this knowledge.
    """
    masks: list[list[Any]] = [[None] * len(stages[0][0].segment.inputs)]
    for stage in stages:
        last = stage is stages[-1]
        masks.append([replica.trace(masks[-1], targets if last else None) for replica in stage][-1])
    for above, given, below in list(zip(stages, masks, stages[1:], strict=False))[::-1]:
        for replica in above if below[0].unreached else ():
            replica.trace(given, None, below[0].unreached)
    return masks[-1]
