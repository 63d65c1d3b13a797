"""How networks scale by counting: grids of processes, and nodes by balance equations; both as commands."""

from __future__ import annotations

import csv

import pytest

from experiments import balance_scaling, grid_scaling
from pipetrain.plan.cluster import Link
from pipetrain.schemes.grid import Grid


def test_weights_and_operations_of_the_networks_are_the_published_ones():
    """In millions: AlexNet 61.0 weights and 724 multiplications, VGG-A 132.9, 7,610, OverFeat 145.9, 2,800."""
    for name, weights, multiplications in (
        ("alexnet", 61.0e6, 0.724e9),
        ("vgg_a", 132.9e6, 7.61e9),
        ("overfeat_fast", 145.92e6, 2.80e9),
    ):
        layers = balance_scaling.NETWORKS[name]
        assert sum(each.weights for each in layers) == pytest.approx(weights, rel=1e-3)
        assert sum(each.flops for each in layers) / 2 == pytest.approx(multiplications, rel=2e-3)


def test_a_step_by_hand(monkeypatch):
    """10 to 20 to 6 units, 4 nodes, 8 rows: blocks of outputs alone, or by rows where a minibatch is large."""
    dense = balance_scaling.LayerShape.dense
    monkeypatch.setitem(balance_scaling.NETWORKS, "two", (dense("a", 8, 16), dense("b", 16, 4)))
    monkeypatch.setattr(balance_scaling, "PEAK_FLOPS_PER_S", 1000.0)
    few = balance_scaling.outcome("two", 4, 4, 0.5, 1.0, system=10.0)  # 100 bytes a second
    assert few.divided == "a 1x4 b 4x1"
    assert few.computing_s == (2 * 2 * 8 * 16 + 3 * 2 * 16 * 4) * 4 / 4 / 500
    assert (few.gradients_s, few.activations_s) == (0, 4 * 8 * (8 + 4) / 100)
    assert few.step_s == few.computing_s + few.activations_s
    many = balance_scaling.outcome("two", 4, 4000, 0.5, 0.5, system=10.0)
    assert (many.divided, many.activations_s) == ("", 0)
    assert many.gradients_s == 4 * 1.5 * (16 * 9 + 4 * 17) / 100
    assert many.step_s == many.computing_s


def test_the_balance_command(tmp_path, capsys):
    assert balance_scaling.main(["--nodes", "64", "--output", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "vgg_a             64   256     53x" in said and "overfeat_fast     64   256     42x" in said
    assert "conv3..conv5 2 fc6..fc8 258" in said  # the source's
    rows = [*csv.DictReader((tmp_path / "balance_scaling.csv").open())]
    assert [(each["network"], each["nodes"]) for each in rows] == [
        (name, nodes) for name in balance_scaling.NETWORKS for nodes in ("1", "64")
    ]
    assert (tmp_path / "balance_scaling.png").exists()
    with pytest.raises(SystemExit):
        balance_scaling.parse(["--overlap", "1.5"])
    (tmp_path / "file").write_text("")
    assert balance_scaling.main(["--output", str(tmp_path / "file")]) == 2


def test_equation_8_by_hand():
    """Two layers of 64 units on 2x2 processes: the second layer has three exchanges, the first one."""
    profile = grid_scaling.profile_of(64, 400, 2, (2,))
    link = Link(1e6, 1e-3)
    gathering = 1e-3 + 4 / 1e6 * 200 * 0.5 * 64
    summing = 1e-3 + 4 / 1e6 * 0.5 * 64 * 65 / 2
    computing_s = sum(sum(block.slice_s(2)) / 2 + block.update_s / 2 for block in profile.trained)
    expected = 4 * gathering + 2 * 2 * summing + computing_s + 4 * grid_scaling.PIECE_S
    assert grid_scaling.equation_8_s(profile, Grid(2, 2), link) == pytest.approx(expected)
    alone = grid_scaling.equation_8_s(profile, Grid(1, 1), link)
    assert alone == pytest.approx(profile.total_s + sum(b.update_s for b in profile.blocks) + 4 * grid_scaling.PIECE_S)


def test_ways_are_told_by_their_grids():
    assert [grid_scaling.way_of(grid) for grid in grid_scaling.grids(4)] == ["batch", "integrated", "model"]


def test_the_grid_command_keeps_each_cell(tmp_path, capsys, monkeypatch):
    options = ["--processes", "1", "--processes", "4", "--output", str(tmp_path)]
    assert grid_scaling.main(["--width", "32", "--width", "64", *options]) == 0
    said = capsys.readouterr()
    assert "Beside the source" in said.out and "4/4 width 64, 4 processes" in said.err
    rows = [*csv.DictReader((tmp_path / "grid_scaling.csv").open())]
    assert len(rows) == 2 * 2 * (1 + 3)
    assert all(float(each["speedup"]) == pytest.approx(1, rel=0.01) for each in rows if each["processes"] == "1")
    assert (tmp_path / "grid_scaling.png").exists()
    simulated = grid_scaling.simulated

    def stopped(cell, options):
        if cell.processes == 4:
            raise KeyboardInterrupt
        return simulated(cell, options)

    monkeypatch.setattr(grid_scaling, "simulated", stopped)
    with pytest.raises(KeyboardInterrupt):
        grid_scaling.main(["--width", "32", *options])
    assert len([*csv.DictReader((tmp_path / "grid_scaling.csv").open())]) == 2
    assert grid_scaling.main(["--bandwidth", "fast", *options]) == 2


def test_numbers_of_the_source_are_found_in_the_sweep():
    outcomes = [
        grid_scaling.Outcome("equation-8", 1024, 32, way, 1, 1, 1.0, speedup)
        for way, speedup in (("batch", 5.0), ("model", 2.0), ("integrated", 6.0))
    ]
    assert grid_scaling.number_of(outcomes, "equation-8", "integrated, of batch") == 1.2
    table = grid_scaling.compared(outcomes)
    assert "5.00 yes" in table and "2.00 no" in table and "1.20 yes" in table


@pytest.mark.slow  # 40 s of other processes
def test_grids_of_two_processes_are_measured(tmp_path, capsys):
    options = ["--measure", "--processes", "2", "--width", "64", "--depth", "2", "--output", str(tmp_path)]
    assert grid_scaling.main(options) == 0
    assert "Median error of 2 grids" in capsys.readouterr().out
    rows = [*csv.DictReader((tmp_path / "grid_measured.csv").open())]
    assert [(each["outputs"], each["rows"]) for each in rows] == [("1", "2"), ("2", "1")]
