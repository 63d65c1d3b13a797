"""Orders of actions that no scheme of the table has."""

from __future__ import annotations

from pipetrain.schemes.actions import Action


def by_twos(device, devices, groups):
    """Every other minibatch's forwards come first, then the backwards of both."""
    waiting = []
    for number, group in enumerate(groups):
        for microbatch in group:
            yield Action("F", device, microbatch)
            waiting.append(microbatch)
        while number % 2 and waiting:
            yield Action("B", device, waiting.pop(0))
    while waiting:
        yield Action("B", device, waiting.pop(0))
