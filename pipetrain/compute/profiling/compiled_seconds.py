"""What a chain's blocks take where XLA compiles them, if it may be faster than TensorFlow's kernels."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from statistics import median
from typing import NamedTuple

import tensorflow as tf

from pipetrain.compute.profiling.block_functions import BlockFunctions
from pipetrain.compute.profiling.block_passes import Placed, lone_pass
from pipetrain.compute.profiling.block_seconds import measured
from pipetrain.compute.profiling.budget import Budget
from pipetrain.compute.profiling.kinds import Kinds
from pipetrain.compute.profiling.progress import Progress
from pipetrain.plan.cost import CLEAR
from pipetrain.plan.profile import BlockProfile, Seconds

ROUNDS = 3  # of a block by itself, with either kernels by turns
STAGE = 1 / 8  # of the time, that a stage has at least


class _Trial(NamedTuple):
    """A kind's functions as XLA compiles them, None where it cannot, and its seconds as a part of TensorFlow's."""

    functions: BlockFunctions | None
    part: float


def with_compiled(
    kinds: Kinds, blocks: list[BlockProfile], device: str, is_whole: bool, budget: Budget, progress: Progress
) -> tuple[list[BlockProfile], float]:
    """The blocks with what they take compiled, and the spread of that; as they were if XLA cannot be faster.

    Every block is measured with its neighbours if it ``is_whole`` and there is time for that. Else a block's seconds
    are those of TensorFlow's kernels times the part that a block of its kind takes by itself; of kinds that were not
    tried, for want of time, they are the same with either kernels.
    """
    before_s = budget.spent_s
    trials = _trials(kinds, blocks, device, budget, progress)
    if trials is None:
        return blocks, 0.0
    each_s = (budget.spent_s - before_s) / max(len(trials), 1)
    if not (is_whole and budget.has(1.0, each_s * len(blocks))):
        pairs = zip(blocks, kinds.of, strict=True)
        return [replace(block, compiled=_by_part(block, trials.get(id(kind)))) for block, kind in pairs], 0.0
    placed = [_compiled(kinds, n, trials) for n in range(len(blocks))]
    with suppress(tf.errors.OpError):  # of the update, which no block tells
        found, spread = measured(placed, blocks, device, True, partial(budget.has, 1.0))
        return [
            replace(block, compiled=seconds if each.functions.compiled else None)
            for block, seconds, each in zip(blocks, found, placed, strict=True)
        ], spread
    return blocks, 0.0


def _trials(
    kinds: Kinds, blocks: Sequence[BlockProfile], device: str, budget: Budget, progress: Progress
) -> dict[int, _Trial] | None:
    """Of each kind, by its ``id``, the longest first; None as soon as XLA cannot be faster for any stage."""
    plain_s = [block.seconds.total_s for block in blocks]
    seconds = {id(kind): sum(plain_s[n] for n in kind.blocks) for kind in kinds.all}
    found: dict[int, _Trial] = {}

    def compiled_s(untried: float) -> list[float]:
        parts = (found[id(kind)].part if id(kind) in found else untried for kind in kinds.of)
        return [part * each_s for part, each_s in zip(parts, plain_s, strict=True)]

    for kind in sorted((kind for kind in kinds.all if kind.traced), key=lambda kind: -seconds[id(kind)]):
        if not budget.has(1.0):
            break
        found[id(kind)] = _trial(kinds.placed(kind.blocks[0]), device)
        progress.add(len(kind.blocks))
        if not may_win(plain_s, compiled_s(untried=0.0)):
            return None
    return found if may_win(plain_s, compiled_s(untried=1.0)) else None


def may_win(plain_s: Sequence[float], compiled_s: Sequence[float]) -> bool:
    """Whether neighbouring blocks that take at least ``STAGE`` of the time are faster compiled, by ``CLEAR``.

    Of each block, the least that it takes compiled: longer runs than the shortest ones have one such run among them.
    """
    least_s, first, plain, compiled = STAGE * sum(plain_s), 0, 0.0, 0.0
    for n in range(len(plain_s)):
        plain, compiled = plain + plain_s[n], compiled + compiled_s[n]
        while plain - plain_s[first] >= least_s and first < n:
            plain, compiled, first = plain - plain_s[first], compiled - compiled_s[first], first + 1
        if plain >= least_s and compiled * CLEAR < plain:
            return True
    return False


def _trial(block: Placed, device: str) -> _Trial:
    """Compile it, and run it by itself with either kernels by turns."""
    try:
        functions = BlockFunctions(block.segment, block.inputs, compiled=True)
        both = [lone_pass(each, device) for each in (block, block._replace(functions=functions))]
        for once in both:
            once()
        plain, compiled = zip(*([once() for once in both] for _ in range(ROUNDS)), strict=True)
    except tf.errors.OpError:  # whatever it is: nobody has asked for XLA
        return _Trial(None, 1.0)
    return _Trial(functions, median(compiled) / max(median(plain), 1e-9))


def _compiled(kinds: Kinds, index: int, trials: dict[int, _Trial]) -> Placed:
    """A block by XLA, where it can compile it."""
    placed, functions = kinds.placed(index), trials[id(kinds.of[index])].functions
    return placed._replace(functions=functions) if functions else placed


def _by_part(block: BlockProfile, trial: _Trial | None) -> Seconds | None:
    """A block's seconds compiled, by those with TensorFlow's kernels; its update takes as long."""
    if trial is not None and trial.functions is None:
        return None
    return block.seconds.times(1.0 if trial is None else trial.part, 1.0)
