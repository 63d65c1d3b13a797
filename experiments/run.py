"""Train a network through a pipeline, under one scheme or several, and compare them.

With no argument but --scheme it trains a self-normalizing network on a subset of Fashion-MNIST that comes with
the repository: about a minute on two CPU cores.

examples:
  python experiments/run.py --scheme spectrain
  python experiments/run.py --scheme spectrain --scheme vanilla --stages 8 --steps 600
  python experiments/run.py --scheme all --output runs/all
  python experiments/run.py --scheme spectrain --model vgg16 --data-dir ~/tensorflow_datasets
  python experiments/run.py --scheme spectrain --model transformer --depth 2 --width 64
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import models  # noqa: E402
from experiments import datasets  # noqa: E402
from experiments.networks import NETWORKS, sizes  # noqa: E402
from pipetrain.plan import schemes  # noqa: E402
from pipetrain.plan.table import table  # noqa: E402
from pipetrain.run.quiet import start_tensorflow  # noqa: E402


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status: 1 if a scheme diverged, 2 for arguments that cannot be used."""
    options = parse(arguments)
    try:
        output = writable(Path(options.output or ROOT / "runs" / time.strftime("%Y%m%d-%H%M%S")))
        start_tensorflow(options.stages)
        network = NETWORKS[options.model]
        size = sizes(options.model, {"depth": options.depth, "width": options.width})
        data = datasets.load(options.dataset, options.data_dir, network.reads)
        summaries = run(options, size, data, output)
    except ValueError as error:
        print(f"run.py: {error}", file=sys.stderr)
        return 2
    from plots.learning_curves import draw

    picture = draw([output / summary.scheme for summary in summaries], output / "learning_curves.png")
    print(f"\n{closing_table(summaries)}\n\n{picture}")
    return 1 if any(summary.diverged_at for summary in summaries) else 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line's options."""
    description, _, epilog = __doc__.partition("\n\n")[2].partition("examples:")
    about = {name: scheme.about for name, scheme in schemes.SCHEMES.items()}
    about[schemes.DATA_PARALLEL] = "synchronous, a copy of the model on every device (MirroredStrategy)"
    schemes_about = "\n".join(f"  {name:<16} {about[name]}" for name in schemes.NAMES)
    parser = argparse.ArgumentParser(
        description=f"{__doc__.splitlines()[0]}\n\n{description}",
        epilog=f"schemes:\n{schemes_about}\n\nexamples:{epilog}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--scheme",
        action="append",
        choices=(*schemes.NAMES, "all"),
        help="how to train, see below; may be given several times (default: spectrain)",
    )
    parser.add_argument("--model", choices=models.NAMES, default="snn", help="network (default: %(default)s)")
    parser.add_argument(
        "--dataset",
        choices=datasets.NAMES,
        help=f"data set (default: that of the network: {defaults('dataset')}); fashion_mnist_small comes with the "
        "repository, the others through tensorflow-datasets. Images are resized to what the network reads",
    )
    parser.add_argument("--data-dir", metavar="DIR", help="where tensorflow-datasets keeps or downloads its data")
    parser.add_argument("--stages", type=positive, default=4, metavar="N", help="pipeline stages (default: 4)")
    parser.add_argument(
        "--batch-size", type=positive, default=128, metavar="N", help="rows per minibatch (default: 128)"
    )
    parser.add_argument("--microbatches", type=positive, default=4, metavar="N", help="for gpipe and 1f1b (default: 4)")
    parser.add_argument("--steps", type=positive, default=1000, metavar="N", help="minibatches (default: 1000)")
    parser.add_argument(
        "--learning-rate", type=rate, metavar="X", help=f"of SGD (default: the paper's: {defaults('learning_rate')})"
    )
    parser.add_argument("--momentum", type=float, default=0.9, metavar="X", help="of SGD (default: 0.9)")
    parser.add_argument(
        "--depth", type=positive, metavar="N", help="layers of the network (default: as published, 16 for snn)"
    )
    parser.add_argument(
        "--width", type=positive, metavar="N", help="units of its layers (default: as published, 512 for snn)"
    )
    parser.add_argument(
        "--eval-every", type=positive, default=20, metavar="N", help="steps between validations (default: 20)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of weights and shuffling (default: 0)")
    parser.add_argument("--output", metavar="DIR", help="where to write results (default: runs/<time>)")
    parser.add_argument("--verbose", action="store_true", help="show how the model is cut")
    options = parser.parse_args(arguments)
    options.dataset = options.dataset or NETWORKS[options.model].dataset
    if options.learning_rate is None:
        options.learning_rate = NETWORKS[options.model].learning_rate
    chosen = options.scheme or ["spectrain"]
    options.scheme = list(schemes.NAMES) if "all" in chosen else list(dict.fromkeys(chosen))
    return options


def rate(text: str) -> float:
    """A finite number of at least 0."""
    number = float(text)
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"a finite number of at least 0 is needed, not {text!r}")
    return number


def defaults(field: str) -> str:
    """For people: every network's default."""
    return ", ".join(f"{name} {getattr(network, field)}" for name, network in NETWORKS.items())


def positive(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a whole number of at least 1 is needed, not {text!r}")
    return int(text)


def writable(output: Path) -> Path:
    """The directory, made if need be; ValueError if nothing can be written there."""
    try:
        output.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output):
            return output
    except OSError as error:
        raise ValueError(
            f"Cannot write there: {error.strerror}. Received: output={str(output)!r}. Try another directory."
        ) from error


def run(options: argparse.Namespace, size: dict[str, int], data: datasets.Dataset, output: Path) -> list:
    """Train under every scheme asked for, one after another, from the same weights on the same minibatches."""
    from experiments.training import Settings, train

    summaries = []
    for scheme in options.scheme:
        settings = Settings(
            scheme=scheme,
            model=options.model,
            dataset=options.dataset,
            stages=options.stages,
            batch_size=options.batch_size,
            steps=options.steps,
            learning_rate=options.learning_rate,
            momentum=options.momentum,
            eval_every=options.eval_every,
            seed=options.seed,
            microbatches=options.microbatches,
            size=size,
        )
        print(f"{scheme}: {options.model} on {options.dataset}, {options.stages} stages, {options.steps} steps")
        summaries.append(train(settings, data, output / scheme, options.verbose))
    return summaries


def closing_table(summaries: Sequence) -> str:
    """Scheme, samples/s and best validation accuracy of every run."""
    rows = [
        (
            summary.scheme,
            "-" if summary.samples_per_second is None else f"{summary.samples_per_second:.0f}",
            "-" if summary.max_val_accuracy is None else f"{summary.max_val_accuracy:.4f}",
            "-" if summary.diverged_at is None else f"diverged at step {summary.diverged_at}",
        )
        for summary in summaries
    ]
    header = ("scheme", "samples/s", "best validation accuracy", "")
    if not any(summary.diverged_at for summary in summaries):
        header, rows = header[:3], [row[:3] for row in rows]
    return table(header, rows)


if __name__ == "__main__":
    sys.exit(main())
