"""Profiles kept on disk: a model is measured once, so it is always cut the same way on the same machine."""

from __future__ import annotations

import hashlib
import os
import platform
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import tensorflow as tf

from pipetrain.compute.graph.blocks import Chain
from pipetrain.compute.graph.inputs import Shapes
from pipetrain.compute.graph.wide_layers import network_of
from pipetrain.compute.processor import described
from pipetrain.compute.profiling.kinds import cost_key
from pipetrain.compute.profiling.limits import BUDGET_S, checked_budget, folder
from pipetrain.compute.profiling.operation_count import LITTLE_S
from pipetrain.compute.profiling.profiler import may_be_compiled, profile_chain
from pipetrain.compute.tensorflow_private import is_deterministic
from pipetrain.plan.profile import NOISY, Profile

CHOOSING = ("TF_CUDNN_", "TF_DISABLE_", "TF_ENABLE_", "TF_XLA_", "XLA_", "ONEDNN_", "DNNL_")  # variables' first letters


def conditions() -> tuple[str, ...]:
    """The processor with its instruction sets, and the settings that switch kernels on or off."""
    chosen = sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith(CHOOSING))
    return platform.machine(), *described(), *chosen, f"deterministic={is_deterministic()}"


FORMAT = 13  # of what is kept; profiles of other formats are measured anew

_trusted: set[Path] = set()  # the files whose profiles this process has measured


def cached_profile(
    chain: Chain,
    batch_size: int,
    shapes: Shapes,
    device: str,
    verbose: bool = True,
    place: str = "",
    with_xla: bool = True,
    microbatches: int = 1,
    budget_s: float | None = BUDGET_S,
) -> Profile:
    """The profile of a chain of such layers, at this batch size and for such inputs, measured at the first call.

    ``place`` identifies the host of a device in another process. Profiles are kept under ``$XDG_CACHE_HOME/pipetrain``
    (``~/.cache/pipetrain``); the folder may be deleted. Models with a layer whose settings Keras cannot serialize are
    measured every time. Another process measures once more where other work has disturbed the first measurement, so
    that ``spread`` is above ``NOISY``, and the steadier profile of the two is kept. A profile that lacks something for
    want of time serves where no more seconds are allowed; else it is measured anew, and replaced.
    """
    with_xla = with_xla and may_be_compiled(chain, batch_size, device)
    blocks = chain.blocks
    keys = [cost_key(block) for block in blocks]
    if None in keys:
        return profile_chain(chain, batch_size, shapes, device, verbose, with_xla, microbatches, budget_s)
    within = (
        microbatches,
        with_xla,
        device,
        place,
        conditions(),
        platform.node(),
        os.cpu_count(),
        tf.config.threading.get_intra_op_parallelism_threads(),
        len(tf.config.list_logical_devices()),
        tf.__version__,
    )
    crossing = [[(tensor.shape, tensor.dtype) for tensor in chain.specs(end + 1)] for end in range(len(blocks))]
    digest = hashlib.sha256(repr((FORMAT, keys, crossing, batch_size, shapes, within)).encode()).hexdigest()[:32]
    path = folder() / f"{digest}.json"
    found = _read(path)
    known = found if found is not None and _serves(found, budget_s) else None
    if known is None or (path not in _trusted and _is_doubtful(known)):
        measured = profile_chain(chain, batch_size, shapes, device, verbose, with_xla, microbatches, budget_s)
        known = _kept(measured, path, known, replaces=found is not None)
        _trusted.add(path)
    renamed = tuple(replace(cost, name=block.name) for cost, block in zip(known.blocks, blocks, strict=True))
    return replace(known, model=chain.model.name, blocks=renamed, microbatches=microbatches, network=network_of(chain))


def _read(path: Path) -> Profile | None:
    try:
        return Profile.load(path)
    except OSError:  # not there
        return None
    except ValueError:  # not whole
        with suppress(OSError):
            path.unlink()
        return None


def _serves(known: Profile, budget_s: float | None) -> bool:
    """Whether nothing was left out of it that these seconds have time for."""
    return known.budget_s is None or checked_budget(budget_s) <= known.budget_s


def _is_doubtful(known: Profile) -> bool:
    """Whether other work has disturbed the measurement; what takes little time is never steady."""
    return known.spread > NOISY and sum(block.seconds.total_s for block in known.blocks) >= LITTLE_S


def _kept(measured: Profile, path: Path, before: Profile | None, replaces: bool) -> Profile:
    """The profile that is kept: the steadier one, or that of another process if it has measured at the same time.

    It ``replaces`` the file that is there, be it the one of ``before`` or one that lacks something. None that lacks
    something replaces one that does not.
    """
    if before is not None and (before.spread <= measured.spread or not _serves(measured, before.budget_s)):
        return before
    part = path.with_suffix(f".{os.getpid()}")
    with suppress(OSError):  # a cache that cannot be written is no reason not to train
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            measured.save(part)
            return _placed(measured, part, path, replaces)
        finally:
            part.unlink(missing_ok=True)
    return measured


def _placed(measured: Profile, part: Path, path: Path, replaces: bool) -> Profile:
    """Give the file its name, unless that of another process has it by now; the profile that has it."""
    try:
        if replaces:
            part.replace(path)
        else:
            path.hardlink_to(part)
    except OSError:  # it is there by now, or the file system has no links
        if first := _read(path):
            return first
        part.replace(path)
    return measured
