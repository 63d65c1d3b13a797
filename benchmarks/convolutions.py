"""A small convolutional network: the seconds of all stages together, against plain Keras' training step.

Both run in this process on one core, in turn; the pipeline's stages one after another (1f1b, one microbatch), so that
their seconds add up to those of the whole. Splitting forward from backward should cost nothing: the ratio is 1.

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
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from experiments.quiet import start_tensorflow
from pipetrain.plan.table import table

STEPS = 20


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=4, help="(default: 4)")
    parser.add_argument("--batch-size", type=int, default=128, help="(default: 128)")
    parser.add_argument("--rounds", type=int, default=5, help="(default: 5)")
    options = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
    start_tensorflow(1)
    import keras
    import numpy as np

    import pipetrain

    def network() -> keras.Model:
        layers = keras.layers
        x = inputs = keras.Input((32, 32, 3))
        for channels in (32, 64, 128):
            x = layers.Conv2D(channels, 3, padding="same", activation="relu")(x)
            x = layers.MaxPooling2D()(x)
        return keras.Model(inputs, layers.Dense(10)(layers.Flatten()(x)))

    rng = np.random.default_rng(0)
    x = rng.normal(size=(STEPS * options.batch_size, 32, 32, 3)).astype("float32")
    y = rng.integers(0, 10, len(x))
    plain, pm = network(), pipetrain.PipelineModel(network(), options.stages, "1f1b", microbatches=1)
    for model in (plain, pm):
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        settings = {"jit_compile": False} if model is plain else {}
        model.compile(keras.optimizers.SGD(1e-3, momentum=0.9), loss, **settings)

    clock: dict[str, float] = {}
    timer = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: clock.update(start=time.perf_counter()),
        on_epoch_end=lambda epoch, logs: clock.update(end=time.perf_counter()),
    )

    def plain_s() -> float:
        plain.fit(x, y, batch_size=options.batch_size, verbose=0, callbacks=[timer])
        return (clock["end"] - clock["start"]) / STEPS

    def stages_s() -> float:
        before = len(pm.trace.spans)
        pm.fit(x, y, batch_size=options.batch_size, verbose=0)
        return sum(span.end_s - span.start_s for span in pm.trace.spans[before:]) / STEPS

    plain_s(), stages_s()
    rounds = [(plain_s(), stages_s()) for _ in range(options.rounds)]
    ratios = [ours / theirs for theirs, ours in rounds]
    names = ("plain Keras, 1 core", f"sum of {options.stages} stages, 1 core")
    rows = [
        (name, f"{statistics.median(seconds) * 1e3:.1f}", f"{ratio:.2f}")
        for name, seconds, ratio in zip(names, zip(*rounds, strict=True), (1.0, statistics.median(ratios)), strict=True)
    ]
    print(f"three convolutions with pooling, batch {options.batch_size}; medians of {options.rounds} rounds")
    print(table(("", "ms a step", "against plain Keras"), rows))
    print(f"lowest and highest ratio: {min(ratios):.2f} - {max(ratios):.2f}")


if __name__ == "__main__":
    main()
