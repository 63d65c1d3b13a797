"""Import TensorFlow without its start-up messages."""

from __future__ import annotations

import os

from pipetrain.logs import quiet_stderr


def start_tensorflow(cpu_devices: int) -> None:
    """Import and start TensorFlow on its GPUs, or on this many logical CPU devices where it has none.

    TensorFlow greets on standard error before its log level counts (about oneDNN, about missing GPU drivers).
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    with quiet_stderr():
        import tensorflow as tf

        from pipetrain.devices import set_cpu_devices

        if not tf.config.list_physical_devices("GPU"):
            set_cpu_devices(cpu_devices)
        tf.config.list_logical_devices()
    tf.get_logger().setLevel("ERROR")
