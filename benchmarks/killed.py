"""A training process that is to be killed at any moment, and says how far it is: one life of a run of ``kills.py``.

It is forked from a process that has imported TensorFlow and has not started it, which has one thread.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pipetrain
from pipetrain.callbacks import PipelineCheckpoint
from pipetrain.checkpoint.replication import Replication
from pipetrain.checkpoint.store import Store
from pipetrain.cluster import host_memory, server
from pipetrain.cluster.server import Serving, serve
from pipetrain.cluster.supervision import LOST
from pipetrain.schemes.options import with_options
from pipetrain.schemes.table import PIPELINES

import keras  # isort: skip
import numpy as np  # isort: skip

FEATURES, CLASSES, WIDTH, LAYERS = 12, 5, 32, 4
BATCH, STEPS, EPOCHS = 12, 30, 2
EVERY = 3  # steps, from one checkpoint to the next
SELDOM = 12  # the same of those on the disk where the state of every call is in memory
STEP_S = 0.004  # that a step takes at least
STRETCH_S = 0.00002  # longer between two calls of functions where writing or reading is stretched
PARENT_DIES = 1  # Linux' PR_SET_PDEATHSIG


class Way(NamedTuple):
    """How a run is trained: a scheme, its options, and on so many devices, or so many worker processes.

    ``drains``: whether checkpoints take a drain, so that a run has the weights of one with as many checkpoints.
    ``momentum``: whether the optimizer is SGD with momentum, else Adam. ``memory``: whether every call's state goes to
    the memory of hosts, of which each worker is one and the controller another.
    """

    scheme: str
    stages: int = 2
    devices: int = 3
    workers: int = 0
    options: dict[str, Any] = {}  # noqa: RUF012  # nobody changes it
    drains: bool = False
    momentum: bool = False
    memory: bool = False

    @property
    def is_pipeline(self) -> bool:
        """Whether the model is cut into stages."""
        return self.scheme in PIPELINES


WAYS: dict[str, Way] = {
    **{name: Way(name) for name in ("vanilla", "weight-stashing", "vertical-sync")},
    "spectrain": Way("spectrain", 3),
    "spike-compensation": Way("spike-compensation", momentum=True),
    "spectrain, target": Way("spectrain", options={"horizon": "target", "microbatches": 2}),
    "spectrain, fitted": Way("spectrain", options={"horizon": "fitted"}, drains=True),
    "spectrain, replicas": Way("spectrain", options={"replicas": (1, 2)}),
    "2bw": Way("2bw", options={"microbatches": 3}),
    **{name: Way(name, options={"microbatches": 3}) for name in ("gpipe", "1f1b")},
    **{name: Way(name, 2, 2, options={"microbatches": 3}) for name in ("zb-h1", "zb-h2")},
    **{
        name: Way(name, 4, 2, options={"microbatches": 4})
        for name in ("interleaved", "looped-bfs", "zb-v", "v-half", "v-min")
    },
    **{name: Way(name) for name in ("all-reduce", "parameter-server", "data-parallel")},
    "coded-reduce": Way("coded-reduce", devices=4, options={"children": 4}),
    "grid": Way("grid", devices=4, options={"grid": (2, 2)}),
    "single": Way("single", 1, 1),
    **{f"{name}, workers": Way(name, 2, workers=2) for name in ("spectrain", "vanilla", "weight-stashing")},
    "1f1b, workers": Way("1f1b", 2, workers=2, options={"microbatches": 2}),
    **{f"{name}, workers": Way(name, workers=2) for name in ("all-reduce", "parameter-server")},
    "grid, workers": Way("grid", workers=2, options={"grid": (2, 1)}),
    "all-reduce, int8": Way("all-reduce", options={"compression": "int8"}),
    "all-reduce, top-k": Way("all-reduce", options={"compression": "top-k:0.1"}),
    "all-reduce, local": Way("all-reduce", options={"synchrony": "local:4"}, drains=True),
    "spectrain, memory": Way("spectrain", workers=2, memory=True),
    "1f1b, memory": Way("1f1b", workers=2, options={"microbatches": 2}, memory=True),
    "all-reduce, memory": Way("all-reduce", workers=2, memory=True),
    "parameter-server, memory": Way("parameter-server", workers=2, memory=True),
}


def made(way: Way, devices: Sequence[str]) -> Any:
    """A compiled PipelineModel with all that has a state: slots, Dropout's seeds, moving statistics of a pipeline."""
    keras.utils.set_random_seed(0)
    layers: list[Any] = [keras.Input((FEATURES,))]
    for n in range(LAYERS - 1):
        layers.append(keras.layers.Dense(WIDTH, "tanh", name=f"d{n}"))
        if n == 1 and way.is_pipeline:  # copies average these at each checkpoint
            layers.append(keras.layers.BatchNormalization(name="statistics"))
        if n == 2:
            layers.append(keras.layers.Dropout(0.2, seed=1, name="dropout"))
    model = keras.Sequential([*layers, keras.layers.Dense(CLASSES, name=f"d{LAYERS - 1}")])
    options = dict(way.options)
    own = {
        name: options.pop(name)
        for name in ("horizon", "children", "grid", "compression", "synchrony")
        if name in options
    }
    if way.is_pipeline and way.stages > 1:
        options["cuts"] = [f"d{LAYERS * (n + 1) // way.stages - 1}" for n in range(way.stages - 1)]
    if not way.workers and way.scheme != "single":
        options["devices"] = devices
    pm = pipetrain.PipelineModel(model, scheme=with_options(way.scheme, **own), **options)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9) if way.momentum else keras.optimizers.Adam(0.01)
    pm.compile(optimizer, loss=loss, metrics=["accuracy"])
    return pm


