"""What accuracy each scheme has after how many seconds: runs of experiments/table1.py, and simulated seconds.

Accuracy, or a language model's loss, is what the runs of one network measured, the mean over their seeds. The seconds
of a minibatch are simulated, since they depend on the devices and accuracy does not: the network is profiled on one
core of this machine, with the rows of a minibatch and of every number of microbatches, and cut for as many devices of
that speed as the runs had stages, joined as --cluster says. --synchronous schemes train as `single` does: they have its
accuracy, and seconds of their own. The memory is the fullest device's. The last column of the table is when the mean
over the seeds is nearly what `single` has at its end. The table is kept as over_time.csv too.

For the SNN of experiments/all.py it takes about a minute on two cores. It grows with the network, which is profiled
once for each number of microbatches.

example:
  python experiments/table1.py --model vgg16 --width 4 --dataset fashion_mnist_small --stages 8 --output runs/vgg16 \\
      --scheme single --scheme spectrain --scheme spectrain/target/M=2
  python experiments/over_time.py runs/vgg16 --synchronous 1f1b/M=2 --synchronous 1f1b/M=8
  python experiments/over_time.py runs/language_quality/muon+attention-0.003-1000 --synchronous 1f1b/M=4
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import models  # noqa: E402
from experiments import datasets, optimizers, results  # noqa: E402
from experiments.intervals import interval, shown  # noqa: E402
from experiments.networks import LANGUAGE, NETWORKS, input_shape  # noqa: E402
from experiments.progress import tracked, write_rows  # noqa: E402
from experiments.records import Settings  # noqa: E402
from experiments.variants import Variant, variant  # noqa: E402
from pipetrain.cli.arguments import MICROBATCHES, Folded, from_zero  # noqa: E402
from pipetrain.cli.environment import start_tensorflow  # noqa: E402
from pipetrain.logs import text_table  # noqa: E402
from pipetrain.plan.cluster import Cluster  # noqa: E402
from pipetrain.plan.memory import Training  # noqa: E402
from pipetrain.plan.partition import partition  # noqa: E402
from pipetrain.simulation.simulator import simulate  # noqa: E402

if TYPE_CHECKING:
    from pipetrain.plan.profile import Profile

CLUSTER = ROOT / "experiments" / "platforms" / "hosts_10gbe.json"
OVERHEAD_S = 3e-4  # of an action in a device's thread, measured (docs/benchmarks/overhead.md)
MINIBATCHES = 100  # simulated
History = list[dict[str, float]]  # the rows of a run's history.jsonl
LAST = 5  # evaluations of a run, whose mean is its accuracy at the end


class Measure(NamedTuple):
    """How well a network is trained: a column of histories, over how many last rows it is averaged, and what is near.

    ``sign`` is -1 where less is better.
    """

    column: str
    name: str
    last: int
    near: float
    sign: int = 1


ACCURACY, LOSS = Measure("val_accuracy", "accuracy", LAST, 0.01), Measure("val_loss", "loss", 1, 0.03, -1)


@dataclass(frozen=True)
class Way:
    """One scheme: seconds, memory, its mean accuracy or loss after so many minibatches, and each seed's at the end."""

    label: str
    step_s: float
    fullest_bytes: int
    samples_per_second: float
    steps: list[int]
    values: list[float]
    ends: dict[int, float]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status: 2 for arguments that cannot be used."""
    options = parse(arguments)
    try:
        runs = results.gather(options.folder)
        settings = compared([run.settings for run in runs], options.folder)
        start_tensorflow(1)
        histories = curves(options.folder, runs)
        labels = [str(each) for each in options.synchronous]
        predicted = predictions(settings, [*histories, *labels], Cluster.load(options.cluster), options)
    except (OSError, ValueError) as error:
        print(f"over_time.py: {error}", file=sys.stderr)
        return 2
    measure = LOSS if settings.model in LANGUAGE else ACCURACY
    ways = [
        way(label, found, histories.get(label, histories["single"]), settings, measure)
        for label, found in predicted.items()
    ]
    title = f"{settings.model}, {settings.stages} stages, minibatches of {settings.batch_size}"
    content = {
        "title": title,
        "measure": measure.name,
        "seeds": len(histories["single"]),
        "ways": [asdict(each) for each in ways],
    }
    path = options.folder / "over_time.json"
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    write_rows(path.with_suffix(".csv"), figures(ways, measure))
    from plots.over_time import draw

    print(f"{title}\n\n{report(ways, measure)}\n\n{draw(options.folder, path.with_suffix('.png'))}")
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Folded)
    parser.add_argument("folder", type=Path, help="--output of experiments/table1.py, with runs of one network")
    parser.add_argument(
        "--synchronous",
        type=variant,
        action="append",
        default=[],
        metavar="NAME/M=N",
        help="1f1b/M=8 for example; may be given several times (default: none)",
    )
    parser.add_argument(
        "--cluster",
        type=Path,
        default=CLUSTER,
        metavar="FILE",
        help=f"how devices are joined (default: {CLUSTER.name})",
    )
    parser.add_argument(
        "--overhead-s",
        type=from_zero,
        default=OVERHEAD_S,
        metavar="S",
        help="seconds that every action takes beside its computing (default: %(default)s)",
    )
    parser.add_argument("--data-dir", metavar="DIR", help="where tensorflow-datasets keeps its data")
    return parser.parse_args(arguments)


def compared(settings: Sequence[Settings], folder: Path) -> Settings:
    """What the runs have in common. Raises ValueError where they are of several networks, or none is of `single`."""
    if {each.model for each in settings} != {next((each.model for each in settings), "")} or not any(
        each.scheme == "single" for each in settings
    ):
        found = sorted({f"{each.model} {each.label}" for each in settings}) or "no runs"
        raise ValueError(
            f"Runs of one network are shown, single among them. Received: {str(folder)!r} with {found}. "
            "Try an --output of experiments/table1.py of its own for each network."
        )
    results.check_alike(settings)
    return settings[0]


def curves(folder: Path, runs: Iterable[results.Run]) -> dict[str, dict[int, History]]:
    """By scheme, the history of every seed."""
    found: dict[str, dict[int, History]] = {}
    for run in runs:
        lines = (results.folder(folder, run.settings) / "history.jsonl").read_text(encoding="utf-8").splitlines()
        found.setdefault(run.settings.label, {})[run.settings.seed] = [json.loads(line) for line in lines]
    return found


def predictions(
    settings: Settings, labels: Sequence[str], cluster: Cluster, options: argparse.Namespace
) -> dict[str, tuple[float, int]]:
    """By scheme, the simulated seconds of a minibatch when the pipeline is full, and the fullest device's bytes."""
    import pipetrain

    network = NETWORKS[settings.model]
    data = datasets.load(settings.dataset, options.data_dir, network.reads)
    shape = input_shape(settings.model, data.x_train.shape[1:])
    model = models.build(settings.model, shape, data.classes, **settings.size)
    profiles: dict[int, Profile] = {}
    found = {}
    for label in tracked(labels, labels):
        chosen = variant(label)
        pieces = (chosen.microbatches or MICROBATCHES) if chosen.splits else 1
        if pieces not in profiles:
            optimizer = optimizers.build(settings.optimizer, settings.learning_rate, settings.momentum)
            profiles[pieces] = pipetrain.profile(
                model, settings.batch_size, verbose=False, budget_s=None, microbatches=pieces, optimizer=optimizer
            )
        found[label] = simulated(profiles[pieces], chosen, settings, cluster, options.overhead_s)
    return found


