"""What a step costs beside its arithmetic: by stages, microbatches in flight and layers, of which all are tiny.

Dense layers of 8 units and 8 rows compute next to nothing, so that a step's seconds are those of TensorFlow's calls of
functions over all devices, which have several such minibatches each. A stage has two actions a minibatch, F and B with
the update; a step's seconds over all actions are "us an action". All cases train in one process and on two cores, in
turns.

The table "compute" has stages of about a millisecond of compute: the bound is what one such stage takes alone, as one
TensorFlow function on one core (forward, backward, update), and "reached" that over a step of the pipeline.

examples:
  python benchmarks/overhead.py
  python benchmarks/overhead.py --table stages --table compute --rounds 9
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.steal import undisturbed
from pipetrain.cli.environment import start_tensorflow
from pipetrain.logs import text_table

if TYPE_CHECKING:
    import keras

FIRST = 20  # steps that fill the pipeline
TINY, COMPUTING = (8, 8), (256, 128)  # units of a layer, rows of a minibatch
KERAS, FUNCTION = "plain Keras", "one stage alone"


class Case(NamedTuple):
    """So many stages of so many layers, under a scheme, as ``plain Keras``, or the first stage as one function."""

    way: str
    stages: int
    layers: int = 1
    microbatches: int | None = None
    size: tuple[int, int] = TINY

    @property
    def actions(self) -> int:
        """Of a step."""
        return 2 * self.stages * (self.microbatches or 1)


class Seconds(NamedTuple):
    """Of a step: the clock's and the processors', and the time within an action."""

    step_s: float
    processor_s: float
    action_s: float = 0.0


TABLES: dict[str, tuple[Case, ...]] = {
    "stages": (
        Case(KERAS, 1),
        *(Case(way, stages) for way in ("vanilla", "spectrain") for stages in (1, 2, 4, 8)),
    ),
    "compute": tuple(Case(way, 2, 3, size=COMPUTING) for way in (FUNCTION, KERAS, "vanilla", "spectrain")),
    "microbatches": tuple(Case(way, 2, 1, pieces) for way in ("1f1b", "gpipe") for pieces in (1, 2, 4, 8)),
    "layers": tuple(Case(way, 2, layers) for way in (KERAS, "vanilla") for layers in (1, 4, 16, 64)),
}


def network(case: Case) -> keras.Model:
    """Dense layers, named by stage and number."""
    import keras

    keras.utils.set_random_seed(0)
    units, _ = case.size
    names = [f"s{stage}_{n}" for stage in range(case.stages) for n in range(case.layers)]
    return keras.Sequential([keras.Input((units,)), *(keras.layers.Dense(units, "relu", name=name) for name in names)])


def trainer(case: Case, steps: int) -> Callable[[], Seconds]:
    """Trains for so many steps whenever it is called."""
    import keras
    import tensorflow as tf

    if case.way == FUNCTION:
        return function_trainer(case, steps)
    import pipetrain

    model = network(case)
    if case.way != KERAS:
        cuts = [f"s{stage}_{case.layers - 1}" for stage in range(case.stages - 1)]
        split = {"cuts": cuts} if cuts else {"stages": 1}
        model = pipetrain.PipelineModel(model, scheme=case.way, microbatches=case.microbatches, **split)
    settings = {"jit_compile": False} if case.way == KERAS else {}
    model.compile(keras.optimizers.SGD(1e-6, momentum=0.9), "mse", **settings)
    units, rows = case.size
    minibatch = tf.ones([rows, units])
    minibatches = tf.data.Dataset.from_tensors((minibatch, minibatch)).repeat(steps)
    times: list[tuple[float, float]] = []
    clock = keras.callbacks.LambdaCallback(on_train_batch_end=lambda step, logs: times.append(clocks()))

    def seconds() -> Seconds:
        times.clear()
        model.fit(minibatches, verbose=0, shuffle=False, callbacks=[clock])
        step = [(end - start) / (len(times) - FIRST) for start, end in zip(times[FIRST - 1], times[-1], strict=True)]
        if case.way == KERAS:
            return Seconds(*step)
        spans = model.trace.spans
        return Seconds(*step, float(statistics.median(spans.end_s - spans.start_s)))

    return seconds


def function_trainer(case: Case, steps: int) -> Callable[[], Seconds]:
    """One stage's forward, backward and update as one function, called again and again."""
    import keras
    import tensorflow as tf

    model, optimizer = network(case._replace(stages=1)), keras.optimizers.SGD(1e-6, momentum=0.9)
    optimizer.build(model.trainable_variables)
    units, rows = case.size
    x = tf.ones([rows, units])

    @tf.function(autograph=False)
    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = model(x, training=True)
        *gradients, by_input = tape.gradient(y, [*model.trainable_variables, x])
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return by_input

    def seconds() -> Seconds:
        with one_core():
            before = clocks()
            for _ in range(steps):
                step(x)
            return Seconds(*((end - start) / steps for start, end in zip(before, clocks(), strict=True)))

    return seconds


