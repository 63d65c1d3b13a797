"""The study of language models: Muon of attentions' kernels, what is asked for, and the table."""

from __future__ import annotations

import contextlib
import csv

import keras
import numpy as np
import pytest

import pipetrain
from experiments import datasets, language_quality, optimizers, staleness

TINY = ["--depth=2", "--width=8", "--steps=4", "--every=2", "--batch-size=4", "--stages=2", "--seeds=1"]
WORDS, CLASSES = 5, 12


def orthogonal(x):
    """Five of Muon's iterations, of a matrix or the transpose of one that is longer than wide."""
    if x.shape[0] > x.shape[1]:
        return orthogonal(x.T).T
    x = x / (np.linalg.norm(x) + 1e-7)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x


@pytest.mark.parametrize(
    ("shape", "matrix"),
    [((8, 2, 4), (8, 8)), ((2, 4, 8), (8, 8)), ((8, 1, 8), (8, 8)), ((1, 8, 8), (8, 8)), ((6, 2, 4), (6, 8))],
)
def test_muon_joins_the_heads_of_attentions(shape, matrix):
    """Two updates: ``m <- 0.95*m + g``, and a step of ``0.2 * sqrt(longer side) * orthogonal(g + 0.95*m)``."""
    rng = np.random.default_rng(0)
    start, *gradients = (rng.normal(size=shape).astype("float32") for _ in range(3))
    variable = keras.Variable(start)
    optimizer = pipetrain.AttentiveMuon(0.01, weight_decay=None, adam_weight_decay=None)
    expected, m = start.reshape(matrix), np.zeros(matrix)
    for gradient in gradients:
        optimizer.apply([keras.ops.convert_to_tensor(gradient)], [variable])
        m = 0.95 * m + gradient.reshape(matrix)
        expected = expected - 0.01 * 0.2 * max(matrix) ** 0.5 * orthogonal(gradient.reshape(matrix) + 0.95 * m)
    np.testing.assert_allclose(keras.ops.convert_to_numpy(variable), expected.reshape(shape), rtol=1e-3, atol=1e-5)


def test_muon_of_other_weights_is_keras_own():
    """Matrices as in Keras' Muon, biases by AdamW; it is known by its name."""
    found = []
    for make in (pipetrain.AttentiveMuon, keras.optimizers.Muon):
        kernel, bias = keras.Variable(np.eye(4, 6, dtype="float32")), keras.Variable(np.ones(6, "float32"))
        optimizer = make(0.01)
        optimizer.apply([keras.ops.ones((4, 6)) + kernel, keras.ops.ones((6,))], [kernel, bias])
        found.append([keras.ops.convert_to_numpy(each) for each in (kernel, bias)])
    for mine, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5)
    assert type(optimizers.build(optimizers.ATTENTIVE, 0.1, 0.9)) is pipetrain.AttentiveMuon


def test_a_run_for_every_seed_optimizer_rate_and_scheme():
    options = language_quality.parse(["--learning-rate=0.01", "--learning-rate=0.001", "--seeds=2"])
    runs = language_quality.planned(options)
    assert len({*map(repr, runs)}) == len(runs) == 2 * 2 * 2 * 4
    assert [each.label for each in runs[:4]] == [*language_quality.SCHEMES]


def test_the_table_has_differences_seed_by_seed():
    rows = [
        {
            "optimizer": "adam",
            "learning_rate": 0.001,
            "scheme": scheme,
            "seed": seed,
            "minibatch": 2,
            "validation_loss": x,
        }
        for scheme, losses in (("single", (5.0, 6.0)), ("vanilla", (5.5, 6.7)))
        for seed, x in enumerate(losses)
    ]
    runs = [
        each
        for each in language_quality.planned(language_quality.parse(["--optimizer=adam", "--seeds=2"]))
        if each.label in ("single", "vanilla")
    ]
    single, vanilla = language_quality.report(rows, runs).splitlines()[-2:]
    assert single.split()[-1] == "5.500"
    assert "6.100 (+0.600" in vanilla
    single, vanilla = language_quality.report(rows[:3], runs).splitlines()[-2:]
    assert "5.500 (+0.500), 1 of 2 diverged" in vanilla
    assert language_quality.report(rows[:2], runs).splitlines()[-1].split()[-1] == "diverged"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--steps=2", "--every=3"], "--steps 2, --every 3. Try --every 2"),
        (["--batch-size=4", "--scheme=spectrain/target/M=8"], "Try at most 4 microbatches"),
    ],
)
def test_what_cannot_be_is_said_before_training(arguments, said, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(language_quality, "start_tensorflow", lambda devices: None)
    with contextlib.suppress(SystemExit):
        assert language_quality.main([*arguments, f"--output={tmp_path}"]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_help_teaches(capsys):
    with pytest.raises(SystemExit):
        language_quality.main(["--help"])
    assert "python experiments/language_quality.py --data-dir DIR" in capsys.readouterr().out


def words(*arguments):
    """Sentences in which a word follows itself plus one."""
    x = (np.arange(40)[:, None] + np.arange(WORDS + 1)) % CLASSES
    return datasets.Dataset("imdb_reviews", CLASSES, x[:, :-1], x[:, 1:], x[:8, :-1], x[:8, 1:])


@pytest.mark.wide
def test_the_study_small(tmp_path, monkeypatch, capsys):
    """One command; the same command again trains nothing."""
    monkeypatch.setattr(language_quality, "start_tensorflow", lambda devices: None)
    monkeypatch.setattr(datasets, "load", words)
    command = [*TINY, "--scheme=single", "--scheme=spectrain/target/M=1", f"--output={tmp_path}"]
    assert language_quality.main([*command, f"--optimizer={optimizers.ATTENTIVE}"]) == 0
    with (tmp_path / language_quality.TABLE).open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["scheme"], row["minibatch"]) for row in rows[:2]] == [("single", "2"), ("single", "4")]
    assert len(rows) == 4
    assert (tmp_path / language_quality.PICTURE).stat().st_size > 5_000
    capsys.readouterr()
    monkeypatch.setattr(datasets, "load", None)
    assert language_quality.main([*command, f"--optimizer={optimizers.ATTENTIVE}"]) == 0
    assert language_quality.main([*command, f"--optimizer={optimizers.ATTENTIVE}", "--steps=6"]) == 2
    assert "steps 4 and 6" in capsys.readouterr().err


@pytest.mark.wide
def test_gpt2_in_the_study_of_staleness(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(staleness, "start_tensorflow", lambda devices: None)
    monkeypatch.setattr(datasets, "load", words)
    command = ["--model=gpt2", "--depth=2", "--width=8", "--steps=3", "--batch-size=4", "--stages=2", "--seeds=1"]
    command += ["--policy=single", "--policy=spectrain", "--learning-rate=0.01", "--jobs=1", f"--output={tmp_path}"]
    assert staleness.main(command) == 0
    assert "diverged" not in capsys.readouterr().out
