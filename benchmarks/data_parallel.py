"""Milliseconds of a step of ``all-reduce`` and ``parameter-server`` between emulated hosts, order by order.

Hosts are network namespaces of this machine, each with a worker on a core of its own and a port of limited bandwidth;
the program runs on the first of them. All orders train in turns in one process, a few minibatches each, so that a
machine whose speed drifts is fair to all; the median of all steps but the first of each turn is printed, and how many
times as fast as TensorFlow's own order that is. Needs root, for the namespaces.

examples:
  python benchmarks/data_parallel.py
  python benchmarks/data_parallel.py --network vgg --hosts 3 --rate 100 --rate 400 --rounds 10
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.emulated_hosts import ENVIRONMENT, PORT, ROOT, emulated
from pipetrain.plan.text_table import text_table
from pipetrain.schemes.table import TRANSFERRING
from pipetrain.schemes.transfers.orders import AUTO, orders

if TYPE_CHECKING:
    import keras

STEPS = 6  # of a turn
NARROW = 16  # the inputs of the dense network: its minibatches are sent over the same links


def dense(rows: int) -> tuple[keras.Model, tuple[int, ...]]:
    """16 layers of 256 units."""
    import keras

    layers = [keras.layers.Dense(256, activation="relu") for _ in range(16)]
    return keras.Sequential([keras.Input((NARROW,)), *layers, keras.layers.Dense(10)]), (rows, NARROW)


def vgg(rows: int) -> tuple[keras.Model, tuple[int, ...]]:
    """VGG16 of a quarter of the width, whose dense layers have most of the weights."""
    import models

    return models.build("vgg16", (32, 32, 3), 10, width=16), (rows, 32, 32, 3)


NETWORKS = {"dense": (dense, 4096), "vgg": (vgg, 64)}


class Way:
    """One scheme with one order, and the milliseconds of its steps so far."""

    def __init__(self, network: str, scheme: str, order: str, devices: list[str]) -> None:
        import keras
        import numpy as np

        import pipetrain

        make, rows = NETWORKS[network]
        keras.utils.set_random_seed(0)
        model, shape = make(rows * len(devices))
        self.scheme, self.order, self._rows = scheme, order, shape[0]
        self._x = np.random.default_rng(0).normal(size=(STEPS * shape[0], *shape[1:])).astype("float32")
        self._pm = pipetrain.PipelineModel(model, scheme=scheme, order=order, devices=devices)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self._pm.compile(keras.optimizers.SGD(1e-3, momentum=0.9), loss)
        self.ms: list[float] = []

    def turn(self, counts: bool) -> None:
        """Train for a turn, which ``counts`` unless it is to warm up."""
        import keras
        import numpy as np

        ends: list[float] = []
        clock = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: ends.append(time.perf_counter()))
        self._pm.fit(
            self._x, np.zeros(len(self._x), "int32"), batch_size=self._rows, verbose=0, shuffle=False, callbacks=[clock]
        )
        self.ms += [1e3 * each for each in np.diff(ends)] if counts else []

    @property
    def plan(self) -> str:
        """The name of the plan."""
        return str(self._pm._strategy.plan.name)


def train(network: str, rounds: int, addresses: list[str]) -> None:
    """On the first host: every scheme and order in turns; prints what they took as JSON."""
    import tensorflow as tf

    tf.config.threading.set_inter_op_parallelism_threads(3)  # workers have as many; with one nothing overlaps
    import pipetrain

    devices = pipetrain.connect(addresses)
    ways = [
        Way(network, scheme, order, devices)
        for scheme in TRANSFERRING
        for order in (*orders(scheme == "parameter-server"), AUTO)
    ]
    for number in range(rounds + 1):
        for way in ways:
            way.turn(counts=number > 0)
    found = [(way.scheme, way.order, way.plan, statistics.median(way.ms)) for way in ways]
    print(json.dumps(found), flush=True)


def table(found: list[Any]) -> str:
    """What the orders took, for people."""
    base = {scheme: ms for scheme, order, _, ms in found if order == "none"}
    rows = [(scheme, order, plan, f"{ms:.1f}", f"{base[scheme] / ms:.2f}x") for scheme, order, plan, ms in found]
    return text_table(("scheme", "order", "plan", "ms", "against none"), rows)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", choices=NETWORKS, default="dense")
    parser.add_argument("--hosts", type=int, default=2, metavar="N")
    parser.add_argument("--rate", type=int, action="append", metavar="MBIT", help="of each port (default: 200)")
    parser.add_argument("--rounds", type=int, default=10, metavar="N")
    parser.add_argument("--addresses", nargs="*", help=argparse.SUPPRESS)  # of the workers: on the first host
    options = parser.parse_args()
    if options.addresses:
        train(options.network, options.rounds, options.addresses)
        return
    with emulated(options.hosts) as hosts:
        for rate_mbit in options.rate or [200]:
            hosts.limit(rate_mbit)
            what = ["--network", options.network, "--rounds", str(options.rounds)]
            addresses = [f"{address}:{PORT}" for address in hosts.addresses]
            command = hosts.on(0, sys.executable, __file__, *what, "--addresses", *addresses)
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT, env=ENVIRONMENT)
            print(f"{options.network}, {options.hosts} hosts, {rate_mbit} Mb/s")
            print(table(json.loads(done.stdout.splitlines()[-1])), flush=True)


if __name__ == "__main__":
    main()
