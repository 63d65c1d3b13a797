"""Profiles kept on disk: a model is measured once, and so is always cut the same way on the same machine."""

from __future__ import annotations

import hashlib
import os
import platform
from dataclasses import replace
from pathlib import Path

import tensorflow as tf

from pipetrain.compute.blocks import Chain
from pipetrain.compute.profiler import cost_key, profile_chain
from pipetrain.plan.profile import Profile

FORMAT = 4  # of what is kept; profiles of other formats are measured anew


def cached_profile(chain: Chain, batch_size: int, device: str, verbose: bool = True, place: str = "") -> Profile:
    """The profile of a chain of such layers at this batch size, measured at the first call.

    ``place`` says where the device is, if it is another process's.
    Kept under ``$XDG_CACHE_HOME/pipetrain`` (``~/.cache/pipetrain``); deleting the folder forgets all. Models with a
    layer whose settings Keras cannot tell are measured every time.
    """
    blocks = chain.blocks
    keys = [cost_key(block) for block in blocks]
    if None in keys:
        return profile_chain(chain, batch_size, device, verbose)
    conditions = (
        device,
        place,
        platform.machine(),
        platform.node(),
        os.cpu_count(),
        tf.config.threading.get_intra_op_parallelism_threads(),
        len(tf.config.list_logical_devices()),
        tf.__version__,
    )
    crossing = [[(tensor.shape, tensor.dtype) for tensor in chain.specs(end + 1)] for end in range(len(blocks))]
    digest = hashlib.sha256(repr((FORMAT, keys, crossing, batch_size, conditions)).encode()).hexdigest()[:32]
    path = _folder() / f"{digest}.json"
    try:
        known = Profile.load(path)
        renamed = tuple(replace(cost, name=block.name) for cost, block in zip(known.blocks, blocks, strict=True))
        return replace(known, model=chain.model.name, blocks=renamed)
    except (OSError, ValueError):  # not there, or not whole
        measured = profile_chain(chain, batch_size, device, verbose)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        measured.save(part)
        part.replace(path)
    except OSError:
        pass  # a cache that cannot be written is no reason not to train
    return measured


def _folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pipetrain"
