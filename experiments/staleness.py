"""What staleness costs: validation accuracy under every policy, over stages, learning rates and seeds.

A deep, narrow network (dense layers, tanh but for the last) is trained on the subset of Fashion-MNIST that comes with
the repository, under momentum SGD, from the same weights and on the same minibatches for every policy. The layers are
shared out among the stages as evenly as can be; the accuracy is that of the last weights, on the test images. More
stages mean staler weights, and a higher learning rate makes them matter more. `single` has one stage: it is what the
others would reach without staleness.

A row of the table is a policy with its stages and learning rate: the mean over the seeds and the 95% interval's half
width (Student's t). A run has diverged if it ends with a loss worse than that of guessing (the logarithm of 10, of
gpt2 that of its words' number); one whose loss is not even finite stops there, and has no accuracy.

What it costs to send less is measured alike, by policies such as `all-reduce/int8`, whose stages are workers
that share the rows, and `1f1b/int8`, where it is what crosses the cuts.

All of it, by default without these, is {runs} runs: about {minutes} minutes on two CPU cores. Runs that have ended in
the output folder are not repeated, so that a study can be stopped and go on, or have more seeds or policies later.

examples:
  python experiments/staleness.py
  python experiments/staleness.py --policy single --policy vanilla --policy spectrain --stages 4 --seeds 3
  python experiments/staleness.py --policy single --policy all-reduce/int8 --policy all-reduce/top-k --stages 4
  python experiments/staleness.py --learning-rate 0.005 --learning-rate 0.04 --output runs/rates
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import cache, partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import models  # noqa: E402
from experiments import datasets, optimizers  # noqa: E402
from experiments.intervals import interval, shown  # noqa: E402
from experiments.networks import NETWORKS  # noqa: E402
from experiments.options import owned, writable  # noqa: E402
from experiments.policies import EVERY_POLICY, MLP, POLICIES, SENDING, Outcome, Run, record, recorded, train  # noqa: E402
from experiments.progress import write_rows  # noqa: E402
from pipetrain.cli.arguments import Folded, count, from_zero, whole  # noqa: E402
from pipetrain.cli.environment import start_tensorflow  # noqa: E402
from pipetrain.logs import text_table  # noqa: E402
from pipetrain.schemes.options import keywords  # noqa: E402

STAGES = (2, 4, 8)
RATES = (0.01, 0.02)
SEEDS = 5
RUN_S = 3.0  # for each run, two at a time on two CPU cores


@dataclass(frozen=True)
class Row:
    """One policy with its stages and learning rate: the accuracies and losses of those runs that have them."""

    policy: str
    stages: int
    learning_rate: float
    accuracies: tuple[float, ...]
    runs: int
    diverged: int
    losses: tuple[float, ...] = ()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status: 2 for arguments that cannot be used."""
    options = parse(arguments)
    try:
        runs = planned(options)
        with ExitStack() as ends:
            output = owned(Path(options.output or ROOT / "runs" / "staleness"), ends)
            outcomes = finish(runs, writable(output / "runs"), options.jobs, options.data_dir)
    except ValueError as error:
        print(f"staleness.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("Stopped. The same command goes on with the runs that are left.")
        return 130
    rows = gathered(runs, outcomes)
    write(output, options, rows)
    from plots.staleness import draw

    print(f"{title(options)}\n\n{report(rows)}\n\n{draw(output, output / 'staleness.png')}")
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line's options."""
    runs = len(RATES) * SEEDS * (1 + (len(POLICIES) - 1) * len(STAGES))
    about = __doc__.format(runs=runs, minutes=round(runs * RUN_S / 60))
    description, _, examples = about.partition("examples:")
    parser = argparse.ArgumentParser(
        description=description,
        epilog=f"policies:\n{_policies()}\n\nexamples:{examples}",
        formatter_class=Folded,
    )
    add = parser.add_argument
    again = "; may be given several times (default: %(default)s)"
    add(
        "--policy",
        "--scheme",
        action="append",
        choices=EVERY_POLICY,
        metavar="NAME",
        help="how to deal with staleness, or what to send, see below; may be given several times (default: all of the "
        "former)",
    )
    add("--stages", type=count, action="append", metavar="N", help=f"pipeline stages{again % _default(STAGES)}")
    add("--learning-rate", type=from_zero, action="append", metavar="X", help=f"of SGD{again % _default(RATES)}")
    add(
        "--seeds",
        type=count,
        default=SEEDS,
        metavar="N",
        help="runs of each, seeds S to S+N-1 (default: %(default)s)",
    )
    add("--first-seed", type=whole, default=0, metavar="S", help="the first of the seeds (default: %(default)s)")
    add("--momentum", type=from_zero, default=0.9, metavar="X", help="of SGD (default: %(default)s)")
    add("--steps", type=count, default=400, metavar="N", help="minibatches (default: %(default)s)")
    add("--batch-size", type=count, default=64, metavar="N", help="rows per minibatch (default: %(default)s)")
    add(
        "--optimizer",
        choices=optimizers.NAMES,
        default="momentum",
        help="sgd has no momentum, momentum and nesterov have that of --momentum (default: %(default)s)",
    )
    add("--residual", action="store_true", help="layers add their outputs to their inputs: for deep networks")
    add(
        "--model",
        choices=(MLP, *models.NAMES),
        default=MLP,
        help="network: the dense layers, or one of those of experiments/run.py on the data set that it has there, or, "
        "of images, on the embedded one (default: %(default)s)",
    )
    add("--data-dir", metavar="DIR", help="where tensorflow-datasets keeps or downloads reviews")
    add("--depth", type=count, default=8, metavar="N", help="layers of the network (default: %(default)s)")
    add("--width", type=count, default=64, metavar="N", help="units of its layers (default: %(default)s)")
    add_jobs(parser)
    add("--output", metavar="DIR", help="where results are and go (default: runs/staleness)")
    options = parser.parse_args(arguments)
    options.policy = list(dict.fromkeys(options.policy or POLICIES))
    options.stages = sorted(set(options.stages or STAGES))
    options.learning_rate = sorted(set(options.learning_rate or RATES))
    return options


def add_jobs(parser: argparse.ArgumentParser) -> None:
    """The option that says how many runs train at a time."""
    parser.add_argument(
        "--jobs",
        type=count,
        default=min(2, os.cpu_count() or 1),
        metavar="N",
        help="runs at a time, each in a process of its own (default: two, if there are two cores)",
    )


def _default(values: Sequence[float]) -> dict[str, str]:
    return {"default": " ".join(map(str, values))}


def _policies() -> str:
    return "\n".join(f"  {name:<28} {keywords(given)}" for name, given in EVERY_POLICY.items())


def planned(options: argparse.Namespace) -> list[Run]:
    """Every run of the study, in the order of the table. Raises ValueError, before any, for those that cannot be."""
    in_stages = {*options.policy} - {*SENDING}
    if in_stages and options.model == MLP and max(options.stages) > options.depth:
        raise ValueError(
            f"Every stage needs a layer. Received: --stages {max(options.stages)}, --depth {options.depth}. "
            f"Try at most --stages {options.depth}."
        )
    compensable = options.optimizer == "momentum" and 0 < options.momentum < 1
    if "spike-compensation" in options.policy and not compensable:
        raise ValueError(
            f"Spike compensation is for SGD with momentum. Received: --optimizer {options.optimizer}, --momentum "
            f"{options.momentum:g}. Try --optimizer momentum --momentum 0.9, or --policy with the others."
        )
    names = ("momentum", "steps", "batch_size", "depth", "width", "optimizer", "residual", "model")
    same = {key: getattr(options, key) for key in names}
    places = [("single", 1)] if "single" in options.policy else []
    places += product([policy for policy in options.policy if policy != "single"], options.stages)
    places.sort(key=lambda place: place[1])
    return [
        Run(policy, stages, learning_rate, seed, **same)
        for learning_rate in options.learning_rate
        for policy, stages in places
        for seed in range(options.first_seed, options.first_seed + options.seeds)
    ]


def finish(runs: Sequence[Run], folder: Path, jobs: int, data_dir: str | None = None) -> dict[Run, Outcome]:
    """Train whatever has not ended in this folder; every run's outcome."""
    outcomes = {run: recorded(run, folder) for run in runs}
    left = [run for run, outcome in outcomes.items() if outcome is None]
    if not left:
        return outcomes
    stages = max(run.stages for run in runs)
    progress = _progress(len(left), stages)
    job = partial(train_and_record, folder=folder, data_dir=data_dir)
    for done, (run, outcome) in enumerate(_trained(left, job, stages, min(jobs, len(left))), start=1):
        outcomes[run] = outcome
        progress(done)
    return outcomes


def _progress(runs: int, stages: int):
    """A function of the number of runs done: a progress bar on a terminal, nothing elsewhere."""
    if not sys.stdout.isatty():
        return lambda done: None
    start_tensorflow(stages)  # as the runs do, if they are in this process
    import keras

    bar = keras.utils.Progbar(runs, unit_name="run")
    bar.update(0)
    return bar.update


def _trained(
    runs: Sequence[Run], job: Callable[[Run], Outcome], stages: int, jobs: int
) -> Iterator[tuple[Run, Outcome]]:
    if jobs == 1:
        start_tensorflow(stages)
        yield from ((run, job(run)) for run in runs)
        return
    workers = ProcessPoolExecutor(jobs, get_context("spawn"), _start_worker, (stages,))
    try:
        futures = {workers.submit(job, run): run for run in runs}
        for future in as_completed(futures):
            yield futures[future], future.result()
    except KeyboardInterrupt:
        print("Stopping when the runs at work have ended.")
        raise
    finally:
        workers.shutdown(cancel_futures=True)


def _start_worker(stages: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that waits for this one
    start_tensorflow(stages)


def train_and_record(run: Run, folder: Path, data_dir: str | None = None) -> Outcome:
    """One run, and its file."""
    outcome = train(run, _data(run.model, data_dir))
    record(run, outcome, folder)
    return outcome


@cache
def _data(model: str, data_dir: str | None) -> datasets.Dataset:
    reads = "images" if model == MLP else NETWORKS[model].reads
    name = "fashion_mnist_small" if reads in ("images", "features") else NETWORKS[model].dataset
    return datasets.load(name, data_dir, reads)


def gathered(runs: Sequence[Run], outcomes: dict[Run, Outcome]) -> list[Row]:
    """The rows of the table, in the order of the runs."""
    groups: dict[tuple[str, int, float], list[Outcome]] = {}
    for run in runs:
        groups.setdefault((run.policy, run.stages, run.learning_rate), []).append(outcomes[run])
    return [
        Row(
            *place,
            accuracies=tuple(each.accuracy for each in some if each.accuracy is not None),
            runs=len(some),
            diverged=sum(each.diverged for each in some),
            losses=tuple(each.loss for each in some if each.loss is not None),
        )
        for place, some in groups.items()
    ]


def write(output: Path, options: argparse.Namespace, rows: Sequence[Row]) -> None:
    """The files of a study: what was asked, and what it came to, as CSV too."""
    config = {key: value for key, value in vars(options).items() if key not in ("output", "jobs")}
    contents = {"config": config, "summary": {"rows": [_with_interval(row) for row in rows]}}
    for name, content in contents.items():
        (output / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    write_rows(output / "staleness.csv", figures(options, rows))


def _with_interval(row: Row) -> dict:
    mean, half_width = _interval(row.accuracies)
    return {**asdict(row), "mean": mean, "half_width": half_width}


def _interval(values: Sequence[float]) -> tuple[float | None, float | None]:
    return interval(values) if values else (None, None)


def figures(options: argparse.Namespace, rows: Sequence[Row]) -> list[dict[str, object]]:
    """Every mean of the table with the half width of its interval; none where no run has an accuracy."""
    kind, size = "residual" if options.residual else "dense", f"{options.depth} x {options.width}"
    same = {
        "study": f"seeds {options.first_seed}-{options.first_seed + options.seeds - 1}",
        "network": f"{kind} {size}" if options.model == MLP else options.model,
        "optimizer": options.optimizer,
    }
    singles = _singles(rows)
    found: list[dict[str, object]] = []
    for row in rows:
        place = {"learning_rate": row.learning_rate, "stages": row.stages, "policy": row.policy}
        differences = _differences(row, singles.get(row.learning_rate))
        several = {"accuracy": row.accuracies, "difference from single": differences, "loss": row.losses}
        for name, values in several.items():
            if values or name == "accuracy":
                mean, half_width = _interval(values)
                about = {"figure": name, "mean": mean, "half_width": half_width, "diverged": row.diverged}
                found.append({**same, **place, **about})
    return found


def title(options: argparse.Namespace) -> str:
    """What was trained."""
    optimizer = f"momentum {options.momentum:g}" if options.optimizer == "momentum" else options.optimizer
    return (
        f"{_network(options)}, "
        f"{options.steps} minibatches of {options.batch_size}, {optimizer}, {options.seeds} seeds: "
        "mean and 95% interval"
    )


def _network(options: argparse.Namespace) -> str:
    if options.model != MLP:
        return options.model
    return f"{options.depth} {'residual ' if options.residual else ''}dense layers of width {options.width}"


def report(rows: Sequence[Row]) -> str:
    """The table; where `single` was trained too, also with the differences to it, seed by seed."""
    singles = _singles(rows)
    differences = [_differences(row, singles.get(row.learning_rate)) for row in rows]
    columns = [
        ("policy", [row.policy for row in rows]),
        ("stages", [str(row.stages) for row in rows]),
        ("learning rate", [f"{row.learning_rate:g}" for row in rows]),
        ("validation accuracy", [shown(row.accuracies, 3) for row in rows]),
        ("minus single", [shown(each, 3, signed=True) if each else "" for each in differences]),
        ("validation loss", [shown(row.losses, 3) if row.losses else "" for row in rows]),
        ("", [f"{row.diverged} of {row.runs} diverged" if row.diverged else "" for row in rows]),
    ]
    kept = [(name, cells) for name, cells in columns if any(cells)]
    return text_table([name for name, _ in kept], list(zip(*(cells for _, cells in kept), strict=True)))


def _singles(rows: Sequence[Row]) -> dict[float, Row]:
    return {row.learning_rate: row for row in rows if row.policy == "single"}


def _differences(row: Row, single: Row | None) -> list[float]:
    """Seed by seed; none where a run of either has no accuracy: the others' seeds are not known."""
    if single is None or single is row or not len(row.accuracies) == row.runs == len(single.accuracies) == single.runs:
        return []
    return [a - b for a, b in zip(row.accuracies, single.accuracies, strict=True)]


if __name__ == "__main__":
    sys.exit(main())
