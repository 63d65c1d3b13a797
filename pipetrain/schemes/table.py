"""The table of schemes: each name, its order of actions, its choice of weights, and what its updates make up for."""

from __future__ import annotations

from numbers import Integral
from typing import NamedTuple

from pipetrain.schemes import policies, schedules


class UpdateRule(NamedTuple):
    """What the updates of one stage do beside the optimizer's own step.

    ``predicts``: the velocity is wanted; ``furthest``: for no more updates ahead than these (0: for any number);
    ``fit_horizon``: over so many updates its best multiple is learnt (0: not); ``spikes``, ``rescale_steps``: see
    ``corrections``.
    """

    predicts: bool = False
    furthest: int = 0
    fit_horizon: int = 0
    spikes: bool = False
    rescale_steps: int = 0

    @property
    def corrects(self) -> bool:
        """Whether an update goes by the staleness of its gradient."""
        return self.spikes or self.rescale_steps > 0


class Scheme(NamedTuple):
    """A way to train: the order of actions, the weights they read, and a line for people.

    ``trains``: whether every forward is followed by a backward. ``splits``: whether minibatches are divided into
    microbatches. ``fits``: whether predictions take the multiple of the velocity that came nearest so far. ``spikes``
    and ``rescale_steps``: spike compensation, and the steps over which rates are rescaled by staleness (0: not).
    """

    schedule: schedules.Schedule
    policy: policies.Policy
    asynchronous: bool
    about: str
    trains: bool = True
    splits: bool = False
    fits: bool = False
    spikes: bool = False
    rescale_steps: int = 0

    def rule(self, stage: int, stages: int) -> UpdateRule:
        """What the updates of stage k of N do."""
        steady = 2 * stages  # a minibatch that finds the pipeline full
        furthest = self.policy.forward(steady, stage, stages).horizon
        return UpdateRule(self.policy.predicts, furthest, furthest if self.fits else 0, self.spikes, self.rescale_steps)

    def least_microbatches(self, stages: int) -> int:
        """The fewest microbatches that give every version in time."""
        return max(1, stages - 1) if self.splits and self.asynchronous else 1


SCHEMES: dict[str, Scheme] = {
    "vanilla": Scheme(schedules.asynchronous, policies.Vanilla(), True, "asynchronous, newest weights"),
    "weight-stashing": Scheme(
        schedules.asynchronous, policies.WeightStashing(), True, "asynchronous, backward reads forward's weights"
    ),
    "vertical-sync": Scheme(
        schedules.asynchronous, policies.VerticalSync(), True, "asynchronous, one version per minibatch everywhere"
    ),
    "spectrain": Scheme(schedules.asynchronous, policies.SpecTrain(), True, "asynchronous, predicted weights"),
    "spike-compensation": Scheme(
        schedules.asynchronous,
        policies.Vanilla(),
        True,
        "asynchronous, newest weights, updates make up for late gradients",
        spikes=True,
    ),
    "2bw": Scheme(
        schedules.asynchronous,
        policies.TwoVersions(),
        True,
        "asynchronous microbatches, the version before the newest",
        splits=True,
    ),
    "gpipe": Scheme(
        schedules.gpipe, policies.Flush(), False, "synchronous, all forwards then all backwards", splits=True
    ),
    "1f1b": Scheme(
        schedules.one_forward_one_backward,
        policies.Flush(),
        False,
        "synchronous, one forward one backward",
        splits=True,
    ),
    "single": Scheme(schedules.one_forward_one_backward, policies.Flush(), False, "one device, the unsplit model"),
}
INFERENCE = Scheme(schedules.forward_only, policies.Still(), True, "forwards only, for evaluate and predict", False)
DATA_PARALLEL = "data-parallel"
NAMES = ("single", DATA_PARALLEL, *(name for name in SCHEMES if name != "single"))
HORIZONS = ("round-trip", "local", "fitted")  # of spectrain; the first is the paper's


def check_name(name: object) -> str:
    """``name`` if it is a scheme; ValueError with the valid names otherwise."""
    if name not in NAMES:
        raise ValueError(f"Unknown scheme. Received: scheme={name!r}. Try one of: {', '.join(NAMES)}.")
    return str(name)


def scheme(
    name: str, horizon: str = HORIZONS[0], spike_compensation: bool = False, rescale_steps: int | None = None
) -> Scheme:
    """The scheme of the table with these options. Raises ValueError for options that it does not have.

    Args:
        name: but ``data-parallel``, which is no pipeline.
        horizon: how far ``spectrain`` predicts: ``round-trip`` as the paper has it; ``local``, to the minibatch's own
            backward, which reads the same predicted weights; ``fitted``, the paper's with the multiple of the velocity
            that came nearest to the weights actually reached.
        spike_compensation: for asynchronous schemes, see ``corrections.spike``.
        rescale_steps: for asynchronous schemes but ``2bw``, the steps over which ``corrections.rescaled`` fades away.
    """
    chosen = SCHEMES[name]
    check_options(name, horizon, spike_compensation, rescale_steps)
    if horizon == "local":
        chosen = chosen._replace(policy=policies.LocalSpecTrain())
    return chosen._replace(
        fits=horizon == "fitted",
        spikes=chosen.spikes or spike_compensation,
        rescale_steps=int(rescale_steps or 0),
    )


def has(name: str, option: str) -> bool:
    """Whether the scheme of this name has ``horizon``, ``spike_compensation`` or ``rescale_steps``."""
    if option == "horizon":
        return name == "spectrain"
    if option == "rescale_steps" and name == "2bw":
        return False  # whose staleness of 1 changes no rate
    return name in SCHEMES and SCHEMES[name].asynchronous


def check_options(name: str, horizon: object, spike_compensation: object, rescale_steps: object) -> None:
    """Raise ValueError for options that the scheme of this name, ``data-parallel`` included, does not have."""
    if horizon not in HORIZONS:
        raise ValueError(f"Unknown horizon. Received: horizon={horizon!r}. Try one of: {', '.join(HORIZONS)}.")
    if horizon != HORIZONS[0] and not has(name, "horizon"):
        raise ValueError(
            f"Only spectrain predicts weights. Received: horizon={horizon!r}, scheme={name!r}. "
            "Try scheme='spectrain', or without horizon."
        )
    if not isinstance(spike_compensation, bool):
        raise ValueError(f"It is done or not. Received: spike_compensation={spike_compensation!r}. Try True.")
    if rescale_steps is not None and (
        isinstance(rescale_steps, bool) or not isinstance(rescale_steps, Integral) or rescale_steps < 1
    ):
        raise ValueError(f"Steps are a number from 1 up. Received: rescale_steps={rescale_steps!r}. Try 1000.")
    given = {"spike_compensation": spike_compensation or None, "rescale_steps": rescale_steps}
    for option, value in given.items():
        if value is not None and not has(name, option):
            raise ValueError(
                f"Gradients are not that stale there. Received: {option}={value!r}, scheme={name!r}. "
                f"Try an asynchronous scheme such as vanilla, or without {option}."
            )