def simulated(
    profile: Profile, chosen: Variant, settings: Settings, cluster: Cluster, overhead_s: float
) -> tuple[float, int]:
    """Seconds of a minibatch of one scheme, which is cut as the planner cuts for it, and the fullest device's bytes."""
    from pipetrain.compute.optimizer.update import slots_per_weight, temporaries

    training = Training(chosen.way, microbatches=profile.microbatches)
    devices = 1 if chosen.scheme == "single" else settings.stages
    optimizer = optimizers.build(settings.optimizer, settings.learning_rate, settings.momentum)
    slots = slots_per_weight(optimizer, training.chosen.rule(0, 2 * devices))
    training = training._replace(slots=slots, gathers=True, temporaries=temporaries(optimizer))
    cut = partition(profile, devices, cluster, training=training)
    split = profile.microbatches if chosen.splits else None
    trace = simulate(cut, chosen.way, cluster, MINIBATCHES, microbatches=split, overhead_s=overhead_s)
    return trace.step_s, cut.fullest_bytes


def way(
    label: str, predicted: tuple[float, int], histories: Mapping[int, History], settings: Settings, measure: Measure
) -> Way:
    """One scheme's seconds and accuracy together."""
    step_s, fullest_bytes = predicted
    shared = list(zip(*histories.values(), strict=False))
    return Way(
        label,
        step_s,
        fullest_bytes,
        settings.batch_size / step_s,
        [int(rows[0]["step"]) for rows in shared],
        [fmean(row[measure.column] for row in rows) for rows in shared],
        {seed: fmean(row[measure.column] for row in rows[-measure.last :]) for seed, rows in histories.items()},
    )


