"""The table of schemes by their names, and the options that some of them have."""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

from pipetrain.schemes import policies, schedules
from pipetrain.schemes.arguments import checked_bool, checked_count
from pipetrain.schemes.schedules import Schedule, interleaved, looped_bfs
from pipetrain.schemes.scheme import Scheme
from pipetrain.schemes.zero_bubble import V_HALF, V_MIN, ZB_H1, ZB_H2, ZB_V

ASYNCHRONOUS = Schedule(schedules.asynchronous, flushes=False, found=schedules.unflushed)
GPIPE = Schedule(schedules.gpipe)
ONE_FORWARD_ONE_BACKWARD = Schedule(schedules.one_forward_one_backward)
FORWARD_ONLY = Schedule(schedules.forward_only, flushes=False, found=lambda *place: 0)

SCHEMES: dict[str, Scheme] = {
    each.name: each
    for each in (
        Scheme("vanilla", ASYNCHRONOUS, policies.VanillaPolicy(), "asynchronous, newest weights"),
        Scheme(
            "weight-stashing",
            ASYNCHRONOUS,
            policies.WeightStashingPolicy(),
            "asynchronous, backward reads forward's weights",
        ),
        Scheme(
            "vertical-sync",
            ASYNCHRONOUS,
            policies.VerticalSyncPolicy(),
            "asynchronous, one version per minibatch everywhere",
        ),
        Scheme("spectrain", ASYNCHRONOUS, policies.SpecTrainPolicy(), "asynchronous, predicted weights"),
        Scheme(
            "spike-compensation",
            ASYNCHRONOUS,
            policies.VanillaPolicy(),
            "asynchronous, newest weights, updates make up for late gradients",
            spikes=True,
        ),
        Scheme(
            "2bw",
            ASYNCHRONOUS,
            policies.TwoVersionsPolicy(),
            "asynchronous microbatches, the version before the newest",
            splits=True,
            least=policies.TwoVersionsPolicy.microbatches,
        ),
        Scheme("gpipe", GPIPE, policies.FlushPolicy(), "synchronous, all forwards then all backwards", splits=True),
        Scheme(
            "1f1b",
            ONE_FORWARD_ONE_BACKWARD,
            policies.FlushPolicy(),
            "synchronous, one forward one backward",
            splits=True,
        ),
        Scheme("single", ONE_FORWARD_ONE_BACKWARD, policies.FlushPolicy(), "one device, the unsplit model"),
    )
}
# Synchronous like 1f1b, with several stages on a device, or with the backward in halves.
SCHEDULED: dict[str, Scheme] = {
    name: Scheme(name, schedule, policies.FlushPolicy(), about, splits=True)
    for name, schedule, about in (
        ("interleaved", interleaved(2), "synchronous, 1f1b of several stages a device"),
        ("looped-bfs", looped_bfs(2), "synchronous, several stages a device, each for all microbatches"),
        ("zb-h1", ZB_H1, "synchronous, backwards in halves, 1f1b's memory"),
        ("zb-h2", ZB_H2, "synchronous, backwards in halves, twice 1f1b's memory"),
        ("zb-v", ZB_V, "synchronous, backwards in halves, two stages a device, 1f1b's memory"),
        ("v-half", V_HALF, "synchronous, as zb-v with half its memory"),
        ("v-min", V_MIN, "synchronous, as zb-v with a third of its memory"),
    )
}
CHUNKED = {"interleaved": interleaved, "looped-bfs": looped_bfs}  # with as many stages on a device as are wanted
INFERENCE = Scheme(
    "inference", FORWARD_ONLY, policies.StillPolicy(), "forwards only, for evaluate and predict", trains=False
)
SERVING = "parameter-server"
# One stage on several devices, each with some rows, whose weights or gradients are sent as a plan says.
TRANSFERRING: dict[str, Scheme] = {
    name: Scheme(name, ONE_FORWARD_ONE_BACKWARD, policies.FlushPolicy(), about)
    for name, about in (
        ("all-reduce", "data parallelism, gradients summed for all devices"),
        (SERVING, "data parallelism, weights on servers"),
    )
}
# The same, whose gradients come up a tree that bears workers that are late, see ``schemes.coded_reduce``.
CODED = "coded-reduce"
TREES = {
    CODED: Scheme(
        CODED,
        ONE_FORWARD_ONE_BACKWARD,
        policies.FlushPolicy(),
        "data parallelism, coded gradients that bear stragglers",
    )
}
GRID = "grid"  # likewise, with the outputs of wide layers divided too
GRIDS = {
    GRID: Scheme(
        GRID, ONE_FORWARD_ONE_BACKWARD, policies.FlushPolicy(), "wide layers divided by outputs, minibatches by rows"
    )
}
DATA_PARALLEL = "data-parallel"
AUTO = "auto"  # no scheme: the one that is predicted to be the fastest
NAMES = ("single", DATA_PARALLEL, *(name for name in SCHEMES if name != "single"))
HORIZONS = ("round-trip", "local", "fitted", "target")  # of spectrain; the first is the paper's
RECOMMENDED = 1.5  # the horizon of 2bw, where one is wanted
COPIED = (DATA_PARALLEL, *TRANSFERRING, CODED, GRID)  # of which every device has all layers
UNCUT = ("single", *COPIED)
EVERY_NAME = (*NAMES, *SCHEDULED, *TRANSFERRING, CODED, GRID)
PIPELINES = {**SCHEMES, **SCHEDULED}


