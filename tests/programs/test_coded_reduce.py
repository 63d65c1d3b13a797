"""The experiment on CodedReduce: what is simulated, what is learned, and the command."""

from __future__ import annotations

import csv

import numpy as np
import pytest

from experiments import coded_reduce
from pipetrain.plan.cluster import Link
from pipetrain.schemes.coded_reduce import Tree

LINK = Link(1e9 / 8, 2e-4)


def test_stragglers_that_have_codes_of_repeated_rows():
    assert coded_reduce.borne(4) == [1] and coded_reduce.borne(12) == [1, 2, 3, 5]
    assert max(each for each in coded_reduce.borne(84) if each <= 21) == 20


def test_alpha_beta_and_loads_are_those_of_the_paper():
    cell = coded_reduce.Cell(Tree(4, 3, 0), "exponential", 1.0)
    found = {each.way: each for each in coded_reduce.outcomes(cell, LINK, 4)}
    assert found["coded reduce"].load == pytest.approx(1 / 14) and found["coded reduce"].alpha == 0.25
    assert found["coded reduce"].beta == 84 / (3 * 3)
    assert found["gradient coding"].load == pytest.approx(21 / 84) and found["gradient coding"].beta == 84 / 64
    assert found["ring"].beta == pytest.approx(42.5, rel=0.01) and found["uncoded master"].beta == 1


def test_seconds_are_drawn_as_said():
    for times, mean, least in (("exponential", 1.0, 0.0), ("shifted", 2.0, 1.0)):
        factor = coded_reduce.factors(times, 0)
        drawn = np.array([factor(0) for _ in range(4000)])
        assert drawn.mean() == pytest.approx(mean, abs=0.1) and drawn.min() >= least


@pytest.mark.parametrize("kind", coded_reduce.KINDS)
@pytest.mark.parametrize("tree", [Tree(4, 2, 1), Tree(3, 2, 1)], ids=str)
def test_regressions_learn_from_what_the_tree_decodes(kind, tree):
    found = [*coded_reduce.regression(kind, tree, 400, 20, 10)]
    assert [each.step for each in found] == [*range(11)]
    assert found[-1].loss < 0.8 * found[0].loss
    assert max(each.error for each in found) < 1e-9


def test_the_command_keeps_each_cell(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(coded_reduce, "LEARNED", 10)
    options = ["--tree", "4,1", "--row-us", "10", "--steps", "4", "--output", str(tmp_path)]
    assert coded_reduce.main(options) == 0
    said = capsys.readouterr()
    assert "published, on EC2: up to 27.2x" in said.out and "2/2 4 workers, shifted" in said.err
    rows = [*csv.DictReader((tmp_path / "coded_reduce.csv").open())]
    assert [each["way"] for each in rows[:4]] == ["uncoded master", "ring", "gradient coding", "coded reduce"]
    assert len([*csv.DictReader((tmp_path / "coded_regression.csv").open())]) == 2 * 31
    assert (tmp_path / "coded_reduce.png").exists()
    for wrong in ("4", "5,1", "x,2"):
        with pytest.raises(SystemExit):
            coded_reduce.parse(["--tree", wrong])
    (tmp_path / "file").write_text("")
    assert coded_reduce.main(["--output", str(tmp_path / "file")]) == 2
