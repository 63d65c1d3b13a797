"""The seconds of a chain's blocks: measured, or estimated from those that are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial

import tensorflow as tf

from pipetrain.compute.cores import cores, is_remote
from pipetrain.compute.profiling.block_passes import Placed
from pipetrain.compute.profiling.block_timing import time_blocks
from pipetrain.compute.profiling.budget import Budget
from pipetrain.compute.profiling.kinds import Kinds
from pipetrain.plan.profile import BlockProfile, Seconds
from pipetrain.plan.roofline import FittedRoofline, Measured

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
