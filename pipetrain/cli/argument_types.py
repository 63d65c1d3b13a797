"""Kinds of values on the command line."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from pipetrain.plan.cluster import size_bytes
from pipetrain.schemes.scheme import Scheme
from pipetrain.schemes.table import HORIZONS
from pipetrain.schemes.text_form import SUFFIX, chosen

MICROBATCHES = 4  # of a minibatch, where nothing says it


def positive_number(text: str) -> float:
    """A finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def budget(text: str) -> float:
    """Seconds above 0, or ``inf``."""
    return float(text) if text == "inf" else positive_number(text)


def share(text: str) -> float:
    """A finite number from 0 up."""
    return 0.0 if text == "0" else positive_number(text)


def count(text: str) -> int:
    """A whole number from 1 up."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 up")
    return int(text)


def slots(text: str) -> int:
    """A whole number from 0 up."""
    return 0 if text == "0" else count(text)


def horizon(text: str) -> str | float:
    """The name of a horizon, or a number of updates from 0 up."""
    if text in HORIZONS:
        return text
    try:
        return share(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is none of {', '.join(HORIZONS)}, nor a number from 0 up"
        ) from error


def auto_or_bool(text: str) -> bool | str:
    """``auto``, or True for ``yes`` and False for ``no``."""
    if text not in ("auto", "yes", "no"):
        raise argparse.ArgumentTypeError(f"{text!r} is none of auto, yes, no")
    return text if text == "auto" else text == "yes"


def input_shape(text: str) -> tuple[str, tuple[int, ...]]:
    """Sizes without the batch, such as ``64,64,3``, and the name of the input before them, as in ``image=64,64,3``."""
    name, _, sizes = text.rpartition("=")
    try:
        return name, tuple(count(each.strip()) for each in sizes.split(","))
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no shape, such as 64,64,3 or NAME=64,64,3: {error}") from error


def input_shapes(given: Sequence[tuple[str, tuple[int, ...]]]) -> Any:
    """Such shapes in order, or by name; None if there are none. Raises ValueError for some of each, or one twice."""
    names = [name for name, _ in given]
    if any(names) and (not all(names) or len({*names}) < len(names)):
        raise ValueError(
            "Shapes are given in the inputs' order, or once for each by its name. "
            f"Received: --input-shape for {names}. Try NAME=64,64,3 for each."
        )
    return (dict(given) if any(names) else [shape for _, shape in given]) or None


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


def scheme_named(text: str, chunks: int | None) -> str | Scheme:
    """The scheme of this name with so many stages on a device if given, or that of a file. Raises ValueError."""
    if text.endswith(SUFFIX) and not Path(text).is_file():
        raise ValueError(
            f"There is no such file. Received: --scheme {text}. Try one that exists; python -m pipetrain schedule "
            "--scheme zb-v --csv FILE writes one."
        )
    return chosen(text, chunks)


def add_scheme(parser: argparse.ArgumentParser, names: Collection[str], about: str = "", **options: Any) -> None:
    """The option that says which scheme, or which schedule of a file."""
    parser.add_argument(
        "--scheme",
        metavar="NAME",
        help=f"{', '.join(names)}; or the name of a file in {SUFFIX} with a schedule; or FILE.py:NAME, a Scheme, a "
        f"Schedule or a policy of your own{about}",
        **options,
    )
