"""The study of staleness: what it runs, what it keeps, and what it says."""

from __future__ import annotations

import csv
import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import keras
import numpy as np
import pytest
import reference

from experiments import datasets, policies, staleness, training
from experiments.policies import Outcome, Run, record, recorded
from experiments.staleness import Row
from plots.staleness import limits

SMALL = {"momentum": 0.9, "steps": 12, "batch_size": 16, "depth": 3, "width": 8}
RUN = Run("spectrain", 2, 0.02, 0, **SMALL)


def options(*arguments):
    return staleness.parse(arguments)


def test_every_policy_at_every_number_of_stages():
    runs = staleness.planned(options())
    places = 1 + (len(policies.POLICIES) - 1) * 3
    assert len(runs) == len(set(runs)) == len({run.name for run in runs}) == places * 2 * 5
    assert {run.stages for run in runs if run.policy == "single"} == {1}
    assert {run.stages for run in runs if run.policy == "spectrain"} == {2, 4, 8}
    assert {(run.steps, run.batch_size, run.depth, run.width, run.momentum) for run in runs} == {(400, 64, 8, 64, 0.9)}
    assert not [run.name for run in runs if set(run.name) & set("/ +")]


def test_the_study_that_is_asked_for():
    given = ("--scheme", "vanilla", "--policy", "single", "--stages", "3", "--learning-rate", "0.1", "--seeds", "2")
    runs = staleness.planned(options(*given))
    assert [(run.policy, run.stages, run.seed) for run in runs] == [
        ("single", 1, 0),
        ("single", 1, 1),
        ("vanilla", 3, 0),
        ("vanilla", 3, 1),
    ]


def test_seeds_that_were_not_used_before():
    runs = staleness.planned(options("--policy", "single", "--learning-rate", "1", "--first-seed=100", "--seeds=2"))
    assert [run.seed for run in runs] == [100, 101]


def test_layers_are_shared_out_evenly():
    assert policies.cuts(8, 4) == ["dense_1", "dense_3", "dense_5"]
    assert policies.cuts(8, 8) == [f"dense_{n}" for n in range(7)]
    assert policies.cuts(5, 2) == ["dense_1"]
    assert policies.cuts(8, 1) == []


def test_another_network_is_cut_where_it_can_be():
    run = Run("spectrain", 3, 0.02, 0, model="vgg16", **{**SMALL, "width": 1})
    shape, model = policies.network(run, datasets.load("fashion_mnist_small"))
    assert shape == (32, 32, 3)
    assert policies.even_cuts(run, model) == ["block3_conv2", "block5_conv2"]
    assert run.name.startswith("vgg16-spectrain-")


@pytest.mark.wide
def test_images_are_validated_as_the_network_reads_them():
    data = datasets.load("fashion_mnist_small", reads="images")
    some = data._replace(x_test=data.x_test[:40], y_test=data.y_test[:40])
    outcome = policies.train(Run("single", 1, 0.01, 0, model="vgg16", **{**SMALL, "steps": 1, "width": 1}), some)
    assert 0 <= outcome.accuracy <= 1
    assert outcome.loss > 0


def test_more_stages_than_layers(tmp_path, capsys):
    assert staleness.main(["--stages", "4", "--depth", "3", "--output", str(tmp_path)]) == 2
    assert "Try at most --stages 3." in capsys.readouterr().err


@pytest.mark.parametrize("given", ["--momentum=0", "--momentum=1", "--optimizer=adam", "--optimizer=nesterov"])
def test_what_spike_compensation_is_not_for_is_told_before_any_run(given, tmp_path, capsys):
    assert staleness.main([given, "--policy=single", "--policy=spike-compensation", f"--output={tmp_path}"]) == 2
    assert "Try --optimizer momentum --momentum 0.9" in capsys.readouterr().err


def test_what_has_ended_is_read_again_if_it_is_the_same(tmp_path):
    assert recorded(RUN, tmp_path) is None
    outcome = Outcome(0.75, 0.5, history=((10, 0.5), (20, 0.75)))
    record(RUN, outcome, tmp_path)
    assert recorded(RUN, tmp_path) == outcome
    assert recorded(Run(**{**vars(RUN), "depth": 4}), tmp_path) is None
    (tmp_path / f"{RUN.name}.json").write_text('{"run": 1')
    assert recorded(RUN, tmp_path) is None


