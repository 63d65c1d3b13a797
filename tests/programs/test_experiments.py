"""The command line, end to end and on real data; its files; its refusals."""

from __future__ import annotations

import importlib
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import keras
import networks
import numpy as np
import parameters
import pytest
from own_schemes import NEWEST

import pipetrain
from experiments import datasets, records, results, resuming, run, training
from experiments.records import Settings, microbatches_for, options_of
from pipetrain.cluster.supervision import LOST
from pipetrain.schemes.table import EVERY_NAME, NAMES
from pipetrain.trace.trace import Trace

ROOT = Path(__file__).parents[2]
SMALL = ("--steps", "40", "--depth", "5", "--width", "32", "--learning-rate", "0.01", "--eval-every", "10")


def test_runs_of_every_scheme_have_an_order():
    """Also of those that are not the paper's, and of one's own."""
    settings = {"model": "snn", "dataset": "d", "stages": 2, "batch_size": 8, "steps": 1, "learning_rate": 0.1}
    settings |= {"momentum": 0.9, "eval_every": 1, "seed": 0, "microbatches": None, "size": {}}
    runs = [results.Run(records.Settings(scheme=name, **settings), {}) for name in ("mine", "zb-h1", "1f1b", "single")]
    assert [each.settings.scheme for each in sorted(runs, key=results._place)] == ["single", "1f1b", "mine", "zb-h1"]


