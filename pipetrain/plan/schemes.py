"""The table of schemes: each name, its order of actions and its choice of weights."""

from __future__ import annotations

from typing import NamedTuple

from pipetrain.plan import schedules, versions


class Scheme(NamedTuple):
    """A way to train: the order of actions, the weights they read, and a line for people.

    ``trains``: whether every forward is followed by a backward.
    """

    schedule: schedules.Schedule
    policy: versions.Policy
    asynchronous: bool
    about: str
    trains: bool = True


SCHEMES: dict[str, Scheme] = {
    "vanilla": Scheme(schedules.asynchronous, versions.Vanilla(), True, "asynchronous, newest weights"),
    "weight-stashing": Scheme(
        schedules.asynchronous, versions.WeightStashing(), True, "asynchronous, backward reads forward's weights"
    ),
    "vertical-sync": Scheme(
        schedules.asynchronous, versions.VerticalSync(), True, "asynchronous, one version per minibatch everywhere"
    ),
    "spectrain": Scheme(schedules.asynchronous, versions.SpecTrain(), True, "asynchronous, predicted weights"),
    "gpipe": Scheme(schedules.gpipe, versions.Flush(), False, "synchronous, all forwards then all backwards"),
    "1f1b": Scheme(
        schedules.one_forward_one_backward, versions.Flush(), False, "synchronous, one forward one backward"
    ),
    "single": Scheme(schedules.one_forward_one_backward, versions.Flush(), False, "one device, the unsplit model"),
}
INFERENCE = Scheme(schedules.forward_only, versions.Still(), True, "forwards only, for evaluate and predict", False)
DATA_PARALLEL = "data-parallel"
NAMES = ("single", DATA_PARALLEL, "vanilla", "weight-stashing", "vertical-sync", "spectrain", "gpipe", "1f1b")


def check_name(name: object) -> str:
    """``name`` if it is a scheme; ValueError with the valid names otherwise."""
    if name not in NAMES:
        raise ValueError(f"Unknown scheme. Received: scheme={name!r}. Try one of: {', '.join(NAMES)}.")
    return str(name)
