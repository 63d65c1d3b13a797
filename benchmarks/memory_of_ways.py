"""What each way to train holds at its fullest, all devices together, against what the plan says of it.

A stack of equal dense layers on four logical CPU devices of one process, with TensorFlow's kernels, whose memory
profiles know. Measured is the peak of TensorFlow's counting allocator (TF_CPU_ALLOCATOR_USE_BFC=1), which all logical
devices share, above what was there before: the model's own weights and a minibatch. Planned is the sum over the
devices, of whose pipelines no more work at once than there are processors. Each way is a process of its own, about 8
seconds.

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
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from pipetrain.cli.quiet import start_tensorflow
from pipetrain.logs import text_table
from pipetrain.plan.profile import mib
from pipetrain.schemes.grid import Grid
from pipetrain.schemes.options import CodedReduce, SpecTrain, name_of
from pipetrain.schemes.table import CODED, COPIED, DATA_PARALLEL, EVERY_NAME, GRID, SERVING

DEVICES, STEPS = 4, 8
MOMENTUM_ONLY = ("spike-compensation",)
WAYS: dict[str, Any] = {name: name for name in EVERY_NAME if name not in ("grid", "coded-reduce")}
WAYS |= {
    "grid 4x1": Grid(DEVICES, 1),
    "grid 2x2": Grid(2, 2),
    "coded-reduce 4": CodedReduce(4),
    "coded-reduce 2, 2": CodedReduce(2, depth=2),
    "spectrain/local": SpecTrain(horizon="local"),
    "spectrain/target": SpecTrain(horizon="target"),
}
OPTIMIZERS = ("adam", "momentum")


class Network(NamedTuple):
    """So many dense layers of this width, and the rows of a minibatch."""

    layers: int = 8
    width: int = 1024
    rows: int = 128


class Peaks(NamedTuple):
    """Bytes of all devices together, planned and measured, of the fullest device as planned, and of the weights."""

    planned: int
    fullest: int
    measured: int
    weights: int


def measure(way: str, network: Network, optimizer: str) -> Peaks:
    """Train in this process."""
    scheme = WAYS[way]
    devices = scheme.tree.workers if isinstance(scheme, CodedReduce) else DEVICES
    start_tensorflow(devices)
    import keras
    import tensorflow as tf

    import pipetrain

    layers = [keras.layers.Dense(network.width, "relu") for _ in range(network.layers)]
    model = keras.Sequential([keras.Input((network.width,)), *layers])
    x = tf.random.normal([network.rows, network.width])
    minibatches = tf.data.Dataset.from_tensors((x, x)).repeat(STEPS)
    pipe = pipetrain.PipelineModel(model, scheme=scheme)
    steps = keras.optimizers.Adam(1e-4) if optimizer == "adam" else keras.optimizers.SGD(1e-4, momentum=0.9)
    pipe.compile(steps, "mse", jit_compile=False)
    planned = planned_bytes(pipe, scheme, network.rows)
    gc.collect()
    before = tf.config.experimental.get_memory_info("CPU:0")["current"]
    pipe.fit(minibatches, verbose=0)  # traces, which takes memory too
    gc.collect()
    tf.config.experimental.reset_memory_stats("CPU:0")
    pipe.fit(minibatches, verbose=0)
    measured = tf.config.experimental.get_memory_info("CPU:0")["peak"] - before
    weights = sum(4 * each.shape.num_elements() for each in model.trainable_variables)
    return Peaks(*planned, measured, weights)


def planned_bytes(pipe: Any, scheme: Any, rows: int) -> tuple[int, int]:
    """Of all devices together, and of the fullest one."""
    if str(name_of(scheme)) not in COPIED:
        cut = pipe.partition(rows)
        return cut.together_bytes, cut.fullest_bytes
    from pipetrain.simulation.every_way import Chooser

    planner = pipe._strategy.planner
    devices = len(planner.layout.devices)
    whole, parts = planner.profile(rows, 1), planner.profile(rows, devices)
    training = planner.training
    way, cut = Chooser(whole, devices, planner._cluster, training, parts).of(scheme)
    waiting = cut.devices * cut.fullest_bytes - cut.together_bytes  # what is there only where a device works
    weights, host = sum(stage.weight_bytes for stage in cut.stages), 0
    if name_of(scheme) in (GRID, CODED):  # whose process keeps the whole model and its optimizer beside the devices
        host = (1 + training.slots) * weights
    if name_of(scheme) == DATA_PARALLEL:  # whose sum of gradients logical CPU devices share
        waiting += (devices - 1) * weights
    if name_of(scheme) == SERVING:  # what a device that waits has sent, servers have added
        waiting += max(devices - int(cut.processors), 0) * weights
    if name_of(scheme) == CODED:  # the weights as a message; a worker makes its own message while it works
        host += weights
        waiting += max(devices - int(cut.processors), 0) * weights
    return devices * way.memory_bytes - waiting + host, way.memory_bytes


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
    return way, mib(peaks.fullest), mib(peaks.planned), mib(peaks.measured), *of_weights, ratio


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--way", action="append", choices=WAYS, help="several times if wanted (default: all)")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adam")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
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
    header = ("way", "planned MiB a device", "in all", "measured", "planned / weights", "measured / weights", "ratio")
    print(text_table(header, rows))


if __name__ == "__main__":
    main()
