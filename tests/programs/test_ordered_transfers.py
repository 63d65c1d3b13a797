"""The papers on the order of transfers: networks, what is computed of them, and the command."""

from __future__ import annotations

import csv

import pytest

from experiments import caramel, ibatch, ordered_transfers, tictac, transfer_networks
from pipetrain.schemes.transfers.plan import Layer, Message, Workload


@pytest.fixture
def small(monkeypatch):
    """Every network is a chain of five layers; TensorFlow does not start."""
    made = Workload.chain([10**6] * 4 + [10**7], [0.01] * 5, [0.02] * 5)
    monkeypatch.setattr(transfer_networks, "_worker", lambda *_: made)
    monkeypatch.setattr(ordered_transfers, "start_tensorflow", lambda devices: None)


def rows_of(path):
    return [*csv.DictReader(path.open())]


@pytest.mark.parametrize("paper", ordered_transfers.PAPERS)
def test_a_paper_is_computed_and_kept(small, paper, tmp_path, capsys):
    options = ["--paper", paper, "--network", "googlenet", "--nodes", "4", "--output", str(tmp_path)]
    assert ordered_transfers.main(options) == 0
    said = capsys.readouterr()
    assert "googlenet" in said.out and "published" in said.out and f"{paper}: googlenet" in said.err
    assert {each["network"] for each in rows_of(tmp_path / f"{paper}.csv")} == {"googlenet"}
    assert (tmp_path / f"{paper}.png").exists() and (tmp_path / f"{paper}.svg").exists()


def test_what_has_come_is_kept(small, tmp_path, monkeypatch):
    outcomes = tictac.outcomes

    def stopped(cell):
        if cell.mode == "inference":
            raise KeyboardInterrupt
        return outcomes(cell)

    monkeypatch.setattr(tictac, "outcomes", stopped)
    with pytest.raises(KeyboardInterrupt):
        ordered_transfers.main(["--paper", "tictac", "--network", "vgg16", "--nodes", "2", "--output", str(tmp_path)])
    assert [each["order"] for each in rows_of(tmp_path / "tictac.csv")] == ["none", "tic", "tac", "random"]


def test_arguments_that_cannot_be_used_are_refused(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert ordered_transfers.main(["--output", str(tmp_path / "file")]) == 2
    with pytest.raises(SystemExit):
        ordered_transfers.main(["--nodes", "1"])
    assert "only ibatch" in capsys.readouterr().err


def test_inference_pulls_weights_and_sends_no_gradients(small):
    train, infer = (tictac.outcomes(tictac.Cell("vgg16", mode, 2))[0] for mode in tictac.MODES)
    assert train.computing_ms == pytest.approx(150) and infer.computing_ms == pytest.approx(50)
    pull_ms = 1e3 * 14e6 / 1.25e9
    assert infer.step_ms == pytest.approx(pull_ms + 50, abs=1.5)  # all weights, then the forward
    assert train.step_ms == pytest.approx(pull_ms + 150 + 1e3 * 1e6 / 1.25e9, abs=3)
    *_, ordered, randomly = tictac.outcomes(tictac.Cell("vgg16", "inference", 2))
    assert ordered.step_ms < randomly.step_ms < infer.step_ms and ordered.overlap > randomly.overlap > infer.overlap
    assert randomly.waiting > ordered.waiting == 0.0


def test_the_branch_that_makes_most_bytes_runs_backward_first():
    """Two branches that meet: of the one that is run last forward, the gradients come first."""
    layers = [Layer((0,), 1, 1), Layer((1,), 1, 1, (0,)), Layer((2,), 1, 1, (0,)), Layer((3,), 1, 1, (1, 2))]
    made = Workload(tuple(layers), (1, 9, 5, 1), Message(0.0, 1.0))
    found = caramel.reordered(made)
    assert [layer.variables for layer in found.layers] == [(0,), (2,), (1,), (3,)]
    assert [layer.after for layer in found.layers] == [(), (0,), (0,), (1, 2)]
    steps = caramel.ablation(made)
    assert [*steps] == [*caramel.WAYS]
    assert steps["reordered"] <= steps["next-forward"] <= steps["chunks"] <= steps["packs"] <= steps["after"]


def test_the_parts_of_a_step_add_up(small):
    setting = ibatch.Setting(5.0, 1.0, 1.0, 1)
    for each in ibatch.steps("curve", "vgg19", 8, setting, sparse=False):
        assert each.step_ms == pytest.approx(each.computing_ms + each.startups_ms + each.transfers_ms)
        assert each.computing_ms == pytest.approx(150)
    one, layers, *_, exact = ibatch.steps("curve", "vgg19", 8, setting, sparse=False)
    assert (one.pulls, layers.pulls) == (1, 5) and exact.step_ms <= min(one.step_ms, layers.step_ms)
    alone = ibatch.steps("curve", "vgg19", 1, setting, sparse=False)
    assert all(each.step_ms == pytest.approx(150) for each in alone)
    sparse = ibatch.steps("curve", "vgg19", 8, setting, sparse=True)
    assert sparse[0].transfers_ms < one.transfers_ms


def test_the_search_comes_near_where_it_can(small):
    """Its setting is no further from what is published than the usual one."""
    found = ibatch.nearest("vgg19", 72)
    gained = [ibatch.gains("vgg19", 72, each) for each in (found.setting, ibatch.USUAL)]
    far = [sum(abs(a / b - 1) for a, b in zip(each, ibatch.PUBLISHED.values())) for each in gained]
    assert far[0] <= far[1] + 0.1


@pytest.mark.wide
def test_networks_have_the_published_numbers_of_parameters_and_their_graph():
    """GoogLeNet: 6.99 million without auxiliary classifiers; AlexNet of one tower: 61.1 million."""
    for name, parameters in (("googlenet", 6.99e6), ("alexnet", 61.1e6)):
        made = transfer_networks.workload(name, transfer_networks.TESLA_K80, 1, Message())
        assert sum(made.sizes_bytes) / 4 == pytest.approx(parameters, rel=2e-3)
    joins = [reads for reads in transfer_networks.after("googlenet") if len(reads) > 1]
    assert [len(reads) for reads in joins] == [4] * 9
