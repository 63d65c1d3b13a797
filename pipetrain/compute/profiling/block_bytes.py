"""The bytes of a chain's blocks, as their traces have shown them, or as they are counted."""

from __future__ import annotations

from dataclasses import replace

from pipetrain.compute.functions.split import size_bytes, specs
from pipetrain.compute.graph.blocks import Chain
from pipetrain.compute.graph.sharing import shared_by_blocks
from pipetrain.compute.profiling.block_functions import Keeps
from pipetrain.compute.profiling.kinds import Kind, Kinds
from pipetrain.compute.profiling.workspace import Workspace
from pipetrain.plan.profile import BlockProfile


def block_bytes(chain: Chain, kinds: Kinds, rows: int, minibatch_rows: int) -> list[BlockProfile]:
    """Every block without its seconds; ``estimated`` are those of kinds that have not been traced."""
    like = kinds.like
    found: list[BlockProfile] = []
    made = dict.fromkeys(chain.crossing(0), 0)  # the block that made each value, or first has it
    saved: dict[int, int] = {}  # the same, of those that some backward reads
    shared = shared_by_blocks([block.calls for block in chain.blocks])
    for index, (block, kind, segment) in enumerate(zip(chain.blocks, kinds.of, kinds.segments, strict=True)):
        keeps = kind.traced.keeps if kind.traced else _counted(kind)
        made.update(dict.fromkeys(segment.writes, index))
        pairs = [*zip(segment.reads, keeps.inputs, strict=True), *zip(segment.writes, keeps.outputs, strict=True)]
        saved.update((value, made[value]) for value, keep in pairs if keep and value in made)
        cost = BlockProfile(
            name=block.name,
            forward_s=0.0,
            backward_s=0.0,
            output_bytes=sum(size_bytes(like[value]) for value in chain.crossing(index + 1)),
            weight_bytes=sum(size_bytes(spec) for spec in specs(segment.trainable_variables)),
            activation_bytes=keeps.inner_bytes,
            shared=tuple((number, sum(map(size_bytes, specs([weight])))) for number, weight in shared[index]),
            fixed_bytes=sum(size_bytes(spec) for spec in specs(segment.non_trainable_variables)),
            estimated=kind.traced is None,
        )
        found.append(_shown(cost, kind, rows, minibatch_rows))
    for value, index in saved.items():
        more = found[index].activation_bytes + size_bytes(like[value])
        found[index] = replace(found[index], activation_bytes=more)
    return found


def _shown(cost: BlockProfile, kind: Kind, rows: int, minibatch_rows: int) -> BlockProfile:
    """With what only a trace shows."""
    if kind.traced is None:
        return cost
    functions, workspace = kind.traced.functions, kind.workspace or Workspace(0, 0)
    return replace(
        cost,
        workspace_bytes=workspace.whole_bytes,
        row_workspace_bytes=workspace.row_bytes,
        product_bytes=functions.product_bytes(rows, minibatch_rows),
        late_bytes=functions.late_bytes(),
    )


def _counted(kind: Kind) -> Keeps:
    """All that it writes is kept until its backward."""
    outputs = sum(map(size_bytes, kind.outputs))
    return Keeps(max(kind.work.activation_bytes - outputs, 0), [False] * len(kind.inputs), [True] * len(kind.outputs))
