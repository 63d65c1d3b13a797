"""Samples/s of every scheme with two stages on two cores, beside what a user would pick instead.

That is plain Keras on one core, on both, and by itself on either at once (which is what the two cores can give), with
XLA and without, with oneDNN's kernels as TensorFlow sets them and on; MirroredStrategy on two devices (data-parallel);
and PyTorch, where it is installed (pip install "pipetrain[benchmarks]"): on one core, DDP and two of its pipeline
schedules on two pinned processes. All train the same layers at the same batch size with SGD and momentum.

Only one side works at a time: A, B, C, A, B, C, ... so that a machine whose speed drifts is fair to all. Ratios are of
the same round, Keras' and pipetrain's against the fastest plain Keras on one core and the fastest two at once,
PyTorch's against PyTorch on one core. The bound is what the cut could reach if no stage ever waited: the sum of the
stages' times over the slowest's, measured while they train (PyTorch's: before). With --predict, the last column is how
much more than measured was expected, by a profile of the same round.

examples:
  python benchmarks/throughput.py
  python benchmarks/throughput.py --network vgg16 --network transformer --scheme spectrain --scheme 1f1b
  python benchmarks/throughput.py --network dense --scheme all --rounds 9 --without-torch
  python benchmarks/throughput.py --isa avx2 --without-torch
  python benchmarks/throughput.py --scheme spectrain --jit-compile auto --jit-compile true --jit-compile false
  python benchmarks/throughput.py --brief --scheme spectrain --scheme 1f1b --predict
  python benchmarks/throughput.py --brief --scheme spectrain/target/M=2 --scheme 2bw/1.5
  python benchmarks/throughput.py --devices GPU --scheme spectrain --scheme 1f1b --scheme data-parallel
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import instruction_sets, sides, torch_peer
from benchmarks.networks import COMPARED, Network
from benchmarks.sides import FIRST, Figures, KerasJob, plain_names
from benchmarks.turns import teams_taking_turns
from experiments.variants import NAMES, variant
from pipetrain.logs import text_table

CORES = 2
DEFAULT = ("spectrain", "vanilla", "weight-stashing", "1f1b", "gpipe", "data-parallel")
ALONE = {*plain_names("core"), *plain_names("GPU")}
AT_ONCE = {*plain_names("core", at_once=True)}
COUNT_GPUS = "import tensorflow as tf; print(len(tf.config.list_physical_devices('GPU')))"
ISA_HELP = """hide instruction sets above AVX2 from oneDNN (ONEDNN_MAX_CPU_ISA), with which TensorFlow also multiplies
matrices where its own kernels run, and from XLA's compiler (XLA_FLAGS), and leave oneDNN's other kernels off in plain
Keras and on in pipetrain, as on a processor with AVX2 and FMA alone; kernels of Eigen that are compiled into TensorFlow
and the library that multiplies matrices for XLA are not masked"""


class Options(NamedTuple):
    """What is compared, and for how long."""

    schemes: Sequence[str]
    steps: int
    rounds: int
    with_torch: bool
    brief: bool = False
    isa: str | None = None
    jit_compile: Sequence[str] = ("auto",)
    predict: bool = False
    gpus: int = 0


def work(job: KerasJob | torch_peer.TorchJob) -> Iterator[dict[str, Figures]]:
    """The rounds of one process."""
    return sides.work(job) if isinstance(job, KerasJob) else torch_peer.work(job)


def teams(network: Network, options: Options) -> list[list[Any]]:
    """The processes that take turns, those that work at once together."""
    keras = partial(KerasJob, network, options.steps, xla=not options.brief, gpus=options.gpus > 0)
    if options.gpus:
        return [[keras(1)], [_pipetrain(network, options)]]
    teams: list[list[Any]] = []
    for onednn in _settings(options):
        plain = partial(keras, onednn=onednn)
        teams += [[plain(cores)] for cores in ((1,) if options.brief else range(1, CORES + 1))]
        teams.append([plain(1, rank=rank) for rank in range(CORES)])
    teams.append([_pipetrain(network, options)])
    if options.with_torch:
        teams += torch_peer.teams(network, options.steps)
    return teams


def _settings(options: Options) -> list[str | None]:
    """TensorFlow's switches for oneDNN with which plain Keras is compared; on by itself, it is not switched on."""
    by_itself = "0" if options.isa else None  # what TensorFlow does on a processor that has no more
    if options.brief or (not options.isa and instruction_sets.is_on_by_itself()):
        return [by_itself]
    return [by_itself, "1"]


