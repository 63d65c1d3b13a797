"""Which strategy trains by which scheme."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras

from pipetrain.frontend.checks.grid import checked_devices
from pipetrain.frontend.checks.model import check_model, check_precision
from pipetrain.frontend.checks.options import (
    check_cuts,
    check_microbatches,
    check_recompute,
    check_replicas,
    check_schedule,
    checked_microbatches,
    checked_workers,
)
from pipetrain.frontend.data_parallel import DataParallelStrategy
from pipetrain.frontend.device_choice import resolve
from pipetrain.frontend.grid_strategy import GridStrategy
from pipetrain.frontend.pipeline_strategy import PipelineStrategy
from pipetrain.frontend.placement import Placement
from pipetrain.frontend.strategy import Strategy
from pipetrain.frontend.transfer_strategy import TransferStrategy
from pipetrain.plan.memory import Training
from pipetrain.plan.stages import Partition
from pipetrain.schemes.grid import check_grid
from pipetrain.schemes.scheme import Scheme
from pipetrain.schemes.table import DATA_PARALLEL, GRID, GRIDS, TRANSFERRING, check_name, check_options
from pipetrain.schemes.table import scheme as chosen_scheme
from pipetrain.schemes.transfers.orders import check_order


class Options(NamedTuple):
    """How a model is to be trained: the arguments of ``PipelineModel``."""

    scheme: str | Scheme
    stages: int | Partition | None
    cuts: Sequence[str] | None
    devices: Sequence[str] | None
    replicas: Sequence[int] | None
    microbatches: int | None
    recompute: bool
    order: Any
    horizon: str | float
    spike_compensation: bool
    rescale_steps: int | None
    stretch_momentum: bool | str
    grid: Any = None

    def of_policy(self) -> dict[str, Any]:
        """Those of the scheme's policy, for a checkpoint."""
        names = "horizon", "spike_compensation", "rescale_steps", "stretch_momentum"
        return {name: getattr(self, name) for name in names}


def check(options: Options) -> None:
    """Raise ValueError, before a model is looked at, for what the scheme does not have."""
    name = check_name(options.scheme)
    check_options(options.scheme, **options.of_policy())
    check_microbatches(options.microbatches, options.scheme, options.horizon)
    check_replicas(name, options.replicas)
    check_recompute(options.recompute, name)
    check_cuts(options.cuts, name)
    check_order(options.order, name)
    check_grid(options.grid, name)


def strategy_of(model: keras.Model, options: Options) -> Strategy:
    """What trains the model by the scheme that the options name. Raises ValueError, TypeError for what cannot be."""
    return OTHERS.get(check_name(options.scheme), _pipeline)(model, options)


def _data_parallel(model: keras.Model, options: Options) -> Strategy:
    _, stages, cuts, devices, replicas, *_ = options
    on = resolve(devices)
    placement = Placement(model, stages, cuts, on, replicas, training=lambda stages: Training("single"))
    return DataParallelStrategy(model, placement)


def _pipeline(model: keras.Model, options: Options) -> Strategy:
    name, stages, cuts, devices, replicas, microbatches, recompute, *_ = options
    scheme = chosen_scheme(name, **options.of_policy())
    on = resolve(devices)

    def training(stages: int) -> Training:
        count = checked_microbatches(microbatches, scheme, stages)
        check_schedule(scheme, stages, count)
        return Training(
            name,
            microbatches=count,
            recompute=recompute,
            horizon=options.horizon,
            stretch_momentum=options.stretch_momentum,
        )

    placement = Placement(model, stages, cuts, on, replicas, scheme.schedule, training)
    check_model(model)
    check_precision(placement.chain.blocks, scheme)
    if scheme.name == "single":
        placement = Placement(model, 1, None, on, training=training)
    return PipelineStrategy(model, placement, scheme)


def _transferring(model: keras.Model, options: Options) -> Strategy:
    scheme, on = TRANSFERRING[str(options.scheme)], resolve(options.devices)
    workers = checked_workers(options.stages, len(on), scheme.name)
    check_model(model)
    placement = Placement(model, 1, None, on, (workers,), training=lambda stages: Training("single"))
    return TransferStrategy(model, placement, scheme, options.order)


def _grid(model: keras.Model, options: Options) -> Strategy:
    grid, on = check_grid(options.grid, GRID), resolve(options.devices)
    check_model(model)
    on = checked_devices(grid, on, options.stages)
    placement = Placement(model, 1, None, on, (len(on),), training=lambda stages: Training("single"))
    return GridStrategy(model, placement, GRIDS[GRID], grid)


# Strategies of the schemes that are no pipelines.
OTHERS: dict[str, Callable[[keras.Model, Options], Strategy]] = {
    DATA_PARALLEL: _data_parallel,
    **dict.fromkeys(TRANSFERRING, _transferring),
    GRID: _grid,
}
