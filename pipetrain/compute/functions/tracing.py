"""All stages' functions traced one after another, each for what the one before it gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipetrain.compute.functions.inference import Replica


def trace_stages(stages: Sequence[Sequence[Replica]], targets: Any) -> Sequence[Any]:
    """Trace all stages, the last one for labels and sample weights of these specs; gives the specs of outputs' masks.

    Stages on whose outputs the loss does not depend are traced again with this knowledge.
    """
    masks: list[list[Any]] = [[None] * len(stages[0][0].segment.inputs)]
    for stage in stages:
        last = stage is stages[-1]
        masks.append([replica.trace(masks[-1], targets if last else None) for replica in stage][-1])
    for above, given, below in list(zip(stages, masks, stages[1:], strict=False))[::-1]:
        for replica in above if below[0].unreached else ():
            replica.trace(given, None, below[0].unreached)
    return masks[-1]
