"""Trains the same networks on worker processes and in this process; prints what came out, one line of JSON a case.

``python on_workers.py WORKERS CASE ...``: a process of its own, for TensorFlow joins one cluster, before all else.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import pipetrain  # noqa: E402

ROWS, BATCH = 96, 16


def settings(case: str, workers: int) -> dict:
    """Of the PipelineModel: ``SCHEME``, ``SCHEME/horizon``, ``SCHEME+spikes`` or ``SCHEME*replicas``."""
    name, _, option = case.partition("/")
    given = {"scheme": name}
    if option in ("local", "fitted"):
        given["horizon"] = option
    if option == "recompute":
        given["recompute"] = True
    if option == "replicas":
        return given | {"stages": None, "cuts": networks.cuts(6, 2), "replicas": (workers - 1, 1)}
    return given if name == "single" else given | {"cuts": networks.cuts(6, workers)}


def trained(case: str, workers: int, devices: list[str]) -> tuple[list, dict]:
    """Weights, and what fit, evaluate and predict gave: two epochs, so one drain in the midst, the last batch short."""
    x, y = networks.data(rows=ROWS + 5)
    pm = networks.pipeline(devices=devices, **settings(case, workers))
    history = networks.fit(pm, x, y, batch_size=BATCH, epochs=2).history
    said = {name: values for name, values in history.items()}
    said["evaluate"] = pm.evaluate(x, y, batch_size=40, verbose=0)
    said["predict"] = pm.predict(x, batch_size=40, verbose=0).tolist()
    return pm.get_weights(), said


def difference(a: object, b: object) -> float:
    """The largest of all differences."""
    pairs = zip(tf.nest.flatten(a), tf.nest.flatten(b), strict=True)
    return max(float(np.max(np.abs(np.asarray(p) - np.asarray(q)))) for p, q in pairs)


if __name__ == "__main__":
    count, cases = int(sys.argv[1]), sys.argv[2:]
    with pipetrain.LocalWorkers(count) as running:
        remote = pipetrain.connect(running.addresses)
        import networks
        import numpy as np
        import tensorflow as tf

        for each in cases:
            here, said_here = trained(each, count, ["CPU:0"])
            there, said_there = trained(each, count, remote)
            result = {"case": each, "weights": difference(here, there), "said": difference(said_here, said_there)}
            print(json.dumps(result), flush=True)
