"""Seconds that simulating takes: of a small pipeline over many minibatches, and of a thousand stages.

The stages are made up: seconds at random, 1 MB between each two, PCIe 3.0. Processor time is printed beside the time
that passed, which on a shared machine is more.

examples:
  python benchmarks/simulator.py
  python benchmarks/simulator.py --stages 64 --minibatches 1000 --scheme gpipe
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from pipetrain.logs import text_table
from pipetrain.plan.stages import Partition, StagePlan
from pipetrain.schemes.table import NAMES
from pipetrain.simulation.simulator import simulate

SIZES = [(4, 10_000), (1024, 4096)]


def pipeline(stages: int) -> Partition:
    """Forwards and backwards of 0.5 to 2 ms, updates of 0.1 ms."""
    rng = np.random.default_rng(0)
    plans = []
    for k in range(stages):
        forward_s, backward_s = rng.uniform(5e-4, 2e-3, 2)
        plans.append(StagePlan(f"b{k}", f"b{k}", 1, forward_s, backward_s, 10**6, 10**6, 0.0, 1e-4, device=k))
    return Partition("made up", 64, tuple(plans))


def row(stages: int, minibatches: int, scheme: str) -> tuple[str, ...]:
    """One line of the table."""
    partition = pipeline(stages)
    passed_s, processor_s = time.perf_counter(), time.process_time()
    trace = simulate(partition, scheme, minibatches=minibatches)
    passed_s, processor_s = time.perf_counter() - passed_s, time.process_time() - processor_s
    gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    each_us = processor_s / len(trace.spans) * 1e6
    size = f"{stages} stages, {minibatches:,} minibatches"
    return size, f"{len(trace.spans):,}", f"{passed_s:.2f}", f"{processor_s:.2f}", f"{each_us:.1f}", f"{gib:.1f}"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, help="(default: 4, then 1024)")
    parser.add_argument("--minibatches", type=int, default=1000, help="with --stages (default: 1000)")
    parser.add_argument("--scheme", choices=NAMES, default="spectrain", help="(default: spectrain)")
    options = parser.parse_args()
    sizes = [(options.stages, options.minibatches)] if options.stages else SIZES
    header = (options.scheme, "actions", "seconds", "of a processor", "us an action", "GiB")
    print(text_table(header, [row(*size, options.scheme) for size in sizes]))


if __name__ == "__main__":
    main()
