"""Digests of the weights that every scheme trains: to compare two states of the project bit by bit.

A dense and a convolutional network, 25 minibatches of 16 rows each, every scheme and some of their options. Run by

    PYTHONPATH=CHECKOUT python tests/weights_of_schemes.py [workers] [SCHEME ...] > DIGESTS

for two checkouts on one machine; the outputs are equal if the weights are. With ``workers``, two processes train.
"""

from __future__ import annotations

import hashlib
import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import numpy as np

import pipetrain

pipetrain.set_cpu_devices(4)
import keras  # noqa: E402

L = keras.layers
STEPS, ROWS = 25, 16
RUNS = [
    *[(scheme, {}) for scheme in ("single", "data-parallel", "vanilla", "weight-stashing", "vertical-sync")],
    ("spectrain", {}),
    ("spectrain", {"horizon": "local"}),
    ("spectrain", {"horizon": "fitted"}),
    *[("spectrain", {"horizon": "target", "microbatches": count}) for count in (1, 4)],
    ("2bw", {"horizon": 1.5}),
    ("spectrain", {"optimizer": "lion"}),
    *[(scheme, {}) for scheme in ("spike-compensation", "2bw", "gpipe", "1f1b")],
    ("vanilla", {"rescale_steps": 20}),
    *[(scheme, {"recompute": True}) for scheme in ("spectrain", "gpipe")],
    *[(scheme, {"optimizer": "adam"}) for scheme in ("spectrain", "1f1b")],
    *[(scheme, {"replicas": (2, 1, 1)}) for scheme in ("spectrain", "1f1b")],
    *[(scheme, {"replicas": (1, 3, 2)}) for scheme in ("vanilla", "gpipe")],
    *[(scheme, {"network": "tied"}) for scheme in ("vanilla", "spectrain", "weight-stashing", "1f1b", "zb-v")],
    *[("1f1b", {"optimizer": name}) for name in ("clipped", "scaled", "scaled by its loss")],
    ("spectrain", {"optimizer": "scaled"}),
    ("1f1b", {"replicas": (2, 1, 1), "optimizer": "clipped"}),
    *[(scheme, {}) for scheme in ("interleaved", "looped-bfs", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min")],
    *[(scheme, {"recompute": True}) for scheme in ("1f1b", "zb-v")],
    *[(scheme, {"jit_compile": True}) for scheme in ("1f1b", "vanilla")],
    *[(scheme, {"rows": 6}) for scheme in ("1f1b", "zb-h1", "vanilla")],
    *[(scheme, {"workers": True}) for scheme in ("1f1b", "vanilla")],
]


def dense():
    """Six layers, cut at any."""
    return keras.Sequential([keras.Input((16,)), *[L.Dense(24, activation="tanh") for _ in range(5)], L.Dense(4)])


def convolutional():
    """With state and draws."""
    layers = [L.Conv2D(8, 3, padding="same", use_bias=False), L.BatchNormalization(), L.ReLU(), L.MaxPooling2D()]
    layers += [L.Conv2D(8, 3, activation="relu"), L.Flatten(), L.Dropout(0.2), L.Dense(4)]
    return keras.Sequential([keras.Input((12, 12, 3)), *layers])


def tied():
    """A layer that two stages have, and penalties."""
    x = keras.Input((16,))
    twice = L.Dense(16, activation="tanh", name="twice")
    y = twice(L.Dense(16, activation="tanh", kernel_regularizer="l2", name="a")(x))
    y = twice(L.Dense(16, activation="tanh", name="c")(L.Dense(16, activation="tanh", name="b")(y)))
    return keras.Model(x, L.Dense(4, kernel_regularizer="l2", name="d")(y))


NETWORKS = {"dense": dense, "convolutional": convolutional, "tied": tied}
OPTIMIZERS = {
    "adam": lambda: keras.optimizers.Adam(1e-3),
    "lion": lambda: keras.optimizers.Lion(1e-3),
    "clipped": lambda: keras.optimizers.SGD(0.02, momentum=0.9, global_clipnorm=0.1),
    "scaled": lambda: keras.optimizers.SGD(0.02, momentum=0.9, loss_scale_factor=64.0),
    "scaled by its loss": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.02, momentum=0.9), dynamic_growth_steps=4
    ),
}


def placed(model, scheme, options):
    """The arguments that place the model: fixed cuts, so that no profile decides."""
    if scheme in ("single", "data-parallel"):
        return {} if scheme == "single" else {"devices": ("CPU:0", "CPU:1")}
    ends = [layer.name for layer in model.layers if layer.weights or layer.name.startswith("max")][:-1]
    cuts = len(options.get("replicas", range(2 if "devices" in options else 4))) - 1
    return {"cuts": tuple(ends[n * len(ends) // cuts] for n in range(cuts)), **options}


def digest(make, scheme, options):
    """Of the weights after one epoch, and its loss."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(1)
    model, rng, options = make(), np.random.default_rng(0), dict(options)
    rows, jit_compile = options.pop("rows", ROWS), options.pop("jit_compile", "auto")
    x = rng.normal(size=(STEPS * rows + rows // 2, *model.inputs[0].shape[1:])).astype("float32")
    y = rng.integers(0, 4, size=len(x))
    optimizer = OPTIMIZERS.get(options.pop("optimizer", ""), lambda: keras.optimizers.SGD(0.02, momentum=0.9))()
    pm = pipetrain.PipelineModel(model, scheme=scheme, **placed(model, scheme, options))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    pm.compile(optimizer, loss=loss, metrics=["accuracy"], jit_compile=jit_compile)
    history = pm.fit(x, y, batch_size=rows, verbose=0).history
    weights = b"".join(np.ascontiguousarray(each).tobytes() for each in pm.get_weights())
    return f"{hashlib.sha256(weights).hexdigest()[:16]} loss {history['loss'][0]:.6f}"


def runs(names):
    """Every run of these schemes, all where none is named."""
    for network in ("dense", "convolutional"):
        for name, given in RUNS:
            options = dict(given)
            made = options.pop("network", network)
            if (not names or name in names) and (network == "dense" or made == network):
                yield made, name, options


if __name__ == "__main__":
    wanted = [each for each in sys.argv[1:] if each != "workers"]
    workers = pipetrain.LocalWorkers(2) if "workers" in sys.argv else None
    devices = pipetrain.connect(workers.addresses) if workers else ()
    for network, name, given in runs(wanted):
        options = dict(given)
        try:
            if options.pop("workers", False) != bool(devices):
                continue
            options |= {"devices": devices} if devices else {}
            found = digest(NETWORKS[network], name, options)
        except ValueError as error:
            found = f"refused: {str(error)[:60]}"
        print(network, name, given, found, flush=True)
    if workers is not None:
        workers.__exit__(None, None, None)
