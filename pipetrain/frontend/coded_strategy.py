"""Data parallelism by coded gradients: a tree of workers, of which some under every parent may be late."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from pipetrain.compute.cores import HOST
from pipetrain.compute.functions.stage import Stage
from pipetrain.compute.transfers.coded import Root
from pipetrain.compute.transfers.weights import WeightsPart
from pipetrain.frontend.planner import Planner
from pipetrain.frontend.refusals import check_loss_scaling
from pipetrain.frontend.runner_strategy import RunnerStrategy
from pipetrain.run.coded_runner import CodedRunner
from pipetrain.schemes.arguments import is_count
from pipetrain.schemes.coded_reduce import Tree
from pipetrain.schemes.table import CODED, TREES


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
