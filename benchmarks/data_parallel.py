"""Milliseconds of a step of ``all-reduce`` and ``parameter-server`` between emulated hosts, order by order.

Hosts are network namespaces of this machine, each with a worker on a core of its own, or with an equal part of the
cores where there are more hosts, and a port of limited bandwidth; the program runs on the first of them. All orders
train in one process, in turns of ``--steps`` minibatches, in a sequence that is drawn anew for each round, so that a
machine whose speed drifts is fair to all. Of each the median of all steps is printed but for the first and the last of
a turn (in the last no rows of a next one are sent), how many times as fast as TensorFlow's own order that is, how many
times as fast as it ``auto`` is, which is compared within rounds, with its quartiles, and what the simulator predicts by
profiles that are made in turns with the steps, the median over the rounds.
Orders that give one plan are trained once. With ``--auto`` one device alone and the scheme ``auto``, allowed to take
every inexact way, are beside them, and the column "auto against it" is of that. Beside them in turns: TensorFlow's
MultiWorkerMirroredStrategy, as a loop written by hand, with its own packs and with packs of 1 MiB. It is said what part
of the processors' time other machines took meanwhile: the less, the more the figures tell. Needs root, for the
namespaces.

For each --rate it takes as long as --rounds take, but no round begins after --seconds, ten minutes by default, counted
from the start of the processes for that rate. A round that has begun is finished, and one is always trained.

examples:
  python benchmarks/data_parallel.py
  python benchmarks/data_parallel.py --network vgg --hosts 3 --rate 100 --rate 400 --rounds 10
  python benchmarks/data_parallel.py --scheme all-reduce --order ibatch --order auto --rounds 30
  python benchmarks/data_parallel.py --scheme all-reduce --rate 20 --compression int8 --compression top-k
  python benchmarks/data_parallel.py --hosts 3 --rate 400 --topology ring --topology gossip --synchrony stale:1
  python benchmarks/data_parallel.py --scheme all-reduce --order auto --rate 20 --rows 512 --auto \\
      --compression top-k --synchrony local:8 --combined
  python benchmarks/data_parallel.py --part forward --scheme parameter-server --servers 1 --rows 16384
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.core_shares import joining
from benchmarks.emulated_hosts import ENVIRONMENT, PORT, ROOT, Hosts, emulated
from benchmarks.quartiles import quartiles
from benchmarks.steal import stolen_part, ticks
from benchmarks.step_times import ends_s
from pipetrain.cli.arguments import add_scheme_options
from pipetrain.logs import text_table
from pipetrain.schemes.options import ALLOWED, AnyScheme, Auto, with_options
from pipetrain.schemes.synchrony import join_steps
from pipetrain.schemes.table import SERVING, TRANSFERRING
from pipetrain.schemes.transfers.orders import AUTO, orders
from pipetrain.schemes.transfers.plan import Phase

if TYPE_CHECKING:
    import keras
    import numpy as np

    from pipetrain.schemes.transfers.plan import Plan

NARROW = 2  # the inputs of the dense network: its minibatches are sent over the same links
WORDS = 1000  # of made-up sentences, and of the Transformer's vocabulary
MOST_JOINED = 32  # steps of workers that join by a synchrony; a turn then has all of them
SINGLE = "single"
BESIDE: dict[str, AnyScheme] = {SINGLE: SINGLE, AUTO: Auto(allow=ALLOWED)}  # beside data parallelism
PEER, PEER_PORT = "MultiWorker", 2322
MEASURED = "measured"  # all that plans are made of: the peer's other processes, which would disturb that, may start
STARTED = "started"  # the peer's first process, whose number follows: it is to have its host's part of the cores
LESS = ("compression", "synchrony", "topology")  # options of ways to send less, or to wait less
REPEATED = ("scheme", "order", *LESS)  # options that may be given several times
PACKS = {"its own packs": 0, "1 MiB packs": 2**20}


def dense() -> keras.Model:
    """16 layers of 256 units."""
    import keras

    layers = [keras.layers.Dense(256, activation="relu") for _ in range(16)]
    return keras.Sequential([keras.Input((NARROW,)), *layers, keras.layers.Dense(10)])


def vgg() -> keras.Model:
    """VGG16 of a quarter of the width, whose dense layers have most of the weights."""
    import models

    return models.build("vgg16", (32, 32, 3), 10, width=16)


def transformer() -> keras.Model:
    """Three encoder layers of width 128."""
    import models

    return models.build("transformer", (20,), 10, depth=3, width=128, vocabulary=WORDS)


def wide() -> keras.Model:
    """8 layers of 1024 units."""
    import keras

    layers = [keras.layers.Dense(1024, activation="relu") for _ in range(8)]
    return keras.Sequential([keras.Input((NARROW,)), *layers, keras.layers.Dense(10)])


# With the rows of a worker.
NETWORKS = {"dense": (dense, 8192), "wide": (wide, 128), "vgg": (vgg, 256), "transformer": (transformer, 128)}


def made(network: str, rows: int, minibatches: int) -> tuple[keras.Model, np.ndarray]:
    """The network, and inputs of so many rows for each of the minibatches."""
    import numpy as np

    model = NETWORKS[network][0]()
    shape, rng = (minibatches * rows, *model.input_shape[1:]), np.random.default_rng(0)
    if network == "transformer":
        return model, rng.integers(0, WORDS, shape).astype("int32")
    return model, rng.normal(size=shape).astype("float32")


class Way:
    """One scheme with one order, and the milliseconds of its steps so far, turn by turn."""

    def __init__(self, options: argparse.Namespace, scheme: str, order: str, devices: list[str], **less: str) -> None:
        import keras

        import pipetrain

        self._is_at_own_pace = less.get("synchrony", "").startswith("asynchronous")
        self.scheme, self.order = scheme, "none" if self._is_at_own_pace else order
        self._rows = options.rows * options.hosts  # of a minibatch, which one worker at its own pace has all of
        self._synchrony, self._least_steps = less.get("synchrony"), options.steps
        model, self._x = made(options.network, self._rows, max(options.steps, 2 + MOST_JOINED))
        on = options.servers if scheme == SERVING else None
        how = BESIDE[scheme] if scheme in BESIDE else with_options(scheme, order=self.order, servers=on, **less)
        self._pm = pipetrain.PipelineModel(model, scheme=how, devices=devices[:1] if scheme == SINGLE else devices)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self._pm.compile(keras.optimizers.SGD(1e-3, momentum=0.9), loss)
        self.turns_ms: list[list[float]] = []

    def turn(self, counts: bool) -> None:
        """Train for a turn, which ``counts`` unless it is to warm up."""
        import numpy as np

        joined = self._join_steps
        x = self._x[: self._rows * (2 + joined * max(1, (self._least_steps - 2) // joined))]
        ends = ends_s(self._pm, x, np.zeros(len(x), "int32"), self._rows, shuffle=False)
        taken_ms = [1e3 * each for each in np.diff(ends)[:-1]]  # the last sends no rows ahead
        if self._is_pipeline:  # results of several minibatches come at once
            taken_ms = [1e3 * float(np.polyfit(range(len(ends)), ends, 1)[0])]
        elif self._is_at_own_pace or joined > 1:  # those of several workers do; one step of many joins
            taken_ms = [statistics.mean(taken_ms)]
        self.turns_ms += [taken_ms] if counts else []

    @property
    def _join_steps(self) -> int:
        """Steps after which workers join; of a pipeline as many as a turn may have."""
        taken = self._pm.choice and self._pm.choice.taken.told.get("synchrony")
        return MOST_JOINED if self._is_pipeline else join_steps(self._synchrony or taken)

    @property
    def _is_pipeline(self) -> bool:
        """Whether the scheme ``auto`` has taken one."""
        return self._pm.choice is not None and self._pm.choice.taken.is_pipeline

    @property
    def taken(self) -> str:
        """What the scheme ``auto`` has taken, once it has had a turn."""
        return f"takes {self._pm.choice.taken}"

    @property
    def plan(self) -> Plan:
        """That of its steps, once it has had a turn."""
        return self._pm._strategy.plan

    def predicted_ms(self, part: str) -> float | None:
        """What the simulator says of its plan; None of a part of a step, and of what is not known by its plan."""
        if part == "forward" or self._is_at_own_pace:
            return None
        if self.scheme in BESIDE:
            choice = self._pm._strategy.explanation(self._rows, self._pm._chosen_scheme).choice
            if self.scheme == SINGLE:
                return 1e3 * choice.one_s
            taken = str(self._pm.choice.taken)
            return next((1e3 * way.step_s for way in choice.ways if str(way) == taken), None)
        from pipetrain.simulation.profiled import mean_step_s

        setting, plan = self._pm._strategy._setting(self._rows), self.plan
        # What the simulator takes for the plan of the step that has made the gradients.
        if setting.is_stale and plan.late.packs:
            plan = plan._replace(pushes=plan.late, late=Phase())
        return 1e3 * mean_step_s(setting, plan)


class Peer:
    """The first process of MultiWorkerMirroredStrategy, and the milliseconds of its steps so far, turn by turn."""

    def __init__(self, packs: str, command: Sequence[str], steps: int) -> None:
        self.scheme, self.order, self._steps = PEER, packs, steps
        self.turns_ms: list[list[float]] = []
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=ENVIRONMENT)
        print(STARTED, self._process.pid, flush=True)
        self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def turn(self, counts: bool) -> None:
        """Take the steps of a turn, which ``counts`` unless it is to warm up."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{self._steps}\n")
        self._process.stdin.flush()
        taken_ms = self._answer()
        self.turns_ms += [taken_ms[1:-1]] if counts else []

    def predicted_ms(self, part: str) -> None:
        """Nothing is known of it."""

    def end(self) -> None:
        """End the process."""
        self._process.communicate(timeout=20)


