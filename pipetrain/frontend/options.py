"""The arguments of ``PipelineModel``: as they are handed on, as they were in 0.1, and their checks."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple

from pipetrain.plan.stages import Partition
from pipetrain.schemes.arguments import checked_bool, checked_count, is_count
from pipetrain.schemes.options import (
    DEFAULT_POLICY,
    EVERY_OPTION,
    AnyScheme,
    check_microbatches,
    keywords,
    name_of,
    policy_of,
    scheduled,
    with_options,
    written,
)
from pipetrain.schemes.schedules import groups_of
from pipetrain.schemes.scheme import Scheme
from pipetrain.schemes.table import AUTO, COPIED, UNCUT
from pipetrain.schemes.text_form import chosen, microbatches_of, stages_of
from pipetrain.schemes.validation import check


class Options(NamedTuple):
    """How a model is to be trained: the arguments of ``PipelineModel``."""

    scheme: AnyScheme = AUTO
    stages: int | Partition | None = None
    cuts: Sequence[str] | None = None
    devices: Sequence[str] | None = None
    replicas: Sequence[int] | None = None
    microbatches: int | None = None
    recompute: bool = False
    memory_bytes: int | None = None

    @property
    def name(self) -> str:
        """The scheme's, or ``auto``."""
        return name_of(self.scheme)

    @property
    def layout(self) -> tuple[Any, Any, Any]:
        """What is given of a pipeline's layout."""
        return self.stages, self.cuts, self.replicas

    @property
    def policy(self) -> dict[str, Any]:
        """The options of ``schemes.table.scheme``, for a checkpoint too."""
        return policy_of(self.scheme)


DEFAULT_MICROBATCHES = 4


def checked(options: Options) -> Options:
    """The options, with a file's schedule in place of its name.

    Raises ValueError, TypeError, before a model is looked at, for what the scheme does not have.
    """
    if isinstance(options.scheme, str) and options.scheme != AUTO:
        options = options._replace(scheme=chosen(options.scheme))
    name = options.name
    check_memory(options.memory_bytes, name)
    check_recompute(options.recompute, name)
    if name == AUTO:
        check_laid_out(options.microbatches, options.layout)
        check_microbatches(options.microbatches, "1f1b")
        return options
    scheme = scheduled(options.scheme)
    stages, microbatches = options.stages, options.microbatches
    if options.cuts is None and stages is None:
        stages = stages_of(scheme)
    if microbatches is None:
        microbatches = microbatches_of(scheme)
    check_microbatches(microbatches, options.scheme)
    check_replicas(name, options.replicas)
    check_cuts(options.cuts, name)
    check_copies(stages, options.devices, name)
    return options._replace(stages=stages, microbatches=microbatches)


def check_replicas(scheme: str, replicas: Any) -> None:
    """Raise ValueError for replicas of a scheme that has no stages."""
    if scheme in UNCUT and replicas is not None:
        raise ValueError(
            f"The scheme {scheme!r} has no stages to replicate. Received: replicas={replicas!r}. Try leaving it out."
        )


def check_recompute(recompute: Any, scheme: str) -> None:
    """Refuse anything but a bool, and to run forwards again where Keras keeps what it needs."""
    wanted = checked_bool("recompute", recompute, "Stages either run their forward again (True) or not (False)")
    if wanted and scheme in COPIED:
        raise ValueError(
            f"Only stages run their forward again. Received: recompute={recompute!r}, scheme={scheme!r}. "
            "Try leaving it out, or scheme='single'."
        )


def check_cuts(cuts: Any, scheme: str) -> None:
    """Refuse cuts of a model that is not split."""
    if cuts is not None and scheme in COPIED:
        raise ValueError(
            f"{scheme} has the whole model on every device. Received: cuts={cuts!r}, scheme={scheme!r}. "
            "Try devices=('CPU:0', 'CPU:1'), or stages=2 for the first two devices."
        )
    if cuts is not None and scheme == "single":
        raise ValueError(
            f"The scheme 'single' has one stage. Received: cuts={cuts!r}, scheme={scheme!r}. Try leaving it out, or "
            "scheme='1f1b', whose result is that of the unsplit model."
        )


def check_copies(stages: Any, devices: Sequence[str] | None, scheme: str) -> None:
    """Refuse another number of stages than devices where every device has a copy of the model."""
    if scheme not in COPIED or devices is None or isinstance(devices, str) or not is_count(stages):
        return  # what is no number, or no devices, is refused as for pipelines
    if stages != len(devices):
        raise ValueError(
            f"{scheme} has a copy of the model on every device. Received: stages={stages!r}, "
            f"devices={tuple(devices)!r}. Try leaving stages out, or {stages} devices."
        )


def checked_workers(stages: Any, devices: int, scheme: str) -> int:
    """How many devices have rows of each minibatch: of those that there are as many as ``stages``, by default all."""
    if stages is None:
        return devices
    if not is_count(stages):
        raise ValueError(
            f"{scheme} has a copy of the model on every device. Received: stages={stages!r}. Try leaving it out."
        )
    return min(int(stages), devices)


