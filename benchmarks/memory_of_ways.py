"""What a device holds at its fullest in each way to train, against what the plan says of it.

A stack of equal dense layers on four workers of this machine, each a process with one CPU device. Measured is the peak
of each worker's counting allocator (TF_CPU_ALLOCATOR_USE_BFC=1); of the worker that holds most it is compared with the
plan. Ways that train in one process, single and data-parallel, are measured there, above the model's own weights: all
devices together, which share the sum of the gradients. Kernels are TensorFlow's, whose memory profiles know. Orders of
transfers are measured one by one: trials of several, by which the default is found, would leave the allocator chunks
that are larger than what is put into them later. A way takes about 20 seconds.

examples:
  python benchmarks/memory_of_ways.py
  python benchmarks/memory_of_ways.py --way single --way gpipe --layers 16 --width 256 --rows 512 --optimizer momentum
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from pipetrain.cli.environment import start_tensorflow
from pipetrain.logs import text_table
from pipetrain.plan.profile import mib
from pipetrain.schemes.grid import Grid
from pipetrain.schemes.options import AllReduce, CodedReduce, ParameterServer, SpecTrain, name_of
from pipetrain.schemes.table import COPIED, DATA_PARALLEL, EVERY_NAME, SERVING, TRANSFERRING
from pipetrain.schemes.transfers.orders import orders

DEVICES, STEPS = 4, 32
MOMENTUM_ONLY = ("spike-compensation",)
WAYS: dict[str, Any] = {name: name for name in EVERY_NAME if name not in ("grid", "coded-reduce", *TRANSFERRING)}
WAYS |= {f"all-reduce/{order}": AllReduce(order=order) for order in orders(serves=False)}
WAYS |= {f"{SERVING}/{order}": ParameterServer(order=order) for order in orders(serves=True)}
WAYS |= {
    "grid 4x1": Grid(DEVICES, 1),
    "grid 2x2": Grid(2, 2),
    "coded-reduce 4": CodedReduce(4),
    "coded-reduce 2, 2": CodedReduce(2, depth=2),
    "spectrain/local": SpecTrain(horizon="local"),
    "spectrain/target": SpecTrain(horizon="target"),
}
OPTIMIZERS = ("adam", "momentum")
SINGLE = "single"
HERE = (SINGLE, DATA_PARALLEL)  # which train in one process
HOLDS = "HOLDS"  # begins what a worker says of its memory


class Network(NamedTuple):
    """So many dense layers of this width, and the rows of a minibatch."""

    layers: int = 8
    width: int = 1024
    rows: int = 128


class Peaks(NamedTuple):
    """Bytes of the fullest device, planned and measured, and of the weights."""

    planned: int
    measured: int
    weights: int


def measure(way: str, network: Network, optimizer: str) -> Peaks:
    """Train with this process as the one that calls ``fit``."""
    scheme = WAYS[way]
    if name_of(scheme) in HERE:
        return _here(scheme, network, optimizer)
    with workers(scheme.tree.workers if isinstance(scheme, CodedReduce) else DEVICES) as (addresses, peaks):
        start_tensorflow(1)
        import pipetrain

        devices = pipetrain.connect(addresses)
        before = [now for now, _ in peaks()]
        pipe, minibatches = _pipe(scheme, network, optimizer, devices)
        planned = planned_bytes(pipe, scheme, network.rows)
        pipe.fit(minibatches, verbose=0)  # traces, which takes memory too
        gc.collect()
        peaks()
        pipe.fit(minibatches, verbose=0)
        measured = max(peak - base for (_, peak), base in zip(peaks(), before, strict=True))
        return Peaks(planned, measured, _weights_bytes(pipe))


def _here(scheme: Any, network: Network, optimizer: str) -> Peaks:
    """A way of one process, whose logical CPU devices share one allocator."""
    devices = 1 if name_of(scheme) == SINGLE else DEVICES
    start_tensorflow(devices)
    import tensorflow as tf

    pipe, minibatches = _pipe(scheme, network, optimizer, None)
    planned = planned_bytes(pipe, scheme, network.rows)
    gc.collect()
    before = tf.config.experimental.get_memory_info("CPU:0")["current"]
    pipe.fit(minibatches, verbose=0)
    gc.collect()
    tf.config.experimental.reset_memory_stats("CPU:0")
    pipe.fit(minibatches, verbose=0)
    measured = tf.config.experimental.get_memory_info("CPU:0")["peak"] - before
    weights = _weights_bytes(pipe)
    return Peaks(planned * devices - (devices - 1) * weights, measured, weights)


def _pipe(scheme: Any, network: Network, optimizer: str, devices: Sequence[str] | None) -> tuple[Any, Any]:
    """A compiled model and minibatches."""
    import keras
    import tensorflow as tf

    import pipetrain

    layers = [keras.layers.Dense(network.width, "relu") for _ in range(network.layers)]
    model = keras.Sequential([keras.Input((network.width,)), *layers])
    x = tf.random.normal([network.rows, network.width])
    pipe = pipetrain.PipelineModel(model, scheme=scheme, devices=devices)
    steps = keras.optimizers.Adam(1e-4) if optimizer == "adam" else keras.optimizers.SGD(1e-4, momentum=0.9)
    pipe.compile(steps, "mse", jit_compile=False)
    return pipe, tf.data.Dataset.from_tensors((x, x)).repeat(STEPS)


def _weights_bytes(pipe: Any) -> int:
    return sum(4 * each.shape.num_elements() for each in pipe.model.trainable_variables)


def planned_bytes(pipe: Any, scheme: Any, rows: int) -> int:
    """Of the fullest device."""
    if str(name_of(scheme)) not in COPIED:
        return int(pipe.partition(rows).fullest_bytes)
    from pipetrain.simulation.every_way import Chooser

    planner = pipe._strategy.planner
    devices = len(planner.layout.devices)
    whole, parts = planner.profile(rows, 1), planner.profile(rows, devices)
    way, _ = Chooser(whole, devices, planner._cluster, planner.training, parts).of(scheme)
    return way.memory_bytes


@contextmanager
def workers(count: int) -> Iterator[tuple[list[str], Any]]:
    """Workers' addresses, and a function: what each holds now and held at most since it was last asked."""
    command, quiet = [sys.executable, __file__, "--worker"], subprocess.DEVNULL
    started = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=quiet, text=True)
        for _ in range(count)
    ]

    def line_of(worker: Any, start: str) -> str:
        return next(line for line in worker.stdout if line.startswith(start))

    def peaks() -> list[tuple[int, ...]]:
        found = []
        for worker in started:
            worker.stdin.write("\n")
            worker.stdin.flush()
            found.append(tuple(map(int, line_of(worker, HOLDS).split()[1:])))
        return found

    try:
        yield [line_of(worker, "Worker at").split()[2].rstrip(",") for worker in started], peaks
    finally:
        for worker in started:
            worker.kill()
            worker.wait()