def test_rows_by_hand():
    runs = [Run(policy, 2, 0.02, seed, **SMALL) for policy in ("vanilla", "spectrain") for seed in range(3)]
    outcomes = [Outcome(0.1, 9.0), Outcome(None, None, 7), Outcome(0.4, 2.0)]
    outcomes += [Outcome(accuracy, 0.5) for accuracy in (0.7, 0.8, 0.9)]
    rows = staleness.gathered(runs, dict(zip(runs, outcomes)))
    assert rows == [
        Row("vanilla", 2, 0.02, accuracies=(0.1, 0.4), runs=3, diverged=2, losses=(9.0, 2.0)),
        Row("spectrain", 2, 0.02, accuracies=(0.7, 0.8, 0.9), runs=3, diverged=0, losses=(0.5, 0.5, 0.5)),
    ]
    above, names, _, *lines = staleness.report([*rows, Row("single", 1, 0.02, (), 1, 1)]).split("\n")
    assert above.split() == ["learning", "validation", "validation"]
    assert names.split() == ["policy", "stages", "rate", "accuracy", "loss"]
    assert lines[0].endswith("2 of 3 diverged")
    assert lines[1].split()[:6] == ["spectrain", "2", "0.02", "0.800", "±", "0.248"]  # 4.303 * 0.1 / sqrt(3)
    assert lines[2].split() == ["single", "1", "0.02", "-", "1", "of", "1", "diverged"]


def test_differences_are_taken_seed_by_seed():
    single = Row("single", 1, 0.02, accuracies=(0.8, 0.9), runs=2, diverged=0)
    other = Row("spectrain", 8, 0.02, accuracies=(0.7, 0.8), runs=2, diverged=0)
    lost, elsewhere = replace(other, accuracies=(0.7,)), replace(other, learning_rate=0.04)
    header, _, *lines = staleness.report([single, other, lost, elsewhere]).split("\n")
    assert "minus single" in header
    assert [line.split()[6:] for line in lines] == [[], ["-0.100", "±", "0.000"], [], []]


def test_the_tables_figures_are_kept_as_csv(tmp_path):
    """With the columns of the page's file; a mean is empty where no run has an accuracy."""
    single = Row("single", 1, 0.02, accuracies=(0.8, 0.9), runs=2, diverged=0, losses=(0.5, 0.5))
    rows = [single, Row("spectrain", 8, 0.02, (0.7, 0.8), 2, 0), Row("vanilla", 8, 0.02, (), 2, 2)]
    staleness.write(tmp_path, options("--first-seed", "100", "--seeds", "2"), rows)
    found = [*csv.DictReader((tmp_path / "staleness.csv").open(encoding="utf-8"))]
    page = Path(__file__).parents[2] / "docs" / "results" / "staleness.csv"
    assert [*found[0]] == [*csv.DictReader(page.open(encoding="utf-8")).fieldnames]
    assert {(each["study"], each["network"], each["optimizer"]) for each in found} == {
        ("seeds 100-101", "dense 8 x 64", "momentum")
    }
    assert [(each["policy"], each["figure"], each["diverged"]) for each in found] == [
        ("single", "accuracy", "0"),
        ("single", "loss", "0"),
        ("spectrain", "accuracy", "0"),
        ("spectrain", "difference from single", "0"),
        ("vanilla", "accuracy", "2"),
    ]
    assert float(found[3]["mean"]) == pytest.approx(-0.1)
    assert (found[4]["mean"], found[4]["half_width"]) == ("", "")


def test_worse_than_guessing_is_divergence():
    assert not Outcome(0.1, math.log(10)).diverged
    assert Outcome(0.1, 2.31).diverged
    assert Outcome(0.1, math.nan).diverged
    assert Outcome(None, None, 3).diverged


@pytest.fixture
def main(monkeypatch):
    """The command line in this process, whose TensorFlow has started."""
    monkeypatch.setattr(staleness, "start_tensorflow", lambda devices: None)
    return staleness.main


