"""Measure what each block of a model costs on a device, and leave the model as it was."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from pipetrain.compute.cores import cores, full_name, has_pool, is_remote
from pipetrain.compute.functions.split import size_bytes, specs
from pipetrain.compute.graph.blocks import Block, Chain
from pipetrain.compute.graph.input_shapes import Shapes, checked_shapes
from pipetrain.compute.graph.network import network_of
from pipetrain.compute.graph.sharing import shared_by_blocks
from pipetrain.compute.keras_private import is_own, supports_xla
from pipetrain.compute.profiling.block_functions import BlockFunctions, Keeps, values
from pipetrain.compute.profiling.block_passes import Placed, sample
from pipetrain.compute.profiling.block_timing import time_blocks
from pipetrain.compute.profiling.loss_timing import time_loss
from pipetrain.compute.profiling.operation_count import LITTLE_S, is_little
from pipetrain.compute.profiling.progress import Progress
from pipetrain.compute.profiling.workspace import Workspace, workspace
from pipetrain.plan.profile import BlockProfile, Profile, Seconds
from pipetrain.schemes.arguments import checked_count
from pipetrain.schemes.splitting import microbatch_rows

WINDOW_BYTES = 2**30  # of blocks that are timed together


def profile(
    model: keras.Model,
    batch_size: int,
    device: str = "CPU:0",
    verbose: bool = True,
    input_shapes: Any = None,
    microbatches: int = 1,
) -> Profile:
    """Measure every layer's forward and backward seconds, weight bytes, and bytes that cross a cut after it.

    The blocks run one after another, all forwards, then all backwards, on random data (zeros for integer inputs):
    four such passes, or more where the machine is not steady; then as many compiled by XLA, unless a pass takes less
    than 2 ms, or so it is estimated from counted operations. By turns with them all blocks run in one call, where
    neighbours share kernels, as in a stage. A block's figure is its part of what that takes, by the medians of its own
    times less those of an empty call; the profile's ``spread`` says how steady they are. The optimizer's step is that
    of SGD with momentum; the loss, where the outputs are large, a cross-entropy, and the metric an accuracy. The
    model's weights, statistics and seeds are read and never written.

    Args:
        model: a Sequential or Functional model.
        batch_size: rows of the minibatch to measure with, at least 1.
        device: the TensorFlow device to measure on.
        verbose: show a progress bar when it takes long.
        input_shapes: the shapes of the inputs, without the batch, where the model leaves dimensions open: a tuple of
            sizes such as ``(64, 64, 3)``; for several inputs, such tuples in a list in the inputs' order, or in a
            dictionary by their keys or names.
        microbatches: how many the minibatch is divided into. The profile is measured with the rows of one, as a
            pipeline computes, and says what all take together: more than one minibatch of as many rows.

    Raises:
        ValueError, TypeError: for a model whose layer calls Keras does not record, a batch size below 1, more
            microbatches than rows, an unknown device, dimensions that are neither known nor given, or shapes that the
            model's inputs cannot have.
    """
    if isinstance(batch_size, bool) or not isinstance(batch_size, (int, np.integer)) or batch_size < 1:
        raise ValueError(f"A profile needs at least one row. Received: batch_size={batch_size!r}. Try batch_size=128.")
    microbatches = checked_count("microbatches", microbatches, "A minibatch is divided into whole numbers", 4)
    if microbatches > batch_size:
        raise ValueError(
            f"A microbatch needs at least one row. Received: microbatches={microbatches}, batch_size={batch_size}. "
            f"Try at most {batch_size} microbatches."
        )
    chain, shapes, device = Chain(model), checked_shapes(model, input_shapes), full_name(device)
    with_xla = may_be_compiled(chain, batch_size, device)
    return profile_chain(chain, batch_size, shapes, device, verbose, with_xla, microbatches)


def profile_chain(
    chain: Chain,
    batch_size: int,
    shapes: Shapes,
    device: str,
    verbose: bool,
    with_xla: bool = True,
    microbatches: int = 1,
) -> Profile:
    """``profile`` of a model whose blocks and input shapes are known; with XLA too, if that ``may_be_compiled``."""
    rows = rows_measured(chain, batch_size, microbatches)
    progress = Progress("Profiling the model's layers", (4 if with_xla else 2) * len(chain.blocks) * verbose)
    with tf.device(device):
        placed, costs = _placed(chain, rows, shapes, device, progress, batch_size)
        plain, spread = _timed(placed, costs, device, progress)
        costs = [replace(cost, **asdict(seconds)) for cost, seconds in zip(costs, plain, strict=True)]
        if with_xla and sum(seconds.total_s for seconds in plain) >= LITTLE_S:
            with suppress(tf.errors.OpError):  # of the update, which no block tells
                placed = _compiled(placed, progress)
                compiled, compiled_spread = _timed(placed, costs, device, progress)
                spread = max(spread, compiled_spread)
                costs = [
                    replace(cost, compiled=seconds if block.functions.compiled else None)
                    for cost, seconds, block in zip(costs, compiled, placed, strict=True)
                ]
        progress.end()  # if XLA was not worth trying, or failed
        beside = time_loss(_outputs(chain, placed), device, _others(device))
    measured = Profile(
        chain.model.name, int(rows), tuple(costs), spread, *beside, microbatches=microbatches, network=network_of(chain)
    )
    return measured if rows == batch_size else measured.scaled(int(batch_size))


def rows_measured(chain: Chain, batch_size: int, microbatches: int) -> int:
    """The rows of the largest microbatch; those of a minibatch where the model fixes their number."""
    is_fixed = any(tensor.shape[:1] != (None,) for tensor in chain.specs(0))
    return batch_size if is_fixed else max(map(len, microbatch_rows(batch_size, microbatches)))


def may_be_compiled(chain: Chain, batch_size: int, device: str) -> bool:
    """Whether XLA is worth trying: for enough work, where Keras says that it can, and stages would run at once.

    XLA hands parts of a function to TensorFlow's pool of threads. If that has fewer threads than the process has CPU
    devices, compiled stages wait for each other there.
    """
    return not is_little(chain, batch_size) and supports_xla(chain.model) and has_pool(device)


def _timed(
    placed: Sequence[Placed], costs: Sequence[BlockProfile], device: str, progress: Progress
) -> tuple[list[Seconds], float]:
    """The seconds of every block, and the error of their sum as a part of it; updates by the sizes of the weights."""
    found, errors_s = [], 0.0
    for first, end in _windows(costs):
        seconds = time_blocks(placed[first:end], device, _others(device))
        errors_s += seconds.error
        weights = max(sum(cost.weight_bytes for cost in costs[first:end]), 1)
        for cost, forward_s, backward_s in zip(costs[first:end], seconds.forward, seconds.backward, strict=True):
            found.append(Seconds(float(forward_s), float(backward_s), seconds.update * cost.weight_bytes / weights))
        progress.add(end - first)
    whole_s = sum(seconds.total_s for seconds in found)
    return found, errors_s / whole_s if whole_s else 0.0


def _compiled(placed: Sequence[Placed], progress: Progress) -> list[Placed]:
    """The same blocks, those compiled by XLA that it can compile."""
    known: dict[int, BlockFunctions] = {}
    made = []
    for block in placed:
        if id(block.functions) not in known:
            known[id(block.functions)] = _compiled_functions(block)
        made.append(block._replace(functions=known[id(block.functions)]))
        progress.add(1)
    return made


def _compiled_functions(block: Placed) -> BlockFunctions:
    segment = block.segment
    weights, state = values(segment.trainable_variables), values(segment.non_trainable_variables)
    try:
        functions = BlockFunctions(segment, block.inputs, compiled=True)
        _, residuals = functions.forward(weights, state, [sample(spec) for spec in block.inputs])
        functions.backward(weights, residuals, functions.ones(block.outputs))
    except tf.errors.OpError:  # whatever it is: nobody has asked for XLA
        return block.functions
    return functions


def _others(device: str) -> list[str]:
    """The devices kept busy during the measurement: other CPU devices of this process or of the workers."""
    cpus = [cpu.name for cpu in tf.config.list_logical_devices("CPU") if is_remote(cpu.name) == is_remote(device)]
    others = [cpu for cpu in cpus if device in cpus and cpu != device]
    return others if is_remote(device) else others[: len(cores()) - 1]  # each on a core of its own


def _placed(
    chain: Chain, batch_size: int, shapes: Shapes, device: str, progress: Progress, minibatch_rows: int
) -> tuple[list[Placed], list[BlockProfile]]:
    """Every block with its bytes, found by running it once."""
    # What each value is like: Keras does not know the shapes where the batch is not the first dimension throughout.
    given = zip(chain.crossing(0), chain.specs(0), shapes, strict=True)
    like = {value: _sized(tensor, batch_size, shape) for value, tensor, shape in given}
    known: dict[str, tuple[BlockFunctions, list[tf.TensorSpec], Keeps, Workspace]] = {}
    placed: list[Placed] = []
    costs: list[BlockProfile] = []
    made = dict.fromkeys(chain.crossing(0), 0)  # the block that made each value, or first has it
    saved: dict[int, int] = {}  # the same, of those that some backward reads
    shared = shared_by_blocks([block.calls for block in chain.blocks])
    for index, (block, segment) in enumerate(zip(chain.blocks, chain.alone(), strict=True)):
        # Keras' own layers do the same wherever they stand; others may hold what their settings do not say.
        own = all(is_own(type(call.operation)) for call in block.calls)
        inputs = [like[value] for value in segment.reads]
        key = f"{(own and cost_key(block)) or index}, gradients {segment.differentiable}, {segment.returns}, {inputs}"
        if key not in known:
            functions = BlockFunctions(segment, inputs)
            weights, state = values(segment.trainable_variables), values(segment.non_trainable_variables)
            outputs, residuals = functions.forward(weights, state, [sample(spec) for spec in inputs])
            outputs, keeps = specs(outputs), functions.keeps(residuals)
            del residuals, weights, state
            known[key] = functions, outputs, keeps, workspace(functions, segment, inputs, batch_size, device)
        functions, outputs, keeps, beside = known[key]
        placed.append(Placed(segment, functions, inputs, outputs))
        like.update(zip(segment.writes, outputs, strict=True))
        made.update(dict.fromkeys(segment.writes, index))
        pairs = [*zip(segment.reads, keeps.inputs, strict=True), *zip(segment.writes, keeps.outputs, strict=True)]
        saved.update((value, made[value]) for value, keep in pairs if keep and value in made)
        costs.append(
            BlockProfile(
                name=block.name,
                forward_s=0.0,
                backward_s=0.0,
                output_bytes=sum(size_bytes(like[value]) for value in chain.crossing(index + 1)),
                weight_bytes=sum(size_bytes(spec) for spec in specs(segment.trainable_variables)),
                activation_bytes=keeps.inner_bytes,
                workspace_bytes=beside.whole_bytes,
                row_workspace_bytes=beside.row_bytes,
                product_bytes=functions.product_bytes(batch_size, minibatch_rows),
                shared=tuple((number, sum(map(size_bytes, specs([weight])))) for number, weight in shared[index]),
                late_bytes=functions.late_bytes(),
                fixed_bytes=sum(size_bytes(spec) for spec in specs(segment.non_trainable_variables)),
            )
        )
        progress.add(1)
    for value, index in saved.items():
        more = costs[index].activation_bytes + size_bytes(like[value])
        costs[index] = replace(costs[index], activation_bytes=more)
    return placed, costs


def _outputs(chain: Chain, placed: Sequence[Placed]) -> list[tf.TensorSpec]:
    """What the model's outputs are like."""
    made = {value: spec for block in placed for value, spec in zip(block.segment.writes, block.outputs, strict=True)}
    return [made[value] for value in dict.fromkeys(chain.crossing(len(placed))) if value in made]