def command_line(*arguments, **environment):
    return subprocess.run(
        [sys.executable, str(ROOT / "experiments" / "run.py"), *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        cwd="/",
        timeout=280,
        check=False,
    )


@pytest.fixture
def main(monkeypatch):
    """The command line in this process, whose TensorFlow has started."""
    monkeypatch.setattr(run, "start_tensorflow", lambda devices: None)
    return run.main


@pytest.fixture(scope="module")
def several(request, tmp_path_factory):
    """The schemes asked for, the folder of their runs, and what the command came to."""
    output, schemes = tmp_path_factory.mktemp("runs"), request.param
    asked = ["all"] if schemes == NAMES else schemes
    options = [f"--scheme={each}" for each in asked]
    return schemes, output, command_line(*options, "--output", str(output), *SMALL)


SOME = ("single", "spectrain", "gpipe")
SEVERAL = pytest.mark.parametrize("several", parameters.by_default([SOME, NAMES], SOME), indirect=True, ids=len)


@pytest.mark.wide
@SEVERAL
def test_several_schemes_train_and_say_so(several):
    schemes, output, done = several
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    lines = done.stdout.strip().split("\n")
    table = lines[-len(schemes) - 5 : -3]
    assert table[0].split() == ["scheme", "samples/s", "best", "validation", "accuracy"]
    assert [line.split()[0] for line in table[2:]] == list(schemes)
    best = {line.split()[0]: float(line.split()[2]) for line in table[2:]}
    assert min(best.values()) > 0.3  # of ten classes; the stale ones have learnt little by now
    assert best["spectrain"] > 0.55
    assert len({best[each] for each in ("single", "gpipe", "1f1b") if each in schemes}) == 1
    assert "accuracy:" in done.stdout
    assert (output / "learning_curves.png").stat().st_size > 10_000
    assert lines[-2:] == [
        f"All figures on one page: python plots/report.py {output}",
        f"{output / 'learning_curves.png'}",
    ]


@pytest.mark.wide
@pytest.mark.parametrize(
    ("several", "scheme"),
    [
        *((SOME, scheme) for scheme in SOME),
        *(pytest.param(NAMES, scheme, marks=pytest.mark.slow) for scheme in NAMES),
    ],
    indirect=["several"],
    ids=lambda each: each if isinstance(each, str) else len(each),
)
def test_every_run_leaves_its_files(several, scheme):
    folder = several[1] / scheme
    config = json.loads((folder / "config.json").read_text())
    summary = json.loads((folder / "summary.json").read_text())
    rows = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    assert (config["scheme"], config["seed"], config["learning_rate"]) == (scheme, 0, 0.01)
    assert [row["step"] for row in rows] == [10, 20, 30, 40]
    assert all(math.isfinite(row[key]) for row in rows for key in ("train_loss", "val_loss", "val_accuracy"))
    assert summary["max_val_accuracy"] == max(row["val_accuracy"] for row in rows)
    assert summary["min_train_loss"] == min(row["train_loss"] for row in rows)
    assert summary["samples_per_second"] > 0
    assert summary["peak_memory_bytes"] > 10**8
    assert (summary["steps"], summary["stages"], summary["batch_size"], summary["diverged_at"]) == (40, 4, 128, None)
    spans = Trace.load(folder / "trace.json").spans
    assert len(spans) == {"data-parallel": 0, "single": 80, "gpipe": 1280, "1f1b": 1280, "2bw": 1280}.get(scheme, 320)
    assert (folder / "partition.json").exists() == (scheme not in ("single", "data-parallel"))
    model = keras.models.load_model(folder / "model.keras")
    data = datasets.load("fashion_mnist_small")
    model.compile(metrics=["accuracy"], loss=networks.crossentropy())
    accuracy = model.evaluate(data.x_test, data.y_test, verbose=0, return_dict=True)["accuracy"]
    assert accuracy == pytest.approx(rows[-1]["val_accuracy"], abs=1e-6)


@pytest.mark.wide
def test_train_loss_is_the_mean_since_the_last_row(main, tmp_path):
    """With a learning rate of zero and one batch per row, the mean over all rows is that over all steps."""
    assert main(["--output", str(tmp_path), *SMALL, "--learning-rate", "0", "--eval-every", "1", "--steps", "9"]) == 0
    rows = [json.loads(line) for line in (tmp_path / "spectrain" / "history.jsonl").read_text().splitlines()]
    assert len(rows) == 9
    assert len({row["val_loss"] for row in rows}) == 1
    assert len({round(row["train_loss"], 3) for row in rows}) > 1


@pytest.mark.slow
def test_the_default_run_learns(tmp_path):
    done = command_line("--scheme", "spectrain", "--output", str(tmp_path))
    assert done.returncode == 0
    assert done.stderr == ""
    assert json.loads((tmp_path / "spectrain" / "summary.json").read_text())["max_val_accuracy"] >= 0.80


@pytest.mark.wide
def test_divergence_stops_with_its_step_and_keeps_what_there_is(main, tmp_path, capsys):
    assert main(["--output", str(tmp_path), *SMALL, "--learning-rate", "1e6"]) == 1
    assert "diverged at step" in capsys.readouterr().out
    summary = json.loads((tmp_path / "spectrain" / "summary.json").read_text())
    assert 1 < summary["diverged_at"] <= 40
    assert (tmp_path / "spectrain" / "model.keras").exists()


INTERRUPTED = """
import os, runpy, signal, sys
root = sys.argv.pop(1)
sys.path.insert(0, root)
from pipetrain.checkpoint.store import Store

write = Store.write

def interrupted(self, *what):
    Store.write = write
    os.kill(os.getpid(), signal.SIGINT)
    return write(self, *what)

Store.write = interrupted
sys.argv[0] = root + "/experiments/run.py"
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.wide
def test_a_run_that_was_stopped_goes_on_to_the_same_history(main, tmp_path, capsys):
    """Interrupted as by Ctrl-C; 1f1b, whose weights no drain changes."""
    checkpoints = ("--scheme", "1f1b", "--checkpoint-every", "10", *SMALL, "--steps", "60")
    assert main(["--output", str(tmp_path / "whole"), *checkpoints]) == 0
    output = tmp_path / "stopped"
    arguments = [sys.executable, "-c", INTERRUPTED, str(ROOT), "--output", str(output), *checkpoints]
    done = subprocess.run(arguments, capture_output=True, text=True, cwd="/", timeout=280, check=False)
    assert (done.returncode, done.stderr) == (130, "")
    assert "Stopped by SIGINT after" in done.stdout
    assert f"To go on: python experiments/run.py --resume {output}" in done.stdout
    assert main(["--output", str(output), *checkpoints]) == 2
    assert f"Try --resume {output}" in capsys.readouterr().err
    assert main(["--resume", str(output)]) == 0
    assert "Going on from" in capsys.readouterr().out
    history, expected = (
        [json.loads(line) for line in (folder / "1f1b" / "history.jsonl").read_text().splitlines()]
        for folder in (output, tmp_path / "whole")
    )
    assert [row["step"] for row in history] == list(range(10, 61, 10))
    for key in ("train_loss", "val_loss"):
        assert [row[key] for row in history] == pytest.approx([row[key] for row in expected], rel=1e-4)
    assert not (output / "1f1b" / "checkpoints").exists()
    assert json.loads((output / "1f1b" / "summary.json").read_text())["steps"] == 60
    assert main(["--resume", str(output)]) == 0
    assert "It has ended already." in capsys.readouterr().out


@pytest.mark.wide
def test_a_run_goes_on_under_another_scheme_in_other_stages(main, tmp_path, monkeypatch, capsys):
    def stop(recorder, step, model):
        raise KeyboardInterrupt

    options = ["--output", str(tmp_path), *SMALL, "--checkpoint-every", "5", "--eval-every", "10"]
    done = training.Summary("spectrain", "snn", "", 4, 128, 40, None, None, None, None, 0, None)
    (tmp_path / "spectrain").mkdir()
    (tmp_path / "spectrain" / "summary.json").write_text(json.dumps(training.asdict(done)))  # an earlier run's
    with monkeypatch.context() as patched:
        patched.setattr(training.Recorder, "evaluate", stop)
        assert main(options) == 130
    assert main(["--resume", str(tmp_path), "--model", "vgg16"]) == 2
    assert "Received: --resume with --model." in capsys.readouterr().err
    assert main(["--resume", str(tmp_path), "--servers", "2"]) == 2
    assert "Only the scheme 'parameter-server' has servers. Received: servers=2" in capsys.readouterr().err
    assert main(["--resume", str(tmp_path), "--scheme", "vanilla", "--stages", "3"]) == 0
    assert "Different now: 3 stages instead of 4; scheme vanilla instead of spectrain." in capsys.readouterr().out
    assert json.loads((tmp_path / "vanilla" / "config.json").read_text())["stages"] == 3
    assert main(["--resume", str(tmp_path / "spectrain")]) == 2
    assert "There is no run to go on with" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_goes_on_on_another_grid(main, tmp_path, monkeypatch, capsys):
    def stop(recorder, step, model):
        raise KeyboardInterrupt

    options = ["--scheme", "grid", "--output", str(tmp_path), *SMALL, "--checkpoint-every", "5"]
    with monkeypatch.context() as patched:
        patched.setattr(training.Recorder, "evaluate", stop)
        assert main([*options, "--grid", "2", "1"]) == 130
    assert main(["--resume", str(tmp_path), "--grid", "1", "3"]) == 0
    config = json.loads((tmp_path / "grid" / "config.json").read_text())
    assert (config["grid"], config["stages"]) == ([1, 3], 3)
    assert main(["--resume", str(tmp_path / "none"), "--scheme", "vanilla"]) == 2


@pytest.mark.slow
def test_a_run_goes_on_with_fewer_workers_than_servers(main, tmp_path, monkeypatch):
    """As after the loss of a worker; what is given anew stays refused."""

    def stop(recorder, step, model):
        raise KeyboardInterrupt

    options = ["--scheme", "parameter-server", "--stages", "3", "--servers", "2", "--output", str(tmp_path), *SMALL]
    with monkeypatch.context() as patched:
        patched.setattr(training.Recorder, "evaluate", stop)
        assert main([*options, "--checkpoint-every", "5"]) == 130
    assert main(["--resume", str(tmp_path), "--stages", "1", "--servers", "2"]) == 2
    assert main(["--resume", str(tmp_path), "--stages", "1"]) == 0
    config = json.loads((tmp_path / "parameter-server" / "config.json").read_text())
    assert (config["servers"], config["stages"]) == (1, 1)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--grid", "2", "1"], "Only the scheme 'grid' has one. Received: grid=[2, 1], scheme='vanilla'"),
        (["--order", "tic"], "Only all-reduce and parameter-server order their transfers. Received: order='tic'"),
        (["--servers", "2"], "Only the scheme 'parameter-server' has servers. Received: servers=2, scheme='vanilla'"),
    ],
)
def test_options_of_another_scheme_are_refused(main, options, problem, tmp_path, capsys):
    assert main(["--scheme", "vanilla", *options, "--output", str(tmp_path)]) == 2
    assert problem in capsys.readouterr().err


@pytest.mark.wide
def test_a_run_remembers_its_servers(main, tmp_path, capsys):
    """Of several schemes those that have them."""
    schemes = ["--scheme", "single", "--scheme", "parameter-server"]
    assert main([*schemes, "--order", "tic", "--servers", "2", "--output", str(tmp_path), *SMALL]) == 0
    assert re.findall(r"^(\S+): .*, (\d \w+), \d+ steps$", capsys.readouterr().out, re.M) == [
        ("single", "1 device"),
        ("parameter-server", "4 devices"),
    ]
    found = [json.loads((tmp_path / each / "config.json").read_text()) for each in schemes[1::2]]
    assert [(each["order"], each["servers"]) for each in found] == [(None, None), ("tic", 2)]


@pytest.mark.wide
def test_stages_have_the_devices_that_are_asked_for(main, tmp_path, monkeypatch, capsys):
    """Of several schemes those whose stages may have several; the others have as many devices. Resumed it is the same.

    A change of the stages forgets them.
    """

    def stop(recorder, step, model):
        raise KeyboardInterrupt

    schemes = ["--scheme", "vanilla", "--scheme", "all-reduce", "--scheme", "single", "--scheme", "interleaved"]
    options = [*schemes, "--replicas", "2", "1", "1", "--output", str(tmp_path), *SMALL, "--checkpoint-every", "5"]
    assert main(options) == 0
    assert re.findall(r"^(\S+): .*, (\d .+), \d+ steps$", capsys.readouterr().out, re.M) == [
        ("vanilla", "3 stages on 2-1-1 devices"),
        ("all-reduce", "4 devices"),
        ("single", "1 device"),
        ("interleaved", "4 stages"),
    ]
    cut = json.loads((tmp_path / "vanilla" / "partition.json").read_text())
    assert [stage["replicas"] for stage in cut["stages"]] == [2, 1, 1]
    with monkeypatch.context() as patched:
        patched.setattr(training.Recorder, "evaluate", stop)
        assert main(["--scheme", "vanilla", *options[8:]]) == 130
    assert main(["--resume", str(tmp_path), "--scheme", "vanilla", "--stages", "2"]) == 0
    config = json.loads((tmp_path / "vanilla" / "config.json").read_text())
    assert (config["stages"], config["replicas"]) == (2, None)


@pytest.mark.parametrize("scheme", ["single", "all-reduce", "interleaved"])
def test_replicas_that_no_scheme_of_the_run_has_are_refused(main, scheme, tmp_path, capsys):
    assert main(["--scheme", scheme, "--replicas", "2", "1", "--output", str(tmp_path)]) == 2
    assert f"No stage of these schemes has several devices. Received: --replicas, {scheme}" in capsys.readouterr().err


def test_as_many_stages_as_have_replicas(main, tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["--stages", "3", "--replicas", "2", "1", "--output", str(tmp_path)])
    assert "Received: --stages 3, --replicas 2 1. Try --stages 2" in capsys.readouterr().err
    assert run.parse(["--replicas", "2", "1"]).stages == 2


@pytest.mark.parametrize("scheme", ["vanilla", "single", "data-parallel"])
def test_microbatches_that_no_scheme_of_the_run_has_are_refused(main, scheme, tmp_path, capsys):
    assert main(["--scheme", scheme, "--microbatches", "2", "--output", str(tmp_path)]) == 2
    assert f"microbatches=2, scheme='{scheme}'" in capsys.readouterr().err


def test_microbatches_are_those_of_the_schemes_that_split():
    found = {scheme: microbatches_for(scheme, NAMES, 8) for scheme in NAMES}
    assert {scheme for scheme, count in found.items() if count == 8} == {"2bw", "gpipe", "1f1b"}
    assert set(found.values()) == {8, None}
    assert microbatches_for("vanilla", ["vanilla", "single"], 8) == 8  # to be refused


def test_a_run_of_old_goes_on_without_microbatches_that_were_ignored(tmp_path):
    rates = {"learning_rate": 0.01, "momentum": 0.9, "eval_every": 20, "seed": 0, "microbatches": 8, "size": {}}
    known = {"model": "snn", "dataset": "fashion_mnist_small", "stages": 2, "batch_size": 9, "steps": 9, **rates}
    for scheme in ("vanilla", "gpipe"):
        (tmp_path / scheme).mkdir()
        (tmp_path / scheme / "config.json").write_text(json.dumps({"scheme": scheme, **known}))
    found = resuming.settings(tmp_path, [], {})
    assert {scheme: each.microbatches for scheme, each in found.items()} == {"vanilla": None, "gpipe": 8}
    found = resuming.settings(tmp_path, [], {"microbatches": 4})
    assert {scheme: each.microbatches for scheme, each in found.items()} == {"vanilla": None, "gpipe": 4}
    assert resuming.settings(tmp_path, ["vanilla"], {"microbatches": 4})["vanilla"].microbatches == 4  # to be refused


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (("--scheme", "fast"), "spectrain"),
        (("--model", "alexnet"), "snn"),
        (("--dataset", "mnist"), "fashion_mnist_small"),
        (("--steps", "0"), "not a number from 1 up"),
        (("--stages", "-2"), "not a number from 1 up"),
    ],
)
def test_unknown_names_and_numbers_are_refused(arguments, match, capsys):
    with pytest.raises(SystemExit) as stopped:
        run.main(arguments)
    assert stopped.value.code == 2
    assert match in capsys.readouterr().err


def test_more_stages_than_layers(main, tmp_path, capsys):
    assert main(["--output", str(tmp_path), *SMALL, "--stages", "9"]) == 2
    assert "7 layers" in capsys.readouterr().err


def test_an_output_that_cannot_be_written(tmp_path, capsys):
    file = tmp_path / "file"
    file.write_text("")
    assert run.main(["--output", str(file / "inside")]) == 2
    assert "Cannot write there" in capsys.readouterr().err


def test_missing_data():
    with pytest.raises(ValueError, match="no such directory"):
        datasets.load("fashion_mnist", "/nowhere")
    with pytest.raises(ValueError, match="Unknown data set"):
        datasets.load("mnist")


def test_damaged_data(tmp_path):
    """A prepared data set whose records are cut short."""
    import tensorflow_datasets as tfds

    with tfds.testing.mock_data(num_examples=3):
        info = tfds.builder("fashion_mnist", data_dir=str(tmp_path)).info
    folder = tmp_path / "fashion_mnist" / str(info.version)
    folder.mkdir(parents=True)
    info.write_to_directory(str(folder))
    (folder / "dataset_info.json").write_text((folder / "dataset_info.json").read_text()[:40])
    with pytest.raises(ValueError, match="Cannot read the data set"):
        datasets.load("fashion_mnist", str(tmp_path))


@pytest.mark.parametrize(
    ("name", "shape"),
    [("cifar10", (32, 32, 3)), ("fashion_mnist", (28, 28, 1)), ("imdb_reviews", (datasets.FREQUENT,))],
)
def test_other_data_sets_through_tfds(name, shape, monkeypatch):
    import tensorflow_datasets as tfds

    def examples(self, *args, **kwargs):
        import tensorflow as tf

        rng = np.random.default_rng(0)
        if name == "imdb_reviews":
            values = {"text": [f"word{n} word{n % 3}" for n in range(20)], "label": np.arange(20) % 2}
        else:
            values = {"image": rng.integers(0, 256, (20, *shape)).astype("uint8"), "label": np.arange(20) % 10}
        return tf.data.Dataset.from_tensor_slices(values)

    with tfds.testing.mock_data(num_examples=20, as_dataset_fn=examples):
        data = datasets.load(name)
    assert data.x_train.shape[0] == len(data.y_train) == 20
    assert data.x_train.dtype == np.float32
    assert abs(data.x_train.mean()) < 1e-3
    assert data.classes == (2 if name == "imdb_reviews" else 10)
    if name != "imdb_reviews":
        assert data.x_train.shape[1:] == shape


def test_help_teaches(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        run.main(["--help"])
    text = capsys.readouterr().out
    listed = " ".join(text.partition("schemes, and the options that they have:")[2].split())
    assert "asynchronous, predicted weights --horizon --spike-compensation --rescale-steps --stretch-momentum" in listed
    assert "--children --tree-depth --stragglers grid wide layers divided by outputs" in listed
    assert "options of coded-reduce:\n  --children N " in text
    assert "examples:" in text
    assert "python experiments/run.py --scheme all" in text
    named = [word.strip(",;.()") for word in text.split() if word.startswith("docs/")]
    assert named == ["docs/guide/hosts.md"] and (ROOT / named[0]).exists()


@pytest.mark.wide
@SEVERAL
def test_figures_are_drawn(several, tmp_path):
    from plots import timeline

    trace = Trace.load(several[1] / "spectrain" / "trace.json")
    picture = timeline.draw(trace, tmp_path / "timeline.png", first=10)
    assert picture.stat().st_size > 10_000
    assert picture.with_suffix(".svg").exists()
    with pytest.raises(ValueError, match="first=1000"):
        timeline.draw(trace, tmp_path / "timeline.png", first=1000)


@pytest.mark.wide
@SEVERAL
def test_the_report_shows_every_scheme(several, tmp_path):
    from plots import memory, report, runs

    schemes, output, _ = several
    (found,) = runs.find([output])
    assert [run.scheme for run in found] == list(schemes)
    assert {run.scheme: len((run.partition() or {"stages": ()})["stages"]) for run in found} == {
        each: 0 if each in ("single", "data-parallel") else 4  # the others had to be cut
        for each in schemes
    }
    assert memory.draw([output], tmp_path / "memory.png").stat().st_size > 10_000
    text = report.write([output], tmp_path / "report.html").read_text(encoding="utf-8")
    assert text.count("<figure") == 5 + len(
        [each for each in schemes if each != "data-parallel"]
    )  # which has no timeline
    for scheme in schemes:
        assert f"<td>{scheme}</td>" in text


def settings_of(scheme, **more):
    known = {"model": "snn", "dataset": "fashion_mnist_small", "stages": 4, "batch_size": 128, "steps": 60}
    rates = {"learning_rate": 0.01, "momentum": 0.9, "eval_every": 20, "seed": 0, "microbatches": None, "size": {}}
    return Settings(scheme=scheme, **{**known, **rates, **more})


def test_what_cannot_be_trained_is_said_before_anything_is(main, tmp_path, capsys):
    assert main(["--scheme", "single", "--scheme", "spike-compensation", "--optimizer", "adam"]) == 2
    assert "Spike compensation is for SGD with momentum" in capsys.readouterr().err
    assert main(["--scheme", "gpipe", "--horizon", "local", "--output", str(tmp_path)]) == 2
    assert "horizon='local', scheme='gpipe'" in capsys.readouterr().err
    both = [settings_of("spike-compensation", optimizer="adam"), settings_of("vanilla", optimizer="adam")]
    assert [each.scheme for each in run.possible(both, every=True)] == ["vanilla"]
    assert "spike-compensation is left out. Spike compensation is for" in capsys.readouterr().out


def test_a_policy_s_options_are_for_the_schemes_that_have_them():
    options = run.parse(["--scheme", "spectrain", "--scheme", "gpipe", "--horizon", "local", "--rescale-steps", "9"])
    assert run.having("spectrain", options) == {
        "horizon": "local",
        "spike_compensation": False,
        "rescale_steps": 9,
        "stretch_momentum": "auto",
    }
    others = {"horizon": "round-trip", "rescale_steps": None}
    assert run.having("gpipe", options) == {**run.having("spectrain", options), **others}
    several = ["--scheme", "spectrain", "--scheme", "2bw", "--scheme", "gpipe", "--microbatches", "6"]
    options = run.parse([*several, "--horizon", "target", "--stretch-momentum", "no"])
    found = {scheme: run.having(scheme, options) for scheme in options.scheme}
    assert [found[scheme]["horizon"] for scheme in found] == ["target", "round-trip", "round-trip"]
    assert [found[scheme]["stretch_momentum"] for scheme in found] == [False, "auto", "auto"]
    assert {microbatches_for(scheme, found, 6, "target") for scheme in found} == {6}
    assert run.having("2bw", run.parse(["--scheme", "2bw", "--horizon", "1.5"]))["horizon"] == 1.5


def test_what_auto_may_take_is_its_own_option():
    options = run.parse(["--scheme", "auto", "--scheme", "1f1b", "--allow", "compression,local"])
    assert {name: options_of(name, {"allow": options.allow})["allow"] for name in options.scheme} == {
        "auto": "compression,local",
        "1f1b": None,
    }
    assert settings_of("auto", allow=options.allow).scheme_with_options.allowed == {"compression", "local"}


def test_another_scheme_goes_on_without_the_options_that_it_lacks(tmp_path):
    training.write_settings(settings_of("spectrain", horizon="local", rescale_steps=9), tmp_path / "spectrain")
    checkpoints = tmp_path / "spectrain" / "checkpoints"
    checkpoints.mkdir()
    (checkpoints / "step-20.npz").touch()
    assert resuming.settings(tmp_path, ["vanilla"], {}) == {"spectrain": settings_of("vanilla", rescale_steps=9)}
    assert resuming.settings(tmp_path, ["gpipe"], {"steps": 40}) == {"spectrain": settings_of("gpipe", steps=40)}
    predicted = settings_of("2bw", horizon=1.5, microbatches=5)
    assert resuming.settings(tmp_path, ["2bw"], {"horizon": 1.5, "microbatches": 5}) == {"spectrain": predicted}
    assert not (tmp_path / "vanilla").exists()
    resuming.adopt(tmp_path, "spectrain", "vanilla")
    assert (tmp_path / "vanilla" / "checkpoints" / "step-20.npz").exists()


class Foreign(ConnectionError):
    """Another library's, which has lost a worker of its own."""


Foreign.__name__ = Foreign.__qualname__ = "WorkerLost"


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (pipetrain.WorkerLost("a:1 is lost. Received: silence", ["a:1"]), LOST),
        (Foreign("theirs"), 2),
        (ConnectionRefusedError("nobody there"), 2),
        (ChildProcessError("ended at once"), 2),
        (ValueError("no such thing"), 2),
    ],
    ids=lambda value: type(value).__name__,
)
def test_only_the_loss_of_a_worker_of_ours_ends_with_its_status(error, status, main, monkeypatch, tmp_path, capsys):
    """The supervisor begins anew at that status, which would not help with anything else."""

    def lose(*_):
        raise error

    monkeypatch.setattr(run, "begin", lose)
    assert main(["--output", str(tmp_path)]) == status
    assert capsys.readouterr().err == f"run.py: {error}\n"
    monkeypatch.setattr(run, "end_with_supervisor", lambda: None)
    status = LOST if isinstance(error, ConnectionError) else 2
    assert main(["--output", str(tmp_path), "--supervised"]) == status  # which asks for workers that are not there


