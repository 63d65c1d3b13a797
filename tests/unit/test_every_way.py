"""Every way to train: what is predicted of each, which one is taken under a memory limit, and that all agree on it."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace

import pytest
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st
from parameters import by_default, widely

from pipetrain.plan.choice import BASELINE, MARGIN, Choice, Way
from pipetrain.plan.cluster import Cluster, Level, Link
from pipetrain.plan.memory import Training
from pipetrain.plan.partition import NoPlan, partition
from pipetrain.plan.profile import BlockProfile, Profile, Seconds, divided
from pipetrain.schemes.dry_run import figures, replay
from pipetrain.schemes.options import (
    AllReduce,
    CodedReduce,
    Interleaved,
    OneFOneB,
    ParameterServer,
    SpecTrain,
    options_of,
    scheduled,
)
from pipetrain.schemes.schedules import orders
from pipetrain.schemes.table import SERVING, TRANSFERRING, UNCUT, scheme
from pipetrain.schemes.text_form import scheme_of, written
from pipetrain.schemes.transfers.orders import orders as orders_of_transfers
from pipetrain.schemes.transfers.plan import Message
from pipetrain.simulation import costs
from pipetrain.simulation.comparison import compare
from pipetrain.simulation.costs import acting
from pipetrain.simulation.every_way import LOCAL, ROUNDS, SENT, STALE, Chooser, PipelineLayout, choose
from pipetrain.simulation.simulator import simulate

UNIT_S = 2.0**-10
KEPT_BYTES = 2**16  # of one minibatch, for each block
BLOCKS, DEVICES, ROWS = 24, 4, 64
FAST = Cluster((Level(Link(bandwidth_bytes_per_s=1e15)),))
SET = Training("1f1b", microbatches=4)
MIB = 2**20
COMMON = ("microbatches", "replicas", "cuts")


def chain(blocks=BLOCKS, rows=ROWS, weight_bytes=0, microbatches=1, times=1.0):
    """Blocks whose backward takes twice their forward."""
    each = [
        BlockProfile(f"b{n}", times * UNIT_S, 2 * times * UNIT_S, 0, weight_bytes, KEPT_BYTES) for n in range(blocks)
    ]
    return Profile("chain", rows, tuple(each), microbatches=microbatches)


@pytest.fixture
def free_calls(monkeypatch):
    """Actions take nothing beside their computing."""
    monkeypatch.setattr(costs, "ACTION_S", 0.0)


def pipelines(profile=None, cluster=FAST, training=SET, devices=DEVICES, pieces=None):
    """Those of one device a stage, by scheme and stages a device."""
    ways = Chooser(profile or chain(), devices, cluster, training, pieces).choice().ways
    return {(way.name.removesuffix("-3"), chunks(way)): way for way in ways if way.kind == "pipeline"}


def full(way):
    return scheme(scheduled(way.arguments["scheme"]))


def chunks(way):
    return full(way).schedule.chunks


def orders_of(way, microbatches=None):
    return orders(full(way).schedule.order, DEVICES, 1, microbatches or way.arguments["microbatches"])


@pytest.mark.wide
def test_rates_and_memory_are_those_of_the_orders(free_calls):
    """Equal stages: a minibatch takes as many units as the order, and the device holds as many activations."""
    found = pipelines()
    assert [*found] == [
        ("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("looped-bfs", 2), ("looped-bfs", 3),
        ("zb-h1", 1), ("zb-h2", 1), ("zb-v", 2), ("v-half", 2), ("v-min", 2),
    ]  # fmt: skip
    for way in found.values():
        worth, microbatches = figures(orders_of(way)), way.arguments["microbatches"]
        part = BLOCKS / (DEVICES * chunks(way)) / microbatches  # of a minibatch's work and activations
        assert way.step_s == pytest.approx(worth.makespan * part * UNIT_S, rel=1e-9)
        assert way.memory_bytes == max(worth.peak_held) * part * KEPT_BYTES
        assert way.fits and way.is_exact


@pytest.mark.wide
def test_the_microbatches_are_the_fewest_of_the_fastest(free_calls):
    """More take no longer here, until they are so many that a bubble is not worth another one per cent."""
    for way in pipelines().values():
        rates = []
        for rounds in ROUNDS:
            rates.append(1 / (figures(orders_of(way, rounds * DEVICES)).makespan / (rounds * DEVICES)))
        best = next(n for n, rate in enumerate(rates) if rate * 1.01 >= max(rates))
        assert way.arguments["microbatches"] == ROUNDS[best] * DEVICES


@pytest.mark.wide
def test_microbatches_that_take_time_are_fewer():
    """Eight microbatches take twice as long as the minibatch whole: then 4 are as good as it gets."""
    pieces = chain(microbatches=8, times=2.0)
    for way in pipelines(pieces=pieces).values():
        assert way.arguments["microbatches"] <= 8
    assert {way.arguments["microbatches"] for way in pipelines(chain(rows=8)).values()} <= {4, 8}  # as there are rows


@given(st.floats(1.0, 4.0), st.floats(0.2, 4.0), st.integers(2, 16), st.integers(1, 64))
def test_times_in_between_go_with_the_microbatches(first, last, measured, microbatches):
    whole, pieces = chain(times=first), chain(times=last, microbatches=measured)
    found = divided(whole, pieces, microbatches)
    each_more = (last - first) / (measured - 1)
    expected = first + each_more * (microbatches - 1)
    if last < first:
        expected = max(expected, last)
    assert found.microbatches == microbatches
    for n, block in enumerate(found.blocks):
        assert block.forward_s == pytest.approx(expected * UNIT_S)
        assert block.backward_s == pytest.approx(2 * expected * UNIT_S)
        assert block.activation_bytes == whole.blocks[n].activation_bytes


def test_measured_times_stay_and_compiled_ones_are_estimated_too():
    with_xla = [replace(block, compiled=Seconds(UNIT_S, UNIT_S, 0.0)) for block in chain().blocks]
    whole, pieces = replace(chain(), blocks=tuple(with_xla)), chain(microbatches=4, times=3.0)
    assert divided(whole, None, 8).blocks == whole.blocks  # nothing is known of microbatches
    assert divided(whole, pieces, 1) == whole
    assert divided(whole, pieces, 4).blocks == pieces.blocks  # which XLA does not compile there
    with_xla = [replace(block, compiled=Seconds(2 * UNIT_S, UNIT_S, 0.0)) for block in pieces.blocks]
    pieces = replace(pieces, blocks=tuple(with_xla))
    assert divided(whole, pieces, 7).blocks[0].compiled == Seconds(3 * UNIT_S, UNIT_S, 0.0)
    assert Profile.from_json(pieces.to_json()) == pieces


def way(kind, name, step_s, memory_bytes=100, fits=True, **others):
    return Way(kind, {"scheme": name, **others}, 4, step_s, memory_bytes, fits)


def test_the_simplest_within_three_per_cent_is_taken_and_every_other_has_a_reason():
    single, copies = way("single", "single", 4.0), way("data parallelism", "all-reduce", 1.02)
    pipeline = way("pipeline", "zb-h2", 1.0, microbatches=8)
    fat, slow = way("pipeline", "gpipe", 0.5, fits=False, microbatches=4), way("pipeline", "1f1b", 1.5, microbatches=4)
    ahead = way("pipeline", SpecTrain(), 0.4)._replace(is_exact=False, is_set=True)
    mirrored = way(BASELINE, "data-parallel", 0.9)
    choice = Choice(64, [single, copies, pipeline, fat, slow, ahead, mirrored], limit_bytes=200)
    assert choice.taken == copies
    rows = dict(re.findall(r"^(\S+?),? .*?(?: {2,}([a-z ]+))?$", str(choice).split("\n\n")[0], re.M))
    assert rows | {"way": ""} == {
        "single": "slower", "all-reduce": "", "zb-h2": "less simple", "gpipe": "too much memory", "1f1b": "slower",
        "spectrain": "not exact", "data-parallel": "to compare", "way": "",
    } | {name: reason for name, reason in rows.items() if name.startswith("-")}  # fmt: skip
    assert "Recommended: scheme='all-reduce'." in str(choice) and "(as set)" in str(choice)
    assert "gpipe, M=4 would be 2.04x as fast, and does not fit" in choice.reason
    assert Choice(64, [single, ahead], allows_inexact=True).taken == ahead
    assert "Taken: scheme='single'" in str(Choice(64, [single]))
    assert max(map(len, str(choice).split("\n\n")[0].splitlines())) <= 80


def test_none_fits():
    leanest, other = way("pipeline", "1f1b", 1.0, 12 * MIB, False), way("single", "single", 1.0, 16 * MIB, False)
    with pytest.raises(NoPlan, match=r"memory of 10\.00 MiB each; the leanest way, 1f1b, needs 12\.00"):
        Choice(64, [other, leanest], limit_bytes=10 * MIB)


@pytest.mark.wide
@pytest.mark.parametrize("activations", by_default([2, 3, 4, 6, 8, 40], 2, 6, 40))
def test_the_limit_decides(activations):
    """A limit of so many activations of a whole device, for one of 32 microbatches, or of fewer larger ones."""
    limit = activations * KEPT_BYTES * BLOCKS // DEVICES // 32
    unlimited = pipelines()
    try:
        found = pipelines(cluster=replace(FAST, memory_bytes=limit))
    except NoPlan:
        assert activations < 3
        return
    for name, each in found.items():
        assert each.fits == (each.memory_bytes <= limit)
        if unlimited[name].memory_bytes <= limit:
            assert each == unlimited[name]


@pytest.mark.wide
def test_only_another_schedule_fits():
    """A device holds three quarters of what its layers keep of a minibatch; with gpipe it would be all of it."""
    small, limit = chain(rows=4, weight_bytes=16), 3 * KEPT_BYTES * BLOCKS // DEVICES // 4 + 5 * 16 * BLOCKS
    chooser = Chooser(small, DEVICES, replace(FAST, memory_bytes=limit), SET.under("gpipe"))
    as_set, cut = chooser.of("gpipe")
    choice = chooser.choice((as_set, cut))
    fitting = {each.name for each in choice.ways if each.fits}
    assert {"v-half", "v-min"} <= fitting
    assert fitting.isdisjoint({"gpipe", "looped-bfs", "zb-h2", "zb-v", "single", "all-reduce"})
    assert choice.taken.name in fitting and not as_set.fits
    with pytest.raises(NoPlan, match="No way to train fits"):
        choose(small, DEVICES, replace(FAST, memory_bytes=1024), SET)


def test_schedules_of_more_stages_than_there_are_layers_are_left_out():
    choice = choose(chain(blocks=9), DEVICES, FAST)
    assert choice.left_out == [
        f"{name} with 3 stages a device" for name in ("interleaved", "looped-bfs")
    ] and "too few layers for" in str(choice)
    choice = choose(chain(blocks=3), DEVICES, FAST)
    assert {each.name for each in choice.ways if each.kind == "pipeline"} == {"gpipe", "1f1b", "zb-h1", "zb-h2"}
    as_set, cut = Chooser(chain(blocks=3), DEVICES, FAST).of("zb-v", 4)
    assert as_set.arguments["microbatches"] == 4 and (len(cut.stages), cut.devices) == (2, 1)
    assert [each.name for each in choose(chain(), 1, FAST).ways] == ["single"]


FIVE = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v")
UNEVEN = ((7, 2, 4), *widely((13, 4, 4), (13, 3, 1), (24, 4, 16)))  # blocks, devices, microbatches


def uneven(blocks, rows=ROWS):
    """Blocks of which every third takes four times as long, and which send what they make."""
    each = [
        BlockProfile(f"b{n}", f * UNIT_S, 2 * f * UNIT_S, 10**4, 10**3, KEPT_BYTES, UNIT_S / 4)
        for n, f in enumerate((4, 1, 1)[n % 3] for n in range(blocks))
    ]
    return Profile("uneven", rows, tuple(each))


@pytest.mark.parametrize(("blocks", "devices", "microbatches"), UNEVEN)
@pytest.mark.parametrize("name", by_default(FIVE, "1f1b", wide=FIVE))
@pytest.mark.parametrize("processors", [pytest.param(2, marks=pytest.mark.wide), math.inf])
def test_the_ways_take_what_the_simulator_says(blocks, devices, microbatches, name, processors):
    """To 1e-6, over forty minibatches, each of which fills and drains the pipeline; on few processors too."""
    hosts = Cluster((Level(Link(1e8, 1e-5)),), processors=processors)
    as_set, cut = Chooser(uneven(blocks), devices, hosts, Training(name, microbatches=microbatches)).of(name)
    assert as_set.step_s == cut.step_s == pytest.approx(simulate(cut, name, acting(hosts), 40).step_s, rel=1e-6)
    assert "about" in str(cut)


def test_asynchronous_ways_take_what_their_slowest_stage_takes():
    as_set, cut = Chooser(uneven(13), 4, FAST).of("spectrain")
    assert cut.simulated_s is None and "at most" in str(cut) and as_set.step_s == cut.slowest_s
    assert not as_set.is_exact


@pytest.mark.parametrize(("devices", "processors"), [(4, math.inf), (8, 1.0)])
def test_every_synchronous_step_takes_a_call_longer_and_messages_take_of_processors(devices, processors):
    plain = replace(FAST, processors=processors)
    found, unsimulated = [], []
    for each in (plain, replace(plain, call_s=UNIT_S), replace(plain, message_work=Message(UNIT_S, UNIT_S / 2**16))):
        chosen = Chooser(chain(8, weight_bytes=2**16), devices, each, SET, allow="staleness")
        found.append({str(way): way for way in chosen.choice().ways})
        unsimulated.append(partition(chain(8), 4, each, training=SET).step_s)
    before, called, worked = found
    assert {*before} == {*called}
    assert {"single", "all-reduce", "coded-reduce", "spectrain", "1f1b"} <= {way.name for way in before.values()}
    for label, way in called.items():
        expected_s = before[label].step_s + (0 if way.name == "spectrain" else UNIT_S)
        assert way.step_s == pytest.approx(expected_s, rel=1e-6), label
    assert unsimulated[1] == pytest.approx(unsimulated[0] + UNIT_S)
    assert worked["single"].step_s == before["single"].step_s
    for name in ("all-reduce", "parameter-server"):
        before_s, with_work_s = (
            min(way.step_s for way in ways.values() if way.name == name) for ways in (before, worked)
        )
        assert with_work_s >= before_s + UNIT_S, name


def test_a_synchronous_pipeline_waits_for_what_the_program_takes_of_the_device_of_which_it_takes_most():
    plain, worked = FAST, replace(FAST, caller_work_s=(0.0, UNIT_S, 0.5 * UNIT_S))
    for name, more_s in (("1f1b", UNIT_S), ("spectrain", 0.0)):
        before, after = (partition(chain(8), 4, each, training=Training(name)) for each in (plain, worked))
        assert after.step_s == pytest.approx(before.step_s + more_s)
    before, after = (
        partition(chain(8), 4, each, training=Training("1f1b", microbatches=4)) for each in (plain, worked)
    )
    ends_s = [simulate(cut, "1f1b", each, 40).step_s for cut, each in ((before, plain), (after, worked))]
    assert ends_s[1] == pytest.approx(ends_s[0] + UNIT_S, rel=1e-6)
    alone_s = [partition(chain(8), 1, each, training=Training("1f1b")).step_s for each in (plain, worked)]
    assert alone_s[0] == alone_s[1]  # the others' cores have nothing else to do


@pytest.mark.wide
def test_the_ways_with_a_schedule_of_a_file(tmp_path):
    for name, stages in (("zb-h1", 4), ("zb-v", 8)):
        path = tmp_path / f"{name}.csv"
        path.write_text(written(replay(orders(scheme(name).schedule.order, 4, 1, 6))), encoding="utf-8")
        (of_file, cut), (own, _) = (Chooser(chain(), DEVICES, FAST).of(each, 6) for each in (scheme_of(path), name))
        assert (len(cut.stages), cut.devices) == (stages, DEVICES)
        assert (of_file.step_s, of_file.memory_bytes) == (own.step_s, own.memory_bytes)


def test_a_layout_is_kept():
    ends, replicas = (5, BLOCKS), (2, 1)
    choice = choose(uneven(BLOCKS), 3, FAST, layout=PipelineLayout(replicas, ends))
    assert choice.cut.replicas == replicas and choice.cut.cuts == ("b4",)
    assert {each.name for each in choice.ways} == {"gpipe", "1f1b", "zb-h1", "zb-h2", "single"}
    assert re.search("single .* to compare", str(choice))
    fixed = choose(uneven(BLOCKS), 3, FAST, layout=PipelineLayout(replicas, None, 6))
    assert {each.arguments["microbatches"] for each in fixed.ways if each.is_pipeline} == {6}
    one = choose(uneven(BLOCKS), 3, FAST, layout=PipelineLayout((1,)))
    assert [(each.name, each.kind) for each in one.ways] == [("1f1b", "pipeline"), ("single", BASELINE)]


@st.composite
def situations(draw):
    """A profile, devices, how they are joined, and a limit of their memory."""
    seconds, sizes = st.floats(1e-4, 1e-2), st.integers(0, 4 * MIB)
    blocks = tuple(
        BlockProfile(f"b{n}", draw(seconds), draw(seconds), draw(sizes), draw(sizes), draw(sizes), draw(seconds) / 10)
        for n in range(draw(st.integers(1, 8)))
    )
    link = Level(Link(10 ** draw(st.floats(6, 10)), draw(st.just(0.0) | st.floats(1e-6, 1e-3))))
    limit = draw(st.none() | st.integers(MIB // 4, 64 * MIB))
    cluster = Cluster((link,), memory_bytes=limit, processors=draw(st.sampled_from([2, math.inf])))
    return Profile("random", draw(st.integers(4, 64)), blocks, spread=0.02), draw(st.integers(1, 4)), cluster


@given(situations(), st.sampled_from([0, 1, 2]), st.sampled_from(["1f1b", "spectrain", "single", "all-reduce", "zb-v"]))
@settings(max_examples=15, phases=(Phase.explicit, Phase.reuse, Phase.generate))  # shrinking takes long
def test_explain_plan_auto_and_simulate_name_the_same_way_rate_and_memory(situation, slots, scheme_set):
    profile, devices, cluster = situation
    training = Training("1f1b", slots=slots, microbatches=2)
    try:
        auto = choose(profile, devices, cluster, training)
    except NoPlan:
        assume(False)
    chooser = Chooser(profile, devices, cluster, training)
    explained = chooser.choice(chooser.of(scheme_set if len(profile.blocks) > 1 else "1f1b"))
    assert explained.taken.arguments == auto.taken.arguments
    assert (explained.taken.step_s, explained.taken.memory_bytes) == (auto.taken.step_s, auto.taken.memory_bytes)
    for each in auto.ways:
        count = each.arguments.get("microbatches", 1)
        own, cut = chooser.of(each.arguments["scheme"], count)
        if each.is_pipeline:  # one that has replicas may be faster than one without, and the other way round
            alike = [other for other in auto.ways if _alike(other, each)]
            if all(other.kind != own.kind for other in alike):
                continue  # of which other numbers of microbatches are compared
            best = min(alike, key=lambda other: (not other.fits, other.step_s))
            assert (best.step_s, best.memory_bytes) == (pytest.approx(own.step_s), own.memory_bytes)
            if own.fits and count > 1:
                trace = simulate(cut, scheduled(each.arguments["scheme"]), acting(cluster), 3, microbatches=count)
                assert trace.step_s == pytest.approx(own.step_s)
        else:
            assert (own.step_s, own.memory_bytes, own.fits) == (each.step_s, each.memory_bytes, each.fits)
    simulated = [each for each in auto.ways if each.name in UNCUT and each.name != "data-parallel"]
    found = compare(profile, devices, [each.name for each in simulated], cluster, training, minibatches=8)
    for each in simulated:
        assert (each.name in found.traces) == each.fits
        if each.fits:
            assert found.traces[each.name].step_s == pytest.approx(each.step_s, rel=1e-3)
    best = min(each.known_s for each in auto.ways if each.fits and each.kind != BASELINE)
    assert auto.taken.step_s <= MARGIN * best


def _alike(one, other):
    return one.is_pipeline and all(
        one.arguments.get(name) == other.arguments.get(name) for name in ("scheme", "microbatches")
    )


def test_a_scheme_that_is_an_object_is_set():
    chooser = Chooser(chain(), DEVICES, FAST)
    as_set = chooser.of(Interleaved(chunks=3), 4)
    assert str(as_set[0]) == "interleaved, chunks 3, M=4"
    assert [str(each) for each in chooser.choice(as_set).ways if each.is_set] == ["interleaved, chunks 3, M=4"]
    ahead, _ = chooser.of(SpecTrain(horizon="target"), 2)
    assert str(ahead) == "spectrain, horizon target, M=2"


def test_ways_that_send_less_are_taken_only_where_they_are_allowed_and_gain():
    sizes = {"weight_bytes": 4 * MIB, "output_bytes": 64 * MIB}  # no pipeline sends less than an all-reduce
    heavy = replace(uneven(8), blocks=tuple(replace(block, **sizes) for block in uneven(8).blocks))
    slow = Cluster((Level(Link(3e8, 1e-4)),))
    exact = choose(heavy, 4, slow)
    assert all(way.is_exact for way in exact.ways) and exact.taken.is_exact
    less = choose(heavy, 4, slow, allow="compression, local")
    assert less.taken.quality and less.taken.quality in " ".join(str(less).split())
    kinds = {(way.told.get("compression"), way.told.get("synchrony")) for way in less.ways if not way.is_exact}
    assert kinds == {*itertools.product((None, *SENT), (None, LOCAL))} - {(None, None)}
    assert not less.taken.is_exact and less.taken.step_s < exact.taken.step_s
    assert {way.told.get("compression") for way in choose(heavy, 4, slow, allow=("local",)).ways} == {None}
    stale = [way for way in choose(heavy, 4, slow, allow="gossip, stale").ways if not way.is_exact]
    assert {(way.told.get("topology"), way.told.get("synchrony")) for way in stale} == {
        *(("gossip", None), (None, STALE))  # but not together
    }
    neighbours = [way for way in choose(heavy, 4, slow, allow="gossip, local").ways if not way.is_exact]
    assert {(way.told.get("topology"), way.told.get("synchrony")) for way in neighbours} == {
        *((topology, synchrony) for topology in (None, "gossip") for synchrony in (None, LOCAL))
    } - {(None, None)}
    assert choose(chain(), 4, FAST, allow=("compression", "local")).taken.is_exact  # where nothing is to be gained
    ahead = choose(heavy, 4, slow, allow=("staleness",)), choose(heavy, 4, slow, staleness="predicted")
    assert len({tuple(map(str, each.ways)) for each in ahead}) == 1
    with pytest.raises(ValueError, match="Unknown names"):
        choose(heavy, 4, slow, allow="compresion")


def test_a_trial_is_by_the_order_of_the_prediction():
    """All orders are tried once, when the way that is taken trains."""
    sizes = {"weight_bytes": 4 * MIB}
    heavy = replace(uneven(8), blocks=tuple(replace(block, **sizes) for block in uneven(8).blocks))
    slow = Cluster((Level(Link(3e8, 1e-4)),))
    for way in choose(heavy, 4, slow, allow="compression, local, gossip").ways:
        if way.name in TRANSFERRING:
            assert way.order in orders_of_transfers(way.name == SERVING) and way.predicted["scheme"].order == way.order
            assert options_of(way.arguments["scheme"]).order == "auto"
        else:
            assert not way.order and way.predicted is way.arguments


def test_pipelines_whose_cuts_are_crossed_by_less_are_taken_only_where_that_is_allowed():
    sizes = {"weight_bytes": 64 * MIB, "output_bytes": MIB}
    wide = replace(uneven(8), blocks=tuple(replace(block, **sizes) for block in uneven(8).blocks))
    slow = Cluster((Level(Link(3e7, 1e-4)),))
    taken = choose(wide, 4, slow, allow="compression").taken
    assert (taken.name, taken.told["compression"], taken.is_exact) == ("1f1b", "int8", False)
    assert choose(wide, 4, slow).taken.is_exact
    ahead = choose(wide, 4, slow, allow="compression,staleness").ways
    assert {each.told.get("compression") for each in ahead if each.name == "spectrain"} == {None, "int8"}
    chooser = Chooser(wide, 4, slow, Training(OneFOneB(compression="int8"), microbatches=4))
    (way, _), exact = chooser.of("1f1b"), {str(each): each.step_s for each in choose(wide, 4, slow).ways}
    assert way.told["compression"] == "int8" and not way.is_exact
    assert {str(each): each.step_s for each in chooser.choice().ways} == exact


def test_exact_is_what_encodes_nothing_and_leaves_no_gradient_for_later():
    """Whoever asks: a layout's pipeline, a cut that has no replicas, and copies of the whole model."""
    sizes = {"weight_bytes": MIB, "output_bytes": MIB}
    wide = replace(uneven(8), blocks=tuple(replace(block, **sizes) for block in uneven(8).blocks))
    whole = replace(wide, blocks=tuple(replace(block, rows_bytes=MIB, floats=(0, 0)) for block in wide.blocks))
    int8, summed = OneFOneB(compression="int8"), OneFOneB(replica_compression="int8")
    for profile, given_scheme, replicas, exact in (
        (wide, int8, (1, 1), False),
        (wide, int8, (2,), True),
        (whole, int8, (1, 1), True),
        (wide, summed, (1, 1), True),
        (wide, summed, (2, 1), False),
        (wide, OneFOneB(replica_compression="top-k:0.9"), (2, 1), True),
        (whole, summed, (2, 1), True),
        (wide, SpecTrain(horizon="target"), (1, 1), False),
    ):
        training = Training(given_scheme, microbatches=2)
        chooser = Chooser(profile, sum(replicas), FAST, training, layout=PipelineLayout(replicas))
        assert chooser.of(given_scheme)[0].is_exact == exact, (given_scheme, replicas)
    for given_scheme, exact in (
        (AllReduce(compression="int8"), False),
        (AllReduce(compression="top-k:0.9"), True),
        (AllReduce(topology="ring"), True),
        (AllReduce(synchrony="local:4"), False),
        (ParameterServer(synchrony="asynchronous"), False),
        (CodedReduce(2), True),
    ):
        for devices in (1, 4):
            assert Chooser(wide, devices, FAST).of(given_scheme)[0].is_exact == exact, (given_scheme, devices)
    assert Chooser(whole, 4, FAST).of(AllReduce(compression="int8"))[0].is_exact


