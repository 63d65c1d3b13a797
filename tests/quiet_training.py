"""A program that trains in every way with verbose=0, and prints what is written on the standard streams meanwhile."""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import contextmanager

import numpy as np

import pipetrain

WAYS = {
    "single": {},
    "data-parallel": {},
    "vanilla": {"stages": 2},
    "spectrain": {
        "stages": 3,
        "scheme": pipetrain.SpecTrain(horizon="target"),
        "microbatches": 1,
    },  # whose momentum is stretched
    "2bw": {"stages": 2},
    "1f1b": {"stages": 2},
    "zb-h1": {"stages": 2},
    "all-reduce": {},
    "parameter-server": {},
    "coded-reduce": {"scheme": pipetrain.CodedReduce(2)},
    "grid": {},
    "auto": {},
}


@contextmanager
def captured(path):
    """Meanwhile what anybody writes on the standard streams goes to the file."""
    sys.stdout.flush(), sys.stderr.flush()
    kept = os.dup(1), os.dup(2)
    with open(path, "ab", buffering=0) as file:
        os.dup2(file.fileno(), 1), os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        os.dup2(kept[0], 1), os.dup2(kept[1], 2)


def main(ways):
    pipetrain.set_cpu_devices(2)
    import keras

    from pipetrain.compute.functions import kernels
    from pipetrain.compute.profiling import progress

    progress.PATIENCE_S = kernels.PATIENCE_S = 0.0  # everything takes long
    dense = keras.layers.Dense
    x = np.random.default_rng(0).normal(size=(16, 6)).astype("float32")
    y = x[:, :1].copy()
    with tempfile.TemporaryDirectory() as folder:
        for way in ways:
            path = os.path.join(folder, way)
            model = keras.Sequential([keras.Input((6,)), dense(8), dense(8), dense(1)])
            with captured(path):
                pm = pipetrain.PipelineModel(model, **{"scheme": way, **WAYS[way]})
                pm.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse", jit_compile=way == "vanilla" or "auto")
                pm.fit(x, y, batch_size=8, epochs=2, verbose=0, validation_data=(x, y))
                pm.evaluate(x, y, verbose=0)
                pm.predict(x, verbose=0)
                pm.train_on_batch(x, y)
                pm.test_on_batch(x, y)
            with open(path) as file:
                print(f"{way}: {file.read()!r}")


if __name__ == "__main__":
    main(sys.argv[1:] or WAYS)
