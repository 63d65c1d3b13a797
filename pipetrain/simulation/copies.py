"""Ways to train in which every device has the whole model or parts of all layers: what they take and hold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pipetrain.plan.choice import BASELINE, Way
from pipetrain.plan.cluster import SHARED_MEMORY, Cluster
from pipetrain.plan.memory import Training
from pipetrain.plan.partition import everywhere
from pipetrain.plan.profile import Profile
from pipetrain.schemes.coding.coded_reduce import widest
from pipetrain.schemes.grid import Grid
from pipetrain.schemes.options import CodedReduce
from pipetrain.schemes.table import DATA_PARALLEL, SERVING, TRANSFERRING
from pipetrain.simulation.coded_reduce import simulate_tree
from pipetrain.simulation.data_parallel.estimate import estimated_step_s, on_fullest_server
from pipetrain.simulation.grid.estimate import estimated_grid

MOST_EXCHANGING = 16  # devices every two of which exchange messages, or that are a tree: what is simulated then


class Copies:
    """The schemes whose devices share a minibatch's rows, as they are predicted for a profile of such parts.

    Args:
        profile: of the parts, see ``Chooser.copies``.
        devices: how many there are.
        cluster: how they are joined, and what each may hold.
        training: the optimizer's slots and the kernels.
    """

    def __init__(self, profile: Profile, devices: int, cluster: Cluster, training: Training) -> None:
        self._profile, self._devices, self._cluster, self._training = profile, devices, cluster, training
        self._whole = everywhere(profile, devices, cluster, training)

    def ways(self, is_mirrored: bool, is_whole: bool) -> Iterator[Way]:
        """Each of them; ``data-parallel`` if it is possible, grids of layers that are not merged (``is_whole``)."""
        if is_mirrored:
            yield self._way(BASELINE, self._whole.step_s, scheme=DATA_PARALLEL)
        for scheme in TRANSFERRING:
            step_s = estimated_step_s(self._profile, scheme, self._devices, self._cluster)
            yield self._way("data parallelism", step_s, self._on_others(scheme), scheme=scheme)
        if self._devices <= MOST_EXCHANGING:
            if is_whole:
                yield from self.grid()
            tree = widest(self._devices)
            step_s = simulate_tree(self._profile, *tree, self._cluster).step_s
            weights_bytes, _ = on_fullest_server(self._profile, self._devices, self._cluster)
            slots_bytes = int(self._training.slots * weights_bytes)  # which the root has, in this process
            yield self._way(BASELINE, step_s, slots_bytes, scheme=CodedReduce(*tree))

    def grid(self, asked: Grid | None = None) -> Iterator[Way]:
        """The grid that is asked for, or that sends the least, if layers can be divided."""
        found = estimated_grid(self._profile, self._devices, self._cluster, self._training.slots, asked)
        if found is not None:
            grid = Grid(found.grid.outputs, found.grid.rows)
            yield self._way("grid", found.step_s, found.elsewhere_bytes, scheme=grid)

    def _on_others(self, scheme: str) -> int:
        """The bytes of weights and the optimizer's slots that a device does not have, as they are on other servers.

        Weights that come from another server are copies, unless the devices share one memory.
        """
        if scheme != SERVING:
            return 0
        weights_bytes, own_bytes = on_fullest_server(self._profile, self._devices, self._cluster)
        shared = self._cluster.slowest(self._devices) == SHARED_MEMORY
        return int((self._training.slots + shared) * (weights_bytes - own_bytes))

    def _way(self, kind: str, step_s: float, elsewhere_bytes: int = 0, **arguments: Any) -> Way:
        memory_bytes = self._whole.fullest_bytes - elsewhere_bytes
        return Way(kind, arguments, self._devices, step_s, memory_bytes, self._cluster.holds(memory_bytes))