@pytest.mark.wide
def test_a_study_trains_what_is_left_and_draws(main, tmp_path, capsys, monkeypatch):
    arguments = [f"--{key.replace('_', '-')}={value}" for key, value in SMALL.items()]
    arguments += ["--output", str(tmp_path), "--seeds=1", "--jobs=1", "--learning-rate=0.02", "--stages=2"]
    arguments += ["--policy=spectrain", "--policy=single"]
    record(Run("single", 1, 0.02, 0, **SMALL), Outcome(None, None, 5), tmp_path_runs(tmp_path))
    assert main(arguments) == 0
    said = capsys.readouterr().out
    assert "1 of 1 diverged" in said  # the run that had ended
    config, summary = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("config", "summary"))
    assert (config["policy"], config["stages"]) == (["spectrain", "single"], [2])
    single, spectrain = summary["rows"]
    assert (single["mean"], single["diverged"]) == (None, 1)
    assert (spectrain["policy"], spectrain["runs"], spectrain["half_width"]) == ("spectrain", 1, None)
    assert 0 < spectrain["mean"] == spectrain["accuracies"][0] < 1
    assert (tmp_path / "staleness.png").stat().st_size > 10_000
    assert (tmp_path / "staleness.svg").exists()
    monkeypatch.setattr(staleness, "train", None)  # nothing is left to train
    assert main(arguments) == 0
    assert capsys.readouterr().out == said


def test_what_diverged_does_not_flatten_the_figure():
    def row(mean, diverged=0):
        return {"mean": mean, "half_width": 0.1, "diverged": diverged}

    assert limits([row(0.5), row(0.7), row(0.1, diverged=1), row(None, diverged=5)]) == pytest.approx((0.37, 0.83))
    assert limits([row(0.05), row(0.95)]) == (0, 1)
    assert limits([row(None, diverged=1)]) == (0, 1)


def tmp_path_runs(output):
    (output / "runs").mkdir()
    return output / "runs"


def test_help_teaches(capsys):
    with pytest.raises(SystemExit):
        staleness.main(["--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "python experiments/staleness.py" in said
    assert "minutes on two CPU cores" in said
    assert "scheme='spectrain'" in said


@pytest.mark.slow
def test_a_run_that_diverges_says_at_which_step():
    outcome = policies.train(Run("vanilla", 2, 1e38, 0, **{**SMALL, "steps": 60}), datasets.load("fashion_mnist_small"))
    assert outcome.accuracy is None
    assert 1 <= outcome.stopped_at <= 60
    assert outcome.diverged


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy",
    [
        name
        for name in policies.POLICIES
        if name not in ("single", "vanilla + rescaling", "2bw/1.5") and "=" not in name
    ],
)
@pytest.mark.parametrize("stages", [2, 8])
def test_runs_are_those_of_the_reference(policy, stages):
    """After 100 minibatches; later, rounding grows until two exact trainings are two different ones."""
    data = datasets.load("fashion_mnist_small")
    run = Run(policy, stages, 0.02, 3, momentum=0.9, steps=100, batch_size=64, depth=8, width=64)
    outcome = policies.train(run, data)
    keras.utils.set_random_seed(3)
    shape = data.x_train.shape[1:]
    weights = policies.mlp(shape, 10, 8, 64).get_weights()
    batches = [(x.numpy().reshape(64, -1), y.numpy()) for x, y in training.batches(data, shape, 64, 3).take(100)]
    state = reference.State(list(zip(weights[::2], weights[1::2])))
    settings = reference.Settings(policy.rpartition("/")[2], lambda t: 0.02)
    reference.train(settings, state, [8 * (k + 1) // stages for k in range(stages)], batches)
    x = data.x_test.reshape(len(data.x_test), -1)
    for n, (kernel, bias) in enumerate(state.layers):
        x = x @ kernel + bias if n == 7 else np.tanh(x @ kernel + bias)
    assert outcome.accuracy == pytest.approx(np.mean(x.argmax(axis=1) == data.y_test), abs=0.002)


@pytest.mark.slow
def test_two_processes_come_to_what_one_does(tmp_path):
    runs = [Run(policy, 2, 0.02, 0, **SMALL) for policy in ("spectrain", "vanilla", "single")]
    outcomes = staleness.finish(runs, tmp_path, 2)
    data = datasets.load("fashion_mnist_small")
    for run in runs:
        assert policies.train(run, data) == outcomes[run] == recorded(run, tmp_path)


@pytest.mark.slow
def test_ctrl_c_ends_the_runs_at_work_and_keeps_them(tmp_path):
    """All processes of a terminal have the signal; no run begins after it, and none is lost."""
    arguments = ["--jobs=2", "--steps=20", "--stages=2", f"--output={tmp_path}"]
    command = [sys.executable, str(Path(staleness.__file__)), *arguments]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    while process.poll() is None and not list(tmp_path.glob("runs/*.json")):
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)
    said, errors = process.communicate(timeout=200)
    assert (process.returncode, errors) == (130, "")
    assert said.endswith("The same command goes on with the runs that are left.\n")
    assert 1 <= len(list((tmp_path / "runs").iterdir())) <= 10
