"""Programs of training steps: tasks of devices and messages between them, and who waits for what; and their run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

from pipetrain.schemes.actions import Op
from pipetrain.simulation.kernel import Kernel, SimulatedMessage
from pipetrain.trace.records import What


class Task(NamedTuple):
    """A piece of a device's work; of those that may begin the device takes that of the least priority number."""

    device: int
    op: Op
    seconds: float
    priority: int = 0


class Send(NamedTuple):
    """A message; ``what`` is None where a trace does not have it.

    ``behind`` is the number of an acknowledgement without which it does not leave. Of messages that wait behind one,
    those leave first that have waited longest.
    """

    what: What | None
    source: int
    sink: int
    size_bytes: float
    pack: int = 0
    behind: int | None = None


class Join(NamedTuple):
    """Takes no time. Where it is ``shared``, the messages that it uses share the way: each is there when all are."""

    shared: bool = False


class Acknowledgement(NamedTuple):
    """Of messages: what the last one's receiver tells its sender, on their connection. A step does not wait for it."""


Item = Task | Send | Join | Acknowledgement


class StepProgram:
    """What devices do and send in a step.

    Items have numbers. An item begins when all is done that it awaits; of what may then begin at the same time, that
    comes first which was first said to await it. ``used`` are the messages that a task uses: their first use is when
    it begins. ``pause_s`` are the seconds between the end of this step and the next one.
    """

    def __init__(self, pause_s: float = 0.0) -> None:
        self.pause_s = pause_s
        self.items: list[Item] = []
        self.awaits: list[int] = []  # of how many others each waits
        self.after: list[list[int]] = []  # which await each
        self.used: list[list[int]] = []

    def add(self, item: Item, awaits: Iterable[int] = (), used: Iterable[int] = ()) -> int:
        """An item more; its number."""
        number = len(self.items)
        self.items.append(item)
        self.awaits.append(0)
        self.after.append([])
        self.used.append([*used])
        for awaited in awaits:
            self.wait(number, awaited)
        return number

    def wait(self, number: int, awaited: int) -> None:
        """Let an item await another."""
        self.awaits[number] += 1
        self.after[awaited].append(number)


class StepSimulation:
    """So many steps, each by its program; a step begins when the one before has ended everywhere.

    Args:
        kernel: the devices.
        programs: of the steps, the first one's number being ``first``.
    """

    def __init__(self, kernel: Kernel, programs: Sequence[StepProgram], first: int = 0) -> None:
        self._kernel, self._programs, self._first, self._step = kernel, programs, first, first - 1

    def run(self) -> None:
        """All steps."""
        self._begin()
        self._kernel.clock.run()

    def _begin(self) -> None:
        self._step += 1
        if self._step - self._first == len(self._programs):
            return
        program = self._program = self._programs[self._step - self._first]
        self._items, self._missing = program.items, [*program.awaits]
        self._left = sum(not isinstance(item, Acknowledgement) for item in program.items)
        self._messages: dict[int, SimulatedMessage] = {}
        self._behind: dict[int, list[int]] = {  # the messages that wait for each acknowledgement that has not come
            number: [] for number, item in enumerate(program.items) if isinstance(item, Acknowledgement)
        }
        if self._step >= 0:  # before are only the first step's rows
            self._kernel.call()
        for number, awaits in enumerate(program.awaits):
            if not awaits and number not in self._behind:  # else it acknowledges nothing
                self._start(number, number)

    def _start(self, number: int, last: int) -> None:
        """All is there that an item awaits, the last of it now."""
        item = self._items[number]
        if isinstance(item, Task):
            then = partial(self._computed, number)
            self._kernel.devices[item.device].do(item.seconds, item.op, self._step, then, item.priority)
        elif isinstance(item, Send):
            if item.behind in self._behind:
                self._behind[item.behind].append(number)
            else:
                self._send(number, item)
        elif isinstance(item, Join):
            if item.shared:
                for each in self._program.used[number]:
                    self._messages[each].arrived_s = self._messages[each].used_s = self._kernel.clock.now
            self._done(number)
        else:
            message = self._messages[last]
            then = partial(self._acknowledged, number, self._step)
            self._kernel.ports.acknowledge(message.source, message.sink, then)

    def _send(self, number: int, item: Send) -> None:
        message = SimulatedMessage(item.what, self._step, item.source, item.sink, item.size_bytes, item.pack)
        self._messages[number] = message
        self._kernel.send(message, partial(self._done, number))

    def _acknowledged(self, number: int, step: int) -> None:
        if step == self._step:
            for each in self._behind.pop(number):
                item = self._items[each]
                assert isinstance(item, Send)
                self._send(each, item)

    def _computed(self, number: int, start_s: float) -> None:
        for each in self._program.used[number]:
            message = self._messages[each]
            if message.used_s == message.arrived_s:  # else another task has used it before
                message.used_s = start_s
        self._done(number)

    def _done(self, number: int) -> None:
        for after in self._program.after[number]:
            self._missing[after] -= 1
            if not self._missing[after]:
                self._start(after, number)
        self._left -= 1
        if not self._left:
            self._kernel.clock.at(self._kernel.clock.now + self._program.pause_s, self._begin)
