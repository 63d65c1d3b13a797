"""How near predicted weights come to those that training reaches, and how near the weights that are there.

After Figure 8 of the paper (arXiv 1809.02839): there the prediction has the smaller error for s = 1, 2 and 3.

A network is trained through a pipeline. When version t + s of its weights W is reached, it is compared with what was
known s updates before: the stale weights W[t], and the prediction W[t] + s * (W[t] - W[t-1]), which takes the last
update to be repeated. The error is the root of the mean square over all trainable weights. A third figure is the error
of W[t] + c * (W[t] - W[t-1]) with the c that would have been best at each step, known afterwards only: no multiple of
the last update comes nearer, and the mean c says how far the weights really go on.

The error of the stale weights says how far the weights move in s updates, so a factor above 1 (stale / predicted) says
that the last update foretells the next ones. It rests on momentum; on small learning rates, batches that agree, and an
optimizer whose steps are alike from one to the next. With plain SGD (momentum 0) there is little to foretell.

With the SNN 256 wide it takes about 30 s on two cores.

examples:
  python experiments/rmse.py
  python experiments/rmse.py --horizons 1 2 3 4 5 6 7 --width 256
  python experiments/rmse.py --optimizer adam --scheme vanilla --output runs/rmse-adam
  python experiments/rmse.py --model transformer --depth 2 --width 64 --data-dir ~/tensorflow_datasets
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from experiments import datasets, optimizers  # noqa: E402
from experiments.displacement import Errors, Means, Versions, means  # noqa: E402
from experiments.networks import NETWORKS, input_shape, sizes  # noqa: E402
from experiments.options import add_training, fill_in, scheme_among, writable  # noqa: E402
from experiments.progress import write_rows  # noqa: E402
from pipetrain.cli.arguments import Folded, count  # noqa: E402
from pipetrain.cli.environment import start_tensorflow  # noqa: E402
from pipetrain.logs import text_table  # noqa: E402
from pipetrain.schemes.table import NAMES  # noqa: E402

if TYPE_CHECKING:
    import keras

STEPS = 400


@dataclass(frozen=True)
class Study:
    """What decides the result."""

    scheme: str
    model: str
    dataset: str
    stages: int
    batch_size: int
    steps: int
    optimizer: str
    learning_rate: float
    momentum: float
    seed: int
    horizons: tuple[int, ...]
    size: dict[str, int]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status: 1 if training diverged, 2 for arguments that cannot be used."""
    options = parse(arguments)
    try:
        output = writable(Path(options.output or ROOT / "runs" / "rmse"))
        start_tensorflow(options.stages)
        study = settings(options)
        data = datasets.load(study.dataset, options.data_dir, NETWORKS[study.model].reads)
        rows, diverged_at = measure(study, data)
    except ValueError as error:
        print(f"rmse.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    found = means(rows)
    write(output, study, rows, found, diverged_at)
    from plots.rmse import draw

    print(f"\n{report(study, found, diverged_at)}\n\n{draw(output, output / 'rmse.png')}")
    return 1 if diverged_at else 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line's options."""
    description, _, examples = __doc__.partition("examples:")
    parser = argparse.ArgumentParser(
        description=description,
        epilog=f"examples:{examples}",
        formatter_class=Folded,
    )
    parser.add_argument(
        "--horizons",
        type=count,
        nargs="+",
        default=[1, 2, 3],
        metavar="S",
        help="how many updates ahead, each at least 1 (default: 1 2 3)",
    )
    parser.add_argument(
        "--scheme",
        type=scheme_among(*NAMES),
        default="spectrain",
        metavar="NAME",
        help=f"the pipeline that trains: {', '.join(NAMES)}; or FILE.py:NAME (default: %(default)s)",
    )
    add_training(parser, STEPS, "runs/rmse")
    options = parser.parse_args(arguments)
    fill_in(options)
    return options


def settings(options: argparse.Namespace) -> Study:
    """What the options come to. Raises ValueError for a training too short to reach the furthest horizon."""
    horizons = tuple(sorted(set(options.horizons)))
    if options.steps <= horizons[-1]:
        raise ValueError(
            f"Training ends before the weights are reached. Received: --steps {options.steps}, "
            f"--horizons {' '.join(map(str, horizons))}. Try at least --steps {horizons[-1] + 1}."
        )
    size = sizes(options.model, {"depth": options.depth, "width": options.width}, options.published)
    same = {name: getattr(options, name) for name in Study.__dataclass_fields__ if name not in ("horizons", "size")}
    return Study(**same, horizons=horizons, size=size)


def measure(study: Study, data: datasets.Dataset) -> tuple[list[Errors], int | None]:
    """Train once; the errors of every step and horizon, and the step of a loss that was not finite or None."""
    import keras

    import models
    import pipetrain
    from experiments.training import batches
    from pipetrain.callbacks import Snapshots

    keras.utils.set_random_seed(study.seed)
    shape = input_shape(study.model, data.x_train.shape[1:])
    model = models.build(study.model, shape, data.classes, **study.size)
    pm = pipetrain.PipelineModel(model, study.stages, study.scheme)
    pm.compile(
        optimizers.build(study.optimizer, study.learning_rate, study.momentum),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    versions, rows = Versions(study.horizons), []
    versions.add(trainable(model))

    def compare(step: int, model: keras.Model) -> None:
        rows.extend(versions.add(trainable(model)))

    try:
        pm.fit(
            batches(data, shape, study.batch_size, study.seed),
            steps_per_epoch=study.steps,
            shuffle=False,  # the data set shuffles itself
            callbacks=[Snapshots(1, compare)],
            verbose=1 if sys.stdout.isatty() else 0,
        )
    except FloatingPointError as error:
        print(f"\n{error}")
        return rows, rows[-1].step + rows[-1].horizon if rows else 1
    return rows, None


def trainable(model: keras.Model) -> list:
    """The weights that an optimizer moves, as arrays: statistics, such as BatchNormalization's, are not predicted."""
    return [variable.numpy() for variable in model.trainable_variables]


def write(output: Path, study: Study, rows: Sequence[Errors], found: Sequence[Means], diverged_at: int | None) -> None:
    """The files of a run: what was asked, every step's errors, and their means; the factors as CSV too."""
    lines = "".join(json.dumps(asdict(row)) + "\n" for row in rows)
    (output / "history.jsonl").write_text(lines, encoding="utf-8")
    horizons = [{**asdict(each), "factor": each.factor} for each in found]
    summary = {"horizons": horizons, "diverged_at": diverged_at}
    for name, content in {"config": asdict(study), "summary": summary}.items():
        (output / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    about = {
        "network": " ".join([study.model, " x ".join(map(str, study.size.values()))]).strip(),
        "optimizer": f"{study.optimizer}, learning rate {study.learning_rate:g}",
    }
    write_rows(output / "rmse.csv", [{**about, **{f"s = {each.horizon}": each.factor for each in found}}])


def report(study: Study, found: Sequence[Means], diverged_at: int | None) -> str:
    """The table, with its title, and what it says."""
    title = (
        f"{study.model} on {study.dataset}, {study.stages} stages of {study.scheme}, {study.optimizer}, "
        f"learning rate {study.learning_rate:g}, {study.steps} steps: RMSE against the weights reached"
    )
    header = ("s", "stale", "predicted", "stale / predicted", "prediction nearer", "best c", "with best c")
    rows = [
        (
            str(each.horizon),
            f"{each.stale:.3e}",
            f"{each.predicted:.3e}",
            "-" if each.factor is None else f"{each.factor:.2f}",
            f"{each.nearer:.0%}",
            f"{each.multiple:.2f}",
            f"{each.best:.3e}",
        )
        for each in found
    ]
    end = f"\nTraining diverged at step {diverged_at}." if diverged_at else ""
    return f"{title}\n\n{text_table(header, rows)}\n\n{verdict(found)}{end}"


def verdict(found: Sequence[Means]) -> str:
    """By which factor prediction beats staleness, in a sentence."""
    if not found:
        return "No weights were reached."
    factors = ", ".join(
        f"{each.factor:.2f} (s = {each.horizon})" if each.factor is not None else f"exact (s = {each.horizon})"
        for each in found
    )
    wins = [each.horizon for each in found if each.predicted < each.stale]
    where = "every s" if len(wins) == len(found) else f"s = {', '.join(map(str, wins))} only" if wins else "no s"
    return f"Prediction is nearer than staleness by a factor of {factors}: nearer on average for {where}."


if __name__ == "__main__":
    sys.exit(main())
