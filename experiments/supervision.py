"""Supervised runs: training processes on workers that may be lost, each going on from the newest checkpoint."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.records import CHECKPOINTS
from pipetrain.checkpoint.store import steps_done
from pipetrain.cluster.hosts import Hosts
from pipetrain.cluster.supervision import Supervision, say
from pipetrain.logs import counted, quiet_stderr

if TYPE_CHECKING:
    from pipetrain.cluster.local_workers import LocalWorkers


class SupervisedRun(Supervision):
    """A run's training processes, and the workers that they use.

    Args:
        options: of the command line: ``cluster`` or ``local_workers``, ``wait`` and ``elastic``.
        arguments: the command line without these.
        output: the run's folder.
        local: the workers of ``local_workers``.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        arguments: Sequence[str],
        output: Path,
        local: LocalWorkers | None = None,
    ) -> None:
        workers = list(local.addresses if local else Hosts.load(options.cluster).workers)
        super().__init__(workers, options.wait, options.elastic, local.renew if local else None)
        self._options, self._arguments, self._output = options, list(arguments), output
        self._settings_before = self._settings()
        self._at_first = len(workers)
        self._planned: int | None = None  # stages, before anything was lost
        self._stages: int | None = None  # since then

    def _started(self) -> subprocess.Popen[bytes]:
        hosts = self._output / "hosts.json"
        hosts.write_text(json.dumps({"workers": self.workers}) + "\n", encoding="utf-8")
        command = [sys.executable, str(Path(__file__).with_name("run.py")), *self._what()]
        # At the end of its standard input it knows that this process has gone.
        return subprocess.Popen(
            [*command, "--supervised", "--cluster", str(hosts)], stdin=subprocess.PIPE, start_new_session=True
        )

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

    def _with_fewer(self) -> str:
        self._stages = self._fewer(len(self.workers))
        return f"with {counted(self._stages, 'stage')} "

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

    def _given_up(self, why: str) -> None:
        given = self._options.cluster
        workers = f"--local-workers {self._at_first}" if given is None else f"--cluster {given}"
        say(f"{why} To go on: python experiments/run.py --resume {self._output} {workers}")


def supervised(options: argparse.Namespace, arguments: Sequence[str], output: Path) -> int:
    """Train until the end; the exit status. The arguments are those of ``SupervisedRun``."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # what is lost, this process says
    with ExitStack() as ends:
        local = None
        if options.cluster is None:
            with quiet_stderr():
                from pipetrain.cluster.local_workers import LocalWorkers
            local = ends.enter_context(LocalWorkers(options.local_workers))
        return SupervisedRun(options, arguments, output, local).run()
