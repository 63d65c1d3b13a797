"""Models that no device holds: made in the host's memory, with a part on each device."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import keras
import networks
import pytest
import tensorflow as tf

import pipetrain
from pipetrain.frontend import layout
from pipetrain.plan.partition import NoPlan

GPUS = ("/device:GPU:0", "/device:GPU:1")
HELD = {f"/job:localhost/replica:0/task:0{gpu}": bytes_ for gpu, bytes_ in zip(GPUS, (3000, 2000), strict=True)}


@pytest.mark.wide
@pytest.mark.parametrize("scheme", ["1f1b", "spectrain"])
def test_a_model_four_times_too_large_for_a_device_trains_in_eight_stages(scheme):
    program = Path(__file__).parents[1] / "larger_than_a_device.py"
    done = subprocess.run([sys.executable, program, scheme], capture_output=True, text=True, check=True)
    told = json.loads(done.stdout.splitlines()[-1])
    assert max(told["planned"]) <= told["limit"]
    assert [device for device, _ in told["found"]] == [*range(1, 9)]
    assert all(0 < bytes_ <= told["limit"] for _, bytes_ in told["found"])


def test_models_are_made_in_the_hosts_memory(tmp_path):
    with tf.device("CPU:2"), pipetrain.on_host():
        model = networks.mlp()
        model.save(tmp_path / "model.keras")
        loaded = keras.models.load_model(tmp_path / "model.keras")
    for variable in (*model.variables, *loaded.variables):
        assert variable.value.device.endswith("CPU:0")


def test_the_planner_asks_gpus_for_their_memory(monkeypatch):
    monkeypatch.setattr(layout, "memory_of_devices", lambda: HELD)
    model = networks.mlp()
    assert layout.described_for(model, GPUS, None).memory_bytes == 2000
    assert layout.described_for(model, GPUS[:1], None).memory_bytes == 3000
    assert layout.described_for(model, GPUS, 4000).memory_bytes == 4000
    assert layout.described_for(model, ["/device:CPU:0"], None).memory_bytes is None


def test_a_models_own_variables_take_of_a_devices_memory(monkeypatch):
    model = networks.mlp()
    (device,) = {variable.value.device for variable in model.variables}
    has = 4 * model.count_params() + 1000
    monkeypatch.setattr(layout, "memory_of_devices", lambda: {device: has})
    monkeypatch.setattr(layout, "is_processor", lambda device: False)
    assert layout.described_for(model, ["/device:CPU:0"], None).memory_bytes == 1000


def test_training_that_no_device_holds_is_refused_before_it_starts(monkeypatch):
    held = {f"/job:localhost/replica:0/task:0/device:CPU:{n}": 4096 for n in range(6)}
    monkeypatch.setattr(layout, "memory_of_devices", lambda: held)
    monkeypatch.setattr(layout, "is_processor", lambda device: False)
    with pytest.raises(NoPlan, match="memory"):
        networks.pipeline(scheme="1f1b", stages=2).fit(*networks.data(64), verbose=0)
