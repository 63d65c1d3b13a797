"""Which of a pipeline's stages XLA compiles."""

from __future__ import annotations

from collections.abc import Sequence

AUTO = "auto"


class KernelChoice:
    """What ``compile(jit_compile=...)`` asks for and, where that leaves it open, what has been decided since.

    Args:
        stages: how many there are.
    """

    def __init__(self, stages: int) -> None:
        self._stages = stages
        self._asked: bool | str = AUTO
        self._decided: list[bool] | None = None

    @property
    def asked(self) -> bool | str:
        """``True``, ``False`` or ``"auto"``."""
        return self._asked

    def ask(self, jit_compile: bool | str) -> bool:
        """What ``compile`` says; whether it is new."""
        if jit_compile == self._asked:
            return False
        self._asked, self._decided = jit_compile, None
        return True

    @property
    def compiled(self) -> list[bool] | None:
        """Of each stage, whether XLA compiles it; None if nothing has decided it yet."""
        return self._decided if self._asked == AUTO else [self._asked is True] * self._stages

    def reopen(self) -> None:
        """Forget what has been decided: it was for other stages."""
        self._decided = None

    def decide(self, compiled: Sequence[bool]) -> bool:
        """Take over a decision for as many stages where it is open; whether it is new."""
        if self._asked != AUTO or len(compiled) != self._stages or list(compiled) == self._decided:
            return False
        self._decided = list(compiled)
        return True