def peer_command(options: argparse.Namespace, addresses: Sequence[str], task: int, packs: str) -> list[str]:
    """The command of one process of the peer."""
    port = PEER_PORT + [*PACKS].index(packs)
    cores = sorted(os.sched_getaffinity(0))
    where = ["--addresses", *[f"{each.partition(':')[0]}:{port}" for each in addresses], "--task", str(task)]
    what = [f"--network={options.network}", f"--rows={options.rows}", f"--pack={PACKS[packs]}"]
    what.append(f"--core={cores[task % len(cores)]}")
    return [sys.executable, str(ROOT / "benchmarks" / "multi_worker.py"), *where, *what]


def pull_and_forward() -> None:
    """Let steps end after the forward: TensorFlow leaves out what nothing needs, the backward."""
    from pipetrain.frontend import transfer_strategy

    class Forward(transfer_strategy.TransferStep):
        def _push(self, active: Any, made: Any) -> None:
            """No gradient is sent."""

    transfer_strategy.TransferStep = Forward  # type: ignore[misc]


def train(options: argparse.Namespace) -> None:
    """On the first host: every scheme and order in turns; prints what they took as JSON."""
    import tensorflow as tf

    start_s = time.perf_counter()
    tf.config.threading.set_inter_op_parallelism_threads(3)  # workers have as many
    import keras

    import pipetrain

    keras.utils.set_random_seed(0)  # once: it makes TensorFlow forget what it has made of functions
    devices = pipetrain.connect(options.addresses)
    if options.part == "forward":
        pull_and_forward()
    with ExitStack() as ends:
        ways: list[Any] = []
        names: list[list[str]] = []  # of the orders that give a way's plan
        for scheme in options.scheme or TRANSFERRING:
            for order in tried(scheme, options.order):
                way = Way(options, scheme, order, devices)
                way.turn(counts=False)
                same = [n for n, other in enumerate(ways) if _is_same(way, other)]
                if same:
                    names[same[0]].append(order)
                else:
                    ways.append(way)
                    names.append([order])
            for less in sending_less(options):
                way = Way(options, scheme, options.compressed_order, devices, **less)
                way.turn(counts=False)
                ways.append(way)
                names.append([f"{way.order} and {', '.join(less.values())}"])
        for scheme in BESIDE if options.auto else ():
            ways.append(Way(options, scheme, "-", devices))
            for _ in range(2):  # in the first it is not known yet after how many steps workers join
                ways[-1].turn(counts=False)
            names.append([ways[-1].taken if scheme == AUTO else ""])
        print(MEASURED, flush=True)
        for packs in PACKS if options.peer and options.part == "step" else ():
            peer = Peer(packs, peer_command(options, options.addresses, 0, packs), options.steps)
            ends.callback(peer.end)
            ways.append(peer)
            names.append([packs])
        since = ticks()
        predicted_ms = in_turns(ways, options, start_s)
        found = [
            (way.scheme, ", ".join(each), way.turns_ms, None if None in of_way else statistics.median(of_way))
            for way, each, of_way in zip(ways, names, zip(*predicted_ms, strict=True), strict=True)
        ]
        print(json.dumps([len(predicted_ms), stolen_part(since), found]), flush=True)


