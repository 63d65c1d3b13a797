"""Programs: every action of a schedule once, in its order, and each stage's update when its gradients are there."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipetrain.schemes.actions import OPERATIONS
from pipetrain.schemes.programs import of_minibatch
from pipetrain.schemes.schedules import orders
from pipetrain.schemes.splitting import Parts, rows_of
from pipetrain.schemes.table import PIPELINES

SYNCHRONOUS = [name for name, scheme in PIPELINES.items() if scheme.schedule.flushes]
HALVES = {"FB": ("F", "B"), "FI": ("F", "I")}


def actions_of(calls):
    """The schedule's actions that calls are made of, and the updates."""
    single = [action for call in calls for action in call]
    parts = [[each._replace(op=op) for op in HALVES.get(each.op, (each.op,))] for each in single]
    return [action for part in parts for action in part]


@pytest.mark.parametrize("name", SYNCHRONOUS)
@given(devices=st.integers(1, 4), microbatches=st.integers(1, 6), together=st.booleans(), apart=st.booleans())
@settings(max_examples=40)
def test_a_program_is_the_schedule_and_updates(name, devices, microbatches, together, apart):
    schedule = PIPELINES[name].schedule
    stages = devices * schedule.chunks
    program = of_minibatch(schedule, stages, microbatches, together, apart)
    want = orders(schedule.order, devices, 1, microbatches)
    for device, calls in enumerate(program.calls):
        made = actions_of(calls)
        assert [each for each in made if each.op != "U"] == want[device]
        mine = schedule.stages_on(device, stages)
        assert sorted(each.stage for each in made if each.op == "U") == mine
        for stage in mine:
            makes = [n for n, each in enumerate(made) if each.stage == stage and each.updates]
            (update,) = [n for n, each in enumerate(made) if (each.op, each.stage) == ("U", stage)]
            assert makes[-1] < update
            assert together or made[update - 1].stage == stage
        if together:
            assert [each.op for each in made[-len(mine) :]] == ["U"] * len(mine)
        if apart:
            assert all(call[0].op not in HALVES for call in calls)


def test_an_update_is_no_action_of_a_schedule():
    assert OPERATIONS["U"].makes == ("weights",) and not OPERATIONS["U"].received


@given(rows=st.integers(0, 40), microbatches=st.integers(1, 5), senders=st.integers(1, 4), receivers=st.integers(1, 4))
def test_the_pieces_of_a_microbatch_are_all_of_its_rows_once(rows, microbatches, senders, receivers):
    parts = Parts(rows, microbatches)
    for number in range(microbatches):
        whole = rows_of(rows, number, microbatches)
        assert parts.microbatch(number) == whole
        taken = []
        for piece in parts.pieces(number, senders, receivers):
            mine = parts.replica(number, piece.sender, senders)
            theirs = parts.replica(number, piece.receiver, receivers)
            sent = range(mine.start + piece.start, mine.start + piece.stop)
            assert sent.start >= theirs.start and sent.stop <= theirs.stop and piece.of == len(mine)
            assert piece.is_whole == (sent == mine)
            taken += sent
        assert taken == [*range(len(whole))]
        if rows:
            assert sum(parts.fraction(number, r, senders) for r in range(senders)) == pytest.approx(1)
    assert sum(map(parts.share, range(microbatches))) == pytest.approx(1)


@given(microbatches=st.integers(1, 4), replicas=st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple))
def test_minibatches_of_enough_rows_that_divide_alike_have_one_form(microbatches, replicas):
    """One function serves all of them."""
    count = microbatches * 6
    assert len({Parts(times * count, microbatches).form(replicas) for times in (2, 3, 7)}) == 1
    assert Parts(0, microbatches).form(replicas) != () and Parts(1, 2).form((1,)) != Parts(2, 2).form((1,))
