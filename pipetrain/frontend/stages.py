"""The stages of a layout, made for training or for evaluation, and what their optimizers gather."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import keras

from pipetrain.compute.functions.inference import Inference
from pipetrain.compute.functions.stage import Stage
from pipetrain.compute.functions.stage_function import LossFunction
from pipetrain.compute.functions.state import Division
from pipetrain.compute.functions.weight_groups import Shared
from pipetrain.compute.graph.blocks import Chain
from pipetrain.compute.graph.sharing import sharing
from pipetrain.compute.optimizer.gradient_scaling import build_scale, stepping
from pipetrain.compute.optimizer.slots import Slot, adopt
from pipetrain.frontend.layout import Layout
from pipetrain.schemes.schedules import has_halves
from pipetrain.schemes.scheme import Scheme, UpdateRule

Compiling = TypeVar("Compiling", Stage, Inference)


def training_stages(
    chain: Chain,
    layout: Layout,
    scheme: Scheme,
    optimizer: keras.optimizers.Optimizer,
    loss: LossFunction,
    rows: int | None,
    microbatches: int,
    recompute: bool,
    is_shown: Callable[[], bool],
) -> list[list[Stage]]:
    """Every stage's replicas, each on its device and with its kernels, those of the last stage with the loss.

    Args:
        chain: the model's blocks.
        layout: which is decided.
        scheme: that says by which weights a stage is trained.
        optimizer: of which every replica has a clone.
        loss: of the model's outputs.
        rows: those of a minibatch, None where they are not known.
        microbatches: how many a minibatch has.
        recompute: whether a stage keeps only its inputs.
        is_shown: whether a line says that XLA compiles, asked when it does: it compiles anew for other shapes, in calls
            of ``fit`` and ``evaluate`` that may be told otherwise.
    """
    assert layout.compiled is not None
    losses = [*[None] * (layout.stages - 1), loss]
    halved = has_halves(scheme.schedule.order, scheme.schedule.devices(layout.stages), microbatches)
    segments = layout.segments(chain)
    groups = sharing([segment.trainable_variables for segment in segments])

    def rule(stage: int, first: int | None = None) -> UpdateRule:
        return scheme.rule(stage, layout.stages, microbatches, first)

    built = [
        [
            Stage(
                segment,
                device,
                optimizer,
                losses[k],
                recompute,
                rule(k),
                division=Division(microbatches, len(on)),
                summed_rows=rows or 0 if microbatches > 1 and len(on) == 1 and not halved else 0,
                compiled=layout.compiled[k],
                shared=[
                    Shared(k, each.holders, each.weights, rule(k, each.first)) for each in groups if k in each.holders
                ],
            )
            for device in on
        ]
        for k, (segment, on) in enumerate(zip(segments, layout.devices_of_stages, strict=True))
    ]
    return _shown(built, is_shown)


def inference_stages(chain: Chain, layout: Layout, is_shown: Callable[[], bool]) -> list[list[Inference]]:
    """Every stage's replicas for a pipeline that only runs forwards; the arguments as for ``training_stages``."""
    assert layout.compiled is not None
    of_stages = zip(layout.segments(chain), layout.devices_of_stages, layout.compiled, strict=True)
    built = [
        [Inference(segment, device, Division(1, len(on)), by_xla) for device in on] for segment, on, by_xla in of_stages
    ]
    return _shown(built, is_shown)


def _shown(stages: list[list[Compiling]], is_shown: Callable[[], bool]) -> list[list[Compiling]]:
    for stage in (stage for replicas in stages for stage in replicas):
        stage.show_compiling(is_shown)
    return stages


class OptimizedStages:
    """Every stage's replicas, and the optimizers at work in them.

    Args:
        stages: the replicas of every stage in order.
        weights: all that the stages train, in the model's order.
    """

    def __init__(self, stages: Sequence[list[Stage]] = (), weights: Sequence[keras.Variable] = ()) -> None:
        self.replicas, self._weights = list(stages), weights
        self._parts = [part for replicas in self.replicas for stage in replicas for part in stage.parts()]

    @property
    def first(self) -> list[Stage]:
        """The first replica of every stage."""
        return [stage for stage, *_ in self.replicas]

    def traced(self) -> None:
        """Let every stage know which weights gradients reach in all of them."""
        reached = [variable for stage in self.first for variable in stage.reached]
        for stage in (stage for replicas in self.replicas for stage in replicas):
            stage.learn_reached(reached)

    def adopt_from(self, optimizer: keras.optimizers.Optimizer) -> None:
        """What has been set in the compiled optimizer since it was at work, the stages take over; see ``adopt``."""
        adopt(stepping(optimizer), self._weights, self._parts)
        build_scale(optimizer, self._weights)

    def go_on_from(self, others: OptimizedStages) -> None:
        """Take over the slots of others, for weights that both train."""
        gathered = {(id(slot.weight), slot.kind): slot.variable for slot in others.slots()}
        for slot in self.slots():
            if (id(slot.weight), slot.kind) in gathered:  # else its layer was frozen
                slot.variable.assign(gathered[id(slot.weight), slot.kind])

    def slots(self) -> Iterator[Slot]:
        """What all optimizers have gathered, by the model's own variables."""
        return (slot for replicas in self.replicas for stage in replicas for slot in stage.slots())

    def shared(self) -> Iterator[list[Any]]:
        """What each optimizer has gathered that is of no single weight."""
        return (part.shared for part in self._parts)
