"""Keras callbacks for pipelines."""

from __future__ import annotations

import logging
import math
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import keras

from pipetrain.checkpoint.bundles import Sharding
from pipetrain.checkpoint.directory_lock import DirectoryLock
from pipetrain.checkpoint.replication import Replication, way_in_memory
from pipetrain.checkpoint.state import Position, RunState, array_of, as_arrays, not_finite, recall, remembered
from pipetrain.checkpoint.store import Checkpoint, Store
from pipetrain.checkpoint.writer import Pace, Writing
from pipetrain.compute.keras_private import count_of
from pipetrain.frontend.fit_session import FitSession
from pipetrain.frontend.status_page import StatusPage as StatusPage
from pipetrain.logs import BELOW_BAR, counted
from pipetrain.schemes.arguments import checked_count

_logger = logging.getLogger(__name__)
AUTO, STEPS = "auto", 100
MEMORY = "memory"
SLOWED = 5.0  # seconds by which a second of writing slows training that uses all cores (benchmarks/checkpoints.py)
LEFT_OUT = " What was in flight is left out: minibatches go on after the last one that callbacks had seen."


class Snapshots(keras.callbacks.Callback):
    """Calls a function with the weights at regular numbers of updates, without draining the pipeline.

    Each stage keeps its weights right after the update in question, so the function gets the model after exactly that
    number of updates, whatever is in flight. The stages pause while the function runs. Workers with weights of their
    own (``synchrony="local:8"``) join them for it.

    Args:
        every_steps: number of updates between calls, counted from the start of ``fit``.
        function: ``function(step, model)`` with the wrapped model, whose weights are those of that step. A call in it
            that would drain the pipeline, such as evaluating the ``PipelineModel`` itself, raises RuntimeError.
    """

    def __init__(self, every_steps: int, function: Callable[[int, keras.Model], None]) -> None:
        super().__init__()
        self._every_steps = checked_count("every_steps", every_steps, "Snapshots come every so many steps", 20)
        self._function = function

    def on_train_begin(self, logs: Any = None) -> None:
        """Ask for the snapshots."""
        _session(self).keep_snapshots(self._every_steps)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Hand over those that are complete."""
        for step in self.model.snapshots():
            self._function(step, self.model.model)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Hand over those that the drain has completed."""
        self.on_train_batch_end(epoch)


