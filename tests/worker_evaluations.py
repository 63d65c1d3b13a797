"""Predicts on two workers again and again, each time with other weights, and after one of them was started anew.

Prints one line of JSON: how often predictions were those of the model itself, and how often they were asked for.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import pipetrain  # noqa: E402

TIMES, ROWS, WIDTH = 12, 40, 256


def main() -> None:
    """The program."""
    with pipetrain.LocalWorkers(2) as workers:
        pipetrain.connect(workers.addresses)
        import keras
        import numpy as np

        L = keras.layers
        inner = [L.Dense(2 * WIDTH), L.BatchNormalization(), L.Dense(WIDTH, trainable=False)]
        model = keras.Sequential([keras.Input((WIDTH,)), *inner, L.Dense(4)])
        pm = pipetrain.PipelineModel(model, stages=2, scheme="vanilla")
        x = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype("float32")

        def is_right() -> bool:
            for variable in model.variables:
                variable.assign(variable * 1.1 + 0.01)
            there, here = (each.predict(x, batch_size=8, verbose=0) for each in (pm, model))
            return bool(np.allclose(there, here, rtol=1e-4, atol=1e-3))

        found = [is_right() for _ in range(TIMES)]
        workers.renew(workers.addresses[1:])
        lost = False
        try:
            is_right()
        except pipetrain.WorkerLost:
            lost = True
        pipetrain.connect(workers.addresses)
        found.append(is_right())
        print(json.dumps({"right": sum(found), "asked": len(found), "lost": lost}), flush=True)


if __name__ == "__main__":
    main()
