"""Orders of actions and a policy that this project does not have."""

from __future__ import annotations

from pipetrain.schemes.actions import Action
from pipetrain.schemes.schedules import gpipe

NEWEST = """
from pipetrain.schemes import Read

class Newest:
    predicts = False

    def forward(self, reader):
        return Read(reader.newest())

    def backward(self, reader):
        return Read(reader.minibatch)
"""


def reversed_backwards(device, devices, groups):
    """As ``gpipe``, but the last microbatch goes back first."""
    for group in groups:
        yield from (Action("F", device, microbatch) for microbatch in group)
        yield from (Action("B", device, microbatch) for microbatch in reversed(group))


def in_one(device, devices, groups):
    """The last device's forward and backward of a microbatch are one operation."""
    for group in groups:
        if device < devices - 1:
            yield from gpipe(device, devices, [group])
        else:
            yield from (Action("FB", device, microbatch) for microbatch in group)
