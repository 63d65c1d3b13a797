"""Detects workers that die, hang or are cut off while stages are on them, and ends calls that wait for them."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType

import tensorflow as tf

from pipetrain.cluster.connection import JOB, worker_of
from pipetrain.cluster.hosts import named
from pipetrain.cluster.sockets import ANSWER_S, ASK_S, MISSED, SEVER_S, missing, probed, sever

NOTICED_S = MISSED * (ASK_S + ANSWER_S)  # a worker that is lost is noticed within so long

# What TensorFlow says of a worker that ended and was started anew: it knows nothing of what it was given.
_FORGOT = ("context_id", "remote_handle", "remote workers have been restarted", "device incarnation")
START_AGAIN = (
    "starting the worker again, and this program with PipelineCheckpoint among the callbacks, which goes on from the "
    "newest checkpoint; or pipetrain.connect once it answers again."
)
JOIN_AGAIN = (
    "pipetrain.connect with the same workers, which joins them again, and then this call; if workers were started "
    "anew, compile before it, or this program again with PipelineCheckpoint among the callbacks."
)
_TASK = re.compile(rf"/job:{JOB}/replica:\d+/task:(\d+)")
_ASKED = re.compile(rf"remote target {_TASK.pattern}")  # who gave the error; what comes before may name others


class WorkerLost(ConnectionError):
    """A worker with stages ended, hangs, or cannot be reached: ``workers`` are the addresses of such workers."""

    def __init__(self, message: str, workers: Sequence[str]) -> None:
        super().__init__(message)
        self.workers = tuple(workers)


class HealthMonitor:
    """A context with a heartbeat: every worker is asked each second whether it is alive.

    A worker that has ended is detected as soon as TensorFlow uses it; a worker that hangs or is cut off is detected
    within ``NOTICED_S``. TensorFlow's calls would wait for such a worker without end. Every connection to the workers
    is therefore closed repeatedly until the context is left, so that those calls fail. Calls that are made later wait
    all the same: who waits for them is told.

    Args:
        stages: the stages on every device in use.
        tell: called with the exception when a worker is lost, and repeatedly until the context is left, in a thread.

    Raises WorkerLost at its end, instead of what TensorFlow raised for that reason.
    """

    def __init__(self, stages: Mapping[str, Sequence[int]], tell: Callable[[WorkerLost], None] | None = None) -> None:
        self._tell = tell
        self._stages: dict[str, list[int]] = {}
        self._tasks: dict[int, str] = {}
        for device, there in stages.items():
            if (address := worker_of(device)) is not None:
                self._stages[address] = sorted({*self._stages.get(address, ()), *there})
                self._tasks[tf.DeviceSpec.from_string(device).task] = address
        self._left = threading.Event()
        self._changed = threading.Lock()
        self._threads: list[threading.Thread] = []
        self.lost: WorkerLost | None = None

    @property
    def watches(self) -> bool:
        """Whether there are workers."""
        return bool(self._stages)

    def __enter__(self) -> HealthMonitor:
        try:
            for address in self._stages:
                self._begin(lambda at=address: self._ask(at), f"watch of {address}")  # type: ignore[misc]
        except BaseException:  # an interrupt: nobody else would end those that have begun
            self._left.set()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        caused = self.caused(error)
        self._left.set()
        for thread in self._threads:
            thread.join()
        if caused and self.lost is not None and error is not self.lost:
            raise self.lost from error

    def caused(self, error: BaseException | None) -> bool:
        """Whether an exception comes of a worker that is lost; asks all of them if TensorFlow raised it."""
        if error is None or not self._stages:
            return False
        if self.lost is None and isinstance(error, tf.errors.OpError):
            why = missing(self._stages)
            reason = ""
            if any(each in str(error) for each in _FORGOT):
                reason = "it answers, but was started anew or paused"
            elif isinstance(error, tf.errors.UnavailableError):
                reason = "it answers, but its connection broke"
            if why:
                self._lose(why)
            elif reason:
                self._lose(dict.fromkeys(self._named(error) or self._stages, reason), is_there=True)
        return self.lost is not None and isinstance(error, Exception)  # else somebody wants the program to end

    def _named(self, error: tf.errors.OpError) -> list[str]:
        asked, every = _ASKED.findall(str(error))[:1], _TASK.findall(str(error))
        found = ([self._tasks[int(task)] for task in tasks if int(task) in self._tasks] for tasks in (asked, every))
        return next(filter(None, found), [])

    def _ask(self, address: str) -> None:
        """A worker's thread: asks until the context is left or somebody is lost."""
        missed = 0
        while not self._left.wait(ASK_S) and self.lost is None:
            why = probed(address, ANSWER_S)
            missed = missed + 1 if why else 0  # one alone may be this process', stopped for a while
            if missed == MISSED:
                self._lose({address: why})

    def _lose(self, why: Mapping[str, str], is_there: bool = False) -> None:
        with self._changed:
            if self.lost is not None:
                return
            what = "; ".join(
                f"{named(address)}{_place(self._stages[address])}: {each}" for address, each in why.items()
            )
            who = "a worker" if len(why) == 1 else "workers"
            self.lost = WorkerLost(
                f"{'No longer joined to' if is_there else 'Lost'} {who}: {what}. The model keeps the weights "
                f"of its last drain. Try {JOIN_AGAIN if is_there else START_AGAIN}",
                list(why),
            )
            self._begin(lambda error=self.lost: self._sever(error), "end of calls to a lost worker")  # type: ignore[misc]

    def _sever(self, error: WorkerLost) -> None:
        while not self._left.is_set():
            sever(self._stages)
            if self._tell is not None:
                self._tell(error)
            self._left.wait(SEVER_S)

    def _begin(self, body: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=body, name=f"pipetrain {name}", daemon=True)
        thread.start()
        self._threads.append(thread)


def _place(stages: Sequence[int]) -> str:
    return f", {'stage' if len(stages) == 1 else 'stages'} {', '.join(map(str, stages))}" if stages else ""
