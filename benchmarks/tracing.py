"""What recording a run costs: seconds of an epoch that records spans and transfers, against one that does not.

Seconds that passed, and seconds of the processor, which other processes on the machine disturb less.

One process trains, with a trace and without (``is_traced``) by turns, and changes which of the two comes first. The
small networks' actions are so short that they are the worst case. On a busy machine these differ by more than recording
costs; so it is also timed alone, as a device's thread does it: the fastest of many times that what a minibatch needs is
recorded.

examples:
  python benchmarks/tracing.py
  python benchmarks/tracing.py --rounds 10 --scheme gpipe
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from pipetrain.cli.environment import start_tensorflow
from pipetrain.logs import text_table
from pipetrain.schemes.table import SCHEMES

if TYPE_CHECKING:
    import pipetrain


class Network(NamedTuple):
    """Dense layers, and how they are trained."""

    layers: int
    width: int
    stages: int
    batch_size: int
    steps: int


REPEATED = 500  # records that are timed together
HEADER = ("cost, passed", "quartiles", "cost, of the processor", "quartiles", "of the fastest")


class Taken(NamedTuple):
    """Seconds by the clock and of all the process' threads."""

    passed_s: float
    processor_s: float


def now() -> Taken:
    """Both since some time."""
    return Taken(time.perf_counter(), time.process_time())


NETWORKS = (Network(8, 128, 2, 32, 200), Network(8, 128, 4, 32, 200), Network(8, 1024, 2, 128, 20))


def model_of(network: Network, scheme: str) -> pipetrain.PipelineModel:
    """The network as a pipeline, compiled."""
    import keras

    import pipetrain

    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(network.width, activation="relu") for _ in range(network.layers)]
    model = keras.Sequential([keras.Input((network.width,)), *layers, keras.layers.Dense(10)])
    cuts = [layers[network.layers * n // network.stages - 1].name for n in range(1, network.stages)]
    pm = pipetrain.PipelineModel(model, scheme=scheme, cuts=cuts)
    pm.compile(keras.optimizers.SGD(1e-3), loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return pm


def measured(network: Network, scheme: str, rounds: int) -> tuple[list[Taken], list[Taken], float]:
    """What an epoch takes with and without recording, in every round; and the records of a minibatch."""
    import keras
    import numpy as np

    pm, rng = model_of(network, scheme), np.random.default_rng(0)
    x = rng.normal(size=(network.steps * network.batch_size, network.width)).astype("float32")
    y = rng.integers(0, 10, len(x)).astype("int32")
    clock: list[Taken] = []
    timer = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: clock.append(now()),
        on_epoch_end=lambda epoch, logs: clock.append(now()),  # after the drain
    )

    def taken() -> Taken:
        pm.fit(x, y, batch_size=network.batch_size, verbose=0, callbacks=[timer])
        begin, end = clock[-2:]
        return Taken(end.passed_s - begin.passed_s, end.processor_s - begin.processor_s)

    taken()
    records = (len(pm.trace.spans) + len(pm.trace.transfers)) / network.steps
    seconds: dict[bool, list[Taken]] = {True: [], False: []}
    for number in range(rounds):
        for records_it in (True, False) if number % 2 else (False, True):
            pm.is_traced = records_it
            seconds[records_it].append(taken())
        print(f"\rround {number + 1} of {rounds}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return seconds[True], seconds[False], records


def alone_s(network: Network) -> float:
    """Seconds of a minibatch's spans and transfers, their part of the drain included."""
    import tensorflow as tf

    from pipetrain.run.channels import Destination, Sender
    from pipetrain.run.gradient_exchange import Mailbox
    from pipetrain.trace.records import Span

    values = [tf.zeros((network.batch_size, network.width))]
    spans: list[Span] = []

    def sending_s(microbatch: int | None) -> float:
        outlet = Sender([Destination(Mailbox(), values[0].device)])
        begin_s = time.perf_counter()
        for _ in range(REPEATED):
            outlet.send(lambda sent: sent, values, network.batch_size, microbatch)
        sorted(outlet.transfers("F", 0, 1), key=lambda each: each.start_s)
        return (time.perf_counter() - begin_s) / REPEATED

    def span_s() -> float:
        begin_s = time.perf_counter()
        for _ in range(REPEATED):
            start_s = time.perf_counter()
            spans.append(Span("F", 0, 0, values[0].device, start_s, time.perf_counter(), 0, 0))
        sorted(spans, key=lambda each: each.start_s)
        spans.clear()
        return (time.perf_counter() - begin_s) / REPEATED

    transfer_s = min(sending_s(0) for _ in range(100)) - min(sending_s(None) for _ in range(100))
    return 2 * network.stages * min(span_s() for _ in range(100)) + 2 * (network.stages - 1) * transfer_s


def row(network: Network, recorded: list[Taken], bare: list[Taken], records: float) -> tuple[str, ...]:
    """A network's line of the table."""
    passed, processor = (
        [a / b - 1 for a, b in zip(*each, strict=True)]
        for each in zip(zip(*recorded, strict=True), zip(*bare, strict=True), strict=True)
    )
    processor_s, cost_s = min(each.processor_s for each in bare) / network.steps, alone_s(network)
    return (
        f"{network.layers} x {network.width}, batch {network.batch_size}, {network.stages} stages",
        f"{records:.0f}",
        f"{processor_s * 1e3:.2f}",
        f"{cost_s * 1e6:.0f}",
        f"{cost_s / processor_s:.2%}",
        *_spread(passed),
        *_spread(processor),
        f"{min(each.passed_s for each in recorded) / min(each.passed_s for each in bare) - 1:+.1%}",
    )


def _spread(ratios: list[float]) -> tuple[str, str]:
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:+.1%}", f"{low:+.1%} to {high:+.1%}"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scheme", choices=SCHEMES, default="vanilla", help="(default: vanilla)")
    parser.add_argument("--rounds", type=int, default=30, help="(default: 30)")
    options = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    start_tensorflow(max(network.stages for network in NETWORKS))
    rows = []
    for network in NETWORKS:
        rows.append(row(network, *measured(network, options.scheme, options.rounds)))
        print("  ".join(rows[-1]), file=sys.stderr)
    print(f"dense networks, {options.scheme}, two cores; {options.rounds} rounds")
    header = ("", "records a step", "ms of the processor", "us to record", "cost alone", *HEADER)
    print(text_table(header, rows))


if __name__ == "__main__":
    main()
