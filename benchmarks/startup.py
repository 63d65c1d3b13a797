"""Seconds from the start of a process to its first trained minibatch, and what they go into.

The default run of ``experiments/run.py`` in processes of its own, by turns with an empty and with a full cache of
profiles: "cold" measures the model's layers, "warm" reads what the cold one kept. About a minute for three rounds.

With --fit it is the time from ``fit`` to the end of its first minibatch, of a network of many layers in 2 stages by
1f1b, with an empty cache.

examples:
  python benchmarks/startup.py
  python benchmarks/startup.py --fit resnet50 --rounds 1
  python benchmarks/startup.py --rounds 5 --scheme vanilla --stages 2
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from pipetrain.logs import text_table

ROOT = Path(__file__).parents[1]
CACHES = ("cold", "warm")
PARTS = {
    "import": "Python, TensorFlow, Keras, this project; the devices",
    "data": "reading and standardizing the data set",
    "model": "the network, its compilation and all that is in no other line",
    "profile": "the layers measured, or read from the cache",
    "partition": "where to cut",
    "stages": "variables and optimizers of the stages",
    "trace": "TensorFlow's functions of all stages",
    "first minibatch": "from then to the first result, a function over all devices included",
}
LIMIT_S = 300.0
IMPORTS = {  # each in a process of its own, the last statement timed
    "all of pipetrain.plan, alone": "import pkgutil, importlib; "
    "[importlib.import_module(m.name) for m in pkgutil.walk_packages(['pipetrain/plan'], 'pipetrain.plan.')]",
    "tensorflow": "import tensorflow",
    "pipetrain, after tensorflow": "import tensorflow\nimport pipetrain",
    "all its public names, after tensorflow": "import tensorflow, pipetrain\n"
    "[getattr(pipetrain, name) for name in pipetrain.__all__]",
}


class Stopwatch:
    """The seconds of each part, none counted twice: what begins within a part interrupts it."""

    def __init__(self, part: str, start_s: float) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._part, self._since_s = part, start_s

    def turn_to(self, part: str) -> str:
        """From now on it is this part that runs; gives the one before."""
        now_s, before = time.monotonic(), self._part
        self.seconds[before] += now_s - self._since_s
        self._part, self._since_s = part, now_s
        return before

    def timed(self, owner: Any, name: str, part: str, then: str | None = None) -> None:
        """Time whatever calls ``owner.name``; afterwards what ran before goes on, or ``then``."""
        original = getattr(owner, name)

        def call(*arguments: Any, **settings: Any) -> Any:
            before = self.turn_to(part)
            try:
                return original(*arguments, **settings)
            finally:
                self.turn_to(then or before)

        setattr(owner, name, call)


def begin(arguments: Sequence[str], start_s: float) -> dict[str, float]:
    """The seconds of this process, which began at ``start_s`` and ends after its first minibatch."""
    from experiments import datasets, run

    options = run.parse(arguments)
    run.start_tensorflow(options.stages)
    import experiments.training  # noqa: F401
    from pipetrain.frontend import pipeline_strategy, planner, runner_fit
    from pipetrain.run import pipeline

    watch = Stopwatch("import", start_s)
    watch.turn_to("model")
    watch.timed(datasets, "load", "data")
    watch.timed(planner, "cached_profile", "profile")
    watch.timed(planner, "partition", "partition")
    watch.timed(pipeline_strategy, "training_stages", "stages")
    watch.timed(pipeline.Pipeline, "trace_for", "trace", then="first minibatch")
    step = runner_fit.RunnerFit.step

    def only_step(*arguments: Any) -> Any:
        step(*arguments)
        watch.turn_to("model")
        raise SystemExit

    runner_fit.RunnerFit.step = only_step
    try:
        run.main(arguments)
    except SystemExit:
        return watch.seconds
    raise RuntimeError("The run ended before its first minibatch.")


def apart(arguments: Sequence[str], cache: str) -> dict[str, float]:
    """The same in a process of its own, with profiles in the folder ``cache``."""
    environment = {**os.environ, "XDG_CACHE_HOME": cache}
    with tempfile.TemporaryDirectory() as output:
        command = [sys.executable, __file__, "--one", repr(time.monotonic()), *arguments, "--output", output]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def measure(arguments: Sequence[str], rounds: int) -> dict[str, list[dict[str, float]]]:
    """The seconds of every round, with a cold and a warm cache."""
    found: dict[str, list[dict[str, float]]] = {cache: [] for cache in CACHES}
    for number in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            for cache in CACHES:
                found[cache].append(apart(arguments, folder))
        print(f"\rround {number + 1} of {rounds}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return found


def import_s(statements: str) -> float:
    """Seconds that the last line of ``statements`` takes in a process of its own."""
    before, _, last = statements.rpartition("\n")
    code = f"{before}\nimport time\nstart_s = time.perf_counter()\n{last}\nprint(time.perf_counter() - start_s)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    return float(done.stdout.splitlines()[-1])


def imports(rounds: int) -> str:
    """The table of what is imported: medians of the rounds, the lowest and the highest."""
    seconds = {name: [import_s(statements) for _ in range(rounds)] for name, statements in IMPORTS.items()}
    rows = [(name, f"{median(each):.3f}", f"{min(each):.3f} - {max(each):.3f}") for name, each in seconds.items()]
    return text_table(("import of", "seconds", "lowest - highest"), rows)


def fit_s(name: str) -> tuple[float, float]:
    """Seconds from ``fit`` to the end of its first minibatch, in this process, which has done nothing else.

    And those of its processor time, which other programs change less.
    """
    import pipetrain

    pipetrain.set_cpu_devices(2)
    import keras
    import numpy as np

    network, x, labels = NETWORKS[name](keras, np)
    y = np.zeros(labels, "int32")
    model = pipetrain.PipelineModel(network, stages=2, scheme="1f1b")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(1e-3, momentum=0.9), loss)
    ended: list[tuple[float, float]] = []

    def note(batch: int, logs: Any) -> None:
        ended.append((time.monotonic() - start_s, time.process_time() - start_cpu_s))

    start_s, start_cpu_s = time.monotonic(), time.process_time()
    callback = keras.callbacks.LambdaCallback(on_train_batch_end=note)
    model.fit(x, y, batch_size=len(x), verbose=0, callbacks=[callback])
    return ended[0]


def _resnet50(keras: Any, np: Any) -> tuple[Any, Any, tuple[int, ...]]:
    """On 16 images of 64 x 64."""
    model = keras.applications.ResNet50(weights=None, input_shape=(64, 64, 3), classifier_activation=None)
    return model, np.zeros((16, 64, 64, 3), "float32"), (16,)


def _gpt2(keras: Any, np: Any) -> tuple[Any, Any, tuple[int, ...]]:
    """12 layers of width 256, on 16 rows of 64 words."""
    from models.gpt2 import gpt2

    return gpt2((64,), 2000, depth=12, width=256), np.zeros((16, 64), "int32"), (16, 64)


NETWORKS = {"resnet50": _resnet50, "gpt2": _gpt2}


def first_minibatch(name: str, rounds: int) -> str:
    """The seconds of ``fit_s`` in processes of their own."""
    found = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            environment = {**os.environ, "XDG_CACHE_HOME": folder}
            command = [sys.executable, __file__, "--one-fit", name]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=10 * LIMIT_S)
        if done.returncode:
            raise RuntimeError(done.stderr)
        found.append(tuple(map(float, done.stdout.splitlines()[-1].split())))
    seconds, busy_s = zip(*found, strict=True)
    lasted = f"{median(seconds):.1f} s from fit to the end of the first minibatch"
    return f"{name}: {lasted} ({min(seconds):.1f} - {max(seconds):.1f}), {median(busy_s):.1f} s of processor time"


def report(found: dict[str, list[dict[str, float]]]) -> str:
    """The table: medians of every part, and of their sum with the lowest and the highest."""
    rows = []
    for part, about in PARTS.items():
        rows.append((part, *(f"{median(each[part] for each in found[cache]):.2f}" for cache in CACHES), about))
    totals = {cache: [sum(each.values()) for each in found[cache]] for cache in CACHES}
    rows.append(("all", *_each(totals, median), "to the first trained minibatch"))
    rows.append(("lowest - highest", *_each(totals, lambda of: f"{min(of):.1f} - {max(of):.1f}"), ""))
    return text_table(("seconds", *CACHES, "what it is"), rows)


def _each(totals: dict[str, list[float]], of: Callable[[list[float]], Any]) -> list[str]:
    figures = [of(totals[cache]) for cache in CACHES]
    return [figure if isinstance(figure, str) else f"{figure:.2f}" for figure in figures]


def main() -> None:
    """The command line."""
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(begin(sys.argv[3:], float(sys.argv[2]))))
        return
    if sys.argv[1:2] == ["--one-fit"]:
        print(*fit_s(sys.argv[2]))
        return
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="Other options go to experiments/run.py.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=3, help="(default: 3)")
    parser.add_argument("--imports", action="store_true", help="only the seconds that imports take")
    parser.add_argument("--fit", choices=NETWORKS, help="only the seconds from fit to the first minibatch")
    options, arguments = parser.parse_known_args()
    if options.fit:
        print(first_minibatch(options.fit, options.rounds))
        return
    print(imports(options.rounds) if options.imports else report(measure(arguments, options.rounds)))


if __name__ == "__main__":
    main()
