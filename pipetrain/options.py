"""Kinds of values on the command line."""

from __future__ import annotations

import argparse

from pipetrain.plan.cluster import size_bytes


def positive(text: str) -> float:
    """A finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def share(text: str) -> float:
    """A finite number from 0 up."""
    return 0.0 if text == "0" else positive(text)


def count(text: str) -> int:
    """A whole number from 1 up."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 up")
    return int(text)


def slots(text: str) -> int:
    """A whole number from 0 up."""
    return 0 if text == "0" else count(text)


def size(text: str) -> int:
    """Bytes, such as 16GiB."""
    try:
        return size_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def cores(text: str) -> list[int]:
    """Processor cores, such as ``0,2-3``."""
    try:
        spans = [[int(end) for end in part.split("-")] for part in text.split(",")]
        found = [core for span in spans for core in range(span[0], span[-1] + 1)]
        if not found or max(map(len, spans)) > 2:
            raise ValueError
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} names no cores, such as 0,2-3") from error
    return found
