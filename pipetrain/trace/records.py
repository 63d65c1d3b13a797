"""What a trace is made of: actions of stages, and what they sent, one by one and as columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipetrain.schemes.actions import OPERATIONS, Op
from pipetrain.trace.columns import Columns, Names

Integers = NDArray[np.int32]
Seconds = NDArray[np.float64]
# activations, their gradients, weights' gradients to be summed over replicas, and over stages that share the weights;
# weights from a server
What = Literal["F", "B", "R", "S", "W"]
CATEGORIES = {op: operation.about for op, operation in OPERATIONS.items()}
OPS = {about: op for op, about in CATEGORIES.items()}
LONGEST = f"U{max(map(len, OPERATIONS))}"  # the type of their names
ENDING = [op for op, operation in OPERATIONS.items() if "weight gradients" in operation.makes]


class Span(NamedTuple):
    """One action of one replica of a stage, in seconds since the trace's start, and the version it began with."""

    op: Op
    stage: int
    microbatch: int
    device: str
    start_s: float
    end_s: float
    version: int
    replica: int = 0


class Transfer(NamedTuple):
    """What one replica of a stage sent to another, from when it was handed over to when it had arrived.

    In a run's trace the sender's thread copies: a transfer lies within the span of its action, the first stage's inputs
    are not recorded, and between stages that share a device it takes almost no time. Where a minibatch is one function
    on processors of this process, nothing is copied, and a transfer is the end of its action. In a simulated trace it
    overlaps with the sender's next actions.

    ``op`` is the kind of the transfer: ``F``, activations on their way down; ``B``, their gradients on the way up;
    ``R``, the reduction of weights' gradients among a stage's replicas, a transfer of each of them to its own stage,
    from its gradients being ready to the sums being there; ``S``, gradients of weights that stages share, on their way
    up to the first of these stages, and their sum over the stages on its way down; ``W``, weights that a worker gets
    from a parameter server, which is the replica of the same device. Of schemes that order their transfers ``R`` and
    ``W`` are single messages between two replicas, from when they left; ``pack`` is then the place of what is sent in
    the step's plan, and ``kept_s`` the time from its arrival to its first use, which only a simulation knows.
    """

    op: What
    microbatch: int
    from_stage: int
    from_replica: int
    to_stage: int
    to_replica: int
    size_bytes: int
    start_s: float
    end_s: float
    pack: int = 0
    kept_s: float = 0.0


@dataclass(frozen=True, eq=False)
class Spans(Columns[Span]):
    """Spans as columns."""

    record: ClassVar[Any] = Span
    dtypes: ClassVar[tuple[Any, ...]] = (LONGEST, np.int32, np.int32, None, float, float, np.int32, np.int32)

    op: NDArray[np.str_]
    stage: Integers
    microbatch: Integers
    device: Names
    start_s: Seconds
    end_s: Seconds
    version: Integers
    replica: Integers


@dataclass(frozen=True, eq=False)
class Transfers(Columns[Transfer]):
    """Transfers as columns."""

    record: ClassVar[Any] = Transfer
    dtypes: ClassVar[tuple[Any, ...]] = ("U1", *[np.int32] * 5, np.int64, float, float, np.int32, float)

    op: NDArray[np.str_]
    microbatch: Integers
    from_stage: Integers
    from_replica: Integers
    to_stage: Integers
    to_replica: Integers
    size_bytes: NDArray[np.int64]
    start_s: Seconds
    end_s: Seconds
    pack: Integers
    kept_s: Seconds
