"""The sum of gradients over the replicas of one stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from pipetrain.compute.stage import Stage
from pipetrain.run.devices import transfer
from pipetrain.run.mailbox import Mailbox


class Reduction:
    """Every replica sums an r-th of the weights' gradients and sends the sums to the others.

    The order of a sum is that of the replicas, whoever comes first: all have bitwise equal sums. Each sends
    ``2 * (r-1)/r`` of the gradients' bytes.

    Args:
        stages: the stage's replicas.
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._stages, count = list(stages), len(stages)
        self._to: list[list[Mailbox[Any]]] = [[Mailbox() for _ in range(count)] for _ in range(count)]

    @property
    def mailboxes(self) -> list[Mailbox[Any]]:
        """All that replicas may wait at."""
        return [box for boxes in self._to for box in boxes]

    def sum(self, replica: int, gradients: list[Any] | None) -> list[Any]:
        """This replica's gradients in, the sum of all replicas' out; None for a replica that had no rows."""
        if len(self._stages) == 1:
            return gradients or []
        count = len(self._stages)
        shares = [None if gradients is None else gradients[owner::count] for owner in range(count)]
        total = None
        for share in self._exchanged(replica, shares):
            total = total if share is None else self._stages[replica].accumulate(total, share)
        sums = self._exchanged(replica, [total] * count)
        size = sum(len(each) for each in sums)
        return [sums[variable % count][variable // count] for variable in range(size)]

    def _exchanged(self, replica: int, shares: list[Any]) -> list[Any]:
        """Give every replica its share; get what each of them gives this one, in their order."""
        for other, share in enumerate(shares):
            self._to[other][replica].put(_moved(share, self._stages[other].device))
        return [box.get() for box in self._to[replica]]


def _moved(gradients: list[Any] | None, device: str) -> list[Any] | None:
    def move(tensor: Any) -> Any:
        return None if tensor is None else transfer(tensor, device)

    return None if gradients is None else tf.nest.map_structure(move, gradients, expand_composites=True)
