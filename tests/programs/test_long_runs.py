"""The script that looks for growth over long training, run for a short time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.long_runs import ALLOWED, Look, row

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "long_runs.py"


@pytest.mark.wide
@pytest.mark.parametrize("kind", ["minibatches", "fits"])
def test_nothing_grows(kind):
    count = {"minibatches": 1000, "fits": 20}[kind]
    command = [sys.executable, str(SCRIPT), "--kind", kind, "--scheme", "spectrain", f"--{kind}", str(count)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{count} {kind}, spectrain, controller" in done.stdout


def test_growth_is_from_the_second_look():
    first, second = Look(100.0, 5, 9), Look(400.0, 9, 9)
    assert row("", [first, second, second])[1]
    for grown in (
        second._replace(resident_mib=401 + ALLOWED.resident_mib),
        second._replace(threads=14),
        second._replace(files=18),
    ):
        cells, fits = row("", [first, second, grown])
        assert not fits and cells[-1] == "NO"
    assert row("", [first, second, second._replace(threads=20)], losses=2)[1]