class PipelineCheckpoint(keras.callbacks.Callback):
    """Writes checkpoints of training, and resumes from the newest one when the same ``fit`` is run again.

    After every ``every_steps`` updates a checkpoint is taken between two calls of functions, and a thread writes it to
    a file, atomically, while training goes on: weights, optimizer slots, the seeds of Dropout and other random layers,
    metrics, the counters of epochs and minibatches, the learning rate, and the state of EarlyStopping,
    ReduceLROnPlateau and ModelCheckpoint (and of any callback of the same ``fit`` with ``get_state() -> dict`` and
    ``set_state(dict)``, whose values JSON can hold). Of an asynchronous pipeline it holds what is in flight, too:
    activations, gradients and old weights that are still to be read. So training is the same with checkpoints and
    without. A run that was killed and is run again, with the same data in the same order
    (``keras.utils.set_random_seed``), ends with bitwise the same weights as one that was never stopped, whatever
    ``every_steps`` is. By the end of an epoch, what was due within it is written.

    It can also be resumed with another number of stages or another scheme; a message names the differences. What was in
    flight is then left out, and training goes on with the minibatch after the last one that callbacks had seen: every
    step is seen once, though of a few minibatches around it the last stages make a second update and the first ones
    lack theirs.

    Some asynchronous pipelines are run by threads, and still drain for a checkpoint: those on GPUs, with layers that
    call Python, with ``SpecTrain(horizon="fitted")``, and under ``tf.config.experimental.enable_op_determinism``. Such
    a run ends as an uninterrupted one with the same ``every_steps``; with another it reads other weight versions for a
    few steps after each drain.

    The first SIGINT (Ctrl-C) or SIGTERM lets a checkpoint be written after the step at hand (where threads drain, after
    all that is in flight); then ``fit`` raises KeyboardInterrupt or SystemExit(143). A second one ends the process at
    once. No update is lost or repeated. A callback that stops training within an epoch lets the pipeline drain, as the
    model is to have the weights of all minibatches; what goes on from there has drained once more.

    If a checkpoint cannot be written, this is reported and training continues; a damaged checkpoint is skipped for the
    one before it, and that is reported. Weights, or slots, that have become NaN or infinite replace no checkpoint.
    Reports are lines on standard output; with ``verbose=0`` those of something wrong are warnings, and the others are
    left out.
    Workers that share the directory write their own tensors there, each its shard beside the file that names it.
    While ``fit`` runs no other program can write to the directory. Files say of which run and step they are: copies of
    them under other names are not removed, and the whole directory may be copied or moved.

    Args:
        directory: of the checkpoints, for this run alone; made if need be.
        every_steps: updates between checkpoints, counted from the optimizer's first; or "auto", as often as they take
            about 1% of the time, by what the last ones have taken (every 100 where each takes a drain, so that no clock
            decides on the weights).
        keep: how many to keep, the newest.
        resume: whether to resume from the newest one; if False, there must be none.
        failures_every_s: the mean time between failures in seconds, if it is known: with ``every_steps="auto"``
            checkpoints are then made at Young's interval, ``sqrt(2 * cost of one * failures_every_s)``.
        replicate: "memory" for the state after every call of functions in the memory of workers' hosts, of each worker
            on its own host and on another one: a run that has lost a host then repeats at most two calls. "memory:K"
            for that of every K minibatches, "memory:auto" as often as it takes at most 2% of the time. None for
            checkpoints on the disk alone.

    Raises:
        ValueError: at the start of ``fit``: the checkpoints are another model's or several runs', or the newest cannot
            be read though it may be whole (permissions, a newer version), or none can, or there are some and ``resume``
            is False, or none can be written there, or another program is writing there.
    """

    def __init__(
        self,
        directory: str | Path,
        every_steps: int | str = 100,
        keep: int = 3,
        resume: bool = True,
        failures_every_s: float | None = None,
        replicate: str | None = None,
    ) -> None:
        super().__init__()
        self._by_cost = every_steps == AUTO
        every = STEPS if self._by_cost else every_steps
        self._every_steps = checked_count(
            "every_steps", every, "Checkpoints come every so many steps, or 'auto'", STEPS
        )
        self._failures_every_s = self._checked_failures(failures_every_s)
        self._resume = resume
        self._replicate = _checked_replicate(replicate)
        kept = checked_count("keep", keep, "The newest checkpoints are kept, one at least", 3)
        self._store = Store(Path(directory).absolute(), kept)
        self._lock = DirectoryLock(self._store.directory, "directory")
        self._resumed: Checkpoint | None = None
        self._signal: int | None = None
        self._writing: Writing | None = None

    def _checked_failures(self, every_s: float | None) -> float | None:
        if every_s is None:
            return None
        if isinstance(every_s, bool) or not isinstance(every_s, int | float) or not 0 < every_s < math.inf:
            raise ValueError(
                "The mean time between failures is a number of seconds. Received: "
                f"failures_every_s={every_s!r}. Try 86400 for one a day."
            )
        if not self._by_cost:
            raise ValueError(
                "How often failures come decides where checkpoints are as often as is best. Received: "
                f"failures_every_s={every_s!r}, every_steps={self._every_steps}. Try every_steps='auto'."
            )
        return float(every_s)

    @property
    def resumed_at(self) -> int | None:
        """The update from which this ``fit`` resumed; None if it began anew."""
        return self._resumed.about["updates"] if self._resumed else None

    @property
    def saved_at(self) -> int | None:
        """The update of the newest checkpoint of this ``fit``; None if it has none yet."""
        saved = getattr(self, "_saved_at", -1)
        return saved if saved >= 0 else None

    def way_of_run(self, verbose: bool = True) -> dict[str, Any] | None:
        """The way to train that ``scheme="auto"`` chose for the run to go on with; None if there is none.

        ``verbose``: whether a line may say which checkpoints are damaged, in place of a warning.
        """
        found = self._newest(verbose) if self._resume else None
        if found is None and self._resume and self._replicate is not None:
            return way_in_memory(self._store)
        return found.about.get("way") if found else None

    def on_train_begin(self, logs: Any = None) -> None:
        """Go on from the newest checkpoint that is whole, if there is one."""
        self._session = _session(self)
        self._check()
        self._session.has_checkpoints = True
        self._position, self._saved_at, self._resumed = Position(0, 0), -1, None
        self._due, self._finite, self._is_over = False, True, False
        variables = enumerate(self.model.model.variables)
        self._never_finite = {str(n) for n, each in variables if not_finite({f"weight/{n}": array_of(each)})}
        self._told_of_spoiled = False
        self._logs: dict[str, float] = {}
        self._pace, self._stood_s, self._sharded_s = Pace(self._failures_every_s), 0.0, 0.0
        self._sharding = Sharding(self._store.directory)
        found = on_disk = self._newest(self.model.is_verbose)
        self._begin_replicating()
        if self._replication is not None:
            found = self._replication.newer(found)
        if found is not None:
            self._go_on_from(found)
        if found is on_disk:
            self._on_disk = self._saved_at
        else:
            self._on_disk = -1 if on_disk is None else on_disk.about["updates"]
        self._updates = int(count_of(self.model.optimizer).numpy())
        self._session.drains_after, self._session.at_end = self._drains_after, self._at_end
        self._listen()
        self._session.exits.callback(self._end_writing)
        self._session.exits.callback(self._end_replicating)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """The first epoch goes on where the checkpoint was made."""
        self._save_if_due()
        found = self._resumed
        if found is None or self._updates > found.about["updates"]:
            self._position = Position(epoch, 0)
            return
        if self._position.step:
            self._session.restore_metrics(found.arrays, found.about)
        recall(self._session.callbacks, found)
        found.arrays.clear()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Make a checkpoint if it is time: all callbacks have seen the step before."""
        if self._writing is not None and self._writing.is_over:
            self._end_writing()
        if self._replicating is not None and self._replicating.is_over:
            self._end_replicating()
        self._save_if_due()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """See whether it is time."""
        self._updates += 1
        self._position = Position(self._position.epoch, batch + 1)
        self._logs = {key: float(value) for key, value in (logs or {}).items()}
        self._finite = math.isfinite(self._logs.get("loss", 0.0))
        self._due = self._finite and self._session.has_state and self._is_time()
        if self._replication is not None and self._replication.has_neighbours:
            self._replica_is_due = self._finite and self._replication.is_due(self._updates)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """The next epoch begins with the first minibatch, unless this one was stopped within."""
        self._finite = self._finite and math.isfinite((logs or {}).get("loss", 0.0))
        self._end_writing()
        if self._session.stopped:  # and what was then in flight is in the logs by now
            self._logs = {key: float((logs or {}).get(key, value)) for key, value in self._logs.items()}
        else:
            self._position = Position(epoch + 1, 0)

    def _at_end(self) -> None:
        """The last checkpoint, from which more epochs can go on."""
        updates = int(count_of(self.model.optimizer).numpy())
        if self._position.step:  # stopped within the epoch: what was in flight then is done too
            epoch, step = self._position.epoch, self._position.step + updates - self._updates
            whole = self.params["steps"] is not None and step >= self.params["steps"]  # None: nobody knows
            self._position = Position(epoch + 1, 0) if whole else Position(epoch, step)
        known = {} if self._position.step else {"epoch_rate": self._session.about()["learning_rate"]}
        trained = updates > self._on_disk
        self._updates, self._due, self._replica_is_due = updates, self._finite and trained, False
        ended = any(getattr(each, "stopped_epoch", 0) for each in self._session.callbacks)
        self._save_if_due(ended=ended, **known)
        self._end_writing()
        if trained and not self._finite:
            self._tell_of_spoiled("The loss is not finite")
        self._forget_replicas()
        self._is_over = True
        self._obey()  # where nothing was due: a run that had nothing left to do, or a loss that is not finite

    def _newest(self, verbose: bool) -> Checkpoint | None:
        """The newest checkpoint that is whole; says which newer ones are not, and are set aside."""
        found, damaged = self._store.newest()
        for what in damaged:
            _warn(f"{what}; the one before it is used.", verbose)
        return found

    def _check(self) -> None:
        if self._session.at_end is not None:
            raise ValueError("One PipelineCheckpoint can be served. Received: callbacks with two. Try one of them.")
        if self.model.steps_per_execution != 1:
            raise ValueError(
                "Checkpoints come between single steps. Received: "
                f"steps_per_execution={self.model.steps_per_execution}. Try 1."
            )
        self._store.check()
        unlocked = self._session.exits.enter_context(self._lock)
        if unlocked:
            problem = f"{self._store.directory} cannot be locked ({unlocked}): see that no other program writes there."
            _warn(problem, self.model.is_verbose)
        else:
            self._store.sweep()
        if not self._resume and self._store.paths():
            raise ValueError(
                f"There are checkpoints of another run. Received: directory={str(self._store.directory)!r}, "
                "resume=False. Try resume=True to go on with it, or another directory."
            )

    def _drains_after(self, updates: int) -> bool:
        return self._signal is not None or updates % self._every_steps == 0

    def _is_time(self) -> bool:
        """Whether a checkpoint is due after the step at hand; no clock decides where it takes a drain."""
        if not self._by_cost or self._session.drains:
            return self._drains_after(self._updates)
        return self._signal is not None or (self._writing is None and self._pace.is_due)

    def _save_if_due(self, **known: Any) -> None:
        if self._due:
            self._due = False
            self._save(known)
            self._obey()
        self._replicate_if_due()

    def _save(self, known: dict[str, Any]) -> None:
        """Make a checkpoint, which a thread writes; ``known`` is what of its facts is otherwise than the model says."""
        self._end_writing()
        begun_s, step = time.perf_counter(), self._updates
        self._pace.begun()
        try:
            values, about = self._state(known)
        except (OSError, TypeError, ValueError) as error:  # also of a callback's state that cannot be copied
            self._tell_of_failure(step, error)
            return
        self._writing = Writing(step, partial(self._write, step, values, about))
        self._writing.start()
        self._stood_s = time.perf_counter() - begun_s

    def _state(self, known: dict[str, Any]) -> RunState:
        """All that a run needs to go on from the step at hand."""
        values, about = self._session.state()
        about |= {"position": self._position, "logs": self._logs, "ended": False, **known}
        about["callbacks"], more = remembered(self._session.callbacks)
        return RunState({**values, **more}, about)

    def _write(self, step: int, values: dict[str, Any], about: dict[str, Any]) -> bool:
        """In a thread: write the file; whether that was to be done, because all weights are finite."""
        begun_s = time.perf_counter()
        written = self._sharding.write(step, values)
        self._sharded_s = time.perf_counter() - begun_s if written.shards else 0.0  # on workers, as far as is known
        try:
            arrays = as_arrays(written.left)
            is_finite = not self._spoiled(not_finite(arrays) | written.not_finite)
            if is_finite:
                self._store.write(step, arrays, about, written.shards)
        except BaseException:
            self._sharding.discard(written.shards)
            raise
        if not is_finite:
            self._sharding.discard(written.shards)
            return False
        self._saved_at = self._on_disk = step
        if (replication := self._replication) is not None:
            replication.outdated(step)
        return True

    def _begin_replicating(self) -> None:
        self._replication = None if self._replicate is None else Replication(self._store, self._replicate)
        self._replicating: Writing | None = None
        self._replica_is_due = self._told_of_replicas = False
        if self._replication is not None and not self._replication.has_neighbours:
            _say("One host is left: what it holds is no longer replicated.", self.model.is_verbose)

    def _replicate_if_due(self) -> None:
        """Let the state of the step at hand go to the memory of hosts, while training goes on."""
        replication = self._replication
        if replication is None or not self._replica_is_due:
            return
        self._replica_is_due = False
        if self._session.drains:
            raise ValueError(
                "To have the state would change this training: threads alone know what is in flight, or workers would "
                f"join their weights. Received: replicate='memory', scheme={self.model.scheme!r} "
                "(docs/guide/checkpoints.md says when). Try replicate=None."
            )
        self._end_replicating()
        begun_s = time.perf_counter()
        try:
            values, about = self._state({})
        except (OSError, TypeError, ValueError) as error:
            self._tell_of_replicas(self._updates, error)
            return
        replication.taken(self._updates, about, time.perf_counter() - begun_s)
        self._replicating = Writing(self._updates, partial(self._enlist, replication, self._updates, values, about))
        self._replicating.start()

    def _enlist(self, replication: Replication, step: int, values: dict[str, Any], about: dict[str, Any]) -> bool:
        """In a thread: write the state into memory; whether that was to be done, because all weights are finite."""
        replica = replication.write(step, values, about)
        if self._spoiled(replica.not_finite):
            return False
        replication.enlist(replica, self._on_disk)
        return True

    def _end_replicating(self) -> None:
        """Wait until the newest state is in the memory of hosts."""
        writing, self._replicating = self._replicating, None
        if writing is not None:
            writing.ended(self._session.is_lost)
            if self._replication is not None:
                self._replication.took(writing.took_s)
            if writing.is_over and writing.error is not None and not self._session.is_lost():
                self._tell_of_replicas(writing.step, writing.error)

    def _tell_of_replicas(self, step: int, error: Exception) -> None:
        if not self._told_of_replicas:
            self._told_of_replicas = True
            reason = getattr(error, "strerror", None) or str(error)
            _warn(f"The state of step {step} is not in the memory of hosts ({reason}).", self.model.is_verbose)

    def _forget_replicas(self) -> None:
        """The disk has all that hosts have in memory."""
        self._end_replicating()
        replication, self._replication = self._replication, None
        if replication is not None and self._on_disk >= self._updates:
            replication.end()

    def _end_writing(self) -> None:
        """Wait until the checkpoint that is written is there, and say what came of it, if it did not."""
        writing = self._writing
        if writing is None:
            return
        writing.ended(self._session.is_lost)  # what has to come from a lost worker never comes
        self._writing = None
        if self._sharding.untold:
            _say(self._sharding.untold, self.model.is_verbose)
            self._sharding.untold = ""
        if writing.is_over and writing.error is not None:
            self._tell_of_failure(writing.step, writing.error)
        elif writing.is_over and not writing.is_written:
            self._tell_of_spoiled(f"Weights or slots of step {writing.step} are not finite")
        else:
            self._pace.ended(self._stood_s + SLOWED * (writing.busy_s + self._sharded_s))

    def _tell_of_failure(self, step: int, error: Exception) -> None:
        reason = getattr(error, "strerror", None) or error
        problem = f"The checkpoint of step {step} could not be written ({reason}); {self._newest_is()}."
        _warn(problem, self.model.is_verbose)

    def _spoiled(self, names: Iterable[str]) -> bool:
        """Whether one of these, which are not finite, was so when this ``fit`` began."""
        return any(_number(name) not in self._never_finite for name in names)

    def _tell_of_spoiled(self, what: str) -> None:
        if not self._told_of_spoiled:
            self._told_of_spoiled = True
            _warn(f"{what}: no checkpoint is made of them; {self._newest_is()}.", self.model.is_verbose)

    def _newest_is(self) -> str:
        last = self._store.last()
        return f"the newest is {last.name}" if last else "there is none yet"

    def _go_on_from(self, found: Checkpoint) -> None:
        about, position, epochs = found.about, Position(*found.about["position"]), self.params["epochs"]
        if about["ended"]:  # by EarlyStopping, whatever epochs are left
            position = Position(max(epochs, position.epoch), 0)
        changed = self._session.restore(found, position)
        self._resumed, self._position, self._saved_at = found, position, about["updates"]
        different = [*_differences(self._session.about(), about), *changed]
        done = f"{counted(about['updates'], 'step')} done"
        if about["ended"]:
            done += ", after which EarlyStopping had ended training: nothing is left"
        elif position.epoch >= epochs:
            done += f", and nothing is left of {counted(epochs, 'epoch')}"
        elif position.step or position.epoch:
            done += f", {position.step} of them in epoch {position.epoch + 1}"
        if self._spoiled(not_finite(found.arrays)):
            problem = (
                f"Weights in {found.path} are not finite. Try moving it elsewhere, to go on from the one before it."
            )
            _warn(problem, self.model.is_verbose)
        changes = f" Different now: {'; '.join(different)}." if different else ""
        changes += LEFT_OUT if about.get("left_out") else ""
        _say(f"Going on from {found.path}: {done}.{changes}", self.model.is_verbose)

    def _listen(self) -> None:
        """Signals wait until the pipeline is drained; only the main thread may ask for them."""
        self._signal = None
        if threading.current_thread() is not threading.main_thread():
            return
        self._session.exits.callback(self._obey_late)
        for number in (signal.SIGINT, signal.SIGTERM):
            before = signal.signal(number, self._heard)
            self._session.exits.callback(signal.signal, number, before or signal.SIG_DFL)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        self._signal = number
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_DFL)  # the second one ends the process

    def _obey_late(self) -> None:
        """A signal that came after the last checkpoint; an exception that ends ``fit`` is left to end it."""
        if self._is_over:
            self._obey()

    def _obey(self) -> None:
        if self._signal is None:
            return
        self._end_writing()
        self._forget_replicas()
        number, self._signal = self._signal, None
        name = signal.Signals(number).name
        kept = (
            f"step {self._saved_at} is in {self._store.directory}" if self._saved_at >= 0 else "nothing could be saved"
        )
        what = f"Stopped by {name} after {counted(self._updates, 'step')}: {kept}. Run it again to go on."
        _say(what, self.model.is_verbose)
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + number)


def _checked_replicate(replicate: Any) -> int | str | None:
    """How many minibatches there are at least from one state in memory to the next, or "auto"; None for none there."""
    name, _, every = replicate.partition(":") if isinstance(replicate, str) else (replicate, "", "")
    is_number = every.isascii() and every.isdecimal() and int(every) > 0
    if name is None:
        return None
    if name != MEMORY or not (replicate == MEMORY or every == AUTO or is_number):
        raise ValueError(
            "The state of a run is replicated in the memory of workers' hosts, or not at all. Received: "
            f"replicate={replicate!r}. Try 'memory', 'memory:8' for every 8 minibatches, 'memory:auto', or None."
        )
    return int(every) if is_number else every or 1


def _session(callback: keras.callbacks.Callback) -> FitSession:
    """The ``fit`` that the callback is given to. Raises TypeError for that of another model than a PipelineModel."""
    session = getattr(callback.model, "session", None)
    if not isinstance(session, FitSession):
        raise TypeError(
            f"{type(callback).__name__} is for pipelines. Received: model of class {type(callback.model).__name__}. "
            "Try pipetrain.PipelineModel, or a callback of Keras such as BackupAndRestore."
        )
    return session


def _number(name: str) -> str:
    """The variable's, of the name of its array or of a slot's."""
    return name.split("/")[1]


def _say(what: str, verbose: bool) -> None:
    if verbose:
        _logger.info(what, extra=BELOW_BAR)


def _warn(what: str, verbose: bool) -> None:
    """Of something wrong, which is to be known whatever ``verbose`` is."""
    if verbose:
        _logger.warning(what, extra=BELOW_BAR)
    else:
        warnings.warn(what, stacklevel=2)


def _differences(now: dict[str, Any], then: dict[str, Any]) -> list[str]:
    """The differences in the way to train since the checkpoint, as text."""
    stages = [max(len(about["ends"]), 1) for about in (now, then)]
    if stages[0] != stages[1]:
        different = [f"{counted(stages[0], 'stage')} instead of {stages[1]}"]
    else:
        before = {"compiled": now["compiled"], **then}  # of old checkpoints nothing is known
        parts = ("ends", "replicas", "compiled")
        different = [f"{part} {now[part]} instead of {before[part]}" for part in parts if now[part] != before[part]]
    names = {"scheme": "scheme", "optimizer": "optimizer", "begun_rate": "learning rate", "batch_size": "batch size"}
    more = [f"{name} {now[key]} instead of {then[key]}" for key, name in names.items() if now[key] != then[key]]
    options, were = now["options"], then.get("options", now["options"])  # of old checkpoints nothing is known
    for name in dict.fromkeys((*options, *were)):
        mine, was = options.get(name), were.get(name)
        more += [f"{name} {mine} instead of {was}"] if mine != was else []
    return [*different, *more]