def data() -> tuple[Any, Any]:
    """The last minibatch has fewer rows."""
    rows = BATCH * STEPS - 5
    chance = np.random.default_rng(0)
    x = chance.normal(size=(rows, FEATURES)).astype("float32")
    return x, np.argmax(x @ chance.normal(size=(FEATURES, CLASSES)), axis=1).astype("int32")


class Life(NamedTuple):
    """What a process is to do: train in this way with checkpoints in a folder, none if it is None.

    ``stretched``: whether writing and reading take longer, so that kills at random moments come between any two calls
    of functions in them. ``workers`` are the addresses of those that the way has. ``memory`` is the folder that stands
    for the memory of the controller's host, if the way has that.
    """

    way: Way
    folder: Path | None
    stretched: bool = False
    workers: tuple[str, ...] = ()
    memory: Path | None = None


def train(life: Life, say: Callable[..., None]) -> None:
    """Train, or go on, to the end; ``say(event, ...)`` is told of all that kills may hit."""
    if life.workers:
        pipetrain.connect(life.workers)
    else:
        pipetrain.set_cpu_devices(max(life.way.devices, 2))
    pm = made(life.way, [f"CPU:{n}" for n in range(life.way.devices)])
    callbacks: list[keras.callbacks.Callback] = []
    seen = keras.callbacks.LambdaCallback(
        on_train_begin=lambda logs: say("training"),
        on_train_batch_end=lambda step, logs: (time.sleep(STEP_S), say("step", step)),
    )
    callbacks.append(seen)
    if life.folder is not None:
        _tell(Store, "write", "writing", say, life.stretched)
        _tell(Store, "newest", "reading", say, life.stretched)
        how: dict[str, Any] = {"every_steps": EVERY}
        if life.memory is not None:
            life.memory.mkdir(parents=True, exist_ok=True)
            host_memory.MEMORY = life.memory
            how = {"every_steps": SELDOM, "replicate": "memory"}
            _tell(Replication, "write", "replicating", say, life.stretched)
            _tell(Replication, "enlist", "listing", say, life.stretched)
        checkpoint = PipelineCheckpoint(life.folder, **how)
        resumed = keras.callbacks.LambdaCallback(on_train_begin=lambda logs: say("resumed", checkpoint.resumed_at or 0))
        callbacks += [checkpoint, resumed]
    x, y = data()
    history = pm.fit(x, y, BATCH, EPOCHS, shuffle=True, verbose=0, callbacks=callbacks).history
    kept = {each.path: each for each in (*pm.weights, *pm.optimizer.variables)}
    digests = {name: hashlib.sha256(np.asarray(each).tobytes()).hexdigest()[:16] for name, each in kept.items()}
    last = {name: history[name][-1] for name in ("loss", "accuracy")} if "loss" in history else {}
    say("end", {"steps": int(pm.optimizer.iterations), **digests, **last})


def _tell(owner: type, name: str, event: str, say: Callable[..., None], stretched: bool) -> None:
    """Let a method tell of its beginning and its end, and of the step that its first argument is, or has."""
    method = getattr(owner, name)

    def telling(self: Any, *given: Any, **named: Any) -> Any:
        step = [getattr(each, "step", each) for each in given[:1]]
        say(event, *step)
        with _slowly() if stretched else _as_it_is():
            found = method(self, *given, **named)
        say(f"{event} over", *step)
        return found

    setattr(owner, name, telling)


@contextmanager
def _as_it_is() -> Iterator[None]:
    yield


@contextmanager
def _slowly() -> Iterator[None]:
    """In this thread every call of a function takes longer."""

    def wait(frame: FrameType, event: str, argument: Any) -> None:
        time.sleep(STRETCH_S)

    sys.setprofile(wait)
    try:
        yield
    finally:
        sys.setprofile(None)


def forked(work: Callable[[int], None], log: Path) -> tuple[int, int]:
    """A process that does ``work(descriptor)`` and ends with this one; its id, and where the descriptor is read.

    Raises RuntimeError where this process has several threads, of which the new one would have one alone.
    """
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        raise RuntimeError(f"Only a process of one thread is forked soundly. Received: {threads} threads.")
    source, sink = os.pipe()
    parent, pid = os.getpid(), os.fork()
    if pid:
        os.close(sink)
        return pid, source
    status = 1
    try:
        os.close(source)
        ctypes.CDLL(None).prctl(PARENT_DIES, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(0)
        written, nothing = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), os.open(os.devnull, os.O_RDONLY)
        for old, new in ((nothing, 0), (written, 1), (written, 2)):
            os.dup2(old, new)
        work(sink)
        status = 0
    except BaseException as error:
        import traceback

        traceback.print_exc()
        status = LOST if isinstance(error, pipetrain.WorkerLost | ConnectionError) else 1
    finally:
        os._exit(status)


def lives(life: Life, sink: int) -> None:
    """The body of a training process."""

    def say(*event: Any) -> None:
        os.write(sink, (json.dumps(event) + "\n").encode())

    train(life, say)


def works(port: int, core: int, memory: Path | None, sink: int) -> None:
    """The body of a worker, which writes its address there; with a folder for its memory it is a host by itself."""
    if memory is not None:
        memory.mkdir(parents=True, exist_ok=True)
        host_memory.MEMORY, server._host = memory, lambda: memory.name
    serve(Serving(port=port, cores=[core], announce=sink))
