"""One training step over several devices, as one function that this process traces and TensorFlow runs on all of them.

Every worker computes the gradients of its rows. With a parameter server the weights come from the servers' devices and
the gradients go there; those weights that are returned in the same step are kept for the next one. Else every worker
has the weights, and the gradients are summed for all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import tensorflow as tf

from pipetrain.compute.functions.flat_values import packing_captures
from pipetrain.compute.functions.graph_rewrite import sharing_constants, unpacker
from pipetrain.compute.functions.split import size_bytes, specs
from pipetrain.compute.functions.stage_values import BoundaryTensors, without_rows
from pipetrain.compute.functions.weight_groups import WeightGroup
from pipetrain.compute.graph.sharing import is_seed
from pipetrain.compute.keras_private import count_of
from pipetrain.compute.optimizer.gradient_scaling import squared_norm
from pipetrain.compute.transfers.compression import Compressor
from pipetrain.compute.transfers.message import (
    Gradients,
    MessageLayout,
    Order,
    Received,
    Record,
    RecordedMessage,
    What,
    reduced,
    sent,
)
from pipetrain.compute.transfers.outer_step import OwnWeights, Reduce
from pipetrain.compute.transfers.weights import Made, Shares, Weights, Worker, placed
from pipetrain.schemes.transfers.plan import Phase, Plan


class StepResult(NamedTuple):
    """The minibatch's loss, a number or one for every row, and the model's outputs, on this process's device.

    ``times`` are those of the messages, if they are recorded, see ``Record``.
    """

    loss: tf.Tensor
    output: BoundaryTensors
    times: tf.Tensor | None


class Rows(NamedTuple):
    """What one worker is given: its number, its inputs as ``Weights.sorted`` gives them, and its shares."""

    worker: int
    inputs: tuple[list[Any], Any]
    shares: Shares


class TransferStep:
    """The step's functions: for minibatches of which these workers have rows, with or without late gradients.

    Args:
        weights: of every worker, or only those of the servers.
        workers: that compute.
        plan: of the transfers.
        serves: whether the weights are on servers.
        host: this process's device, to which results come.
        begun: called in each step when all workers have the weights that their forward reads.
        returns_outputs: whether results have the outputs of all rows, else of none.
        compressor: sums gradients that are compressed on their way, if they are.
        outer: brings the weights of workers that update their own together, if they do.
        is_ring: whether sums of all workers are made on a ring.
        is_stale: whether workers compute with the weights from before the late gradients are applied.
    """

    def __init__(
        self,
        weights: Sequence[Weights],
        workers: Sequence[Worker],
        plan: Plan,
        serves: bool,
        host: str,
        begun: Callable[[], None] | None = None,
        returns_outputs: bool = True,
        compressor: Compressor | None = None,
        outer: OwnWeights | None = None,
        is_ring: bool = False,
        is_stale: bool = False,
    ) -> None:
        self._is_ring, self._is_stale = is_ring, is_stale
        self._begun, self._returns_outputs, self._compressor, self._outer = begun, returns_outputs, compressor, outer
        self._weights, self._workers, self._serves, self._host = list(weights), list(workers), serves, host
        self._like, self._made = weights[0].gradients_like, weights[0].made
        self._sizes_bytes = [size_bytes(each) for each in specs(weights[0].variables)]
        self._plan = plan
        self._late_numbers = [n for n in plan.late_variables if n in self._like]
        self._pending = [self._zeros(worker, self._late_numbers) for worker in workers]
        with tf.device(workers[0].device):
            self._waits = tf.Variable(False, trainable=False)  # whether there are late gradients
        self._server = {n: group.device for group in weights[0].groups for n in group.numbers} if serves else {}
        self._returned = [self._zeros(worker, self._returned_to(worker)) for worker in workers]
        captured = self._made.captured_inputs
        self._captured = [[placed(each, worker.device) for each in captured] for worker in workers]
        self._functions: dict[Any, Any] = {}
        self._record: Record | None = None  # of the function that is being traced
        self._phase = self._late_phase = 0  # of the compression: of this step, and of the gradients that wait
        self._sent: dict[Any, list[RecordedMessage]] = {}

    def _zeros(self, worker: Worker, numbers: Sequence[int]) -> dict[int, tf.Variable]:
        """What a worker has for the next step: gradients that wait, or returned weights, of these variables."""
        with tf.device(worker.device):
            shapes = {n: self._weights[0].variables[n] for n in numbers}
            return {n: tf.Variable(tf.zeros(each.shape, each.dtype), trainable=False) for n, each in shapes.items()}

    def _returned_to(self, worker: Worker) -> list[int]:
        """The weights that are returned to a worker; what is on its own device it reads there."""
        return [n for n in self._plan.returned_variables if self._server[n] != worker.device]

    @property
    def is_late(self) -> bool:
        """Whether some gradients are applied in the step after the one that made them."""
        return bool(self._late_numbers)

    @property
    def waits(self) -> bool:
        """Whether gradients of the last step wait, as far as the workers know it."""
        return self.is_late and bool(self._waits.numpy())

    def at(self, updates: int) -> None:
        """What follows is of the step that follows so many updates: functions of another phase are not needed again."""
        if self._compressor is not None:
            options = self._compressor.options
            phases = options.phase(updates), options.phase(max(0, updates - 1))
            if phases != (self._phase, self._late_phase):
                self._phase, self._late_phase = phases
                self._functions.clear()
                self._sent.clear()

    def __call__(
        self, rows: Sequence[Rows], pending: bool, records: bool, joins: int | None = None
    ) -> tuple[StepResult, list[RecordedMessage]]:
        """One step, and the messages that were recorded if it ``records`` them.

        ``pending`` says whether gradients of the last step are to be applied first, ``joins`` which fragment of their
        weights workers with weights of their own exchange, if any: in the end, or while they compute, see
        ``OwnWeights``.
        """
        active = tuple(each.worker for each in rows)
        given = [(each.inputs, each.shares) for each in rows]
        key = active, pending, records, joins
        if key not in self._functions:
            *_, differentiable, constants, shares = self._made.structured_input_signature[0]
            function = tf.function(packing_captures(partial(self._body, active, pending, joins)), autograph=False)
            specs = [((differentiable, constants), shares) for _ in active]
            self._record = Record() if records else None
            self._functions[key] = function.get_concrete_function(specs)
            self._sent[key], self._record = self._record.messages if self._record else [], None
        result: StepResult = self._functions[key](given)
        return result, self._sent[key]

    def prepare(self) -> None:
        """Give the workers the weights that a step before the first one would have returned."""
        if self._plan.returned.packs:
            self._call(self._return)

    def flush(self) -> None:
        """Apply the gradients that the last step has left."""
        self._call(self._apply_late)

    def settle(self, fragment: int) -> None:
        """A fragment's weights that workers with their own store are those of all steps."""
        self._call(self._settle, fragment)

    def _call(self, body: Callable[..., None], *given: int) -> None:
        """Run this as a function, which is traced once for what it is given."""
        key = body, *given
        if key not in self._functions:
            function = tf.function(packing_captures(partial(body, *given)), autograph=False)
            self._functions[key] = function.get_concrete_function()
        self._functions[key]()

    def _body(self, active: Sequence[int], pending: bool, joins: int | None, given: Sequence[Any]) -> StepResult:
        pulled = self._pulled(active) if self._is_stale else []
        if pending:
            self._apply_late()
        begun = self._exchange(joins) if joins is not None and self._outer and self._outer.overlaps else None
        pulled = pulled or self._pulled(active)
        self._tell_begun(active, pulled)
        made = [self._run(worker, weights, *each) for worker, weights, each in zip(active, pulled, given, strict=True)]
        for worker, each in zip(active, made, strict=True):
            self._workers[worker].assign(self._weights[0].assigned, each.state)
        self._keep_assigned(active, made)
        if self._outer is not None:
            self._update_own(active, made, [shares for _, shares in given])
            if joins is not None:
                (begun or self._exchange(joins))()
        else:
            self._push(active, made)
            self._return()
        return self._result(active, made)

    def _run(
        self,
        worker: int,
        weights: list[tf.Tensor],
        inputs: Any,
        shares: Shares,
        state: Mapping[int, tf.Tensor] = MappingProxyType({}),
    ) -> Made:
        """What a worker makes of its rows; ``state`` has values, by number, in place of those that it has."""
        on = self._workers[worker]
        flat: list[tf.Tensor] = []
        arguments = weights, [state.get(n, value) for n, value in enumerate(on.read())], *inputs, shares
        unpacker(self._made.structured_input_signature[0])(arguments, flat)
        graph = tf.compat.v1.get_default_graph()
        flat += [graph.capture(each) for each in self._captured[worker]]
        with tf.device(on.device):  # not a call, which would begin with the last weight and end with the last gradient
            found: Made = sharing_constants(self._made, flat)
        return found

    def _pulled(self, active: Sequence[int]) -> list[list[tf.Tensor]]:
        """The weights on each worker that has rows."""
        if not self._serves:
            return [_read(self._weights[worker]) for worker in active]
        (weights,) = self._weights
        values = self._sent_by_servers(self._plan.pulls, "pull", active)
        for worker, mine in zip(active, values, strict=True):
            with tf.device(self._workers[worker].device):
                for n in self._plan.returned_variables:
                    mine[n] = self._returned[worker].get(n, weights.variables[n].value).read_value()
        return [[mine[n] for n in range(len(weights.variables))] for mine in values]

    def _return(self) -> None:
        """Send all workers the weights that are returned, as the servers have them now."""
        if not self._plan.returned.packs:
            return
        everyone = range(len(self._workers))
        for worker, mine in zip(everyone, self._sent_by_servers(self._plan.returned, "return", everyone), strict=True):
            with tf.device(self._workers[worker].device):
                for n, variable in self._returned[worker].items():
                    variable.assign(mine[n], read_value=False)

    def _sent_by_servers(self, phase: Phase, kind: What, sinks: Sequence[int]) -> list[dict[int, tf.Tensor]]:
        """The phase's weights on these workers, by the variables' numbers."""
        (weights,) = self._weights
        like = dict(enumerate(specs(weights.variables)))
        received = [Received(like) for _ in sinks]
        for device, mine in self._by_server(phase):
            with tf.device(device):
                values = {n: weights.variables[n].value.read_value() for n in mine.variables}
                layouts = [MessageLayout(pack, like) for pack in mine.packs]
                messages = [layout.messages(values) for layout in layouts]
            for place, worker in enumerate(sinks):
                order, sink = Order(mine, kind, self._record), self._workers[worker].device
                for pack, layout, each in zip(order.packs(), layouts, messages, strict=True):
                    there = [order.send(message, device, sink) for message in each]
                    with tf.device(sink):
                        received[place].add(pack, layout.values(there))
        return [each.values for each in received]

    def _tell_begun(self, active: Sequence[int], pulled: Sequence[Sequence[tf.Tensor]]) -> None:
        """Call what is to be called when every worker has these weights: one message of each to this process."""
        if self._begun is None:
            return
        there = []
        for worker, weights in zip(active, pulled, strict=True):
            with tf.device(self._workers[worker].device), tf.control_dependencies([each.op for each in weights]):
                there.append(tf.no_op())
        with tf.device(self._host), tf.control_dependencies(there):
            tf.numpy_function(self._begun, [], [])

    def _by_server(self, phase: Phase) -> list[tuple[str, Phase]]:
        """The phase of each server: what it has of each pack."""
        found = []
        for device in dict.fromkeys(group.device for group in self._weights[0].groups):
            held = {n for group in self._weights[0].groups if group.device == device for n in group.numbers}
            found.append((device, phase.of(held, self._sizes_bytes)))
        return found

    def _keep_assigned(self, active: Sequence[int], made: Sequence[Made]) -> None:
        """What layers assign to weights: each worker's to its own, that of the first with rows to all others."""
        of = dict(zip(active, made, strict=True))
        for number, weights in enumerate(self._weights):
            worker = number if number in of and not self._serves else active[0]
            for n, value in zip(self._weights[0].assigned_weights, of[worker].weights, strict=True):
                group = next(group for group in weights.groups if n in group.numbers)
                there = sent(value, self._workers[worker].device, group.device, [])
                with tf.device(group.device):
                    weights.variables[n].assign(there)

    def _push(self, active: Sequence[int], made: Sequence[Made]) -> None:
        """Send what is sent in this step, and update; the rest is kept for the next one."""
        gradients = [
            (self._workers[worker].device, self._clipped(worker, dict(enumerate(each.gradients))))
            for worker, each in zip(active, made, strict=True)
        ]
        self._update(self._plan.pushes, gradients, active, late=False)
        of = dict(zip(active, gradients, strict=True))
        for number, (worker, pending) in enumerate(zip(self._workers, self._pending, strict=True)):
            with tf.device(worker.device):
                for n, variable in pending.items():
                    mine = of[number][1][n] if number in of else tf.zeros_like(variable)
                    variable.assign(tf.convert_to_tensor(mine), read_value=False)
        if self.is_late:
            self._set_waits(True)

    def _clipped(self, worker: int, gradients: Gradients) -> Gradients:
        """A worker's gradients, clipped by their norm if the compression wants it: the more workers, the shorter."""
        clipnorm = None if self._compressor is None else self._compressor.options.local_clipnorm
        if clipnorm is None:
            return gradients
        most = clipnorm * self._weights[0].scale_factor / math.sqrt(len(self._workers))
        with tf.device(self._workers[worker].device):
            norm = tf.sqrt(squared_norm([*gradients.values()]))
            # As in Keras, a norm that is not finite makes all of them NaN.
            factor = most * tf.minimum(1.0 / norm, 1.0 / most) + (norm - norm)
            return {n: None if each is None else _times(each, factor) for n, each in gradients.items()}

    def _set_waits(self, waits: bool) -> None:
        with tf.device(self._workers[0].device):
            self._waits.assign(waits, read_value=False)

    def _update_own(self, active: Sequence[int], made: Sequence[Made], shares: Sequence[Shares]) -> None:
        """Update each worker's weights by its own gradients: as if its rows were the minibatch."""
        assert self._outer is not None
        for worker, each, share in zip(active, made, shares, strict=True):
            weights = self._weights[worker]
            with tf.device(weights.device):  # the share of the rows: of a loss that is a sum it has no factor
                mine = {n: _times(each.gradients[n], 1.0 / share.penalty) for n in self._like}
            weights.apply(weights.groups, _of(mine))
        for worker in set(range(len(self._workers))) - set(active):  # all are at the same step
            for group in self._weights[worker].groups:
                with tf.device(group.device):
                    count_of(group.optimizer).value.assign_add(1, read_value=False)
        self._outer.stepped()

    def _settle(self, fragment: int) -> None:
        assert self._outer is not None
        self._outer.settle(fragment, *self._sending(fragment))

    def _exchange(self, fragment: int) -> Callable[[], None]:
        assert self._outer is not None
        return self._outer.exchange(fragment, *self._sending(fragment))

    def _sending(self, fragment: int) -> tuple[Order, Reduce]:
        """How a fragment of workers' own weights is sent."""
        assert self._outer is not None
        sinks = [worker.device for worker in self._workers]
        every = range(len(self._workers))
        phase = self._plan.pushes.of({*self._outer.fragments[fragment]}, self._sizes_bytes)
        return (
            Order(phase, "push", self._record),
            lambda order, moved, like, mixing: self._reduced(order, moved, sinks, like, every, False, mixing),
        )

    def _apply_late(self) -> None:
        self._set_waits(False)
        gradients = []
        for worker, pending in zip(self._workers, self._pending, strict=True):
            with tf.device(worker.device):
                gradients.append((worker.device, {n: each.read_value() for n, each in pending.items()}))
        self._update(self._plan.late, gradients, range(len(self._workers)), late=True)

    def _update(
        self, phase: Phase, gradients: Sequence[tuple[str, Mapping[int, Any]]], workers: Sequence[int], late: bool
    ) -> None:
        kind: What = "late" if late else "push"
        reduce = partial(self._reduced, workers=workers, late=late)
        like = self._like
        if late:
            variables = specs(self._weights[0].variables)
            like = {n: variables[n] for n in self._late_numbers}
        if self._serves:
            (weights,) = self._weights
            of = {
                device: reduce(Order(each, kind, self._record), gradients, [device], like)[0]
                for device, each in self._by_server(phase)
            }
            groups = [each for each in weights.groups if self._plan.are_late(each.numbers) == late]
            weights.apply(groups, lambda group: of[group.device])
            return
        order = Order(phase, kind, self._record)
        sums = reduce(order, gradients, [worker.device for worker in self._workers], like)
        for weights, mine in zip(self._weights, sums, strict=True):
            weights.apply([each for each in weights.groups if self._plan.are_late(each.numbers) == late], _of(mine))

    def _reduced(
        self,
        order: Order,
        gradients: Sequence[tuple[str, Gradients]],
        sinks: Sequence[str],
        like: Gradients,
        workers: Sequence[int],
        late: bool,
        mixing: float = 0.0,
    ) -> list[Any]:
        if self._compressor is None:
            return reduced(order, gradients, sinks, like, self._is_ring)
        made = [(worker, *each) for worker, each in zip(workers, gradients, strict=True)]
        self._compressor.phase = self._late_phase if late else self._phase
        return self._compressor.reduced(order, made, sinks, like, lambda device: self._number(device, late), mixing)

    def _number(self, device: str, late: bool) -> tf.Tensor:
        """The number of the step on a device: that of the weights there, or of the first server's."""
        groups = [each for weights in self._weights for each in weights.groups if each.numbers]
        groups = [each for each in groups if self._plan.are_late(each.numbers) == late] or groups
        group = next((each for each in groups if each.device == device), groups[0])
        with tf.device(group.device):
            return count_of(group.optimizer).value.read_value()

    def _result(self, active: Sequence[int], made: Sequence[Made]) -> StepResult:
        devices = [self._workers[worker].device for worker in active]
        penalties = [
            (device, each.penalty) for device, each in zip(devices, made, strict=True) if each.penalty is not None
        ]
        outputs = [(device, each.output) for device, each in zip(devices, made, strict=True)]
        losses = [(device, each.loss) for device, each in zip(devices, made, strict=True)]
        return collected(self._host, losses, penalties, outputs, self._record, self._returns_outputs)


