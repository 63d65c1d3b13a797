"""Hosts that are lost while a run trains, whose state is in the memory of others; needs root and iproute2."""

from __future__ import annotations

import subprocess
import sys
import time

import namespaces
import networks
import numpy as np
import pytest

PROGRAM = str(namespaces.ROOT / "tests/replicated.py")
MISSING = [name for name, there in namespaces.NEEDED.items() if not there]
LOST = 75
MEMORY = "mount -t tmpfs none /dev/shm"  # of each host alone, which ends with its last process

pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}"),
    pytest.mark.slow,
    pytest.mark.timeout(1200),
]


class Hosts(namespaces.Workers):
    """Two hosts with a worker each, which can be lost, and started anew with an empty memory."""

    def lose(self, *numbers):
        """Kill what these hosts run."""
        for number in numbers:
            self.kill(number + 1, b"worker")

    def start_again(self, *numbers):
        """Workers, on hosts whose memory is empty."""
        for number in numbers:
            address = self.addresses[number + 1]
            worker = f"exec {sys.executable} -m pipetrain worker --address {address} --port {namespaces.PORT}"
            self.start(self.on(number + 1, "sh", "-c", f"{MEMORY} && {worker}"), env=namespaces.ENVIRONMENT)

    def trained(self, directory, result, scheme, every, at=None, lost=()):
        """What the program says, and its status; hosts are lost when so many steps are done."""
        command = self.on(0, sys.executable, PROGRAM, directory, result, scheme, every, *self.workers)
        with subprocess.Popen(
            command, stdin=-1, stdout=-1, text=True, cwd=namespaces.ROOT, env=namespaces.ENVIRONMENT
        ) as program:
            said = []
            try:
                for line in program.stdout:
                    said.append(line.split())
                    if line.startswith("step"):
                        if int(said[-1][1]) == at:
                            time.sleep(0.2)
                            self.lose(*lost)
                        program.stdin.write("\n")
                        program.stdin.flush()
            finally:
                program.kill()
        program.wait()
        return said, program.returncode


def steps(said):
    return [int(words[1]) for words in said if words[0] == "step"]


def went_on_at(said):
    return next(int(words[1]) for words in said if words[0] == "from")


@pytest.mark.parametrize(("scheme", "most"), [("1f1b", 2), ("spectrain", 2 * 8 + 2)])
def test_a_lost_host_costs_a_call_or_two_and_two_hosts_what_the_disk_has_not(scheme, most, tmp_path):
    """One whole call and the one that was made; the first one of an epoch also fills the pipeline."""
    with Hosts(2, "10.79.0", lambda n: MEMORY) as hosts:
        said, status = hosts.trained("", tmp_path / "whole.npz", scheme, 1)
        assert status == 0, said
        for lost, at in ((0,), 21), ((1,), 47):
            said, status = hosts.trained(tmp_path / "checkpoints", tmp_path / "never.npz", scheme, 1000, at, lost)
            assert status == LOST and steps(said)[-1] >= at, said
            hosts.start_again(*lost)
            reached = steps(said)[-1]
            said, status = hosts.trained(
                tmp_path / "checkpoints", tmp_path / "never.npz", scheme, 1000, reached + 3, (0,)
            )
            assert reached - most <= went_on_at(said) <= reached, (reached, went_on_at(said))
            reached = steps(said)[-1]
            hosts.start_again(0)
        said, status = hosts.trained(tmp_path / "checkpoints", tmp_path / "result.npz", scheme, 1000)
        assert status == 0 and reached - most <= went_on_at(said) <= reached, (reached, went_on_at(said))
        said, status = hosts.trained(tmp_path / "more", tmp_path / "never.npz", scheme, 10, 35, (0, 1))
        assert status == LOST
        hosts.start_again(0, 1)
        said, status = hosts.trained(tmp_path / "more", tmp_path / "disk.npz", scheme, 10)
        assert status == 0 and went_on_at(said) == 30, said
    with np.load(tmp_path / "whole.npz") as whole:
        for name in ("result", "disk"):
            with np.load(tmp_path / f"{name}.npz") as found:
                networks.assert_equal([found[each] for each in whole.files], [whole[each] for each in whole.files])
