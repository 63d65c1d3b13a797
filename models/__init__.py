"""The networks of the experiments, as plain Keras models: one file each, with a function of the same name."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import keras

NAMES = tuple(sorted(path.stem for path in Path(__file__).parent.glob("[a-z]*.py")))


def build(name: str, input_shape: tuple[int, ...], classes: int, **size: Any) -> keras.Model:
    """The network ``name`` for examples of this shape; ``size`` are its own arguments, such as depth and width."""
    return function(name)(input_shape, classes, **size)


def function(name: str) -> Callable[..., keras.Model]:
    """The function that builds the network ``name``."""
    return getattr(import_module(f"models.{name}"), name)
