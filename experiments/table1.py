"""The paper's Table 1: how well every network trains under every scheme, over several seeds.

After Chen et al. 2018 (arXiv 1809.02839), section 4: 5,000 minibatches of 128, metrics every 20 of them; of each run
the least training loss, the least validation loss and the highest validation accuracy. Here they are means over seeds
with their 95% interval. Runs of one seed start from the same weights and see the same minibatches, so that differences
in accuracy are taken seed by seed: against data-parallel, and against single (the same gradient on one device: cheaper
on a machine without GPUs), where these are run.

Runs go to DIR/<network>/<scheme>/seed<N>/, and a run that has ended there is not repeated: stop the command when you
like and give it again. The table and the figure show all runs that DIR holds, so that networks which need other sizes,
data or learning rates have a command each, with the same --output. A run that diverges counts with the best that it
had by then, and the table says so.

The four networks of docs/results/table1.md, with the sizes, data and seeds there, take three hours on two cores. The
default is the paper's sizes, 72 runs of 5,000 minibatches, for GPUs: how long it takes depends on these.

examples:
  python experiments/table1.py --data-dir ~/tensorflow_datasets          # as in the paper, for GPUs
  python experiments/table1.py --model snn --width 256 --steps 1000 --output runs/small
  python experiments/table1.py --model residual_lstm --depth 4 --width 32 --steps 1000 --learning-rate 0.05 \\
      --data-dir ~/tensorflow_datasets --output runs/small               # another network of the same table
  python experiments/table1.py --model snn --width 256 --steps 1000 --output runs/small \\
      --scheme spectrain/target/M=1 --scheme spectrain/target/M=2 --scheme 2bw/1.5   # how else to predict
  python experiments/table1.py --gather --output runs/small              # the table of what there is by now
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from experiments import datasets, optimizers, results  # noqa: E402
from experiments.networks import NETWORKS, PUBLISHED, defaults, parameters, sizes  # noqa: E402
from experiments.options import (  # noqa: E402
    add_replicas,
    add_size,
    learning_rate,
    owned,
    with_replicas,
    writable,
)
from experiments.progress import write_rows  # noqa: E402
from experiments.records import Settings  # noqa: E402
from experiments.variants import variant  # noqa: E402
from pipetrain.cli.arguments import Folded, count, from_zero  # noqa: E402
from pipetrain.cli.environment import start_tensorflow  # noqa: E402
from pipetrain.schemes import table  # noqa: E402

SCHEMES = (table.DATA_PARALLEL, "vanilla", "weight-stashing", "spectrain")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status: 2 for arguments that cannot be used."""
    options = parse(arguments)
    try:
        with ExitStack() as ends:
            output = writable(options.output) if options.gather else owned(options.output, ends)
            if not options.gather:
                train_all(planned(options), output, options.data_dir)
            report(output)
    except ValueError as error:
        print(f"table1.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nTo go on: the same command. The table of the runs that have ended: --gather", file=sys.stderr)
        return 130
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Folded)
    parser.add_argument(
        "--model",
        action="append",
        choices=NETWORKS,
        help="network; may be given several times (default: the paper's six)",
    )
    parser.add_argument(
        "--scheme",
        action="append",
        type=variant,
        metavar="NAME[/HORIZON][/M=N]",
        help=f"how to train ({', '.join(table.EVERY_NAME)}), with how far it predicts and its microbatches where it "
        f"has them, such as spectrain/target/M=2; or FILE.csv, a schedule, or FILE.py:NAME, a scheme or policy of your "
        f"own; may be given several times (default: {', '.join(SCHEMES)})",
    )
    parser.add_argument("--steps", type=count, default=5000, metavar="N", help="minibatches (default: 5000)")
    parser.add_argument("--eval-every", type=count, default=20, metavar="N", help="(default: 20 steps)")
    parser.add_argument(
        "--seeds", type=count, default=3, metavar="N", help="runs of each scheme, with seeds 0 to N-1 (default: 3)"
    )
    parser.add_argument("--stages", type=count, default=4, metavar="N", help="pipeline stages (default: 4)")
    add_replicas(parser)
    parser.add_argument("--batch-size", type=count, default=128, metavar="N", help="(default: 128 rows)")
    parser.add_argument(
        "--optimizer",
        choices=optimizers.NAMES,
        default="momentum",
        help="momentum is SGD with it (default: %(default)s)",
    )
    parser.add_argument(
        "--learning-rate",
        type=from_zero,
        metavar="X",
        help=f"(default: of SGD the network's: {defaults('learning_rate')}; of optimizers with steps of about the "
        f"rate's size, such as adam, {optimizers.ADAPTIVE_RATE:g})",
    )
    parser.add_argument("--momentum", type=from_zero, default=0.9, metavar="X", help="of SGD (default: 0.9)")
    add_size(parser)
    parser.add_argument(
        "--dataset", choices=datasets.NAMES, help=f"(default: that of the network: {defaults('dataset')})"
    )
    parser.add_argument("--data-dir", metavar="DIR", help="where tensorflow-datasets keeps or downloads its data")
    parser.add_argument(
        "--output",
        type=Path,
        default=ROOT / "runs" / "table1",
        metavar="DIR",
        help="where runs, table1.md, table1.csv, table1.png and table1.svg go (default: runs/table1)",
    )
    parser.add_argument("--gather", action="store_true", help="train nothing: the table of the runs in --output")
    options = parser.parse_args(arguments)
    given = parser.parse_args(arguments, argparse.Namespace(stages=None))
    try:
        with_replicas(options, ["stages"] if given.stages is not None else [])
    except ValueError as error:
        parser.error(str(error))
    options.model = list(dict.fromkeys(options.model or PUBLISHED))
    options.scheme = list(dict.fromkeys(options.scheme or map(variant, SCHEMES)))
    return options


