"""Accuracy over seconds, by bandwidth: what sending less gains between hosts, and what it costs.

Workers of data parallelism share the rows of each minibatch. What a compression, or joining less often, costs of
accuracy is trained for: the dense layers and the runs of experiments/staleness.py, with a validation every so many
minibatches, for which workers with weights of their own are joined. The seconds of a minibatch are simulated, since
they depend on the network and accuracy does not: the layers, and what encoding and decoding take, are profiled on this
machine with each worker's part of its cores, one at least, and every worker is a host of that speed, whose port carries
so many Mb/s each way; a message takes {latency_ms:g} ms beside its bytes. `single` is one such device without a
network.

Runs that have ended in the output folder are not repeated. The table is kept as slow_networks.csv too. By default these
are {runs} runs, about {minutes} minutes on two CPU cores.

examples:
  python experiments/slow_networks.py
  python experiments/slow_networks.py --rate 50 --policy all-reduce --policy all-reduce/int8
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from experiments import datasets, staleness  # noqa: E402
from experiments.intervals import interval, shown  # noqa: E402
from experiments.options import owned, writable  # noqa: E402
from experiments.policies import EVERY_POLICY, SENDING, Outcome, Run, network  # noqa: E402
from experiments.progress import write_rows  # noqa: E402
from pipetrain.cli.arguments import Folded, count, from_zero  # noqa: E402
from pipetrain.cli.environment import start_tensorflow  # noqa: E402
from pipetrain.logs import text_table  # noqa: E402
from pipetrain.plan.cluster import Cluster, Level, Link  # noqa: E402
from pipetrain.plan.memory import Training  # noqa: E402
from pipetrain.plan.partition import everywhere  # noqa: E402
from pipetrain.schemes.compression import compression_of  # noqa: E402
from pipetrain.schemes.options import TransferOptions  # noqa: E402
from pipetrain.schemes.synchrony import join_steps  # noqa: E402
from pipetrain.simulation.copies import Copies  # noqa: E402

SINGLE = "single"
NAMES = (
    *(SINGLE, "all-reduce", "all-reduce/bfloat16", "all-reduce/int8", "all-reduce/int4", "all-reduce/top-k"),
    *("all-reduce/power-sgd", "all-reduce/local:8", "all-reduce/local:32"),
)
RATES_MBIT = (10_000, 1_000, 100, 20)
LATENCY_S = 5e-4  # of a message between two processes of TensorFlow, beside its bytes
# For a validation late gradients are applied at once; workers with a pace of their own are not simulated; a warm-up
# sends more in some steps than in others.
LEFT_OUT = re.compile("stale|asynchronous|warm-up")
SEEDS, RUN_S = 3, 25.0  # of each run, two at a time on two CPU cores
NEAR = 0.01  # of accuracy: what counts as having reached what `single` has at its end
LAST = 5  # validations of a run, whose mean is its accuracy at the end
CURVES, TABLE, PICTURE = (f"slow_networks.{kind}" for kind in ("json", "csv", "png"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status: 2 for arguments that cannot be used."""
    options = parse(arguments)
    try:
        runs = planned(options)
        with ExitStack() as ends:
            output = owned(Path(options.output), ends)
            start_tensorflow(options.workers)
            step_s = seconds(runs[0], options)
            ways = gathered(runs, staleness.finish(runs, writable(output / "runs"), options.jobs), step_s)
            content = {"title": title(options), "rates_mbit": options.rate, "ways": ways}
            (output / CURVES).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
            write_rows(output / TABLE, figures(ways, options.rate))
    except ValueError as error:
        print(f"slow_networks.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("Stopped. The same command goes on with the runs that are left.")
        return 130
    from plots.slow_networks import draw

    print(f"{title(options)}\n\n{report(ways, options.rate)}\n\n{draw(output, output / PICTURE)}")
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line's options."""
    runs = SEEDS * len(NAMES)
    about = __doc__.format(latency_ms=1e3 * LATENCY_S, runs=runs, minutes=round(runs * RUN_S / 2 / 60))
    parser = argparse.ArgumentParser(description=about, formatter_class=Folded)
    add = parser.add_argument
    several = "may be given several times"
    choices = (SINGLE, *(name for name in SENDING if not LEFT_OUT.search(name)))
    add(
        "--policy",
        action="append",
        choices=choices,
        metavar="NAME",
        help=f"what is sent: {', '.join(choices)}; {several} (default: {' '.join(NAMES)})",
    )
    add(
        "--rate",
        type=count,
        action="append",
        metavar="MBIT",
        help=f"of each host's port, in Mb/s; {several} (default: {' '.join(map(str, RATES_MBIT))})",
    )
    add("--workers", type=count, default=4, metavar="N", help="(default: %(default)s)")
    add("--seeds", type=count, default=SEEDS, metavar="N", help="runs of each (default: %(default)s)")
    add("--learning-rate", type=from_zero, default=0.02, metavar="X", help="of SGD (default: %(default)s)")
    add("--steps", type=count, default=512, metavar="N", help="minibatches (default: %(default)s)")
    add("--every", type=count, default=32, metavar="N", help="minibatches between validations (default: %(default)s)")
    add("--batch-size", type=count, default=256, metavar="N", help="rows of a minibatch (default: %(default)s)")
    add("--depth", type=count, default=8, metavar="N", help="layers of the network (default: %(default)s)")
    add("--width", type=count, default=256, metavar="N", help="units of its layers (default: %(default)s)")
    staleness.add_jobs(parser)
    add(
        "--output",
        default=ROOT / "runs" / "slow_networks",
        metavar="DIR",
        help="where results are and go (default: runs/slow_networks)",
    )
    options = parser.parse_args(arguments)
    options.policy = list(dict.fromkeys([SINGLE, *(options.policy or NAMES)]))
    options.rate = sorted(set(options.rate or RATES_MBIT), reverse=True)
    if options.every > options.steps:
        parser.error(
            f"No validation would be made. Received: --steps {options.steps}, --every {options.every}. "
            f"Try --every {options.steps}."
        )
    schemes = {name: EVERY_POLICY[name]["scheme"] for name in options.policy}
    joins = {name: join_steps(getattr(scheme, "synchrony", None)) for name, scheme in schemes.items()}
    if wrong := [name for name, steps in joins.items() if options.every % steps]:
        parser.error(
            f"Workers are joined for a validation, which is to be when they join by themselves. Received: --policy "
            f"{wrong[0]}, --every {options.every}. Try --every {joins[wrong[0]]}."
        )
    return options


def planned(options: argparse.Namespace) -> list[Run]:
    """Every run of the study, `single` first."""
    same = {
        name: getattr(options, name) for name in ("learning_rate", "steps", "batch_size", "depth", "width", "every")
    }
    return [
        Run(policy, 1 if policy == SINGLE else options.workers, seed=seed, momentum=0.9, **same)
        for policy in options.policy
        for seed in range(options.seeds)
    ]


def seconds(run: Run, options: argparse.Namespace) -> dict[str, list[float]]:
    """The simulated seconds of a minibatch by each policy, at each of the rates."""
    import pipetrain

    _, model = network(run, datasets.load("fashion_mnist_small", reads="images"))
    schemes = {name: EVERY_POLICY[name]["scheme"] for name in options.policy}
    compressions = [each.compression for each in schemes.values() if isinstance(each, TransferOptions)]
    sent = [compression_of(each) for each in compressions if each is not None]
    whole = pipetrain.profile(model, run.batch_size, budget_s=None)
    parts = pipetrain.profile(model, run.batch_size, budget_s=None, microbatches=options.workers, compressions=sent)
    found: dict[str, list[float]] = {name: [] for name in schemes}
    for rate_mbit in options.rate:
        cluster = Cluster((Level(Link(rate_mbit * 1e6 / 8, LATENCY_S), contention="port"),))
        copies = Copies(parts, options.workers, cluster, Training())
        for name, scheme in schemes.items():
            made = everywhere(whole, 1, cluster, Training()) if name == SINGLE else copies.of(scheme)
            found[name].append(made.step_s)
    return found


def gathered(runs: Sequence[Run], outcomes: dict[Run, Outcome], step_s: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Of each policy the accuracies after so many minibatches, each seed's at the end, and its seconds by rate.

    Runs that have diverged only count as such.
    """
    ways = []
    for policy, of_rates_s in step_s.items():
        every = [outcomes[run] for run in runs if run.policy == policy]
        histories = [each.history for each in every if not each.diverged]
        shared = list(zip(*histories, strict=False))
        ways.append(
            {
                "policy": policy,
                "step_s": of_rates_s,
                "steps": [rows[0][0] for rows in shared],
                "accuracies": [fmean(accuracy for _, accuracy in rows) for rows in shared],
                "ends": [fmean(each for _, each in history[-LAST:]) for history in histories],
                "diverged": len(every) - len(histories),
            }
        )
    return ways


def title(options: argparse.Namespace) -> str:
    """What was trained."""
    return (
        f"{options.depth} dense layers of width {options.width}, {options.workers} workers, minibatches of "
        f"{options.batch_size} rows, mean of {options.seeds} seeds"
    )


def reached_steps(ways: Sequence[dict[str, Any]]) -> list[int | None]:
    """Of each policy, after how many minibatches the accuracy that `single` has at its end is nearly reached."""
    single = next(way for way in ways if way["policy"] == SINGLE)
    wanted = fmean(single["ends"]) - NEAR if single["ends"] else None
    return [
        next((n for n, each in zip(way["steps"], way["accuracies"], strict=True) if wanted and each >= wanted), None)
        for way in ways
    ]


def figures(ways: Sequence[dict[str, Any]], rates_mbit: Sequence[int]) -> list[dict[str, Any]]:
    """The table's figures, policy by policy and rate by rate."""
    found = []
    for way, step in zip(ways, reached_steps(ways), strict=True):
        accuracy, half_width = interval(way["ends"]) if way["ends"] else (None, None)
        for rate_mbit, step_s in zip(rates_mbit, way["step_s"], strict=True):
            found.append(
                {
                    "policy": way["policy"],
                    "rate_mbit": rate_mbit,
                    "accuracy": accuracy,
                    "half_width": half_width,
                    "diverged": way["diverged"],
                    "step_s": step_s,
                    "reached_s": None if step is None else step * step_s,
                }
            )
    return found


def report(ways: Sequence[dict[str, Any]], rates_mbit: Sequence[int]) -> str:
    """The table: accuracy at the end, and the seconds after which `single`'s is nearly reached, by rate."""
    header = (
        "policy",
        "accuracy",
        *(f"{rate} Mb/s: ms" for rate in rates_mbit),
        *(f"s to -{NEAR:g}" for _ in rates_mbit),
    )
    rows = []
    for way, step in zip(ways, reached_steps(ways), strict=True):
        ms = [f"{1e3 * each:.{0 if each >= 0.1 else 1}f}" for each in way["step_s"]]
        reached = ["-" if step is None else f"{step * each:.1f}" for each in way["step_s"]]
        lost = f", {way['diverged']} diverged" if way["diverged"] else ""
        rows.append((way["policy"].removeprefix("all-reduce/"), shown(way["ends"], 3) + lost, *ms, *reached))
    return text_table(header, rows)


if __name__ == "__main__":
    sys.exit(main())
