"""Which plans of transfers a model may be trained by: what its layers and messages take, and the order asked for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from pipetrain.compute.functions.split import size_bytes, specs
from pipetrain.compute.graph.blocks import Chain
from pipetrain.compute.graph.input_shapes import Shapes
from pipetrain.compute.keras_private import flat_layers
from pipetrain.plan.profile import Profile, Seconds
from pipetrain.schemes.transfers.orders import AUTO, MEASURED, ORDERS
from pipetrain.schemes.transfers.plan import Phase, Plan, check_plan
from pipetrain.schemes.transfers.workload import Layer, Message, Workload
from pipetrain.simulation.data_parallel.choice import near
from pipetrain.simulation.data_parallel.setting import Setting


def workload_of(
    chain: Chain, variables: Sequence[Any], profile: Profile | None, message: Message, workers: int
) -> Workload:
    """A model's blocks as layers, with one worker's seconds by the profile of a minibatch, if there is one.

    ``variables`` are the trained ones in the order of their numbers.
    """
    numbers = {id(each): n for n, each in enumerate(variables)}
    made_by: dict[int, int] = {}
    layers = []
    for k, block in enumerate(chain.blocks):
        after = {made_by[value] for call in block.calls for value in call.reads if value in made_by} - {k}
        made_by |= {value: k for call in block.calls for value in call.writes}
        used = dict.fromkeys(numbers[id(each)] for call in block.calls for each in call.weights)
        seconds = profile.trained[k].seconds if profile else Seconds(0.0, 0.0, 0.0)
        own_s = seconds.forward_s / workers, seconds.backward_s / workers
        layers.append(Layer(tuple(used), *own_s, tuple(sorted(after)), seconds.update_s))
    return Workload(tuple(layers), tuple(map(size_bytes, specs(variables))), message)


def planned(order: str | Plan, setting: Setting, apart: set[int], at_once: bool) -> dict[Plan, float]:
    """The plan of an order, or the user's, checked; where it is open, all that may be the fastest, the simplest first.

    With each, how many times as long as the shortest it is simulated to take. No variable of those ``apart``, whose
    gradients are rows, is late; none at all where all gradients are needed ``at_once``.
    """
    workload = setting.workload
    if not isinstance(order, str):
        return {check_plan(order, workload.sizes_bytes, setting.serves): 1.0}
    plans = near(setting) if order == AUTO else {ORDERS[order](workload, setting.serves): 1.0}
    found: dict[Plan, tuple[Plan, float]] = {}  # of several that differ in their names alone, the first
    for plan, part in plans.items():
        made = _in_time(plan, set(workload.owner) if at_once else apart)
        found.setdefault(made._replace(name=""), (made, part))
    return dict(found.values())


def _in_time(plan: Plan, needed: set[int]) -> Plan:
    """The plan with those of the late packs in this backward that have needed variables."""
    now = [pack for pack in plan.late.packs if needed & {*pack.variables}]
    late = tuple(pack for pack in plan.late.packs if pack not in now)
    pushes = (*plan.pushes.packs, *reversed(now))  # what the forward needs last, the backward makes first
    return plan._replace(pushes=plan.pushes._replace(packs=pushes), late=Phase(late, plan.late.window))


def is_measured(order: str | Plan) -> bool:
    """Whether the order depends on what layers and messages take."""
    return isinstance(order, str) and order in (AUTO, *MEASURED)


def input_bytes(model: keras.Model, shapes: Shapes | None, rows: int) -> int:
    """The bytes of so many rows of the inputs; 0 where their shapes are not known."""
    sizes = [math.prod(size or 0 for size in shape) for shape in shapes or ()]
    dtypes = [tf.as_dtype(each.dtype).size for each in model.inputs[: len(sizes)]]
    return rows * sum(size * width for size, width in zip(sizes, dtypes, strict=True))


def embeddings(model: keras.Model, variables: Sequence[Any]) -> set[int]:
    """The numbers of variables whose gradients are rows."""
    tables = [layer for layer in flat_layers(model) if isinstance(layer, keras.layers.Embedding)]
    found = {id(variable) for layer in tables for variable in layer.variables}
    return {n for n, each in enumerate(variables) if id(each) in found}
