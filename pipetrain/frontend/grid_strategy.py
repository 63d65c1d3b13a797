"""Training on a grid of devices: wide layers divided by their outputs, minibatches by their rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from pipetrain.compute.functions.stage import Stage
from pipetrain.compute.graph.network import network_of
from pipetrain.compute.graph.wide_layers import WideLayer, wide_layers
from pipetrain.compute.grid.step import GridStep
from pipetrain.compute.grid.weights import GridWeights
from pipetrain.compute.optimizer.loss_scaling import stepping
from pipetrain.compute.transfers.worker import Worker
from pipetrain.frontend.checks.grid import check_elementwise, checked_layers, is_elementwise
from pipetrain.frontend.checks.optimizer import check_loss_scaling
from pipetrain.frontend.device_choice import described
from pipetrain.frontend.input_data import DEFAULT_ROWS
from pipetrain.frontend.planner import Planner
from pipetrain.frontend.runner_strategy import RunnerStrategy
from pipetrain.plan.grid_cost import best_grid
from pipetrain.run.pipeline import HOST
from pipetrain.run.step_runner import StepRunner
from pipetrain.run.worker_rows import WorkerRows
from pipetrain.schemes.grid import Grid
from pipetrain.schemes.scheme import Scheme
from pipetrain.schemes.transfers.plan import Phase, Plan


class GridStrategy(RunnerStrategy):
    """A stage that is the whole model, on a grid of devices, whose steps are one function each.

    What a ``fit`` has to do with Keras' loop, metrics, checkpoints and evaluation is as for a pipeline of this stage.

    Args:
        planner: of the model, whose layout is one stage, whose replicas are the devices.
        scheme: ``grid``.
        grid: of the devices, or ``"auto"``.

    ``grid`` is the one that was chosen, once there is a pipeline.
    """

    def __init__(self, planner: Planner, scheme: Scheme, grid: Grid | str) -> None:
        super().__init__(planner, scheme)
        self._devices, self._asked = planner.layout.devices, grid
        self._wide = wide_layers(planner.chain.blocks)
        if isinstance(grid, Grid):
            checked_layers(grid, self._wide)

    def compiled(self, owner: keras.Model, loss: Any, jit_compile: Any) -> None:
        """The optimizer and the loss are new."""
        check_loss_scaling(owner.optimizer, self._scheme.name, None)
        if isinstance(self._asked, Grid):
            check_elementwise(stepping(owner.optimizer), bool(self._divided(self._asked)))
        super().compiled(owner, loss, jit_compile)

    def _divided(self, grid: Grid) -> list[WideLayer]:
        return checked_layers(grid, self._wide) if grid.outputs > 1 else []

    def _built(self, rows: int | None) -> Sequence[list[Stage]]:
        loss, chain = self._compilation.metrics.loss, self.planner.chain
        self.grid = self._asked if isinstance(self._asked, Grid) else self._best(rows or DEFAULT_ROWS)
        wide = self._divided(self.grid)
        self._weights = GridWeights(chain, wide, self.grid, self._devices, HOST, self.optimizer, loss)
        return [[self._weights]]

    def _best(self, rows: int) -> Grid:
        """The grid that sends the least, by the slowest of the measured links."""
        count = len(self._devices)
        if count == 1 or not is_elementwise(self._compilation.steps):
            return Grid(1, count)
        cluster = described(self._devices, within_functions=True)
        return best_grid(network_of(self.planner.chain, self._wide), count, rows, cluster.slowest(count))

    def _new_runner(self) -> Any:
        count, weights = len(self._devices), self._weights
        workers = [Worker(weights.segment, device, n, count) for n, device in enumerate(self._devices)]
        return StepRunner(
            [weights],
            workers,
            Plan(Phase(), Phase(), name="grid"),
            lambda plan, begun: GridStep(weights, workers, HOST),
            WorkerRows(self._devices, self.grid.outputs if weights.reads_whole else 1),
            self._run_settings,
            self._compilation.learning_rate,
        )
