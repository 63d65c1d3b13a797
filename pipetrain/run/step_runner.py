"""Runs training steps over several devices, each one function, and sends the rows of the next one meanwhile.

Or each worker's steps are functions of its own, which threads call at their own pace.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count, pairwise, takewhile
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import tensorflow as tf

from pipetrain.compute.cores import finish, is_remote
from pipetrain.compute.functions.stage_values import BoundaryTensors
from pipetrain.compute.keras_private import count_of
from pipetrain.compute.transfers.message import RecordedMessage
from pipetrain.compute.transfers.outer_step import OwnWeights
from pipetrain.compute.transfers.step import Rows
from pipetrain.compute.transfers.weights import Shares, Worker
from pipetrain.logs import BELOW_BAR
from pipetrain.run.collector import Result, Snapshot
from pipetrain.run.control import Control, RunSettings, StoppableThread
from pipetrain.run.gradient_exchange import Closed, here
from pipetrain.run.stepwise import Stepwise
from pipetrain.run.worker_rows import WorkerRows, given_to
from pipetrain.schemes.synchrony import Asynchronous
from pipetrain.schemes.transfers.plan import Plan
from pipetrain.trace.records import Span, Transfer, What

_logger = logging.getLogger(__name__)
Value = TypeVar("Value")
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
        is_stale: whether workers compute with the weights from before the gradients that have come are applied.

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
        is_stale: bool = False,
    ) -> None:
        super().__init__([worker.device for worker in workers], settings, rate)
        self._weights, self._workers, self._outer, self._is_stale = list(weights), list(workers), outer, is_stale
        self.period = 1 if outer is None else outer.steps
        self._rows, self.sends_ahead, rows.lost = rows, rows.sends_ahead, self._lost
        self._shares: dict[tuple[str, float], Shares] = {}  # on devices, since the weights were taken from the model
        self.plan, self._steps = plan, steps
        self._step: Any = None
        self._known: dict[Plan, Any] = {}  # what ran steps by other plans
        self._late_rate: float | None = None  # of the step whose late gradients wait
        self._waiting = False  # whether there are any
        self.is_tried = False  # whether steps are made to see what they take
        self._apart: list[int] = []  # the fragments of workers' own weights that are to be settled

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
        if self._is_stale:
            self._check_unassigned("stale:1", "the update that is made meanwhile")
        return masks

    def _check_unassigned(self, synchrony: str, what: str) -> None:
        """Raise ValueError for layers that assign to trained weights, by which something would be replaced."""
        if numbers := self._weights[0].assigned_weights:
            names = [self._weights[0].segment.trainable_variables[n].path for n in numbers]
            raise ValueError(
                f"Layers that assign to trained weights would replace {what}. Received: synchrony={synchrony!r}, with "
                f"assignments to {names}. Try leaving synchrony out."
            )

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
        if not self._steps_done or (self._step.is_late and not self._waiting):  # or what waited was applied meanwhile
            self._step.prepare()
        self._step.at(self._updates)
        start_s = time.perf_counter()
        try:
            joins, when = None, {}
            if self._outer is not None:
                before = self._outer.steps_before(settings.updates) + self._steps_done
                joins = self._outer.due(before + 1, self._apart)
                when = {"joins": joins}
            result, sent = self._step(rows, self._waiting, settings.exact_times, **when)
            self._apart = [] if self._outer is None else self._outer.apart_after(joins)
        finally:
            self._rows.let_go()
        self._note(start_s, result.times, sent, [each.worker for each in rows])
        self._late_rate, self._waiting = rate, self._step.is_late
        for group in (group for weights in self._weights for group in weights.groups):
            group.updated()
        self._stepped(Result(result.loss, result.output))

    @property
    def _updates(self) -> int:
        """How many were made before the next step; in a trial, which tells what most steps take, as many as can be."""
        assert self._run is not None  # within a run
        return sys.maxsize if self.is_tried else self._run.updates + self._steps_done

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
        if self._step is not None:
            for fragment in self._apart:
                self._step.settle(fragment)
            self._apart = []
        if self._waiting and self._step is not None:
            self._set_rates(None)
            self._step.at(self._updates)
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
        self._apart = [] if self._outer is None else self._outer.apart

    def _load(self, settings: RunSettings) -> None:
        for weights in self._weights:
            weights.load(settings.updates)
        if any([worker.load() for worker in self._workers]):  # each of them, whatever the first one says
            self._retraced()
        self._await_writes()
        self._workers[0].prepare(self._workers[1:], self._averaged)
        self._waiting, self._apart, self._shares = False, [], {}
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
        values = [*stored, *first.outcome(others, self._averaged)]
        return [None if each is None else here([each])[0] for each in values]

    @property
    def _averaged(self) -> Sequence[int]:
        """The numbers of the state's variables of which the model has the average over all workers."""
        return self._weights[0].assigned

    def _store(self, values: Sequence[Any]) -> None:
        count = len(self._weights[0].variables)
        self._weights[0].store(values[:count])
        self._workers[0].store(values[count:])


