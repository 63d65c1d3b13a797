"""Real signals at random moments of a new model's first ``fit``, in a process of its own: ``SCHEME SEED``.

A signal may come while TensorFlow or Keras enters or leaves a graph or a scope, which they then never leave: nothing
can be traced in that process any more, whoever asks. Prints how many signals came before one did so, or all of them.
"""

from __future__ import annotations

import random
import signal
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

if __name__ == "__main__":
    from pipetrain.cli.environment import start_tensorflow

    start_tensorflow(2)

import keras  # noqa: E402
import tensorflow as tf  # noqa: E402
from interruption import METHODS, assert_trains_as_undisturbed, assert_whole, pipeline, trained  # noqa: E402

TIMES = 30


def stuck():
    """Whether TensorFlow or Keras is in a graph or a scope that nobody will leave."""
    scopes = tf.distribute.has_strategy(), keras.src.backend.common.stateless_scope.in_stateless_scope()
    return any(scopes) or not tf.executing_eagerly()


def main(scheme, seed):
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    pm = pipeline(scheme)
    weights = pm.get_weights()
    METHODS["fit"](pm)
    want = 0, *trained(pm, weights)
    pm = pipeline(scheme)
    begun = time.perf_counter()
    METHODS["fit"](pm)
    took_s, chance, interrupted = time.perf_counter() - begun, random.Random(seed), 0
    for _ in range(TIMES):
        pm = pipeline(scheme)
        weights = pm.get_weights()
        try:
            signal.setitimer(signal.ITIMER_REAL, chance.uniform(0.02, took_s))
            METHODS["fit"](pm)
        except BaseException as error:
            signal.setitimer(signal.ITIMER_REAL, 0)
            # Tracing turns an interrupt into an error of its own now and then.
            if "KeyboardInterrupt" not in f"{type(error)} {error}" and not stuck():
                raise
            interrupted += 1
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        if stuck():
            break
        assert_whole(pm)
        assert_trains_as_undisturbed(pm, weights, want)
    print(interrupted)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
