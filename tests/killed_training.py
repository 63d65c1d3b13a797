"""A training process to be killed: ``killed_training.py DIRECTORY RESULT [SCHEME]``.

Checkpoints come after every second step, none where DIRECTORY is empty. ``KILL_AT=n`` kills the process in the midst
of its n-th checkpoint: when the file is written and not yet renamed. The final weights go to RESULT.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

if __name__ == "__main__":  # else it runs already
    from pipetrain.cli.environment import start_tensorflow

    start_tensorflow(3)

import keras  # noqa: E402
import networks  # noqa: E402
import numpy as np  # noqa: E402

import pipetrain  # noqa: E402
from pipetrain.callbacks import PipelineCheckpoint  # noqa: E402

STEP_S = float(os.environ.get("STEP_S", "0.02"))


def model():
    """With all that has a state, and a kernel that two stages have: Dropout's seed, BatchNormalization's statistics."""
    keras.utils.set_random_seed(0)
    first, second = (keras.layers.Dense(256, activation="tanh", name=name) for name in ("first", "second"))
    x = keras.Input((networks.FEATURES,))
    y = second(keras.layers.Dropout(0.2, seed=1, name="dropout")(first(x)))
    y = networks.Transposed(second.kernel, "tanh")(keras.layers.BatchNormalization()(y))
    return keras.Model(x, keras.layers.Dense(networks.CLASSES)(y))


def killed_at(count: int) -> None:
    """Let the process die in its count-th fsync."""
    fsync, calls = os.fsync, []

    def dying(descriptor):
        calls.append(descriptor)
        if len(calls) == 2 * count - 1:  # the file's; the next is the directory's
            os.kill(os.getpid(), signal.SIGKILL)
        fsync(descriptor)

    os.fsync = dying


def main(directory: str, result: str, scheme: str = "spectrain") -> None:
    """Train, or go on; at most three epochs of 20 steps."""
    if "KILL_AT" in os.environ:
        killed_at(int(os.environ["KILL_AT"]))
    pm = pipetrain.PipelineModel(model(), cuts=("dropout", "second"), scheme=scheme)
    pm.compile(keras.optimizers.SGD(0.05, momentum=0.9), loss=networks.crossentropy(), metrics=["accuracy"])
    slow = keras.callbacks.LambdaCallback(
        on_train_begin=lambda logs: print("training", flush=True),
        on_train_batch_end=lambda step, logs: time.sleep(STEP_S),
    )
    x, y = networks.data(320)
    saving = [PipelineCheckpoint(directory, every_steps=2)] if directory else []
    pm.fit(x, y, batch_size=16, epochs=3, verbose=0, callbacks=[slow, *saving])
    np.savez(result, *pm.get_weights())


if __name__ == "__main__":
    main(*sys.argv[1:])
