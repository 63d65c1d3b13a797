"""The table of schemes by their names, and the options that some of them have."""

from __future__ import annotations

from typing import Any

from pipetrain.schemes import policies, schedules
from pipetrain.schemes.arguments import checked_bool, checked_count
from pipetrain.schemes.schedules import Schedule
from pipetrain.schemes.scheme import Scheme

ASYNCHRONOUS = Schedule(schedules.asynchronous, flushes=False, found=schedules.unflushed)
GPIPE = Schedule(schedules.gpipe)
ONE_FORWARD_ONE_BACKWARD = Schedule(schedules.one_forward_one_backward)
FORWARD_ONLY = Schedule(schedules.forward_only, flushes=False, found=lambda *place: 0)

SCHEMES: dict[str, Scheme] = {
    each.name: each
    for each in (
        Scheme("vanilla", ASYNCHRONOUS, policies.Vanilla(), "asynchronous, newest weights"),
        Scheme(
            "weight-stashing", ASYNCHRONOUS, policies.WeightStashing(), "asynchronous, backward reads forward's weights"
        ),
        Scheme(
            "vertical-sync", ASYNCHRONOUS, policies.VerticalSync(), "asynchronous, one version per minibatch everywhere"
        ),
        Scheme("spectrain", ASYNCHRONOUS, policies.SpecTrain(), "asynchronous, predicted weights"),
        Scheme(
            "spike-compensation",
            ASYNCHRONOUS,
            policies.Vanilla(),
            "asynchronous, newest weights, updates make up for late gradients",
            spikes=True,
        ),
        Scheme(
            "2bw",
            ASYNCHRONOUS,
            policies.TwoVersions(),
            "asynchronous microbatches, the version before the newest",
            splits=True,
            least=policies.TwoVersions.microbatches,
        ),
        Scheme("gpipe", GPIPE, policies.Flush(), "synchronous, all forwards then all backwards", splits=True),
        Scheme(
            "1f1b", ONE_FORWARD_ONE_BACKWARD, policies.Flush(), "synchronous, one forward one backward", splits=True
        ),
        Scheme("single", ONE_FORWARD_ONE_BACKWARD, policies.Flush(), "one device, the unsplit model"),
    )
}
INFERENCE = Scheme("inference", FORWARD_ONLY, policies.Still(), "forwards only, for evaluate and predict", trains=False)
# One stage on several devices, each with some rows, whose weights or gradients are sent as a plan says.
TRANSFERRING: dict[str, Scheme] = {
    name: Scheme(name, ONE_FORWARD_ONE_BACKWARD, policies.Flush(), about)
    for name, about in (
        ("all-reduce", "data parallelism, gradients summed for all devices"),
        ("parameter-server", "data parallelism, weights on a server"),
    )
}
DATA_PARALLEL = "data-parallel"
NAMES = ("single", DATA_PARALLEL, *(name for name in SCHEMES if name != "single"))
UNCUT = ("single", DATA_PARALLEL, *TRANSFERRING)  # of which every device has the whole model
HORIZONS = ("round-trip", "local", "fitted")  # of spectrain; the first is the paper's


def is_known(chosen: Scheme) -> bool:
    """Whether its schedule and its policy are those of a scheme of the table."""
    parts = {(each.schedule, type(each.policy)) for each in SCHEMES.values()}
    return (chosen.schedule, type(chosen.policy)) in parts | {(ASYNCHRONOUS, policies.LocalSpecTrain)}


def check_name(name: object) -> str:
    """``name``, or that of a ``Scheme``; ValueError with the valid names otherwise, or what the scheme lacks."""
    if isinstance(name, Scheme):
        name.check()
        if name.name in NAMES and SCHEMES.get(name.name) != name:
            raise ValueError(
                f"There is another scheme of this name. Received: scheme={name.name!r}. Try a name of its own."
            )
        return name.name
    if not isinstance(name, str) or name not in (*NAMES, *TRANSFERRING):
        known = ", ".join((*NAMES, *TRANSFERRING))
        raise ValueError(f"Unknown scheme. Received: scheme={name!r}. Try one of: {known}; or a Scheme of your own.")
    return name


