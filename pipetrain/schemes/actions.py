"""One action of one stage: the forward or the backward of one microbatch."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

Op = Literal["F", "B"]


class Action(NamedTuple):
    """One step of one stage, printed ``2F3``: stage 2, forward, minibatch 3.

    Schemes that split a minibatch number their microbatches through: the microbatches of minibatch 0
    come first, then those of minibatch 1, and so on.
    """

    op: Op
    stage: int
    minibatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.op}{self.minibatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read ``2F3`` back; raises ValueError for anything else."""
        match = re.fullmatch(r"(\d+)([FB])(\d+)", text)
        if match is None:
            raise ValueError(f"Not an action. Received: text={text!r}. Try stage, F or B, minibatch, as in '2F3'.")
        stage, op, minibatch = match.groups()
        return cls("F" if op == "F" else "B", int(stage), int(minibatch))
