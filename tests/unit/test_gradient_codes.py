"""Gradient codes and the tree of CodedReduce: whoever is late, what is decoded is the plain sum."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import partial
from itertools import combinations

import numpy as np
import parameters
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipetrain.schemes.coded_reduce import ROOT, Tree, allocated, checked_tree
from pipetrain.schemes.gradient_codes import (
    ERROR,
    Code,
    amplification,
    blocks_of,
    code,
    cyclic,
    decoding,
    polynomial,
)

SIZE = 200  # elements of a gradient
SMALL = (Tree(3, 2, 1), Tree(4, 2, 1), Tree(4, 2, 2), Tree(4, 3, 1))


def messages(tree, rows, arrivals):
    """What every parent decodes when its children arrive in this order: the root's sum and the plain one, in float32.

    ``arrivals(parent)`` gives the children that are there, in order. Each row has a gradient of its own.
    """
    gradients = np.random.default_rng(rows).standard_normal((rows, SIZE)).astype(np.float32)
    allocation = allocated(tree)

    def own(worker):
        total = np.zeros(SIZE, np.float32)
        for share in allocation.shares[worker]:
            mine = [gradients[each.start : each.stop] for cell in share.cells for each in allocation.rows(cell, rows)]
            part = np.concatenate([np.zeros((0, SIZE), np.float32), *mine]).sum(axis=0, dtype=np.float32)
            total += np.float32(share.coefficient) * part
        return total

    def decoded(parent):
        children = tree.below(parent)
        if not children:
            return np.zeros(SIZE, np.float32)
        found = decoding(tree.code, [tree.place(child) for child in arrivals(parent)])
        total = np.zeros(SIZE, np.float32)
        for place, coefficient in found:
            total += np.float32(coefficient) * (own(children[place]) + decoded(children[place]))
        return total

    return decoded(ROOT), gradients.sum(axis=0, dtype=np.float64)


def _without(tree, gone, parent):
    return [child for child in tree.below(parent) if tree.place(child) not in gone]


def error(found, expected):
    return float(np.abs(found - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("tree", SMALL, ids=str)
def test_every_set_of_stragglers_leaves_the_plain_sum(tree):
    """The same set under every parent: what is below a straggler is never asked for."""
    for gone in combinations(range(tree.children), tree.stragglers):
        found, expected = messages(tree, 61, partial(_without, tree, gone))
        assert error(found, expected) < ERROR


@given(st.sampled_from([*SMALL, Tree(5, 2, 1), Tree(3, 3, 1), Tree(7, 1, 2), Tree(6, 2, 2), Tree(11, 1, 4)]), st.data())
@settings(max_examples=15)
def test_children_that_arrive_in_any_order_leave_the_plain_sum(tree, data):
    """Of every parent others, and minibatches of any number of rows, of fewer than there are workers too."""
    rows = data.draw(st.integers(1, 300))
    seed = data.draw(st.integers(0, 2**32 - 1))

    def arrivals(parent):
        order = np.random.default_rng((seed, parent + 1)).permutation(tree.children)
        return [tree.below(parent)[place] for place in order[: tree.children - tree.stragglers]]

    found, expected = messages(tree, rows, arrivals)
    assert error(found, expected) < ERROR


@given(st.integers(1, 12), st.data())
def test_any_children_but_s_decode_and_fewer_only_if_they_have_all_parts(children, data):
    chosen = code(children, data.draw(st.integers(0, children - 1)))
    assert all(len(chosen.parts(child)) == chosen.stragglers + 1 for child in range(children))
    order = data.draw(st.permutations(range(children)))
    for count in range(children + 1):
        found = decoding(chosen, order[:count])
        if count >= children - chosen.stragglers:
            assert found is not None
        if found is not None:
            total = sum((each * chosen.matrix[child] for child, each in found), np.zeros(children))
            np.testing.assert_allclose(total, 1.0, atol=1e-6 * amplification(chosen))
            assert {child for child, _ in found} <= {*order[:count]}


@given(st.integers(1, 4), st.integers(1, 3), st.data())
def test_all_workers_have_equally_many_rows_and_every_row_is_borne(children, depth, data):
    tree = Tree(children, depth, data.draw(st.integers(0, children - 1)))
    allocation = allocated(tree)
    assert {allocation.load(worker) for worker in range(tree.workers)} == {tree.load}
    rows = data.draw(st.integers(0, 100))
    given = [row for cell in range(len(allocation.cells)) for each in allocation.rows(cell, rows) for row in each]
    assert sorted(given) == list(range(rows))
    for share in (share for shares in allocation.shares for share in shares):
        assert share.cells and share.coefficient


def test_the_loads_are_those_of_the_paper():
    assert Tree(4, 3, 1).load == Fraction(1, 14)
    assert Tree(3, 2, 1).load == Fraction(4, 15)
    assert Tree(3, 1, 0).load == Fraction(1, 3)  # uncoded: nobody has another's rows
    assert Tree(4, 3, 1).workers == 84


def test_repetition_has_one_part_of_equal_rows_and_coefficient_1_for_every_worker():
    allocation = allocated(Tree(4, 3, 1))
    assert {len(shares) for shares in allocation.shares} == {1}
    assert {len(share.cells) for shares in allocation.shares for share in shares} == {1}
    assert {share.coefficient for shares in allocation.shares for share in shares} == {1.0}


def test_repetition_has_the_sum_as_soon_as_one_of_each_group_is_there():
    chosen = code(6, 2)
    assert decoding(chosen, [4, 5, 3]) is None
    assert decoding(chosen, [4, 5, 1]) == [(1, 1.0), (4, 1.0)]


def test_parents_and_children_find_each_other():
    tree = Tree(3, 3, 1)
    assert list(tree.below(ROOT)) == [0, 1, 2]
    for parent in range(ROOT, tree.workers):
        for place, child in enumerate(tree.below(parent)):
            assert (tree.parent(child), tree.place(child)) == (parent, place)
            assert tree.level(child) == (1 if parent == ROOT else 1 + tree.level(parent))
    assert sorted(child for parent in range(ROOT, tree.workers) for child in tree.below(parent)) == [
        *range(tree.workers)
    ]


@given(st.integers(3, 9), st.data())
@settings(max_examples=30)
def test_the_amplification_is_that_of_the_worst_set_of_stragglers(children, data):
    stragglers = data.draw(st.integers(1, children - 2).filter(lambda each: children % (each + 1)))
    chosen = cyclic(children, stragglers, data.draw(st.integers(0, 100)))
    found = []
    for rest in combinations(range(children), children - stragglers):
        rows = chosen.matrix[[*rest]]
        solution = np.ones(children) @ np.linalg.pinv(rows)
        found.append(np.abs(solution) @ np.abs(rows).sum(axis=1) / children)
    if max(found) < 1e4:  # of others rounding decides
        assert amplification(chosen) == pytest.approx(max(found), rel=1e-6)


@pytest.mark.parametrize(
    ("children", "stragglers"), [(9, 2), (84, 4), (84, 10), (156, 6), (9, 4), *parameters.widely((401, 1))]
)
def test_children_are_in_blocks_that_have_codes_of_their_own(children, stragglers):
    """As many as there can be; each bears s stragglers, so that few parts are missing and codes well-conditioned."""
    chosen = code(children, stragglers)
    assert sum(chosen.blocks) == children and chosen.blocks == blocks_of(children, stragglers)
    assert min(chosen.blocks) > stragglers and max(chosen.blocks) - min(chosen.blocks) <= 1
    assert checked_tree(children, 1, stragglers).code == chosen
    rng = np.random.default_rng(0)
    for _ in range(20):
        there = rng.permutation(children)[stragglers:].tolist()
        total = sum(each * chosen.matrix[child] for child, each in decoding(chosen, there))
        np.testing.assert_allclose(total, 1.0, atol=1e-9)


def test_a_polynomial_code_has_the_parts_of_a_cyclic_one():
    """Degree 1: any two of four children, each without one part, give the sum."""
    chosen = polynomial(4, 2, [0.0, 1.0, 2.0, 3.0])
    assert [chosen.parts(child) for child in range(4)] == [[0, 1, 2], [1, 2, 3], [2, 3, 0], [3, 0, 1]]
    for there in combinations(range(4), 2):
        total = sum(each * chosen.matrix[child] for child, each in decoding(chosen, there))
        np.testing.assert_allclose(total, 1.0, atol=1e-12)


def test_codes_are_judged_without_decoding_every_set_of_stragglers(monkeypatch):
    """That took a minute for 84 children; what is hopeless is refused without looking for codes at all."""

    def searched(*arguments):
        raise AssertionError("a search")

    monkeypatch.setattr(np.linalg, "pinv", searched)
    monkeypatch.setattr(np.linalg, "svd", searched)
    assert checked_tree(84, 1, 4) == Tree(84, 1, 4)
    monkeypatch.setattr(np.linalg, "solve", searched)
    with pytest.raises(ValueError, match=r"no well-conditioned code is known.*children=84"):
        checked_tree(84, 1, 60)


def test_a_code_that_bears_fewer_stragglers_than_it_says_is_seen():
    assert math.isinf(amplification(Code(cyclic(5, 1).coefficients, 2, (5,))))


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((0, 1, 1), "at least one child.*children=0"),
        ((3, 0, 1), "at least one level.*depth=0"),
        ((3, 1, -1), "from 0 up.*stragglers=-1"),
        ((3, 1, 3), "no straggler.*Try stragglers=2"),
        ((3, 1, True), "stragglers=True"),
        ((10, 5, 1), "more than 4096 workers. Received: children=10, depth=5"),
        ((3, 10**9, 1), "more than 4096 workers. Received: children=3, depth=1000000000"),
        ((9, 2, 4), "could be wrong by .*that 5 divides"),
        ((397, 1, 200), "could be wrong by .*that 201 divides"),
    ],
)
def test_trees_that_cannot_be_are_refused(arguments, problem):
    with pytest.raises(ValueError, match=problem):
        checked_tree(*arguments)
