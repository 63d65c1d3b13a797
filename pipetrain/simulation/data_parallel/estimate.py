"""A quick estimate of data parallelism on many workers: two that stand for all, with few layers."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from pipetrain.plan.cluster import Cluster, Level, Link
from pipetrain.plan.derived_profile import even_bounds
from pipetrain.plan.profile import Profile
from pipetrain.schemes.table import SERVING
from pipetrain.schemes.transfers.orders import ORDERS
from pipetrain.schemes.transfers.workload import Layer, Workload
from pipetrain.simulation.data_parallel.choice import auto
from pipetrain.simulation.data_parallel.profiled import STEPS, setting_of
from pipetrain.simulation.data_parallel.setting import Setting
from pipetrain.simulation.data_parallel.simulator import simulate_plan

MOST_WORKERS, MOST_LAYERS = 4, 48  # that are simulated as they are


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
    setting = setting_of(profile, scheme, workers, cluster, servers)
    if workers > MOST_WORKERS:
        setting = _two(setting)
    setting = replace(setting, workload=_merged(setting.workload))
    plan = ORDERS[order](setting.workload, setting.serves) if order else auto(setting)
    return simulate_plan(setting, plan, STEPS).step_s


def on_fullest_server(
    profile: Profile, workers: int, cluster: Cluster, servers: int | None = None
) -> tuple[float, float]:
    """The bytes of all trained weights, and of those on the server that has the most; by default all workers serve."""
    setting = setting_of(profile, SERVING, workers, cluster, servers)
    return float(sum(setting.workload.sizes_bytes)), _fullest_bytes(setting, setting.servers)


def _two(setting: Setting) -> Setting:
    others, slowest = setting.workers - 1, setting.cluster.slowest(setting.workers)
    servers, times, messages = 1, 2 * others / setting.workers, 2
    if setting.serves:
        servers = min(setting.servers, 2)
        fullest_bytes, of_two_bytes = (_fullest_bytes(setting, count) for count in (setting.servers, servers))
        times, messages = others * (fullest_bytes / of_two_bytes if of_two_bytes else 1), 1
    link = Link(slowest.bandwidth_bytes_per_s / times, messages * slowest.latency_s)
    processors = max(2 * setting.cluster.processors / setting.workers, 1.0)
    return replace(setting, workers=2, servers=servers, cluster=Cluster((Level(link),), processors=processors))


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
