"""The runs of a user's script, in processes that have joined the workers before its first line."""

from __future__ import annotations

import json
import os
import subprocess
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from pipetrain.cluster.commands import process
from pipetrain.cluster.hosts import JOBS, NAMES, RUN
from pipetrain.cluster.sockets import missing
from pipetrain.cluster.supervision import Renew, Supervision

END = "--end-workers"  # the script's process asks the workers to end when it does
JOINED, LOST_WORKER = b"joined\n", b"lost a worker\n"  # what it reports
AWHILE_S = 60.0  # a script that has run for so long has come further than before, as far as anybody knows


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
