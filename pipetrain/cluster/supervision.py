"""Training on workers that may be lost: what is lost ends a training process, and the next one goes on.

The process that supervises trains nothing, so that nothing of TensorFlow's can hold it up.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any

from pipetrain.cluster.hosts import JOBS, NAMES, RUN, process
from pipetrain.cluster.sockets import ASK_S, missing
from pipetrain.logs import counted

LOST = 75  # exit status of a training process that has lost a worker; EX_TEMPFAIL of sysexits.h
LEAVE_S = 30.0  # a training process that cannot end within, after a worker was lost, is killed
GROUP_S = 2.0  # in which processes that a training process leaves behind end, or they are killed
TRIES = 5  # losses without progress between them
KILLED = (-signal.SIGKILL, -signal.SIGSEGV, -signal.SIGABRT)  # statuses of a training process that died by itself
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
KILLS = 3  # signals after which the training process is ended at once

Renew = Callable[[Mapping[str, str]], None]
END = "--end-workers"  # the script's process asks the workers to end when it does
JOINED, LOST_WORKER = b"joined\n", b"lost a worker\n"  # what it reports
AWHILE_S = 60.0  # a script that has run for so long has come further than before, as far as anybody knows


class Supervision:
    """Training processes, one after another, and the workers that they use. Signals are handed on to them.

    A subclass says how a training process is started (``_started``), what it has come to (``_done``) and what is said.

    Args:
        workers: their addresses.
        wait_s: how long lost workers are waited for, None for not at all.
        is_elastic: whether training goes on without workers that do not come back.
        renew: starts workers anew in the place of lost ones, whose addresses it is given; None where others do that.
        names: what users call the workers, by address, if not by that.

    ``lost`` is what the last training process was lost by: addresses, and why they do not answer.
    """

    def __init__(
        self,
        workers: list[str],
        wait_s: float | None = None,
        is_elastic: bool = False,
        renew: Renew | None = None,
        names: Mapping[str, str] | None = None,
    ) -> None:
        self.workers, self._wait_s, self._is_elastic, self._renew = list(workers), wait_s, is_elastic, renew
        self._names = names or {}
        self._child: subprocess.Popen[bytes] | None = None
        self._signals: list[int] = []
        self.lost: dict[str, str] = {}

    def _started(self) -> subprocess.Popen[bytes]:
        """The next training process, in a session of its own: what a terminal sends comes once, from here."""
        raise NotImplementedError

    def _done(self) -> Any:
        """How far training has come: another value, if there was progress."""

    def _going_on(self) -> str:
        """How the next training process begins, in words."""
        raise NotImplementedError

    def _has_begun(self) -> bool:
        """Whether a training process has joined the workers, which may be starting until then."""
        return True

    def _has_lost(self, status: int) -> bool:
        """Whether a training process with this exit status has told of a worker that was lost."""
        return status == LOST

    def _with_fewer(self) -> str:
        """Training goes on with the workers that are left; with what else, in words before those of them."""
        return ""

    def _given_up(self, why: str) -> None:
        """Training does not go on."""
        say(why)

    def run(self) -> int:
        """Train until the end; the exit status of the last training process, or 1 where workers do not come back."""
        # One that is ignored, as nohup does, stays so.
        heeded = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, self._heard) for number in heeded}
        try:
            return self._trained()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _trained(self) -> int:
        tries, done = 0, self._done()
        while True:
            status = self._train()
            lost, has_lost = (self.lost or missing(self.workers)) if status else {}, self._has_lost(status)
            if self._signals and status:
                self._given_up("Stopped.")
            goes_on = self._wait_s is not None or self._is_elastic
            if self._signals or not goes_on or not (lost or has_lost or status in KILLED):
                return status if status >= 0 else 128 - status
            before, done = done, self._done()
            tries = tries + 1 if done == before else 1
            if tries == TRIES:
                self._given_up(f"Workers were lost {TRIES} times without progress in between.")
                return 1
            recovered = self._recovered(lost, has_lost)
            if self._signals:
                self._given_up("Stopped.")
                return 128 + self._signals[0]
            if not recovered:
                return 1

    def _train(self) -> int:
        """One training process to its end, whichever it is, and all that it has started; its exit status."""
        with self._started() as self._child:
            try:
                return self._ended(self._child)
            finally:
                _end_group(self._child.pid)

    def _ended(self, child: subprocess.Popen[bytes]) -> int:
        if self._signals:  # before there was a process to hand it on to
            child.send_signal(self._signals[0])
        leave_by_s, self.lost = None, {}
        while True:
            try:
                return child.wait(ASK_S)
            except subprocess.TimeoutExpired:
                pass
            self.lost = missing(self.workers) if self._has_begun() else {}
            if not self.lost:
                leave_by_s = None
                continue
            leave_by_s = leave_by_s or time.monotonic() + LEAVE_S
            if time.monotonic() > leave_by_s:
                late = f"the training process did not end within {LEAVE_S:.0f} s, and is killed"
                say(f"{self._told(self.lost)}: {late}.")
                child.kill()
                leave_by_s = math.inf

    def _recovered(self, lost: Mapping[str, str], has_lost: bool) -> bool:
        """Say what is lost and have it replaced, or do without it; False if neither can be."""
        if not lost:
            why = "Lost a worker, which was started anew" if has_lost else "The training process died"
            say(f"{why}: {self._going_on()}.")
            return True
        what = self._told(lost)
        if self._wait_s is not None:
            left = self._awaited(what, lost)
            if self._signals or not left:
                return True
            what, lost = f"{', '.join(map(self._name, left))} did not come back", left
        if not self._is_elastic or not {*self.workers} - {*lost}:
            self._given_up(f"{what}.")
            return False
        self.workers = [address for address in self.workers if address not in lost]
        number = len(self.workers)
        on = f"{self._with_fewer()}on {counted(number, 'worker')} that {'is' if number == 1 else 'are'} left"
        say(f"{what}: {self._going_on()} {on}.")
        return True

    def _told(self, lost: Mapping[str, str]) -> str:
        return f"Lost {', '.join(f'{self._name(address)} ({why})' for address, why in lost.items())}"

    def _name(self, address: str) -> str:
        return self._names.get(address, address)

    def _awaited(self, what: str, lost: Mapping[str, str]) -> dict[str, str]:
        """Those that are not back in time."""
        assert self._wait_s is not None
        until_s, left = time.monotonic() + self._wait_s, dict(lost)
        if self._renew is None:
            say(f"{what}: waiting up to {self._wait_s:g} s, then {self._going_on()}.")
        else:
            say(f"{what}: started anew, {self._going_on()}.")
        while left and not self._signals:
            left = missing(left) if self._renew is None else self._not_renewed(left)
            if time.monotonic() > until_s:
                break
            time.sleep(ASK_S)
        return left

    def _not_renewed(self, lost: Mapping[str, str]) -> dict[str, str]:
        """Those that could not be started anew, and why."""
        left = {}
        for address in lost:
            try:
                assert self._renew is not None
                self._renew({address: lost[address]})
            except (ChildProcessError, ConnectionError) as error:
                left[address] = str(error)
        return left

    def _heard(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)
        if self._child is not None and self._child.poll() is None:
            if len(self._signals) >= KILLS:
                os.killpg(self._child.pid, signal.SIGKILL)  # what it has started, too
            elif number == signal.SIGHUP:
                os.killpg(self._child.pid, number)  # as a terminal's end does
            else:
                self._child.send_signal(number)


def _end_group(group: int) -> None:
    """End a process group, of which some may be left."""
    until_s = time.monotonic() + GROUP_S
    with suppress(OSError):  # nobody is left
        os.killpg(group, signal.SIGTERM)
        while time.monotonic() < until_s:
            time.sleep(0.05)
            os.killpg(group, 0)
        os.killpg(group, signal.SIGKILL)


def say(what: str) -> None:
    """A line of its own, below what a progress bar has written."""
    print(f"\n{what}", flush=True)


class ScriptRun(Supervision):
    """Runs a script, and again where a worker was lost, if that is wanted: it goes on from its newest checkpoint.

    Args:
        arguments: the script with its arguments, or ``-m``, a module's name, and its arguments.
        workers: the addresses of those that it joins.
        wait_s, is_elastic, renew, names: see ``Supervision``.
        job: of workers that others have started, which are asked to end when the script has; None for other workers.
        is_named: whether the job's name is no other job's, now or before.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        workers: list[str],
        wait_s: float | None = None,
        is_elastic: bool = False,
        renew: Renew | None = None,
        names: Mapping[str, str] | None = None,
        job: str | None = None,
        is_named: bool = True,
    ) -> None:
        super().__init__(workers, wait_s, is_elastic, renew, names)
        self._arguments, self._job, self._ends_workers = list(arguments), job, job is not None
        self._run = "" if is_named else uuid.uuid4().hex
        self._begun_s, self._periods = time.monotonic(), 0
        self._report: int | None = None  # a pipe on which the script's process tells what it has come to
        self._said = b""

    def run(self) -> int:
        """Until the script has ended; its exit status, 128 and more where a signal ended it."""
        status = super().run()
        lost = missing(self.workers) if self._ends_workers and status != 0 else {}
        self.workers = [address for address in self.workers if address not in lost]
        if self._ends_workers and status != 0 and self.workers:  # it may not have asked them
            self._arguments = []
            self._started().wait()
        if self._report is not None:
            os.close(self._report)
        return status

    def _started(self) -> subprocess.Popen[bytes]:
        ends = [END] if self._ends_workers else []
        tf_config = json.dumps({"cluster": {"worker": self.workers}})
        self._begun_s = time.monotonic()
        told = {"TF_CONFIG": tf_config, NAMES: json.dumps(self._names)}
        told[JOBS] = json.dumps({} if self._job is None else dict.fromkeys(self.workers, self._job))
        told[RUN] = self._run
        told["CUDA_VISIBLE_DEVICES"] = "-1"  # GPUs are the workers': TensorFlow would take this host's memory of all
        if self._report is not None:
            os.close(self._report)
        (self._report, told_by), self._said = os.pipe(), b""
        os.set_blocking(self._report, False)  # what the script has forked may hold the other end
        command = process("pipetrain.cli.script", os.getpid(), told_by, *ends, *self._arguments)
        try:
            return subprocess.Popen(command, env={**os.environ, **told}, pass_fds=[told_by], start_new_session=True)
        finally:
            os.close(told_by)

    def _has_begun(self) -> bool:
        return self._has_said(JOINED)

    def _has_lost(self, status: int) -> bool:
        """By what its process has said: a script may have an exit status of its own that is LOST."""
        return self._has_said(LOST_WORKER)

    def _has_said(self, what: bytes) -> bool:
        assert self._report is not None
        with suppress(BlockingIOError):
            self._said += os.read(self._report, 1024)
        return what in self._said

    def _done(self) -> Any:
        self._periods += time.monotonic() - self._begun_s > AWHILE_S
        return self._periods

    def _going_on(self) -> str:
        return "running the script again"
