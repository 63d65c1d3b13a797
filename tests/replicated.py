"""Training whose state is replicated in hosts' memory: ``replicated.py DIRECTORY RESULT SCHEME EVERY ADDRESS ...``.

Prints the number of each step that is done, and the one that it went on from. A lost worker ends it with status 75.
Without DIRECTORY there are no checkpoints. The final weights go to RESULT.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

import pipetrain  # noqa: E402

STEPS, BATCH, EPOCHS = 40, 8, 2


def main(directory: str, result: str, scheme: str, every: str, *addresses: str) -> int:
    """The program; its status."""
    devices = pipetrain.connect(list(addresses))
    import keras
    import networks
    import numpy as np

    from pipetrain.callbacks import PipelineCheckpoint
    from pipetrain.cluster.health import WorkerLost

    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(8, "tanh"), keras.layers.Dropout(0.2, seed=1), keras.layers.Dense(8, "tanh")]
    model = keras.Sequential([keras.Input((networks.FEATURES,)), *layers, keras.layers.Dense(networks.CLASSES)])
    pm = pipetrain.PipelineModel(model, stages=len(devices), scheme=scheme, devices=devices)
    pm.compile(keras.optimizers.SGD(0.05, momentum=0.9), networks.crossentropy(), metrics=["accuracy"])
    updates = 0

    def begun(logs: object) -> None:
        nonlocal updates
        updates = (saving[0].resumed_at or 0) if saving else 0
        print(f"from {updates} {saving[0].saved_at if saving else None}", flush=True)

    def done(step: int, logs: object) -> None:
        nonlocal updates
        updates += 1
        print(f"step {updates}", flush=True)
        if saving:
            sys.stdin.readline()  # whoever reads the line says when to go on

    tell = keras.callbacks.LambdaCallback(on_train_begin=begun, on_train_batch_end=done)
    saving = [PipelineCheckpoint(directory, every_steps=int(every), replicate="memory")] if directory else []
    x, y = networks.data(STEPS * BATCH)
    try:
        pm.fit(x, y, batch_size=BATCH, epochs=EPOCHS, verbose=0, callbacks=[*saving, tell])
    except WorkerLost as error:
        print(f"lost {error}", flush=True)
        return 75
    np.savez(result, *pm.get_weights())
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
