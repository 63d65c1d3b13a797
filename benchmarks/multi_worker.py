"""One process of TensorFlow's MultiWorkerMirroredStrategy, for ``data_parallel.py``: a loop written by hand.

Keras 3 does not train with this strategy. So every process has the network and its momenta as plain variables, computes
the gradients of its own rows, lets the strategy sum them over all processes, and updates.

The first process takes a number of steps for every line of standard input, and prints their milliseconds as JSON; the
others step with it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

RATE, MOMENTUM = 1e-3, 0.9


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", required=True)
    parser.add_argument("--rows", type=int, required=True, help="of each process")
    parser.add_argument("--addresses", nargs="+", required=True, help="host:port of every process")
    parser.add_argument("--task", type=int, required=True)
    parser.add_argument("--core", type=int, required=True)
    parser.add_argument("--pack", type=int, default=0, metavar="BYTES", help="0: the strategy's own")
    options = parser.parse_args()
    os.sched_setaffinity(0, [options.core])
    task = {"type": "worker", "index": options.task}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": options.addresses}, "task": task})
    import tensorflow as tf

    tf.config.threading.set_inter_op_parallelism_threads(3)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    packs = tf.distribute.experimental.CommunicationOptions(bytes_per_pack=options.pack)
    strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=packs)
    step = _step(strategy, options.network, options.rows, packs)
    step()
    print(json.dumps("ready"), flush=True)
    if options.task:
        while True:  # until the first one has gone
            step()
    for line in sys.stdin:
        taken_ms = []
        for _ in range(int(line)):
            start_s = time.perf_counter()
            step()
            taken_ms.append(1e3 * (time.perf_counter() - start_s))
        print(json.dumps(taken_ms), flush=True)
    os._exit(0)  # the others wait for a step


def _step(strategy, network, rows, packs):
    """A function that makes one step on all processes at once; its loss is waited for."""
    import keras
    import numpy as np
    import tensorflow as tf

    from benchmarks.data_parallel import made

    keras.utils.set_random_seed(0)
    model, x = made(network, rows, 1)
    y = np.zeros(rows, "int32")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    weights = [each.value for each in model.trainable_variables]
    momenta = [tf.Variable(tf.zeros_like(each), trainable=False) for each in weights]
    count = strategy.num_replicas_in_sync

    def replica(x, y):
        with tf.GradientTape() as tape:
            value = loss(y, model(x, training=True)) / count
        gradients = [tf.convert_to_tensor(each) for each in tape.gradient(value, weights)]
        sums = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, gradients, packs)
        for weight, momentum, gradient in zip(weights, momenta, sums, strict=True):
            momentum.assign(MOMENTUM * momentum - RATE * gradient)
            weight.assign_add(momentum)
        return value

    @tf.function
    def step(x, y):
        return strategy.run(replica, (x, y))

    x, y = tf.constant(x), tf.constant(y)
    return lambda: step(x, y).numpy()


if __name__ == "__main__":
    main()
