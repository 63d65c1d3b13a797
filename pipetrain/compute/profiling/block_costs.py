"""The seconds and bytes of a chain's blocks: measured, compiled by XLA or not, or estimated from those that are."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from statistics import median
from typing import NamedTuple

import keras
import tensorflow as tf

from pipetrain.compute.cores import cores, is_remote
from pipetrain.compute.functions.split import size_bytes, specs
from pipetrain.compute.graph.blocks import Chain
from pipetrain.compute.graph.segment import Segment
from pipetrain.compute.graph.sharing import embeddings, shared_by_blocks
from pipetrain.compute.profiling.block_functions import BlockFunctions, Keeps
from pipetrain.compute.profiling.block_passes import Placed, lone_pass
from pipetrain.compute.profiling.kinds import Kind, Kinds, Workspace
from pipetrain.compute.profiling.limits import Budget
from pipetrain.compute.profiling.progress import Progress
from pipetrain.compute.profiling.timing import time_blocks
from pipetrain.plan.cost import CLEAR
from pipetrain.plan.profile import BlockProfile, Seconds
from pipetrain.plan.roofline import FittedRoofline, Measured


def block_bytes(chain: Chain, kinds: Kinds, rows: int, minibatch_rows: int) -> list[BlockProfile]:
    """Every block without its seconds; ``estimated`` are those of kinds that have not been traced."""
    like = kinds.like
    found: list[BlockProfile] = []
    made = dict.fromkeys(chain.crossing(0), 0)  # the block that made each value, or first has it
    saved: dict[int, int] = {}  # the same, of those that some backward reads
    shared, trained = shared_by_blocks([block.calls for block in chain.blocks]), chain.trained()
    weights = chain.model.trainable_variables
    tables = {id(weights[n]) for n in embeddings(chain.model, weights)}
    for index, (block, kind, segment) in enumerate(zip(chain.blocks, kinds.of, kinds.segments, strict=True)):
        keeps = kind.traced.keeps if kind.traced else _counted(kind)
        made.update(dict.fromkeys(segment.writes, index))
        pairs = [*zip(segment.reads, keeps.inputs, strict=True), *zip(segment.writes, keeps.outputs, strict=True)]
        saved.update((value, made[value]) for value, keep in pairs if keep and value in made)
        cost = BlockProfile(
            name=block.name,
            forward_s=0.0,
            backward_s=0.0,
            output_bytes=sum(size_bytes(like[value]) for value in chain.crossing(index + 1)),
            weight_bytes=sum(size_bytes(spec) for spec in specs(segment.trainable_variables)),
            activation_bytes=keeps.inner_bytes,
            shared=tuple((number, sum(map(size_bytes, specs([weight])))) for number, weight in shared[index]),
            fixed_bytes=sum(size_bytes(spec) for spec in specs(segment.non_trainable_variables)),
            estimated=kind.traced is None,
            floats=floats_of([like[value] for value in chain.crossing(index + 1) if value in trained]),
            rows_bytes=_rows_bytes(kind, segment, tables, [weight for _, weight in shared[index]]),
            shared_rows=tuple(number for number, weight in shared[index] if id(weight) in tables),
        )
        found.append(_shown(cost, kind, rows, minibatch_rows))
    for value, index in saved.items():
        more = found[index].activation_bytes + size_bytes(like[value])
        found[index] = replace(found[index], activation_bytes=more)
    return found


def _rows_bytes(kind: Kind, segment: Segment, tables: Collection[int], shared: Sequence[keras.Variable]) -> int:
    """The bytes of the weights that no other block has whose gradients are rows, as traced or of embeddings."""
    rows = kind.traced.functions.rows if kind.traced else ()
    weights = [each for n, each in enumerate(segment.trainable_variables) if n in rows or id(each) in tables]
    return sum(map(size_bytes, specs([each for each in weights if all(each is not other for other in shared)])))


def floats_of(specs: Sequence[tf.TensorSpec]) -> tuple[int, int]:
    """How many floating-point numbers there are, and their bytes."""
    floats = [each for each in specs if each.dtype.is_floating]
    size = sum(map(size_bytes, floats))
    return sum(size_bytes(each) // each.dtype.size for each in floats), size


def _shown(cost: BlockProfile, kind: Kind, rows: int, minibatch_rows: int) -> BlockProfile:
    """With what only a trace shows."""
    if kind.traced is None:
        return cost
    functions, workspace = kind.traced.functions, kind.workspace or Workspace(0, 0)
    return replace(
        cost,
        workspace_bytes=workspace.whole_bytes,
        row_workspace_bytes=workspace.row_bytes,
        product_bytes=functions.product_bytes(rows, minibatch_rows),
        late_bytes=functions.late_bytes(),
    )


def _counted(kind: Kind) -> Keeps:
    """All that it writes is kept until its backward."""
    outputs = sum(map(size_bytes, kind.outputs))
    return Keeps(max(kind.work.activation_bytes - outputs, 0), [False] * len(kind.inputs), [True] * len(kind.outputs))


WINDOW_BYTES = 2**30  # of blocks that are timed together
TIMING = 0.7  # of a budget, in which TensorFlow's kernels are timed


def timed(
    kinds: Kinds, blocks: Sequence[BlockProfile], device: str, is_whole: bool, budget: Budget
) -> tuple[list[BlockProfile], float]:
    """The blocks with their seconds, and the error of the sum of those measured as a part of it.

    Every block is measured if it ``is_whole``, else one of each kind that is traced, which stands for all of it.
    """
    numbers = [*range(len(blocks))] if is_whole else [kind.blocks[0] for kind in kinds.all if kind.traced]
    placed = [kinds.placed(n) for n in numbers]
    found, spread = measured(placed, [blocks[n] for n in numbers], device, is_whole, partial(budget.has, TIMING))
    seconds = dict(zip(numbers, found, strict=True))
    if not is_whole:
        seconds |= _shared(kinds, seconds) | _estimated(kinds, blocks, seconds)
    return [replace(block, **asdict(seconds[n])) for n, block in enumerate(blocks)], spread


def measured(
    placed: Sequence[Placed], blocks: Sequence[BlockProfile], device: str, are_neighbours: bool, has_time: partial[bool]
) -> tuple[list[Seconds], float]:
    """The seconds of every block, and the error of their sum as a part of it; updates by the sizes of the weights."""
    found, errors_s = [], 0.0
    for first, end in _windows(blocks):
        seconds = time_blocks(placed[first:end], device, others(device), are_neighbours, has_time)
        errors_s += seconds.error
        weights = max(sum(block.weight_bytes for block in blocks[first:end]), 1)
        for block, forward_s, backward_s in zip(blocks[first:end], seconds.forward, seconds.backward, strict=True):
            found.append(Seconds(float(forward_s), float(backward_s), seconds.update * block.weight_bytes / weights))
    whole_s = sum(seconds.total_s for seconds in found)
    return found, errors_s / whole_s if whole_s else 0.0


def _shared(kinds: Kinds, seconds: dict[int, Seconds]) -> dict[int, Seconds]:
    """Those of all blocks that are equal to one that was measured."""
    return {n: seconds[kind.blocks[0]] for kind in kinds.all if kind.traced for n in kind.blocks}


def _estimated(kinds: Kinds, blocks: Sequence[BlockProfile], seconds: dict[int, Seconds]) -> dict[int, Seconds]:
    """Those of the blocks of kinds that were not."""
    traced = [(kind, seconds[kind.blocks[0]]) for kind in kinds.all if kind.traced]
    fitted = FittedRoofline([Measured(kind.label, kind.work, each.forward_s, each.backward_s) for kind, each in traced])
    weights = sum(blocks[kind.blocks[0]].weight_bytes for kind, _ in traced)
    rate_s = sum(each.update_s for _, each in traced) / max(weights, 1)
    return {
        n: Seconds(*fitted.seconds(kind.label, kind.work), rate_s * blocks[n].weight_bytes)
        for kind in kinds.all
        for n in kind.blocks
        if kind.traced is None
    }


def others(device: str) -> list[str]:
    """The devices kept busy during the measurement: other CPU devices of this process or of the workers."""
    cpus = [cpu.name for cpu in tf.config.list_logical_devices("CPU") if is_remote(cpu.name) == is_remote(device)]
    beside = [cpu for cpu in cpus if device in cpus and cpu != device]
    return beside if is_remote(device) else beside[: len(cores()) - 1]  # each on a core of its own


def _windows(blocks: Sequence[BlockProfile]) -> Iterator[tuple[int, int]]:
    """Runs of blocks that are measured together: as many as fit in memory beside the model on any device."""
    first, held = 0, 0
    for n, block in enumerate(blocks):
        needs = 3 * block.weight_bytes + block.activation_bytes  # a copy, its momentum, its gradients
        if n > first and held + needs > WINDOW_BYTES:
            yield first, n
            first, held = n, 0
        held += needs
    yield first, len(blocks)


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
