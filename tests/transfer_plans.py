"""Plans and workloads of transfers for the tests."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import strategies as st

from pipetrain.schemes.transfers.plan import Layer, Message, Pack, Phase, Plan, Workload

SECONDS = st.integers(0, 20).map(float)
MESSAGES = st.builds(Message, SECONDS, st.sampled_from([0.0, 0.25, 1.0]))


@st.composite
def workloads(draw, most=8):
    """Graphs of layers with none, one or several variables, of which some are shared; none may have any."""
    layers, sizes = [], []
    for k in range(draw(st.integers(1, most))):
        own = range(len(sizes), len(sizes) + draw(st.integers(0, 3)))
        sizes += [draw(st.integers(1, 40)) for _ in own]
        shared = [draw(st.integers(0, len(sizes) - 1))] if sizes and draw(st.booleans()) else []
        after = sorted(draw(st.sets(st.integers(0, k - 1), max_size=2))) if k else []
        layers.append(Layer((*own, *shared), draw(SECONDS), draw(SECONDS), tuple(after)))
    return Workload(tuple(layers), tuple(sizes), draw(MESSAGES))


def late_plan(model, late=4, window=1):
    """For an all-reduce: a pack for each variable, some in the next forward; one of them in chunks."""
    sizes = [np.dtype(each.dtype).itemsize * math.prod(each.shape) for each in model.trainable_variables]
    packs = [Pack((n,), size) for n, size in enumerate(sizes)]
    chunks = [Pack((2,), sizes[2] // 2, k, 2) for k in range(2)]
    return Plan(Phase(), Phase(tuple(packs[: late - 1 : -1]), window), Phase((*packs[:2], *chunks, *packs[3:late])))


def returned_plan(model, returned=4, window=1):
    """For a parameter server: a pack for each variable, some of which are returned; one of them in chunks."""
    plan = late_plan(model, returned, window)
    pushes = Phase((*plan.pushes.packs, *plan.late.packs[::-1]), 0)
    return Plan(plan.pushes._replace(packs=plan.pushes.packs[::-1]), pushes, returned=plan.late)
