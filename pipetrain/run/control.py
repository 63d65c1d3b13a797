"""What the threads of a pipeline share: where they report, and the switch that pauses them."""

from __future__ import annotations

import threading
from collections.abc import Callable

from pipetrain.compute.cores import finish
from pipetrain.run.messages import Output, Updated


class Control:
    """What the threads share: where they report, and the switch that pauses them.

    ``waits``: whether threads wait for GPUs, so that spans and transfers have the times of completion.
    """

    def __init__(
        self,
        report: Callable[[Output | Updated], None],
        fail: Callable[[BaseException, str], None],
        wants_snapshot: Callable[[int], bool],
        waits: bool = False,
    ) -> None:
        self.report, self.fail, self.wants_snapshot, self.waits = report, fail, wants_snapshot, waits
        self.running = threading.Event()
        self.running.set()

    def wait_if_paused(self) -> None:
        """Wait while the pipeline is paused."""
        if not self.running.is_set():  # waiting would take the event's lock, which all share
            self.running.wait()

    def finish(self, device: str) -> None:
        """Wait until the device has finished its calls, if the trace is to have the times of completion."""
        if self.waits:
            finish(device)
