"""Training on files that only the workers have, on hosts emulated by network namespaces with mounts of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import namespaces
import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = str(ROOT / "tests/worker_files.py")
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}
MISSING = [name for name, there in namespaces.NEEDED.items() if not there]
MOST_SENT_BYTES = 64 * 2**10  # of a step, by the process that calls fit
PORT = 2222


class Hosts(namespaces.Namespaces):
    """A context: the first host is the program's; each of the others has a worker, and files in the same folder."""

    def __init__(self, workers, folder):
        super().__init__(workers + 1, "10.78.0")
        self.folder, self.workers = folder, [f"{address}:{PORT}" for address in self.addresses[1:]]

    def _make(self):
        super()._make()
        for n, (space, address) in enumerate(zip(self.spaces[1:], self.addresses[1:])):
            # ``ip netns exec`` has a mount namespace of its own: what is mounted in it is seen there alone.
            script = f"mount -t tmpfs none {self.folder} && {sys.executable} {PROGRAM} --write {self.folder} {n} "
            script += f"{len(self.workers)} && exec {sys.executable} -m pipetrain worker --address {address}"
            self.start(["ip", "netns", "exec", space, "sh", "-c", script], env=ENVIRONMENT)

    def trained(self, scheme):
        command = [sys.executable, PROGRAM, scheme, str(self.folder), *self.workers]
        done = subprocess.run(
            ["ip", "netns", "exec", self.spaces[0], *command],
            capture_output=True,
            text=True,
            timeout=280,
            cwd=ROOT,
            env=ENVIRONMENT,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}")
@pytest.mark.wide
@pytest.mark.timeout(400)
@pytest.mark.parametrize("scheme", ["all-reduce", "parameter-server"])
def test_what_only_workers_have_is_trained_on_there_and_little_is_sent(scheme, tmp_path):
    with Hosts(2, tmp_path) as hosts:
        found = hosts.trained(scheme)
    assert found["equal"]
    sent, of_arrays = found["data"]["sent"][2:], found["arrays"]["sent"][2:]  # after the functions
    assert max(sent) <= MOST_SENT_BYTES < sum(of_arrays) / len(of_arrays)
