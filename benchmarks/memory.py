"""What each policy keeps in memory beside the newest weights, stage by stage, measured.

Four stages, of which one at a time is large (its weights are nearly all of the model's), and a small batch: what the
process holds more than under ``vanilla`` is then what the policy keeps at that stage. "Between actions" is what
TensorFlow holds while all stages wait in the midst of training, the median of several times; "at the fullest" its peak.
Each figure is a process of its own, with TensorFlow's counting allocator (TF_CPU_ALLOCATOR_USE_BFC=1). Six to
ten minutes.

examples:
  python benchmarks/memory.py
  python benchmarks/memory.py --policy weight-stashing --policy spectrain
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from pipetrain.cli.environment import start_tensorflow
from pipetrain.logs import text_table
from pipetrain.schemes.options import SpecTrain

STAGES = 4
LARGE, LAYERS, SMALL, ROWS, STEPS = 768, 8, 8, 8, 24
POLICIES: dict[str, dict[str, Any]] = {
    "vanilla": {"scheme": "vanilla"},
    "weight-stashing": {"scheme": "weight-stashing"},
    "vertical-sync": {"scheme": "vertical-sync"},
    "spectrain": {"scheme": "spectrain"},
    "spectrain/local": {"scheme": SpecTrain(horizon="local")},
    "spectrain/fitted": {"scheme": SpecTrain(horizon="fitted")},
    "spectrain, Nesterov": {"scheme": "spectrain"},  # whose last update no slot holds
    "spike-compensation": {"scheme": "spike-compensation"},
    "2bw": {"scheme": "2bw", "microbatches": STAGES},
}


class Held(NamedTuple):
    """Bytes of a process while its stages rest, and at its fullest; and those of the large stage's weights."""

    resting: int
    fullest: int
    weights: int


def measure(policy: str, large: int) -> Held:
    """Train with stage ``large`` large, in this process."""
    start_tensorflow(STAGES)
    import keras
    import tensorflow as tf

    import pipetrain

    widths = [[*[LARGE] * (LAYERS + 1), SMALL] if stage == large else [SMALL] for stage in range(STAGES)]
    layers = [
        keras.layers.Dense(width, "tanh", name=f"s{stage}_{n}")
        for stage in range(STAGES)
        for n, width in enumerate(widths[stage])
    ]
    model = keras.Sequential([keras.Input((SMALL,)), *layers])
    cuts = [f"s{stage}_{len(widths[stage]) - 1}" for stage in range(STAGES - 1)]
    pipe = pipetrain.PipelineModel(model, cuts=cuts, **POLICIES[policy])
    pipe.compile(keras.optimizers.SGD(1e-3, momentum=0.9, nesterov=policy.endswith("Nesterov")), "mse")
    minibatch = tf.ones([ROWS, SMALL])
    minibatches = tf.data.Dataset.from_tensors((minibatch, minibatch)).repeat(STEPS)
    held: list[int] = []

    def look(step: int, logs: dict[str, float]) -> None:
        if step < STAGES or step % 2:
            return
        time.sleep(0.3)  # until every stage waits for the next minibatch
        gc.collect()
        held.append(tf.config.experimental.get_memory_info("CPU:0")["current"])

    pipe.fit(minibatches, verbose=0)  # traces, which takes memory too
    tf.config.experimental.reset_memory_stats("CPU:0")
    pipe.fit(minibatches, verbose=0)
    fullest = tf.config.experimental.get_memory_info("CPU:0")["peak"]
    pipe.fit(minibatches, verbose=0, callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=look)])
    weights = sum(4 * each.shape.num_elements() for each in model.trainable_variables)
    return Held(int(median(held)), fullest, weights)


def apart(policy: str, large: int) -> Held:
    """The same in a process of its own."""
    command = [sys.executable, __file__, "--one", policy, str(large)]
    environment = {**os.environ, "TF_CPU_ALLOCATOR_USE_BFC": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{policy}, stage {large}: {done.stderr}")
    return Held(*json.loads(done.stdout.splitlines()[-1]))


def extra(policy: str, large: int, vanilla: Held) -> tuple[float, float]:
    """What the policy holds more than vanilla, resting and at the fullest, in multiples of the stage's weights."""
    held = apart(policy, large)
    return (held.resting - vanilla.resting) / held.weights, (held.fullest - vanilla.fullest) / held.weights


def report(policies: Sequence[str], bar: Any) -> str:
    """The table of all stages and policies."""
    vanilla = [apart("vanilla", stage) for stage in range(STAGES)]
    rows = []
    for policy in policies:
        found = []
        for stage in range(STAGES):
            found.append(extra(policy, stage, vanilla[stage]))
            bar()
        rows.append((policy, *(f"{resting:.2f}" for resting, _ in found), *(f"{fullest:.2f}" for _, fullest in found)))
    stages = [f"stage {stage}" for stage in range(STAGES)]
    mib = vanilla[0].weights / 2**20
    return (
        f"In multiples of the stage's weights ({mib:.1f} MiB), beyond vanilla: between actions, then at the fullest\n\n"
        f"{text_table(('policy', *stages, *stages), rows)}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", action="append", choices=POLICIES, help="(default: all)")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one:
        print(json.dumps(measure(options.one[0], int(options.one[1]))))
        return
    import keras

    policies = options.policy or [name for name in POLICIES if name != "vanilla"]
    bar = keras.utils.Progbar(STAGES * len(policies), verbose=int(sys.stderr.isatty()))
    print(report(policies, lambda: bar.add(1)))


if __name__ == "__main__":
    main()
