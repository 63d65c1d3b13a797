"""Which plan of transfers a model is trained by: what its layers and messages take, and the order that is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from pipetrain.compute.functions.split import specs
from pipetrain.compute.graph.blocks import Chain
from pipetrain.compute.keras_private import flat_layers
from pipetrain.compute.profiling.block_functions import size_bytes
from pipetrain.plan.cluster import Cluster
from pipetrain.plan.profile import Profile
from pipetrain.schemes.transfers.auto import AUTO, auto
from pipetrain.schemes.transfers.orders import MEASURED, ORDERS
from pipetrain.schemes.transfers.plan import Phase, Plan, check_plan
from pipetrain.schemes.transfers.workload import Layer, Message, Workload

MESSAGE_S = 5e-4  # of TensorFlow's runtime for a message between processes, beside its bytes and the link's latency


def workload_of(chain: Chain, variables: Sequence[Any], profile: Profile | None, message: Message) -> Workload:
    """A model's blocks as layers, with the seconds of a profile if there is one.

    ``variables`` are the trained ones in the order of their numbers.
    """
    numbers = {id(each): n for n, each in enumerate(variables)}
    made_by: dict[int, int] = {}
    layers = []
    for k, block in enumerate(chain.blocks):
        after = {made_by[value] for call in block.calls for value in call.reads if value in made_by} - {k}
        made_by |= {value: k for call in block.calls for value in call.writes}
        used = dict.fromkeys(numbers[id(each)] for call in block.calls for each in call.weights)
        seconds = profile.blocks[k].seconds if profile else None
        layers.append(
            Layer(
                tuple(used),
                seconds.forward_s if seconds else 0.0,
                seconds.backward_s if seconds else 0.0,
                tuple(sorted(after)),
            )
        )
    return Workload(tuple(layers), tuple(map(size_bytes, specs(variables))), message)


def message_of(cluster: Cluster, workers: int, serves: bool, remote: bool) -> Message:
    """What a message between the workers takes; an all-reduce sends each byte ``2 (r-1)/r`` times, in two messages."""
    if workers == 1:
        return Message()
    link = max((cluster.link(0, n) for n in range(1, workers)), key=lambda link: link.seconds(1e6))
    times = 1.0 if serves or workers == 2 else 2 * (workers - 1) / workers
    steps = 1 if serves or workers == 2 else 2
    overhead_s = link.latency_s + (MESSAGE_S if remote else 0.0)
    return Message(steps * overhead_s, times / link.bandwidth_bytes_per_s)


def planned(order: str | Plan, workload: Workload, serves: bool, apart: set[int], at_once: bool) -> Plan:
    """The plan of an order, or the user's, checked.

    No variable of those ``apart``, whose gradients are rows, is late; none at all where all gradients are needed
    ``at_once``.
    """
    if not isinstance(order, str):
        return check_plan(order, workload.sizes_bytes, serves)
    chosen = auto if order == AUTO else ORDERS[order]
    return _in_time(chosen(workload, serves), set(workload.owner) if at_once else apart)


def _in_time(plan: Plan, needed: set[int]) -> Plan:
    """The plan with those of the late packs in this backward that have needed variables."""
    now = [pack for pack in plan.late.packs if needed & {*pack.variables}]
    late = tuple(pack for pack in plan.late.packs if pack not in now)
    pushes = (*plan.pushes.packs, *reversed(now))  # what the forward needs last, the backward makes first
    return plan._replace(pushes=plan.pushes._replace(packs=pushes), late=Phase(late, plan.late.window))


def is_measured(order: str | Plan) -> bool:
    """Whether the order depends on what layers and messages take."""
    return isinstance(order, str) and order in (AUTO, *MEASURED)


def embeddings(model: keras.Model, variables: Sequence[Any]) -> set[int]:
    """The numbers of variables whose gradients are rows."""
    tables = [layer for layer in flat_layers(model) if isinstance(layer, keras.layers.Embedding)]
    found = {id(variable) for layer in tables for variable in layer.variables}
    return {n for n, each in enumerate(variables) if id(each) in found}
