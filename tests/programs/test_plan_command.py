"""``python -m pipetrain plan`` on a saved model."""

from __future__ import annotations

import re
import subprocess
import sys

import keras
import pytest

from pipetrain.cli import main as command_line


@pytest.mark.wide
def test_plan_on_the_command_line(tmp_path, capsys):
    layers = [keras.Input((16,)), *(keras.layers.Dense(64, activation="relu", name=f"d{n}") for n in range(4))]
    keras.Sequential(layers, name="mlp").save(tmp_path / "m.keras")
    common = ["plan", str(tmp_path / "m.keras"), "--batch-size", "16"]
    assert command_line.main([*common, "--devices", "6"]) == 0
    out = capsys.readouterr().out
    assert all(word in out for word in ("stages", "way to train", "(as set)", "Recommended:"))
    assert command_line.main([*common, "--devices", "6", "--memory", "20KiB"]) == 2
    assert "No way to train fits" in capsys.readouterr().err
    assert command_line.main([*common, "--devices", "6", "--scheme", "zb-h1"]) == 0
    assert re.search(r"zb-h1, M=\d+ \(as set\) .*Recommended: scheme=", capsys.readouterr().out, re.DOTALL)
    assert command_line.main([*common, "--devices", "6", "--scheme", "auto", "--staleness", "predicted"]) == 0
    out = capsys.readouterr().out
    assert "Taken: scheme=" in out and "horizon target" in out and "Recommended" not in out
    two = ["--devices", "2", "--scheme", "1f1b", "--replica-compression", "int8"]  # which this process has not
    out = subprocess.run([sys.executable, "-m", "pipetrain", *common, *two], capture_output=True, text=True).stdout
    assert re.search(r"^1f1b, M=\d+ \(as set\) ", out, re.MULTILINE) and "not exact" not in out
    assert "No stage has several devices" in out
    assert command_line.main(["plan", str(tmp_path / "none.keras"), "--devices", "6"]) == 2
    assert "none.keras" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command_line.main([*common, "--devices", "0"])
    assert "'0' is not a number from 1 up" in capsys.readouterr().err
