"""The example programs, run as a user runs them: each a process, in a folder of its own."""

from __future__ import annotations

import os
import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
TIMEOUT_S = 240
QUIET = ("applications", "fine_tune", "language_model", "resume", "sequential", "skips")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def start(tmp_path, cache):
    """Starts an example; what it prints, errors too, comes through one pipe."""
    processes = []

    def started(name, *first):
        paths = [*first, str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        settings = {"PYTHONPATH": os.pathsep.join(paths), "XDG_CACHE_HOME": str(cache), "PYTHONUNBUFFERED": "1"}
        process = subprocess.Popen(
            [sys.executable, str(EXAMPLES / name)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **settings},
            cwd=tmp_path,
        )
        processes.append(process)
        return process

    yield started
    for process in processes:
        process.kill()
        process.communicate()


def output(process, status=0):
    said, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == status, said
    assert "Traceback" not in said
    return said


def accuracies(said, name="val_accuracy"):
    return [float(each) for each in re.findall(rf"\b{name}: ([0-9.]+)", said)]


def test_all_examples_are_in_the_guide():
    """Programs by their commands; the others are shown, and test_extending.py and test_launch.py train with them."""
    programs = {f"{name}.py" for name in (*QUIET, "ray_workers")}
    assert {path.name for path in EXAMPLES.glob("*.py")} == programs | {
        "own_policy.py",
        "own_schedule.py",
        "worker_files.py",
    }
    guide = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "guide").glob("*.md"))
    for path in EXAMPLES.glob("*.py"):
        assert f"examples/{path.name}" in guide
        if path.name in programs:
            assert f"`python examples/{path.name}`" in guide
            assert f"\n    python examples/{path.name}\n" in path.read_text(encoding="utf-8")


def test_where_things_go_is_where_they_are():
    named = re.findall(r"`(\w+/[\w/]*(?:\.py)?)`", (ROOT / "CONTRIBUTING.md").read_text())
    assert len(named) > 10
    assert [each for each in named if not (ROOT / each).exists() and not (ROOT / "pipetrain" / each).exists()] == []


@pytest.mark.parametrize("name", QUIET)
def test_tensorflow_is_quiet(name):
    """It is started before Keras imports it, and before a module of pipetrain that imports Keras."""
    text = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
    before, _ = text.split("\nstart_tensorflow(")
    assert "\nimport keras\n" not in before
    assert re.findall(r"^from pipetrain.*", before, re.M) == ["from pipetrain.cli.environment import start_tensorflow"]
    assert "import tensorflow" not in text


def test_own_policy_prints_what_it_reads(capsys):
    runpy.run_path(str(EXAMPLES / "own_policy.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "stage 0: F20 reads version 17 + 1, B20 version 20"
    assert lines[-1] == "stage 3: F20 reads version 20 + 0, B20 version 20"


def test_own_schedule_prints_its_table(capsys):
    made = runpy.run_path(str(EXAMPLES / "own_schedule.py"), run_name="__main__")
    assert [line.strip() for line in made["__doc__"].splitlines()[-2:]] == capsys.readouterr().out.splitlines()


@pytest.mark.slow  # 17 s; most tests train a Sequential model by default
def test_sequential(start):
    said = output(start("sequential.py"))
    assert len(accuracies(said)) == 5
    assert re.search(r"It was cut so:\n.*4 stages", said)
    assert max(accuracies(said)) > 0.7  # ten classes


@pytest.mark.slow  # 17 s; test_graphs cuts a MobileNet, and test_models trains a convolutional network, by default
def test_applications(start):
    said = output(start("applications.py"))
    assert "mobilenet_0.25_32: 2 stages, batch 64" in said
    assert re.search(r"\n0: conv1 - .*\n1: .* - predictions ", said)
    assert len(accuracies(said)) == 2
    assert max(accuracies(said)) > 0.5


@pytest.mark.slow  # 17 s; test_graphs trains skips and several outputs by default
def test_skips(start):
    said = output(start("skips.py"))
    epochs = accuracies(said, "val_label_accuracy")
    assert 2 <= len(epochs) <= 6
    kept = float(re.search(r"validation accuracy ([0-9.]+)", said)[1])
    assert kept > 0.65
    assert kept == pytest.approx(max(epochs), abs=1e-3)  # the best epoch's weights are back
    noise, cleaned = map(float, re.search(r"picture: ([0-9.]+), cleaned: ([0-9.]+)", said).groups())
    assert cleaned < noise / 3


@pytest.mark.slow  # 45 s; test_models trains a smaller one, and test_shared_weights tied embeddings, by default
def test_language_model(start):
    said = output(start("language_model.py"))
    epochs = accuracies(said, "accuracy")
    assert len(epochs) >= 5
    assert epochs[-1] > 0.4 > 0.3 > epochs[0]  # of bytes, of which 15 in 100 are spaces
    assert re.search(r"The model goes on: The pipeline .{100}", said, re.DOTALL)


@pytest.mark.slow  # 35 s; test_fine_tuning trains adapters by default
def test_fine_tune(start):
    pytest.importorskip("keras_hub")
    said = output(start("fine_tune.py"))
    trained, everything = map(int, re.search(r"frozen: (\d+) of (\d+) parameters are trained", said).groups())
    assert 0 < trained < everything / 5
    before, after = map(int, re.search(r"sentences (\d+)% were understood .* (\d+)% are now", said).groups())
    assert before < 85  # half of the sentences judge in new words
    assert after > 90


@pytest.mark.wide
def test_fine_tune_says_what_it_needs(start, tmp_path):
    """In one line, where keras_hub is not installed."""
    (tmp_path / "keras_hub.py").write_text("raise ImportError('hidden')")
    said = output(start("fine_tune.py", str(tmp_path)), 1)
    assert said.splitlines()[-1] == 'This example needs keras_hub: pip install ".[hub]" installs it.'


@pytest.mark.slow  # 30 s; test_experiments stops a process and goes on by default
def test_resume(start, tmp_path):
    """Ctrl-C in the third epoch, and the second run goes on."""
    training, heard = start("resume.py"), ""
    while not heard.endswith("Epoch 3/6\n"):
        line = training.stdout.readline()
        assert line, heard
        heard += line
    training.send_signal(signal.SIGINT)
    heard += output(training, 130)
    stopped = int(
        re.search(r"Stopped by SIGINT after (\d+) steps: step \1 is in .*/runs/resume. Run it again", heard)[1]
    )
    assert 314 <= stopped < 942  # of 157 in each of 6 epochs

    said = output(start("resume.py"))
    assert "Going on from" in said
    assert f"/runs/resume/step-{stopped:08}.npz: {stopped} steps done" in said
    assert "Epoch 2/6" not in said
    assert "Epoch 6/6" in said
    done = re.search(r"After (\d+) steps the validation accuracy is ([0-9.]+)", said)
    assert int(done[1]) == 6 * 157
    assert float(done[2]) > 0.75
    assert len(list((tmp_path / "runs" / "resume").glob("step-*.npz"))) == 3


@pytest.mark.wide
def test_ray_places_workers(start):
    pytest.importorskip("ray")
    said = output(start("ray_workers.py"))
    assert re.search(r"Trained on [\d.]+:\d+, [\d.]+:\d+: accuracy 0\.[4-9]", said)
