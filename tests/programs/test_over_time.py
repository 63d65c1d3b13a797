"""Accuracy over simulated seconds: what is asked for, what it comes to, and the figure."""

from __future__ import annotations

import csv
import json

import pytest
from parameters import by_default

from experiments import over_time, table1
from experiments.over_time import ACCURACY, Way, figures
from experiments.progress import write_rows
from experiments.variants import Variant, variant
from plots.over_time import look

TINY = ["--model=snn", "--depth=4", "--width=8", "--steps=8", "--eval-every=4", "--batch-size=16", "--stages=3"]
SCHEMES = ("single", "spectrain/target/M=2", "2bw/1.5/M=2")


@pytest.mark.parametrize("text", ["single", "spectrain/fitted", "spectrain/target/M=2", "2bw/1.5/M=4", "1f1b/M=8"])
def test_variants_are_read_as_they_are_written(text):
    assert str(variant(text)) == text


def test_microbatches_of_what_is_not_split_are_not_said():
    assert str(Variant("single", microbatches=4)) == "single"


@pytest.mark.wide
@pytest.mark.parametrize("seeds", by_default([1, 2], 1))
def test_accuracy_over_seconds(seeds, tmp_path, monkeypatch, capsys):
    """Synchronous schemes have the accuracy of `single`; the pipeline's seconds are fewer at next to no overhead."""
    monkeypatch.setattr(table1, "start_tensorflow", lambda devices: None)
    monkeypatch.setattr(over_time, "start_tensorflow", lambda devices: None)
    schemes = [f"--scheme={each}" for each in SCHEMES]
    assert table1.main([*TINY, *schemes, f"--seeds={seeds}", "--output", str(tmp_path)]) == 0
    capsys.readouterr()
    assert over_time.main([str(tmp_path), "--synchronous=1f1b/M=2", "--overhead-s=0.1"]) == 0
    said = capsys.readouterr().out
    content = json.loads((tmp_path / "over_time.json").read_text())
    ways = {each["label"]: each for each in content["ways"]}
    assert [*ways] == [*SCHEMES, "1f1b/M=2"]
    assert content["seeds"] == seeds
    assert ways["1f1b/M=2"]["values"] == ways["single"]["values"]
    assert {tuple(each["steps"]) for each in ways.values()} == {(4, 8)}
    # with actions of a tenth of a second each, beside which computing is nothing on any machine: 2 on one device; 2
    # stages' worth more of a flush than of full stages
    assert ways["spectrain/target/M=2"]["step_s"] == pytest.approx(0.4, rel=0.3)
    assert ways["1f1b/M=2"]["step_s"] / ways["spectrain/target/M=2"]["step_s"] == pytest.approx(2, rel=0.3)
    assert ["scheme", "MiB", "samples/s"] in [line.split()[:3] for line in said.splitlines()]
    rows = [*csv.DictReader((tmp_path / "over_time.csv").open(encoding="utf-8"))]
    assert [each["scheme"] for each in rows] == [*ways]
    assert float(rows[-1]["samples_per_second"]) == ways["1f1b/M=2"]["samples_per_second"]
    assert (tmp_path / "over_time.png").stat().st_size > 10_000


def test_the_tables_figures_are_kept_as_csv(tmp_path):
    """Of two seeds, and of one that differs from `single` by 0.1 and never comes near it."""
    single = Way("single", 2.0, 2**20, 8.0, [10, 20], [0.5, 0.8], {0: 0.7, 1: 0.9})
    other = Way("spectrain", 0.5, 2**19, 32.0, [10, 20], [0.5, 0.7], {0: 0.6})
    rows = [*csv.DictReader(write_rows(tmp_path / "over_time.csv", figures([single, other], ACCURACY)).open())]
    assert [*rows[0]] == [
        *("scheme", "fullest_bytes", "samples_per_second", "speedup", "accuracy", "half_width"),
        *("difference", "difference_half_width", "reached_s"),
    ]
    assert (rows[0]["speedup"], rows[0]["difference"], float(rows[0]["reached_s"])) == ("1.0", "", 40.0)
    assert (rows[1]["speedup"], rows[1]["half_width"], rows[1]["reached_s"]) == ("4.0", "", "")
    assert float(rows[1]["difference"]) == pytest.approx(-0.1)


def test_runs_without_single_are_refused(tmp_path, capsys):
    assert over_time.main([str(tmp_path)]) == 2
    assert "single among them" in capsys.readouterr().err


def test_lines_have_the_looks_of_the_study_of_staleness():
    assert look("2bw/1.5/M=8") == look("2bw/1.5")
    assert look("1f1b/M=2") != look("1f1b")
