"""Milliseconds of a step of ``coded-reduce`` with a slow worker under every parent, coded and uncoded.

Workers are processes of this machine. Their computing is emulated: a worker sleeps on its device for as long as its
rows are supposed to take, the last child of every parent some times as long, before it makes the gradients of a small
network; with ``--message-ms`` its messages take their time too, those of the slow ones as many times as long. The tree
that bears a straggler and the same one that bears none, which waits for all, train in turns in one process; the median
of all steps but the first of each turn is printed, with what the simulator predicts. With ``--simulated`` nothing is
trained: the table is what the simulator says of trees and of a ring.

How long it takes depends on the steps: both trees train --rounds + 1 turns of eight, each step of which takes as long
as the slowest worker that it waits for sleeps, and 40 to 90 ms more. By default that is about half a minute, after
twelve workers have started.
With --simulated it takes a few seconds.

examples:
  python benchmarks/coded_gradients.py
  python benchmarks/coded_gradients.py --tree 4,1 --slow 5 --whole-ms 400
  python benchmarks/coded_gradients.py --whole-ms 1200 --message-ms 100
  python benchmarks/coded_gradients.py --simulated
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.step_times import ends_s
from pipetrain.cli.arguments import add_scheme_options
from pipetrain.logs import text_table
from pipetrain.plan.cluster import Cluster, Level, Link
from pipetrain.plan.profile import BlockProfile, Profile
from pipetrain.schemes.coded_reduce import Tree
from pipetrain.simulation.coded_reduce import simulate_tree
from pipetrain.simulation.profiled import simulate_order

if TYPE_CHECKING:
    import keras

STEPS = 8  # of a turn
WIDTH, ROWS = 64, 240
MESSAGE_S = 1e-3  # that a message takes beside its bytes, for the simulator


def network() -> keras.Model:
    """Three small layers, whose own computing takes little."""
    import keras

    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(WIDTH, activation="relu") for _ in range(2)]
    return keras.Sequential([keras.Input((WIDTH,)), *layers, keras.layers.Dense(10)])


def is_slow(tree: Tree, worker: int) -> bool:
    """Whether it is the last child of its parent."""
    return tree.place(worker) == tree.children - 1


def emulate(slow: float, whole_s: float, message_s: float) -> None:
    """Let every worker sleep on its device for its share of ``whole_s`` before it computes, and its message be late."""
    import tensorflow as tf
    from tensorflow.python.data.experimental.ops.testing import sleep

    from pipetrain.compute.functions.kernels import direct
    from pipetrain.run.tree_worker import TreeExchange, TreeWorker

    def sleeping(microseconds: Any) -> Any:
        waited = tf.data.Dataset.range(1).apply(sleep(microseconds // 2))  # it sleeps twice for an element
        return waited.reduce(tf.constant(0, tf.int64), lambda total, each: total + each)

    traced = tf.function(sleeping, autograph=False).get_concrete_function(tf.TensorSpec([], tf.int64))
    call, compute, deliver = direct(traced), TreeWorker._compute, TreeExchange.deliver

    def slower(self: Any, step: Any, parts: Any, weights: Any) -> Any:
        tree, rows = self._job.tree, int(step.inputs[0].shape[0])
        share = sum(part.size for part in parts) / rows
        seconds = whole_s * share * (slow if is_slow(tree, self.worker) else 1.0)
        call(tf.constant(round(1e6 * seconds), tf.int64))
        return compute(self, step, parts, weights)

    def later(self: Any, step: Any, delivered: Any) -> None:
        time.sleep(message_s * (slow if is_slow(self._tree, delivered.worker) else 1.0))
        deliver(self, step, delivered)

    TreeWorker._compute = slower  # type: ignore[method-assign]
    if message_s:
        TreeExchange.deliver = later  # type: ignore[method-assign]


class Way:
    """A tree, and the milliseconds of its steps so far."""

    def __init__(self, tree: Tree, devices: Sequence[str]) -> None:
        import keras
        import numpy as np

        import pipetrain

        self.tree = tree
        self._pm = pipetrain.PipelineModel(network(), scheme=pipetrain.CodedReduce(*tree), devices=devices)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self._pm.compile(keras.optimizers.SGD(1e-3, momentum=0.9), loss)
        rng = np.random.default_rng(0)
        self._x = rng.normal(size=(STEPS * ROWS, WIDTH)).astype("float32")
        self._y = rng.integers(0, 10, len(self._x))
        self.ms: list[float] = []

    def turn(self, counts: bool) -> None:
        """Train for a turn, which ``counts`` unless it is to warm up."""
        import numpy as np

        ends = ends_s(self._pm, self._x, self._y, ROWS, shuffle=False)
        self.ms += [1e3 * each for each in np.diff(ends)] if counts else []

    @property
    def stragglers(self) -> str:
        """The steps that ended without the slow workers, and without the others."""
        counts = self._pm.stragglers
        slow = sum(count for worker, count in enumerate(counts) if is_slow(self.tree, worker))
        return f"{slow} / {sum(counts) - slow}"

    def weights(self) -> list[Any]:
        """Of the model."""
        return self._pm.get_weights()


def profiled(whole_s: float, size_bytes: int, rows: int = ROWS) -> Profile:
    """A model of one block that takes so long for a minibatch."""
    block = BlockProfile("model", whole_s / 3, 2 * whole_s / 3, output_bytes=0, weight_bytes=size_bytes)
    return Profile("one block", rows, (block,))


def predicted_ms(tree: Tree, slow: float, whole_s: float, size_bytes: int, link: Link) -> float:
    """What the simulator says of a step."""
    speeds = [1 / slow if is_slow(tree, worker) else 1.0 for worker in range(tree.workers)]
    profile, cluster = profiled(whole_s, size_bytes), Cluster((Level(link),))
    shape = tree.children, tree.depth, tree.stragglers
    return 1e3 * simulate_tree(profile, *shape, cluster, minibatches=12, speeds=speeds).step_s


def measure(options: argparse.Namespace) -> None:
    """Both trees in turns."""
    import numpy as np

    import pipetrain

    children, depth = options.tree
    trees = [Tree(children, depth, stragglers) for stragglers in (0, options.stragglers)]
    whole_s = options.whole_ms / 1e3
    with pipetrain.LocalWorkers(trees[0].workers) as workers:
        devices = pipetrain.connect(workers.addresses)
        emulate(options.slow, whole_s, options.message_ms / 1e3)
        ways = [Way(tree, devices) for tree in trees]
        for number in range(options.rounds + 1):
            for way in ways:
                way.turn(counts=number > 0)
        differences = [np.abs(a - b).max() for a, b in zip(*(way.weights() for way in ways), strict=True)]
    taken_ms = [statistics.median(way.ms) for way in ways]
    rows = []
    size_bytes = 4 * sum(each.size for each in ways[0].weights())
    for way, ms in zip(ways, taken_ms, strict=True):
        said = predicted_ms(way.tree, options.slow, whole_s, size_bytes, Link(1e9, MESSAGE_S))
        computing = 1e3 * whole_s * float(way.tree.load)
        rows.append(
            (
                str(way.tree),
                str(way.tree.load),
                f"{computing:.0f}",
                f"{ms:.1f}",
                f"{taken_ms[0] / ms:.2f}x",
                "-" if options.message_ms else f"{said:.1f} ({said / ms - 1:+.0%})",
                way.stragglers,
            )
        )
    header = (
        "tree",
        "load",
        "computing ms",
        "ms a step",
        "against uncoded",
        "simulated ms",
        "left behind: slow / others",
    )
    print(text_table(header, rows))
    print(f"The weights of both differ by {max(differences):.1g} at most.", flush=True)


def simulate() -> None:
    """What trees and a ring take, with and without stragglers, where computing or bandwidth counts."""
    rows = []
    for whole_s, mib in ((12.0, 4), (1.2, 4), (0.3, 100)):
        for tree in (Tree(3, 2, 1), Tree(4, 2, 1), Tree(12, 1, 1)):
            profile = profiled(whole_s, mib * 2**20, 1200)
            cluster = Cluster((Level(Link(125e6, 1e-3), contention="port"),))
            ring = 1e3 * simulate_order(profile, "all-reduce", tree.workers, cluster, "none").step_s
            late_s = 4 * whole_s / tree.workers  # that the slow worker's computing is longer
            found = [f"{ring:.0f}", f"{ring + 1e3 * late_s:.0f}"]
            for stragglers in (0, 1):
                like = tree._replace(stragglers=stragglers)
                shape = like.children, like.depth, like.stragglers
                for slow in (1.0, 5.0):
                    speeds = [1 / slow if is_slow(like, worker) else 1.0 for worker in range(like.workers)]
                    trace = simulate_tree(profile, *shape, cluster, minibatches=12, speeds=speeds)
                    found.append(f"{1e3 * trace.step_s:.0f}")
            rows.append((f"{whole_s * 1e3:.0f}", f"{mib}", f"{tree.children}, {tree.depth}", *found))
    header = (
        "computing ms",
        "weights MiB",
        "tree",
        "all-reduce",
        "one slow",
        "uncoded",
        "slow",
        "s = 1",
        "s = 1, slow",
    )
    print(text_table(header, rows))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--tree",
        type=lambda text: tuple(map(int, text.split(","))),
        default=(3, 2),
        metavar="N,L",
        help="(default: 3,2)",
    )
    parser.add_argument(
        "--slow", type=float, default=5.0, metavar="X", help="of the last child of every parent (default: 5)"
    )
    parser.add_argument(
        "--whole-ms", type=float, default=600.0, metavar="MS", help="that one worker computes (default: 600)"
    )
    parser.add_argument(
        "--message-ms", type=float, default=0.0, metavar="MS", help="that a message to a parent takes (default: none)"
    )
    parser.add_argument("--rounds", type=int, default=4, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--simulated", action="store_true", help="only the table of simulated steps")
    add_scheme_options(parser, ["stragglers"], defaults={"stragglers": 1})
    options = parser.parse_args()
    simulate() if options.simulated else measure(options)


if __name__ == "__main__":
    main()