class Event(NamedTuple):
    """A worker has taken a minibatch, or has its gradients applied, so many updates after it took it."""

    what: str
    minibatch: int
    worker: int
    staleness: int


TAKEN, APPLIED = "taken", "applied"


KEPT_EVENTS = 10_000


class Arrivals:
    """The order in which the workers of a model take minibatches and apply gradients: written to a file, or by a file.

    It lasts as long as the model: what is compiled or fitted later is written behind what there is, and goes on in the
    replay where that is.

    Args:
        record: the file to write, None for none.
        replay: the file to follow, None for none.

    ``sets_aside``: whether a record that is there, where training begins anew, is of a run that ended before its first
    checkpoint: it is renamed then. ``replay`` is what was given.

    Raises ValueError for a file that cannot be followed, and for one that cannot be written.
    """

    sets_aside = False

    def __init__(self, record: str | None, replay: str | None) -> None:
        self.events: deque[Event] = deque(maxlen=KEPT_EVENTS)
        self._order, self.replay = [] if replay is None else _events(Path(replay), "replay"), replay
        self._next = 0  # which event of the order is due
        self._file = None if record is None else _writable(Path(record))
        self._is_mine = False  # whether what is in the file is of this model

    @property
    def due(self) -> Event | None:
        """What is to be done next; None for anything."""
        return self._order[self._next] if self._next < len(self._order) else None

    def is_due(self, what: str, worker: int) -> bool:
        """Whether a worker may do this next."""
        return self.due is None or (self.due.what, self.due.worker) == (what, worker)

    def begin(self) -> None:
        """Minibatches follow. Raises ValueError for a file that has events of something else."""
        if self._file is not None and not self._is_mine and self._file.exists() and self._file.stat().st_size:
            if not self.sets_aside:
                raise ValueError(
                    f"A record that is there is not written over. Received: record={str(self._file)!r}, which is not "
                    "empty, and training that does not go on from a checkpoint. Try another file, or remove this one."
                )
            aside = next(each for n in count(1) if not (each := Path(f"{self._file}.{n}")).exists())
            self._file.rename(aside)
            _logger.info("The record of a run without a checkpoint is %s now.", aside, extra=BELOW_BAR)
        self._is_mine = True

    def go_on(self, minibatches: int) -> None:
        """Training goes on from a checkpoint, after so many minibatches.

        All of them had been applied, and no other one was taken: the replay goes on behind them, and what was recorded
        of later ones, which are trained on again, is left out. Raises ValueError for a record that lacks them, and for
        a replay of several trainings, each with minibatches from the first on, of which one goes on.
        """
        taken = [each.minibatch for each in self._order if each.what == TAKEN]
        if any(after <= before for before, after in pairwise(taken)):
            raise ValueError(
                "The order is of a model that was compiled anew with another optimizer, whose minibatches count from 0 "
                f"again: where a checkpoint after {minibatches} is in it, is not known. Received: "
                f"replay={self.replay!r}. Try a run from the beginning, or recordings of a model that is compiled once."
            )
        if self._order:
            left, self._next = minibatches - self._order[0].minibatch, 0
            while left > 0 and (due := self.due) is not None:
                left -= due.what == APPLIED
                self._next += 1
        if self._file is None or not self._file.exists():
            return
        events = _events(self._file, "record") if self._file.stat().st_size else []
        late = takewhile(lambda each: each.minibatch >= minibatches, reversed(events))
        known = events[: len(events) - len([*late])]
        if events and all(each[:2] != (APPLIED, minibatches - 1) for each in known):
            raise ValueError(
                f"The record is not of the training that goes on. Received: record={str(self._file)!r}, without "
                f"minibatch {minibatches - 1}, the last one before the checkpoint. Try another file."
            )
        if known != events:
            part = self._file.with_name(f".{self._file.name}.{os.getpid()}.part")
            part.write_text("".join(map(_line, known)), encoding="utf-8")
            part.replace(self._file)  # whole, or as it was
        self._is_mine = True

    def add(self, event: Event) -> None:
        """It was done."""
        self._next += self.due is not None
        self.events.append(event)
        if self._file is not None:
            with self._file.open("a", encoding="utf-8") as file:
                file.write(_line(event))


