"""The paper's platform: counted work, the roofline, the cluster file, and the experiment."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import keras
import pytest
from parameters import rarely

import models
from experiments import speedup
from pipetrain.compute.profiling.operation_count import analytic, operation_counts
from pipetrain.plan.cluster import Cluster
from pipetrain.plan.roofline import (
    TESLA_P40,
    Device,
    Product,
    Work,
    block_profile,
    efficiency,
    product_seconds,
    roofline,
)

PLATFORM = Path(__file__).parents[2] / "experiments" / "platforms" / "tesla_p40.json"
# 4 multiprocessors, tiles of 10 x 10: 1000 operations a second and 100 bytes a second, a launch is a second.
SMALL = Device("small", 1000.0, 100.0, 4, tile=10, compute_part=1.0, bandwidth_part=1.0, launch_s=1.0)

GTX_1080 = Device("GeForce GTX 1080", 8.87e12, 320e9, 20)


def test_full_waves_are_efficient():
    assert efficiency(Product(20, 5, 20, 0), SMALL) == 1.0


def test_tiles_at_the_edge_are_partly_empty():
    assert efficiency(Product(15, 5, 20, 0), SMALL) == 0.75


def test_the_last_wave_is_partly_empty():
    """Five tiles take two waves of four."""
    assert efficiency(Product(50, 5, 10, 0), SMALL) == 0.625
    assert efficiency(Product(10, 8, 10, 0), SMALL) == 0.25
    assert efficiency(Product(10, 8, 10, 0), SMALL, splits=4) == 1.0


@pytest.mark.parametrize("rows, seconds", [(20, 4.0 + 1), (10, 4.0 + 1), (40, 8.0 + 1)])
def test_half_a_wave_takes_as_long_as_a_whole_one(rows, seconds):
    """2 * 20 * 5 * 20 operations at 1000 a second: 4 s, and no less for half the rows."""
    assert product_seconds(Product(rows, 5, 20, 0), SMALL) == pytest.approx(seconds)


def test_a_product_may_be_bound_by_what_it_moves():
    assert product_seconds(Product(20, 5, 20, 700), SMALL) == pytest.approx(7.0 + 1)
    assert product_seconds(Product(20, 5, 20, 700, times=3), SMALL) == pytest.approx(24.0)


def test_long_sums_are_split_where_that_is_faster():
    """One tile keeps one multiprocessor of four: 819.2 s; four parts of it keep all; 3200 bytes more hide behind it."""
    assert product_seconds(Product(10, 1024, 10, 0), SMALL) == pytest.approx(204.8 + 1)
    assert product_seconds(Product(10, 1024, 10, 0), SMALL._replace(bandwidth_bytes_per_s=10.0)) > 205.8


def test_backward_is_twice_forward():
    forward = Product(32, 20, 60, 7, together=3, times=5)
    left, right = forward.backward()
    assert left.flops == right.flops == forward.flops == 2 * 32 * 20 * 60 * 15
    assert (left.rows, left.inner, left.columns, left.times) == (32, 60, 20, 5)
    assert (right.rows, right.inner, right.columns, right.times) == (20, 160, 60, 1)


def test_a_slice_of_a_layer_reads_all_of_its_inputs():
    """(20 x 5) by (5 x 40): a quarter of the columns is (5 x 10), a quarter of the results, all of the inputs."""
    whole = Product(20, 5, 40, 4 * (20 * 5 + 5 * 40 + 20 * 40))
    assert whole.slice(4) == Product(20, 5, 10, 4 * (20 * 5 + 5 * 10 + 20 * 10))
    work = Work("dense", (whole,), moved_bytes=3200, kernels=1, weight_bytes=800)
    block = block_profile(work, SMALL, (4, 16))
    alone = block_profile(work.slice(4), SMALL)
    assert block.slice_s(4) == pytest.approx((alone.forward_s, alone.backward_s))
    assert block.slice_s(16)[0] > block.forward_s / 16  # launches, and tiles that are partly empty
    assert not block_profile(Work("relu", moved_bytes=400), SMALL, (4,)).slices


def test_blocks_without_products_go_by_their_bytes():
    block = block_profile(Work("relu", moved_bytes=400, kernels=2, weight_bytes=20), SMALL)
    assert (block.forward_s, block.backward_s, block.update_s) == (4.0 + 2, 8.0 + 4, 1.0 + 1)
    assert block_profile(Work("none", kernels=0), SMALL).update_s == 0


def test_more_of_anything_is_never_slower():
    work = Work("dense", (Product(100, 300, 200, 5000),), 3000, 2, 6000)
    base = roofline("one", 100, [work], SMALL).total_s
    better = {"flops_per_s": 2000.0, "bandwidth_bytes_per_s": 200.0, "processors": 8, "launch_s": 0.5}
    for name, value in better.items():
        one = SMALL._replace(**{name: value})
        if name == "processors":  # as many operations in all, by more of them
            one = one._replace(flops_per_s=2 * SMALL.flops_per_s)
        assert roofline("one", 100, [work], one).total_s < base


@pytest.mark.parametrize(
    "name, shape, multiplications, measured_s",
    [
        ("vgg16", (224, 224, 3), 15.5e9, 0.23255),
        *rarely(("resnet152", (224, 224, 3), 11.6e9, 0.3289), ("inception_v4", (299, 299, 3), 12.3e9, None)),
    ],
)
def test_counts_are_the_published_ones(name, shape, multiplications, measured_s, monkeypatch):
    """Of one image, forward; and seconds for 16, forward and backward, as measured on a card that nothing is fit to.

    Measured: jcjohnson/cnn-benchmarks, GeForce GTX 1080 with cuDNN 5.
    """
    zeros = lambda self, shape, dtype=None: keras.ops.zeros(shape, dtype)  # noqa: E731
    monkeypatch.setattr(keras.initializers.VarianceScaling, "__call__", zeros)  # drawing them takes seconds
    model = models.build(name, shape, 1000)
    assert sum(work.flops for work in operation_counts(model, 1)) / 2 == pytest.approx(multiplications, rel=0.02)
    if measured_s:
        assert analytic(model, 16, GTX_1080).total_s == pytest.approx(measured_s, rel=0.25)


def test_recurrent_and_attention_layers_are_counted():
    words = keras.Input((6, 8))
    lstm = keras.Model(words, keras.layers.LSTM(5, return_sequences=True)(words))
    assert sum(work.flops for work in operation_counts(lstm, 3)) == 2 * 3 * 6 * (8 + 5) * 20
    attention = keras.Model(words, keras.layers.MultiHeadAttention(2, 4)(words, words))
    projections, scores = 4 * 2 * 3 * 6 * 8 * 8, 2 * 2 * 3 * 2 * 6 * 4 * 6
    assert sum(work.flops for work in operation_counts(attention, 3)) == projections + scores


def test_bytes_are_those_of_a_measured_profile():
    inputs = keras.Input((8, 8, 3))
    x = keras.layers.Conv2D(4, 3, padding="same", name="conv")(inputs)
    y = keras.layers.BatchNormalization(name="norm")(x)
    x = keras.layers.Add(name="add")([x, y])
    model = keras.Model(inputs, keras.layers.Dense(5, name="logits")(keras.layers.Flatten(name="flat")(x)))
    blocks = {block.name: block for block in analytic(model, 2, TESLA_P40).blocks}
    assert blocks["conv"].weight_bytes == 4 * (27 * 4 + 4)
    assert blocks["norm"].weight_bytes == 4 * 8  # moving statistics are not trained
    assert blocks["norm"].output_bytes == 2 * blocks["conv"].output_bytes  # the skip crosses too
    assert blocks["add"].output_bytes == 4 * 2 * 8 * 8 * 4
    assert blocks["flat"].activation_bytes == 0
    assert all(block.forward_s < block.backward_s for block in blocks.values() if block.forward_s)


def test_the_platform_is_four_cards_behind_a_switch():
    cluster = Cluster.load(PLATFORM)
    assert cluster.memory_bytes == 24 * 10**9
    assert [level.contention for level in cluster.levels] == ["port"]
    assert cluster.link(0, 3).bandwidth_bytes_per_s == 12e9


def linear(seconds, update_s=0.0):
    """A profile whose seconds do not go down with the rows."""
    works = [Work(f"dense_{n}", weight_bytes=8 * 10**6, output_bytes=4000, activation_bytes=4000) for n in range(4)]
    base = roofline("four", 128, works, TESLA_P40)
    times = {"forward_s": seconds, "backward_s": 2 * seconds, "update_s": update_s}
    blocks = tuple(replace(block, **times) for block in base.blocks)
    return lambda rows: replace(base, batch_size=rows, blocks=blocks, loss_s=0.0, metric_s=0.0)


def by_way(profiled, devices):
    cluster = Cluster.load(PLATFORM)
    found = speedup.outcomes("four", profiled, devices, 128, cluster, 100)
    assert [each.way for each in found] == list(speedup.WAYS)
    return {each.way: each for each in found}


def test_ways_to_train_by_hand():
    """Four equal blocks of 3 ms, 32 MB of weights: a ring of four takes 2 * 3/4 * 32 MB / (12 GB/s) = 4 ms."""
    found = by_way(linear(1e-3), 4)
    assert found["single"].step_s == pytest.approx(12e-3)
    assert found["pipeline"].against_single == pytest.approx(4, rel=0.01)
    assert found["model-parallel"].against_single == pytest.approx(1, rel=0.02)
    ring = found["data-parallel (ring)"]  # as many seconds for a quarter of the rows
    assert (ring.compute_s, ring.transfer_s) == pytest.approx((12e-3, 4e-3), rel=0.02)
    assert found["data-parallel (overlapped)"].step_s == pytest.approx(12e-3, rel=0.02)
    assert found["data-parallel (server)"].step_s == pytest.approx(12e-3 + 2 * 3 * 32e6 / 12e9, rel=0.02)


def test_a_slow_first_block_has_several_devices_where_stages_may():
    """9, 3 and 3 ms: with a device each 9 ms, with two for the first 4.5 ms and half the rows' sums of 8 MB."""
    base = linear(1e-3)

    def profiled(rows):
        first, second, third, _ = base(rows).blocks
        first = replace(first, forward_s=3e-3, backward_s=6e-3)
        return replace(base(rows), blocks=(first, second, third))

    found = by_way(profiled, 3)
    assert found["pipeline"].step_s == pytest.approx(9e-3, rel=0.01)
    assert (found["pipeline"].replicas, found["single"].replicas) == ((1, 1, 1), (1,))
    hybrid = found["pipeline (hybrid)"]
    assert hybrid.replicas == found["spectrain (hybrid)"].replicas == (2, 1)
    assert hybrid.step_s == pytest.approx(6e-3, rel=0.01)  # of the second and the third block


