"""A course cut into slices is the schedule's order, whatever the slices, and no device waits at a slice's beginning."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from orders import by_twos

from pipetrain.schemes import table
from pipetrain.schemes.dry_run import replay
from pipetrain.schemes.programs import Course, calls_of_functions
from pipetrain.schemes.schedules import Schedule, asynchronous, groups_of, orders, unflushed

SCHEDULE = Schedule(asynchronous, flushes=False, found=unflushed)


def numbered(program, base, microbatches):
    """Each device's actions, their microbatches counted from the beginning on, F and B of one call apart."""
    orders = []
    for device in range(len(program.calls)):
        actions = [each._replace(microbatch=each.microbatch + base * microbatches) for each in program.actions(device)]
        orders.append([part for each in actions for part in apart(each)])
    return orders


def apart(action):
    return [action._replace(op="F"), action._replace(op="B")] if action.op == "FB" else [action]


def with_updates(order, microbatches):
    """The order, and after the last backward of every minibatch the update."""
    for action in order:
        yield action
        if action.op == "B" and action.microbatch % microbatches == microbatches - 1:
            yield action._replace(op="U")


@given(
    st.sampled_from([asynchronous, by_twos]),
    st.integers(1, 5),
    st.integers(1, 3),
    st.lists(st.tuples(st.integers(1, 4), st.booleans()), max_size=25),
)
@settings(max_examples=40)
def test_slices_joined_are_the_order(order, stages, microbatches, slices):
    course = Course(Schedule(order, flushes=False, found=unflushed), stages, microbatches)
    orders, posted = [[] for _ in range(stages)], 0

    def take(program, base):
        for mine, new in zip(orders, numbered(program, base, microbatches), strict=True):
            mine += new

    for more, is_short in slices:
        base, until = course.results, course.results + more
        needs = course.needs(until)
        if is_short and order is asynchronous:
            needs = until  # the last ones of an epoch: all results, and no minibatch after them
        posted = max(posted, needs)
        take(course.slice(until, posted), base)
    base = course.results
    take(course.rest(posted), base)
    groups = groups_of(posted, microbatches)
    wanted = [list(with_updates(order(k, stages, groups), microbatches)) for k in range(stages)]
    assert orders == wanted


@pytest.mark.parametrize("stages", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("minibatches", [1, 4])
def test_what_a_slice_takes_of_other_slices_is_there(stages, minibatches):
    course, done = Course(SCHEDULE, stages, 1), [[] for _ in range(stages)]
    for number in range(6):
        base = course.results
        posted = course.needs(base + minibatches)
        program = course.slice(base + minibatches, posted)
        assert course.results == (number + 1) * minibatches
        for mine, new in zip(done, numbered(program, base, 1), strict=True):
            mine += [each for each in new if each.op != "U"]
        last = [each.microbatch for each in done[-1] if each.op == "B"]
        assert last == [*range(course.results)]
    orders = [list(asynchronous(k, stages, groups_of(posted, 1))) for k in range(stages)]
    assert all(order[: len(mine)] == mine for order, mine in zip(orders, done, strict=True))
    assert replay(orders)


def test_two_stages_never_wait_in_a_slice():
    """The first stage begins with a backward of the slice before: what the last stage needs now, it has made then."""
    course = Course(SCHEDULE, 2, 1)
    course.slice(1, course.needs(1))
    for _ in range(5):
        program = course.slice(course.results + 1, course.needs(course.results + 1))
        assert [str(action) for action in program.actions(0)] == ["0B-1", "0U-1", "0F1"]
        assert [str(action) for action in program.actions(1)] == ["1FB0", "1U0"]


def test_slices_repeat_themselves():
    """A long run does not plan every slice anew, and goes on from there with another number of minibatches."""
    course = Course(SCHEDULE, 4, 1)
    programs = []
    for _ in range(20):
        programs.append(course.slice(course.results + 2, course.needs(course.results + 2)))
    assert programs[-1] is programs[-2]
    base = course.results
    after = course.slice(base + 3, course.needs(base + 3))
    assert [str(action) for action in after.actions(3)] == ["3FB0", "3U0", "3FB1", "3U1", "3FB2", "3U2"]


@given(
    st.sampled_from(["vanilla", "2bw", "1f1b", "zb-h1", "zb-v"]),
    st.integers(1, 3),
    st.integers(1, 9),
    st.integers(1, 4),
)
@settings(max_examples=25)
def test_calls_joined_are_the_order(name, microbatches, minibatches, at_once):
    """With updates, each after the last gradients of its minibatch, and no more minibatches a call than asked for."""
    schedule, stages = table.scheme(name).schedule, 4
    devices = schedule.devices(stages)
    programs = calls_of_functions(schedule, stages, microbatches, minibatches, at_once)
    for device, order in enumerate(orders(schedule.order, devices, minibatches, microbatches)):
        made = [action for program in programs for action in program.apart().actions(device)]
        assert [each for each in made if each.op != "U"] == order
        assert len(made) - len(order) == minibatches * len(schedule.stages_on(device, stages))
    if schedule.flushes:
        assert len(programs) == minibatches
