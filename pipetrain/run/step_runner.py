"""Runs training steps over several devices, each one function, and sends the rows of the next one meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import tensorflow as tf

from pipetrain.compute.functions.stage_values import BoundaryTensors
from pipetrain.compute.keras_private import count_of
from pipetrain.compute.transfers.message import RecordedMessage
from pipetrain.compute.transfers.outer_step import OwnWeights
from pipetrain.compute.transfers.step import Rows
from pipetrain.compute.transfers.weights import Shares, Worker
from pipetrain.run.collector import Result
from pipetrain.run.control import RunSettings
from pipetrain.run.gradient_exchange import here
from pipetrain.run.stepwise import Stepwise
from pipetrain.run.worker_rows import WorkerRows
from pipetrain.schemes.transfers.plan import Plan
from pipetrain.trace.records import Span, Transfer, What

# Weights on their way to a worker, gradients on their way to their sums, those that the next step's forward hides, and
# weights that are returned in the step that updates them. Of a grid, activations on their way to the devices of a model
# group, and their gradients on the way back.
WHAT: dict[str, What] = {"pull": "W", "push": "R", "late": "R", "return": "W", "gather": "F", "scatter": "B"}


class StepRunner(Stepwise):
    """Steps that are one function over all devices each.

    Args:
        weights: of every worker, or only those of the servers.
        workers: that compute.
        plan: of the transfers.
        steps: makes what runs a step by a plan, once the weights have been traced and taken from the model. It is
            also given what is to be called in each step when all workers have the weights that their forward reads;
            that is None if nothing is.
        rows: divides minibatches among the workers.
        settings: called whenever the weights are taken from the model.
        rate: gives the learning rate of a step that begins, None where the optimizers know it.
        outer: brings the weights of workers that update their own together, if they do: after so many steps, and at a
            drain.

    Workers in other processes get their rows of the next minibatch while they compute this one, from when they have
    what their forward waits for: rows that are sent earlier would keep them waiting.
    """

    def __init__(
        self,
        weights: Sequence[Any],
        workers: Sequence[Worker],
        plan: Plan,
        steps: Callable[[Plan, Callable[[], None] | None], Any],
        rows: WorkerRows,
        settings: Callable[[], RunSettings],
        rate: Callable[[], float | None],
        outer: OwnWeights | None = None,
    ) -> None:
        super().__init__([worker.device for worker in workers], settings, rate)
        self._weights, self._workers, self._outer = list(weights), list(workers), outer
        self._rows, self.sends_ahead, rows.lost = rows, rows.sends_ahead, self._lost
        self._shares: dict[tuple[str, float], Shares] = {}  # on devices, since the weights were taken from the model
        self.plan, self._steps = plan, steps
        self._step: Any = None
        self._known: dict[Plan, Any] = {}  # what ran steps by other plans
        self._late_rate: float | None = None  # of the step whose late gradients wait
        self._waiting = False  # whether there are any
        self._apart = False  # whether workers have made steps that the weights which are stored do not know

    def takes(self, plan: Plan) -> bool:
        """Whether its steps can be by this plan, too: the same variables are updated late."""
        return plan.late_variables == self.plan.late_variables

    def take(self, plan: Plan, keeps: Collection[Plan]) -> None:
        """Make steps by this plan, which it ``takes``, as if none had been made; for when it is drained.

        The functions for the plans in ``keeps`` are kept, for when these are taken again.
        """
        known = {**self._known, self.plan: self._step}
        self.plan, self._step = plan, known.pop(plan, None)
        self._known = {each: step for each, step in known.items() if each in keeps}
        self.made = 0
        self._spans.clear()
        self._transfers.clear()
        self._starts.clear()

    def _gradients_traced(self, targets: Any) -> Sequence[Any]:
        first = self._weights[0]
        masks: Sequence[Any] = first.trace([None] * len(first.segment.inputs), targets)
        return masks

    def _retraced(self) -> None:
        self._step = None
        self._known.clear()

    def post(self, x: list[tf.Tensor], y: Any, sample_weight: Any, learning_rate: float | None) -> None:
        """Make the minibatch's step."""
        settings = self._run or self._start()
        rate = self._rate()  # that of the minibatch is as old as its reading
        self._lost.unless_lost(lambda: self._make(x, (y, sample_weight), settings, rate))

    def _make(self, x: list[tf.Tensor], targets: Any, settings: RunSettings, rate: float | None) -> None:
        if self._step is None:
            self._step = self._steps(self.plan, self._rows.let_go if self.sends_ahead else None)
            self._await_writes()  # it has made variables
        masks: list[Any] = [None] * len(x)
        rows = [
            Rows(
                part.worker,
                self._weights[0].sorted(BoundaryTensors(part.inputs, masks), part.targets),
                self._shares_of(self._workers[part.worker].device, part.share),
            )
            for part in self._rows.of(x, targets)
        ]
        self._set_rates(rate)
        if not self._steps_done:
            self._step.prepare()
        start_s = time.perf_counter()
        try:
            joins = self._outer is None or (self._steps_done + 1) % self._outer.steps == 0
            when = {} if self._outer is None else {"joins": joins}
            result, sent = self._step(rows, self._waiting, settings.exact_times, **when)
            self._apart = self._outer is not None and not (joins and self._outer.unites)
        finally:
            self._rows.let_go()
        self._note(start_s, result.times, sent, [each.worker for each in rows])
        self._late_rate, self._waiting = rate, self._step.is_late
        for group in (group for weights in self._weights for group in weights.groups):
            group.updated()
        self._stepped(Result(result.loss, result.output))

    def _note(self, start_s: float, times: Any, sent: Sequence[RecordedMessage], active: Sequence[int]) -> None:
        """Record a step that has begun then and is over now, and its messages, whose times are those of day."""
        number, end_s = self.made + self._steps_done, time.perf_counter()
        for worker in active:
            device = self._workers[worker].device
            self._spans.append(Span("FB", 0, number, device, start_s, end_s, number, worker))
        if times is None:
            return
        places = {worker.device: n for n, worker in reversed([*enumerate(self._workers)])}
        from_day_s = end_s - time.time()
        late = len(self.plan.late.packs) * any(each.kind == "late" for each in sent)
        pulled = {each.source: each.pack + 1 for each in sent if each.kind == "pull"}  # packs of each server
        for each, (left_s, there_s) in zip(sent, times.numpy() + from_day_s, strict=True):
            ends = 0, places[each.source], 0, places[each.sink]
            begun_s = min(left_s, there_s)  # a time is noted when one of the device's threads is free for it
            before = {"push": late, "return": pulled.get(each.source, 0)}  # packs of the same step that are sent first
            pack = each.pack + before.get(each.kind, 0)
            seconds = float(begun_s), float(there_s)
            self._transfers.append(Transfer(WHAT[each.kind], number, *ends, each.size_bytes or 0, *seconds, pack))

    def send_ahead(self, x: list[tf.Tensor], y: Any, sample_weight: Any) -> None:
        """Send the rows of the minibatch that is to be posted next, while this one's step runs."""
        self._rows.send_ahead(x, (y, sample_weight))

    def _shares_of(self, device: str, share: float) -> Shares:
        assert self._run is not None  # within a step
        if (device, share) not in self._shares:
            with tf.device(device):
                of_loss = tf.constant(share if self._run.loss_is_mean else 1.0)
                self._shares[device, share] = Shares(of_loss, tf.constant(share))
        return self._shares[device, share]

    def _set_rates(self, learning_rate: float | None) -> None:
        """Gradients that waited are applied with the rate of the step that made them."""
        changed = [
            group.set_rate(self._late_rate if self.plan.are_late(group.numbers) else learning_rate)
            for weights in self._weights
            for group in weights.groups
        ]
        if any(changed):
            self._await_writes()

    def _flush(self) -> None:
        if self._apart and self._step is not None:
            self._step.settle()
            self._apart = False
        if self._waiting and self._step is not None:
            self._set_rates(None)
            self._step.flush()
            self._waiting = False

    def _forget(self) -> None:
        self._rows.forget()

    def _count(self, settings: RunSettings) -> None:
        self._waiting = self._step is not None and self._step.waits
        groups = [group for group in self._weights[0].groups if group.numbers] or self._weights[0].groups
        group = next((each for each in groups if not self.plan.are_late(each.numbers)), groups[0])
        waiting = self._waiting and self.plan.are_late(group.numbers)
        self._steps_done = int(count_of(group.optimizer).numpy()) - settings.updates + waiting
        self._apart = self._outer is not None and self._outer.is_apart

    def _load(self, settings: RunSettings) -> None:
        for weights in self._weights:
            weights.load(settings.updates)
        if any([worker.load() for worker in self._workers]):  # each of them, whatever the first one says
            self._retraced()
        self._await_writes()
        self._workers[0].prepare(self._workers[1:], self._weights[0].assigned)
        self._waiting, self._apart, self._shares = False, False, {}
        if self._outer is not None:
            self._outer.begin()
            self._await_writes()

    def _end(self, store: bool) -> None:
        try:
            super()._end(store)
        finally:
            self._waiting = False

    def _outcome(self) -> list[Any]:
        """The weights, and the state of all workers, as ``_store`` takes them."""
        first, *others = self._workers
        stored = self._weights[0].stored() if self._outer is None else self._outer.stored()
        values = [*stored, *first.outcome(others, self._weights[0].assigned)]
        return [None if each is None else here([each])[0] for each in values]

    def _store(self, values: Sequence[Any]) -> None:
        count = len(self._weights[0].variables)
        self._weights[0].store(values[:count])
        self._workers[0].store(values[count:])
