"""What grids send, by Equation 8 of arXiv 1712.04432 and message by message, and the grid that sends the least."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipetrain.plan.cluster import Cluster, Level, Link
from pipetrain.plan.grid_cost import (
    PUBLISHED,
    SENT,
    GridNetwork,
    best_division,
    best_grid,
    layer_seconds,
    seconds,
    traffic,
)
from pipetrain.plan.profile import BlockProfile, Profile
from pipetrain.schemes.grid import Grid
from pipetrain.schemes.transfers.plan import Message
from pipetrain.simulation.comparison import compare
from pipetrain.simulation.every_way import Chooser, choose
from pipetrain.simulation.grid import chosen_grid, simulate_grid
from pipetrain.trace.idle import idle, packs

LINK = Link(12.5e6, 1e-3)
CLUSTER = Cluster((Level(LINK, contention="port"),))
GRIDS = ((1, 4), (4, 1), (2, 2), (1, 3), (2, 1), (3, 2))


def profile(network, rows=64):
    """Blocks whose computing takes no time to speak of."""
    blocks = [BlockProfile(each.name, 1e-9, 2e-9, 4 * rows * each.outputs, 4 * each.weights) for each in network.layers]
    return Profile("made up", rows, tuple(blocks), network=network)


def test_a_layer_s_term_is_that_of_equation_8():
    network, rows, (a, b) = GridNetwork.chain((16, 32)), 64, (1e-3, 4 / 12.5e6)
    (layer,) = network.layers
    gathering = a * 1 + b * rows / 3 * 0.5 * 32
    summing = a * 2 + b * 2 / 3 * 32 * 17 / 2
    for exchanges, is_first in ((PUBLISHED, False), (SENT, False), (PUBLISHED, True)):
        expected = (1 if is_first else exchanges) * gathering + 2 * summing
        assert layer_seconds(layer, Grid(2, 3), rows, LINK, exchanges, is_first) == pytest.approx(expected)
    pure = 2 * (a * math.ceil(math.log2(6)) + b * 5 / 6 * 32 * 17)
    assert layer_seconds(layer, Grid(1, 6), rows, LINK) == pytest.approx(pure)


@pytest.mark.parametrize("grid", GRIDS)
def test_what_a_chain_sends_is_the_sum_of_equation_8_s_terms(grid):
    """Without latencies, with one exchange of the gradients of inputs, and the last outputs by rows."""
    network, link, rows, outputs = GridNetwork.chain((16, 24, 12, 36)), Link(1.0), 48, grid[0]
    every = [layer.name for layer in network.layers]
    terms = [layer_seconds(layer, Grid(*grid), rows, link, SENT) for layer in network.layers]
    last = 2 * 4 * rows / grid[1] * (outputs - 1) / outputs * 36
    expected = sum(terms) - last + last / outputs
    sent = traffic(network, Grid(*grid), every, rows)
    assert sent.total == pytest.approx(expected * math.prod(grid))
    assert sent.gathered == sent.scattered


@given(
    st.lists(st.sampled_from((4, 16, 64, 256)), min_size=2, max_size=5),
    st.sampled_from((8, 64, 512)),
    st.sampled_from((2, 4, 6)),
    st.sampled_from((0.0, 1e-4)),
)
@settings(max_examples=60)
def test_the_best_grid_is_no_slower_than_any_that_divides_all_or_none(widths, rows, devices, latency_s):
    network, link = GridNetwork.chain(widths), Link(1e6, latency_s)
    best = best_grid(network, devices, rows, link)
    taken_s = seconds(network, best, best.layers, rows, link)
    assert best.devices == devices
    for outputs in (each for each in range(1, devices + 1) if devices % each == 0):
        grid = Grid(outputs, devices // outputs)
        wide = [layer.name for layer in network.layers if layer.wide >= outputs]
        assert taken_s <= seconds(network, grid, wide, rows, link) * (1 + 1e-9)


@given(
    st.lists(st.sampled_from((4, 16, 64, 256)), min_size=2, max_size=5),
    st.sampled_from((8, 64, 512)),
    st.sampled_from(((2, 1), (2, 2), (4, 1))),
)
@settings(max_examples=60)
def test_the_layers_that_a_grid_divides_are_those_that_no_single_change_betters(widths, rows, sides):
    network, link, grid = GridNetwork.chain(widths), Link(1e6), Grid(*sides)
    chosen = {*best_division(network, grid, rows, link)}
    taken_s = seconds(network, grid, chosen, rows, link)
    for layer in network.layers:
        if layer.wide >= grid.outputs:
            assert taken_s <= seconds(network, grid, chosen ^ {layer.name}, rows, link)


def test_convolutions_are_divided_by_rows_and_wide_dense_layers_by_outputs():
    """Of a network like AlexNet: few weights and many outputs before, many weights and few outputs behind."""
    chain = GridNetwork.chain((3 * 4096, 64 * 1024, 192 * 256, 4096, 4096, 1000))
    weights = (1792, 110784, *(layer.weights for layer in chain.layers[2:]))
    layers = tuple(layer._replace(weights=each) for layer, each in zip(chain.layers, weights))
    network = GridNetwork(layers, chain.elements, chain.inputs, chain.outputs, chain.trained)
    best = best_grid(network, 8, 256, Link(1e9, 1e-5))
    assert best.outputs > 1
    assert not {"dense_0", "dense_1"} & {*best.layers} and {"dense_2", "dense_3"} <= {*best.layers}


def test_where_messages_take_no_time_nothing_is_divided():
    assert best_grid(GridNetwork.chain((16, 32, 8)), 4, 64, Link(math.inf)) == Grid(1, 4, ())


@pytest.mark.parametrize("grid", GRIDS)
def test_a_simulated_step_sends_what_is_counted(grid):
    network, rows = GridNetwork.chain((16, 25, 12, 7)), 67
    trace = simulate_grid(profile(network, rows), math.prod(grid), CLUSTER, grid, minibatches=2)
    every = [layer.name for layer in network.layers]
    expected = traffic(network, Grid(*grid), every, rows)
    for op, size in zip("FBR", expected):
        mine = (trace.transfers.op == op) & (trace.transfers.microbatch == 1)
        assert trace.transfers.size_bytes[mine].sum() == pytest.approx(size, abs=40)  # messages are whole bytes


@pytest.mark.parametrize("grid", [(1, 4), (2, 2), (4, 1)])
def test_a_simulated_step_takes_as_long_as_its_port_is_busy_at_least(grid):
    network = GridNetwork.chain((16, 512, 512, 512, 10))
    trace = simulate_grid(profile(network), 4, CLUSTER, grid)
    chosen = chosen_grid(profile(network), 4, CLUSTER, grid)
    sent = traffic(network, chosen, chosen.layers, 64).total / 4
    assert trace.step_s >= sent / LINK.bandwidth_bytes_per_s
    assert trace.step_s < 2 * sent / LINK.bandwidth_bytes_per_s + 0.1
    assert len(packs(trace)) == len(trace.transfers) > 0
    assert all(each.total_s <= trace.duration_s for each in idle(trace).values())
    assert {*trace.spans.op} == {"F", "B"} and {*trace.spans.replica} == {0, 1, 2, 3}


def test_grids_are_compared_and_advised():
    network = GridNetwork.chain((16, 512, 512, 512, 512, 10))
    made = profile(network, 256)
    ways = {way.name: way for way in choose(made, 4, CLUSTER).ways}
    assert ways["grid"].step_s < ways["all-reduce"].step_s
    assert ways["grid"].memory_bytes < ways["parameter-server"].memory_bytes < ways["all-reduce"].memory_bytes
    asked, _ = Chooser(made, 4, CLUSTER).of(Grid(4, 1))
    assert asked.is_set and asked.arguments["scheme"] == Grid(4, 1) and asked.step_s >= ways["grid"].step_s
    comparison = compare(made, 4, ["grid"], CLUSTER, grid=(2, 2), minibatches=4)
    assert "grid" in str(comparison)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((4, CLUSTER, (2, 1)), "grid=.2, 1., 4 devices. Try 2 devices"),
        ((100, CLUSTER, None), "100 devices, batch_size=64"),
    ],
)
def test_what_cannot_be_simulated_is_refused(arguments, problem):
    with pytest.raises(ValueError, match=problem):
        simulate_grid(profile(GridNetwork.chain((16, 32))), *arguments)


def test_a_profile_keeps_its_network_as_text():
    made = profile(GridNetwork.chain((16, 32, 8)))
    assert Profile.from_json(made.to_json()) == made
    with pytest.raises(ValueError, match="without a network"):
        simulate_grid(Profile("old", 8, made.blocks), 2)


@pytest.mark.parametrize(("outputs", "rows"), itertools.product((1, 2, 3), (1, 2, 3)))
def test_every_row_and_every_channel_is_one_device_s(outputs, rows):
    grid = Grid(outputs, rows)
    assert sorted(n for part in range(rows) for n in grid.group(part)) == list(range(grid.devices))
    assert sorted(n for rank in range(outputs) for n in grid.batch_group(rank)) == list(range(grid.devices))
    assert [n for each in grid.channels(17) for n in each] == list(range(17))
    assert sum(grid.counts(23)) == 23


@pytest.mark.parametrize("grid", GRIDS)
def test_all_devices_together_compute_every_row_and_every_output_once(grid):
    network, rows = GridNetwork.chain((16, 25, 12, 7)), 67
    blocks = [BlockProfile(each.name, 1.0, 2.0, 8, 8) for each in network.layers]
    slow = Profile("made up", rows, tuple(blocks), network=network)
    spans = simulate_grid(slow, math.prod(grid), CLUSTER, grid, minibatches=2).spans
    for op, block_s in (("F", 1), ("B", 2)):
        mine = spans.op == op
        computed_s = (spans.end_s[mine] - spans.start_s[mine]).sum()
        assert computed_s == pytest.approx(2 * len(blocks) * block_s)


def test_a_slice_takes_what_the_profile_says():
    """Half of the outputs takes 0.7 of the whole, a quarter 0.5; a third lies between, an eighth goes on so."""
    block = BlockProfile("dense", 1.0, 2.0, 8, 8, slices=((4, 0.5, 1.0), (2, 0.7, 1.4)))
    assert block.slice_s(1) == (1.0, 2.0) and block.slice_s(4) == pytest.approx((0.5, 1.0))
    assert block.slice_s(2) == pytest.approx((0.7, 1.4))
    assert block.slice_s(3)[0] == pytest.approx(0.7 * (0.5 / 0.7) ** (math.log(1.5) / math.log(2)))
    assert block.slice_s(8)[0] == pytest.approx(0.5 * 0.5 / 0.7)
    assert block.longer(2.0, 1.0).slice_s(2) == pytest.approx((1.4, 2.8))
    assert BlockProfile("dense", 1.0, 2.0, 8, 8).slice_s(8) == (1 / 8, 1 / 4)


def test_a_device_of_a_grid_takes_its_slice_and_what_pieces_and_messages_cost():
    """Two layers of a second each way, whose halves take 0.8: F and B of each, and 0.01 beside each of the four."""
    network = GridNetwork.chain((16, 32, 32))
    blocks = [BlockProfile(each.name, 1.0, 1.0, 8, 8, slices=((2, 0.8, 0.8),)) for each in network.layers]
    made, link = Profile("made up", 64, tuple(blocks), network=network), Cluster((Level(Link(math.inf)),))
    assert simulate_grid(made, 2, link, (2, 1)).step_s == pytest.approx(4 * 0.8)
    assert simulate_grid(made, 2, link, (2, 1), piece_s=0.01).step_s == pytest.approx(4 * 0.81)
    with_work = simulate_grid(made, 2, replace(link, message_work=Message(1e-3)), (2, 1))
    # both gather the first layer's outputs, and get the gradients; of the last outputs each gets its rows
    sent = len(packs(with_work)) / 4 / 2
    assert sent == 4
    assert 4 * 0.8 + 2e-3 <= with_work.step_s <= 4 * 0.8 + 2 * sent * 1e-3
    assert Profile.from_json(made.to_json()) == made


def test_each_variable_s_gradients_are_a_message():
    network = GridNetwork.chain((16, 32))
    trace = simulate_grid(profile(network), 2, CLUSTER, (1, 2), minibatches=2)
    mine = (trace.transfers.op == "R") & (trace.transfers.microbatch == 1)
    assert sorted(trace.transfers.size_bytes[mine]) == [4 * 32, 4 * 32, 4 * 16 * 32, 4 * 16 * 32]


def test_networks_of_earlier_profiles_are_read():
    """Whose layers have no variables."""
    made = profile(GridNetwork.chain((16, 32)))
    data = json.loads(made.to_json())
    data["network"]["layers"] = [layer[:6] for layer in data["network"]["layers"]]
    (layer,) = Profile.from_json(json.dumps(data)).network.layers
    assert layer.variables == () and layer.messages == (layer.weights,)
