"""Ways to train in which every device has the whole model or parts of all layers: what they take and hold."""

from __future__ import annotations

from collections.abc import Iterator

from pipetrain.plan.choice import BASELINE, Way
from pipetrain.plan.cluster import SHARED_MEMORY, Cluster
from pipetrain.plan.memory import Training
from pipetrain.plan.partition import everywhere
from pipetrain.plan.profile import Profile
from pipetrain.schemes.coded_reduce import Tree, widest
from pipetrain.schemes.grid import Grid
from pipetrain.schemes.options import AllReduce, AnyScheme, CodedReduce, ParameterServer, name_of
from pipetrain.schemes.table import CODED, DATA_PARALLEL, GRID, SERVING, TRANSFERRING
from pipetrain.schemes.transfers.orders import ORDERS
from pipetrain.simulation.coded_reduce import simulate_tree
from pipetrain.simulation.data_parallel.estimate import estimated_step_s, on_fullest_server
from pipetrain.simulation.grid.estimate import estimated_grid

MOST_EXCHANGING = 16  # devices every two of which exchange messages, or that are a tree: what is simulated then
KINDS = {DATA_PARALLEL: BASELINE, CODED: BASELINE, GRID: GRID, **dict.fromkeys(TRANSFERRING, "data parallelism")}


class Copies:
    """The schemes whose devices share a minibatch's rows, as they are predicted for a profile of such parts.

    Args:
        profile: of the parts, see ``Chooser.copies``.
        devices: how many there are, a row for each at least.
        cluster: how they are joined, and what each may hold.
        training: the optimizer's slots and the kernels.
    """

    def __init__(self, profile: Profile, devices: int, cluster: Cluster, training: Training) -> None:
        self._profile, self._devices, self._cluster, self._training = profile, devices, cluster, training
        self._whole = everywhere(profile, devices, cluster, training)

    def ways(self, is_mirrored: bool, is_whole: bool) -> Iterator[Way]:
        """Each of them; ``data-parallel`` if it is possible, grids of layers that are not merged (``is_whole``)."""
        names = [*([DATA_PARALLEL] if is_mirrored else []), *TRANSFERRING]
        if self._devices <= MOST_EXCHANGING:
            names += [*([GRID] if is_whole else []), CODED]
        yield from (way for way in map(self.of, names) if way is not None)

    def of(self, scheme: AnyScheme) -> Way | None:
        """One of them, with the options that it has; None for a grid where no layer is known that it could divide."""
        name = name_of(scheme)
        if name == DATA_PARALLEL:
            return self._way(scheme, self._whole.step_s)
        if name in TRANSFERRING:
            return self._transferring(name, scheme)
        if name == GRID:
            return self._grid(scheme if isinstance(scheme, Grid) else None)
        tree = scheme.tree if isinstance(scheme, CodedReduce) else Tree(*widest(self._devices))
        step_s = simulate_tree(self._profile, *tree, self._cluster).step_s
        weights_bytes, _ = on_fullest_server(self._profile, self._devices, self._cluster)
        slots_bytes = int(self._training.slots * weights_bytes)  # which the root has, in this process
        return self._way(CodedReduce(*tree), step_s, slots_bytes, tree.workers)

    def _transferring(self, name: str, scheme: AnyScheme) -> Way:
        """With its order, if that has a name, and its servers.

        Weights that come from another server are copies, unless the devices share one memory.
        """
        order = scheme.order if isinstance(scheme, AllReduce) and scheme.order in ORDERS else None
        servers = scheme.servers if isinstance(scheme, ParameterServer) else None
        named = order if isinstance(order, str) else None
        step_s = estimated_step_s(self._profile, name, self._devices, self._cluster, servers, named)
        if name != SERVING:
            return self._way(scheme, step_s)
        weights_bytes, own_bytes = on_fullest_server(self._profile, self._devices, self._cluster, servers)
        shared = self._cluster.slowest(self._devices) == SHARED_MEMORY
        return self._way(scheme, step_s, int((self._training.slots + shared) * (weights_bytes - own_bytes)))

    def _grid(self, asked: Grid | None) -> Way | None:
        found = estimated_grid(self._profile, self._devices, self._cluster, self._training.slots, asked)
        if found is None:
            return None
        grid = asked or Grid(found.grid.outputs, found.grid.rows)
        return self._way(grid, found.step_s, found.elsewhere_bytes)

    def _way(self, scheme: AnyScheme, step_s: float, elsewhere_bytes: int = 0, devices: int | None = None) -> Way:
        memory_bytes, kind = self._whole.fullest_bytes - elsewhere_bytes, KINDS[name_of(scheme)]
        fits = self._cluster.holds(memory_bytes)
        return Way(kind, {"scheme": scheme}, devices or self._devices, step_s, memory_bytes, fits)