def _windows(costs: Sequence[BlockProfile]) -> Iterator[tuple[int, int]]:
    """Runs of blocks that are measured together: as many as fit in memory beside the model on any device."""
    first, held = 0, 0
    for n, cost in enumerate(costs):
        needs = 3 * cost.weight_bytes + cost.activation_bytes  # a copy, its momentum, its gradients
        if n > first and held + needs > WINDOW_BYTES:
            yield first, n
            first, held = n, 0
        held += needs
    yield first, len(costs)


def cost_key(block: Block) -> str | None:
    """Equal for blocks that compute the same, whatever their names; None if settings cannot be serialized."""
    keys = []
    for call in block.calls:
        try:
            settings = {key: value for key, value in call.operation.get_config().items() if key != "name"}
        except Exception:  # a layer of the user's own, whose arguments Keras cannot write down
            return None
        plain = keras.tree.map_structure(_described, (call.node.arguments.args, call.node.arguments.kwargs))
        kind = type(call.operation)
        # Adapters, and what is frozen, of layers inside a layer are not among its settings.
        trained = [(weight.shape, weight.dtype) for weight in call.weights]
        keys.append((kind.__module__, kind.__qualname__, settings, plain, trained))
    return json.dumps(keys, default=str, sort_keys=True)


def _described(argument: Any) -> Any:
    return (argument.shape, argument.dtype) if hasattr(argument, "shape") else argument


def _sized(tensor: Any, batch_size: int, shape: tuple[int, ...]) -> tf.TensorSpec:
    """The spec of an input of this shape, with the batch size filled in where it is open."""
    return tf.TensorSpec([batch_size if tensor.shape[0] is None else tensor.shape[0], *shape], tensor.dtype)
