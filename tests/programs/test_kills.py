"""The script that kills training, and what it makes of what comes of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pipetrain.schemes.table import AUTO, PIPELINES, SCHEMES

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "kills.py"
KILL = {"moment": "step", "victim": "controller", "again": False, "step": 8, "resumed": 6, "repeated": 2}
RUN = {"seed": 0, "number": 0, "way": "spectrain", "kills": [KILL] * 3, "why": "", "took_s": 9.0}


def killed(*arguments, status=0):
    """What the script prints; forks are sound where it is a process of its own."""
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


@pytest.mark.wide
@pytest.mark.parametrize("way", ["spectrain", "all-reduce", "1f1b, workers"])
def test_killed_runs_end_as_undisturbed_ones(way, tmp_path):
    said = killed("--kills", 1, "--way", way, "--output", tmp_path / "kills.jsonl")
    (record,) = map(json.loads, (tmp_path / "kills.jsonl").read_text().splitlines())
    assert record["way"] == way and record["kills"] and not record["why"]
    assert all(each["resumed"] is not None for each in record["kills"])
    assert "1 of 1" in said


def test_a_failure_is_told_with_the_command_that_repeats_it(tmp_path):
    """Of an output whose last line was cut off."""
    output = tmp_path / "kills.jsonl"
    failed = {**RUN, "number": 7, "way": "1f1b", "why": "other values", "told": "Traceback"}
    output.write_text(f"{json.dumps(RUN)}\n{json.dumps(failed)}\n" + json.dumps(RUN)[:40])
    said = killed("--summary", "--output", output, status=1)
    assert "1f1b: other values\nTraceback" in said and "kills.py --seed 0 --run 7" in said
    rows = {line.split("  ")[0]: line.split()[-6:] for line in said.splitlines()}
    assert rows["all"] == ["6", "2", "2", "1", "of", "2"]
    assert rows["spectrain"][-3:] == ["1", "of", "1"] and rows["1f1b"][-3:] == ["0", "of", "1"]


def test_every_scheme_is_killed():
    ways = killed("--help").partition("{")[2].partition("}")[0]
    missing = {*PIPELINES, *SCHEMES} - {AUTO} - {each.strip() for each in ways.split(",")}
    assert not missing
