"""The table of ``plan --balance``: which layers of a saved model should be divided how."""

from __future__ import annotations

import argparse
import math

from pipetrain.plan.balance import Balance
from pipetrain.plan.cluster import Cluster
from pipetrain.plan.profile import Profile

PASSES = 3  # of a training step: forward, and both gradients of each product


def add(command: argparse.ArgumentParser) -> None:
    """The options."""
    command.add_argument(
        "--balance",
        action="store_true",
        help="instead, which layers should be data-parallel and which model-parallel, by the operations that each has "
        "for a byte that it sends",
    )
    command.add_argument(
        "--no-overlap", action="store_true", help="--balance where no gradients are sent while layers compute"
    )
    command.add_argument(
        "--as-printed",
        action="store_true",
        help="--balance by the inequality as its source prints it: one pass of model parallelism beside three of data "
        "parallelism",
    )


def balance(options: argparse.Namespace, profile: Profile, cluster: Cluster) -> str:
    """The table. The operations a second are those that the profile's seconds come to."""
    import keras

    from pipetrain.compute.graph.blocks import Chain
    from pipetrain.compute.graph.wide_layers import wide_layers
    from pipetrain.compute.profiling.operation_count import operation_counts

    model = keras.saving.load_model(options.model, compile=False)
    layers = [layer.shape for layer in wide_layers(Chain(model).blocks)]
    if not layers:
        return "No layer of this model can be divided: it has no dense layers or convolutions of their own."
    flops = PASSES * sum(work.flops for work in operation_counts(model, options.batch_size))
    slowest = min(
        (cluster.link(0, n).bandwidth_bytes_per_s for n in range(1, options.devices)),
        default=math.inf,
    )
    system = flops / profile.total_s / slowest
    return str(Balance(layers, options.devices, options.batch_size, system, not options.no_overlap, options.as_printed))