def in_turns(ways: Sequence[Any], options: argparse.Namespace, start_s: float) -> list[list[float | None]]:
    """Train by all ways in turns; gives of each round what the simulator says of each, by profiles made in that."""
    predicted_ms: list[list[float | None]] = []
    sequences = random.Random()  # another one in each process, where Keras' seeds are the same
    while len(predicted_ms) < options.rounds and (not predicted_ms or time.perf_counter() - start_s < options.seconds):
        for way in sequences.sample([*ways, None], len(ways) + 1):
            if way is not None:
                way.turn(counts=True)
                continue
            with TemporaryDirectory() as cache, patch.dict(os.environ, XDG_CACHE_HOME=cache):
                predicted_ms.append([each.predicted_ms(options.part) for each in ways])
    return predicted_ms


def tried(scheme: str, given: Sequence[str] | None) -> list[str]:
    """Of the orders that were given, or of all, those that the scheme has; TicTac's are orders of what is pulled."""
    serves = scheme == SERVING
    own = [order for order in orders(serves) if serves or order not in ("tic", "tac")]
    return [order for order in (*own, AUTO) if not given or order in given]


def sending_less(options: argparse.Namespace) -> list[dict[str, str]]:
    """The options of ways that send less or wait less, each alone, and compressions with synchronies if asked for."""
    alone = [{kind: value} for kind in LESS for value in getattr(options, kind) or ()]
    both = product(options.compression or (), options.synchrony or ()) if options.combined else ()
    return [*alone, *({"compression": compression, "synchrony": synchrony} for compression, synchrony in both)]


