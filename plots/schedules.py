"""Draw what each schedule does with four equal devices: a simulated timeline of every one, without transfers.

examples:
  python plots/schedules.py --output docs/concepts
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import pipetrain
from pipetrain.cli.arguments import Folded
from pipetrain.plan.cluster import Cluster, Level, Link
from pipetrain.plan.memory import Training
from pipetrain.plan.partition import partition
from pipetrain.plan.profile import BlockProfile, Profile
from plots.timeline import draw

DEVICES, BACKWARD = 4, 2  # a backward takes so many times as long as a forward
SHOWN = {  # microbatches; numbers shown; minibatches
    "spectrain": (1, 6, 12),
    "gpipe": (4, 8, 4),
    "1f1b": (4, 8, 4),
    "interleaved": (4, 8, 4),
    "zb-h1": (4, 8, 4),
    "zb-v": (8, 8, 4),
}
FAST = Cluster((Level(Link(bandwidth_bytes_per_s=1e15, latency_s=0.0)),), overhead_s=0.0)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Folded)
    parser.add_argument("--output", type=Path, default=Path(), help="the folder to write to (default: this one)")
    options = parser.parse_args()
    blocks = tuple(BlockProfile(f"layer_{n}", 1e-3, BACKWARD * 1e-3, 1000, 1000, 1000) for n in range(2 * DEVICES))
    profile = Profile("eight equal layers", 16, blocks)
    for scheme, (microbatches, shown, minibatches) in SHOWN.items():
        training = Training(scheme, microbatches=microbatches)
        trace = pipetrain.simulate(partition(profile, DEVICES, FAST, training=training), scheme, FAST, minibatches)
        title = f"{scheme}: {trace.steady_bubble():.0%} bubble in the steady state"
        print(draw(trace, options.output / f"{scheme}.png", 0, shown, title))


if __name__ == "__main__":
    main()
