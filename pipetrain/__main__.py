"""Plan how to train a saved Keras model on several devices, without training it.

Profiles the model's layers on this machine, cuts it into stages, and says what to expect of one device, of data
parallelism, of a pipeline, and of a pipeline whose slow stages have several devices.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pipetrain.plan import schemes
from pipetrain.plan.advice import advise
from pipetrain.plan.cluster import Cluster, size_bytes
from pipetrain.plan.memory import Training
from pipetrain.run.quiet import start_tensorflow

EXAMPLES = """examples:
  python -m pipetrain plan model.keras --devices 4
  python -m pipetrain plan model.keras --devices 8 --cluster cluster.json --batch-size 256 --memory 16GiB

a cluster file, for hosts with 4 GPUs each:
  {"memory": "16GiB",
   "levels": [{"devices": 4, "bandwidth": "12GB/s", "latency_us": 10},
              {"bandwidth": "10Gb/s", "latency_us": 50}]}
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status: 2 for what cannot be planned."""
    options = _parse(arguments)
    try:
        cluster = Cluster.load(options.cluster) if options.cluster else None
        start_tensorflow(options.devices)
        print(_plan(options, cluster))
    except (OSError, TypeError, ValueError) as error:
        print(f"pipetrain plan: {error}", file=sys.stderr)
        return 2
    return 0


def _plan(options: argparse.Namespace, cluster: Cluster | None) -> str:
    import keras

    from pipetrain.compute.profiler import profile
    from pipetrain.run.devices import available, described

    device = available()[0]
    cluster = cluster or described([device])
    if options.memory is not None:
        cluster = replace(cluster, memory_bytes=options.memory)
    model = keras.saving.load_model(options.model, compile=False)
    schemes.check_options(options.scheme, options.horizon, False, None)
    training = Training(options.scheme, options.slots, options.microbatches, options.recompute, options.horizon)
    measured = profile(model, options.batch_size, device, sys.stdout.isatty())
    advice = advise(measured, options.devices, cluster, training)
    return f"{advice}\n{measured.warning}".rstrip()


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m pipetrain", description="Pipeline-parallel training for Keras.")
    commands = parser.add_subparsers(required=True, metavar="command")
    plan = commands.add_parser(
        "plan",
        help="how to train a saved model on several devices",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    plan.add_argument("model", type=Path, metavar="MODEL.keras", help="a model that Keras saved")
    plan.add_argument("--devices", type=_count, required=True, metavar="N", help="how many devices there are")
    plan.add_argument("--cluster", type=Path, metavar="FILE", help="how they are joined (default: as here), see below")
    plan.add_argument("--batch-size", type=_count, default=128, metavar="N", help="rows of a minibatch (default: 128)")
    plan.add_argument("--memory", type=_size, metavar="SIZE", help="what a device holds, such as 16GiB")
    plan.add_argument(
        "--scheme",
        choices=[*schemes.SCHEMES],
        default="spectrain",
        help="decides on the memory (default: spectrain)",
    )
    plan.add_argument(
        "--slots",
        type=_slots,
        default=1,
        metavar="N",
        help="optimizer variables a weight: 1 for momentum, 2 for Adam",
    )
    plan.add_argument(
        "--microbatches",
        type=_count,
        default=4,
        metavar="N",
        help="for gpipe, 1f1b and 2bw, which has stages - 1 at least (default: 4)",
    )
    plan.add_argument(
        "--horizon",
        choices=schemes.HORIZONS,
        default=schemes.HORIZONS[0],
        help="how spectrain predicts, which decides on the memory too (default: %(default)s)",
    )
    plan.add_argument("--recompute", action="store_true", help="run forwards again instead of keeping activations")
    return parser.parse_args(arguments)


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 up")
    return int(text)


def _slots(text: str) -> int:
    return 0 if text == "0" else _count(text)


def _size(text: str) -> int:
    try:
        return size_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


if __name__ == "__main__":
    sys.exit(main())