def _line(event: Event) -> str:
    return " ".join(map(str, event)) + "\n"


def _writable(file: Path) -> Path:
    """The file, of which a record can be written. Raises ValueError."""
    if file.is_dir() or not file.parent.is_dir():
        problem = "which is a directory" if file.is_dir() else f"of which there is no directory {str(file.parent)!r}"
        raise ValueError(
            f"A record is a file in a directory that is there. Received: record={str(file)!r}, {problem}. "
            "Try record='arrivals.txt'."
        )
    return file


def _events(file: Path, argument: str) -> list[Event]:
    """Those of a file. Raises ValueError, which names the line, for what is no order of arrivals."""
    problem, found = "no event", list[Event]()
    try:
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            problem = f"line {number}: {line!r}"
            what, *numbers = line.split()
            event = Event(what, *map(int, numbers))
            if what not in (TAKEN, APPLIED) or min(event[1:]) < 0:
                raise ValueError(f"Events are {TAKEN!r} and {APPLIED!r}, and their numbers are not negative.")
            found.append(event)
        if not found:
            raise ValueError("The file is empty.")
    except (OSError, ValueError, TypeError) as error:
        if isinstance(error, OSError):
            problem = str(error)
        raise ValueError(
            f"No order of arrivals is in this file. Received: {argument}={str(file)!r}, {problem}. "
            "Try one that record= wrote."
        ) from error
    return found


class Queued(NamedTuple):
    """A minibatch, its number since the weights were taken from the model, and the learning rate of its step."""

    number: int
    x: list[tf.Tensor]
    targets: Any
    rate: float | None


