"""Samples/s that are expected of pipetrain's schemes before they train: what the planner says.

Of schemes that flush the pipeline a simulation says it, of a profile of microbatches: it knows that few rows take more
than their share of the time of many, and what an action and Keras' loop cost beside the computing, for which such a
pipeline waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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

MINIBATCHES = 40  # simulated


def microbatches(scheme: str) -> int | None:
    """How many the benchmarks split a minibatch into, if the name does not say; None for schemes that do not."""
    chosen = variant(scheme)
    return chosen.microbatches or MICROBATCHES if chosen.splits else None


def training(scheme: str) -> Training:
    """What to plan a scheme's stages for."""
    return Training(variant(scheme).way, microbatches=microbatches(scheme) or 1)


def profiled(model: keras.Model, network: Network, scheme: str) -> Profile:
    """A profile for planning a scheme's stages: with the rows of a microbatch where it splits minibatches."""
    import pipetrain

    return pipetrain.profile(
        model, network.batch_size, verbose=False, budget_s=None, microbatches=microbatches(scheme) or 1
    )


def profiles(model: keras.Model, network: Network, counts: Iterable[int]) -> dict[int, Profile]:
    """A profile for each of these numbers of microbatches."""
    import pipetrain

    return {
        count: pipetrain.profile(model, network.batch_size, verbose=False, budget_s=None, microbatches=count)
        for count in sorted({*counts})
    }


def advised(
    known: Mapping[int, Profile], names: Sequence[str], devices: Sequence[str]
) -> tuple[dict[str, float], str | None]:
    """Samples/s of synchronous schedules as ``explain()`` predicts them, and the one that it recommends.

    From a profile of whole minibatches and one of ``MICROBATCHES`` it estimates what other numbers take.
    """
    from pipetrain.frontend.layout import described
    from pipetrain.simulation.every_way import Chooser

    rates, recommended = {}, None
    for name in names:
        planned = training(name)
        if planned.chosen.synchronous:
            whole, pieces = known[1], known[MICROBATCHES]
            chooser = Chooser(whole, len(devices), described(devices), planned, pieces)
            way, _ = chooser.of(planned.scheme)
            pipelines = [each for each in chooser.choice().ways if each.kind == "pipeline"]
            rates[name], recommended = whole.batch_size / way.step_s, str(min(pipelines, key=lambda each: each.step_s))
    return rates, recommended


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
        from pipetrain.compute.graph.blocks import Chain, cut_points
        from pipetrain.frontend.layout import described

        self._model, self._network, self._partitions = model, network, dict(partitions)
        self._cluster = described(devices)
        self._ends = {name: cut_points(Chain(model).blocks, each.cuts) for name, each in partitions.items()}
        self._pieces = {name: microbatches(name) or 1 for name in partitions if training(name).chosen.synchronous}
        empty = networks.build(SIDE)
        cut = [empty.layers[0].name]  # nothing is profiled for it
        self._empty = pipeline(empty, SIDE, SIDE_STEPS, "1f1b", cuts=cut) if self._pieces else None

    def rates(self, known: Mapping[int, Profile] | None = None) -> dict[str, float]:
        """Samples/s of each scheme, by these profiles, or by new ones."""
        counts = {self._pieces.get(name, 1) for name in self._partitions}
        found = known or profiles(self._model, self._network, counts)
        overhead_s, caller_s = beside(self._empty) if self._empty else (0.0, 0.0)
        rates = {}
        for name in self._partitions:
            planned = self._planned(name, found[self._pieces.get(name, 1)])
            if name in self._pieces:
                rates[name] = self._simulated(name, planned, overhead_s, caller_s)
            else:
                rates[name] = planned.samples_per_second
        return rates

    def _planned(self, name: str, profile: Profile) -> Partition:
        """The cut that trains, with the kernels that it has, whatever the new profile would choose."""
        from pipetrain.plan.partition import plan

        given, cluster = self._partitions[name], self._cluster
        compiled = [stage.compiled for stage in given.stages]
        return plan(profile, self._ends[name], cluster, training=given.training, compiled=compiled)

    def _simulated(self, name: str, planned: Partition, overhead_s: float, caller_s: float) -> float:
        from pipetrain.simulation.simulator import simulate

        trace = simulate(
            planned,
            variant(name).scheme,
            self._cluster,
            MINIBATCHES,
            microbatches=self._pieces[name],
            overhead_s=overhead_s,
            caller_s=caller_s + planned.metric_s,
        )
        return self._network.batch_size / trace.step_s
