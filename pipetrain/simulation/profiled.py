"""Data parallelism as a profile predicts it, in the order of transfers that suits: a worker's layers are its blocks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from pipetrain.plan.cluster import SHARED_MEMORY, Cluster
from pipetrain.plan.profile import Profile, squarish
from pipetrain.schemes.arguments import checked_count
from pipetrain.schemes.compression import FLOAT_BYTES, Compression, compression_of
from pipetrain.schemes.synchrony import (
    RING,
    Asynchronous,
    Gossip,
    LocalSGD,
    Stale,
    Synchrony,
    check_fragments,
    check_together,
    hides_joins,
    join_fragments,
    join_steps,
    synchrony_of,
    topology_of,
)
from pipetrain.schemes.table import SERVING
from pipetrain.schemes.transfers.orders import AUTO, ORDERS, check_order, check_servers, orders
from pipetrain.schemes.transfers.plan import Layer, Message, Plan, Workload
from pipetrain.simulation.costs import between_steps_s
from pipetrain.simulation.data_parallel import COUNTED, Setting, simulate_plan
from pipetrain.trace.trace import Trace

STEPS = 4  # of which the middle ones are alike
WORTH = 0.97  # of a step in an order, at most what one in a less simple order is to take
NEAR = 1.1  # of the shortest simulated step: one that takes so long at most may be the shortest when it is measured


def simulate_order(
    profile: Profile,
    scheme: str,
    workers: int,
    cluster: Cluster | None = None,
    order: str = AUTO,
    minibatches: int = STEPS,
    servers: int | None = None,
    compression: str | Compression | None = None,
    synchrony: str | Synchrony | None = None,
    topology: str | Gossip | None = None,
    **options: Any,
) -> Trace:
    """Simulate ``all-reduce`` or ``parameter-server`` of a profiled model, with transfers in an order by its name.

    Each worker has an equal part of the minibatch's rows, and computes for that part of the profile's seconds. The
    trained weights of a block are one variable; those that blocks share are others.

    Args:
        profile: what the blocks cost for a whole minibatch.
        scheme: ``all-reduce`` or ``parameter-server``.
        workers: how many devices there are.
        cluster: how they are joined. A link's latency is what a message takes beside its bytes: between TensorFlow's
            processes about half a millisecond and what the network takes.
        order: of the transfers.
        minibatches: how many are trained; of workers that join their weights after some steps three times these at
            least, and a few more, so that they are whole periods.
        servers: on how many of the devices the weights are, from the first one on, each layer's on one; by default on
            all, and then, where they share their memory, an equal part of every variable on each, which is how
            TensorFlow's threads work.
        compression: of gradients; a block's are taken for one matrix, as near to a square as can be. What it takes
            is counted if the profile has it.
        synchrony: how often weights are joined, or when gradients are applied.
        topology: of ``all-reduce``: who sends to whom.
        options: of ``simulate_plan``.

    Raises ValueError for an order or servers that the scheme does not have, more servers than workers, more workers
    than rows, and more fragments of weights than blocks that have some.
    """
    check_order(order, scheme)
    check_servers(servers, scheme)
    if isinstance(synchrony_of(synchrony), Asynchronous):
        raise ValueError(
            "Workers that take minibatches at their own pace are not simulated. Received: "
            f"synchrony={synchrony!r}. Try synchrony='stale:1', or PipelineModel.explain, which estimates it."
        )
    setting = setting_of(profile, scheme, workers, cluster or Cluster(), servers, compression, synchrony, topology)
    check_fragments(synchrony, len(setting.workload.trained))
    plan = ORDERS[best_order(setting) if order == AUTO else order](setting.workload, setting.serves)
    minibatches = checked_count("minibatches", minibatches, COUNTED, 8)
    if (period := setting.join_steps) > 1:
        minibatches = max(3 * period, minibatches + -minibatches % period)  # in whose middle is a whole period
    return simulate_plan(setting, plan, minibatches, **options)


def setting_of(
    profile: Profile,
    scheme: str,
    workers: int,
    cluster: Cluster,
    servers: int | None = None,
    compression: str | Compression | None = None,
    synchrony: str | Synchrony | None = None,
    topology: str | Gossip | None = None,
) -> Setting:
    """Such workers. Raises ValueError for more of them than rows."""
    if workers > profile.batch_size:
        raise ValueError(
            f"Every worker has a row at least. Received: {workers} workers, batch_size={profile.batch_size}. "
            f"Try {profile.batch_size} workers."
        )
    serves = scheme == SERVING
    check_together(topology, synchrony, compression)
    sends, joining = topology_of(topology), synchrony_of(synchrony)
    parts = 1 if isinstance(joining, Asynchronous) else workers  # of each minibatch
    workload = workload_of(profile, parts, message_of(cluster, workers, serves, sends))
    # Logical devices of a processor have one pool of threads, all of which do what servers are given.
    shares = serves and servers is None and cluster.slowest(workers) == SHARED_MEMORY
    caller_s = between_steps_s(profile, cluster)
    compressing, gradient_bytes = compression_of(compression), None
    if compressing is not None:
        gradient_bytes = tuple(
            size if n in workload.rows else compressing.sent_bytes(squarish(size // FLOAT_BYTES))
            for n, size in enumerate(workload.sizes_bytes)
        )
    if isinstance(joining, LocalSGD):
        workload = updating_alone(workload)
    if compressing is not None:
        workload = coded(workload, profile, compressing, workers, join_steps(joining))
    return Setting(
        workload,
        workers,
        serves,
        cluster,
        caller_s,
        servers or workers,
        whole=not shares,
        gradient_bytes=gradient_bytes,
        at_once=isinstance(joining, LocalSGD) or isinstance(sends, Gossip),
        join_steps=join_steps(joining),
        fragments=workload.fragments(join_fragments(joining)),
        topology=sends,
        is_stale=isinstance(joining, Stale) or hides_joins(joining),
    )


def coded(workload: Workload, profile: Profile, compression: Compression, workers: int, steps: int = 1) -> Workload:
    """The same with what the compression takes: before a layer's gradients leave, and when those of all are there.

    Of workers that join their weights after so many steps, only the last of these encodes. What that takes counts in
    equal parts in the backwards of all, and what decoding takes in the update, which is that of the last one alone.
    """
    coding = profile.coding(compression)
    if coding is None:
        return workload
    layers = []
    for layer, own in zip(workload.layers, workload.owned, strict=True):
        before_s = after_s = 0.0
        for n in encoded(workload, compression, own):
            elements = workload.sizes_bytes[n] / FLOAT_BYTES
            both = coding.summing_s(elements, workers, compression.error_feedback)
            before_s, after_s = before_s + both[0] / steps, after_s + both[1]
        layers.append(replace(layer, backward_s=layer.backward_s + before_s, update_s=layer.update_s + after_s))
    return replace(workload, layers=tuple(layers))


def updating_alone(workload: Workload) -> Workload:
    """The same workers with weights of their own, each of which makes the optimizer's step after every backward.

    What an update then is, when weights are joined, makes as many passes over them as the optimizer's step.
    """
    layers = [replace(each, backward_s=each.backward_s + each.update_s) for each in workload.layers]
    return replace(workload, layers=tuple(layers))


def encoded(workload: Workload, compression: Compression, numbers: Iterable[int]) -> list[int]:
    """Those of the variables whose gradients are encoded: that are no rows, and of which messages are smaller."""
    matrices = {n: squarish(workload.sizes_bytes[n] // FLOAT_BYTES) for n in numbers if n not in workload.rows}
    return [n for n, shape in matrices.items() if compression.encodes(shape)]


def workload_of(profile: Profile, workers: int, message: Message) -> Workload:
    """What one of so many workers computes of a profiled minibatch: the blocks one after another."""
    share = math.ceil(profile.batch_size / workers) / profile.batch_size
    sizes, rows = list[int](), set[int]()
    numbers: dict[int, int] = {}  # of variables that blocks share, by the weights' numbers
    layers = []
    for k, block in enumerate(profile.trained):
        variables = []
        own_bytes = block.weight_bytes - sum(size for _, size in block.shared)
        if rows_bytes := min(block.rows_bytes, own_bytes):
            rows.add(len(sizes))
        for size in filter(None, (rows_bytes, own_bytes - rows_bytes)):
            variables.append(len(sizes))
            sizes.append(size)
        for weight, size in block.shared:
            if weight not in numbers:
                numbers[weight] = len(sizes)
                sizes.append(size)
            variables.append(numbers[weight])
        seconds, after = block.seconds, (k - 1,) if k else ()
        both = share * seconds.forward_s, share * seconds.backward_s
        layer = Layer(tuple(variables), *both, after, block.optimizer_s)
        layers.append(layer)
    return Workload(tuple(layers), tuple(sizes), message, frozenset(rows))


def message_of(cluster: Cluster, workers: int, serves: bool, topology: Gossip | str | None = None) -> Message:
    """What a message between the workers takes, for plans that are made by a formula."""
    if workers == 1:
        return Message()
    link = cluster.slowest(workers)
    times, steps = (1.0, 1) if serves else sent_times(workers, topology)
    both_s = 2 * cluster.message_work.overhead_s  # at either end
    return Message(steps * link.latency_s + both_s, times / link.bandwidth_bytes_per_s)


def sent_times(workers: int, topology: Gossip | str | None) -> tuple[float, int]:
    """How often an all-reduce sends each byte from the worker that sends most, and in how many messages in turn.

    Among r workers it is ``2 (r-1)/r`` times, in two messages, on a ring in ``2 (r-1)``; two workers send all to each
    other. In a gossip it is once to every neighbour.
    """
    if isinstance(topology, Gossip):
        return float(max(map(len, topology.neighbours(workers)))), 1
    if topology == RING:
        return 2 * (workers - 1) / workers, 2 * (workers - 1)
    return (1.0, 1) if workers == 2 else (2 * (workers - 1) / workers, 2)


def best_order(setting: Setting) -> str:
    """The simplest order, beginning with none, by whose plan a simulated step is within 3 per cent of the shortest.

    ``ORDERS`` has the simplest first.
    """
    return next(name for name, (_, part) in _simulated(setting).items() if WORTH * part <= 1)


def mean_step_s(setting: Setting, plan: Plan) -> float:
    """The seconds of a step, of those in which a fragment or all is sent and of those between."""
    joining = [setting.joining(each) for each in setting.fragments] or [setting.joining()]
    joining_s = [simulate_plan(each, plan, STEPS).step_s for each in joining]
    between = setting.join_steps - len(joining_s)
    alone = replace(setting.joining(), join_steps=2 * STEPS)
    alone_s = simulate_plan(alone, plan, STEPS).step_s if between else 0.0
    return (sum(joining_s) + between * alone_s) / setting.join_steps


def near(setting: Setting) -> dict[Plan, float]:
    """The plans of all orders whose simulated step is within 10 per cent of the shortest, the simplest first.

    With each, how many times as long as the shortest it is simulated to take. Where nothing takes time, the first.
    """
    return {plan: part for plan, part in _simulated(setting).values() if part <= NEAR}


def _simulated(setting: Setting) -> dict[str, tuple[Plan, float]]:
    """Of each order its plan, and how many times as long as the shortest it takes; the first alone if nothing does."""
    plans = {name: ORDERS[name](setting.workload, setting.serves) for name in orders(setting.serves)}
    seconds = {name: mean_step_s(setting, plan) for name, plan in plans.items()}
    least_s = min(seconds.values())
    if not least_s:
        return {name: (plan, 1.0) for name, plan in [*plans.items()][:1]}
    return {name: (plan, seconds[name] / least_s) for name, plan in plans.items()}