def _pipetrain(network: Network, options: Options) -> KerasJob:
    """The process of the schemes, with what importing pipetrain has set, or would on such a processor."""
    onednn = "1" if options.isa else os.environ.get(instruction_sets.ONEDNN)
    return KerasJob(
        network,
        options.steps,
        max(CORES, options.gpus),
        tuple(options.schemes),
        onednn=onednn,
        jit_compile=options.jit_compile,
        predict=options.predict,
        gpus=options.gpus > 0,
    )


def measured(network: Network, options: Options) -> list[dict[str, Figures]]:
    """Every side's figures, round by round."""
    results = teams_taking_turns(work, teams(network, options), options.rounds)
    return [{name: each for side in number for name, each in side.items()} for number in zip(*results, strict=True)]


def header(gpus: bool) -> tuple[str, ...]:
    """Of the table."""
    one = "against 1 GPU" if gpus else "against 1 core"
    return "", "samples/s", one, "lowest - highest", "against 2 at once", "bound", "of the bound", "predicted"


def rows(rounds: list[dict[str, Figures]]) -> Iterator[tuple[str, ...]]:
    """A line for every side."""
    alone, at_once = _fastest(rounds, ALONE), _fastest(rounds, AT_ONCE)
    for name in rounds[0]:
        torch = name.startswith("PyTorch")
        against = _ratios(rounds, name, torch_peer.ALONE if torch else alone)
        ratio = statistics.median(against)
        both = "" if torch or at_once is None else f"{statistics.median(_ratios(rounds, name, at_once)):.2f}"
        spread = f"{min(against):.2f} - {max(against):.2f}"
        error = prediction_error(rounds, name)
        yield (
            name,
            f"{_middle(rounds, name):.0f}",
            f"{ratio:.2f}",
            spread,
            both,
            *_bound(rounds, name, ratio),
            "" if error is None else f"{error:+.1%}",
        )


def _bound(rounds: list[dict[str, Figures]], name: str, ratio: float) -> tuple[str, str]:
    if rounds[0][name].bound is None:
        return "", ""
    bound = statistics.median(number[name].bound or 0.0 for number in rounds)
    return f"{bound:.2f}", f"{ratio / bound:.0%}"


def prediction_error(rounds: list[dict[str, Figures]], name: str) -> float | None:
    """By what part more than measured was predicted, the median of the rounds; None where nothing was."""
    pairs = [(number[name].predicted, number[name].samples_per_second) for number in rounds]
    errors = [predicted / reached - 1 for predicted, reached in pairs if predicted is not None]
    return statistics.median(errors) if errors else None


def _ratios(rounds: list[dict[str, Figures]], name: str, base: str | None) -> list[float]:
    """Of each round, the side's samples/s over the base's."""
    return [number[name].samples_per_second / number[base].samples_per_second for number in rounds]


def _fastest(rounds: list[dict[str, Figures]], names: set[str]) -> str | None:
    """Which of these sides is, by its median; None where there is none of them."""
    return max((name for name in rounds[0] if name in names), key=partial(_middle, rounds), default=None)


def _middle(rounds: list[dict[str, Figures]], name: str) -> float:
    return statistics.median(number[name].samples_per_second for number in rounds)


def found_gpus() -> int:
    """The stages that --devices GPU has: one on each GPU, or two on the only one; 0 where there is none."""
    command = [sys.executable, "-c", COUNT_GPUS]  # this process does not start TensorFlow: it would take the GPUs
    asked = subprocess.run(command, capture_output=True, text=True, check=True)
    cards = int(asked.stdout)
    return max(cards, CORES) if cards else 0


