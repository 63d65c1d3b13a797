"""Training on a grid of devices: wide layers divided by their outputs, minibatches by their rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from pipetrain.compute.cores import HOST
from pipetrain.compute.functions.stage import Stage
from pipetrain.compute.graph.wide_layers import WideLayer, network_of, wide_layers
from pipetrain.compute.grid.step import GridStep
from pipetrain.compute.grid.weights import GridWeights
from pipetrain.compute.optimizer.gradient_scaling import stepping
from pipetrain.compute.transfers.weights import Worker
from pipetrain.frontend.input_data import DEFAULT_ROWS
from pipetrain.frontend.layout import described
from pipetrain.frontend.options import checked_workers
from pipetrain.frontend.planner import Planner
from pipetrain.frontend.refusals import check_loss_scaling
from pipetrain.frontend.runner_strategy import RunnerStrategy
from pipetrain.plan.grid_cost import best_grid
from pipetrain.run.step_runner import StepRunner
from pipetrain.run.worker_rows import WorkerRows
from pipetrain.schemes.grid import Grid
from pipetrain.schemes.scheme import Scheme
from pipetrain.schemes.transfers.plan import Phase, Plan

# Which treat each element of a weight alone, so that parts of it are updated as the whole would be.
ELEMENTWISE = (
    keras.optimizers.SGD,
    keras.optimizers.RMSprop,
    keras.optimizers.Adam,
    keras.optimizers.AdamW,
    keras.optimizers.Adadelta,
    keras.optimizers.Adagrad,
    keras.optimizers.Adamax,
    keras.optimizers.Nadam,
    keras.optimizers.Ftrl,
    keras.optimizers.Lion,
)


def is_elementwise(optimizer: Any) -> bool:
    """Whether it is known to update parts of a weight as it would update the whole."""
    return type(optimizer) in ELEMENTWISE and not optimizer.clipnorm


def check_elementwise(optimizer: Any, divides: bool) -> None:
    """Refuse, by name, optimizers that need the whole of a weight, where devices have parts of some."""
    if not divides:
        return
    name = type(optimizer).__name__
    if type(optimizer) not in ELEMENTWISE:
        known = ", ".join(each.__name__ for each in ELEMENTWISE)
        raise ValueError(
            "A device has a part of each divided weight, and this optimizer is not known to treat each element alone. "
            f"Received: scheme='grid', optimizer={name}. Try one of {known}; or scheme='all-reduce'."
        )
    if optimizer.clipnorm:
        raise ValueError(
            "clipnorm is not supported here: no device has the whole of a divided weight's gradient. Received: "
            f"scheme='grid', optimizer={name}(clipnorm={optimizer.clipnorm}). Try global_clipnorm or clipvalue, or "
            "scheme='all-reduce'."
        )


def checked_layers(grid: Grid, layers: Sequence[WideLayer]) -> list[WideLayer]:
    """Those that the grid divides. Raises ValueError for names of other layers, and for layers that are too narrow."""
    names = [layer.name for layer in layers]
    if grid.layers is None:
        return [layer for layer in layers if layer.size >= grid.outputs]
    unknown = [name for name in grid.layers if name not in names]
    if unknown:
        raise ValueError(
            "Dense and convolutional layers are divided that are called once and have nothing that depends on several "
            f"outputs together. Received: layers={grid.layers!r}, with {unknown}. Try some of: {', '.join(names)}."
        )
    chosen = [layer for layer in layers if layer.name in grid.layers]
    for layer in chosen:
        if layer.size < grid.outputs:
            raise ValueError(
                f"Every device of a model group has an output at least. Received: grid={tuple(grid)!r}, layer "
                f"{layer.name!r} with {layer.size} outputs. Try leaving it out of layers."
            )
    return chosen


def checked_devices(grid: Grid | str, devices: Sequence[str], stages: Any) -> list[str]:
    """The devices that it has, of an automatic one as many as ``stages``, by default all.

    Raises ValueError for a grid of more devices than there are, or of another number than was asked for.
    """
    if not isinstance(grid, Grid):
        return list(devices)[: checked_workers(stages, len(devices), "grid")]
    if len(devices) < grid.devices or (stages is not None and stages != grid.devices):
        asked = "" if stages is None else f", stages={stages!r}"
        raise ValueError(
            f"A grid has a device in each of its places. Received: grid={tuple(grid)[:2]!r}, {len(devices)} devices"
            f"{asked}. Try {grid.devices} devices, or grid=(1, {len(devices)})."
        )
    return list(devices)[: grid.devices]


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
