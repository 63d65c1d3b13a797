"""``compile``, and whatever is told ``verbose=0``, prints nothing on any stream."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import networks
import pytest
import quiet_training

FEW = ("spectrain", "1f1b", "all-reduce", "auto")


@pytest.mark.wide
@pytest.mark.parametrize(
    "ways", [FEW, pytest.param([way for way in quiet_training.WAYS if way not in FEW], marks=pytest.mark.slow)], ids=len
)
def test_nothing_is_printed_in_any_way_that_is_told_to_be_quiet(ways, tmp_path):
    """Of file descriptors, so that what is written past Python's streams counts too; without a kept profile."""
    environment = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3", "XDG_CACHE_HOME": str(tmp_path)}
    program = [sys.executable, str(Path(quiet_training.__file__)), *ways]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{way}: ''" for way in ways]


@pytest.mark.wide
def test_what_takes_long_is_said_otherwise(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("pipetrain.compute.profiling.progress.PATIENCE_S", 0.0)
    pm = networks.pipeline(scheme="spectrain", stages=3, horizon="target", microbatches=1)
    assert capsys.readouterr().out == ""
    networks.fit(pm, *networks.data(32), verbose=1)
    said = capsys.readouterr().out
    assert "Momentum is stretched" in said
