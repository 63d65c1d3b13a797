"""The study of slow networks: what it runs, how it makes seconds of steps, and what it says."""

from __future__ import annotations

import csv
import json

import pytest

from experiments import slow_networks, staleness
from experiments.policies import Outcome
from experiments.progress import write_rows
from plots.slow_networks import draw, rate


def options(*arguments):
    return slow_networks.parse(arguments)


def test_one_device_is_always_among_the_runs():
    runs = slow_networks.planned(options("--policy", "all-reduce/int8", "--workers", "3", "--seeds", "2"))
    assert [(run.policy, run.stages, run.seed) for run in runs] == [
        ("single", 1, 0),
        ("single", 1, 1),
        ("all-reduce/int8", 3, 0),
        ("all-reduce/int8", 3, 1),
    ]
    assert {run.every for run in runs} == {32}


def test_rates_are_told_once_from_the_fastest_on():
    assert options("--rate", "20", "--rate", "1000", "--rate", "20").rate == [1000, 20]
    assert [rate(each) for each in (10_000, 2500, 20)] == ["10 Gb/s", "2.5 Gb/s", "20 Mb/s"]


def test_a_study_without_a_validation_is_refused(capsys):
    with pytest.raises(SystemExit):
        options("--steps", "5", "--every", "6")
    assert "Try --every 5" in capsys.readouterr().err


def test_workers_join_when_they_are_validated(capsys):
    with pytest.raises(SystemExit):
        options("--policy", "all-reduce/local:8", "--every", "12")
    assert "Try --every 8" in capsys.readouterr().err


def ways():
    chosen = options("--policy", "all-reduce/int8", "--seeds", "2", "--rate", "20")
    runs = slow_networks.planned(chosen)
    histories = [[(10, 0.5), (20, 0.8)], [(10, 0.7), (20, 0.8)], [(10, 0.2), (20, 0.6)], [(10, 0.4)]]
    losses = [0.5, 0.5, 0.5, None]
    outcomes = {
        run: Outcome(loss and 0.8, loss, history=each) for run, loss, each in zip(runs, losses, histories, strict=True)
    }
    return slow_networks.gathered(runs, outcomes, {"single": [0.1], "all-reduce/int8": [0.2]})


def test_curves_are_means_of_the_seeds_as_far_as_all_have_them():
    single, compressed = ways()
    assert single["steps"] == [10, 20]
    assert single["accuracies"] == pytest.approx([0.6, 0.8])
    assert single["ends"] == pytest.approx([0.65, 0.75])
    assert compressed["accuracies"] == pytest.approx([0.2, 0.6])  # of the run that has not diverged
    assert (single["diverged"], compressed["diverged"]) == (0, 1)


def test_the_table_tells_when_the_accuracy_of_one_device_is_nearly_reached():
    lines = slow_networks.report(ways(), [20]).splitlines()
    single, compressed = (next(line for line in lines if line.startswith(name)).split() for name in ("single", "int8"))
    assert single[-2:] == ["100", "2.0"]  # 20 minibatches of 100 ms
    assert compressed[-2:] == ["200", "-"] and "1 diverged" in " ".join(compressed)


def test_the_tables_figures_are_kept_as_csv(tmp_path):
    path = write_rows(tmp_path / slow_networks.TABLE, slow_networks.figures(ways(), [20]))
    single, compressed = csv.DictReader(path.open(encoding="utf-8"))
    assert [*single] == ["policy", "rate_mbit", "accuracy", "half_width", "diverged", "step_s", "reached_s"]
    assert float(single["accuracy"]) == pytest.approx(0.7)
    assert (single["policy"], single["diverged"], single["reached_s"]) == ("single", "0", "2.0")
    assert (compressed["rate_mbit"], compressed["diverged"], compressed["reached_s"]) == ("20", "1", "")


@pytest.mark.wide
def test_a_small_study_trains_simulates_and_draws(tmp_path, monkeypatch):
    for each in (slow_networks, staleness):  # this process's TensorFlow has started
        monkeypatch.setattr(each, "start_tensorflow", lambda devices: None)
    given = ["--policy", "all-reduce", "--workers", "2", "--seeds", "1", "--steps", "4", "--every", "2", "--width", "8"]
    given += ["--rate", "1000", "--rate", "1", "--jobs", "1", "--output", str(tmp_path)]
    assert slow_networks.main(given) == 0
    found = json.loads((tmp_path / "slow_networks.json").read_text())
    single, shared = found["ways"]
    assert single["steps"] == shared["steps"] == [2, 4]
    assert single["accuracies"] == pytest.approx(shared["accuracies"], abs=2e-3)  # the same training
    assert single["step_s"][0] == single["step_s"][1]
    weights_bytes = 4 * (784 * 8 + 8 + 6 * (8 * 8 + 8) + 8 * 10 + 10)
    assert shared["step_s"][1] - shared["step_s"][0] == pytest.approx(weights_bytes / 125e3, rel=0.3)
    rows = [*csv.DictReader((tmp_path / "slow_networks.csv").open(encoding="utf-8"))]
    assert [float(each["step_s"]) for each in rows] == [*single["step_s"], *shared["step_s"]]
    assert (tmp_path / "slow_networks.png").stat().st_size > 10_000
    assert draw(tmp_path, tmp_path / "again.png").is_file()
