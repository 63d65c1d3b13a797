"""A process that loses one of its two workers: ``worker_loss.py SIGNAL [METHOD [SCHEME [IDLE_S]]]``.

The second worker is sent SIGNAL in the midst of ``fit`` or ``evaluate``, or before any other METHOD; for ``trial`` it
is the first one, before the first of several orders of transfers is tried. Then the program does nothing for so many
seconds.

Prints, as JSON, what that raised, after how many seconds and refusals to answer, and what is left.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

from pipetrain.cli.environment import start_tensorflow  # noqa: E402

start_tensorflow(1)

import keras  # noqa: E402
import networks  # noqa: E402
import numpy as np  # noqa: E402

import pipetrain  # noqa: E402
from pipetrain.cluster import health, sockets  # noqa: E402
from pipetrain.cluster.health import WorkerLost  # noqa: E402
from pipetrain.frontend import transfer_strategy  # noqa: E402


def refusals() -> list[str]:
    """Why workers did not answer, each time that one was asked from now on."""
    found, original = [], sockets.probed

    def probed(address: str, timeout_s: float) -> str:
        why = original(address, timeout_s)
        found.extend([why] if why else [])
        return why

    health.probed = sockets.probed = probed
    return found


def main(number: int, method: str = "fit", scheme: str = "vanilla", idle_s: str = "0") -> None:
    """Train on two workers, send the signal to one of them at the tenth step of the second epoch, or evaluation."""
    with pipetrain.LocalWorkers(2) as workers:
        pipetrain.connect(workers.addresses)
        keras.utils.set_random_seed(0)
        layers = [keras.Input((networks.FEATURES,)), keras.layers.Dense(32), keras.layers.Dense(networks.CLASSES)]
        pm = networks.in_way(
            keras.Sequential(layers),
            scheme="parameter-server" if scheme == "asynchronous" else scheme,
            synchrony=scheme if scheme == "asynchronous" else None,
            cuts=(layers[1].name,) if scheme == "vanilla" else None,
            children=2 if scheme == "coded-reduce" else None,
        )
        pm.compile(keras.optimizers.SGD(0.05, momentum=0.9), loss=networks.crossentropy())
        sent_s, drained, refused = 0.0, [], refusals()

        def send(step: int, logs: object) -> None:
            nonlocal sent_s
            if drained and step == 10:
                sent_s = time.monotonic()
                os.kill(workers.processes[method != "trial"].pid, number)
                time.sleep(float(idle_s))

        hurt = keras.callbacks.LambdaCallback(
            on_train_batch_end=send,
            on_epoch_end=lambda epoch, logs: drained.extend(pm.get_weights()),
            on_test_batch_end=send,
        )
        x, y = networks.data(320)
        if method == "trial":
            drained = pm.get_weights()
            whole_s = transfer_strategy.minibatch_s
            transfer_strategy.minibatch_s = lambda *given: (send(10, None), whole_s(*given))[1]
        others = {"explain": lambda: pm.explain(16), "train_on_batch": lambda: pm.train_on_batch(x, y)}
        others["choose"] = lambda: pm.fit(x, y, batch_size=16, verbose=0)
        try:
            if method in others:
                drained = pm.get_weights()
                send(10, None)
                others[method]()
            pm.fit(x, y, batch_size=16, epochs=100 if method == "fit" else 1, verbose=0, callbacks=[hurt])
            pm.evaluate(x, y, batch_size=16, verbose=0, callbacks=[hurt])
        except WorkerLost as error:
            found = {
                "message": str(error),
                "workers": [workers.addresses.index(address) for address in error.workers],
                "after_s": time.monotonic() - sent_s,
                "refusals": len(refused),
                "threads": [each.name for each in threading.enumerate() if each.name.startswith("pipetrain")],
                "kept": all(map(np.array_equal, drained, pm.get_weights())),
            }
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
