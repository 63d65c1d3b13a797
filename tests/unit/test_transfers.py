"""Plans of transfers: which variables travel together, in which order, and when."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transfer_plans import MESSAGES, SECONDS, workloads

from pipetrain.schemes.transfers import caramel, ibatch, tictac
from pipetrain.schemes.transfers.orders import ORDERS, orders
from pipetrain.schemes.transfers.plan import (
    Layer,
    Message,
    Pack,
    Phase,
    Plan,
    Workload,
    check_plan,
    made_s,
    pulled_s,
    pushed_s,
)


def chains(most):
    """Layers in a row: startup, and (transfer, computing) of each."""
    rows = st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=most)
    return st.builds(lambda startup_s, pairs: ibatch.LayerChain(startup_s, *zip(*pairs)), SECONDS, rows)


def test_what_waits_for_less_comes_first():
    assert orders(serves=True)[:3] == ["none", "push-pull", "layerwise"]


@given(workloads(), st.booleans())
def test_every_plan_moves_every_variable_once(workload, serves):
    for name in orders(serves):
        plan = ORDERS[name](workload, serves)
        assert check_plan(plan, workload.sizes_bytes, serves) is plan
        for phase in (plan.pulls, plan.pushes, plan.late, plan.returned):
            for pack in phase.packs:
                assert pack.chunks > 1 or pack == workload.pack(pack.variables)
        total = sum(pack.size_bytes for pack in (*plan.pushes.packs, *plan.late.packs))
        assert total == sum(workload.sizes_bytes)


# TicTac ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 5, 12])
def test_tic_gives_a_chain_its_printed_priorities(count):
    found = tictac.priorities(Workload.chain([1] * count, [1.0] * count))
    assert list(found.values()) == [0, 0, *range(2, count)][:count]


def test_tic_knows_the_graph_and_not_the_order_of_layers():
    """Two branches that meet: the variables of the one that is run first are needed together with its own only."""
    layers = [Layer((0,)), Layer((1,), after=(0,)), Layer((2,)), Layer((3,), after=(1, 2))]
    assert tictac.priorities(Workload(tuple(layers), (1,) * 4)) == {0: 0, 1: 0, 2: 2, 3: 2}


def flow_s(transfers, order):
    """Independent computations, each after its own transfer."""
    sent_s = end_s = 0.0
    for n in order:
        sent_s += transfers[n][0]
        end_s = max(end_s, sent_s) + transfers[n][1]
    return end_s


def independent(transfers):
    layers = [Layer((n,), forward_s=computing) for n, (_, computing) in enumerate(transfers)]
    return Workload(tuple(layers), tuple(size for size, _ in transfers), Message(0.0, 1.0))


def tac_order(workload):
    return [n for pack in tictac.tac(workload, serves=True).pulls.packs for n in pack.variables]


def test_tac_does_not_follow_the_printed_comparator():
    transfers = [(1, 10.0), (10, 1.0)]
    assert flow_s(transfers, tac_order(independent(transfers))) == 12
    assert flow_s(transfers, [1, 0]) == 21


@given(st.lists(st.tuples(st.integers(0, 12), SECONDS), min_size=1, max_size=7))
@settings(max_examples=30)
def test_tac_is_the_best_of_all_orders_of_independent_transfers(transfers):
    best = min(flow_s(transfers, order) for order in itertools.permutations(range(len(transfers))))
    assert flow_s(transfers, tac_order(independent(transfers))) == best


@given(st.lists(st.tuples(st.integers(1, 12), SECONDS), min_size=1, max_size=9), MESSAGES)
def test_tic_and_tac_pull_a_chain_in_its_order(pairs, message):
    workload = Workload.chain(*zip(*pairs), message=message)
    for order in (tictac.tic, tictac.tac):
        packs = order(workload, True).pulls.packs
        in_order = sorted(packs, key=workload.first)
        assert pulled_s(workload, packs) == pulled_s(workload, in_order)


@given(*[st.integers(1, 50).map(float)] * 2, st.floats(0, 1))
def test_what_overlaps_is_told_by_the_printed_formulas(sending_s, computing_s, part):
    """With one link and one processor the scheduling efficiency is the overlap coefficient."""
    step_s = sending_s + computing_s - part * min(sending_s, computing_s)
    found = tictac.Overlap(step_s, computing_s, sending_s, sending_s, 0.0)
    assert found.rho == sending_s / computing_s
    assert found.coefficient == pytest.approx(part) == found.efficiency
    assert found.computing_part == pytest.approx(1 / (1 + found.rho - found.coefficient * min(found.rho, 1)))
    assert found.potential == pytest.approx(min(sending_s, computing_s) / max(sending_s, computing_s))


def test_where_nothing_is_sent_or_computed_nothing_is_left_to_overlap():
    assert tictac.Overlap(3.0, 3.0, 0.0).coefficient == tictac.Overlap(3.0, 3.0, 0.0).efficiency == 1.0
    silent = tictac.Overlap(0.0, 0.0, 0.0)
    assert (math.isinf(silent.rho), silent.computing_part, silent.potential) == (True, 0.0, 0.0)
    idle = tictac.Overlap(10.0, 2.0, 3.0)
    assert idle.coefficient < 0


# iBatch ------------------------------------------------------------------------------------------------------------


def partitions(count):
    """The ends of every division of layers into neighbours; of none, one without any."""
    if not count:
        yield []
        return
    for cuts in itertools.product([False, True], repeat=count - 1):
        yield [*(n for n, cut in enumerate(cuts, start=1) if cut), count]


@given(chains(10))
@settings(max_examples=40)
def test_the_dynamic_programme_finds_the_best_batches(chain):
    ends = [(chain.end_s(each), len(each)) for each in partitions(len(chain.computing_s))]
    found = ibatch.optimum(chain)
    assert (chain.end_s(found), len(found)) == min(ends)


@given(chains(12))
def test_greedy_batches_are_batches_and_no_better_than_the_best(chain):
    name, ends = ibatch.best(chain)
    for way in (ibatch.transfers_hidden, ibatch.computing_hidden):
        found = way(chain)
        assert found == sorted({*found}) and found[0] >= 1 and found[-1] == len(chain.computing_s)
        assert chain.end_s(ends) <= chain.end_s(found)
    assert name == "optimum" and chain.end_s(ends) == chain.end_s(ibatch.optimum(chain))


def test_where_no_batch_hides_the_greedy_choices_go_on():
    """They choose from an empty set: one layer is sent alone, or all that is left."""
    assert ibatch.transfers_hidden(ibatch.LayerChain(1.0, (5.0,) * 4, (1.0,) * 4)) == [1, 2, 3, 4]
    assert ibatch.computing_hidden(ibatch.LayerChain(0.0, (1.0,) * 4, (9.0,) * 4)) == [1, 4]


@given(workloads())
def test_the_plan_of_ibatch_takes_what_its_batches_take(workload):
    """The mirror image too: no other batches of neighbouring layers end the pushes sooner."""
    plan = ibatch.ibatch(workload, serves=True)
    owned = [workload.owned[k] for k in workload.trained]
    ways = [[(0, *ends), ends] for ends in partitions(len(owned))]
    packs = [[workload.pack([n for each in owned[a:b] for n in each]) for a, b in zip(*way)] for way in ways]
    assert pulled_s(workload, plan.pulls.packs) == pytest.approx(min(pulled_s(workload, each) for each in packs))
    assert pushed_s(workload, plan.pushes.packs) == pytest.approx(min(pushed_s(workload, each[::-1]) for each in packs))
    assert plan.name.startswith("ibatch (")


# CARAMEL -----------------------------------------------------------------------------------------------------------


def test_the_threshold_is_where_two_messages_are_worth_it():
    message = Message(2e-4, 1e-8)
    size = caramel.threshold_bytes(message)
    assert size == pytest.approx(1.5 * 2e-4 / 1e-8)
    assert message.seconds(2 * size) / (2 * message.seconds(size)) == pytest.approx(0.8)


@given(workloads())
def test_small_variables_travel_together_and_large_ones_in_chunks(workload):
    least, packs = caramel.threshold_bytes(workload.message), caramel.packed(workload)
    whole = [pack for pack in packs if pack.chunks == 1]
    assert all(pack.size_bytes >= least for pack in whole[:-1])
    assert all(workload.pack(pack.variables[:-1]).size_bytes < least or not least for pack in whole)
    assert all(pack.size_bytes >= least for pack in packs if pack.chunks > 1)
    made = made_s(workload)
    ready = [made[workload.owner[pack.variables[0]]] for pack in packs if pack.chunks == 1]
    assert ready == sorted(ready)


@given(workloads())
def test_caramel_is_predicted_no_slower_than_the_backward_alone(workload):
    plan, alone = caramel.caramel(workload), caramel.caramel(workload, late=False)
    assert not alone.late.packs
    step_s = caramel.step_s(workload, plan.pushes.packs, plan.late.packs)
    assert step_s <= caramel.step_s(workload, alone.pushes.packs, ())
    assert step_s >= sum(layer.forward_s + layer.backward_s for layer in workload.layers) - 1e-9


@given(workloads())
def test_variables_have_as_many_chunks_as_suit(workload):
    """None of the numbers that are tried, by themselves, is predicted to be faster."""
    plan = caramel.caramel(workload)
    found_s = caramel.step_s(workload, plan.pushes.packs, plan.late.packs)
    for most in caramel.CHUNKS:
        packs = caramel.packed(workload, most)
        assert max((pack.chunks for pack in packs), default=1) <= most
        assert found_s <= caramel.step_s(workload, packs, ())


@given(workloads())
def test_what_is_late_is_sent_in_the_order_of_need(workload):
    made = made_s(workload)
    for overruns in (False, True):
        now, late = caramel.divided(workload, caramel.packed(workload), overruns)
        assert [workload.first(pack) for pack in late] == sorted(workload.first(pack) for pack in late)
        if not overruns and workload.message.seconds(1) > 0:
            assert pushed_s(workload, now) <= made[0] + 1e-9


def test_a_variable_whose_chunks_overrun_the_backward_lets_the_others_wait_for_the_forward():
    """It is made first and takes longer than the backward: 60 s of messages, behind which all computing hides."""
    workload = Workload.chain([10] * 4 + [40], [4.0] * 5, [4.0] * 5, Message(0.2, 0.75))
    now, late = caramel.divided(workload, caramel.packed(workload), overruns=True)
    assert {n for pack in now for n in pack.variables} == {4}
    assert [pack.chunks for pack in now] == [8] * 8
    step_s = caramel.step_s(workload, now, late)
    assert step_s < caramel.step_s(workload, caramel.packed(workload), ())
    plan = caramel.caramel(workload)
    assert [pack.chunks for pack in plan.pushes.packs] == [1]  # seven messages less
    assert caramel.step_s(workload, plan.pushes.packs, plan.late.packs) < step_s


def test_caramel_hides_in_the_next_forward_what_the_backward_cannot():
    """Transfers take as long as computing: in the backward alone half of them stick out."""
    workload = Workload.chain([1] * 12, [1.0] * 12, [1.0] * 12, Message(0.0, 2.0))
    plan = caramel.caramel(workload)
    alone = caramel.step_s(workload, caramel.packed(workload), ())
    assert (alone, caramel.step_s(workload, plan.pushes.packs, plan.late.packs)) == (37.0, 27.0)
    assert 0 < len(plan.late.packs) < 12


# Plans of one's own ------------------------------------------------------------------------------------------------

ONE, TWO = Pack((0,), 4), Pack((1,), 8)


@pytest.mark.parametrize(
    ("plan", "serves", "problem"),
    [
        (Plan(Phase((ONE, TWO)), Phase((ONE,))), True, r"sent once.*pushes and late without \[1\]"),
        (Plan(Phase((ONE,)), Phase((ONE, TWO))), True, r"sent once.*pulls and returned without \[1\]"),
        (Plan(Phase((TWO,)), Phase((ONE, TWO)), returned=Phase((TWO, ONE))), True, r"\[1\] more than once"),
        (
            Plan(Phase((Pack((1,), 4, 0, 2),)), Phase((ONE, TWO)), returned=Phase((ONE, Pack((1,), 4, 1, 2)))),
            True,
            r"in one phase.*variables \[1\] in pulls and returned",
        ),
        (Plan(Phase(), Phase((ONE, TWO)), returned=Phase((ONE,))), False, "no variables come from a server"),
        (Plan(Phase(), Phase((ONE, TWO, ONE))), False, r"sent once.*\[0\] more than once"),
        (Plan(Phase(), Phase((ONE, TWO, Pack((2,), 4)))), False, r"sent once.*\[2\] that are not among the 2"),
        (Plan(Phase(), Phase((ONE, Pack((1,), 4, 0, 2)))), False, r"sent once.*without \[1\]"),
        (Plan(Phase(), Phase((ONE, Pack((1,), 4, 0, 2), Pack((1,), 4, 1, 2), TWO))), False, r"\[1\] more than once"),
        (Plan(Phase(), Phase((ONE, Pack((1,), 4, 0, 2))), Phase((Pack((1,), 4, 1, 2),))), False, r"in one phase"),
        (Plan(Phase((ONE, TWO)), Phase((ONE, TWO))), False, "no variables are pulled"),
        (Plan(Phase((ONE, TWO)), Phase((ONE,)), Phase((TWO,))), True, "no variables wait for a next step"),
        (Plan(Phase(), Phase((ONE, TWO), -1)), False, "a window from 0 up"),
        (Plan(Phase(), Phase((Pack((0, 1), 12, 1, 2),))), False, "a chunk of one variable"),
        (Plan(Phase(), Phase((Pack((), 0), ONE, TWO))), False, "A pack has variables"),
    ],
)
def test_a_plan_that_is_no_partition_is_refused(plan, serves, problem):
    with pytest.raises(ValueError, match=problem):
        check_plan(plan, (4, 8), serves)


def test_what_is_no_plan_is_refused():
    with pytest.raises(TypeError, match="a name or a Plan"):
        check_plan(3, (4, 8), True)


def test_small_packs_do_not_count_in_a_window():
    def awaited(sizes_bytes, window):
        return Phase(tuple(Pack((n,), size) for n, size in enumerate(sizes_bytes)), window).awaited

    assert awaited([10] * 4, 0) == [None] * 4
    assert awaited([10] * 4, 1) == [None, 0, 1, 2]
    assert awaited([10] * 4, 2) == [None, None, 0, 1]
    assert awaited([10, 1] * 3, 1) == [None, 0, 1, 2, 3, 4]  # in a window of one all count
    assert awaited([10, 1] * 3, 2) == [None, None, None, 0, 0, 2]  # kernels and biases
    assert awaited([1, 1, 10, 10, 10], 2) == [None, None, None, None, 2]
    assert awaited([], 2) == []
