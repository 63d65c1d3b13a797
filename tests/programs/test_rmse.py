"""Errors of stale and predicted weights: by hand, and the command line that measures them."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import keras
import networks
import numpy as np
import pytest

import models
from experiments import datasets, optimizers, rmse, training
from experiments.displacement import Errors, Versions, errors, means


def vector(*values):
    return np.array(values, np.float32)


def test_errors_by_hand():
    """The last update was (1, 2); the next two go twice as far, and (3, 4) beyond."""
    found = errors(7, 2, before=vector(10, 20), then=vector(11, 22), reached=vector(11 + 2 + 3, 22 + 4 + 4))
    assert (found.step, found.horizon) == (7, 2)
    assert found.stale == math.sqrt((5**2 + 8**2) / 2)
    assert found.predicted == math.sqrt((3**2 + 4**2) / 2)
    assert found.multiple == pytest.approx((5 * 1 + 8 * 2) / (1**2 + 2**2))
    assert found.best == pytest.approx(math.sqrt((0.8**2 + 0.4**2) / 2), rel=1e-6)


def test_weights_that_rested_foretell_nothing():
    found = errors(1, 3, before=vector(1, 1), then=vector(1, 1), reached=vector(4, 5))
    assert found.stale == found.predicted == found.best == math.sqrt((9 + 16) / 2)
    assert found.multiple == 0


def test_every_version_is_compared_with_those_that_it_foretold():
    """W[t] = t^2: the last update is 2t - 1, so W[t + s] is predicted too low by s^2 + s, and stale by (2t + s)s."""
    versions = Versions([3, 1])
    rows = [row for t in range(8) for row in versions.add([np.full((2, 3), t**2, "float32"), vector(t**2)])]
    assert [(row.step, row.horizon) for row in rows if row.horizon == 1] == [(t, 1) for t in range(1, 7)]
    assert [row.step for row in rows if row.horizon == 3] == [1, 2, 3, 4]
    for row in rows:
        assert row.predicted == pytest.approx(row.horizon**2 + row.horizon)
        assert row.stale == pytest.approx((2 * row.step + row.horizon) * row.horizon)
        assert row.best == pytest.approx(0, abs=1e-4)
    assert len(versions._kept) == 5  # W[t-4] ... W[t]: no more than s = 3 needs


def test_steady_velocity_is_foretold_exactly():
    versions = Versions(range(1, 8))
    rows = [row for t in range(20) for row in versions.add([vector(2 * t, -t)])]
    assert {row.predicted for row in rows} == {0}
    assert {(row.horizon, row.multiple) for row in rows} == {(s, float(s)) for s in range(1, 8)}
    assert [each.factor for each in means(rows)] == [None] * 7
    assert "exact (s = 1)" in rmse.verdict(means(rows))


def test_means_by_horizon():
    rows = [
        Errors(1, 2, stale=4.0, predicted=1.0, best=0.5, multiple=1.0),
        Errors(2, 2, stale=2.0, predicted=3.0, best=1.5, multiple=2.0),
        Errors(3, 2, stale=math.inf, predicted=math.nan, best=0.0, multiple=0.0),
        Errors(1, 1, stale=1.0, predicted=2.0, best=1.0, multiple=0.0),
    ]
    one, two = means(rows)
    assert (one.horizon, one.steps, one.factor, one.nearer) == (1, 1, 0.5, 0.0)
    assert (two.horizon, two.steps, two.factor, two.nearer) == (2, 2, 1.5, 0.5)
    assert (two.stale, two.predicted, two.best, two.multiple) == (3.0, 2.0, 1.0, 1.5)
    assert rmse.verdict([one, two]).endswith(
        "by a factor of 0.50 (s = 1), 1.50 (s = 2): nearer on average for s = 2 only."
    )
    assert rmse.verdict([]) == "No weights were reached."


def test_statistics_are_no_weights_to_predict():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.BatchNormalization()])
    assert [weights.shape for weights in rmse.trainable(model)] == [(4, 3), (3,), (3,), (3,)]
    model.layers[0].trainable = False
    assert [weights.shape for weights in rmse.trainable(model)] == [(3,), (3,)]


@pytest.fixture
def main(monkeypatch):
    """The command line in this process, whose TensorFlow has started."""
    monkeypatch.setattr(rmse, "start_tensorflow", lambda devices: None)
    return rmse.main


SMALL = ("--depth", "3", "--width", "8", "--stages", "2", "--batch-size", "32", "--learning-rate", "0.01")


@pytest.mark.wide
def test_a_run_measures_what_plain_keras_would(main, tmp_path, capsys):
    """On one device, where every version is that of Keras' own training on the same minibatches."""
    arguments = ("--scheme", "single", "--horizons", "4", "1", "2", "--steps", "12", "--output", str(tmp_path))
    assert main([*SMALL, *arguments]) == 0
    config, summary = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("config", "summary"))
    rows = [Errors(**json.loads(line)) for line in (tmp_path / "history.jsonl").read_text().splitlines()]
    assert (config["optimizer"], config["horizons"]) == ("momentum", [1, 2, 4])
    weights = plain_weights(12)
    for horizon in (1, 2, 4):
        some = [row for row in rows if row.horizon == horizon]
        assert [row.step for row in some] == list(range(1, 13 - horizon))
        for row in some:
            moved, velocity = (weights[row.step + n] - weights[row.step] for n in (horizon, -1))
            assert row.stale == pytest.approx(np.sqrt(np.mean(moved**2)), rel=1e-3)
            assert row.predicted == pytest.approx(np.sqrt(np.mean((moved + horizon * velocity) ** 2)), rel=1e-3)
            assert 0 < row.best <= min(row.stale, row.predicted) * (1 + 1e-5)
    assert summary["diverged_at"] is None
    for each, found in zip(summary["horizons"], means(rows)):
        assert (each["horizon"], each["factor"]) == (found.horizon, found.factor)
    said = capsys.readouterr().out
    assert "12 steps: RMSE against the weights reached" in said
    assert f"{summary['horizons'][0]['factor']:.2f} (s = 1)" in said
    assert (tmp_path / "rmse.png").stat().st_size > 10_000
    assert (tmp_path / "rmse.svg").exists()


