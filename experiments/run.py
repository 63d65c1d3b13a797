"""Train a network through a pipeline, under one scheme or several, and compare them.

With no argument but --scheme it trains a self-normalizing network on a subset of Fashion-MNIST that comes with
the repository: about a minute on two CPU cores.

examples:
  python experiments/run.py --scheme spectrain
  python experiments/run.py --scheme spectrain --scheme vanilla --stages 8 --steps 600
  python experiments/run.py --scheme all --output runs/all
  python experiments/run.py --scheme spectrain --model vgg16 --data-dir ~/tensorflow_datasets
  python experiments/run.py --scheme spectrain --model transformer --depth 2 --width 64
  python experiments/run.py --scheme spectrain --model gpt2 --depth 4 --width 128 --optimizer adam
  python experiments/run.py --scheme auto --stages 2
  python experiments/run.py --scheme auto --local-workers 2 --allow compression,local
  python experiments/run.py --scheme my_policy.py:MyPolicy
  python experiments/run.py --scheme 1f1b --stages 2 --local-workers 2
  python experiments/run.py --scheme coded-reduce --children 3 --stragglers 1 --local-workers 3
  python experiments/run.py --scheme grid --grid 2 2
  python experiments/run.py --scheme spectrain --replicas 2 1 1
  python experiments/run.py --scheme parameter-server --order tic --servers 2 --local-workers 2
  python experiments/run.py --scheme spectrain --cluster hosts.json --wait 300
  python experiments/run.py --resume                     # go on with the newest run that was stopped
  python experiments/run.py --resume runs/all --stages 2 # go on with that one, in another way
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import fields, replace
from math import prod
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from experiments import datasets, resuming  # noqa: E402
from experiments.networks import NETWORKS, sizes  # noqa: E402
from experiments.options import (  # noqa: E402
    add_replicas,
    add_training,
    add_workers,
    fill_in,
    new_folder,
    owned,
    scheme_among,
    with_replicas,
    writable,
)
from experiments.records import (  # noqa: E402
    OF_TREE,
    OWN,
    Settings,
    Summary,
    described,
    microbatches_for,
    options_of,
)
from pipetrain.cli.arguments import Folded, add_scheme_options, count, listed, whole  # noqa: E402
from pipetrain.cli.environment import start_tensorflow  # noqa: E402
from pipetrain.cluster.supervision import LOST  # noqa: E402
from pipetrain.logs import counted, text_table  # noqa: E402
from pipetrain.schemes import table  # noqa: E402
from pipetrain.schemes.options import DEFAULT_POLICY, OF_PIPELINES, check_owned  # noqa: E402
from pipetrain.schemes.scheme import Scheme  # noqa: E402
from pipetrain.schemes.text_form import chosen, in_full  # noqa: E402

ALL = "all"  # of the paper and near it, each with other weights or another order
# What may be different when a run goes on, and options that say nothing about the run itself.
CHANGEABLE = {
    "stages",
    "replicas",
    "steps",
    "learning_rate",
    "momentum",
    "microbatches",
    "checkpoint_every",
    *DEFAULT_POLICY,
    *OWN,
    *OF_TREE.values(),
}
ANYWAY = ("scheme", "resume", "data_dir", "verbose", "cluster", "local_workers", "supervised")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status: 1 if a scheme diverged, 2 for arguments that cannot be used."""
    options = parse(arguments)
    if options.supervised:
        threading.Thread(target=end_with_supervisor, daemon=True).start()
    try:
        if options.wait is not None or options.elastic:
            return supervise(options, sys.argv[1:] if arguments is None else arguments)
        with ExitStack() as ends:
            output, summaries = (go_on if options.resume is not None else begin)(options, ends)
    except (ValueError, ConnectionError, ChildProcessError) as error:
        if options.supervised and isinstance(error, ConnectionError):  # the supervisor says so, and what it does
            return LOST
        print(f"run.py: {error}", file=sys.stderr)
        return LOST if _is_loss_of_a_worker(error) else 2
    except KeyboardInterrupt:
        return 130
    print(f"\n{closing_table(summaries)}\n\n{pictures(output, summaries)}")
    return 1 if any(summary.diverged_at for summary in summaries) else 0


