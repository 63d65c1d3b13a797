"""Which strategy trains by which scheme."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras

from pipetrain.frontend.auto import AutoStrategy
from pipetrain.frontend.checks.grid import checked_devices
from pipetrain.frontend.checks.model import check_model, check_precision
from pipetrain.frontend.checks.options import (
    check_copies,
    check_cuts,
    check_microbatches,
    check_only_auto,
    check_open,
    check_recompute,
    check_replicas,
    check_schedule,
    checked_microbatches,
    checked_servers,
    checked_workers,
)
from pipetrain.frontend.checks.tree import check_tree, check_workers, tree_of
from pipetrain.frontend.coded_strategy import CodedStrategy
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
from pipetrain.schemes.own_options import OWN
from pipetrain.schemes.scheme import Scheme
from pipetrain.schemes.table import (
    AUTO,
    CODED,
    DATA_PARALLEL,
    GRID,
    GRIDS,
    HORIZONS,
    TRANSFERRING,
    check_name,
    check_options,
)
from pipetrain.schemes.table import scheme as chosen_scheme
from pipetrain.schemes.text_form import chosen, microbatches_of, stages_of


class Options(NamedTuple):
    """How a model is to be trained: the arguments of ``PipelineModel``."""

    scheme: str | Scheme = "spectrain"
    stages: int | Partition | None = None
    cuts: Sequence[str] | None = None
    devices: Sequence[str] | None = None
    replicas: Sequence[int] | None = None
    microbatches: int | None = None
    recompute: bool = False
    order: Any = None
    horizon: str | float = HORIZONS[0]
    spike_compensation: bool = False
    rescale_steps: int | None = None
    stretch_momentum: bool | str = "auto"
    chunks: int | None = None
    staleness: str | None = None
    memory_bytes: int | None = None
    children: int | None = None
    depth: int | None = None
    stragglers: int | None = None
    grid: Any = None
    servers: int | None = None

    @property
    def name(self) -> str:
        """The scheme's, or ``auto``."""
        return AUTO if self.scheme == AUTO else check_name(self.scheme)

    @property
    def of_tree(self) -> tuple[int | None, int | None, int | None]:
        """Those of a tree of workers."""
        return self.children, self.depth, self.stragglers

    def of_policy(self) -> dict[str, Any]:
        """Those of the scheme's policy, for a checkpoint."""
        names = "horizon", "spike_compensation", "rescale_steps", "stretch_momentum"
        return {name: getattr(self, name) for name in names}


def checked(options: Options) -> Options:
    """The options, with a file's schedule in place of its name, and numbers that JSON can hold.

    Raises ValueError, before a model is looked at, for what the scheme does not have.
    """
    if options.scheme == AUTO:
        check_open(options, Options())
        return options
    scheme = chosen(options.scheme, options.chunks)
    stages, microbatches = options.stages, options.microbatches
    if options.cuts is None and stages is None:
        stages = stages_of(scheme)
    if microbatches is None:
        microbatches = microbatches_of(scheme)
    options = options._replace(scheme=scheme, stages=stages, microbatches=microbatches)
    _check(options)
    horizon, steps, stretch = options.horizon, options.rescale_steps, options.stretch_momentum
    return options._replace(  # checkpoints, being JSON, have no NumPy numbers
        horizon=horizon if isinstance(horizon, str) else float(horizon),
        spike_compensation=bool(options.spike_compensation),
        rescale_steps=None if steps is None else int(steps),
        stretch_momentum="auto" if isinstance(stretch, str) else bool(stretch),
    )


def _check(options: Options) -> None:
    name = options.name
    check_only_auto(options.staleness, options.memory_bytes, name)
    check_options(options.scheme, **options.of_policy())
    check_microbatches(options.microbatches, options.scheme, options.horizon)
    check_replicas(name, options.replicas)
    check_recompute(options.recompute, name)
    check_cuts(options.cuts, name)
    for option, own in OWN.items():
        own.check(getattr(options, option), name)
    check_copies(options.stages, options.devices, name)
    check_tree(name, *options.of_tree)


def strategy_of(model: keras.Model, options: Options) -> Strategy:
    """What trains the model by the scheme that the options name. Raises ValueError, TypeError for what cannot be."""
    return OTHERS.get(options.name, _pipeline)(model, options)


def _auto(model: keras.Model, options: Options) -> Strategy:
    check_model(model)
    return AutoStrategy(model, resolve(options.devices), options.staleness, options.memory_bytes, options.recompute)


def _data_parallel(model: keras.Model, options: Options) -> Strategy:
    on = resolve(options.devices)
    workers = checked_workers(options.stages, len(on), DATA_PARALLEL)
    return DataParallelStrategy(model, _on_each(model, on[:workers]))


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


def _on_each(model: keras.Model, devices: Sequence[str]) -> Placement:
    """One stage, the whole model, on each of these devices."""
    check_model(model)
    return Placement(model, 1, None, devices, (len(devices),), training=lambda stages: Training("single"))


def _transferring(model: keras.Model, options: Options) -> Strategy:
    scheme, on = TRANSFERRING[str(options.scheme)], resolve(options.devices)
    workers = checked_workers(options.stages, len(on), scheme.name)
    servers = checked_servers(options.servers, workers)
    return TransferStrategy(model, _on_each(model, on[:workers]), scheme, options.order, servers)


def _coded(model: keras.Model, options: Options) -> Strategy:
    tree, on = tree_of(*options.of_tree), resolve(options.devices)
    check_workers(tree, options.stages, on)
    return CodedStrategy(model, _on_each(model, on[: tree.workers]), tree)


def _grid(model: keras.Model, options: Options) -> Strategy:
    grid, on = check_grid(options.grid, GRID), resolve(options.devices)
    return GridStrategy(model, _on_each(model, checked_devices(grid, on, options.stages)), GRIDS[GRID], grid)


# Strategies of the schemes that are no pipelines.
OTHERS: dict[str, Callable[[keras.Model, Options], Strategy]] = {
    AUTO: _auto,
    DATA_PARALLEL: _data_parallel,
    **dict.fromkeys(TRANSFERRING, _transferring),
    CODED: _coded,
    GRID: _grid,
}
