"""The cost model: what a stage made of some blocks takes per minibatch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipetrain.plan.profile import Profile


@dataclass(frozen=True)
class Link:
    """A connection between neighbouring stages: ``seconds = latency_s + bytes / bandwidth_bytes_per_s``."""

    bandwidth_bytes_per_s: float
    latency_s: float = 0.0

    def seconds(self, size_bytes: float) -> float:
        """The time of one transfer."""
        return self.latency_s + size_bytes / self.bandwidth_bytes_per_s


# PCIe 3.0 x16 carries 15.75 GB/s; about three quarters of it reach a tensor copy.
PCIE_3 = Link(bandwidth_bytes_per_s=12e9, latency_s=10e-6)


def stage_seconds(profile: Profile, link: Link) -> NDArray[np.float64]:
    """Seconds per minibatch of every possible stage: ``cost[i, j]`` for blocks i to j-1, infinite where i >= j.

    ``cost[i, j] = sum(forward + backward) + transfer(activations out of j-1) + transfer(gradients out of i)``,
    the transfers only where a neighbouring stage exists. Shape (blocks + 1, blocks + 1).
    """
    blocks = profile.blocks
    compute = np.concatenate([[0.0], np.cumsum([b.forward_s + b.backward_s for b in blocks])])
    crossing = np.array([0.0, *(link.seconds(b.output_bytes) for b in blocks[:-1]), 0.0])
    cost: NDArray[np.float64] = compute[None, :] - compute[:, None] + crossing[None, :] + crossing[:, None]
    rows, columns = np.indices(cost.shape)
    cost[rows >= columns] = np.inf
    return cost