def parser() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", action="append", choices=COMPARED, help="several times if wanted (default: all)")
    parser.add_argument(
        "--scheme",
        action="append",
        type=lambda text: text if text == "all" else str(variant(text)),
        metavar="NAME[/HORIZON][/M=N]",
        help=f"all, or one of {', '.join(NAMES)}, such as spectrain/target/M=2; several times if wanted "
        f"(default: {', '.join(DEFAULT)})",
    )
    parser.add_argument("--steps", type=int, default=30, help="minibatches of each side a round (default: 30)")
    parser.add_argument("--rounds", type=int, default=5, help="medians are of these (default: 5)")
    parser.add_argument("--without-torch", action="store_true", help="leave PyTorch out, though it is installed")
    brief = "beside the schemes only Keras on one core and two at once, without XLA, with oneDNN as TensorFlow sets it"
    parser.add_argument("--brief", action="store_true", help=brief)
    parser.add_argument("--isa", choices=instruction_sets.MASKS, help=ISA_HELP)
    jit_compile = "of pipetrain's sides; several times if wanted, for a side each (default: auto)"
    parser.add_argument("--jit-compile", action="append", choices=sides.JIT_COMPILE, help=jit_compile)
    predict = "compare the schemes under jit_compile=auto with what is expected by a profile of the same round"
    parser.add_argument("--predict", action="store_true", help=predict)
    gpu = "GPU: stages on the GPUs, or on two logical ones of the only GPU, and plain Keras on one (default: CPU)"
    parser.add_argument("--devices", choices=("CPU", "GPU"), default="CPU", help=gpu)
    return parser


def chosen(arguments: Sequence[str] | None) -> tuple[list[str], Options]:
    """The networks and the options that the command line asks for."""
    line = parser()
    given = line.parse_args(arguments)
    if given.steps <= FIRST:
        line.error(f"--steps must be more than {FIRST}, which fill the pipeline and are not timed")
    if given.isa and given.devices == "GPU":
        line.error("--isa is about kernels of processors; leave it out with --devices GPU")
    gpus = found_gpus() if given.devices == "GPU" else 0
    if given.devices == "GPU" and not gpus:
        line.error("--devices GPU needs a GPU, and TensorFlow finds none")
    with_torch = not (given.without_torch or given.brief or gpus or given.isa)  # whose kernels no mask is for
    if with_torch and not torch_peer.installed():
        print('PyTorch is not installed and left out: pip install "pipetrain[benchmarks]"', file=sys.stderr)
    options = Options(
        NAMES if "all" in (given.scheme or []) else given.scheme or DEFAULT,
        given.steps,
        given.rounds,
        with_torch and torch_peer.installed(),
        given.brief,
        given.isa,
        tuple(dict.fromkeys(given.jit_compile or ["auto"])),
        given.predict,
        gpus,
    )
    return given.network or [*COMPARED], options


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    names, options = chosen(arguments)
    if options.isa:
        instruction_sets.mask(options.isa)
    errors: dict[str, list[float]] = {}
    for name in names:
        network = COMPARED[name]
        rounds = measured(network, options)
        size = ", ".join(f"{key} {value}" for key, value in network.size.items())
        print(f"{name} ({size}), batch {network.batch_size}; medians of {options.rounds} rounds")
        columns = None if options.predict else -1
        lines = [line[:columns] for line in rows(rounds)]
        print(text_table(header(options.gpus > 0)[:columns], lines), end="\n\n", flush=True)
        for side in rounds[0]:
            error = prediction_error(rounds, side)
            if error is not None:
                errors.setdefault(side, []).append(abs(error))
    for side, found in errors.items():
        print(f"{side}: error of the prediction, median {statistics.median(found):.1%}, largest {max(found):.1%}")


if __name__ == "__main__":
    main()