@pytest.mark.parametrize("rate", ["-1", "nan", "inf"])
def test_impossible_learning_rates_are_refused(rate, capsys):
    with pytest.raises(SystemExit):
        run.main(["--learning-rate", rate])
    assert "is not a number from 0 up" in capsys.readouterr().err


@pytest.mark.wide
def test_a_policy_of_a_file_trains_as_the_same_one_of_the_table(main, tmp_path, monkeypatch):
    """And goes on from a checkpoint, from another folder too."""
    (tmp_path / "mine.py").write_text(NEWEST)
    monkeypatch.chdir(tmp_path)
    both = ["--scheme", "mine.py:Newest", "--scheme", "vanilla", "--output", str(tmp_path / "runs"), *SMALL]
    assert main(both) == 0
    histories = [(tmp_path / "runs" / name / "history.jsonl").read_text() for name in ("Newest", "vanilla")]
    assert histories[0] == histories[1]
    config = json.loads((tmp_path / "runs" / "Newest" / "config.json").read_text())
    assert (config["scheme"], config["file"]) == ("Newest", str(tmp_path / "mine.py:Newest"))
    monkeypatch.chdir("/")
    found = resuming.settings(tmp_path / "runs", [], {})
    assert str(found["Newest"].way) == "Newest" and found["vanilla"].way == "vanilla"


