"""Stages on real worker processes of this machine. Controllers are processes too: each joins one cluster."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(HERE.parent), "TF_CPP_MIN_LOG_LEVEL": "3"}
SCHEMES = (
    "vanilla",
    "weight-stashing",
    "vertical-sync",
    "spectrain",
    "spectrain/local",
    "spectrain/fitted",
    "spike-compensation",
    "2bw",
    "gpipe",
    "1f1b",
    "single",
    "vanilla/recompute",
    "gpipe/norm",
    "spectrain/resumed",
    "gpipe/resumed",
)


def compare(workers, *cases):
    """Weights after two epochs, and what fit, evaluate and predict said, on so many workers and in one process."""
    command = [sys.executable, str(HERE / "worker_training.py"), str(workers), *cases]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=ENVIRONMENT)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [each["case"] for each in found] == list(cases), done.stderr[-3000:]
    assert {each["case"]: each for each in found if each["weights"] > 1e-6 or each["said"] > 1e-5} == {}


def test_two_workers_train_as_one_process_does():
    compare(2, "spectrain", "gpipe/norm")


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 3])
def test_every_scheme_on_workers_trains_as_in_one_process(workers):
    compare(workers, *SCHEMES)


@pytest.mark.slow
def test_replicas_on_workers_train_as_in_one_process():
    compare(3, "vanilla/replicas", "gpipe/replicas", "gpipe/replicas/norm")
