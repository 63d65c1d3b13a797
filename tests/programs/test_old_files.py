"""Files that version 0.1.0 wrote are still read, those of before traces knew of microbatches and virtual stages too.

``files_of_0.1.0`` has a checkpoint after 8 of 24 steps and the weights after all of them, a profile and where it was
cut, and a run's trace, why its stages were idle, and its partition.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import inside
import keras
import networks
import numpy as np
import pytest

import pipetrain
from pipetrain.callbacks import PipelineCheckpoint
from pipetrain.plan.memory import Training
from plots import runs

FILES = Path(__file__).parents[1] / "files_of_0.1.0"
FIGURES = json.loads((FILES / "figures.json").read_text(encoding="utf-8"))


def model():
    """That of the checkpoint, with other weights."""
    keras.utils.set_random_seed(4)
    dense = keras.layers.Dense
    return keras.Sequential(
        [
            keras.Input((6,)),
            dense(8, activation="tanh", name="a"),
            keras.layers.Dropout(0.2, seed=1, name="b"),
            dense(8, activation="tanh", name="c"),
            dense(3, name="d"),
        ]
    )


@pytest.mark.wide
def test_a_checkpoint_goes_on_to_the_weights_that_0_1_0_had(tmp_path, monkeypatch):
    """Which drained for each checkpoint, as a pipeline of threads does."""
    inside.by_threads(monkeypatch)
    shutil.copytree(FILES / "checkpoints", tmp_path / "checkpoints")
    x = np.random.default_rng(0).normal(size=(96, 6)).astype("float32")
    y = (x[:, 0] > 0).astype("int32") + (x[:, 1] > 0)
    pm = pipetrain.PipelineModel(model(), scheme="spectrain", cuts=["a", "c"])
    pm.compile(keras.optimizers.Adam(0.01), networks.crossentropy(), metrics=["accuracy"])
    checkpoint = PipelineCheckpoint(tmp_path / "checkpoints", every_steps=8, keep=9)
    pm.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0, callbacks=[checkpoint])
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        f"step-{step:08}.npz" for step in (8, 16, 24)
    ]
    with np.load(FILES / "weights.npz") as wanted:
        for weights, name in zip(pm.get_weights(), wanted.files, strict=True):
            np.testing.assert_allclose(weights, wanted[name], atol=1e-5)


def test_a_profile_is_cut_at_the_same_blocks():
    """With a scheme that does not predict weights, which did not count then."""
    cut = pipetrain.partition(pipetrain.Profile.load(FILES / "profile.json"), 2, training=Training("vanilla"))
    assert [stage.last for stage in cut.stages] == FIGURES["ends"]


def test_a_trace_says_the_same_of_its_idle_time():
    trace = pipetrain.Trace.load(FILES / "run" / "trace.json")
    assert len(trace.spans) == 2 * 3 * 2 * 2  # minibatches, stages, microbatches, forward and backward
    assert [list(each) for each in pipetrain.idle(trace).values()] == [pytest.approx(each) for each in FIGURES["idle"]]


def test_a_run_s_partition_is_there():
    run = runs.Run(FILES / "run", {"scheme": "gpipe"}, {})
    assert [stage["last"] for stage in run.partition()["stages"]] == ["a", "c", "d"]
