"""How well a language model trains as an asynchronous pipeline: validation loss against one device's, by optimizer.

A GPT-2 whose output layer is the embedding transposed, or a Llama of keras_hub (`pip install ".[hub]"`) whose output
layer is apart, reads the first 19 words of IMDb reviews and predicts the next one at each. Runs of one seed start from
the same weights and see the same minibatches; the table has, for every scheme, optimizer and learning rate, the
validation loss after so many minibatches, the mean over the seeds, and in brackets the difference from `single` at the
same minibatch, seed by seed, with its 95% interval.

A language model begins on a plateau, at the entropy of single words. Under Adam late gradients keep it there; under
`{attentive}`, Keras' Muon with attentions' kernels among its matrices, they do not (docs/results/language-models.md).

Runs go to DIR/<optimizer>-<rate>-<validation rows>/, and one that has ended there is not repeated: stop the command
when you like, look at the table of what has ended, and give it again. With the default size a minibatch takes about
half a second on one core, all 24 runs about an hour.

examples:
  python experiments/language_quality.py --data-dir DIR
  python experiments/language_quality.py --data-dir DIR --depth 4 --width 64 --stages 4 --steps 200 --every 50
  python experiments/language_quality.py --data-dir DIR --optimizer adam --learning-rate 0.0003 --learning-rate 0.001
  python experiments/language_quality.py --data-dir DIR --model llama --depth 4 --width 64 --learning-rate 0.003
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from experiments import datasets, optimizers, results, resuming  # noqa: E402
from experiments.intervals import shown  # noqa: E402
from experiments.networks import LANGUAGE, NETWORKS  # noqa: E402
from experiments.options import owned  # noqa: E402
from experiments.progress import write_rows  # noqa: E402
from experiments.records import Settings  # noqa: E402
from experiments.variants import variant  # noqa: E402
from pipetrain.cli.arguments import Folded, count, from_zero, whole  # noqa: E402
from pipetrain.cli.environment import start_tensorflow  # noqa: E402
from pipetrain.logs import text_table  # noqa: E402

SINGLE = "single"
SCHEMES = (SINGLE, "vanilla", "spectrain/target/M=1", "spectrain/target/M=2")
OPTIMIZERS = ("adam", optimizers.ATTENTIVE)
TABLE, PICTURE = "language_quality.csv", "language_quality.png"
Row = dict[str, Any]  # of one run at one minibatch


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status: 2 for arguments that cannot be used."""
    options = parse(arguments)
    runs, status = planned(options), 0
    try:
        with ExitStack() as ends:
            output = owned(options.output, ends)
            try:
                train_all(runs, options, output)
            except KeyboardInterrupt:
                print("\nTo go on: the same command.", file=sys.stderr)
                status = 130
            runs = [each for each in runs if resuming.summary(folder(output, each, options)) is not None]
            rows = gathered(runs, options, output)
    except ValueError as error:
        print(f"language_quality.py: {error}", file=sys.stderr)
        return 2
    if runs:
        path = write_rows(output / TABLE, rows)
        from plots.language_quality import draw

        print(f"{title(options)}\n\n{report(rows, runs)}\n\n{path}\n{draw(output, output / PICTURE)}")
    return status


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line's options."""
    about = (__doc__ or "").format(attentive=optimizers.ATTENTIVE)
    parser = argparse.ArgumentParser(description=about, formatter_class=Folded)
    add = parser.add_argument
    again = "may be given several times"
    add(
        "--scheme",
        type=variant,
        action="append",
        metavar="NAME[/HORIZON][/M=N]",
        help=f"how to train; {again} (default: {' '.join(SCHEMES)})",
    )
    add(
        "--optimizer",
        choices=optimizers.NAMES,
        action="append",
        help=f"{again} (default: {' '.join(OPTIMIZERS)})",
    )
    add("--learning-rate", type=from_zero, action="append", metavar="X", help=f"{again} (default: 0.001)")
    add("--model", choices=LANGUAGE, default=LANGUAGE[0], help="(default: %(default)s)")
    add("--stages", type=count, default=4, metavar="N", help="pipeline stages (default: %(default)s)")
    add("--depth", type=count, default=12, metavar="N", help="blocks of the network (default: %(default)s)")
    add("--width", type=count, default=256, metavar="N", help="units of its vectors (default: %(default)s)")
    add("--steps", type=count, default=300, metavar="N", help="minibatches (default: %(default)s)")
    add("--every", type=count, default=100, metavar="N", help="steps between validations (default: %(default)s)")
    add("--batch-size", type=count, default=16, metavar="N", help="rows per minibatch (default: %(default)s)")
    add(
        "--validation-rows",
        type=count,
        default=1000,
        metavar="N",
        help="of the 5,000 that there are (default: %(default)s)",
    )
    add("--seeds", type=count, default=3, metavar="N", help="runs of each, seeds S to S+N-1 (default: %(default)s)")
    add("--first-seed", type=whole, default=0, metavar="S", help="the first of the seeds (default: %(default)s)")
    add("--data-dir", metavar="DIR", help="where tensorflow-datasets keeps or downloads the reviews")
    add(
        "--output",
        type=Path,
        default=ROOT / "runs" / "language_quality",
        metavar="DIR",
        help="where runs and the table go (default: runs/language_quality)",
    )
    options = parser.parse_args(arguments)
    options.scheme = list(dict.fromkeys(options.scheme or map(variant, SCHEMES)))
    options.optimizer = list(dict.fromkeys(options.optimizer or OPTIMIZERS))
    options.learning_rate = sorted({*(options.learning_rate or (optimizers.ADAPTIVE_RATE,))})
    if options.every > options.steps:
        parser.error(
            f"No validation would be made. Received: --steps {options.steps}, --every {options.every}. "
            f"Try --every {options.steps}."
        )
    return options


