"""Ways to train in which every device has the whole model or parts of all layers: what they take and hold.

Of data parallelism on many workers there is a quick estimate: two that stand for all, with few layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from pipetrain.plan.choice import BASELINE, Way
from pipetrain.plan.cluster import SHARED_MEMORY, Cluster, Level, Link
from pipetrain.plan.memory import Training
from pipetrain.plan.partition import everywhere
from pipetrain.plan.profile import Profile, even_bounds
from pipetrain.schemes.coded_reduce import Tree, widest
from pipetrain.schemes.compression import compression_of
from pipetrain.schemes.grid import Grid
from pipetrain.schemes.options import AllReduce, AnyScheme, CodedReduce, ParameterServer, TransferOptions, name_of
from pipetrain.schemes.synchrony import Asynchronous, Gossip, LocalSGD, Stale, synchrony_of, topology_of
from pipetrain.schemes.table import CODED, DATA_PARALLEL, GRID, SERVING, TRANSFERRING
from pipetrain.schemes.transfers.orders import ONE_BY_ONE, ORDERS
from pipetrain.schemes.transfers.plan import Layer, Message, Phase, Plan, Workload
from pipetrain.simulation.coded_reduce import simulate_tree
from pipetrain.simulation.data_parallel import Setting
from pipetrain.simulation.grid import estimated_grid
from pipetrain.simulation.profiled import best_order, encoded, mean_step_s, sent_times, setting_of, workload_of

MOST_WORKERS, MOST_LAYERS = 4, 48  # that are simulated as they are
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
            # The sum of all gradients is there beside the device's own. Keras' own step of SGD with momentum makes all
            # of ``m * momentum`` before any gradient is there.
            copies = 1 + (self._training.slots == 1)
            own_bytes = sum(each.weight_bytes for each in self._whole.stages)
            return self._way(scheme, self._whole.step_s, -copies * own_bytes)
        if name in TRANSFERRING:
            return self._transferring(name, scheme)
        if name == GRID:
            return self._grid(scheme if isinstance(scheme, Grid) else None)
        tree = scheme.tree if isinstance(scheme, CodedReduce) else Tree(*widest(self._devices))
        step_s = simulate_tree(self._profile, *tree, self._cluster.with_program()).step_s
        weights_bytes, _ = on_fullest_server(self._profile, self._devices, self._cluster)
        # The root, in this process, has the slots; a worker's gradients become one message, which is a copy. Messages
        # that come from other processes are copies, too: the weights, and one from each child.
        copies = 1 + (0 if self._shares_memory else 1 + tree.children * (tree.depth > 1))
        elsewhere_bytes = int((self._training.slots - copies) * weights_bytes)
        return self._way(CodedReduce(*tree), step_s, elsewhere_bytes, tree.workers)

    def _transferring(self, name: str, scheme: AnyScheme) -> Way:
        """With its order, if that has a name, and its servers.

        Weights that come from another server are copies, unless the devices share one memory. A server uses each
        gradient when it has come; until then what is under way is in memory.
        """
        asked = scheme.order if isinstance(scheme, TransferOptions) and scheme.order in ORDERS else None
        servers = scheme.servers if isinstance(scheme, ParameterServer) else None
        compression = compression_of(scheme.compression) if isinstance(scheme, TransferOptions) else None
        synchrony = scheme.synchrony if isinstance(scheme, AllReduce | ParameterServer) else None
        topology = topology_of(scheme.topology) if isinstance(scheme, AllReduce) else None
        joined = synchrony_of(synchrony)
        way = servers, compression, synchrony, topology
        setting = setting_of(self._profile, name, self._devices, self._cluster, *way)
        order, plan, workload, step_s = _estimated(setting, asked if isinstance(asked, str) else None)
        if isinstance(joined, Asynchronous):  # as if those that may be ahead had a minibatch each, and waited for all
            step_s /= min(self._devices, joined.ahead(self._devices) + 1)
        weights_bytes, own_bytes = on_fullest_server(self._profile, self._devices, self._cluster, servers)
        # What messages have lacked so far, beside the gradients that arrive of all at once.
        kept, at_once = (0, 0) if compression is None else (int(compression.error_feedback), 1)
        if isinstance(topology, Gossip):  # the worker's own, and those that arrive
            kept += 1 + max(map(len, topology.neighbours(self._devices)))
        elif isinstance(joined, LocalSGD):
            # The weights before, the momentum, and how far they moved; sums that wait until the step has computed.
            kept, at_once = kept + 1 + bool(joined.momentum), at_once + 1 + bool(joined.overlap)
        elif isinstance(joined, Stale):  # the gradients that wait, and the weights that the forward reads
            kept += 2
        held_bytes = kept * weights_bytes + at_once * setting.joined_bytes
        if isinstance(joined, Asynchronous):  # the weights that it has read, and what a whole minibatch computes
            training = self._training._replace(jit_compile=False, gathers=True)  # which all devices together do
            alone, whole = (everywhere(self._profile, n, self._cluster, training) for n in (1, self._devices))
            held_bytes += weights_bytes + alone.fullest_bytes - whole.fullest_bytes
        if name != SERVING:  # what comes from other processes is added beside the device's own gradients
            arriving_bytes = (not self._shares_memory) * setting.joined_bytes
            return self._way(scheme, step_s, -int(held_bytes + arriving_bytes), order=order)
        elsewhere_bytes = self._training.slots * (weights_bytes - own_bytes)
        if self._shares_memory:
            return self._way(scheme, step_s, int(elsewhere_bytes + weights_bytes - held_bytes - own_bytes), order=order)
        # Of what is planned for devices that sum all gradients, one block's are left.
        gathered_bytes = weights_bytes - max(block.weight_bytes for block in self._profile.blocks)
        under_way_bytes = _under_way_bytes(plan, workload, servers or self._devices)
        left_bytes = int(gathered_bytes + elsewhere_bytes - under_way_bytes - held_bytes)
        return self._way(scheme, step_s, left_bytes, order=order)

    @property
    def _shares_memory(self) -> bool:
        return self._cluster.slowest(self._devices) == SHARED_MEMORY

    def _grid(self, asked: Grid | None) -> Way | None:
        found = estimated_grid(self._profile, self._devices, self._cluster, self._training, asked)
        if found is None:
            return None
        grid = asked or Grid(found.grid.outputs, found.grid.rows)
        return self._way(grid, found.step_s, found.elsewhere_bytes)

    def _way(
        self,
        scheme: AnyScheme,
        step_s: float,
        elsewhere_bytes: int = 0,
        devices: int | None = None,
        order: str = "",
    ) -> Way:
        memory_bytes, kind = self._whole.fullest_bytes - elsewhere_bytes, KINDS[name_of(scheme)]
        fits, exact = self._cluster.holds(memory_bytes), is_exact(scheme, self._profile)
        way = Way(kind, {"scheme": scheme}, devices or self._devices, step_s, memory_bytes, fits)
        return way._replace(is_exact=exact, order=order)


def is_exact(scheme: AnyScheme, profile: Profile) -> bool:
    """Whether a scheme without stages trains as the unsplit model does; of a pipeline its ``Partition`` knows.

    All gradients count at once, and none is encoded.
    """
    if not isinstance(scheme, TransferOptions):
        return True
    synchrony = synchrony_of(scheme.synchrony) if isinstance(scheme, AllReduce | ParameterServer) else None
    topology = topology_of(scheme.topology) if isinstance(scheme, AllReduce) else None
    if isinstance(synchrony, Asynchronous | LocalSGD | Stale) or isinstance(topology, Gossip):
        return False
    workload, compression = workload_of(profile, 1, Message()), compression_of(scheme.compression)
    return compression is None or not encoded(workload, compression, range(len(workload.sizes_bytes)))


def estimated_step_s(
    profile: Profile,
    scheme: str,
    workers: int,
    cluster: Cluster,
    servers: int | None = None,
    order: str | None = None,
) -> float:
    """Seconds of a step of ``all-reduce`` or ``parameter-server``, as ``simulate_order``; by default with the order
    that suits, and all workers as servers.

    All workers do the same at the same time. Two of them stand for more than four: in an all-reduce among r each port
    carries ``2 (r-1)/r`` times a message's bytes, in two messages, at the fullest server ``r - 1`` times what it
    has of the weights. Where that is most of them the estimate is too long: of many some push while others pull.
    A chain of more than 48 layers counts as 48, of neighbours together that compute about equally long.
    """
    *_, step_s = _estimated(setting_of(profile, scheme, workers, cluster, servers), order)
    return step_s


def _estimated(setting: Setting, order: str | None) -> tuple[str, Plan, Workload, float]:
    """The order of a step's transfers, its plan, what that is a plan of, and the seconds of a step."""
    if setting.workers > MOST_WORKERS:
        setting = _two(setting)
    setting = replace(setting, workload=_merged(setting.workload))
    order = order or best_order(setting)
    plan = ORDERS[order](setting.workload, setting.serves)
    return order, plan, setting.workload, mean_step_s(setting, plan)