def _is_loss_of_a_worker(error: Exception) -> bool:
    if not isinstance(error, ConnectionError):
        return False
    from pipetrain.cluster.health import WorkerLost  # TensorFlow, which a connection has needed already

    return isinstance(error, WorkerLost)


def supervise(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Train in processes that come and go with the workers; the exit status. Raises ValueError for what cannot be."""
    from experiments.supervision import supervised

    if options.cluster is None and options.local_workers is None:
        raise ValueError("Only workers can be lost. Received: --wait or --elastic. Try --cluster or --local-workers.")
    if options.checkpoint_every == 0:
        raise ValueError(
            "Training goes on from checkpoints. Received: --wait or --elastic, --checkpoint-every 0. Try 100."
        )
    own = argparse.ArgumentParser(add_help=False)
    for name in ("--wait", "--cluster", "--local-workers", "--output"):
        own.add_argument(name)
    own.add_argument("--elastic", action="store_true")
    own.add_argument("--resume", nargs="?")
    with ExitStack() as ends:
        return supervised(options, own.parse_known_args(arguments)[1], folder(options, ends))


def folder(options: argparse.Namespace, ends: ExitStack) -> Path:
    """The run's, for this program alone until ``ends``. Raises ValueError where that cannot be."""
    if options.resume is not None:
        output = Path(options.resume) if options.resume else resuming.newest(ROOT / "runs")
    else:
        output = Path(options.output) if options.output else new_folder(ROOT / "runs")
    return writable(output) if options.supervised else owned(output, ends)  # which its supervisor has


def end_with_supervisor() -> None:
    """The end of standard input says that the supervisor has gone: save, and end."""
    while os.read(0, 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line's options."""
    description, _, epilog = __doc__.partition("\n\n")[2].partition("examples:")
    every = table.PIPELINES | table.TRANSFERRING | table.TREES | table.GRIDS
    about = {name: scheme.about for name, scheme in every.items()}
    about[table.DATA_PARALLEL] = "synchronous, a baseline: plain Keras under MirroredStrategy"
    about[table.AUTO] = "the fastest way on as many devices as --stages says, by predictions and trials"
    names = *table.EVERY_NAME, table.AUTO
    parser = argparse.ArgumentParser(description=f"{__doc__.splitlines()[0]}\n\n{description}", formatter_class=Folded)
    parser.add_argument(
        "--scheme",
        action="append",
        type=scheme_among(*names, ALL),
        metavar="NAME",
        help="how to train, see below; FILE.csv, a schedule, or FILE.py:NAME, a scheme or a policy of your own; may be "
        f"given several times (default: spectrain). {ALL}: one after another {', '.join(table.NAMES)}",
    )
    add_training(parser, steps=1000)
    add_replicas(parser)
    parser.add_argument(
        "--microbatches",
        type=count,
        metavar="N",
        help="for synchronous pipelines, 2bw, and spectrain with --horizon target (default: 4; for 2bw at least one "
        "per stage)",
    )
    parser.add_argument(
        "--eval-every", type=count, default=20, metavar="N", help="steps between validations (default: 20)"
    )
    parser.add_argument(
        "--checkpoint-every",
        type=whole,
        default=500,
        metavar="N",
        help="steps between checkpoints; 0 for none (default: 500)",
    )
    parser.add_argument(
        "--resume",
        nargs="?",
        const="",
        metavar="DIR",
        help="go on with the run in DIR (default: the newest under runs/), as it was but for the options given here",
    )
    add_workers(parser)
    parser.add_argument("--supervised", action="store_true", help=argparse.SUPPRESS)  # a process of such a run
    parser.add_argument("--verbose", action="store_true", help="show how the model is cut, and why")
    flags = add_scheme_options(
        parser,
        (*DEFAULT_POLICY, "order", *OF_PIPELINES, "synchrony", "topology", "servers", *OF_TREE, "grid", "allow"),
        flags={"depth": "--tree-depth"},  # --depth is the network's
        defaults={name: getattr(Settings, own) for name, own in OF_TREE.items()},
    )
    schemes = listed({name: (about[name], " ".join(flags.get(name, ()))) for name in names})
    parser.epilog = f"schemes, and the options that they have:\n{schemes}\n\nexamples:{epilog}"
    options = parser.parse_args(arguments)
    unset = argparse.Namespace(**dict.fromkeys(vars(options)))
    options.given = {
        key: value for key, value in vars(parser.parse_args(arguments, unset)).items() if value is not None
    }
    fill_in(options)
    if options.grid is not None and "stages" not in options.given:
        options.stages = options.given["stages"] = prod(options.grid)
    try:
        with_replicas(options, options.given)
    except ValueError as error:
        parser.error(str(error))
    wanted = options.scheme or ["spectrain"]
    options.every = ALL in wanted
    wanted = [each for name in wanted for each in (table.NAMES if name == ALL else (name,))]
    options.files = {str(chosen(each)): in_full(each) for each in wanted}
    options.scheme = [*options.files]
    return options


def ways(options: argparse.Namespace) -> list[str | Scheme]:
    """The schemes asked for: names, and those of files."""
    return [chosen(file or name) for name, file in options.files.items()]


def start(options: argparse.Namespace, stages: int, ends: ExitStack) -> None:
    """Start TensorFlow, with a device for each stage here, or with those of workers, which end with ``ends``."""
    if options.cluster is None and options.local_workers is None:
        start_tensorflow(stages)
        return
    start_tensorflow(1)
    import pipetrain

    cluster = options.cluster
    if cluster is None:
        cluster = ends.enter_context(pipetrain.LocalWorkers(options.local_workers)).addresses
    pipetrain.connect(cluster)


def _place(options: argparse.Namespace) -> str:
    """The options that say where the stages are: a run does not remember them."""
    if options.cluster is not None:
        return f" --cluster {options.cluster}"
    return "" if options.local_workers is None else f" --local-workers {options.local_workers}"


def begin(options: argparse.Namespace, ends: ExitStack) -> tuple[Path, list[Summary]]:
    """Train under every scheme asked for, one after another, from the same weights on the same minibatches."""
    output = folder(options, ends)
    stopped = [scheme for scheme in options.scheme if resuming.is_unfinished(output / scheme)]
    if stopped:
        raise ValueError(
            f"There is a run that was stopped. Received: output={options.output!r}, with {', '.join(stopped)}. "
            f"Try --resume {options.output}, or another --output."
        )
    same = {
        field.name: getattr(options, field.name)
        for field in fields(Settings)
        if field.name not in ("scheme", "file", "size")
    }
    settings = [
        Settings(
            scheme=str(way),
            file=options.files[str(way)],
            size={},
            **{
                **same,
                **having(way, options),
                **options_of(way, {name: getattr(options, name) for name in OWN}),
                "microbatches": microbatches_for(way, ways(options), options.microbatches, options.horizon),
            },
        )
        for way in ways(options)
    ]
    if options.every:
        others = [name for name in (*table.EVERY_NAME, table.AUTO) if name not in options.scheme]
        print(f"{ALL}: {', '.join(options.scheme)}. By their names only: {', '.join(others)}.\n")
    if options.replicas and not any(each.has_replicas for each in settings):
        raise ValueError(
            f"No stage of these schemes has several devices. Received: --replicas, {', '.join(options.scheme)}. "
            "Try without it, or --scheme spectrain."
        )
    start(options, max(each.devices for each in settings), ends)
    given = {"depth": options.depth, "width": options.width}
    size = sizes(options.model, given, options.published)  # which loads Keras
    settings = [replace(each, size=size) for each in settings]
    return output, run(possible(settings, options.every), options, output)


def possible(settings: Sequence[Settings], every: bool) -> list[Settings]:
    """The runs that can be, before any is trained. Of ``every`` scheme the others are left out; else ValueError."""
    from experiments.training import check

    left = []
    for each in settings:
        try:
            check(each)
        except ValueError as error:
            if not every:
                raise
            print(f"{each.scheme} is left out. {error}")
        else:
            left.append(each)
    return left


def having(scheme: str | Scheme, options: argparse.Namespace) -> dict[str, Any]:
    """The policy's options for this scheme. Raises ValueError for those that none of the run's schemes has."""
    given = {name: options.given[name] for name in DEFAULT_POLICY if name in options.given}
    check_owned({name: getattr(options, name) for name in OWN}, *ways(options))
    for name, value in given.items():
        if not any(options_of(each, {name: value})[name] == value for each in ways(options)):
            table.check_options(scheme, **{**DEFAULT_POLICY, **given})
    return options_of(scheme, {**DEFAULT_POLICY, **given})


def go_on(options: argparse.Namespace, ends: ExitStack) -> tuple[Path, list[Summary]]:
    """Go on with a run that was stopped."""
    output = folder(options, ends)
    changes = {key: value for key, value in options.given.items() if key in CHANGEABLE}
    refused = [f"--{key.replace('_', '-')}" for key in options.given if key not in (*CHANGEABLE, *ANYWAY)]
    if refused:
        raise ValueError(
            f"A run goes on with the network and the data that it has. Received: --resume with {', '.join(refused)}. "
            f"Try leaving it out; what can change is --{', --'.join(sorted(CHANGEABLE)).replace('_', '-')}, --scheme."
        )
    if changes.get("checkpoint_every") == 0:
        raise ValueError(
            "A run goes on from checkpoints. Received: --resume, --checkpoint-every 0. Try another number."
        )
    schemes_given = options.scheme if "scheme" in options.given else []
    if "stages" in changes or "replicas" in changes:
        changes |= {"stages": options.stages, "replicas": options.replicas}
    by_source = resuming.settings(output, schemes_given, changes, options.files)
    check_owned({name: changes.get(name) for name in OWN}, *(each.way for each in by_source.values()))
    start(options, max(each.devices for each in by_source.values()), ends)
    settings = possible([*by_source.values()], every=False)
    for source, each in by_source.items():
        resuming.adopt(output, source, each.scheme)
    return output, run(settings, options, output)


def run(settings: Sequence[Settings], options: argparse.Namespace, output: Path) -> list[Summary]:
    """Every run's summary: of those that have ended in this folder, what they came to; the others are trained."""
    from experiments.training import train, write_settings

    for each in settings:  # all of them now, so that a run that is stopped knows what is left
        if options.resume is None:
            (output / each.scheme / "summary.json").unlink(missing_ok=True)  # of an earlier run: this one has not ended
        if resuming.summary(output / each.scheme) is None:
            write_settings(each, output / each.scheme)
    first = settings[0]
    data = datasets.load(first.dataset, options.data_dir, NETWORKS[first.model].reads)
    summaries = []
    for each in settings:
        print(f"{each.scheme}: {each.model} on {each.dataset}, {_place_of(each)}, {each.steps} steps")
        ended = resuming.summary(output / each.scheme) if options.resume is not None else None
        if ended is not None:
            print("It has ended already.")
        try:
            summaries.append(ended or train(each, data, output / each.scheme, options.verbose))
        except (KeyboardInterrupt, SystemExit, ConnectionError):
            if not options.supervised and resuming.is_unfinished(output / each.scheme):
                print(f"To go on: python experiments/run.py --resume {output}{_place(options)}")
            raise
    return summaries


def _place_of(settings: Settings) -> str:
    if settings.scheme == "single":
        return "1 device"
    if settings.scheme in (table.AUTO, *table.COPIED):
        return counted(settings.devices, "device")
    return described(settings)


def pictures(output: Path, summaries: Sequence[Summary]) -> str:
    """Draw the learning curves; for people, where they are and how to see more."""
    from plots.learning_curves import draw

    more = f"All figures on one page: python plots/report.py {output}"
    if not any((output / summary.scheme / "history.jsonl").stat().st_size for summary in summaries):
        return more  # too short for a validation
    return f"{more}\n{draw([output / summary.scheme for summary in summaries], output / 'learning_curves.png')}"


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
    return text_table(header, rows)


if __name__ == "__main__":
    status = main()
    if status == LOST:  # at the interpreter's end TensorFlow may wait for workers that are lost
        sys.stdout.flush()
        os._exit(status)
    sys.exit(status)