def test_sums_that_nobody_makes_are_not_said_to_be_compressed():
    """What is printed could be given to a PipelineModel."""
    chooser = Chooser(chain(), 2, FAST, Training(OneFOneB(replica_compression="int8"), microbatches=4))
    way, cut = chooser.of(OneFOneB(replica_compression="int8"), 4)
    assert cut.replicas == (1, 1) and str(way) == "1f1b, M=4" and way.is_exact
    assert [str(each) for each in chooser.choice((way, cut)).ways if each.is_set] == ["1f1b, M=4"]


@pytest.mark.parametrize(
    ("scheme", "microbatches", "told"),
    [
        (AllReduce(compression="int8", synchrony="local:8"), None, "int8 -0.009, local:8 +0.000; see"),
        (AllReduce(compression="sign:majority"), None, "sign:majority -0.002; see"),
        (AllReduce(compression="top-k:0.001"), None, "top-k:0.001 not measured; see"),
        (AllReduce(topology="gossip"), None, "gossip -0.006; see"),
        (SpecTrain(horizon="target"), 2, "target with M=2 +0.007; see"),
        (OneFOneB(compression="int8"), 4, "int8 across cuts -0.010; see"),
        (AllReduce(topology="ring"), None, ""),
        ("1f1b", 4, ""),
    ],
)
def test_of_a_way_that_is_not_exact_the_measured_accuracy_is_told(scheme, microbatches, told):
    profile = chain(8, weight_bytes=2**22)
    profile = replace(profile, blocks=tuple(replace(each, output_bytes=2**20) for each in profile.blocks))
    way, _ = Chooser(profile, 4, FAST).of(scheme, microbatches)
    assert told in way.quality and bool(told) == bool(way.quality)


def test_options_of_schemes_without_stages_are_predicted():
    """One server sends and gets more, and holds more; an order has its own seconds; a tree its own devices."""
    heavy = replace(uneven(8), blocks=tuple(replace(block, weight_bytes=4 * MIB) for block in uneven(8).blocks))
    chooser = Chooser(heavy, 4, Cluster((Level(Link(1e9, 1e-4)),)), Training(slots=2))
    one, _ = chooser.of(ParameterServer(servers=1))
    every, _ = chooser.of("parameter-server")
    assert one.step_s > every.step_s and one.memory_bytes > every.memory_bytes
    late, _ = chooser.of(AllReduce(order="none"))
    assert late.step_s >= chooser.of("all-reduce")[0].step_s and late.is_set
    assert chooser.of(CodedReduce(2, depth=2))[0].devices == 6
    few, _ = Chooser(chain(rows=2), 4, FAST).of("data-parallel")
    assert few.kind == BASELINE
    with pytest.raises(ValueError, match="chosen among synchronous ones"):
        choose(chain(), 4, FAST, staleness="predicted", layout=PipelineLayout((1, 1)))
    cut = partition(chain(), 4, FAST, training=Training(Interleaved(chunks=2)))
    assert len(cut.stages) == 8
