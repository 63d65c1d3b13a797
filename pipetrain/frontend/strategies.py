"""Which strategy trains by which scheme; here too the one of coded gradients, which adds little to a runner's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras

from pipetrain.compute.cores import HOST
from pipetrain.compute.functions.stage import Stage
from pipetrain.compute.graph.blocks import Chain
from pipetrain.compute.transfers.coded import Root
from pipetrain.compute.transfers.weights import WeightsPart
from pipetrain.frontend.auto import AutoStrategy
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
from pipetrain.frontend.refusals import check_loss_scaling, check_model, check_precision
from pipetrain.frontend.runner_strategy import RunnerStrategy
from pipetrain.frontend.strategy import Strategy
from pipetrain.frontend.transfer_strategy import TransferStrategy
from pipetrain.plan.memory import Training
from pipetrain.plan.stages import Partition
from pipetrain.run.coded_runner import CodedRunner
from pipetrain.schemes.arguments import is_count
from pipetrain.schemes.coded_reduce import Tree
from pipetrain.schemes.grid import Grid, check_grid
from pipetrain.schemes.options import (
    Auto,
    CodedReduce,
    ParameterServer,
    TransferOptions,
    built,
    check_synchronous,
    options_of,
)
from pipetrain.schemes.table import AUTO, CODED, DATA_PARALLEL, GRID, GRIDS, TRANSFERRING, TREES


def check_workers(tree: Tree, stages: Any, devices: Sequence[str]) -> None:
    """Refuse fewer devices than workers, and another number of ``stages``, which would be that of the workers."""
    about = f"children={tree.children}, depth={tree.depth}"
    if stages is not None and (not is_count(stages) or stages != tree.workers):
        raise ValueError(
            f"The tree has {tree.workers} workers, each on a device. Received: stages={stages!r}, {about}. "
            "Try leaving stages out."
        )
    if len(devices) < tree.workers:
        raise ValueError(
            f"The tree has {tree.workers} workers, each on a device. Received: {len(devices)} devices, {about}. "
            f"Try pipetrain.set_cpu_devices({tree.workers}), or as many workers in pipetrain.connect."
        )


class CodedStrategy(RunnerStrategy):
    """A stage that is the whole model, whose weights this process updates, and whose gradients workers make.

    What a ``fit`` has to do with Keras' loop, metrics, checkpoints and evaluation is as for a pipeline of this stage.

    Args:
        planner: of the model, whose layout is one stage, whose replicas are the workers.
        tree: who is whose parent.
    """

    def __init__(self, planner: Planner, tree: Tree) -> None:
        super().__init__(planner, TREES[CODED])
        self.tree = tree
        self._stragglers = [0] * tree.workers

    def compiled(self, owner: keras.Model, loss: Any, jit_compile: Any) -> None:
        """The optimizer and the loss are new."""
        check_loss_scaling(owner.optimizer, self._scheme.name, None)
        super().compiled(owner, loss, jit_compile)

    def _built(self, rows: int | None) -> Sequence[list[Stage]]:
        (segment,) = self.planner.layout.segments(self.planner.chain)
        every = WeightsPart(HOST, range(len(segment.trainable_variables)))
        loss, workers = self._compilation.metrics.loss, self.tree.workers
        self._root = Root(segment, [every], self.optimizer, loss, workers)
        return [list[Stage]([self._root])]

    def _new_runner(self) -> Any:
        devices = self.planner.layout.devices
        compilation = self._compilation
        rates, reads = compilation.learning_rate, compilation.metrics.read_predictions
        runner = CodedRunner(self._root, self.tree, devices, self._run_settings, rates, reads)
        self._stragglers = runner.stragglers
        return runner

    @property
    def stragglers(self) -> tuple[int, ...]:
        """For every worker the steps since ``compile`` that ended without it."""
        return tuple(self._stragglers)


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
        check_synchronous(own.allowed, True)
        training = Training("1f1b", microbatches=options.microbatches or 1, recompute=options.recompute)
        layout = laid_out(chain, *options.layout, on, memory_bytes=options.memory_bytes)
        given = options.stages if isinstance(options.stages, Partition) else None
    # Without a limit of memory: what keeps to it is chosen with its schedule.
    planner = Planner(chain, layout, training, given)
    return AutoStrategy(planner, training.chosen, on, own.allowed, options)


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
    assert isinstance(own, TransferOptions)
    workers = checked_workers(options.stages, len(on), own.name)
    servers = checked_servers(own.servers if isinstance(own, ParameterServer) else None, workers)
    return TransferStrategy(_on_each(model, on[:workers], options, among), TRANSFERRING[own.name], own, servers)


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
