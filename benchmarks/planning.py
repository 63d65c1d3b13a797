"""Seconds that the planner takes, by blocks and devices, side by side and with replication, with and without a limit.

The chains are made up: seconds, outputs and weights of every block at random, hosts of 8 devices. With
``--applications`` they are the networks of ``keras.applications``, whose seconds a roofline makes of their layers'
operations, and the figure is what ``pipetrain.choose`` takes for every way to train on 8 devices, predicted weights
included.

examples:
  python benchmarks/planning.py
  python benchmarks/planning.py --blocks 1000 --devices 64
  python benchmarks/planning.py --applications
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from pipetrain.logs import text_table
from pipetrain.plan.cluster import PCIE_3, Cluster, Level, Link
from pipetrain.plan.partition import NoPlan, partition
from pipetrain.plan.profile import BlockProfile, Profile

HOST, ROWS = 8, 256  # devices and rows of --applications
HOSTS_OF_8 = (Level(PCIE_3, 8), Level(Link(1.25e9, 50e-6)))
LIMITS = {"no limit": None, "limit met": 4.0, "limit too low": 0.1}  # times an even share of weights and activations


def chain(blocks: int) -> Profile:
    """Blocks of 0.2 to 4 ms, that send up to 1 MB, with up to 10 MB of weights."""
    rng = np.random.default_rng(0)
    made = []
    for n in range(blocks):
        forward_s, backward_s = rng.uniform(1e-4, 2e-3, 2)
        output, weights, activations = (int(size) for size in rng.integers(10**4, (10**6, 10**7, 10**6)))
        made.append(BlockProfile(f"b{n}", forward_s, backward_s, output, weights, activations, 1e-5))
    return Profile("made up", 64, tuple(made))


def plan_s(profile: Profile, devices: int, replicate: bool, times_even: float | None) -> float:
    """Seconds until there is a partition, or it is said that there is none."""
    even = sum(3 * block.weight_bytes + block.activation_bytes for block in profile.blocks) / devices
    cluster = Cluster(HOSTS_OF_8, None if times_even is None else int(times_even * even))
    start_s = time.perf_counter()
    with contextlib.suppress(NoPlan):
        partition(profile, devices, cluster, replicate=replicate)
    return time.perf_counter() - start_s


def applications() -> Iterator[Profile]:
    """Every network of Keras, on images of 75 x 75, or of its own size where it takes no others."""
    import keras

    from pipetrain.compute.graph.blocks import Chain
    from pipetrain.compute.graph.wide_layers import network_of
    from pipetrain.compute.profiling.operation_count import operation_counts
    from pipetrain.plan.roofline import TESLA_P40, roofline

    for name in sorted(name for name in dir(keras.applications) if name[0].isupper()):
        make = getattr(keras.applications, name)
        keras.backend.clear_session()
        try:
            model = make(weights=None, input_shape=(75, 75, 3))
        except ValueError:
            model = make(weights=None)
        profile = roofline(name, ROWS, operation_counts(model, ROWS), TESLA_P40)
        yield replace(profile, network=network_of(Chain(model)))


def print_applications(rounds: int) -> None:
    """Print what the choice takes for each, the slowest first."""
    from pipetrain.simulation.every_way import choose

    found = []
    for profile in applications():
        taken_s = []
        for _ in range(rounds):
            start_s = time.perf_counter()
            choice = choose(profile, HOST, Cluster(HOSTS_OF_8), staleness="predicted")
            taken_s.append(time.perf_counter() - start_s)
        found.append((statistics.median(taken_s), profile.model, len(profile.blocks), len(choice.ways), choice.taken))
        print(*found[-1], sep=", ", file=sys.stderr)
    found.sort(key=lambda each: -each[0])
    rows = [(name, str(blocks), str(ways), f"{s:.2f}", str(way)) for s, name, blocks, ways, way in found]
    print(f"{len(rows)} networks on {HOST} devices, medians of {rounds} rounds")
    print(text_table(("network", "blocks", "ways", "seconds", "taken"), rows))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, action="append", help="(default: 100 and 1000)")
    parser.add_argument("--devices", type=int, action="append", help="(default: 4, 16 and 64)")
    parser.add_argument("--rounds", type=int, default=3, help="(default: 3)")
    parser.add_argument("--applications", action="store_true", help="every way for each network of keras.applications")
    options = parser.parse_args()
    if options.applications:
        print_applications(options.rounds)
        return
    rows = []
    for blocks in options.blocks or [100, 1000]:
        profile = chain(blocks)
        for devices in options.devices or [4, 16, 64]:
            for replicate in (False, True):
                cells = []
                for limit, times_even in LIMITS.items():
                    if replicate and devices > 16 and limit != "no limit":
                        cells.append("-")  # minutes
                        continue
                    taken = [plan_s(profile, devices, replicate, times_even) for _ in range(options.rounds)]
                    cells.append(f"{statistics.median(taken):.2f}")
                rows.append((f"{blocks} blocks", str(devices), "yes" if replicate else "no", *cells))
    print(f"seconds, medians of {options.rounds} rounds")
    print(text_table(("chain", "devices", "replication", *LIMITS), rows))


if __name__ == "__main__":
    main()
