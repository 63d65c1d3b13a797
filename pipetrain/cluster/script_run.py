"""A user's script as a process of its own, which has joined workers before its first line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from pipetrain.cluster.hosts import NAMES
from pipetrain.cluster.supervision import Renew, Supervision
from pipetrain.plan.text_table import counted

END = "--end-workers"  # the script's process asks the workers to end when it does
AWHILE_S = 60.0  # a script that has run for so long has come further than before, as far as anybody knows


class ScriptRun(Supervision):
    """Runs a script, and again where a worker was lost, if that is wanted: it goes on from its newest checkpoint.

    Args:
        arguments: the script with its arguments, or ``-m``, a module's name, and its arguments.
        workers: the addresses of those that it joins.
        wait_s, is_elastic, renew, names: see ``Supervision``.
        ends_workers: whether workers, which others have started, are asked to end when the script has.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        workers: list[str],
        wait_s: float | None = None,
        is_elastic: bool = False,
        renew: Renew | None = None,
        names: Mapping[str, str] | None = None,
        ends_workers: bool = False,
    ) -> None:
        super().__init__(workers, wait_s, is_elastic, renew, names)
        self._arguments, self._ends_workers = list(arguments), ends_workers
        self._begun_s, self._periods = time.monotonic(), 0

    def run(self) -> int:
        """Until the script has ended; its exit status, 128 and more where a signal ended it."""
        status = super().run()
        if self._ends_workers and status != 0:  # it may not have asked them
            self._arguments, self._ends_workers = [], True
            self._started().wait()
        return status

    def _started(self) -> subprocess.Popen[bytes]:
        ends = [END] if self._ends_workers else []
        command = [sys.executable, "-m", "pipetrain.cli.script", str(os.getpid()), *ends, *self._arguments]
        tf_config = json.dumps({"cluster": {"worker": self.workers}})
        self._begun_s = time.monotonic()
        told = {"TF_CONFIG": tf_config, NAMES: json.dumps(self._names)}
        told["CUDA_VISIBLE_DEVICES"] = "-1"  # GPUs are the workers': TensorFlow would take this host's memory of all
        return subprocess.Popen(command, env={**os.environ, **told}, start_new_session=True)

    def _done(self) -> Any:
        self._periods += time.monotonic() - self._begun_s > AWHILE_S
        return self._periods

    def _going_on(self) -> str:
        return "running the script again"

    def _without(self, lost: Mapping[str, str]) -> str:
        return f"on {counted(len(self.workers), 'worker')} that {'is' if len(self.workers) == 1 else 'are'} left"
