"""Files of PyTorch's own schedules are read, validated and simulated, and train as plain Keras does.

``torch_schedules`` has those of 4 devices and 8 microbatches, as PyTorch 2.13 writes them: ``python
benchmarks/torch_schedules.py --devices 4 --microbatches 8 --output tests/torch_schedules``.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import networks
import parameters
import pytest
from schedule_training import assert_as, plain_mlp, trained

import pipetrain
from pipetrain.plan.cluster import Cluster, Level, Link
from pipetrain.plan.memory import Training
from pipetrain.plan.partition import partition
from pipetrain.plan.profile import BlockProfile, Profile
from pipetrain.schemes.actions import Action
from pipetrain.schemes.dry_run import ScheduleError, figures
from pipetrain.schemes.schedules import orders
from pipetrain.schemes.table import PIPELINES
from pipetrain.schemes.text_form import microbatches_of, scheme_of, stages_of
from pipetrain.schemes.validation import check
from pipetrain.simulation.simulator import simulate

STORED = Path(__file__).parents[1] / "torch_schedules"
# The schedules of this project that are the same.
READ = {
    "ScheduleGPipe": "gpipe",
    "ScheduleInterleaved1F1B": "interleaved",
    "ScheduleLoopedBFS": "looped-bfs",
    "ScheduleZBVZeroBubble": "zb-v",
    "ScheduleInterleavedZeroBubble": None,
    "ScheduleDualPipeV": None,
}
LOGICAL_CPUS = 6


def with_torch():
    """A Python that has PyTorch: of the environment variable, or this one."""
    other = os.environ.get("PIPETRAIN_TORCH_PYTHON")
    return other or (sys.executable if importlib.util.find_spec("torch") else None)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The folder of the files for so many devices and microbatches: PyTorch writes those that are not stored."""
    made = {(4, 8): STORED}

    def folder(devices, microbatches, anew=False):
        place = devices, microbatches
        if anew or place not in made:
            if with_torch() is None:
                pytest.skip("PyTorch writes the files")
            made[place] = tmp_path_factory.mktemp("of_torch")
            program = Path(__file__).parents[2] / "benchmarks" / "torch_schedules.py"
            given = ["--devices", str(devices), "--microbatches", str(microbatches), "--output", str(made[place])]
            subprocess.run([with_torch(), str(program), *given], check=True, env={**os.environ, "PYTHONPATH": ""})
        return made[place]

    return folder


@pytest.mark.slow
def test_the_stored_files_are_as_pytorch_writes_them(files):
    written = {file.name: file.read_bytes() for file in files(4, 8, anew=True).iterdir()}
    assert written == {file.name: file.read_bytes() for file in STORED.iterdir()}
    assert written.keys() == {f"{name}.csv" for name in (*READ, "Schedule1F1B")}


@pytest.mark.parametrize(
    ("devices", "microbatches"),
    [(4, 8), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((4, 16), (8, 16), (8, 32)))],
)
def test_pytorch_s_own_schedules_are_read_validated_and_simulated(devices, microbatches, files):
    """As its code writes them; those that this project has too have its bubble and its memory."""
    fast = Cluster((Level(Link(bandwidth_bytes_per_s=1e15, latency_s=0.0)),), overhead_s=0.0)
    folder = files(devices, microbatches)
    with pytest.raises(ScheduleError, match=f"{devices - 1}F0 is missing"):
        scheme_of(folder / "Schedule1F1B.csv")  # 2.13 counts the last device's forwards from 1
    for name, same in READ.items():
        read = scheme_of(folder / f"{name}.csv")
        stages = stages_of(read)
        assert microbatches_of(read) == microbatches
        check(read, stages, microbatches)
        made = orders(read.schedule.order, devices, 1, microbatches)
        found = figures(made)
        if same:
            assert found == figures(orders(PIPELINES[same].schedule.order, devices, 1, microbatches)), name
        blocks = tuple(BlockProfile(f"b{n}", 1e-3, 2e-3, 1000, 0, 1000) for n in range(stages))
        training = Training(read, microbatches=microbatches)
        cut = partition(Profile("chain", microbatches, blocks), devices, fast, training=training)
        spans = simulate(cut, read, fast, minibatches=1).spans
        assert sorted(map(str, (Action(*span[:3]) for span in spans))) == sorted(
            str(each) for order in made for each in order
        )
        assert max(span.end_s for span in spans) == pytest.approx(found.makespan * 1e-3 / microbatches)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("devices", "microbatches", "name"),
    parameters.combinations([4], [8], [*READ], default=[(4, 8, "ScheduleDualPipeV")])
    + parameters.combinations([8], [16], [*READ], default=[]),
)
def test_they_train_as_plain_keras(devices, microbatches, name, files):
    """Every action of two epochs of four minibatches, the last short, is executed by the device of its row."""
    file = files(devices, microbatches) / f"{name}.csv"
    read = scheme_of(file)
    stages, rows = stages_of(read), 65
    places = tuple(f"CPU:{n % LOGICAL_CPUS}" for n in range(devices))
    pm = pipetrain.PipelineModel(
        networks.mlp(stages), scheme=str(file), cuts=networks.cuts(stages, stages), devices=places
    )
    assert_as(*plain_mlp(stages, rows), pm, trained(pm, networks.data(rows)))
    spans, place = pm.trace.spans, read.schedule.place
    expected = {action for order in orders(read.schedule.order, devices, 8, microbatches) for action in order}
    assert {Action(*span[:3]) for span in spans} == expected
    assert all(int(span.device[-1]) == place(span.stage, devices) % LOGICAL_CPUS for span in spans)
