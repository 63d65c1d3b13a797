"""The table of operations, and an action: one operation of one stage on one microbatch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

Op = Literal["F", "B", "I", "W", "FB", "FI", "U"]
Value = Literal["outputs", "activations", "input gradients", "weight operands", "weight gradients", "weights"]


class Need(NamedTuple):
    """A value of the same microbatch, and whose: that of this stage (0), the stage before (-1) or after it (1).

    Before the first stage and after the last one nothing is needed.
    """

    value: Value
    stage: int = 0


class Operation(NamedTuple):
    """What an operation needs before it can begin, what is there when it has ended, and what is freed by then.

    ``reads`` says which weights: those that the policy gives to forwards, those that it gives to backwards, both or
    none. ``forward``, ``early`` and ``late`` are the parts that it does of the computation of a whole forward, of what
    leads to the input gradients, and of the weight gradients that may wait. Who makes weight gradients changes weights:
    the last one of a minibatch at a stage, see ``completes``, is followed by the stage's update.
    """

    about: str
    needs: tuple[Need, ...]
    makes: tuple[Value, ...]
    frees: tuple[Value, ...] = ()
    reads: tuple[Literal["forward", "backward"], ...] = ()
    forward: float = 0.0
    early: float = 0.0
    late: float = 0.0

    @property
    def received(self) -> tuple[Value, ...]:
        """What it needs of the stages before and after."""
        return tuple(need.value for need in self.needs if need.stage)

    @property
    def holds(self) -> tuple[int, int]:
        """How many more values are held while it works than before, and how many more after it.

        What it frees is counted while it works unless it is another value that takes its place.
        """
        after = sum(value in HELD for value in self.makes) - len(self.frees)
        return max(len({*self.makes} & {*self.frees}), after), after


OPERATIONS: dict[str, Operation] = {
    "F": Operation("forward", (Need("outputs", -1),), ("outputs", "activations"), reads=("forward",), forward=1.0),
    "B": Operation(
        "backward",
        (Need("activations"), Need("input gradients", 1)),
        ("input gradients", "weight gradients"),
        ("activations",),
        reads=("backward",),
        early=1.0,
        late=1.0,
    ),
    # B in halves: the gradients of the stage's inputs, for which the stage before waits, and those of its weights
    "I": Operation(
        "input gradients",
        (Need("activations"), Need("input gradients", 1)),
        ("input gradients", "weight operands"),
        ("activations",),
        reads=("backward",),
        early=1.0,
    ),
    "W": Operation(
        "weight gradients", (Need("weight operands"),), ("weight gradients",), ("weight operands",), late=1.0
    ),
    # F and B, or F and I, of one microbatch in one call: at the last stage, where nothing has to arrive between them
    "FB": Operation(
        "forward and backward",
        (Need("outputs", -1), Need("input gradients", 1)),
        ("outputs", "activations", "input gradients", "weight gradients"),
        ("activations",),
        reads=("forward", "backward"),
        forward=1.0,
        early=1.0,
        late=1.0,
    ),
    "FI": Operation(
        "forward and input gradients",
        (Need("outputs", -1), Need("input gradients", 1)),
        ("outputs", "activations", "input gradients", "weight operands"),
        ("activations",),
        reads=("forward", "backward"),
        forward=1.0,
        early=1.0,
    ),
    # of programs alone: a minibatch's gradients summed with those of other replicas and stages, and the next version
    "U": Operation("update", (Need("weight gradients"),), ("weights",)),
}
ORDERED = tuple(op for op in OPERATIONS if op != "U")  # what an order of a schedule is made of
FROM_ABOVE = tuple(op for op, each in OPERATIONS.items() if "outputs" in each.received)  # of the stage before
FROM_BELOW = tuple(op for op, each in OPERATIONS.items() if "input gradients" in each.received)  # of the stage after
SENT: dict[Value, int] = {need.value: -need.stage for each in OPERATIONS.values() for need in each.needs if need.stage}
HELD = frozenset(value for each in OPERATIONS.values() for value in each.frees)  # in memory until it is freed


class Action(NamedTuple):
    """One step of one device, printed ``2F3``: virtual stage 2, forward, microbatch 3.

    Microbatches are numbered through: those of minibatch 0 come first, then those of minibatch 1, and so on.
    """

    op: Op
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.op}{self.microbatch}"

    def later(self, microbatches: int) -> Action:
        """The same of a microbatch so many later."""
        return self._replace(microbatch=self.microbatch + microbatches)

    @property
    def operation(self) -> Operation:
        """Its row in the table."""
        return OPERATIONS[self.op]

    @property
    def updates(self) -> bool:
        """Whether it makes weight gradients."""
        return "weight gradients" in OPERATIONS[self.op].makes

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read ``2F3`` back; raises ValueError for anything else."""
        match = re.fullmatch(r"(\d+)([A-Z]+)(\d+)", text)
        if match is None or match[2] not in OPERATIONS:
            raise ValueError(
                f"Not an action. Received: text={text!r}. Try stage, one of {', '.join(OPERATIONS)}, microbatch, "
                "as in '2F3'."
            )
        return cls(match[2], int(match[1]), int(match[3]))  # type: ignore[arg-type]


def held(actions: Sequence[Action]) -> list[int]:
    """How many microbatches' values a device holds during each of its actions: activations, and operands kept for W."""
    counts, now = [], 0
    for action in actions:
        during, after = action.operation.holds
        counts.append(now + during)
        now += after
    return counts


def completes(actions: Sequence[Action], microbatches: int) -> list[bool]:
    """For each action, whether its stage then has all weight gradients of a minibatch: its update follows."""
    last = {(each.stage, each.microbatch // microbatches): n for n, each in enumerate(actions) if each.updates}
    numbers = {*last.values()}
    return [n in numbers for n in range(len(actions))]