class OwnPaceStep(TransferStep):
    """The functions of workers that each make steps of their own with the weights of servers.

    What layers gather of all minibatches, such as moving statistics, is the first worker's: others read it with the
    weights, and write it when their gradients are applied. The seeds of random layers are each worker's own.
    """

    def read(self) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """The weights as the servers have them, and what layers have gathered; holding them keeps this version."""
        (weights,) = self._weights
        values = {n: value for group in weights.groups for n, value in zip(group.numbers, group.weights(), strict=True)}
        return [values[n] for n in range(len(weights.variables))], self._workers[0].read(self._gathered)

    @property
    def _gathered(self) -> list[int]:
        """The numbers of the state's variables that layers assign to, but for seeds."""
        state = self._workers[0].state
        return [n for n in self._weights[0].assigned if not is_seed(state[n])]

    def prepare_worker(self, worker: int) -> None:
        """Trace a worker's function, which threads call at once."""
        *_, differentiable, constants, shares = self._made.structured_input_signature[0]
        function = tf.function(packing_captures(partial(self._computed, worker)), autograph=False)
        state = self._workers[0].state
        like = specs(self._weights[0].variables), specs([state[n] for n in self._gathered])
        self._functions[worker] = function.get_concrete_function(like, ((differentiable, constants), shares))
        if "apply" not in self._functions:
            made = self._functions[worker].structured_outputs[1]
            given = [[each if each is None else tf.type_spec_from_value(each) for each in part] for part in made]
            apply = tf.function(packing_captures(self._applied), autograph=False)
            self._functions["apply"] = apply.get_concrete_function(given)

    def compute(self, worker: int, values: Any, rows: Rows) -> tuple[StepResult, Any]:
        """The result of a minibatch with what was ``read``, and what is to be applied, where it is applied."""
        found: tuple[StepResult, Any] = self._functions[worker](values, (rows.inputs, rows.shares))
        return found

    def apply(self, made: Any) -> None:
        """Update the weights by a minibatch's gradients, and what layers have gathered."""
        self._functions["apply"](made)

    def _computed(self, worker: int, values: Any, given: Any) -> tuple[StepResult, list[list[Any]]]:
        on, first = self._workers[worker], self._workers[0].device
        (weights, gathered), (inputs, shares) = values, given
        there = [sent(value, self._server[n], on.device, []) for n, value in enumerate(weights)]
        state = {n: sent(value, first, on.device, []) for n, value in zip(self._gathered, gathered, strict=True)}
        made = self._run(worker, there, inputs, shares, state)
        after = dict(zip(self._weights[0].assigned, made.state, strict=True))
        seeds = [n for n in after if n not in state]
        on.assign(seeds, [after[n] for n in seeds])
        gradients = [
            None if each is None else _on_server(each, on.device, self._server[n])
            for n, each in enumerate(made.gradients)
        ]
        return self._result([worker], [made]), [gradients, [sent(after[n], on.device, first, []) for n in state]]

    def _applied(self, made: Any) -> None:
        gradients, gathered = made
        (weights,) = self._weights
        weights.apply(weights.groups, _of({n: each for n, each in enumerate(gradients) if each is not None}))
        self._workers[0].assign(self._gathered, gathered)


