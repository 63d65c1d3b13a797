"""Plans of transfers for the tests."""

from __future__ import annotations

from pipetrain.compute.functions.split import specs
from pipetrain.compute.profiling.block_functions import size_bytes
from pipetrain.schemes.transfers.plan import Pack, Phase, Plan


def late_plan(model, late=4, window=1):
    """For an all-reduce: a pack for each variable, some in the next forward; one of them in chunks."""
    sizes = list(map(size_bytes, specs(model.trainable_variables)))
    packs = [Pack((n,), size) for n, size in enumerate(sizes)]
    chunks = [Pack((2,), sizes[2] // 2, k, 2) for k in range(2)]
    return Plan(Phase(), Phase(tuple(packs[: late - 1 : -1]), window), Phase((*packs[:2], *chunks, *packs[3:late])))