def beside_single(ways: Sequence[Way], measure: Measure) -> Iterator[tuple[Way, float, list[float], float | None]]:
    """Each scheme with its speed-up, its differences, seed by seed, and the seconds until it is nearly as good."""
    single = next(each for each in ways if each.label == "single")
    nearly = fmean(single.ends.values()) - measure.sign * measure.near
    for each in ways:
        shared = {} if each.ends == single.ends else each.ends
        differences = [value - single.ends[seed] for seed, value in shared.items() if seed in single.ends]
        yield each, single.step_s / each.step_s, differences, _reached_s(each, nearly, measure.sign)


def _reached_s(one: Way, wanted: float, sign: int) -> float | None:
    """After how many seconds the mean curve is first as good as this."""
    pairs = zip(one.steps, one.values, strict=True)
    return next((step * one.step_s for step, value in pairs if sign * value >= sign * wanted), None)


def figures(ways: Sequence[Way], measure: Measure) -> list[dict[str, Any]]:
    """The table's figures, scheme by scheme; an interval's half width is missing where there is one seed."""
    found = []
    for each, speedup, differences, reached_s in beside_single(ways, measure):
        mean, half_width = interval([*each.ends.values()])
        difference, difference_half_width = interval(differences) if differences else (None, None)
        found.append(
            {
                "scheme": each.label,
                "fullest_bytes": each.fullest_bytes,
                "samples_per_second": each.samples_per_second,
                "speedup": speedup,
                measure.name: mean,
                "half_width": half_width,
                "difference": difference,
                "difference_half_width": difference_half_width,
                "reached_s": reached_s,
            }
        )
    return found


def report(ways: Sequence[Way], measure: Measure) -> str:
    """The table."""
    rows = [
        (
            each.label,
            f"{each.fullest_bytes / 2**20:.0f}",
            f"{each.samples_per_second:.0f}",
            f"{speedup:.2f}x",
            shown([*each.ends.values()], 3),
            shown(differences, 3, signed=True) if differences else "",
            "-" if reached_s is None else f"{reached_s:.1f}",
        )
        for each, speedup, differences, reached_s in beside_single(ways, measure)
    ]
    near = f"s until {-measure.sign * measure.near:+g}"  # of what single has at its end
    header = ("scheme", "MiB", "samples/s", "times", measure.name, "minus single", near)
    return text_table(header, rows)


if __name__ == "__main__":
    sys.exit(main())
