"""Accuracy over simulated seconds: what is asked for, what it comes to, and the figure."""

from __future__ import annotations

import json

import pytest
from parameters import by_default

from experiments import over_time, table1
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
    assert (tmp_path / "over_time.png").stat().st_size > 10_000


def test_runs_without_single_are_refused(tmp_path, capsys):
    assert over_time.main([str(tmp_path)]) == 2
    assert "single among them" in capsys.readouterr().err


def test_lines_have_the_looks_of_the_study_of_staleness():
    assert look("2bw/1.5/M=8") == look("2bw/1.5")
    assert look("1f1b/M=2") != look("1f1b")
