"""Training on workers of other hosts, which cannot call the program: hosts are emulated by network namespaces."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import namespaces
import pytest

from pipetrain.schemes.table import PIPELINES

ROOT = Path(__file__).parents[2]
PROGRAM = str(ROOT / "tests/worker_training.py")
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}
MISSING = [name for name, there in namespaces.NEEDED.items() if not there]
PORT = 2222
CASES = (*PIPELINES, "spectrain/fitted", "spectrain/resumed", "vanilla/recompute", "vanilla/loop")


class Hosts(namespaces.Namespaces):
    """A context: the first host is the program's, each of the others has a worker."""

    def _make(self):
        super()._make()
        for space, address in zip(self.spaces[1:], self.addresses[1:]):
            command = [sys.executable, "-m", "pipetrain", "worker", "--address", address]
            self.start(["ip", "netns", "exec", space, *command], env=ENVIRONMENT)


@pytest.fixture(scope="module")
def found():
    """What ``worker_training.py`` found of all cases in one process, by case, and what it said."""
    with Hosts(3, "10.79.0") as hosts:
        workers = ",".join(f"{address}:{PORT}" for address in hosts.addresses[1:])
        done = subprocess.run(
            ["ip", "netns", "exec", hosts.spaces[0], sys.executable, PROGRAM, workers, *CASES],
            capture_output=True,
            text=True,
            timeout=280,
            cwd=ROOT,
            env=ENVIRONMENT,
        )
    return {each["case"]: each for each in map(json.loads, done.stdout.splitlines())}, done.stderr[-3000:]


@pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}")
@pytest.mark.wide
@pytest.mark.timeout(400)
@pytest.mark.parametrize("case", CASES)
def test_workers_that_cannot_call_the_program_train_as_one_process(case, found):
    trained, said = found
    assert case in trained, said
    assert trained[case]["weights"] == 0.0 and trained[case]["said"] <= 1e-5, trained[case]