def _on_server(gradient: Any, device: str, server: str) -> Any:
    """A gradient, or an embedding's rows, on the server of its weights."""
    return tf.nest.map_structure(lambda each: sent(each, device, server, []), gradient, expand_composites=True)


OnDevice = tuple[str, Any]  # what was made on a device


def collected(
    host: str,
    losses: Sequence[OnDevice],
    penalties: Sequence[OnDevice],
    outputs: Sequence[OnDevice],
    record: Record | None,
    returns_outputs: bool = True,
) -> StepResult:
    """Everything on this process's device, in the order of the rows, or without the outputs of any."""

    def here(values: Sequence[OnDevice]) -> list[tf.Tensor]:
        return [sent(each, device, host, []) for device, each in values]

    def whole(rows: Sequence[tf.Tensor]) -> tf.Tensor:
        return tf.concat(here([*zip(devices, rows, strict=True)]), 0) if returns_outputs else without_rows(rows[0])

    with tf.device(host):
        of_rows, of_layers = here(losses), here(penalties)
        is_number = of_rows[0].shape.rank == 0
        loss = tf.add_n([*of_rows, *of_layers]) if is_number else tf.concat(of_rows, 0)
        if not is_number and of_layers:
            loss += tf.add_n(of_layers)
        devices = [device for device, _ in outputs]
        joined = [
            [None if rows[0] is None else whole(rows) for rows in zip(*values, strict=True)]
            for values in zip(*(each for _, each in outputs), strict=True)
        ]
    times = record.times(host) if record else None
    return StepResult(loss, BoundaryTensors(*joined), times)


def _times(gradient: Any, factor: tf.Tensor) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        values = gradient.values * tf.cast(factor, gradient.values.dtype)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return gradient * tf.cast(factor, gradient.dtype)


def _of(sums: Mapping[int, Any]) -> Callable[[WeightGroup], Mapping[int, Any]]:
    return lambda group: sums


def _read(weights: Weights) -> list[tf.Tensor]:
    with tf.device(weights.device):
        return [variable.value.read_value() for variable in weights.variables]