def test_prediction_costs_where_weights_are_predicted():
    """Of two stages the first predicts for its forward, the second for neither: its gradients are never late."""
    found = by_way(linear(1e-3, 1e-3), 2)
    assert found["pipeline"].step_s == pytest.approx(8e-3, rel=0.003)
    assert found["spectrain"].step_s == pytest.approx(8e-3 + 0.6 * 2e-3, rel=0.003)


def test_statements_agree_within_a_quarter():
    statement = speedup.Statement("says", 1.0, {"ring": 1.24, "server": 1.26, "overlapped": 0.76})
    assert [statement.agrees(way) for way in statement.ours] == [True, False, True]


def test_the_paper_averages_are_no_arithmetic_means():
    """+98.5% over six networks, +310.3% over three of them: the others would have to lose more than all."""
    assert (6 * 0.985 - 3 * 3.103) / 3 < -1
    others = (1.985**6 / 4.103**3) ** (1 / 3)
    assert others == pytest.approx(0.96, abs=0.005)


@pytest.fixture
def small(monkeypatch):
    """Networks of six dense layers; TensorFlow has started."""
    build = lambda *_, **__: keras.Sequential([keras.Input((40,)), *(keras.layers.Dense(30) for _ in range(6))])  # noqa: E731
    monkeypatch.setattr(models, "build", build)
    monkeypatch.setattr(speedup, "start_tensorflow", lambda devices: None)