def planned(options: argparse.Namespace) -> list[Settings]:
    """The runs that are asked for: all schemes of a seed before the next seed, so that any stop leaves a comparison."""
    return [
        Settings(
            **each._asdict(),
            model=model,
            dataset=options.dataset or NETWORKS[model].dataset,
            stages=options.stages,
            batch_size=options.batch_size,
            steps=options.steps,
            learning_rate=learning_rate(options, model),
            momentum=options.momentum,
            eval_every=options.eval_every,
            seed=seed,
            size=_size(model, options),
            optimizer=options.optimizer,
            replicas=options.replicas,
        )
        for model in options.model
        for seed in range(options.seeds)
        for each in options.scheme
    ]


def _size(model: str, options: argparse.Namespace) -> dict[str, int]:
    """Among several networks, those without a depth do without; one that is asked for alone refuses it."""
    given = {"depth": options.depth, "width": options.width}
    if len(options.model) > 1:
        given = {key: value for key, value in given.items() if key in parameters(model)}
    return sizes(model, given, options.published)


def train_all(wanted: Sequence[Settings], output: Path, data_dir: str | None) -> None:
    """Train what has not ended yet. Raises ValueError, before any training, for runs that could not be compared."""
    ended = [run.settings for run in results.gather(output)]
    results.check_alike([*ended, *wanted])
    left = [each for each in wanted if each not in ended]
    print(f"{len(wanted)} runs, {len(wanted) - len(left)} of them ended already")
    if not left:
        return
    start_tensorflow(max(each.devices for each in left))
    from experiments import training

    training.train_all(
        left,
        lambda each: datasets.load(each.dataset, data_dir, NETWORKS[each.model].reads),
        lambda each: results.folder(output, each),
    )


def report(output: Path) -> None:
    """Print the table of all runs in the folder, write it there, as CSV too, and draw the figure."""
    runs = results.gather(output)
    if not runs:
        raise ValueError(f"No run has ended there. Received: output={str(output)!r}. Try the --output of a run.")
    results.check_alike(run.settings for run in runs)
    parts = results.sections(runs)
    (output / "table1.md").write_text(results.markdown(parts), encoding="utf-8")
    write_rows(output / "table1.csv", results.rows(parts))
    from plots.table1 import draw

    picture = draw(output, output / "table1.png")
    print(f"\n{results.text(parts)}\n\n* the best of its network\n\n{output / 'table1.md'}\n{picture}")


if __name__ == "__main__":
    sys.exit(main())
