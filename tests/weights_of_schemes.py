"""Digests of the weights that every scheme trains: to compare two states of the project bit by bit.

A dense and a convolutional network, 25 minibatches of 16 rows each, every scheme and some of their options. Run by

    PYTHONPATH=CHECKOUT python tests/weights_of_schemes.py > DIGESTS

for two checkouts on one machine; the outputs are equal if the weights are.
"""

from __future__ import annotations

import hashlib
import os

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
]


def dense():
    """Six layers, cut at any."""
    return keras.Sequential([keras.Input((16,)), *[L.Dense(24, activation="tanh") for _ in range(5)], L.Dense(4)])


def convolutional():
    """With state and draws."""
    layers = [L.Conv2D(8, 3, padding="same", use_bias=False), L.BatchNormalization(), L.ReLU(), L.MaxPooling2D()]
    layers += [L.Conv2D(8, 3, activation="relu"), L.Flatten(), L.Dropout(0.2), L.Dense(4)]
    return keras.Sequential([keras.Input((12, 12, 3)), *layers])


def placed(model, scheme, options):
    """The arguments that place the model: fixed cuts, so that no profile decides."""
    if scheme in ("single", "data-parallel"):
        return {} if scheme == "single" else {"devices": ("CPU:0", "CPU:1")}
    ends = [layer.name for layer in model.layers if layer.weights or layer.name.startswith("max")][:-1]
    cuts = len(options.get("replicas", range(4))) - 1
    return {"cuts": tuple(ends[n * len(ends) // cuts] for n in range(cuts)), **options}


def digest(make, scheme, options):
    """Of the weights after one epoch, and its loss."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(1)
    model, rng = make(), np.random.default_rng(0)
    x = rng.normal(size=(STEPS * ROWS, *model.inputs[0].shape[1:])).astype("float32")
    y = rng.integers(0, 4, size=STEPS * ROWS)
    options = dict(options)
    name = options.pop("optimizer", None)
    pm = pipetrain.PipelineModel(model, scheme=scheme, **placed(model, scheme, options))
    adaptive = {"adam": keras.optimizers.Adam, "lion": keras.optimizers.Lion}
    optimizer = adaptive[name](1e-3) if name else keras.optimizers.SGD(0.02, momentum=0.9)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    pm.compile(optimizer, loss=loss, metrics=["accuracy"])
    history = pm.fit(x, y, batch_size=ROWS, verbose=0).history
    weights = b"".join(np.ascontiguousarray(each).tobytes() for each in pm.get_weights())
    return f"{hashlib.sha256(weights).hexdigest()[:16]} loss {history['loss'][0]:.6f}"


if __name__ == "__main__":
    for network in (dense, convolutional):
        for name, given in RUNS:
            print(network.__name__, name, given, digest(network, name, given), flush=True)
