"""Trains with messages that are less; prints, as JSON, what a worker sent in a step, and what was planned.

``python compressed_messages.py OPTION NAMES ADDRESS ...``, the names in one argument, with commas between: of
all-reduce's ``compression`` or ``topology``; or of ``compression`` also ``SCHEME/NAME``, what crosses the cut of a
pipeline, of which both stages count. Or of ``replica_compression``, what three devices of a pipeline send, two of
which have most of its weights.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

WIDTH, LAYERS, ROWS, STEPS = 1024, 4, 16, 8
# What else a `fit` sends differs by 200 KB from one to the next.
CROSSING_ROWS, FEW, MANY = 1024, 5, 41
SENT = "/sys/class/net/eth0/statistics/tx_bytes"


def network():
    import keras

    layers = [keras.layers.Dense(WIDTH, "relu", name=f"d{n}") for n in range(LAYERS)]
    return keras.Sequential([keras.Input((2,)), *layers, keras.layers.Dense(5)])


def sent_by(devices):
    """All that these devices' hosts have sent by now."""
    import tensorflow as tf

    found = 0
    for device in devices:
        with tf.device(device):
            found += int(tf.io.read_file(SENT).numpy())
    return found


def trained(pm, rows, steps, **settings):
    import keras
    import networks

    if not pm.compiled:
        pm.compile(keras.optimizers.SGD(0.001), networks.crossentropy(), jit_compile=False)
    x = np.random.default_rng(0).normal(size=(rows * steps, 2)).astype("float32")
    pm.fit(x, np.zeros(len(x)), batch_size=rows, verbose=0, **settings)


def of_copies(option, name, devices):
    import inside
    import keras

    import pipetrain
    from pipetrain.schemes.synchrony import topology_of
    from pipetrain.simulation.profiled import sent_times

    class Sent(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            sent.append(sent_by(devices[:1]))

    model, sent = network(), []
    way = pipetrain.AllReduce(order="layerwise", **{option: name})
    pm = pipetrain.PipelineModel(model, scheme=way, devices=devices)
    trained(pm, ROWS, STEPS, callbacks=[Sent()])
    planned = inside.strategy(pm)._gradient_bytes()
    if planned is None:
        times, _ = sent_times(len(devices), topology_of(way.topology))
        planned = [times * 4 * int(np.prod(variable.shape)) for variable in model.trainable_variables]
    return {"planned": int(sum(planned)), "sent": np.diff(sent)[2:].tolist()}


def of_cuts(scheme, compression, devices):
    import pipetrain
    from pipetrain.schemes.compression import compression_of
    from pipetrain.schemes.options import with_options

    pm = pipetrain.PipelineModel(
        network(), scheme=with_options(scheme, compression=compression), devices=devices, cuts=("d1",)
    )
    planned = 2 * pm.partition(CROSSING_ROWS).stages[0].crossing_bytes(compression_of(compression))
    return {"planned": planned, "sent": [more_sent(pm, CROSSING_ROWS, devices)]}


def of_replicas(compression, devices):
    import pipetrain
    from pipetrain.schemes.options import with_options

    way = with_options("1f1b", replica_compression=compression)
    pm = pipetrain.PipelineModel(network(), scheme=way, devices=devices, cuts=("d3",), replicas=(2, 1), microbatches=1)
    return {"planned": pm.partition(ROWS).sent_bytes, "sent": [more_sent(pm, ROWS, devices)]}


def more_sent(pm, rows, devices):
    """The bytes of a step: how much more is sent in more steps, both numbers of which were trained on before."""
    sent = []
    for steps in (FEW, MANY, FEW, MANY):
        before = sent_by(devices)
        trained(pm, rows, steps)
        sent.append(sent_by(devices) - before)
    return (sent[3] - sent[2]) / (MANY - FEW)


def main(option, names, *addresses):
    import pipetrain

    devices, found = pipetrain.connect(addresses), {}
    for each in names.split(","):
        scheme, _, name = each.rpartition("/")
        if option == "replica_compression":
            found[each] = of_replicas(name, devices)
        else:
            found[each] = of_cuts(scheme, name, devices) if scheme else of_copies(option, name, devices)
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