def _under_way_bytes(plan: Plan, workload: Workload, servers: int) -> float:
    """Of gradients, and of weights that are returned, what is in a device's memory at once, where messages are copies.

    A message of one variable leaves when its gradient is made. A message of several waits for the last of them, which
    the runtime may leave for the end: of these, all gradients for other servers are counted. Of weights that are
    returned it is a message, if it has several variables at both ends, and what is made of it.
    """
    held = workload.on_servers(servers)
    sizes_bytes = [sum(workload.sizes_bytes[n] for n in mine) for mine in held]

    def largest_bytes(phase: Phase) -> float:
        parts = (phase.of(mine, workload.sizes_bytes).packs for mine in held)
        return max((pack.size_bytes for packs in parts for pack in packs), default=0)

    if plan.name in ONE_BY_ONE:
        return largest_bytes(plan.pushes) + largest_bytes(plan.returned)
    return sum(sizes_bytes) - max(sizes_bytes) + 3 * largest_bytes(plan.returned)


def on_fullest_server(
    profile: Profile, workers: int, cluster: Cluster, servers: int | None = None
) -> tuple[float, float]:
    """The bytes of all trained weights, and of those on the server that has the most; by default all workers serve."""
    setting = setting_of(profile, SERVING, workers, cluster, servers)
    return float(sum(setting.workload.sizes_bytes)), _fullest_bytes(setting, setting.servers)


