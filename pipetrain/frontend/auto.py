"""``scheme="auto"``: a strategy until the way to train is chosen, and the choice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import keras

from pipetrain.compute.cores import is_remote
from pipetrain.compute.graph.input_shapes import Shapes
from pipetrain.frontend.device_choice import described
from pipetrain.frontend.input_data import DEFAULT_ROWS
from pipetrain.frontend.options import Options
from pipetrain.frontend.pipeline_strategy import PipelineStrategy
from pipetrain.frontend.placement import Placement
from pipetrain.plan.choice import Choice
from pipetrain.plan.memory import Training
from pipetrain.schemes.options import AnyScheme
from pipetrain.schemes.table import scheme
from pipetrain.simulation.every_way import PipelineLayout, choose


class AutoStrategy(PipelineStrategy):
    """One stage, which is not trained: at the first ``fit`` a strategy of the chosen way takes its place.

    Args:
        model: the model to train.
        devices: full names of all that may be used.
        staleness: what may be chosen, see ``schemes.options.Auto``.
        laid_out: the pipeline whose schedule is to be chosen; None: any way.
        given: the arguments that the user gives.
    """

    def __init__(
        self,
        model: keras.Model,
        devices: Sequence[str],
        staleness: str,
        laid_out: Placement | None,
        given: Options,
    ) -> None:
        placement, name = laid_out, "1f1b"
        if placement is None:
            name = "single"
            placement = Placement(
                model, 1, None, devices, training=lambda stages: Training(name, recompute=given.recompute)
            )
        super().__init__(model, placement, scheme(name))
        self.devices, self._staleness, self.given = list(devices), staleness, given
        self.is_laid_out = laid_out is not None

    def choice(self, rows: int | None = None, shapes: Shapes | None = None) -> Choice:
        """Every way to train with minibatches of so many rows; the model is profiled, and links are measured."""
        self.placement.learn(shapes)
        layout = None
        if self.is_laid_out:
            layout = PipelineLayout(self.placement.replicas, self.placement.ends, self.given.microbatches)
        devices = sum(layout.replicas) if layout else len(self.devices)
        batch_size, pieces = rows or DEFAULT_ROWS, (layout and layout.microbatches) or devices
        whole = self.placement.profile(batch_size, 1)
        of_microbatches = self.placement.profile(batch_size, pieces) if 1 < pieces <= batch_size else None
        cluster = replace(described(self.devices), memory_bytes=self.given.memory_bytes)
        mirrored = not any(map(is_remote, self.devices))
        training = self.placement.training._replace(microbatches=1)
        return choose(whole, devices, cluster, training, of_microbatches, self._staleness, mirrored, layout)

    def explanation(self, batch_size: int, scheme: AnyScheme) -> str:
        """The ways to train as a table, which would be taken, and its cut."""
        return self.choice(batch_size).text()
