"""What a simulation of data parallelism is told: the workers, how they are joined, and what they compute."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from pipetrain.plan.cluster import Cluster
from pipetrain.schemes.arguments import checked_count
from pipetrain.schemes.transfers.plan import Phase
from pipetrain.schemes.transfers.workload import Message, Workload

NOTHING = Message()
COUNTED = "Data parallelism has whole numbers from 1 up"


@dataclass(frozen=True)
class Setting:
    """Workers that compute the same workload, each of its own rows, on devices 0, 1, ... of a cluster.

    Args:
        workload: what one worker computes of its rows, and the model's variables.
        workers: how many there are.
        serves: whether the weights are on servers, else on every worker.
        cluster: how devices are joined, and how many work at once. A link's latency is what a message takes beside its
            bytes, the runtime's part included, and what an acknowledgement takes at least.
        caller_s: seconds between the end of a step and the next one's beginning.
        servers: devices that have the weights, from the first one on; they are workers too.
        whole: whether each layer's variables are on one server, as in training, else an equal part of it on every one.
        input_bytes: of each worker's rows, which the first device sends to the others while they compute the rows
            before, from when all have the weights that their forward reads.
        at_once: whether no variable is updated before all gradients are there, as where their common norm is clipped.
        message_work: seconds of either end's processor that a message takes; what the device computes ends so much
            later.

    Raises ValueError for counts below 1, more servers than workers, and times and sizes that are negative or infinite.
    """

    workload: Workload
    workers: int
    serves: bool
    cluster: Cluster
    caller_s: float = 0.0
    servers: int = 1
    whole: bool = False
    input_bytes: int = 0
    at_once: bool = False
    message_work: Message = NOTHING

    def __post_init__(self) -> None:
        for name in ("workers", "servers"):
            checked_count(name, getattr(self, name), COUNTED, 2)
        if self.servers > self.workers:
            raise ValueError(
                f"Servers are workers too. Received: servers={self.servers}, workers={self.workers}. "
                f"Try servers={self.workers}."
            )
        for name in ("caller_s", "input_bytes"):
            _check_number(name, getattr(self, name))

    @property
    def parts(self) -> int:
        """Into how many parts, each on a server, every variable is divided."""
        return 1 if self.whole else self.servers

    def of_servers(self, phase: Phase) -> list[Phase]:
        """What of a phase's packs each server sends or gets."""
        if self.whole:
            return [phase.of(each, self.workload.sizes_bytes) for each in self.workload.on_servers(self.servers)]
        packs = tuple(pack._replace(size_bytes=-(-pack.size_bytes // self.parts)) for pack in phase.packs)
        return [phase._replace(packs=packs)] * self.servers


def _check_number(name: str, value: Any) -> None:
    if not 0 <= value < math.inf:
        raise ValueError(f"A number from 0 up is needed. Received: {name}={value!r}. Try {name}=0.")
