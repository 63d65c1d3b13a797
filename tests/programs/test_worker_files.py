"""Training on files that only the workers have, on hosts emulated by network namespaces with mounts of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import namespaces
import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = str(ROOT / "tests/worker_files.py")
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}
MISSING = [name for name, there in namespaces.NEEDED.items() if not there]
MOST_SENT_BYTES = 64 * 2**10  # of a step, by the process that calls fit
PORT = 2222


class Hosts(namespaces.Namespaces):
    """A context: the first host is the program's; each of the others has a worker, and the first of them files."""

    def __init__(self, workers, readers, folder):
        super().__init__(workers + 1, "10.78.0")
        self._readers, self.folder = readers, folder
        self.workers = [f"{address}:{PORT}" for address in self.addresses[1:]]

    def _make(self):
        super()._make()
        for n, (space, address) in enumerate(zip(self.spaces[1:], self.addresses[1:])):
            # ``ip netns exec`` has a mount namespace of its own: what is mounted in it is seen there alone.
            script = f"mount -t tmpfs none {self.folder} && {sys.executable} {PROGRAM} --write {self.folder} {n} "
            script += f"{self._readers} && exec {sys.executable} -m pipetrain worker --address {address}"
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
@pytest.mark.parametrize(("scheme", "readers"), [("all-reduce", 2), ("parameter-server", 2), ("1f1b", 1)])
def test_what_only_workers_have_is_trained_on_there_and_little_is_sent(scheme, readers, tmp_path):
    with Hosts(2, readers, tmp_path) as hosts:
        found = hosts.trained(scheme)
    assert found["equal"]
    # Not the first steps, with which functions are sent; that of an epoch whose callbacks have read the weights is one.
    sent, of_arrays = (each["sent"][2:] for each in (found["data"], found["arrays"]))
    told = f"{scheme}: {max(sent)} bytes at most, {np.mean(sent):.0f} in the mean; {np.mean(of_arrays):.0f} of arrays"
    print(told)
    assert max(sent) <= MOST_SENT_BYTES < np.mean(of_arrays), told
