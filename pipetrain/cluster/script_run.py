"""A user's script as a process of its own, which has joined workers before its first line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from types import FrameType

LOOK_S = 0.2  # between two looks at who has ended
LEAVE_S = 30.0  # a script that cannot end within, after a worker was lost, is killed
KILLS = 3  # signals after which it is ended at once
END = "--end-workers"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class ScriptRun:
    """Runs a script once; SIGINT, SIGTERM and SIGHUP are handed on to it, the third one ends it at once.

    Args:
        arguments: the script with its arguments, or ``-m``, a module's name, and its arguments.
        addresses: of the workers that it joins.
        lost: the workers' hosts that were lost, with what is known of each; asked again and again.
        ends_workers: whether workers, which others have started, are asked to end when the script has.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        addresses: Sequence[str],
        lost: Callable[[], dict[str, str]] = dict,
        ends_workers: bool = False,
    ) -> None:
        self._arguments, self._lost, self._ends_workers = list(arguments), lost, ends_workers
        self._environment = {**os.environ, "TF_CONFIG": json.dumps({"cluster": {"worker": list(addresses)}})}
        self._child: subprocess.Popen[bytes] | None = None
        self._signals = 0

    def run(self) -> int:
        """Until the script has ended; its exit status, 128 and more where a signal ended it."""
        before = {number: signal.signal(number, self._heard) for number in SIGNALS}
        try:
            # A session of its own: what a terminal sends to all processes comes once, from here.
            status = self._waited(self._started(self._arguments))
            if self._ends_workers and status < 0:  # it could not ask them itself
                self._waited(self._started([]))
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        return status if status >= 0 else 128 - status

    def _started(self, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
        ends = [END] if self._ends_workers else []
        command = [sys.executable, "-m", "pipetrain.cli.script", str(os.getpid()), *ends, *arguments]
        self._child = subprocess.Popen(command, env=self._environment, start_new_session=True)
        return self._child

    def _waited(self, child: subprocess.Popen[bytes]) -> int:
        leave_by_s: float | None = None
        while True:
            try:
                return child.wait(LOOK_S)
            except subprocess.TimeoutExpired:
                pass
            if not self._lost():
                continue
            leave_by_s = leave_by_s or time.monotonic() + LEAVE_S
            if time.monotonic() > leave_by_s:
                child.kill()

    def _heard(self, number: int, frame: FrameType | None) -> None:
        self._signals += 1
        if self._child is not None and self._child.poll() is None:
            self._child.send_signal(signal.SIGKILL if self._signals >= KILLS else number)
