"""Trains and evaluates one network in several ways on workers; prints what came of each, one line of JSON.

``python two_hosts_training.py ADDRESS ...``, of workers that wait.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import pipetrain  # noqa: E402

ROWS, BATCH = 64, 8


def main() -> None:
    """The program."""
    devices = pipetrain.connect(sys.argv[1:])
    import keras
    import networks

    x, y = networks.data(ROWS)
    cut = {"cuts": networks.cuts(6, len(devices))}
    ways = {"1f1b": {**cut, "microbatches": 2}, "spectrain": cut, "all-reduce": {}}
    for scheme, settings in ways.items():
        keras.utils.set_random_seed(0)
        model = networks.mlp(6)
        pm = pipetrain.PipelineModel(model, scheme=scheme, devices=devices, **settings)
        pm.compile(keras.optimizers.SGD(0.05), networks.crossentropy())
        slower = keras.callbacks.LearningRateScheduler(lambda epoch: 0.05 / (epoch + 1))
        pm.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0, callbacks=[slower])
        model.compile(loss=networks.crossentropy())
        there, here = (each.evaluate(x, y, batch_size=BATCH, verbose=0) for each in (pm, model))
        print(json.dumps({"scheme": scheme, "there": there, "here": here}), flush=True)


if __name__ == "__main__":
    main()