def _is_same(way: Way, other: Way) -> bool:
    return way.scheme == other.scheme and way.plan._replace(name="") == other.plan._replace(name="")


def table(found: list[Any]) -> str:
    """What the orders took, for people."""
    base = {scheme: _middle_ms(turns_ms) for scheme, names, turns_ms, _ in found if "none" in names.split(", ")}
    autos = {scheme: turns_ms for scheme, names, turns_ms, _ in found if AUTO in (scheme, *names.split(", "))}
    autos = {AUTO: autos[AUTO]} if AUTO in autos else autos
    rows, drift = [], _drift(found)
    for scheme, names, turns_ms, predicted_ms in found:
        ms = _middle_ms(turns_ms)
        against = f"{base[scheme] / ms:.2f}x" if scheme in base else "-"
        compared = [taken_ms for name, taken_ms in autos.items() if name == AUTO or scheme in (name, PEER)]
        auto = [_against(taken_ms, turns_ms) for taken_ms in compared]
        said = "-" if predicted_ms is None else f"{predicted_ms:.1f} ({predicted_ms / ms - 1:+.0%})"
        beside = "-" if predicted_ms is None or not drift else f"{predicted_ms / ms / drift - 1:+.0%}"
        rows.append((scheme, names, f"{ms:.1f}", against, ", ".join(auto) or "-", said, beside))
    header = ("scheme", "order", "ms", "against none", "auto against it", "simulated ms", "beside one device")
    return text_table(header if drift else header[:-1], [row if drift else row[:-1] for row in rows])


def _drift(found: list[Any]) -> float | None:
    """How many times as long as it took one device is simulated to take; None where it was not beside the others.

    The machine has another speed when a model is profiled than when it trains: what is simulated of other ways is set
    against theirs beside this.
    """
    alone = [predicted_ms / _middle_ms(turns_ms) for scheme, _, turns_ms, predicted_ms in found if scheme == SINGLE]
    return alone[0] if alone else None


def _middle_ms(turns_ms: list[list[float]]) -> float:
    return statistics.median(ms for turn_ms in turns_ms for ms in turn_ms)


def _against(taken_ms: list[list[float]], others_ms: list[list[float]]) -> str:
    """How many times as fast as others, the median of all rounds and its quartiles."""
    ratios = [statistics.median(b) / statistics.median(a) for a, b in zip(taken_ms, others_ms, strict=True)]
    low, middle, high = quartiles(ratios)
    return f"{middle:.2f} ({low:.2f} - {high:.2f})"


