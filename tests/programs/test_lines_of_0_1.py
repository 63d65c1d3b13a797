"""Lines of the README and the guide as they were in 0.1: they still run, with a warning where options have moved."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path

import keras
import networks
import pytest

import pipetrain
from pipetrain.schemes.transfers.plan import Pack, Phase, Plan

ROOT = Path(__file__).parents[2]
README = """
import pipetrain  # before keras and tensorflow
import keras

pipetrain.set_cpu_devices(4)  # only without GPUs; call it before any tensor or model is made

model = keras.Sequential(
    [keras.Input((784,)), *(keras.layers.Dense(512, "relu") for _ in range(8)), keras.layers.Dense(10)]
)
pm = pipetrain.PipelineModel(model, stages=4, scheme="spectrain")
pm.compile(
    keras.optimizers.SGD(1e-2, momentum=0.9),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
pm.fit(x, y, batch_size=128, epochs=5, validation_data=(x_test, y_test))
pm.save("model.keras")  # an ordinary Keras file: loading it needs no pipetrain
"""
ROWS = """
import numpy as np
random = np.random.default_rng(0)
x, x_test = random.normal(size=(512, 784)), random.normal(size=(128, 784))
y, y_test = random.integers(10, size=512), random.integers(10, size=128)
"""
PLAN = Plan(pulls=Phase(), pushes=Phase((Pack((2, 3), 4096), Pack((0, 1), 8192)), window=2))
MOVED = {  # lines whose options are the scheme's now, and what the warning says of them
    """
pm = pipetrain.PipelineModel(model, stages=8, scheme="spectrain", horizon="target", microbatches=4)
""": "scheme=pipetrain.SpecTrain(horizon='target')",
    """
pm = pipetrain.PipelineModel(model, stages=8, scheme="2bw", horizon=1.5, microbatches=8)
""": "scheme=pipetrain.TwoBW(horizon=1.5)",
    """
pm = pipetrain.PipelineModel(model, scheme="interleaved", chunks=3, microbatches=8)
""": "scheme=pipetrain.Interleaved(chunks=3)",
    """
pm = pipetrain.PipelineModel(model, scheme="coded-reduce", children=3, depth=2, stragglers=1, devices=devices)
""": "scheme=pipetrain.CodedReduce(children=3, depth=2)",
    """
pm = pipetrain.PipelineModel(model, scheme="all-reduce", order=plan)
""": "scheme=pipetrain.AllReduce(order=Plan(",
    """
pm = pipetrain.PipelineModel(model, scheme="parameter-server", order="tic", servers=1)
""": "scheme=pipetrain.ParameterServer(order='tic', servers=1)",
    """
pm = pipetrain.PipelineModel(model, scheme="grid", grid=(2, 2), devices=devices[:4])
""": "scheme=pipetrain.Grid(2, 2)",
    """
pm = pipetrain.PipelineModel(model, scheme="grid", grid="auto", devices=devices[:4])
""": "scheme='grid'",
    """
pm = pipetrain.PipelineModel(model, scheme="auto", staleness="predicted", memory_bytes=2**30)
""": "scheme=pipetrain.Auto(staleness='predicted')",
    """
pm = pipetrain.PipelineModel(model, stages=3, scheme="vanilla", spike_compensation=True, rescale_steps=20)
""": "scheme=pipetrain.Vanilla(spike_compensation=True, rescale_steps=20)",
    """
pm = pipetrain.PipelineModel(model, stages=2, trace=False)
""": "pm.is_traced = False",
}
KEPT = [  # lines that mean what they did, or but for the scheme, which is chosen where none is named
    """
pm = pipetrain.PipelineModel(model, scheme="zb-v", microbatches=8)  # 2 stages on each of the devices, cut by itself
""",
    """
pm = pipetrain.PipelineModel(model, scheme="auto")
""",
    """
pm = pipetrain.PipelineModel(model, scheme="all-reduce", devices=devices)
""",
    """
pm = pipetrain.PipelineModel(model, stages=2)  # on the workers' devices: /job:worker/replica:0/task:0/device:CPU:0
""",
]
PLANNED = """
profile = pipetrain.profile(model, batch_size=128)
partition = pipetrain.partition(profile, num_devices=4)
print(profile, partition, sep="\\n\\n")
pm = pipetrain.PipelineModel(model, stages=partition)
"""


TRAINED = ("coded-reduce", "order=", "grid=", "rescale_steps=")  # in lines that train within seconds


def made(line, warns):
    """The model that the line makes; the texts of its warnings, of which there are to be so many."""
    model = networks.mlp(2 if "plan" in line else 18)  # the plan names four variables, which are all that there are
    devices = [device.name.partition("device:")[2] for device in networks.tf.config.list_logical_devices("CPU")]
    names = {"pipetrain": pipetrain, "model": model, "plan": PLAN, "devices": devices}
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        exec(line, names)
    texts = [str(each.message) for each in seen if each.category is FutureWarning]
    assert len(texts) == warns, texts
    return names["pm"], texts


def trained(line, warns):
    """The same after a step of training."""
    pm, texts = made(line, warns)
    pm.compile(keras.optimizers.SGD(1e-2, momentum=0.9), networks.crossentropy(), jit_compile=False)
    pm.fit(*networks.data(48), batch_size=48, verbose=0)
    return pm, texts


def run(program, folder, cache, *paths):
    """A program in a process and a folder of its own; its output, errors too."""
    paths = [str(ROOT), *paths, *filter(None, [os.environ.get("PYTHONPATH")])]
    settings = {"PYTHONPATH": os.pathsep.join(paths), "XDG_CACHE_HOME": str(cache)}
    done = subprocess.run(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **settings},
        cwd=folder,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_lines_with_options_that_have_moved_warn_and_others_do_not():
    """But for one that needs twelve devices, which is trained below."""
    for line, told in MOVED.items():
        if "coded-reduce" not in line:
            _, (text,) = made(line, warns=1)
            assert f"Try {told}" in text, text
    for line in KEPT:
        made(line, warns=0)


@pytest.mark.wide  # 11 s; nothing else runs these lines as they were
def test_the_readme_runs_unchanged(tmp_path_factory):
    folder, cache = tmp_path_factory.mktemp("empty"), tmp_path_factory.mktemp("cache")
    said = run(ROWS + README, folder, cache)
    assert "FutureWarning" not in said and "val_accuracy" in said
    assert [path.name for path in folder.iterdir()] == ["model.keras"]
    assert keras.models.load_model(folder / "model.keras").input_shape == (None, 784)


@pytest.mark.wide  # 20 s; test_scheme_argument trains by keywords by default
def test_lines_of_the_guide_train_unchanged(tmp_path_factory):
    program = """
import pipetrain
pipetrain.set_cpu_devices(12)
import test_lines_of_0_1 as lines
chosen = [line for line in lines.MOVED if any(part in line for part in lines.TRAINED)]
for line in chosen:
    pm, (text,) = lines.trained(line, warns=1)
    assert f"Try {lines.MOVED[line]}" in text, text
    assert f'scheme="{pm.scheme}"' in line
lines.made(lines.PLANNED, warns=0)
print(f"{len(chosen)} trained")
"""
    folder, cache = tmp_path_factory.mktemp("empty"), tmp_path_factory.mktemp("cache")
    said = run(program, folder, cache, str(ROOT / "tests"), str(Path(__file__).parent))
    assert "6 trained" in said and not [*folder.iterdir()]
