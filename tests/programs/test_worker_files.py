"""Training on files that only the workers have, on hosts emulated by network namespaces with mounts of their own."""

from __future__ import annotations

import json
import sys

import namespaces
import numpy as np
import pytest

PROGRAM = str(namespaces.ROOT / "tests/worker_files.py")
MISSING = [name for name, there in namespaces.NEEDED.items() if not there]
MOST_SENT_BYTES = 64 * 2**10  # of a step, by the process that calls fit


@pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}")
@pytest.mark.wide
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("scheme", "network", "readers"),
    [
        ("all-reduce", "dense", 2),
        ("all-reduce", "residual", 2),
        ("parameter-server", "dense", 2),
        # Asking after workers takes some hundred bytes a second of a step that other work makes longer.
        pytest.param("parameter-server", "residual", 2, marks=pytest.mark.slow),
        ("1f1b", "dense", 1),
        ("1f1b", "residual", 1),
    ],
)
def test_what_only_workers_have_is_trained_on_there_and_little_is_sent(scheme, network, readers, tmp_path):
    def write(worker):
        program = f"{sys.executable} {PROGRAM} --write {tmp_path} {worker} {readers}"
        return f"mount -t tmpfs none {tmp_path} && {program}"

    with namespaces.Workers(2, "10.78.0", write) as hosts:
        done = hosts.program(PROGRAM, scheme, network, tmp_path, *hosts.workers)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["equal"]
    # Not the first steps, with which functions are sent; that of an epoch whose callbacks have read the weights is one.
    sent, of_arrays = (each["sent"][2:] for each in (found["data"], found["arrays"]))
    told = f"{scheme}, {network}: {max(sent)} bytes at most, {np.mean(sent):.0f} in the mean; "
    told += f"{np.mean(of_arrays):.0f} of arrays"
    print(told)
    assert max(sent) <= MOST_SENT_BYTES < np.mean(of_arrays), told
