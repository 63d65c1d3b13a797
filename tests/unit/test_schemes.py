"""What a scheme is: actions, schedules, weight versions, policies. No TensorFlow."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipetrain.schemes import dry_run, policies, schedules
from pipetrain.schemes.actions import OPERATIONS, Action, held
from pipetrain.schemes.table import SCHEMES, check_name, scheme
from pipetrain.schemes.weight_versions import WeightVersions, steady_staleness

ASYNCHRONOUS = """\
0: F0  F1  F2  F3  .   .   .   B0  F4  B1  F5  B2  .   B3  .   B4  .   B5
1: .   F0  F1  F2  .   .   B0  F3  B1  F4  B2  F5  B3  .   B4  .   B5  .
2: .   .   F0  F1  .   B0  F2  B1  F3  B2  F4  B3  F5  B4  .   B5  .   .
3: .   .   .   F0  B0  F1  B1  F2  B2  F3  B3  F4  B4  F5  B5  .   .   ."""
GPIPE = """\
0: F0  F1  F2  .   .   .   .   B0  B1  B2  F3  F4  F5  .   .   .   .   B3  B4  B5
1: .   F0  F1  F2  .   .   B0  B1  B2  .   .   F3  F4  F5  .   .   B3  B4  B5  .
2: .   .   F0  F1  F2  B0  B1  B2  .   .   .   .   F3  F4  F5  B3  B4  B5  .   ."""
ONE_F_ONE_B = """\
0: F0  F1  F2  .   .   B0  .   B1  .   B2  F3  F4  F5  .   .   B3  .   B4  .   B5
1: .   F0  F1  .   B0  F2  B1  .   B2  .   .   F3  F4  .   B3  F5  B4  .   B5  .
2: .   .   F0  B0  F1  B1  F2  B2  .   .   .   .   F3  B3  F4  B4  F5  B5  .   ."""


@given(st.sampled_from([*OPERATIONS]), st.integers(0, 9999), st.integers(0, 10**9))
def test_actions_print_and_parse(op, stage, microbatch):
    action = Action(op, stage, microbatch)
    assert str(action) == f"{stage}{op}{microbatch}"
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize("text", ["", "2F", "F3", "2X3", "2f3", " 2F3", "2F3 ", "-1F0"])
def test_other_text_is_no_action(text):
    with pytest.raises(ValueError, match="2F3"):
        Action.parse(text)


@pytest.mark.parametrize(
    ("schedule", "shape", "golden"),
    [
        (schedules.asynchronous, (4, 6, 1), ASYNCHRONOUS),
        (schedules.gpipe, (3, 2, 3), GPIPE),
        (schedules.one_forward_one_backward, (3, 2, 3), ONE_F_ONE_B),
    ],
)
def test_golden_grids(schedule, shape, golden):
    assert dry_run.grid(dry_run.replay(schedules.orders(schedule, *shape))) == golden


@given(st.integers(1, 9), st.integers(1, 12), st.integers(1, 9))
@settings(max_examples=40)
def test_every_schedule_finishes(stages, minibatches, microbatches):
    total = minibatches * microbatches
    warm_up = stages - 1
    for schedule in (schedules.asynchronous, schedules.gpipe, schedules.one_forward_one_backward):
        orders = schedules.orders(schedule, stages, minibatches, microbatches)
        steps = dry_run.replay(orders)
        if schedule is schedules.gpipe:
            assert len(steps) == minibatches * 2 * (microbatches + warm_up)  # fill, work, empty, per minibatch
        if schedule is schedules.asynchronous:
            assert len(steps) <= 2 * (total + warm_up)
            for stage, order in enumerate(orders):
                assert max(held(order)) == min(total, stages - stage)


def test_a_deadlock_is_shown_where_it_is():
    orders = schedules.orders(schedules.asynchronous, 2, 2)
    orders[0] = [orders[0][i] for i in (0, 2, 1, 3)]  # 0B0 before 0F1: fine for stage 0 alone
    assert dry_run.replay(orders)
    orders[1] = [Action.parse(text) for text in ("1F0", "1F1", "1B0", "1B1")]  # 1F1 needs 0F1, which waits for 1B0
    with pytest.raises(dry_run.ScheduleError, match="1F1 <-- ERROR HERE: needs outputs of stage 0"):
        dry_run.replay(orders)


def test_microbatches_that_overtake_each_other_are_refused():
    orders = schedules.orders(schedules.asynchronous, 2, 2)
    orders[1] = [Action.parse(text) for text in ("1F1", "1B1", "1F0", "1B0")]
    with pytest.raises(dry_run.ScheduleError, match="1F1 comes where 0F0 has sent"):
        dry_run.replay(orders)


@pytest.mark.parametrize(
    ("broken", "named"),
    [
        (["0F0"], "0B0 is missing"),
        (["0B0"], "0F0 is missing"),
        (["0F0", "0F0", "0B0"], "0F0 stands 2 times"),
        (["0F0", "0B0", "0B0"], "0B0 stands 2 times"),
        (["0F0", "1B0"], "0B0 is missing"),
        (["0F0", "0I0"], "0W0 is missing"),
        (["0F0", "0W0"], "it is given 0W0"),
        (["0F0", "0B0", "0I0", "0W0"], "it is given 0B0, 0I0, 0W0"),
        (["0F0", "0FB0"], "stands beside 0FB0"),
    ],
)
def test_incomplete_orders_are_refused(broken, named):
    with pytest.raises(dry_run.ScheduleError, match=named):
        dry_run.replay([[Action.parse(text) for text in broken]])


def test_halves_of_a_backward_are_an_order_too():
    """W may wait: only the gradients of inputs are awaited by the stage before (zero bubble, arXiv 2401.10241)."""
    texts = ("0F0 0F1 0I0 0W0 0I1 0W1", "1F0 1I0 1F1 1I1 1W0 1W1")
    steps = dry_run.replay([[Action.parse(text) for text in order.split()] for order in texts])
    assert dry_run.grid(steps) == "0: F0  F1  .   I0  W0  I1  W1\n1: .   F0  I0  F1  I1  W0  W1"


def test_a_backward_before_its_forward_is_refused():
    with pytest.raises(dry_run.ScheduleError, match="Deadlock"):
        dry_run.replay([[Action.parse("0B0"), Action.parse("0F0")]])


def walk(scheme, stage, stages, minibatches, microbatches=1):
    """Integers as weights (version v is the number 100 v) and a velocity of 1: what each action reads, what is kept.

    Every minibatch has so many microbatches; what is read is that of its first one.
    """
    weights = {"now": 0}
    store = WeightVersions(
        scheme,
        stage,
        stages,
        microbatches,
        newest=lambda ahead: policies.predict(weights["now"], 1, ahead),
        keep=lambda ahead: policies.predict(weights["now"], 1, ahead),
    )
    reads, kept = {}, 0
    for action in schedules.asynchronous(stage, stages, [range(minibatches * microbatches)]):
        choose = store.forward if action.op == "F" else store.backward
        minibatch, piece = divmod(action.microbatch, microbatches)
        read = choose(action.microbatch)
        assert reads.setdefault((action.op, minibatch), read) == read
        if action.op == "B" and piece == microbatches - 1:
            store.before_update()
            weights["now"] += 100
        kept = max(kept, store.kept)
    return reads, kept


@pytest.mark.parametrize("stages", [2, 3, 5])
def test_shared_weights_are_predicted_to_the_target_of_the_stage_s_own(stages):
    """What is behind is predicted as much further; a is the first of the stages that share, h reads."""
    policy = SCHEMES["spectrain"].policy
    for a, h, i in product(range(stages), range(stages), range(12)):
        if a <= h:
            reader = SCHEMES["spectrain"].reader(i, h, stages, 1, a)
            assert policy.forward(reader) == (max(0, i - (stages - 1 - a)), min(i, stages - 1 - a) + h // 2)
            assert policy.backward(reader) == (max(0, i - (h - a)), min(i, h - a) + h // 2)


@pytest.mark.parametrize("name", ["vanilla", "weight-stashing", "vertical-sync"])
def test_a_gradient_is_as_stale_as_what_its_forward_has_read(name):
    stages = 4
    for stage, i in product(range(stages), range(12)):
        versions = WeightVersions(SCHEMES[name], stage, stages, 1, lambda _: None, lambda _: None)
        late = stages - 1 if name == "vertical-sync" else stages - 1 - stage
        assert versions.staleness(i) == min(i, late)


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 7])
def test_policies_read_what_the_table_says(stages):
    for stage in range(stages):
        late, reach = stages - 1 - stage, 1.5 * (stages - 1)
        schemes = {name: each for name, each in SCHEMES.items() if each.asynchronous}
        schemes["local"] = scheme("spectrain", horizon="local")
        schemes["target"] = scheme("spectrain", horizon="target")
        schemes["2bw/1.5"] = scheme("2bw", horizon=1.5)
        reads = {
            name: walk(each, stage, stages, 20, max(1, stages - 1) if "2bw" in name else 1)
            for name, each in schemes.items()
        }
        for i in range(20):
            newest = max(0, i - late)
            expected = {
                "vanilla": (100 * newest, 100 * i),
                "weight-stashing": (100 * newest, 100 * newest),
                "vertical-sync": (100 * max(0, i - (stages - 1)),) * 2,
                "spectrain": (100 * newest + min(i, late) + stage // 2, 100 * i + stage // 2),
                "local": (100 * newest + min(i, late),) * 2,
                "spike-compensation": (100 * newest, 100 * i),
                "2bw": (100 * max(0, i - 1),) * 2,
                "2bw/1.5": (100 * (i - 1) + 1.5 if i else 0,) * 2,
                "target": (100 * newest + reach, 100 * i + max(0, newest + reach - i)),
            }
            assert set(expected) == set(schemes)
            for name, (forward, backward) in expected.items():
                assert reads[name][0]["F", i] == forward, (name, stage, i)
                assert reads[name][0]["B", i] == backward, (name, stage, i)
        kept = {name: most for name, (_, most) in reads.items()}
        assert kept["vanilla"] == kept["spectrain"] == 0
        assert kept["weight-stashing"] == late
        assert kept["vertical-sync"] == stages - 1
        assert kept["local"] == late  # predicted, for every minibatch in flight but the next to go back
        assert kept["2bw"] == kept["2bw/1.5"] == 1
        assert kept["target"] == 0


@given(st.integers(1, 9), st.integers(1, 9), st.booleans())
@settings(max_examples=40)
def test_all_stages_aim_at_one_version(stages, microbatches, stretch):
    """Forward and backward of a microbatch read one version at every stage, up to what the last one is ahead by."""
    chosen = scheme("spectrain", "target", stretch_momentum=stretch)
    reach = 1.5 if stretch and microbatches < stages else 1
    for stage in range(stages):
        for microbatch in range(4 * stages * microbatches):
            reader = chosen.reader(microbatch, stage, stages, microbatches)
            forward, backward = chosen.policy.forward(reader), chosen.policy.backward(reader)
            begun = max(0, microbatch - (stages - 1 - stage))
            target = (begun + reach * (stages - 1)) / microbatches
            assert (forward.version, backward.version) == (begun // microbatches, microbatch // microbatches)
            assert sum(forward) == pytest.approx(target)
            assert sum(backward) == pytest.approx(max(target, backward.version))
    assert len(chosen.rule(0, stages, microbatches).horizons) <= 2 * microbatches + stages


def test_what_is_read_of_an_old_version_is_predicted_by_its_own_velocity():
    """Version v is 100 v, its velocity v + 1: `2bw` reads the same of it before the update and after it."""
    now, stages, microbatches = [0], 3, 4
    predicted = [lambda ahead: 100 * now[0] + ahead * (now[0] + 1)] * 2
    for stage in range(stages):
        now[0] = 0
        versions = WeightVersions(scheme("2bw", 1.5), stage, stages, microbatches, *predicted)
        for action in schedules.asynchronous(stage, stages, schedules.groups_of(9, microbatches)):
            i = action.microbatch // microbatches
            read = (versions.forward if action.op == "F" else versions.backward)(action.microbatch)
            assert read == (100 * (i - 1) + 1.5 * i if i else 0)
            if action.op == "B" and action.microbatch % microbatches == microbatches - 1:
                versions.before_update()
                now[0] += 1
            assert versions.kept <= 1


@pytest.mark.parametrize(
    ("chosen", "stages", "microbatches", "expected"),
    [
        (scheme("spectrain"), 4, 1, [(1, 0), (1, 0), (1, 1), (1, 0)]),
        (scheme("spectrain", "local"), 4, 1, [(1, 1), (1, 1), (1, 1), (0, 0)]),
        (scheme("spectrain", "target"), 4, 2, [(2, 2)] * 3 + [(2, 0)]),
        (scheme("2bw", 1.5), 4, 4, [(3, 1), (2, 1), (1, 1), (0, 1)]),
        (scheme("2bw"), 4, 4, [(0, 0)] * 4),
    ],
)
def test_how_often_weights_are_predicted(chosen, stages, microbatches, expected):
    """In forwards and in backwards; what several actions read of an old version is predicted once."""
    assert [chosen.predictions(stage, stages, microbatches) for stage in range(stages)] == expected


def test_momentum_is_stretched_where_microbatches_are_few():
    """``(1 - mu)`` by 0.2 at eight stages and one microbatch, as ``1.6 / (1 + 7)``."""
    assert policies.stretched(0.9, policies.stretch(8, 1)) == pytest.approx(0.98)
    assert [policies.stretch(8, m) for m in (2, 4, 7, 8, 9)] == [1.6 / 4.5, 1.6 / 2.75, 0.8, 1, 1]
    assert policies.stretch(1, 1) == 1
    rules = [scheme("spectrain", "target", stretch_momentum=each).rule(3, 8, 2) for each in ("auto", True, False)]
    assert [rule.stretch for rule in rules] == [1.6 / 4.5, 1.6 / 4.5, 1]
    assert scheme("spectrain").rule(3, 8).stretch == 1


def test_prediction_meets_the_future_at_constant_velocity():
    assert policies.predict(5, 2, 3) == 5 + 2 + 2 + 2
    weight, decay = 5.0, 0.1
    kept, steps = policies.decayed(decay, 3)
    for _ in range(3):
        weight = (1 - decay) * weight + 2.0
    assert policies.predict(kept * 5.0, 2.0, steps) == pytest.approx(weight, rel=1e-14)


def test_spikes_move_the_weights_as_far_as_gradients_in_time():
    """A gradient of -1 that comes D steps late: from then on, the sum of updates is that of momentum without delay."""
    for late in range(6):
        in_time = [sum(0.9**j for j in range(n + late)) for n in range(1, 5)]
        a, b = policies.spike(0.9, late)
        delayed = [sum(a * 0.9**j for j in range(n)) + b for n in range(1, 5)]
        assert delayed == pytest.approx(in_time, rel=1e-13)


def test_rates_are_rescaled_by_staleness_that_fades():
    assert [policies.rescaled(1.0, stale, 0, 10) for stale in range(5)] == [1, 1, 1 / 2, 1 / 3, 1 / 4]
    assert policies.rescaled(1.0, 4, 5, 10) == 1 / 2
    assert policies.rescaled(1.0, 4, 10, 10) == policies.rescaled(1.0, 4, 99, 10) == 1


def test_the_ratio_is_that_of_least_squares():
    """Displacements of 1.5 and 1 times s * v: the second velocity is twice as long."""
    assert policies.ratio(0.0, 0.0) == 1
    first = policies.observed((0.0, 0.0), 1.5, 1.0)
    assert policies.ratio(*first) == 1.5
    second = policies.observed(first, 4.0, 4.0)
    fading = policies.FADING
    assert policies.ratio(*second) == pytest.approx((1.5 * fading + 4) / (fading + 4))


def test_an_observation_says_four_times_at_most_and_the_ratio_is_not_negative():
    fading = policies.FADING
    for along, counts in ((500.0, 4.0), (-500.0, -4.0), (-1.0, -1.0)):
        sums = policies.observed((10.0, 10.0), along, 1.0)
        assert policies.ratio(*sums) == pytest.approx((10 * fading + counts) / (10 * fading + 1))
    assert policies.ratio(*policies.observed((0.0, 0.0), -500.0, 1.0)) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "spectrain", "horizon": "far"}, "horizon='far'.*round-trip, local, fitted, target"),
        ({"name": "spectrain", "horizon": 1.5}, "Only 2bw's horizon is a number.*horizon=1.5.*target"),
        ({"name": "vanilla", "horizon": 1.5}, "horizon=1.5, scheme='vanilla'"),
        ({"name": "2bw", "horizon": "target"}, "horizon='target', scheme='2bw'.*Try horizon=1.5"),
        ({"name": "2bw", "horizon": -1}, "horizon=-1, scheme='2bw'.*Try horizon=1.5"),
        ({"name": "2bw", "horizon": True}, "horizon=True, scheme='2bw'.*Try horizon=1.5"),
        ({"name": "2bw", "horizon": float("inf")}, "horizon=inf, scheme='2bw'.*Try horizon=1.5"),
        ({"name": "spectrain", "stretch_momentum": True}, "one target.*stretch_momentum=True.*'round-trip'"),
        ({"name": "spectrain", "horizon": "target", "stretch_momentum": "yes"}, "stretch_momentum='yes'"),
        ({"name": "vanilla", "horizon": "local"}, "horizon='local', scheme='vanilla'"),
        ({"name": "gpipe", "spike_compensation": True}, "spike_compensation=True, scheme='gpipe'"),
        ({"name": "single", "rescale_steps": 9}, "rescale_steps=9, scheme='single'"),
        ({"name": "2bw", "rescale_steps": 9}, "rescale_steps=9, scheme='2bw'"),
        ({"name": "vanilla", "spike_compensation": "yes"}, "spike_compensation='yes'"),
        ({"name": "vanilla", "rescale_steps": 0}, "rescale_steps=0"),
        ({"name": "vanilla", "rescale_steps": True}, "rescale_steps=True"),
    ],
)
def test_options_that_a_scheme_does_not_have(options, message):
    with pytest.raises(ValueError, match=message):
        scheme(**options)


def test_unknown_scheme_names_the_valid_ones():
    with pytest.raises(ValueError, match=r"scheme='zigzag'.*weight-stashing"):
        check_name("zigzag")


@pytest.mark.parametrize(
    ("name", "microbatches", "staleness"),
    [("vanilla", 1, [3, 2, 1, 0]), ("spectrain", 1, [3, 2, 1, 0]), ("2bw", 4, [1, 1, 1, 1]), ("1f1b", 4, [0, 0, 0, 0])],
)
def test_staleness_of_full_stages(name, microbatches, staleness):
    assert [steady_staleness(scheme(name), stage, 4, microbatches) for stage in range(4)] == staleness