def planned(options: argparse.Namespace) -> list[Settings]:
    """The runs that are asked for: all schemes of a seed before the next seed, so that any stop leaves a comparison."""
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    return [
        Settings(
            **each._asdict(),
            model=options.model,
            dataset=NETWORKS[options.model].dataset,
            stages=options.stages,
            batch_size=options.batch_size,
            steps=options.steps,
            learning_rate=learning_rate,
            momentum=0.9,
            eval_every=options.every,
            seed=seed,
            size={"depth": options.depth, "width": options.width},
            optimizer=optimizer,
        )
        for seed, optimizer, learning_rate, each in product(
            seeds, options.optimizer, options.learning_rate, options.scheme
        )
    ]


def folder(output: Path, settings: Settings, options: argparse.Namespace) -> Path:
    """Where a run writes its files."""
    name = f"{settings.optimizer}-{settings.learning_rate:g}-{options.validation_rows}"
    return results.folder(output / name, settings)


def train_all(wanted: Iterable[Settings], options: argparse.Namespace, output: Path) -> None:
    """Train what has not ended yet. Raises ValueError, before any training, for what cannot be trained."""
    left = []
    for each in wanted:
        if (path := folder(output, each, options) / "config.json").is_file():
            results.check_alike([resuming.recorded(path), each])
        if resuming.summary(path.parent) is None:
            left.append(each)
    if not left:
        return
    start_tensorflow(max(each.devices for each in left))
    from experiments import training

    def data(settings: Settings) -> datasets.Dataset:
        found = datasets.load(settings.dataset, options.data_dir, NETWORKS[settings.model].reads)
        rows = options.validation_rows
        return found._replace(x_test=found.x_test[:rows], y_test=found.y_test[:rows])

    training.train_all(left, data, lambda each: folder(output, each, options))


def place(settings: Settings) -> tuple[str, float, str]:
    """The line of the table that a run belongs to."""
    return settings.optimizer, settings.learning_rate, settings.label


def gathered(runs: Iterable[Settings], options: argparse.Namespace, output: Path) -> list[Row]:
    """A row for every run and validation; a run that has diverged has none after that."""
    histories = ((each, folder(output, each, options) / "history.jsonl") for each in runs)
    return [
        {
            "optimizer": each.optimizer,
            "learning_rate": each.learning_rate,
            "scheme": each.label,
            "stages": 1 if each.scheme == SINGLE else each.stages,
            "seed": each.seed,
            "minibatch": row["step"],
            "validation_loss": round(row["val_loss"], 4),
        }
        for each, path in histories
        if path.is_file()
        for row in map(json.loads, path.read_text(encoding="utf-8").splitlines())
    ]


def title(options: argparse.Namespace) -> str:
    """What was trained."""
    return (
        f"{options.model} of {options.depth} blocks of width {options.width}, {options.stages} stages, minibatches of "
        f"{options.batch_size} rows, {options.seeds} seeds: validation loss after so many minibatches, and minus single"
    )


def report(rows: Sequence[Row], runs: Sequence[Settings]) -> str:
    """The table of the runs that have ended; of those that have diverged it says how many."""
    steps = sorted({row["minibatch"] for row in rows})
    seeds = Counter(map(place, runs))
    losses: dict[tuple[str, float, str], dict[tuple[int, int], float]] = {each: {} for each in seeds}
    for row in rows:
        at = row["optimizer"], row["learning_rate"], row["scheme"]
        losses[at][row["minibatch"], row["seed"]] = row["validation_loss"]
    lines = []
    for at, found in losses.items():
        optimizer, learning_rate, scheme = at
        single = {} if scheme == SINGLE else losses.get((optimizer, learning_rate, SINGLE), {})
        cells = [_cell(found, single, step, seeds[at]) for step in steps]
        lines.append((optimizer, f"{learning_rate:g}", scheme, *cells))
    return text_table(["optimizer", "rate", "scheme", *map(str, steps)], lines)


def _cell(found: Mapping[tuple[int, int], float], single: Mapping[tuple[int, int], float], step: int, runs: int) -> str:
    mine = {seed: loss for (at, seed), loss in found.items() if at == step}
    if not mine:
        return "diverged"
    mean = f"{sum(mine.values()) / len(mine):.3f}"
    both = [loss - single[step, seed] for seed, loss in mine.items() if (step, seed) in single]
    cell = f"{mean} ({shown(both, 3, signed=True)})" if both else mean
    return cell if len(mine) == runs else f"{cell}, {runs - len(mine)} of {runs} diverged"


if __name__ == "__main__":
    sys.exit(main())