def scheme(
    name: str | Scheme, horizon: str = HORIZONS[0], spike_compensation: bool = False, rescale_steps: int | None = None
) -> Scheme:
    """The scheme of the table with these options. Raises ValueError for options that it does not have.

    Args:
        name: but ``data-parallel``, which is no pipeline; or a ``Scheme``, which is taken as it is.
        horizon: how far ``spectrain`` predicts: ``round-trip`` as the paper has it; ``local``, to the minibatch's own
            backward, which reads the same predicted weights; ``fitted``, the paper's with the multiple of the velocity
            that came nearest to the weights actually reached.
        spike_compensation: for asynchronous schemes, see ``staleness_corrections.spike``.
        rescale_steps: for asynchronous schemes but ``2bw``, the steps over which
            ``staleness_corrections.rescaled`` fades away.
    """
    check_options(name, horizon, spike_compensation, rescale_steps)
    if isinstance(name, Scheme):
        name.check()
    chosen = name if isinstance(name, Scheme) else _named(name)
    if horizon == "local":
        chosen = chosen._replace(policy=policies.LocalSpecTrain())
    return chosen._replace(
        fits=chosen.fits or horizon == "fitted",
        spikes=chosen.spikes or spike_compensation,
        rescale_steps=chosen.rescale_steps or int(rescale_steps or 0),
    )


def _named(name: str) -> Scheme:
    if name == DATA_PARALLEL:
        raise ValueError(
            f"{DATA_PARALLEL} has no schedule: it is no pipeline. Received: scheme={name!r}. Try scheme='single', one "
            "stage, which a plan may replicate."
        )
    return SCHEMES[check_name(name)]


def has(name: str | Scheme, option: str) -> bool:
    """Whether a scheme, or that of this name, has ``horizon``, ``spike_compensation`` or ``rescale_steps``."""
    if option == "horizon":
        return str(name) == "spectrain"
    if option == "rescale_steps" and str(name) == "2bw":
        return False  # whose staleness of 1 changes no rate
    chosen = name if isinstance(name, Scheme) else SCHEMES.get(name)
    return chosen is not None and chosen.asynchronous


def check_options(name: str | Scheme, horizon: object, spike_compensation: object, rescale_steps: object) -> None:
    """Raise ValueError for options that the scheme, or that of this name, ``data-parallel`` included, does not have."""
    if horizon not in HORIZONS:
        raise ValueError(f"Unknown horizon. Received: horizon={horizon!r}. Try one of: {', '.join(HORIZONS)}.")
    if horizon != HORIZONS[0] and not has(name, "horizon"):
        raise ValueError(
            f"Only spectrain predicts weights. Received: horizon={horizon!r}, scheme={str(name)!r}. "
            "Try scheme='spectrain', or without horizon."
        )
    spikes = checked_bool(
        "spike_compensation", spike_compensation, "Spike compensation is either on (True) or off (False)"
    )
    if rescale_steps is not None:
        checked_count("rescale_steps", rescale_steps, "Steps are a number from 1 up", 1000)
    given = {"spike_compensation": spikes or None, "rescale_steps": rescale_steps}
    for option, value in given.items():
        if value is not None and not has(name, option):
            raise ValueError(
                "The gradients of this scheme have no staleness to make up for. "
                f"Received: {option}={value!r}, scheme={str(name)!r}. "
                f"Try an asynchronous scheme such as vanilla, or without {option}."
            )


def check_microbatches(microbatches: Any, name: str | Scheme) -> None:
    """Refuse anything but None or a count, and several microbatches of a scheme that does not split minibatches."""
    if microbatches is None:
        return
    count = checked_count("microbatches", microbatches, "A batch has at least one microbatch", 4)
    if count > 1 and not splits(name):
        splitting = [each.name for each in SCHEMES.values() if each.splits]
        raise ValueError(
            f"This scheme does not split a minibatch. Received: microbatches={microbatches!r}, "
            f"scheme={str(name)!r}. Try leaving it out, or one of: {', '.join(splitting)}."
        )


def splits(name: str | Scheme) -> bool:
    """Whether the scheme, or that of this name, divides minibatches into microbatches."""
    chosen = name if isinstance(name, Scheme) else SCHEMES.get(name)
    return chosen is not None and chosen.splits
