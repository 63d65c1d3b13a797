"""Samples/s that are expected of pipetrain's schemes before they train: what the planner says.

Of schemes that flush the pipeline a simulation says it, of a profile of microbatches: it knows that few rows take more
than their share of the time of many, and what an action and Keras' loop cost beside the computing, for which such a
pipeline waits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from benchmarks import networks
from benchmarks.networks import Network
from benchmarks.simulation import MICROBATCHES, SIDE, SIDE_STEPS, beside, pipeline
from experiments.variants import variant
from pipetrain.plan.memory import Training

if TYPE_CHECKING:
    import keras

    from pipetrain.plan.partition import Partition
    from pipetrain.plan.profile import Profile

SIMULATED = ("gpipe", "1f1b")
MINIBATCHES = 40  # simulated


def microbatches(scheme: str) -> int | None:
    """How many the benchmarks split a minibatch into, if the name does not say; None for schemes that do not."""
    chosen = variant(scheme)
    return chosen.microbatches or MICROBATCHES if chosen.splits else None


def training(scheme: str) -> Training:
    """What to plan a scheme's stages for."""
    name, horizon, _ = variant(scheme)
    return Training(name, microbatches=microbatches(scheme) or 1, horizon=horizon)


def profiled(model: keras.Model, network: Network, scheme: str) -> Profile:
    """A profile for planning a scheme's stages: with the rows of a microbatch where it splits minibatches."""
    import pipetrain

    return pipetrain.profile(model, network.batch_size, verbose=False, microbatches=microbatches(scheme) or 1)


class Expected:
    """What is expected of schemes whose cuts are given.

    Args:
        model: the model that they train, in minibatches of the network's.
        network: its network.
        partitions: how each scheme cuts it, with its own training.
        devices: the names of their devices.
    """

    def __init__(
        self, model: keras.Model, network: Network, partitions: Mapping[str, Partition], devices: Sequence[str]
    ) -> None:
        from pipetrain.compute.graph.blocks import Chain
        from pipetrain.compute.graph.cuts import cut_points
        from pipetrain.frontend.device_choice import described

        self._model, self._rows, self._partitions = model, network.batch_size, dict(partitions)
        self._cluster = described(devices)
        self._ends = {name: cut_points(Chain(model).blocks, each.cuts) for name, each in partitions.items()}
        empty, flushed = networks.build(SIDE), [name for name in SIMULATED if name in partitions]
        cut = [empty.layers[0].name]  # nothing is profiled for it
        self._empty = {name: pipeline(empty, SIDE, SIDE_STEPS, name, cuts=cut) for name in flushed}

    def rates(self) -> dict[str, float]:
        """Samples/s of each scheme, by a new profile."""
        import pipetrain

        whole = pipetrain.profile(self._model, self._rows, verbose=False)
        pieces = whole
        if self._empty:
            pieces = pipetrain.profile(self._model, self._rows, verbose=False, microbatches=MICROBATCHES)
        return {
            name: self._simulated(name, pieces)
            if name in self._empty
            else self._planned(name, whole).samples_per_second
            for name in self._partitions
        }

    def _planned(self, name: str, profile: Profile) -> Partition:
        """The cut that trains, with the kernels that it has, whatever the new profile would choose."""
        from pipetrain.plan.partition import plan

        given, cluster = self._partitions[name], self._cluster
        compiled = [stage.compiled for stage in given.stages]
        return plan(profile, self._ends[name], cluster, training=given.training, compiled=compiled)

    def _simulated(self, name: str, profile: Profile) -> float:
        from pipetrain.simulation.simulator import simulate

        overhead_s, caller_s = beside(self._empty[name])
        planned = self._planned(name, profile)
        trace = simulate(
            planned,
            name,
            self._cluster,
            MINIBATCHES,
            microbatches=MICROBATCHES,
            overhead_s=overhead_s,
            caller_s=caller_s + planned.metric_s,
        )
        return self._rows / trace.step_s
