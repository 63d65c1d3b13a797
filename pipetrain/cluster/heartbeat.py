"""Signs of life: the controller writes them to a worker, which so knows that it has not been left."""

from __future__ import annotations

import atexit
import os
import threading
import time

import tensorflow as tf

from pipetrain.cluster.server import ALIVE

BEAT_S = 5.0


class Heartbeat(threading.Thread):
    """Writes to one worker every so many seconds, for as long as the process lasts."""

    def __init__(self, device: str) -> None:
        super().__init__(name=f"heartbeat to {device}", daemon=True)
        self._device, self._ended = device, threading.Event()
        atexit.register(self.end)

    def run(self) -> None:
        """The thread's body."""
        while not self._ended.is_set():
            try:
                with tf.device(self._device):
                    tf.io.write_file(ALIVE, f"{os.getpid()} {time.time()}")
            except tf.errors.OpError:  # it has died; one that is started anew, and joined, gets them again
                pass
            self._ended.wait(BEAT_S)

    def end(self) -> None:
        """Write no more; waits a moment for one that is on its way, and no longer: the worker may be gone."""
        self._ended.set()
        self.join(1.0)
