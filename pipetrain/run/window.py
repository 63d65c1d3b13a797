"""Keeps the pipeline full: posts minibatches ahead of the step that Keras' loop is at."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from pipetrain.run.collector import Result
from pipetrain.run.pipeline import Pipeline


class Minibatch(NamedTuple):
    """Inputs, labels and sample weights of one step, and the learning rate it takes along, if it does."""

    x: list[Any]
    y: Any
    sample_weight: Any
    learning_rate: float | None = None


def never(updates: int) -> bool:
    """For ``Window``: no update needs a drain."""
    return False


class Window:
    """Each ``step`` returns one minibatch with its result, in order, and has posted a window of later ones.

    The logs of a step are therefore those of its own minibatch, whatever is in flight. ``steps`` bounds what is read of
    ``minibatches``: Keras may go on reading from the same iterator in the next epoch.

    If ``drains_after(n)`` is true for the number n of updates after all minibatches posted so far, nothing more is
    posted until every result is taken: the weights are then those of exactly n updates. ``updates`` are those made
    before.

    A pipeline that ``sends_ahead`` is given each minibatch one before its turn, to send it; an error in reading it is
    raised at its own turn.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        minibatches: Iterator[Minibatch],
        steps: int | None,
        drains_after: Callable[[int], bool] = never,
        updates: int = 0,
    ) -> None:
        self._pipeline, self._minibatches = pipeline, minibatches
        self._left, self._drains_after, self._updates = steps, drains_after, updates
        self._posted: deque[Minibatch] = deque()
        self._following: list[Minibatch | Exception | None] = []  # the next one, if it has been read

    @property
    def in_flight(self) -> int:
        """How many minibatches are posted whose results no step has taken."""
        return len(self._posted)

    def step(self) -> tuple[Minibatch, Result]:
        """The next minibatch and its result. Raises StopIteration when the data have ended."""
        while len(self._posted) < self._pipeline.window and self._left != 0:
            if self._posted and self._drains_after(self._updates):
                break
            minibatch = self._read()
            if minibatch is None:
                self._left = 0
                break
            self._left = None if self._left is None else self._left - 1
            self._send_ahead()
            self._pipeline.post(*minibatch)
            self._posted.append(minibatch)
            self._updates += 1
        if not self._posted:
            raise StopIteration
        return self._posted.popleft(), self._pipeline.result()

    def _read(self) -> Minibatch | None:
        """The next minibatch; None when the data have ended."""
        following = self._following.pop() if self._following else next(self._minibatches, None)
        if isinstance(following, Exception):
            raise following
        return following

    def _send_ahead(self) -> None:
        if not self._pipeline.sends_ahead or self._left == 0:
            return
        try:
            following = next(self._minibatches, None)
            if following is not None:
                self._pipeline.send_ahead(following.x, following.y, following.sample_weight)
            self._following.append(following)
        except Exception as error:
            self._following.append(error)

    def remaining(self) -> Iterator[tuple[Minibatch, Result]]:
        """The results of minibatches posted ahead and not yet returned; no more minibatches are read."""
        self._left = 0
        while self._posted:
            yield self._posted.popleft(), self._pipeline.result()
