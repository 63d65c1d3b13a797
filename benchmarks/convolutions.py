"""A small convolutional network: the seconds of all stages together, against plain Keras' training step.

Both run in this process on one core, in turn; the stages one after another on this thread, so that their seconds
(forward, backward, update) add up to those of the whole. Splitting should cost nothing: the ratio is 1.

examples:
  python benchmarks/convolutions.py
  python benchmarks/convolutions.py --stages 2 --batch-size 32
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from pipetrain.cli.environment import start_tensorflow
from pipetrain.logs import text_table

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

    from pipetrain.compute.functions.stage import Stage

STEPS = 20


def network() -> keras.Model:
    """Three convolutions, each followed by pooling, and a dense layer."""
    from keras import Input, Model, layers

    x = inputs = Input((32, 32, 3))
    for channels in (32, 64, 128):
        x = layers.Conv2D(channels, 3, padding="same", activation="relu")(x)
        x = layers.MaxPooling2D()(x)
    return Model(inputs, layers.Dense(10)(layers.Flatten()(x)))


def plain_step(x: Any, y: Any, batch_size: int) -> Callable[[], float]:
    """Plain Keras: gives the seconds a step of one epoch."""
    import keras

    model = network()
    model.compile(keras.optimizers.SGD(1e-3, momentum=0.9), entropy(), jit_compile=False)
    clock: dict[str, float] = {}
    timer = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: clock.update(start=time.perf_counter()),
        on_epoch_end=lambda epoch, logs: clock.update(end=time.perf_counter()),
    )

    def seconds() -> float:
        model.fit(x, y, batch_size=batch_size, verbose=0, callbacks=[timer])
        return (clock["end"] - clock["start"]) / STEPS

    return seconds


def entropy() -> keras.Loss:
    """The loss of both."""
    from keras.losses import SparseCategoricalCrossentropy

    return SparseCategoricalCrossentropy(from_logits=True)


def cut_network(count: int) -> list[Stage]:
    """The network in stages of as many blocks each, traced and with their weights."""
    import keras
    import tensorflow as tf

    from pipetrain.compute.functions.stage import Stage
    from pipetrain.compute.graph.blocks import Chain

    loss = entropy()
    chain = Chain(network())
    ends = [len(chain.blocks) * (n + 1) // count for n in range(count)]
    stages, masks = [], [None]
    for first, end in zip([0, *ends[:-1]], ends, strict=True):
        last = end == ends[-1]
        optimizer = keras.optimizers.SGD(1e-3, momentum=0.9)
        function = (lambda y, outputs, weights: loss(y, outputs[0])) if last else None
        stages.append(Stage(chain.segment(first, end), "/device:CPU:0", optimizer, function))
        stages[-1].load()
        masks = stages[-1].trace(masks, (tf.TensorSpec([None], "int64"), None) if last else None)
    return stages


def train(stages: list[Stage], x: tf.Tensor, y: tf.Tensor) -> None:
    """One minibatch through all stages and back."""
    from pipetrain.compute.functions.stage_values import BoundaryTensors, Step
    from pipetrain.compute.functions.weight_binding import Newest

    values, kept, gradients = BoundaryTensors([x], [None]), [], [1.0]
    for stage in stages:
        result = stage.forward(Newest(), values, (y, None) if stage is stages[-1] else None)
        values = result.output
        kept.append(result.kept)
    for stage in reversed(stages):
        gradients = stage.backward(Newest(), kept.pop(), gradients, 1.0, step=Step(1e-3)).by_input


def stages_step(x: Any, y: Any, batch_size: int, count: int) -> Callable[[], float]:
    """The stages: gives the seconds a step of one epoch."""
    import tensorflow as tf

    stages = cut_network(count)
    starts = range(0, len(x), batch_size)
    batches = [tuple(tf.constant(array[n : n + batch_size]) for array in (x, y)) for n in starts]

    def seconds() -> float:
        start = time.perf_counter()
        for batch in batches:
            train(stages, *batch)
        return (time.perf_counter() - start) / STEPS

    return seconds


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=4, help="(default: 4)")
    parser.add_argument("--batch-size", type=int, default=128, help="(default: 128)")
    parser.add_argument("--rounds", type=int, default=9, help="(default: 9)")
    options = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
    start_tensorflow(1)
    import numpy as np

    rng = np.random.default_rng(0)
    x = rng.normal(size=(STEPS * options.batch_size, 32, 32, 3)).astype("float32")
    y = rng.integers(0, 10, len(x))
    sides = plain_step(x, y, options.batch_size), stages_step(x, y, options.batch_size, options.stages)
    rounds = [[side() for side in sides] for _ in range(1 + options.rounds)][1:]  # the first one traces
    ratios = [ours / theirs for theirs, ours in rounds]
    names = "plain Keras, 1 core", f"sum of {options.stages} stages, 1 core"
    middle = 1.0, statistics.median(ratios)
    rows = [
        (name, f"{statistics.median(seconds) * 1e3:.1f}", f"{ratio:.2f}")
        for name, seconds, ratio in zip(names, zip(*rounds, strict=True), middle, strict=True)
    ]
    print(f"three convolutions with pooling, batch {options.batch_size}; medians of {options.rounds} rounds")
    print(text_table(("", "ms a step", "against plain Keras"), rows))
    print(f"lowest and highest ratio: {min(ratios):.2f} - {max(ratios):.2f}")


if __name__ == "__main__":
    main()
