"""Where what was measured is kept from one program to the next, and trials of ways to train that are kept there."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipetrain.plan.choice import Choice

NOWHERE = Path(os.devnull)  # below it nothing can be read or written


def folder() -> Path:
    """``$XDG_CACHE_HOME/pipetrain``, or ``~/.cache/pipetrain``; there need not be such a folder.

    Where the user has no home, what is read or written there is an OSError: nothing is kept, as on a full disk. A
    relative ``XDG_CACHE_HOME`` is ignored, as its standard says.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not cache.is_absolute():
        cache = _home() / ".cache"
    return (cache if cache.is_absolute() else NOWHERE) / "pipetrain"


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError:  # no HOME, and the system does not know the user: a container, a batch job
        return NOWHERE


class KeptTrials:
    """The trials of the ways among which a choice cannot tell the fastest.

    They are known again by what was predicted, to the last digit: by the very profile, that is. Links between processes
    are measured by every program, so there they are not.

    Args:
        choice: with these ways.
        within: all else on which their seconds depend.

    ``seconds`` of a minibatch of each way, empty where they are not known.
    """

    def __init__(self, choice: Choice, within: Sequence[Any]) -> None:
        ways = [(sorted(way.told.items()), way.step_s, way.memory_bytes) for way in choice.near]
        digest = hashlib.sha256(repr((choice.batch_size, ways, within)).encode()).hexdigest()[:32]
        self._path = folder() / f"trials-{digest}.json"
        self.seconds: list[float] = []
        with suppress(OSError, TypeError, ValueError):  # not there, or not whole
            found = json.loads(self._path.read_text(encoding="utf-8"))
            self.seconds = [float(each) for each in found] if len(found) == len(ways) else []

    def keep(self, seconds: Sequence[float]) -> None:
        """Write them down."""
        part = self._path.with_suffix(f".{os.getpid()}")
        with suppress(OSError):  # a folder that cannot be written is no reason not to train
            self._path.parent.mkdir(parents=True, exist_ok=True)
            try:
                part.write_text(json.dumps([*seconds]), encoding="utf-8")
                part.replace(self._path)
            finally:
                part.unlink(missing_ok=True)
