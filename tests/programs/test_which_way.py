"""Which way to train wins where, as a command whose rows are kept as they come."""

from __future__ import annotations

import csv
from pathlib import Path

import keras
import pytest

import models
from experiments import which_way
from experiments.which_way import Cell

PAGE = Path(__file__).parents[2] / "docs" / "results" / "which-way.csv"


@pytest.fixture
def networks(monkeypatch):
    """Networks of four dense layers; TensorFlow has started."""
    wide = lambda *_, **__: keras.Sequential([keras.Input((8,)), *(keras.layers.Dense(64) for _ in range(4))])  # noqa: E731
    monkeypatch.setattr(models, "build", wide)
    monkeypatch.setattr(which_way, "start_tensorflow", lambda devices: None)


def rows_of(path):
    with path.open(encoding="utf-8", newline="") as file:
        return [*csv.DictReader(file)]


def test_devices_of_one_host_are_planned_for_once():
    """They do not use the network between hosts."""
    assert which_way.cells(["snn"], (4, 8), (10, 100)) == [
        Cell("snn", 4, None),
        Cell("snn", 8, 10),
        Cell("snn", 8, 100),
    ]
    assert [*map(str, which_way.cells(["snn"], (4, 8), (10,)))] == ["snn, 4 GPUs", "snn, 8 GPUs, 10 Gb/s"]


@pytest.mark.wide
def test_rows_are_those_of_the_page_and_kept_as_they_come(networks, tmp_path, monkeypatch, capsys):
    options = ["--model", "snn", "--model", "vgg16", "--devices", "2", "--output", str(tmp_path)]
    assert which_way.main(options) == 0
    said = capsys.readouterr()
    assert "2/2 vgg16, 2 GPUs" in said.err
    rows = rows_of(tmp_path / "which_way.csv")
    assert [*rows[0]] == [*rows_of(PAGE)[0]]
    assert [(each["network"], each["GPUs"], each["Gb/s"]) for each in rows] == [("snn", "2", ""), ("vgg16", "2", "")]
    assert all(each["taken"].endswith("x") and each["taken"] in said.out for each in rows)
    assert (tmp_path / "which_way.png").exists() and "which_way.png" in said.out
    profile_of = which_way.profile_of

    def stop(name):
        if name == "vgg16":
            raise KeyboardInterrupt
        return profile_of(name)

    (tmp_path / "which_way.csv").unlink()
    monkeypatch.setattr(which_way, "profile_of", stop)
    with pytest.raises(KeyboardInterrupt):
        which_way.main(options)
    assert rows_of(tmp_path / "which_way.csv") == rows[:1]


def test_a_folder_that_cannot_be_written_is_refused(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert which_way.main(["--output", str(tmp_path / "file")]) == 2
    assert "Cannot write there" in capsys.readouterr().err