def _two(setting: Setting) -> Setting:
    others, slowest = setting.workers - 1, setting.cluster.slowest(setting.workers)
    servers, (times, messages) = 1, sent_times(setting.workers, setting.topology)
    sent = times if isinstance(setting.topology, Gossip) else 2 * others  # messages from each worker
    if setting.gradient_bytes is not None:
        times, messages, sent = others, 1, others
    if setting.serves:
        servers = min(setting.servers, 2)
        fullest_bytes, of_two_bytes = (_fullest_bytes(setting, count) for count in (setting.servers, servers))
        times, messages, sent = others * (fullest_bytes / of_two_bytes if of_two_bytes else 1), 1, others
    link = Link(slowest.bandwidth_bytes_per_s / times, messages * slowest.latency_s)
    crowding = setting.cluster.crowding(setting.workers)
    at_once = 1 if crowding >= 2 else 2  # of the two: what they wait for each other is not counted twice
    speed = min(setting.cluster.speed(worker) for worker in range(setting.workers))
    workload = _longer(setting.workload, crowding * at_once / 2 / speed)
    each = setting.cluster.message_work
    work = Message(sent * each.overhead_s, times * each.s_per_byte)
    most_s = max(setting.cluster.caller_work_s[: setting.workers], default=0.0)
    called_s = (most_s, 0.0 if at_once == 1 else most_s)  # of one processor it is taken once
    cluster = Cluster((Level(link),), processors=at_once, message_work=work, caller_work_s=called_s)
    return replace(setting, workload=workload, workers=2, servers=servers, cluster=cluster, topology=None)


def _longer(workload: Workload, factor: float) -> Workload:
    """The same where all that is computed takes so many times as long."""
    layers = [
        replace(
            each,
            forward_s=factor * each.forward_s,
            backward_s=factor * each.backward_s,
            update_s=factor * each.update_s,
        )
        for each in workload.layers
    ]
    return replace(workload, layers=tuple(layers))


def _fullest_bytes(setting: Setting, servers: int) -> float:
    """Of the weights, on the one of so many servers that has the most."""
    sizes = setting.workload.sizes_bytes
    if not setting.whole:
        return sum(sizes) / servers
    return max(sum(sizes[n] for n in held) for held in setting.workload.on_servers(servers))


def _merged(workload: Workload) -> Workload:
    """The same chain in few enough layers."""
    bounds = even_bounds([layer.forward_s + layer.backward_s for layer in workload.layers], MOST_LAYERS)
    layers = []
    for k, (first, last) in enumerate(pairwise(bounds)):
        each = workload.layers[first:last]
        variables = tuple(dict.fromkeys(n for layer in each for n in layer.variables))
        forward_s, backward_s, update_s = (
            sum(getattr(layer, name) for layer in each) for name in ("forward_s", "backward_s", "update_s")
        )
        layers.append(Layer(variables, forward_s, backward_s, (k - 1,) if k else (), update_s))
    return replace(workload, layers=tuple(layers))
