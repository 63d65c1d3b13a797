"""What a program has of memory, threads and open files after long training: is there any growth?

Three kinds of long runs, each in a process of its own: one `fit` of many minibatches with checkpoints and a trace, many
`fit`s of one model, and many workers that are lost and come back. Looked at ten times are the resident bytes (VmRSS of
/proc), threads and open files of the controller and, where there are such, of the workers that are never lost. Growth
is from the second look, when caches have filled, to the last; the exit status is 1 if it is more than is allowed. A
process that joins a cluster again, when a worker is lost, keeps threads of TensorFlow's; `pipetrain launch` and
`run.py` start a new process then.

examples:
  python benchmarks/long_runs.py
  python benchmarks/long_runs.py --kind fits --scheme spectrain --fits 50
  python benchmarks/long_runs.py --kind losses --losses 10
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from pipetrain.cli.environment import start_tensorflow
from pipetrain.logs import text_table

KINDS = {"minibatches": 20000, "fits": 200, "losses": 50}
SCHEMES = ("spectrain", "1f1b", "all-reduce")
LOOKS, MIB = 10, 2**20
FEATURES, CLASSES, BATCH, STEPS = 12, 5, 12, 20


class Look(NamedTuple):
    """Resident MiB, threads and open files of a process."""

    resident_mib: float
    threads: int
    files: int


ALLOWED = Look(48, 4, 8)
ALLOWED_A_LOSS = Look(4, 10, 0)  # more, which TensorFlow keeps of the cluster that it was joined to before


def look(pid: int) -> Look:
    """At a process as it is now."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    files = len(os.listdir(f"/proc/{pid}/fd"))
    return Look(int(fields["VmRSS"].split()[0]) * 1024 / MIB, int(fields["Threads"]), files)


def measure(kind: str, scheme: str, count: int) -> dict[str, list[Look]]:
    """Run it in this process; the looks at each process."""
    start_tensorflow(2)
    import pipetrain

    found: dict[str, list[Look]] = {}

    def looked(**workers: int) -> None:
        gc.collect()
        for name, pid in {"controller": os.getpid(), **workers}.items():
            found.setdefault(name, []).append(look(pid))

    every = max(count // LOOKS, 1)
    if kind == "losses":
        _lose(pipetrain, scheme, count, every, looked)
        return found
    pm, x, y = _made(pipetrain, scheme)
    with tempfile.TemporaryDirectory() as folder:
        if kind == "minibatches":
            _train_long(pm, x, y, folder, count, every, looked)
        else:
            for n in range(count):
                pm.fit(x, y, BATCH, verbose=0, callbacks=_saving(Path(folder) / str(n)))
                if (n + 1) % every == 0:
                    looked()
    return found


def _made(pipetrain: Any, scheme: str) -> tuple[Any, Any, Any]:
    import keras
    import numpy as np

    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(32, "tanh", name=f"d{n}") for n in range(3)]
    model = keras.Sequential([keras.Input((FEATURES,)), *layers, keras.layers.Dense(CLASSES)])
    options = {"cuts": ["d1"]} if scheme != "all-reduce" else {}
    pm = pipetrain.PipelineModel(model, scheme=scheme, **options)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    pm.compile(keras.optimizers.Adam(0.001), loss, metrics=["accuracy"])
    chance = np.random.default_rng(0)
    x = chance.normal(size=(BATCH * STEPS, FEATURES)).astype("float32")
    return pm, x, chance.integers(0, CLASSES, BATCH * STEPS)


def _saving(folder: Path) -> list[Any]:
    from pipetrain.callbacks import PipelineCheckpoint

    return [PipelineCheckpoint(folder, every_steps=50)]


def _train_long(pm: Any, x: Any, y: Any, folder: str, count: int, every: int, looked: Callable[..., None]) -> None:
    """One epoch of so many minibatches."""
    import keras
    import tensorflow as tf

    def seen(batch: int, logs: Any) -> None:
        if (batch + 1) % every == 0:
            looked()

    minibatches = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH, drop_remainder=True).repeat()
    callbacks = [keras.callbacks.LambdaCallback(on_train_batch_end=seen), *_saving(Path(folder))]
    pm.fit(minibatches, steps_per_epoch=count, verbose=0, callbacks=callbacks)


def _lose(pipetrain: Any, scheme: str, count: int, every: int, looked: Callable[..., None]) -> None:
    """The second worker is killed in the midst of a ``fit``, again and again; the first one stays."""
    import keras

    with pipetrain.LocalWorkers(2) as workers:
        pipetrain.connect(workers.addresses)
        pm, x, y = _made(pipetrain, scheme)

        def kill(batch: int, logs: Any) -> None:
            if batch == STEPS // 2:
                os.kill(workers.processes[1].pid, signal.SIGKILL)

        killing = keras.callbacks.LambdaCallback(on_train_batch_end=kill)
        for n in range(count):
            try:
                pm.fit(x, y, BATCH, epochs=1000, verbose=0, callbacks=[killing])
            except pipetrain.WorkerLost as error:
                workers.renew(error.workers)
                pipetrain.connect(workers.addresses)
            pm.fit(x, y, BATCH, verbose=0)
            if (n + 1) % every == 0:
                looked(worker=workers.processes[0].pid)


def apart(kind: str, scheme: str, count: int) -> dict[str, list[Look]]:
    """``measure`` in a process of its own."""
    command = [sys.executable, __file__, "--one", kind, scheme, str(count)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{kind}, {scheme}: {done.stderr}")
    return {name: [Look(*each) for each in looks] for name, looks in json.loads(done.stdout.splitlines()[-1]).items()}


def row(what: str, looks: Sequence[Look], losses: int = 0) -> tuple[tuple[str, ...], bool]:
    """A line of the table, and whether it is within what is allowed where so many workers were lost."""
    before, after = looks[min(1, len(looks) - 1)], looks[-1]
    grown = Look(*(new - old for new, old in zip(after, before, strict=True)))
    most = (each + losses * more for each, more in zip(ALLOWED, ALLOWED_A_LOSS, strict=True))
    fits = all(each <= limit for each, limit in zip(grown, most, strict=True))
    cells = f"{before.resident_mib:.0f}", f"{grown.resident_mib:+.1f}", str(before.threads), f"{grown.threads:+d}"
    return (what, *cells, str(before.files), f"{grown.files:+d}", "yes" if fits else "NO"), fits


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", action="append", choices=KINDS, help="several times if wanted (default: all)")
    parser.add_argument("--scheme", action="append", choices=SCHEMES, help="several times if wanted (default: all)")
    for kind, count in KINDS.items():
        parser.add_argument(f"--{kind}", type=int, default=count, help=f"how many (default: {count})")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one:
        kind, scheme, count = options.one
        print(json.dumps(measure(kind, scheme, int(count))))
        return 0
    rows, all_fit = [], True
    for kind in options.kind or KINDS:
        for scheme in options.scheme or SCHEMES:
            count = getattr(options, kind)
            for name, looks in apart(kind, scheme, count).items():
                cells, fits = row(f"{count} {kind}, {scheme}, {name}", looks, count if kind == "losses" else 0)
                rows.append(cells)
                all_fit &= fits
            print(f"\r{len(rows)} processes looked at", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    print(text_table(("", "MiB", "growth", "threads", "growth", "files", "growth", "within"), rows))
    print("Allowed growth: {} MiB, {} threads, {} files;".format(*ALLOWED), end=" ")
    print("for every worker that is lost {} MiB and {} threads more.".format(*ALLOWED_A_LOSS))
    return 0 if all_fit else 1


if __name__ == "__main__":
    sys.exit(main())
