"""The bytes that two ways to train send, as a command whose results are kept network by network."""

from __future__ import annotations

import csv
import io
import json

import keras
import pytest

import models
from experiments import progress, traffic


@pytest.fixture
def networks(monkeypatch):
    """Two networks of four dense layers; TensorFlow has started."""
    wide = lambda *_, **__: keras.Sequential([keras.Input((8,)), *(keras.layers.Dense(64) for _ in range(4))])  # noqa: E731
    monkeypatch.setattr(models, "build", wide)
    monkeypatch.setattr(traffic, "start_tensorflow", lambda devices: None)


def run(output, *models_):
    names = [part for name in models_ for part in ("--model", name)]
    return traffic.main([*names, "--devices", "2", "--batch-size", "32", "--output", str(output)])


@pytest.mark.wide
def test_what_is_sent_is_counted(networks, tmp_path, capsys):
    """Of n devices 2 (n - 1) times the weights, or twice a cut's 32 rows of 64 numbers."""
    assert run(tmp_path, "snn") == 0
    (found,) = json.loads((tmp_path / "traffic.json").read_text())["networks"]
    assert found["data_parallel_bytes"] == 2 * 4 * (64 * 9 + 3 * 64 * 65)
    assert found["pipeline_bytes"] == 2 * 4 * 32 * 64
    (row,) = csv.DictReader((tmp_path / "traffic.csv").open())
    assert (row["model"], float(row["ratio"])) == ("snn", found["ratio"])
    assert "The paper: 13.4 times less" in capsys.readouterr().out
    assert (tmp_path / "traffic.png").exists()


@pytest.mark.wide
def test_networks_are_kept_as_they_come(networks, tmp_path, monkeypatch):
    measure = traffic.measure

    def stop(name, *arguments):
        if name == "vgg16":
            raise KeyboardInterrupt
        return measure(name, *arguments)

    monkeypatch.setattr(traffic, "measure", stop)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, "snn", "vgg16")
    assert [each["model"] for each in json.loads((tmp_path / "traffic.json").read_text())["networks"]] == ["snn"]


def test_a_folder_that_cannot_be_written_is_refused(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert run(tmp_path / "file", "snn") == 2
    assert "Cannot write there" in capsys.readouterr().err


def test_what_is_done_is_shown(monkeypatch, capsys):
    assert [*progress.tracked([1, 2], ["one", "two"])] == [1, 2]
    assert capsys.readouterr().err == "1/2 one\n2/2 two\n"
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr("sys.stderr", terminal)
    assert [*progress.tracked([1, 2], ["one", "two"])] == [1, 2]
    bars = [" ".join(each.split()) for each in terminal.getvalue().split("\r")]
    shown = ("0/2 00:00<? one", f"{12 * '#'} 1/2 00:00<00:00 two", f"{24 * '#'} 2/2 00:00<00:00")
    assert [bar for bar in dict.fromkeys(bars) if bar in shown] == [*shown]
    assert terminal.getvalue().endswith("\n")


def test_rows_are_written_as_csv(tmp_path):
    progress.write_rows(tmp_path / "rows.csv", [{"a": 1, "b": "x,y"}, {"a": 2.5, "b": ""}])
    assert (tmp_path / "rows.csv").read_text() == 'a,b\n1,"x,y"\n2.5,\n'
