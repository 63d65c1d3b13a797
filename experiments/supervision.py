"""Runs on workers that may be lost: what is lost ends a training process, and the next goes on from its checkpoint."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from experiments.records import CHECKPOINTS, LOST
from pipetrain.checkpoint.store import steps_done
from pipetrain.cluster.hosts import Hosts
from pipetrain.cluster.probe import ASK_S, missing
from pipetrain.plan.text_table import counted
from pipetrain.run.stderr import quiet_stderr

if TYPE_CHECKING:
    from pipetrain.cluster.local_workers import LocalWorkers

LEAVE_S = 30.0  # a training process that cannot end within, after a worker was lost, is killed
TRIES = 5  # losses without a checkpoint between them
KILLED = (-signal.SIGKILL, -signal.SIGSEGV, -signal.SIGABRT)  # statuses of a training process that died by itself


class Supervision:
    """A run's training processes, one after another, and the workers that they use.

    This process trains nothing, so that nothing of TensorFlow's can hold it up. Ctrl-C and SIGTERM are handed on.

    Args:
        options: of the command line: ``cluster`` or ``local_workers``, ``wait`` and ``elastic``.
        arguments: the command line without these.
        output: the run's folder.
    """

    def __init__(self, options: argparse.Namespace, arguments: Sequence[str], output: Path) -> None:
        self._options, self._arguments, self._output = options, list(arguments), output
        self._settings_before = self._settings()
        self._planned: int | None = None  # stages, before anything was lost
        self._stages: int | None = None  # since then
        self._child: subprocess.Popen[bytes] | None = None
        self._signalled = 0  # the first signal, if there was one
        self._missing: dict[str, str] = {}  # when they were asked last

    def run(self) -> int:
        """Train until the end; the exit status of the last training process, or 1 where workers do not come back."""
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # what is lost, this process says
        with ExitStack() as ends:
            self._local: LocalWorkers | None = None
            if self._options.cluster is None:
                self._local = ends.enter_context(_local_workers(self._options.local_workers))
                self._workers = list(self._local.addresses)
            else:
                self._workers = list(Hosts.load(self._options.cluster).workers)
            self._at_first = len(self._workers)
            for number in (signal.SIGINT, signal.SIGTERM):
                ends.callback(signal.signal, number, signal.signal(number, self._heard))
            tries, done = 0, self._done()
            while True:
                status = self._train()
                lost = (self._missing or missing(self._workers)) if status else {}
                if self._signalled and status:
                    self._given_up("Stopped.")
                if self._signalled or not (lost or status == LOST or status in KILLED):
                    return status if status >= 0 else 128 - status
                before, done = done, self._done()
                tries = tries + 1 if done == before else 1
                if tries == TRIES:
                    return self._given_up(f"Workers were lost {TRIES} times without a checkpoint in between.")
                recovered = self._recovered(lost, status)
                if self._signalled:
                    self._given_up("Stopped.")
                    return 128 + self._signalled
                if not recovered:
                    return 1

    def _train(self) -> int:
        """One training process to its end, whichever it is; its exit status."""
        hosts = self._output / "hosts.json"
        hosts.write_text(json.dumps({"workers": self._workers}) + "\n", encoding="utf-8")
        command = [sys.executable, str(Path(__file__).with_name("run.py")), *self._what()]
        # A session of its own: what a terminal sends to all processes comes once, from here. At the end of its standard
        # input it knows that this process has gone.
        with subprocess.Popen(
            [*command, "--supervised", "--cluster", str(hosts)], stdin=subprocess.PIPE, start_new_session=True
        ) as self._child:
            if self._signalled:  # before there was a process to hand it on to
                self._child.send_signal(self._signalled)
            leave_by_s, self._missing = None, {}
            while True:
                try:
                    return self._child.wait(ASK_S)
                except subprocess.TimeoutExpired:
                    pass
                self._missing = missing(self._workers)
                if not self._missing:
                    leave_by_s = None
                    continue
                leave_by_s = leave_by_s or time.monotonic() + LEAVE_S
                if time.monotonic() > leave_by_s:
                    self._child.kill()

    def _what(self) -> list[str]:
        """What a training process is told: at first what was asked for, then to go on."""
        if self._settings() == self._settings_before:
            where = "--output" if self._options.resume is None else "--resume"
            return [*self._arguments, where, str(self._output)]
        what = ["--resume", str(self._output)]
        if self._options.resume is not None and "scheme" in self._options.given:
            what += [part for name, file in self._options.files.items() for part in ("--scheme", file or name)]
        if self._options.data_dir is not None:
            what += ["--data-dir", self._options.data_dir]
        if self._stages is not None:
            what += ["--stages", str(self._stages)]
        return what

    def _settings(self) -> set[tuple[int, int]]:
        """The files that training processes write when they begin, each a new one: whatever a clock says."""
        found = (os.stat(path) for path in self._output.glob("*/config.json"))
        return {(each.st_ino, each.st_mtime_ns) for each in found}

    def _recovered(self, lost: Mapping[str, str], status: int) -> bool:
        """Say what is lost and have it replaced, or do without it; False if neither can be."""
        if not lost:
            why = "Lost a worker, which was started anew" if status == LOST else "The training process died"
            _say(f"{why}: {self._going_on()}.")
            return True
        what = f"Lost {', '.join(f'{address} ({why})' for address, why in lost.items())}"
        if self._options.wait is not None:
            if self._local is not None:
                _say(f"{what}: started anew, {self._going_on()}.")
                self._local.renew(lost)
                return True
            _say(f"{what}: waiting up to {self._options.wait:g} s, then {self._going_on()}.")
            left = self._waited(lost)
            if self._signalled or not left:
                return True
            what = f"{', '.join(left)} did not come back"
            lost = left
        survivors = [address for address in self._workers if address not in lost]
        if not self._options.elastic or not survivors:
            self._given_up(f"{what}.")
            return False
        self._workers = survivors
        self._stages = self._fewer(len(survivors))
        _say(
            f"{what}: {self._going_on()} with {counted(self._stages, 'stage')} on "
            f"{counted(len(survivors), 'worker')} that {'is' if len(survivors) == 1 else 'are'} left."
        )
        return True

    def _waited(self, lost: Mapping[str, str]) -> dict[str, str]:
        """Those that are not back in time."""
        until_s, left = time.monotonic() + self._options.wait, dict(lost)
        while left and time.monotonic() < until_s and not self._signalled:
            time.sleep(ASK_S)
            left = missing(left)
        return left

    def _fewer(self, workers: int) -> int:
        """How many stages for so many workers: those of the run, if it does not have more than that; else their share.

        A worker may have several devices.
        """
        if self._planned is None:
            known = (json.loads(path.read_text(encoding="utf-8")) for path in self._output.glob("*/config.json"))
            self._planned = max((each["stages"] for each in known), default=self._options.stages)
        return self._planned if self._planned <= workers else max(1, self._planned * workers // self._at_first)

    def _done(self) -> int | None:
        """The steps of the scheme that is being trained, up to its newest checkpoint; None if there is none yet.

        Another scheme's may be there, which it went on from.
        """
        steps = (steps_done(path) for path in self._output.glob(f"*/{CHECKPOINTS}"))
        return max((each for each in steps if each is not None), default=None)

    def _going_on(self) -> str:
        done = self._done()
        return "beginning again, without a checkpoint yet" if done is None else f"going on from step {done}"

    def _given_up(self, why: str) -> int:
        workers = f"--cluster {self._options.cluster}" if self._local is None else f"--local-workers {self._at_first}"
        _say(f"{why} To go on: python experiments/run.py --resume {self._output} {workers}")
        return 1

    def _heard(self, number: int, frame: FrameType | None) -> None:
        self._signalled = self._signalled or number
        if self._child is not None and self._child.poll() is None:
            self._child.send_signal(number)


def _local_workers(count: int) -> LocalWorkers:
    with quiet_stderr():
        from pipetrain.cluster.local_workers import LocalWorkers
    return LocalWorkers(count)


def _say(what: str) -> None:
    print(f"\n{what}", flush=True)