@pytest.mark.wide
def test_what_auto_takes_is_recorded_with_the_reason(main, tmp_path, capsys):
    assert main(["--scheme", "auto", "--stages", "2", "--output", str(tmp_path), *SMALL]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("auto takes scheme=")]
    summary = json.loads((tmp_path / "auto" / "summary.json").read_text())
    assert f"auto takes scheme={summary['taken']['scheme']}" in line
    assert summary["reason"] in line and len(summary["reason"]) > 10


@pytest.mark.parametrize("program", ["run", "table1", "rmse"])
def test_the_closest_name_is_said(program, capsys):
    with pytest.raises(SystemExit):
        importlib.import_module(f"experiments.{program}").main(["--scheme", "spectrian"])
    told = " ".join(capsys.readouterr().err.split())
    assert "Try 'spectrain', or one of: " in told
    with pytest.raises(SystemExit):
        importlib.import_module(f"experiments.{program}").main(["--scheme", "nothing.py:Mine"])
    assert "There is no such file. Received: scheme='nothing.py:Mine'" in " ".join(capsys.readouterr().err.split())


def test_all_says_what_it_is(main, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run, "run", lambda settings, options, output: [])
    monkeypatch.setattr(run, "pictures", lambda *_: "")
    assert main(["--scheme", "all", "--output", str(tmp_path), *SMALL]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("all: ")]
    meant, others = line.removeprefix("all: ").rstrip(".").split(". By their names only: ")
    assert meant.split(", ") == [*NAMES]
    assert {*meant.split(", "), *others.split(", ")} == {*EVERY_NAME, "auto"}
