"""Training on workers of other hosts, which cannot call the program: hosts are emulated by network namespaces."""

from __future__ import annotations

import json

import namespaces
import pytest

from pipetrain.schemes.table import PIPELINES

PROGRAM = str(namespaces.ROOT / "tests/worker_training.py")
MISSING = [name for name, there in namespaces.NEEDED.items() if not there]
CASES = (*PIPELINES, "spectrain/fitted", "spectrain/resumed", "vanilla/recompute", "vanilla/loop")


@pytest.fixture(scope="module")
def found():
    """What ``worker_training.py`` found of all cases in one process, by case, and what it said."""
    with namespaces.Workers(2, "10.79.0") as hosts:
        done = hosts.program(PROGRAM, ",".join(hosts.workers), *CASES)
    return {each["case"]: each for each in map(json.loads, done.stdout.splitlines())}, done.stderr[-3000:]


@pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}")
@pytest.mark.wide
@pytest.mark.timeout(400)
@pytest.mark.parametrize("case", CASES)
def test_workers_that_cannot_call_the_program_train_as_one_process(case, found):
    trained, said = found
    assert case in trained, said
    assert trained[case]["weights"] == 0.0 and trained[case]["said"] <= 1e-5, trained[case]