def rows_of(output):
    with (output / "speedup.csv").open(encoding="utf-8", newline="") as file:
        return [*csv.DictReader(file)]


def test_networks_are_kept_as_they_come(small, tmp_path, monkeypatch):
    """With the columns of the page's file."""
    profiles = speedup.profiles

    def stop(name, device):
        if name == "vgg16":
            raise KeyboardInterrupt
        return profiles(name, device)

    monkeypatch.setattr(speedup, "profiles", stop)
    given = ["--model", "snn", "--model", "vgg16", "--devices", "2", "--minibatches", "4", "--output", str(tmp_path)]
    with pytest.raises(KeyboardInterrupt):
        speedup.main(given)
    rows = rows_of(tmp_path)
    assert [(each["model"], each["way"]) for each in rows] == [("snn", way) for way in speedup.WAYS]
    page = Path(__file__).parents[2] / "docs" / "results" / "platform.csv"
    assert [*rows[0]] == [*csv.DictReader(page.open(encoding="utf-8")).fieldnames]


def test_a_run_of_the_experiment(small, tmp_path, capsys):
    assert speedup.main(["--model", "snn", "--devices", "3", "--minibatches", "20", "--output", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "Throughput on 3 devices" in printed and "FCN/RNN" in printed
    data = json.loads((tmp_path / "speedup.json").read_text())
    assert len(data["outcomes"]) == len(speedup.WAYS)
    rows = [(each["way"], float(each["step_s"])) for each in rows_of(tmp_path)]
    assert rows == [(each["way"], each["step_s"]) for each in data["outcomes"]]
    assert all(
        (tmp_path / f"{name}.{kind}").exists() for name in ("throughput", "breakdown") for kind in ("png", "svg")
    )
    assert speedup.main(["--cluster", str(tmp_path / "none.json")]) == 2