@contextmanager
def one_core() -> Iterator[None]:
    """All of this process's threads on its first core, TensorFlow's own ones too, which else would take the second."""
    before = {int(thread): os.sched_getaffinity(int(thread)) for thread in os.listdir("/proc/self/task")}
    for thread, cores in before.items():
        os.sched_setaffinity(thread, {min(cores)})
    try:
        yield
    finally:
        for thread, cores in before.items():
            os.sched_setaffinity(thread, cores)


def clocks() -> tuple[float, float]:
    """Seconds of the clock, and of all processors in this process."""
    return time.perf_counter(), time.process_time()


def rows(cases: Sequence[Case], rounds: Sequence[Sequence[Seconds]]) -> list[tuple[str, ...]]:
    """A line for every case."""
    lines = []
    for case, each in zip(cases, zip(*rounds, strict=True), strict=True):
        steps = [one.step_s for one in each]
        a_step_s, action_s = statistics.median(steps), statistics.median(one.action_s for one in each)
        pipeline = case.way not in (KERAS, FUNCTION)
        line = [
            case.way,
            str(case.stages if case.way != FUNCTION else 1),
            str(case.layers),
            str(case.microbatches or 1),
            f"{a_step_s * 1e3:.2f}",
            f"{min(steps) * 1e3:.2f} - {max(steps) * 1e3:.2f}",
            f"{statistics.median(one.processor_s for one in each) * 1e3:.2f}",
            f"{a_step_s / case.actions * 1e6:.0f}" if pipeline else "",
            f"{action_s * 1e6:.0f}" if pipeline else "",
        ]
        if cases[0].way == FUNCTION:
            reached = statistics.median(number[0].step_s / one.step_s for number, one in zip(rounds, each, strict=True))
            line.append(f"{reached:.0%}" if pipeline else "")
        lines.append(tuple(line))
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="append", choices=TABLES, help="several times if wanted (default: all)")
    parser.add_argument("--steps", type=int, default=200, help="steps of each case a round (default: 200)")
    parser.add_argument("--rounds", type=int, default=5, help="medians are of these (default: 5)")
    options = parser.parse_args(arguments)
    if options.steps <= FIRST:
        parser.error(f"--steps must be more than {FIRST}, which fill the pipeline and are not timed")
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    start_tensorflow(2)
    for name in options.table or TABLES:
        cases = TABLES[name]
        trainers = [trainer(case, options.steps) for case in cases]
        rounds = [[undisturbed(train) for train in trainers] for _ in range(1 + options.rounds)]
        del rounds[0]  # which traced
        header = ("stages", "layers each", "microbatches", "ms a step", "lowest - highest", "processors' ms")
        header += ("us an action", "within it")
        reached = ("reached",) if cases[0].way == FUNCTION else ()
        print(f"{name}; medians of {options.rounds} rounds")
        print(text_table(("", *header, *reached), rows(cases, rounds)), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
