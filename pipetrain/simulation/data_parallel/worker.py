"""One worker's step in simulated time: every layer forward when what it needs is there, then every layer backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pipetrain.schemes.transfers.plan import Pack
from pipetrain.schemes.transfers.workload import Workload
from pipetrain.simulation.data_parallel.clock import SimulatedDevice
from pipetrain.simulation.data_parallel.messages import SimulatedMessage


class WorkerStep:
    """Goes through the layers, each when the one before has ended and the packs that it reads are there.

    Args:
        workload: its layers.
        device: that computes them.
        step: which step it is.
        awaited: the packs that come to it before layers can run forward.
        made: is told the number of every layer that has run backward, the last layer first.
        ready: is called when all that is awaited is there.
    """

    def __init__(
        self,
        workload: Workload,
        device: SimulatedDevice,
        step: int,
        awaited: Sequence[Pack],
        made: Callable[[int], None],
        ready: Callable[[], None],
    ) -> None:
        self._workload, self._device, self._step, self._made = workload, device, step, made
        self._ready, self._left = ready, len(awaited)
        self._missing = [0] * len(workload.layers)
        self._messages: list[list[SimulatedMessage]] = [[] for _ in workload.layers]
        self._at, self._waits = -1, False  # the layer that runs forward or is next to
        for pack in awaited:
            for layer in self._readers(pack):
                self._missing[layer] += 1

    def begin(self) -> None:
        """What comes before the first layer is there."""
        if not self._left:
            self._ready()
        self._forward(0)

    def there(self, pack: Pack, messages: Sequence[SimulatedMessage]) -> None:
        """A pack is there, by these messages."""
        self._left -= 1
        for layer in self._readers(pack):
            self._missing[layer] -= 1
            self._messages[layer] += messages
        if self._waits and not self._missing[self._at]:
            self._waits = False
            self._forward(self._at)
        if self._at >= 0 and not self._left:  # else it is told so when it begins
            self._ready()

    def _readers(self, pack: Pack) -> list[int]:
        """The layers that are the first to read variables of the pack."""
        return list(dict.fromkeys(self._workload.owner[n] for n in pack.variables))

    def _forward(self, layer: int) -> None:
        self._at = layer
        if layer == len(self._missing):
            self._backward(layer - 1)
        elif self._missing[layer]:
            self._waits = True
        else:
            seconds = self._workload.layers[layer].forward_s
            self._device.do(seconds, "F", self._step, lambda start_s: self._ran(layer, start_s))

    def _ran(self, layer: int, start_s: float) -> None:
        for message in self._messages[layer]:
            if message.used_s == message.arrived_s:  # the first of a pack's readers
                message.used_s = start_s
        self._forward(layer + 1)

    def _backward(self, layer: int) -> None:
        if layer < 0:
            return

        def ran(start_s: float) -> None:
            self._made(layer)
            self._backward(layer - 1)

        self._device.do(self._workload.layers[layer].backward_s, "B", self._step, ran)