def serve_and_tell() -> None:
    """A worker that says for each line of standard input what it holds, and then counts its peak anew."""
    from pipetrain.cluster.server import Serving, serve

    def tell() -> None:
        import tensorflow as tf

        for _ in sys.stdin:
            info = tf.config.experimental.get_memory_info("CPU:0")
            print(HOLDS, info["current"], info["peak"], flush=True)
            tf.config.experimental.reset_memory_stats("CPU:0")
        os._exit(0)

    threading.Thread(target=tell, daemon=True).start()
    serve(Serving(port=0))


def apart(way: str, network: Network, optimizer: str) -> Peaks:
    """The same in a process of its own."""
    command = [sys.executable, __file__, "--one", json.dumps([way, network, optimizer])]
    environment = {**os.environ, "TF_CPU_ALLOCATOR_USE_BFC": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{way}: {done.stderr}")
    return Peaks(*json.loads(done.stdout.splitlines()[-1]))


def row_of(way: str, peaks: Peaks) -> tuple[str, ...]:
    """A row of the table."""
    of_weights = (f"{each / peaks.weights:.2f}" for each in (peaks.planned, peaks.measured))
    ratio = f"{peaks.measured / peaks.planned:.2f}"
    return way, mib(peaks.planned), mib(peaks.measured), *of_weights, ratio


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--way", action="append", choices=WAYS, help="several times if wanted (default: all)")
    parser.add_argument("--layers", type=int, default=8, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--width", type=int, default=1024, metavar="N", help="of each layer (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=128, metavar="N", help="of a minibatch (default: %(default)s)")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adam", help="(default: %(default)s)")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        serve_and_tell()
    if options.one:
        way, network, optimizer = json.loads(options.one)
        print(json.dumps(measure(way, Network(*network), optimizer)))
        return
    network = Network(options.layers, options.width, options.rows)
    ways = options.way or [way for way in WAYS if options.optimizer == "momentum" or way not in MOMENTUM_ONLY]
    rows = []
    for way in ways:
        rows.append(row_of(way, apart(way, network, options.optimizer)))
        print(*rows[-1], file=sys.stderr, flush=True)
    header = ("way", "planned MiB", "measured", "planned / weights", "measured / weights", "ratio")
    print(text_table(header, rows))


if __name__ == "__main__":
    main()
