"""Bytes that devices send each other per minibatch: data parallelism against a pipeline, for the paper's networks.

After Figures 3 and 4 of the paper (arXiv 1809.02839): six networks as published, minibatches of 128, four devices.

What counts as sent: in data parallelism, every device but one sends the gradients of all weights to be summed, and the
sums (or new weights) come back, 2 * (devices - 1) * weights; a ring sends as much, all its devices together. In a
pipeline, what crosses a cut (skips over it included) goes down as activations and comes back as gradients,
2 * (sum over cuts); the cuts are those that the planner makes from a profile. Four bytes a number.

It is the balance between layers that decides on cuts. By default it is that of a Tesla P40, the paper's card: what a
layer has to compute is counted from its shapes, and a roofline makes seconds of it (see pipetrain/plan/roofline.py), so
that every machine gives the same figures, in about 20 s. With --measure layers are timed on this machine with a few
rows, scaled to the minibatch: about two minutes, and other cuts where it is noisy or balanced otherwise.

examples:
  python experiments/traffic.py
  python experiments/traffic.py --model vgg16 --model snn --devices 2
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, geometric_mean

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import models  # noqa: E402
from experiments.options import writable  # noqa: E402
from experiments.progress import tracked, write_rows  # noqa: E402
from pipetrain.cli.arguments import Folded, count  # noqa: E402
from pipetrain.cli.environment import start_tensorflow  # noqa: E402
from pipetrain.logs import text_table  # noqa: E402
from pipetrain.plan.partition import partition, plan  # noqa: E402
from pipetrain.plan.profile import mib  # noqa: E402
from pipetrain.plan.roofline import TESLA_P40  # noqa: E402

# What each network reads, as published: CIFAR-10 images, 20 words, and Inception v4's own images of 299 pixels.
INPUTS = {
    "vgg16": (32, 32, 3),
    "resnet152": (32, 32, 3),
    "inception_v4": (299, 299, 3),
    "snn": (32, 32, 3),
    "transformer": (20,),
    "residual_lstm": (20,),
}
CLASSES = {"transformer": 2, "residual_lstm": 2}
PAPER = "The paper: 13.4 times less on average, up to 528 times less (SNN); Inception v4 is the exception."


@dataclass(frozen=True)
class Traffic:
    """Bytes per minibatch of one network's two ways to train, and where its pipeline is cut."""

    model: str
    parameters: int
    data_parallel_bytes: int
    pipeline_bytes: int
    cuts: tuple[str, ...]

    @property
    def ratio(self) -> float:
        """How much more data parallelism sends."""
        return self.data_parallel_bytes / self.pipeline_bytes


def measure(name: str, batch_size: int, devices: int, rows: int | None) -> Traffic:
    """Profile one network, with so many rows on this machine or by the roofline of a Tesla P40, and count."""
    from pipetrain import profile
    from pipetrain.compute.profiling.operation_count import analytic

    model = models.build(name, INPUTS[name], CLASSES.get(name, 10))
    if rows is None:
        balance = analytic(model, batch_size, TESLA_P40)
    else:
        balance = profile(model, rows, verbose=sys.stdout.isatty()).scaled(batch_size)
    pipeline, copies = partition(balance, devices), plan(balance, [len(balance.blocks)], replicas=[devices])
    return Traffic(name, model.count_params(), copies.sent_bytes, pipeline.sent_bytes, pipeline.cuts)


def report(traffic: Sequence[Traffic]) -> str:
    """The table, with the means that "on average" may mean, beside the paper's statements."""
    rows = [
        (
            each.model,
            f"{each.parameters:,}",
            mib(each.data_parallel_bytes),
            mib(each.pipeline_bytes),
            _times(each.ratio),
        )
        for each in traffic
    ]
    header = ("network", "parameters", "data-parallel MiB", "pipeline MiB", "ratio")
    ratios = [each.ratio for each in traffic]
    sums = sum(each.data_parallel_bytes for each in traffic) / sum(each.pipeline_bytes for each in traffic)
    average = (
        f"Average ratio: {_times(geometric_mean(ratios))} (geometric mean), {_times(fmean(ratios))} (arithmetic), "
        f"{_times(sums)} (all bytes together)."
    )
    return f"{text_table(header, rows)}\n\n{average}\n{PAPER}"


def _times(ratio: float) -> str:
    return f"{ratio:.1f}x" if ratio < 100 else f"{ratio:.0f}x"


def write(output: Path, options: argparse.Namespace, results: Sequence[Traffic]) -> Path:
    """What is known by now, as JSON for the figure and as CSV."""
    networks = [{**asdict(each), "ratio": each.ratio} for each in results]
    write_rows(output / "traffic.csv", [{**each, "cuts": " ".join(each["cuts"])} for each in networks])
    path = output / "traffic.json"
    data = {"batch_size": options.batch_size, "devices": options.devices, "networks": networks}
    path.write_text(json.dumps(data, indent=1), encoding="utf-8")
    return path


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status: 2 for arguments that cannot be used."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Folded)
    parser.add_argument("--model", action="append", choices=INPUTS, help="(default: all six)")
    parser.add_argument("--batch-size", type=count, default=128, metavar="N", help="rows per minibatch (default: 128)")
    parser.add_argument("--devices", type=count, default=4, metavar="N", help="(default: 4)")
    parser.add_argument(
        "--measure", type=count, nargs="?", const=8, metavar="ROWS", help="time layers here, with so many rows (8)"
    )
    parser.add_argument("--output", type=Path, metavar="DIR", help="where results go (default: runs/traffic)")
    options = parser.parse_args(arguments)
    names, results = options.model or [*INPUTS], []
    try:
        output = writable(options.output or ROOT / "runs" / "traffic")
        start_tensorflow(1)
        for name in tracked(names, names):
            results.append(measure(name, options.batch_size, options.devices, options.measure))
            path = write(output, options, results)
    except ValueError as error:
        print(f"traffic.py: {error}", file=sys.stderr)
        return 2
    from plots.traffic import draw

    print(f"Bytes sent per minibatch of {options.batch_size} rows on {options.devices} devices\n\n{report(results)}\n")
    print(draw(path, path.with_suffix(".png")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
