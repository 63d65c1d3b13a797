"""What devices hold between two calls of functions, taken while training goes on: what a checkpoint needs of a run."""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

from pipetrain.compute.functions.stage_values import KeptStage
from pipetrain.run.collector import Result, Snapshot


class InFlight(NamedTuple):
    """What is in flight in a pipeline that does not flush, minibatches counted since it was empty.

    Attributes:
        slices: what calls have been made, see ``Course.slice``: each up to so many results, and where fewer minibatches
            had come than it asks for, how many had. What is in flight does not depend on how earlier ones were cut.
        posted: of every minibatch that matters, its number, rows and learning rate; the rates of those too that have
            been posted and not gone in: they are read again, and would have another rate.
        specs: of what the last call has left, as functions know it.
        held: that, as tensors.
        results: those that are there and that no step has taken.
        parts: the weights kept for snapshots that not all stages have come to, by version and stage.
        snapshots: those that are complete, and after how many updates they are given.
    """

    slices: list[tuple[int, int | None]]
    posted: list[tuple[int, int, float | None]]
    specs: Any
    held: list[tf.Tensor]
    results: list[Result]
    parts: dict[int, dict[int, list[Any]]]
    snapshots: list[tuple[int, Snapshot]]


class Kept(NamedTuple):
    """All that the devices hold between two calls, after so many results have been ``taken`` since they last drained.

    ``stages`` are those of all replicas of every stage. Where nothing is in flight between two calls, ``taken`` is 0,
    and training goes on from it as after a drain. A call has so many ``minibatches``.
    """

    stages: list[list[KeptStage]]
    taken: int = 0
    in_flight: InFlight | None = None
    minibatches: int = 1