def test_factors_are_kept_as_csv(tmp_path):
    """With the columns of the page's file; a prediction without an error has no factor."""
    study = rmse.settings(rmse.parse(["--horizons", *map(str, range(1, 8)), "--width", "256"]))
    found = [
        rmse.Means(s, 10, stale=3.0, predicted=float(s != 7), best=0.5, multiple=1.0, nearer=1.0) for s in range(1, 8)
    ]
    rmse.write(tmp_path, study, [], found, None)
    (row,) = csv.DictReader((tmp_path / "rmse.csv").open(encoding="utf-8"))
    page = Path(__file__).parents[2] / "docs" / "results" / "rmse.csv"
    assert [*row] == [*csv.DictReader(page.open(encoding="utf-8")).fieldnames]
    assert (row["network"], row["optimizer"]) == ("snn 16 x 256", "momentum, learning rate 0.001")
    assert (row["s = 1"], row["s = 7"]) == ("3.0", "")


def plain_weights(steps):
    """All weights in one vector, before the first and after every update."""
    data = datasets.load("fashion_mnist_small")
    keras.utils.set_random_seed(0)
    model = models.build("snn", data.x_train.shape[1:], data.classes, depth=3, width=8)
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), loss=networks.crossentropy())
    kept = [np.concatenate([np.ravel(each) for each in model.get_weights()])]
    for x, y in training.batches(data, data.x_train.shape[1:], 32, 0).take(steps):
        model.train_on_batch(x, y)
        kept.append(np.concatenate([np.ravel(each) for each in model.get_weights()]))
    return kept


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (("--steps", "3"), "Try at least --steps 4"),
        (("--model", "residual_lstm", "--dataset", "fashion_mnist_small"), "reads words"),
        (("--data-dir", "/nowhere"), "no such directory"),
    ],
)
def test_refusals(main, arguments, match, tmp_path, capsys):
    assert main([*arguments, "--output", str(tmp_path)]) == 2
    assert match in capsys.readouterr().err
    assert not (tmp_path / "summary.json").exists()


def test_optimizers_by_name():
    assert optimizers.build("sgd", 0.1, 0.9).momentum == 0
    assert optimizers.build("nesterov", 0.1, 0.8).nesterov
    assert not optimizers.build("momentum", 0.1, 0.8).nesterov
    kinds = [type(optimizers.build(name, 0.1, 0.9)).__name__ for name in optimizers.ADAPTIVE]
    assert kinds == ["Adam", "AdamW", "RMSprop", "Lion", "Muon"]
    with pytest.raises(ValueError, match="Try one of: sgd"):
        optimizers.build("lamb", 0.1, 0.9)
    assert rmse.parse(["--optimizer", "adam"]).learning_rate == 1e-3
    assert rmse.parse(["--model", "transformer"]).learning_rate == 5e-5


def test_help_teaches(capsys):
    with pytest.raises(SystemExit):
        rmse.main(["--help"])
    said = capsys.readouterr().out
    assert "python experiments/rmse.py --horizons 1 2 3 4 5 6 7" in said
    assert "Figure 8" in said


@pytest.mark.slow
def test_a_loss_that_is_not_finite_ends_the_run_and_keeps_what_there_is(main, tmp_path, capsys):
    assert main([*SMALL, "--steps", "30", "--learning-rate", "1e6", "--output", str(tmp_path)]) == 1
    assert json.loads((tmp_path / "summary.json").read_text())["diverged_at"] <= 30
    assert "Training diverged at step" in capsys.readouterr().out
    assert (tmp_path / "rmse.png").exists()


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", optimizers.NAMES)
def test_every_optimizer(main, tmp_path, optimizer):
    arguments = ("--scheme", "vanilla", "--steps", "60", "--optimizer", optimizer, "--output", str(tmp_path))
    assert main([*SMALL, *arguments, "--learning-rate", "0.001"]) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    factors = [each["factor"] for each in summary["horizons"]]
    if optimizer in ("momentum", "nesterov", "adam", "adamw"):  # those with a memory of earlier gradients
        assert min(factors) > 1
    else:
        assert max(factors) < 1.3


@pytest.mark.slow
def test_the_papers_statement(main, tmp_path):
    """Figure 8: the prediction is nearer for s = 1, 2, 3."""
    assert main(["--width", "256", "--output", str(tmp_path)]) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert all(each["factor"] > 1.2 and each["nearer"] > 0.8 for each in summary["horizons"])