class Exchange:
    """Where workers take minibatches and bring gradients: one at a time, so that each finds whole versions of weights.

    Every method that waits raises ``Closed`` when nothing is waited for any more. Weights are read and updated by the
    worker whose turn it is, without the lock, so that nobody else waits for a device that may be lost. A turn that
    fails does not end: the error closes the exchange.

    Args:
        arrivals: whose turn it is.
        workers: how many there are.
    """

    def __init__(self, arrivals: Arrivals, workers: int) -> None:
        self._arrivals, self._workers, self._changed = arrivals, workers, threading.Condition()
        self._is_turn = False  # somebody's
        self._busy: set[int] = set()  # the workers that have a minibatch
        self._posted: deque[Queued] = deque()
        self._results: dict[int, Result] = {}
        self._is_closed = False
        self.begun = self.applied = 0  # minibatches that were posted, and that were applied

    def post(self, x: list[tf.Tensor], targets: Any, rate: float | None) -> None:
        """A minibatch more."""
        with self._changed:
            self._posted.append(Queued(self.begun, x, targets, rate))
            self.begun += 1
            self._changed.notify_all()

    def take(self, worker: int, first: int, read: Callable[[], Value]) -> tuple[Queued, int, Value]:
        """The next minibatch, when it is this worker's turn; how many were applied before; and what is read then."""
        self._begin_turn(lambda: bool(self._posted) and self._arrivals.is_due(TAKEN, worker))
        value = read()
        with self._ending_turn():
            if self._is_closed:
                raise Closed
            posted = self._posted.popleft()
            self._busy.add(worker)
            self._arrivals.add(Event(TAKEN, first + posted.number, worker, 0))
            return posted, self.applied, value

    def bring(
        self, worker: int, first: int, posted: Queued, version: int, result: Result, apply: Callable[[], None]
    ) -> None:
        """Apply a minibatch's gradients, when it is this worker's turn."""
        self._begin_turn(lambda: self._arrivals.is_due(APPLIED, worker))
        apply()
        with self._ending_turn():
            self._arrivals.add(Event(APPLIED, first + posted.number, worker, self.applied - version))
            self._results[posted.number] = result
            self._busy.remove(worker)
            self.applied += 1

    def _begin_turn(self, is_mine: Callable[[], bool]) -> None:
        with self._changed:
            self._await(lambda: not self._is_turn and is_mine())
            self._is_turn = True

    @contextmanager
    def _ending_turn(self) -> Iterator[None]:
        """What a turn has come to is noted within this."""
        with self._changed:
            yield
            self._is_turn = False
            self._changed.notify_all()

    def result(self, number: int) -> Result:
        """That of a minibatch, when it has been applied; no minibatch is posted meanwhile.

        Raises ValueError where what is due in a replay can then never be done.
        """
        with self._changed:
            self._await(lambda: number in self._results or self._is_stuck())
            if number not in self._results:
                due = " ".join(map(str, self._arrivals.due or ()))
                raise ValueError(
                    "This run is not the one that was recorded. Received: "
                    f"replay={self._arrivals.replay!r}, with {due!r} as what is done next. "
                    "Try the data, the workers, the bound and the checkpoints of that run."
                )
            return self._results.pop(number)

    def _is_stuck(self) -> bool:
        due = self._arrivals.due
        if due is None or self._is_turn:
            return False
        if not 0 <= due.worker < self._workers:
            return True
        if due.what == APPLIED:
            return due.worker not in self._busy
        return not self._posted or due.worker in self._busy

    def close(self) -> None:
        """Nothing is waited for any more."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _await(self, there: Callable[[], bool]) -> None:
        while not (self._is_closed or there()):
            self._changed.wait()
        if self._is_closed:
            raise Closed


class OwnPaceWorker(StoppableThread):
    """Takes a minibatch whenever it is free, until the exchange is closed."""

    def __init__(self, worker: int, runner: OwnPaceRunner) -> None:
        super().__init__(name=f"pipetrain worker {worker}", daemon=True)
        self._worker, self._runner, self._doing = worker, runner, "the start"
        self._exchange, self._control = runner.exchange, runner.control

    def run(self) -> None:
        """The thread's body."""
        try:
            while True:
                posted, version, values = self._exchange.take(self._worker, self._runner.first, self._runner.read)
                self._doing = f"minibatch {posted.number}"
                start_s = time.perf_counter()
                result, made = self._runner.compute(self._worker, posted, values)
                apply = partial(self._runner.apply, self._worker, posted, made, start_s)
                self._exchange.bring(self._worker, self._runner.first, posted, version, result, apply)
        except Closed:
            pass
        except BaseException as error:
            self._control.fail(error, f"Raised in {self._doing} of worker {self._worker}")


