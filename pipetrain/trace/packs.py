"""The packs of a plan of transfers as a trace has them: when each was sent, was there and was used."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipetrain.trace.records import Transfers, What
from pipetrain.trace.trace import Trace

BETWEEN_REPLICAS = ("B", "F", "R", "W")  # in the order of the alphabet


class PackTimes(NamedTuple):
    """One message of a pack: what it is, the minibatch, its ends, the pack's place in the plan, and its seconds.

    ``used_s`` is its first use, as far as the trace knows, else its arrival. ``inverted``: one that is behind it in the
    plan, and goes the same way, has arrived before it.
    """

    op: What
    microbatch: int
    from_replica: int
    to_replica: int
    pack: int
    size_bytes: int
    sent_s: float
    arrived_s: float
    used_s: float
    inverted: bool


def packs(trace: Trace) -> list[PackTimes]:
    """The messages between replicas whose transfers a plan orders, in the order in which they were sent."""
    sent = messages(trace.transfers)
    return [
        PackTimes(
            each.op,
            each.microbatch,
            each.from_replica,
            each.to_replica,
            each.pack,
            each.size_bytes,
            each.start_s,
            each.end_s,
            each.end_s + each.kept_s,
            wrong,
        )
        for each, wrong in zip(sent, inverted(sent).tolist(), strict=True)
    ]


def messages(transfers: Transfers) -> Transfers:
    """Those that are single messages between two replicas of a stage.

    They are of weights, of gradients to be summed, and on a grid of activations and their gradients.
    """
    among = np.isin(transfers.op, BETWEEN_REPLICAS) & (transfers.from_stage == transfers.to_stage)
    found: Transfers = transfers[among & (transfers.from_replica != transfers.to_replica)]
    return found


def inverted(sent: Transfers) -> NDArray[np.bool_]:
    """Of messages, whether one arrived earlier that goes the same way in the same step and is behind it in the plan."""
    ways = np.stack([np.searchsorted(BETWEEN_REPLICAS, sent.op), sent.microbatch, sent.from_replica, sent.to_replica])
    order = np.lexsort((sent.pack, sent.end_s, *ways))
    begins = (np.diff(ways[:, order].astype(np.int64), axis=1, prepend=-1) != 0).any(axis=0)
    way = np.cumsum(begins)
    key = way * (1 + int(sent.pack.max(initial=0))) + sent.pack[order]
    wrong = np.zeros(len(sent), dtype=bool)
    wrong[order] = key < np.maximum.accumulate(key)
    return wrong
