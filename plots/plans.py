"""Draw what a profile, a partition, a choice and a trace show, of VGG16 on four GPUs that are not there.

The seconds are those that the roofline of a Tesla P40 gives, on the links of experiments/platforms/tesla_p40.json. It
takes half a minute.

examples:
  python plots/plans.py --output docs/guide
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import pipetrain
from pipetrain.cli.arguments import Folded
from pipetrain.cli.environment import start_tensorflow
from pipetrain.plan.cluster import Cluster
from pipetrain.plan.memory import Training
from pipetrain.plan.profile import Profile
from pipetrain.plan.roofline import TESLA_P40
from plots.style import save

PLATFORM = Path(__file__).parents[1] / "experiments" / "platforms" / "tesla_p40.json"
DEVICES, ROWS, MICROBATCHES = 4, 64, 8
IMAGE, CLASSES = (224, 224, 3), 1000
SHOWN = 8  # microbatches in the timeline, those of a minibatch


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Folded)
    parser.add_argument("--output", type=Path, default=Path(), help="the folder to write to (default: this one)")
    options = parser.parse_args(arguments)
    for path in draw(_profile(), Cluster.load(PLATFORM), options.output):
        print(path)
    return 0


def draw(profile: Profile, cluster: Cluster, folder: Path) -> list[Path]:
    """The four pictures."""
    training = Training("1f1b", microbatches=MICROBATCHES)
    cut = pipetrain.partition(profile, DEVICES, cluster, training=training)
    trace = pipetrain.simulate(cut, "1f1b", cluster, 4, microbatches=MICROBATCHES)
    figures = {
        "profile": profile.plot(),
        "partition": cut.plot(),
        "choice": pipetrain.choose(profile, DEVICES, cluster).plot(),
        "trace": trace.plot(minibatches=SHOWN),
    }
    return [save(figure, folder / f"{name}.png") for name, figure in figures.items()]


def _profile() -> Profile:
    start_tensorflow(1)
    import models
    from pipetrain.compute.profiling.operation_count import analytic

    return analytic(models.build("vgg16", IMAGE, CLASSES), ROWS, TESLA_P40)


if __name__ == "__main__":
    sys.exit(main())
