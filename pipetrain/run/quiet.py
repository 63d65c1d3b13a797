"""Import TensorFlow without its start-up messages."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_stderr() -> Iterator[None]:
    """Hold back whatever is written to standard error, by native code too; show it if an exception passes through."""
    sys.stderr.flush()
    saved = os.dup(2)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        except BaseException:
            held.seek(0)
            os.write(saved, held.read())
            raise
        finally:
            sys.stderr.flush()
            os.dup2(saved, 2)
            os.close(saved)


def start_tensorflow(cpu_devices: int) -> None:
    """Import and start TensorFlow on its GPUs, or on this many logical CPU devices where it has none.

    TensorFlow greets on standard error before its log level counts (about oneDNN, about missing GPU drivers).
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    with quiet_stderr():
        import tensorflow as tf

        from pipetrain.run.devices import set_cpu_devices

        if not tf.config.list_physical_devices("GPU"):
            set_cpu_devices(cpu_devices)
        tf.config.list_logical_devices()
    tf.get_logger().setLevel("ERROR")
