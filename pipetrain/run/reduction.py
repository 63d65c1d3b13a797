"""The sum of gradients over the replicas of one stage."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, cast

import numpy as np
import tensorflow as tf

from pipetrain.compute.functions.inference import Replica
from pipetrain.compute.functions.stage import Stage
from pipetrain.run.mailbox import Mailbox
from pipetrain.run.transfers import moved, size_bytes
from pipetrain.schemes.splitting import shared_out
from pipetrain.trace.recent import Recent
from pipetrain.trace.records import Transfer, Transfers


class Reduction:
    """Every replica sums about an r-th of the weights' gradients and sends the sums to the others.

    Sums are added in the order of the replicas, whichever arrives first, so all replicas have bitwise equal sums.
    ``shared_out`` says which replica sums which gradients, ``reduction_bytes`` what each sends.

    Args:
        stages: the stage's replicas.
        kept: how many transfers of a replica are recorded, the newest.
    """

    def __init__(self, stages: Sequence[Replica], kept: int) -> None:
        self._stages, count = list(stages), len(stages)
        self._owned = shared_out([variable.shape.num_elements() for variable in stages[0].variables], count)
        self._to: list[list[Mailbox[Any]]] = [[Mailbox() for _ in range(count)] for _ in range(count)]
        self._done = [Recent(Transfers, kept) for _ in range(count)]

    @property
    def mailboxes(self) -> list[Mailbox[Any]]:
        """All mailboxes at which replicas may wait."""
        return [box for boxes in self._to for box in boxes]

    def sum(self, replica: int, gradients: list[Any] | None, microbatch: int) -> list[Any]:
        """This replica's gradients in, the sum of all replicas' out; None for a replica that had no rows.

        ``microbatch`` is the number under which it is recorded.
        """
        if len(self._stages) == 1:
            return gradients or []
        start_s = time.perf_counter()
        shares = [None if gradients is None else [gradients[n] for n in owned] for owned in self._owned]
        total, owned = None, self._owned[replica]
        for share in self._exchanged(replica, shares):
            total = total if share is None else cast(Stage, self._stages[replica]).accumulate(total, share, owned)
        sums = self._exchanged(replica, [total] * len(self._stages))
        end_s = time.perf_counter()
        sent = [*shares[:replica], *shares[replica + 1 :], *[total] * (len(shares) - 1)]
        size = size_bytes(tf.nest.flatten(sent, expand_composites=True))
        self._done[replica].append(Transfer("R", microbatch, 0, replica, 0, replica, size, start_s, end_s))
        of = dict(zip(chain(*self._owned), chain(*sums), strict=True))
        return [of[n] for n in range(len(of))]

    def transfers(self, stage: int, replica: int) -> Transfers:
        """The transfers of this replica's sums, recorded for this stage."""
        done = self._done[replica].columns()
        stages = np.full_like(done.from_stage, stage)
        return replace(done, from_stage=stages, to_stage=stages)

    def _exchanged(self, replica: int, shares: list[Any]) -> list[Any]:
        """Send every replica its share; receive what each of them sends, in the order of replicas."""
        for other, share in enumerate(shares):
            self._to[other][replica].put(share)
        device = self._stages[replica].device
        return [None if (each := box.get()) is None else moved(each, device) for box in self._to[replica]]
