"""Refuses what a grid of devices does not have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from pipetrain.compute.graph.wide_layers import WideLayer
from pipetrain.frontend.checks.options import checked_workers
from pipetrain.schemes.grid import Grid

# Which treat each element of a weight alone, so that parts of it are updated as the whole would be.
ELEMENTWISE = (
    keras.optimizers.SGD,
    keras.optimizers.RMSprop,
    keras.optimizers.Adam,
    keras.optimizers.AdamW,
    keras.optimizers.Adadelta,
    keras.optimizers.Adagrad,
    keras.optimizers.Adamax,
    keras.optimizers.Nadam,
    keras.optimizers.Ftrl,
    keras.optimizers.Lion,
)


def is_elementwise(optimizer: Any) -> bool:
    """Whether it is known to update parts of a weight as it would update the whole."""
    return type(optimizer) in ELEMENTWISE and not optimizer.clipnorm


def check_elementwise(optimizer: Any, divides: bool) -> None:
    """Refuse, by name, optimizers that need the whole of a weight, where devices have parts of some."""
    if not divides:
        return
    name = type(optimizer).__name__
    if type(optimizer) not in ELEMENTWISE:
        known = ", ".join(each.__name__ for each in ELEMENTWISE)
        raise ValueError(
            "A device has a part of each divided weight, and this optimizer is not known to treat each element alone. "
            f"Received: scheme='grid', optimizer={name}. Try one of {known}; or scheme='all-reduce'."
        )
    if optimizer.clipnorm:
        raise ValueError(
            "clipnorm is not supported here: no device has the whole of a divided weight's gradient. Received: "
            f"scheme='grid', optimizer={name}(clipnorm={optimizer.clipnorm}). Try global_clipnorm or clipvalue, or "
            "scheme='all-reduce'."
        )


def checked_layers(grid: Grid, layers: Sequence[WideLayer]) -> list[WideLayer]:
    """Those that the grid divides. Raises ValueError for names of other layers, and for layers that are too narrow."""
    names = [layer.name for layer in layers]
    if grid.layers is None:
        return [layer for layer in layers if layer.size >= grid.outputs]
    unknown = [name for name in grid.layers if name not in names]
    if unknown:
        raise ValueError(
            "Dense and convolutional layers are divided that are called once and have nothing that depends on several "
            f"outputs together. Received: layers={grid.layers!r}, with {unknown}. Try some of: {', '.join(names)}."
        )
    chosen = [layer for layer in layers if layer.name in grid.layers]
    for layer in chosen:
        if layer.size < grid.outputs:
            raise ValueError(
                f"Every device of a model group has an output at least. Received: grid={tuple(grid)!r}, layer "
                f"{layer.name!r} with {layer.size} outputs. Try leaving it out of layers."
            )
    return chosen


def checked_devices(grid: Grid | str, devices: Sequence[str], stages: Any) -> list[str]:
    """The devices that it has, of an automatic one as many as ``stages``, by default all.

    Raises ValueError for a grid of more devices than there are, or of another number than was asked for.
    """
    if not isinstance(grid, Grid):
        return list(devices)[: checked_workers(stages, len(devices), "grid")]
    if len(devices) < grid.devices or (stages is not None and stages != grid.devices):
        asked = "" if stages is None else f", stages={stages!r}"
        raise ValueError(
            f"A grid has a device in each of its places. Received: grid={tuple(grid)[:2]!r}, {len(devices)} devices"
            f"{asked}. Try {grid.devices} devices, or grid=(1, {len(devices)})."
        )
    return list(devices)[: grid.devices]