def measured(hosts: Hosts, options: argparse.Namespace, rate_mbit: int) -> list[Any]:
    """What all ways take at this bandwidth, all of whose processes are started for it."""
    hosts.limit(rate_mbit)
    alike = ("network", "rows", "rounds", "steps", "seconds", "part")
    given = [f"--{name}={value}" for name in alike for value in [getattr(options, name)]]
    given += [f"--{name}={value}" for name in REPEATED for value in getattr(options, name) or ()]
    given += [f"--{name}" for name in ("peer", "auto", "combined") if getattr(options, name)]
    given += [f"--hosts={options.hosts}"]
    given += [f"--compressed-order={options.compressed_order}"]
    given += [f"--servers={options.servers}"] if options.servers else []
    addresses = [f"{address}:{PORT}" for address in hosts.addresses]
    command = hosts.on(0, sys.executable, __file__, *given, "--addresses", *addresses)
    with (
        TemporaryDirectory() as cache,  # else the profile would be that of another day
        subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env={**ENVIRONMENT, "XDG_CACHE_HOME": cache}
        ) as first,
        ExitStack() as ends,
    ):
        ends.callback(first.kill)
        assert first.stdout is not None
        for line in first.stdout:
            if line.startswith(STARTED) and hosts.groups[0]:
                hosts.groups[0].write_text(line.split()[1], encoding="ascii")
            if line.strip() == MEASURED and options.peer and options.part == "step":
                _start_others(hosts, options, ends)
        assert first.wait() == 0
    found: list[Any] = json.loads(line)
    return found


def _start_others(hosts: Hosts, options: argparse.Namespace, ends: ExitStack) -> None:
    """Start the peer's processes on all hosts but the first, until the end."""
    for task, packs in [(task, packs) for task in range(1, options.hosts) for packs in PACKS]:
        command = joining(hosts.groups[task], hosts.on(task, *peer_command(options, hosts.addresses, task, packs)))
        other = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=ENVIRONMENT)
        ends.callback(other.wait)
        ends.callback(other.kill)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", choices=NETWORKS, default="dense", help="(default: %(default)s)")
    parser.add_argument("--hosts", type=int, default=2, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--rate", type=int, action="append", metavar="MBIT", help="of each port (default: 200)")
    parser.add_argument("--rows", type=int, metavar="N", help="of each worker (default: the network's)")
    parser.add_argument("--rounds", type=int, default=10, metavar="N", help="(default: %(default)s)")
    parser.add_argument(
        "--steps", type=int, default=7, metavar="N", help="of a turn, the first and the last not counted (default: 7)"
    )
    parser.add_argument(
        "--seconds", type=float, default=600, metavar="S", help="after which no round begins (default: 600)"
    )
    parser.add_argument("--scheme", choices=TRANSFERRING, action="append", help="(default: both)")
    parser.add_argument("--order", action="append", help="(default: all)")
    parser.add_argument(
        "--compression", action="append", metavar="NAME[:VALUE]", help="of gradients, beside the orders without any"
    )
    parser.add_argument("--synchrony", action="append", metavar="NAME[:NUMBER]", help="likewise")
    parser.add_argument("--topology", action="append", metavar="NAME[:GRAPH]", help="likewise")
    parser.add_argument("--combined", action="store_true", help="each of the compressions with each synchrony, too")
    parser.add_argument("--auto", action="store_true", help="one device, and auto with all inexact ways, beside them")
    parser.add_argument(
        "--compressed-order", default="layerwise", metavar="NAME", help="of transfers with these (default: layerwise)"
    )
    parser.add_argument(
        "--part", choices=("step", "forward"), default="step", help="whole steps (default), or pull and forward"
    )
    parser.add_argument("--peer", action="store_true", help="MultiWorkerMirroredStrategy beside them")
    parser.add_argument("--addresses", nargs="*", help=argparse.SUPPRESS)  # of the workers: on the first host
    add_scheme_options(parser, ["servers"])
    options = parser.parse_args()
    long = [each for each in options.synchrony or () if join_steps(each) > MOST_JOINED]
    if long or (options.combined and not (options.compression and options.synchrony)):
        given = f"--synchrony {long[0]}" if long else "--combined without --compression and --synchrony"
        parser.error(f"a turn has {MOST_JOINED} steps at most, and --combined needs both: not {given}")
    options.rows = options.rows or NETWORKS[options.network][1]
    if options.steps < 3:
        parser.error(
            f"of a turn the first and the last step are not counted: --steps must be 3 at least, not {options.steps}"
        )
    if options.addresses:
        train(options)
        return
    with emulated(options.hosts) as hosts:
        for rate_mbit in options.rate or [200]:
            rounds, stolen, found = measured(hosts, options, rate_mbit)
            of = f"{options.network}, {options.rows} rows a worker, {options.hosts} hosts, {rate_mbit} Mb/s"
            print(f"{of}, {rounds} rounds of {options.steps} steps, {stolen:.0%} of the time stolen")
            print(table(found), flush=True)


if __name__ == "__main__":
    main()
