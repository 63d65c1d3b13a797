"""Which strategy trains by which scheme."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import keras

from pipetrain.compute.graph.blocks import Chain
from pipetrain.frontend.auto import AutoStrategy
from pipetrain.frontend.coded_strategy import CodedStrategy, check_workers
from pipetrain.frontend.data_parallel import DataParallelStrategy
from pipetrain.frontend.grid_strategy import GridStrategy, checked_devices
from pipetrain.frontend.layout import laid_out, resolve
from pipetrain.frontend.options import (
    Options,
    check_schedule,
    checked_microbatches,
    checked_servers,
    checked_workers,
)
from pipetrain.frontend.pipeline_strategy import PipelineStrategy
from pipetrain.frontend.planner import Planner
from pipetrain.frontend.refusals import check_model, check_precision
from pipetrain.frontend.strategy import Strategy
from pipetrain.frontend.transfer_strategy import TransferStrategy
from pipetrain.plan.memory import Training
from pipetrain.plan.stages import Partition
from pipetrain.schemes.grid import Grid, check_grid
from pipetrain.schemes.options import (
    AllReduce,
    Auto,
    CodedReduce,
    ParameterServer,
    built,
    check_synchronous,
    options_of,
)
from pipetrain.schemes.table import AUTO, CODED, DATA_PARALLEL, GRID, GRIDS, TRANSFERRING


def strategy_of(model: keras.Model, options: Options, among: Options | None = None) -> Strategy:
    """What trains the model by the scheme that the options name.

    Among the ways to train on the devices, and within the memory, of the options ``among``, if it was chosen so.
    Raises ValueError, TypeError for what cannot be.
    """
    return OTHERS.get(options.name, _pipeline)(model, options, among or options)


def _auto(model: keras.Model, options: Options, among: Options) -> Strategy:
    check_model(model)
    on, own, chain = resolve(options.devices), options_of(options.scheme), Chain(model)
    assert isinstance(own, Auto)
    if options.layout == (None, None, None):
        training = Training("single", recompute=options.recompute)
        layout, given = laid_out(chain, 1, None, None, on), None
    else:
        check_synchronous(own.staleness, True)
        training = Training("1f1b", microbatches=options.microbatches or 1, recompute=options.recompute)
        layout = laid_out(chain, *options.layout, on, memory_bytes=options.memory_bytes)
        given = options.stages if isinstance(options.stages, Partition) else None
    # Without a limit of memory: what keeps to it is chosen with its schedule.
    planner = Planner(chain, layout, training, given)
    return AutoStrategy(planner, training.chosen, on, own.staleness, options)


def _data_parallel(model: keras.Model, options: Options, among: Options) -> Strategy:
    on = resolve(options.devices)
    workers = checked_workers(options.stages, len(on), DATA_PARALLEL)
    return DataParallelStrategy(_on_each(model, on[:workers], options, among))


def _pipeline(model: keras.Model, options: Options, among: Options) -> Strategy:
    on, scheme, chain = resolve(options.devices), built(options.scheme), Chain(model)
    layout = laid_out(chain, *options.layout, on, scheme.schedule, options.memory_bytes)
    microbatches = checked_microbatches(options.microbatches, scheme, layout.stages)
    check_schedule(scheme, layout.stages, microbatches)
    check_model(model)
    check_precision(chain.blocks, scheme)
    given = options.stages if isinstance(options.stages, Partition) else None
    if scheme.name == "single":
        layout, given = laid_out(chain, 1, None, None, on), None
    training = Training(options.scheme, microbatches=microbatches, recompute=options.recompute)
    return PipelineStrategy(Planner(chain, layout, training, given, *_compared(options, among)), scheme)


def _compared(options: Options, among: Options) -> tuple[int | None, Sequence[str]]:
    """The limit of memory, and the devices on which other ways are compared; its own where nothing was chosen."""
    return among.memory_bytes, () if among is options else resolve(among.devices)


def _on_each(model: keras.Model, devices: Sequence[str], options: Options, among: Options) -> Planner:
    """Of one stage, the whole model, on each of these devices."""
    check_model(model)
    chain = Chain(model)
    layout = laid_out(chain, 1, None, (len(devices),), devices)
    return Planner(chain, layout, Training("single"), None, *_compared(options, among))


def _transferring(model: keras.Model, options: Options, among: Options) -> Strategy:
    own, on = options_of(options.scheme), resolve(options.devices)
    assert isinstance(own, AllReduce)
    workers = checked_workers(options.stages, len(on), own.name)
    servers = checked_servers(own.servers if isinstance(own, ParameterServer) else None, workers)
    return TransferStrategy(_on_each(model, on[:workers], options, among), TRANSFERRING[own.name], own.order, servers)


def _coded(model: keras.Model, options: Options, among: Options) -> Strategy:
    own, on = options_of(options.scheme), resolve(options.devices)
    assert isinstance(own, CodedReduce)
    check_workers(own.tree, options.stages, on)
    return CodedStrategy(_on_each(model, on[: own.tree.workers], options, among), own.tree)


def _grid(model: keras.Model, options: Options, among: Options) -> Strategy:
    grid, on = check_grid(options.scheme if isinstance(options.scheme, Grid) else None, GRID), resolve(options.devices)
    return GridStrategy(_on_each(model, checked_devices(grid, on, options.stages), options, among), GRIDS[GRID], grid)


# Strategies of the schemes that are no pipelines.
OTHERS: dict[str, Callable[[keras.Model, Options, Options], Strategy]] = {
    AUTO: _auto,
    DATA_PARALLEL: _data_parallel,
    **dict.fromkeys(TRANSFERRING, _transferring),
    CODED: _coded,
    GRID: _grid,
}
