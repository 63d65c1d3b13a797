"""Trains the same networks on worker processes and in this process; prints what came out, one line of JSON a case.

The case ``join`` says what was joined and how it ended instead.

``python worker_training.py WORKERS CASE ...``: a process of its own, for TensorFlow joins one cluster, before all else.
WORKERS is how many are to be started, or the addresses of workers that wait, with commas between.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import pipetrain  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

ROWS, BATCH = 96, 16


def joined(workers: pipetrain.LocalWorkers, devices: list[str]) -> dict:
    """What is known of the workers, and what joining others says."""
    from pipetrain.cluster.connection import about
    from pipetrain.frontend.layout import available, described

    cluster = described(devices)
    try:
        pipetrain.connect(workers.addresses[:1])
    except RuntimeError as error:
        other = str(error)
    return {
        "devices": devices,
        "again": pipetrain.connect(workers.addresses),
        "available": available(),
        "cores": [about(task)["cores"] for task in range(len(devices))],
        "bandwidth": cluster.link(0, 1).bandwidth_bytes_per_s,
        "latency_s": cluster.link(0, 1).latency_s,
        "processors": cluster.processors,
        "other": other,
    }


def settings(case: str, workers: int) -> dict:
    """Of the PipelineModel: ``SCHEME`` or ``SCHEME/OPTION``."""
    name, _, option = case.partition("/")
    given = {"scheme": name}
    if option == "replayed":
        return given | {"stages": None, "order": "none"}
    if option in ("ring", "gossip"):
        return given | {"stages": None, "order": "layerwise", "topology": option}
    if option in ("stale:1", "asynchronous:0"):
        return given | {"stages": None, "synchrony": option, "order": "none"}
    if name in ("all-reduce", "parameter-server"):
        orders = {
            "late": transfer_plans.late_plan(networks.mlp()),
            "": None,
            "one-server": "tic",
            "resumed": "layerwise",
        }
        servers = 1 if option == "one-server" else None
        return given | {"stages": None, "order": orders.get(option, option), "servers": servers}
    if name == "coded-reduce":
        return given | {"stages": None, "children": workers}
    if name == "grid":
        return given | {"stages": None, "grid": (1, workers) if option == "rows" else (workers, 1)}
    if option in ("local", "fitted"):
        given["horizon"] = option
    if option == "recompute":
        given["recompute"] = True
    if option.startswith("replicas"):
        return given | {"stages": None, "cuts": networks.cuts(6, 2), "replicas": (workers - 1, 1)}
    return given if name == "single" else given | {"cuts": networks.cuts(6, workers)}


def looping() -> keras.Model:
    """With a layer that loops over steps, whose backward needs something of each step."""
    networks.draw_from(0)
    layers = [keras.layers.Dense(12, name="d0"), keras.layers.Reshape((4, 3)), keras.layers.LSTM(5, name="d2")]
    return keras.Sequential([keras.Input((networks.FEATURES,)), *layers, keras.layers.Dense(networks.CLASSES)])


def trained(case: str, workers: int, devices: list[str]) -> tuple[list, dict]:
    """Weights, and what fit, evaluate and predict gave: two epochs, so one drain in the midst, the last batch short."""
    x, y = networks.data(rows=ROWS + 5)
    if case.startswith(("coded-reduce", "all-reduce/gossip")) and len(devices) == 1:
        devices = devices * workers  # each worker of a tree, and each that has weights of its own, has one

    def pipeline(**more: object) -> pipetrain.PipelineModel:
        model = looping() if case.endswith("/loop") else None
        optimizer = keras.optimizers.SGD(0.05, momentum=0.9, global_clipnorm=0.1 if case.endswith("/norm") else None)
        return networks.pipeline(model, optimizer, devices=devices, **settings(case, workers), **more)

    if case.endswith("/replayed"):
        return recorded_and_replayed(pipeline, x, y)
    if case.endswith("/resumed"):
        return resumed(pipeline, x, y)
    if case.endswith("/in-flight"):
        return stopped_and_never_stopped(pipeline, x, y, on_workers=len(devices) > 1)
    pm = pipeline()
    said = networks.without_figures(networks.fit(pm, x, y, batch_size=BATCH, epochs=2).history)
    said["evaluate"] = pm.evaluate(x, y, batch_size=40, verbose=0)
    said["predict"] = pm.predict(x, batch_size=40, verbose=0).tolist()
    return pm.get_weights(), said


def stopped_and_never_stopped(
    pipeline: Callable[[], pipetrain.PipelineModel], x: np.ndarray, y: np.ndarray, on_workers: bool
) -> tuple[list, dict]:
    """Weights, and how many differ by a single bit between a run without checkpoints and one that was stopped."""
    never = pipeline()
    networks.fit(never, x, y, batch_size=BATCH, epochs=2)
    with tempfile.TemporaryDirectory() as directory:
        for stop in ([Stop(4)], []):
            pm = pipeline()
            saving = callbacks.PipelineCheckpoint(directory, every_steps=1)
            with contextlib.suppress(InterruptedError), contextlib.redirect_stdout(sys.stderr):
                networks.fit(pm, x, y, batch_size=BATCH, epochs=2, callbacks=[saving, *stop])
            shards = [*Path(directory).glob("step-*-0of2.index")]
            assert bool(shards) == on_workers, "workers write themselves"
        assert saving.resumed_at == 3
    pairs = zip(never.get_weights(), pm.get_weights(), strict=True)
    return pm.get_weights(), {"different": sum(float((a != b).any()) for a, b in pairs)}


def recorded_and_replayed(pipeline: Callable[..., pipetrain.PipelineModel], x: np.ndarray, y: np.ndarray) -> Any:
    """Weights, and how many differ by a single bit if workers at their own pace do all in the same order again."""
    found = []
    with tempfile.TemporaryDirectory() as directory:
        for file in ("record", "replay"):
            pm = pipeline(synchrony=pipetrain.Asynchronous(3, **{file: f"{directory}/order"}))
            networks.fit(pm, x, y, batch_size=BATCH, epochs=2)
            found.append(pm.get_weights())
    return found[1], {"different": sum(float((a != b).any()) for a, b in zip(*found, strict=True))}


def resumed(pipeline: Callable[[], pipetrain.PipelineModel], x: np.ndarray, y: np.ndarray) -> tuple[list, dict]:
    """Likewise, interrupted in the first epoch; the weights that were kept on the way are among the weights."""
    kept: list[np.ndarray] = []

    def interrupt(batch: int, logs: object) -> None:
        if batch == 4:
            raise InterruptedError

    with tempfile.TemporaryDirectory() as directory:
        for more in (keras.callbacks.LambdaCallback(on_train_batch_end=interrupt), None):
            kept.clear()  # how many were complete when it was interrupted depends on timing
            pm = pipeline()
            used = [
                callbacks.PipelineCheckpoint(directory, every_steps=3),
                callbacks.Snapshots(5, lambda step, model: kept.extend(model.get_weights())),
                keras.callbacks.ModelCheckpoint(f"{directory}/model.keras"),
                *filter(None, [more]),
            ]
            with contextlib.suppress(InterruptedError), contextlib.redirect_stdout(sys.stderr):
                history = networks.fit(pm, x, y, batch_size=BATCH, epochs=2, callbacks=used)
        assert used[0].resumed_at == 3 and kept
        saved = keras.models.load_model(f"{directory}/model.keras")
    return [*pm.get_weights(), *saved.get_weights(), *kept], networks.without_figures(history.history)


def difference(a: object, b: object) -> float:
    """The largest of all differences."""
    pairs = zip(tf.nest.flatten(a), tf.nest.flatten(b), strict=True)
    return max(float(np.max(np.abs(np.asarray(p) - np.asarray(q)))) for p, q in pairs)


if __name__ == "__main__":
    given, *cases = sys.argv[1:]
    with contextlib.nullcontext() if ":" in given else pipetrain.LocalWorkers(int(given)) as running:
        addresses = running.addresses if running else given.split(",")
        count, remote = len(addresses), pipetrain.connect(addresses)
        import keras
        import networks
        import numpy as np
        import tensorflow as tf
        import transfer_plans
        from checkpointed import Stop

        from pipetrain import callbacks

        facts = joined(running, remote) if "join" in cases else {}
        for each in (each for each in cases if each != "join"):
            devices = ["CPU:0"] * (count if each.startswith("grid") else 1)
            here, said_here = trained(each, count, devices)
            there, said_there = trained(each, count, remote)
            different = said_there.get("different", 0.0)
            result = {
                "case": each,
                "different": different,
                "weights": difference(here, there),
                "said": difference(said_here, said_there),
            }
            print(json.dumps(result), flush=True)
    if facts:
        facts["statuses"] = [process.returncode for process in running.processes]
        print(json.dumps({"case": "join", **facts}), flush=True)
