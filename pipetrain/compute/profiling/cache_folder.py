"""Where what was measured is kept from one program to the next."""

from __future__ import annotations

import os
from pathlib import Path

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
