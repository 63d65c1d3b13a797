"""``scheme="auto"``: a strategy until the way to train is chosen, and the choice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import keras

from pipetrain.compute.cores import is_remote
from pipetrain.compute.graph.input_shapes import Shapes
from pipetrain.frontend.device_choice import described
from pipetrain.frontend.input_data import DEFAULT_ROWS
from pipetrain.frontend.pipeline_strategy import PipelineStrategy
from pipetrain.frontend.placement import Placement
from pipetrain.plan.choice import Choice
from pipetrain.plan.memory import Training
from pipetrain.schemes.options import STALENESS, AnyScheme
from pipetrain.schemes.table import scheme
from pipetrain.simulation.every_way import PipelineLayout, choose


class AutoStrategy(PipelineStrategy):
    """One stage, which is not trained: at the first ``fit`` a strategy of the chosen way takes its place.

    Args:
        model: the model to train.
        devices: full names of all that may be used.
        staleness: what may be chosen, see ``schemes.options.Auto``.
        memory_bytes: of a device, None for no limit.
        recompute: whether stages run forwards again.
        laid_out: the layout of the pipeline to choose, and its microbatches if they are given; None: any way.
    """

    def __init__(
        self,
        model: keras.Model,
        devices: Sequence[str],
        staleness: str = STALENESS[0],
        memory_bytes: int | None = None,
        recompute: bool = False,
        laid_out: tuple[Placement, int | None] | None = None,
    ) -> None:
        placement = Placement(model, 1, None, devices, training=lambda stages: Training("single", recompute=recompute))
        super().__init__(model, placement, scheme("single"))
        self.devices, self._staleness, self._memory_bytes = list(devices), staleness, memory_bytes
        self._laid_out = laid_out

    def choice(self, rows: int | None = None, shapes: Shapes | None = None) -> Choice:
        """Every way to train with minibatches of so many rows; the model is profiled, and links are measured."""
        self.placement.learn(shapes)
        layout = self._layout
        devices = sum(layout.replicas) if layout else len(self.devices)
        batch_size, pieces = rows or DEFAULT_ROWS, (layout and layout.microbatches) or devices
        whole = self.placement.profile(batch_size, 1)
        of_microbatches = self.placement.profile(batch_size, pieces) if 1 < pieces <= batch_size else None
        cluster = replace(described(self.devices), memory_bytes=self._memory_bytes)
        mirrored = not any(map(is_remote, self.devices))
        training = self.placement.training
        return choose(whole, devices, cluster, training, of_microbatches, self._staleness, mirrored, layout)

    @property
    def _layout(self) -> PipelineLayout | None:
        if self._laid_out is None:
            return None
        placement, microbatches = self._laid_out
        return PipelineLayout(placement.replicas, placement.ends, microbatches)

    def explanation(self, batch_size: int, scheme: AnyScheme) -> str:
        """The ways to train as a table, and which would be taken."""
        return str(self.choice(batch_size))