def is_known(chosen: Scheme) -> bool:
    """Whether its schedule and its policy are those of a scheme of the table."""
    parts = {(each.schedule, type(each.policy)) for each in PIPELINES.values()}
    others = policies.LocalSpecTrainPolicy, policies.OneTargetPolicy
    return (chosen.schedule, type(chosen.policy)) in parts | {(ASYNCHRONOUS, each) for each in others}


def uncompressed(scheme: Scheme) -> Scheme:
    """The same, of which all arrives as it is sent."""
    return scheme._replace(compression=None, replica_compression=None)


def check_name(name: object) -> str:
    """``name``, or that of a ``Scheme``; ValueError with the valid names otherwise, or what the scheme lacks."""
    if isinstance(name, Scheme):
        name.check()
        if name.name in EVERY_NAME and PIPELINES.get(name.name) != uncompressed(name):
            raise ValueError(
                f"There is another scheme of this name. Received: scheme={name.name!r}. Try a name of its own."
            )
        return name.name
    if not isinstance(name, str) or name not in EVERY_NAME:
        raise ValueError(f"Unknown scheme. Received: scheme={name!r}. Try {instead_of(name)}.")
    return name


def instead_of(name: object, names: Sequence[str] = EVERY_NAME) -> str:
    """What to try instead of a name that is none: the one of ``names`` that is most like it, if one is; or any."""
    near = difflib.get_close_matches(name.lower(), names, 1) if isinstance(name, str) else []
    own = "a file's name in .csv; or a Scheme of your own, which FILE.py:NAME names"
    return "".join(f"{each!r}, or " for each in near) + f"one of: {', '.join(names)}; {own}"


def scheme(
    name: str | Scheme,
    horizon: str | float = HORIZONS[0],
    spike_compensation: bool = False,
    rescale_steps: int | None = None,
    stretch_momentum: bool | str = "auto",
) -> Scheme:
    """The scheme of the table with these options. Raises ValueError for options that it does not have.

    Args:
        name: but ``data-parallel``, which is no pipeline; or a ``Scheme``, which is taken as it is.
        horizon: how far ``spectrain`` predicts: ``round-trip`` as the paper has it; ``local``, to the minibatch's own
            backward, which reads the same predicted weights; ``fitted``, the paper's with the multiple of the velocity
            that came nearest to the weights actually reached; ``target``, to one version for all stages, see
            ``policies.OneTargetPolicy``. How far ``2bw`` predicts: a number of updates, 0 as published by default.
        spike_compensation: for asynchronous schemes, see ``policies.spike``.
        rescale_steps: for asynchronous schemes but ``2bw``, the steps over which
            ``policies.rescaled`` fades away.
        stretch_momentum: whether the horizon ``target`` stretches momentum, see ``policies.stretch``;
            ``"auto"``: that of an optimizer that has one which is known.
    """
    check_options(name, horizon, spike_compensation, rescale_steps, stretch_momentum)
    if isinstance(name, Scheme):
        name.check()
    chosen = name if isinstance(name, Scheme) else _named(name)
    if horizon == "local":
        chosen = chosen._replace(policy=policies.LocalSpecTrainPolicy())
    elif horizon == "target":
        stretch: Any = stretch_momentum if stretch_momentum == "auto" else bool(stretch_momentum)
        chosen = chosen._replace(policy=policies.OneTargetPolicy(stretch), splits=True)
    elif not isinstance(horizon, str):
        chosen = chosen._replace(policy=policies.TwoVersionsPolicy(float(horizon)))
    return chosen._replace(
        fits=chosen.fits or horizon == "fitted",
        spikes=chosen.spikes or spike_compensation,
        rescale_steps=chosen.rescale_steps or int(rescale_steps or 0),
    )


