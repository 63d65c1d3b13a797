"""What messages within a function take of the processors that compute at the same time, measured on the workers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cache
from itertools import combinations
from typing import Any

import numpy as np
import tensorflow as tf

from pipetrain.cluster.connection import joins, task_of
from pipetrain.plan.cluster import Cluster

HOST = "/device:CPU:0"
SIDE = 256  # of the matrices that are multiplied meanwhile
COMPUTED_S = 0.2  # what the multiplications take; the messages arrive within less
SENT_S, MOST_BYTES = 0.1, 2**23  # what the large messages take together each way, and their bytes at most
LARGE, SMALL = 8, 60  # so many messages each way
REPEATS = 5


def message_work(devices: Sequence[str], cluster: Cluster) -> tuple[float, float]:
    """Seconds of a computing device that each message takes from it at either end, and seconds for each byte.

    Measured between the first two devices of two processes; ``cluster`` is that of the devices.

    By how much longer a device multiplies matrices while it sends and gets messages, as gradients are exchanged during
    a backward. Where a device's cores are more than it computes with, that is nothing.
    """
    for (i, first), (j, last) in combinations(enumerate(devices), 2):
        if task_of(first) != task_of(last):
            return _measured(joins(), first, last, cluster.link(i, j).bandwidth_bytes_per_s)
    return 0.0, 0.0


@cache
def _measured(joined: int, first: str, last: str, bandwidth_bytes_per_s: float) -> tuple[float, float]:
    size_bytes = 4 + int(min(MOST_BYTES, SENT_S * bandwidth_bytes_per_s) / LARGE)
    functions = [_function(first, last, count, each) for count, each in ((0, 4), (SMALL, 4), (LARGE, size_bytes))]
    with tf.device(first):  # no worker fetches from this process
        turns = tf.constant(100)
        functions[0](turns).numpy()
        turns = tf.constant(int(100 * COMPUTED_S / _seconds(functions[0], turns)) + 1)
    taken_s = np.array([[_seconds(function, turns) for function in functions] for _ in range(REPEATS + 1)])[1:]
    alone_s, small_s, large_s = np.median(taken_s, axis=0)
    message_s = max(0.0, small_s - alone_s) / (2 * SMALL)
    return message_s, max(0.0, (large_s - alone_s) / (2 * LARGE) - message_s) / size_bytes


def _seconds(function: Callable[[tf.Tensor], Any], turns: tf.Tensor) -> float:
    start_s = time.perf_counter()
    function(turns).numpy()
    return time.perf_counter() - start_s


def _function(first: str, last: str, count: int, size_bytes: int) -> Callable[[tf.Tensor], tf.Tensor]:
    """Multiplies on the first device so many times, while so many messages are sent each way."""

    def run(turns: tf.Tensor) -> tf.Tensor:
        results = []
        with tf.device(first):
            identity = tf.eye(SIDE)
            _, product = tf.while_loop(
                lambda n, _: n < turns, lambda n, x: (n + 1, x @ identity), (0, tf.ones([SIDE, SIDE]))
            )
            results.append(product[0, 0])
        for source, sink in ((first, last), (last, first)):
            for n in range(count):
                with tf.device(source):
                    sent = tf.fill([size_bytes // 4], tf.cast(turns + n, tf.float32))
                with tf.device(sink):
                    results.append(tf.identity(sent)[0])
        with tf.device(HOST):
            return tf.add_n([tf.identity(each) for each in results])

    return tf.function(run, autograph=False)
