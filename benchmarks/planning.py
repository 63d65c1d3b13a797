"""Seconds that the planner takes, by blocks and devices, side by side and with replication, with and without a limit.

The chains are made up: seconds, outputs and weights of every block at random, hosts of 8 devices.

examples:
  python benchmarks/planning.py
  python benchmarks/planning.py --blocks 1000 --devices 64
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from pipetrain.plan.capacity import NoPlan
from pipetrain.plan.cluster import PCIE_3, Cluster, Level, Link
from pipetrain.plan.partition import partition
from pipetrain.plan.profile import BlockProfile, Profile
from pipetrain.plan.text_table import text_table

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


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, action="append", help="(default: 100 and 1000)")
    parser.add_argument("--devices", type=int, action="append", help="(default: 4, 16 and 64)")
    parser.add_argument("--rounds", type=int, default=3, help="(default: 3)")
    options = parser.parse_args()
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
