"""Kinds of command-line values, and the folder that results go to."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path


def positive(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a whole number of at least 1 is needed, not {text!r}")
    return int(text)


def whole(text: str) -> int:
    """A whole number of at least 0."""
    return 0 if text == "0" else positive(text)


def rate(text: str) -> float:
    """A finite number of at least 0."""
    number = float(text)
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"a finite number of at least 0 is needed, not {text!r}")
    return number


def writable(output: Path) -> Path:
    """The directory, made if need be; ValueError if nothing can be written there."""
    try:
        output.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output):
            return output
    except OSError as error:
        raise ValueError(
            f"Cannot write there: {error.strerror}. Received: output={str(output)!r}. Try another directory."
        ) from error
