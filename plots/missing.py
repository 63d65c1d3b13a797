"""What a page has to leave out, because files are not there or damaged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

DAMAGED = (ValueError, KeyError, TypeError, OSError)


def attempt(what: str, missing: list[str], make: Callable[..., Any], *given: Any, **more: Any) -> Any:
    """What is made; None, and a line more in ``missing``, where files are not there or damaged."""
    try:
        return make(*given, **more)
    except DAMAGED as error:
        missing.append(f"{what}: {error}")
        return None
