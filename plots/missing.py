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
        missing.append(f"{what}: {said(error)}")
        return None


def said(error: Exception, remedy: str = "") -> str:
    """An error in a sentence, with what to do where it does not say so itself."""
    if isinstance(error, OSError):
        text = f"{error.strerror}. Received: {str(error.filename)!r}."
        return f"{text} {remedy or 'Try a file that can be read, and a folder that can be written to.'}"
    text = str(error)
    if " Try " in text:
        return text
    if isinstance(error, KeyError):
        text = f"There is no {error}"
    return f"The results cannot be read. Received: {text}. {remedy or 'Try results of this version.'}"