class OwnPaceRunner(StepRunner):
    """Each worker takes whole minibatches by itself, and the servers apply its gradients when they are there.

    Threads live from the first ``post`` to the next ``drain``, which waits until all minibatches have been applied.

    Args:
        synchrony: how far workers go ahead.
        arrivals: their order.
        others: those of ``StepRunner``.
    """

    def __init__(self, synchrony: Asynchronous, arrivals: Arrivals, *others: Any) -> None:
        super().__init__(*others)
        self.sends_ahead = False
        self.window = synchrony.ahead(len(self._workers)) + 1
        self.arrivals, self.first = arrivals, 0  # the minibatches before the threads were started
        self.exchange, self.control = self._new_exchange(), Control(RunSettings())
        self._threads: list[OwnPaceWorker] = []
        self._taken = 0  # results
        self._made_ahead = deque[Snapshot]()  # of steps whose results nobody has taken yet

    def post(self, x: list[tf.Tensor], y: Any, sample_weight: Any, learning_rate: float | None) -> None:
        """Give a minibatch to the worker that is free next."""
        _ = self._run or self._start()
        self.exchange.post(x, (y, sample_weight), self._rate())

    def result(self) -> Result:
        """The next minibatch's loss and predictions, in order."""
        if self._results:
            return self._results.popleft()
        found = self.control.guarded(lambda: self.exchange.result(self._taken))
        self._taken += 1
        self._steps_done = self._taken
        self._hand_out()
        return found

    def _hand_out(self) -> None:
        """Snapshots are those of steps whose results were taken."""
        while self._run and self._made_ahead and self._made_ahead[0].version <= self._run.steps + self._taken:
            self.snapshots.append(self._made_ahead.popleft())

    def read(self) -> Any:
        """The weights as they are, and what layers gather of all minibatches.

        Another process reads them when it comes to that, and an update need not wait for it: this one does.
        """
        values = self._step.read()
        devices = [self._workers[0].device, *(group.device for group in self._weights[0].groups)]
        for device in filter(is_remote, dict.fromkeys(devices)):
            finish(device)
        return values

    def compute(self, worker: int, posted: Queued, values: Any) -> tuple[Result, Any]:
        """A minibatch's result, and what is to be applied, by one of the threads."""
        device = self._workers[worker].device
        x, targets = given_to(device, (posted.x, posted.targets))
        inputs = self._weights[0].sorted(BoundaryTensors(x, [None] * len(x)), targets)
        result, made = self._step.compute(worker, values, Rows(worker, inputs, self._whole[worker]))
        finish(device)  # what fails does so here
        return Result(result.loss, result.output), made

    def apply(self, worker: int, posted: Queued, made: Any, start_s: float) -> None:
        """Update the weights; one thread at a time."""
        self._set_rates(posted.rate)
        self._step.apply(made)
        for group in self._weights[0].groups:
            group.updated()
        settings = self._run
        assert settings is not None  # within a run
        version = settings.steps + self.exchange.applied + 1
        if settings.snapshot_every and version % settings.snapshot_every == 0:
            self._made_ahead.append(Snapshot(version, [self._outcome()]))
        number, device = self.made + posted.number, self._workers[worker].device
        self._spans.append(Span("FB", 0, number, device, start_s, time.perf_counter(), number, worker))

    def _gradients_traced(self, targets: Any) -> Sequence[Any]:
        masks = super()._gradients_traced(targets)
        self._check_unassigned("asynchronous", "what other workers have made")
        return masks

    @property
    def _averaged(self) -> Sequence[int]:
        """None: the first worker has what layers gather of all minibatches."""
        return []

    def _load(self, settings: RunSettings) -> None:
        self.arrivals.begin()
        self.first = settings.minibatches
        super()._load(settings)
        if self._step is None:
            self._step = self._steps(self.plan, None)
            for worker in range(len(self._workers)):
                self._step.prepare_worker(worker)
            self._await_writes()
        self._run = settings  # of which shares know whether a loss is a mean
        self._whole = [self._shares_of(worker.device, 1.0) for worker in self._workers]
        self.exchange, self.control, self._taken = self._new_exchange(), Control(settings), 0
        self._made_ahead.clear()
        self.control.boxes.append(self.exchange)
        self._threads = [OwnPaceWorker(worker, self) for worker in range(len(self._workers))]
        for thread in self._threads:
            thread.start()

    def _new_exchange(self) -> Exchange:
        return Exchange(self.arrivals, len(self._workers))

    def _rest(self) -> None:
        """All minibatches are applied; their results are kept for who takes them."""
        while self._taken < self.exchange.begun:
            found = self.control.guarded(lambda: self.exchange.result(self._taken))
            self._taken += 1
            self._results.append(found)
        self._steps_done = self.exchange.applied
        self._hand_out()
        self._stop()

    def _stop(self) -> None:
        self.control.close()
        for thread in self._threads:
            thread.ended(self._lost.gives_up)
        self._threads = []

    def lose(self, error: Exception) -> None:
        """From another thread: a worker is lost. Whoever waits for workers is given the error."""
        super().lose(error)
        self.control.lose(error)