def _named(name: str) -> Scheme:
    if check_name(name) not in PIPELINES:
        raise ValueError(
            f"{name} has no schedule: it is no pipeline. Received: scheme={name!r}. Try scheme='single', one "
            "stage, which a plan may replicate."
        )
    return PIPELINES[name]


def chunked(name: str | Scheme, chunks: Any) -> str | Scheme:
    """The scheme with so many stages on each device, which has the number in its name; None for what it has.

    Raises ValueError for a scheme whose number is fixed.
    """
    if chunks is None:
        return name
    count = checked_count("chunks", chunks, "A device has at least one stage", 2)
    if str(name) not in CHUNKED:
        raise ValueError(
            f"The stages on a device are fixed in this scheme. Received: chunks={chunks!r}, scheme={str(name)!r}. "
            f"Try leaving it out, or one of: {', '.join(CHUNKED)}."
        )
    chosen = SCHEDULED[str(name)]
    schedule = CHUNKED[str(name)](count)
    return chosen if schedule == chosen.schedule else chosen._replace(name=f"{name}-{count}", schedule=schedule)


def has(name: str | Scheme, option: str) -> bool:
    """Whether a scheme, or that of this name, has this option of ``scheme``."""
    if option == "horizon":
        return str(name) in ("spectrain", "2bw")
    if option == "stretch_momentum":
        return str(name) == "spectrain"
    if option == "rescale_steps" and str(name) == "2bw":
        return False  # whose staleness of 1 changes no rate
    chosen = name if isinstance(name, Scheme) else PIPELINES.get(name)
    return chosen is not None and chosen.asynchronous


def takes(name: str | Scheme, horizon: object) -> bool:
    """Whether a scheme, or that of this name, has this horizon; each has the first of ``HORIZONS``, its own."""
    if isinstance(horizon, str):
        return horizon == HORIZONS[0] or (horizon in HORIZONS and str(name) == "spectrain")
    return str(name) == "2bw" and _is_number(horizon)


def _is_number(horizon: Any) -> bool:
    return isinstance(horizon, Real) and not isinstance(horizon, bool) and 0 <= float(horizon) < math.inf


def check_horizon(name: str | Scheme, horizon: object) -> None:
    """Raise ValueError for a horizon that is none, or that the scheme, or that of this name, does not have."""
    if takes(name, horizon):
        return
    received = f"Received: horizon={horizon!r}, scheme={str(name)!r}. "
    if str(name) == "2bw":
        raise ValueError(f"2bw predicts a number of updates ahead, 0 or more. {received}Try horizon={RECOMMENDED}.")
    if not _is_number(horizon) and horizon not in HORIZONS:
        raise ValueError(f"Unknown horizon. {received}Try one of: {', '.join(HORIZONS)}; a number for 2bw.")
    if str(name) == "spectrain":
        raise ValueError(f"Only 2bw's horizon is a number. {received}Try one of: {', '.join(HORIZONS)}.")
    raise ValueError(f"Only spectrain and 2bw predict weights. {received}Try scheme='spectrain', or without horizon.")


def _check_stretch(name: str | Scheme, horizon: object, stretch_momentum: object) -> None:
    if isinstance(stretch_momentum, str) and stretch_momentum == "auto":
        return
    problem = "Momentum is either stretched (True) or not (False), or where that is known to help ('auto')"
    if checked_bool("stretch_momentum", stretch_momentum, problem) and horizon != "target":
        raise ValueError(
            "Momentum is stretched where all stages predict one target. Received: "
            f"stretch_momentum=True, scheme={str(name)!r}, horizon={horizon!r}. "
            "Try scheme='spectrain', horizon='target', or without stretch_momentum."
        )


def check_options(
    name: str | Scheme,
    horizon: object,
    spike_compensation: object,
    rescale_steps: object,
    stretch_momentum: object = "auto",
) -> None:
    """Raise ValueError for options that the scheme, or that of this name, ``data-parallel`` included, does not have."""
    check_horizon(name, horizon)
    _check_stretch(name, horizon, stretch_momentum)
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
