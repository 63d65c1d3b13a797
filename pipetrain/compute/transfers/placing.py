"""What functions read from outside, on the devices that run them."""

from __future__ import annotations

import tensorflow as tf


def placed(captured: tf.Tensor, device: str) -> tf.Tensor:
    """What a function reads from outside, on the device that runs it: no worker fetches from this process."""
    if captured.dtype in (tf.resource, tf.variant):
        return captured
    with tf.device(device):
        return tf.identity(captured)