def checked_servers(servers: int | None, workers: int) -> int:
    """On how many of the workers' devices the weights are, by default on all. Raises ValueError for too many."""
    if servers is not None and servers > workers:
        raise ValueError(
            f"A server is on a worker's device. Received: servers={servers}, {workers} workers. Try servers={workers}."
        )
    return int(servers or workers)


def check_schedule(scheme: Scheme, stages: int, microbatches: int) -> None:
    """Raise ScheduleError, a ValueError, for an order of actions that cannot run.

    Raises ValueError for backwards in halves between which weights may change: an asynchronous schedule's.
    """
    check(scheme, stages, microbatches)
    devices, groups = scheme.schedule.devices(stages), groups_of(1, microbatches)
    actions = [each for device in range(devices) for each in scheme.schedule.order(device, devices, groups)]
    half = next((each for each in actions if each.op == "W"), None)
    if half is not None and scheme.asynchronous:
        raise ValueError(
            "Training has backwards in halves where the weights of a minibatch are one version; others can be planned "
            f"and simulated. Received: {half} in the asynchronous schedule of {scheme.name!r}. Try B for I and W."
        )


def checked_microbatches(microbatches: int | None, scheme: Scheme, stages: int) -> int:
    """How many microbatches a minibatch is split into. Raises ValueError for too few of them."""
    if not scheme.splits:
        return 1
    least = scheme.least_microbatches(stages)
    if microbatches is not None and microbatches < least:
        raise ValueError(
            f"{scheme.name!r} needs at least {least} microbatches with {stages} stages: fewer do not give it its "
            f"weights in time. Received: microbatches={microbatches}, {stages} stages. Try microbatches={stages}."
        )
    return int(microbatches or 0) or max(DEFAULT_MICROBATCHES, stages if least > 1 else 1)


def check_laid_out(microbatches: Any, layout: Sequence[Any]) -> None:
    """Refuse microbatches where it is open whether there are any: without stages, cuts and replicas."""
    if microbatches is not None and all(each is None for each in layout):
        raise ValueError(
            f"With scheme='auto' this is chosen, too. Received: microbatches={microbatches!r}. Try leaving it out, "
            "stages=2, or a scheme."
        )


def check_memory(memory_bytes: Any, scheme: str) -> None:
    """Refuse what is no memory, and a limit for a scheme whose layout is no choice."""
    if memory_bytes is None:
        return
    checked_count("memory_bytes", memory_bytes, "A device's memory is a number of bytes", 16 * 2**30)
    if scheme in UNCUT:
        raise ValueError(
            f"Every device has the whole model: nothing can be chosen by a limit. Received: {memory_bytes=}, "
            f"{scheme=}. Try leaving it out, scheme='auto', or a pipeline such as scheme='1f1b'."
        )


def check_jit_compile(jit_compile: object) -> None:
    """Refuse what is no way to compile."""
    if not isinstance(jit_compile, bool) and jit_compile != "auto":
        raise ValueError(
            "XLA compiles the stages (True), or none (False), or those that it makes faster. Received: "
            f"jit_compile={jit_compile!r}. Try jit_compile='auto'."
        )


def taken_over(scheme: AnyScheme | None, given: Mapping[str, Any]) -> AnyScheme:
    """The scheme with the options given by keyword, as in 0.1; a warning shows the new line.

    Without a scheme it is ``auto``; where options of 0.1's default are given, this default, ``spectrain``.

    Raises TypeError for keywords that never were any, ValueError and TypeError as ``with_options`` does.
    """
    unknown = next((name for name in given if name not in EVERY_OPTION), None)
    if unknown is not None:
        near = get_close_matches(unknown, (*Options._fields, "name", *EVERY_OPTION), 1)
        raise TypeError(
            f"PipelineModel.__init__() got an unexpected keyword argument {unknown!r}"
            + "".join(f". Did you mean: {each!r}?" for each in near)
        )
    if scheme is None:
        scheme = "spectrain" if any(name in DEFAULT_POLICY for name in given) else AUTO
    if not given:
        return scheme
    found = with_options(chosen(scheme) if isinstance(scheme, str) and scheme != AUTO else scheme, **given)
    warnings.warn(
        f"Options of a scheme are given to the scheme now. Received: {keywords(given)}. Try scheme={_written(found)}.",
        FutureWarning,
        stacklevel=3,
    )
    return found


def taken_over_trace(given: dict[str, Any]) -> Any:
    """Whether a trace is to be kept, by the keyword ``trace`` as in 0.1, which is taken out; with a warning."""
    if "trace" not in given:
        return True
    warnings.warn("Received: trace. It is a property now. Try pm.is_traced = False.", FutureWarning, stacklevel=3)
    return given.pop("trace")


def _written(scheme: AnyScheme) -> str:
    if isinstance(scheme, Scheme):
        return f"Scheme({scheme.name!r}, ..., spikes={scheme.spikes}, rescale_steps={scheme.rescale_steps})"
    return written(scheme)
