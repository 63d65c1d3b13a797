"""What many arguments have in common: that they are a count, a number from 0 up, or either on or off."""

from __future__ import annotations

import math
from numbers import Integral
from typing import Any

import numpy as np


def is_count(value: Any, least: int = 1) -> bool:
    """Whether it is a whole number from ``least`` up, Python's or NumPy's."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least


def checked_count(name: str, value: Any, problem: str, example: int, least: int = 1) -> int:
    """The argument as an int; ValueError, which begins with the problem, for what is no count of at least ``least``."""
    if not is_count(value, least):
        raise ValueError(f"{problem}. Received: {name}={value!r}. Try {name}={example}.")
    return int(value)


def checked_from_zero(name: str, value: float) -> float:
    """The argument; ValueError for what is no finite number from 0 up."""
    if not 0 <= value < math.inf:
        raise ValueError(f"A number from 0 up is needed. Received: {name}={value!r}. Try {name}=0.")
    return value


def checked_bool(name: str, value: Any, problem: str) -> bool:
    """The argument as a bool; ValueError, which begins with the problem, for what is none, such as a string."""
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{problem}. Received: {name}={value!r}. Try {name}=True.")
    return bool(value)
