"""A model as the formulas of a grid's traffic know it: blocks, their weights, and the values that they hand on."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple


class GridLayer(NamedTuple):
    """A block of a model as formulas of a grid know it: its outputs and weights, elements of one row and of all.

    ``wide`` is how many outputs can be divided, 0 where none can. ``reads`` and ``writes`` are values, by number, whose
    elements the network has.
    """

    name: str
    outputs: int
    weights: int
    wide: int = 0
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()


@dataclass(frozen=True)
class GridNetwork:
    """A model's blocks in their order, the elements of one row of each value, and which values are its inputs, outputs.

    ``trained`` are the values that have gradients.
    """

    layers: tuple[GridLayer, ...]
    elements: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    trained: tuple[int, ...]

    @classmethod
    def chain(cls, widths: Sequence[int]) -> GridNetwork:
        """Dense layers one after another, with biases: ``widths`` are those of the input and of each layer."""
        layers = [
            GridLayer(f"dense_{n}", b, b * (a + 1), b, (n,), (n + 1,)) for n, (a, b) in enumerate(pairwise(widths))
        ]
        last = len(widths) - 1
        return cls(tuple(layers), tuple(widths), (0,), (last,), tuple(range(1, last + 1)))

    @cached_property
    def makers(self) -> list[GridLayer | None]:
        """The block that makes each value; None for inputs."""
        found: list[GridLayer | None] = [None] * len(self.elements)
        for layer in self.layers:
            for value in layer.writes:
                found[value] = layer
        return found

    @cached_property
    def readers(self) -> list[list[GridLayer]]:
        """The blocks that read each value."""
        found: list[list[GridLayer]] = [[] for _ in self.elements]
        for layer in self.layers:
            for value in layer.reads:
                found[value].append(layer)
        return found

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> GridNetwork:
        """What ``dataclasses.asdict`` made of one, after JSON."""
        layers = tuple(
            GridLayer(name, outputs, weights, wide, tuple(reads), tuple(writes))
            for name, outputs, weights, wide, reads, writes in data["layers"]
        )
        return cls(layers, *(tuple(data[name]) for name in ("elements", "inputs", "outputs", "trained")))


class Use(NamedTuple):
    """How a value is made and read: the channels by which it is divided where it is made, 0 if by rows; by whom.

    ``whole`` says whether a divided layer reads all of it, ``by_rows`` whether others, or the model's caller, read each
    device's own rows.
    """

    value: int
    by_channels: int
    whole: bool
    by_rows: bool


def uses(network: GridNetwork, divided: Collection[str]) -> Iterator[Use]:
    """Those of all values, where the layers of these names are divided."""
    for value, (maker, readers) in enumerate(zip(network.makers, network.readers, strict=True)):
        by_channels = maker.wide if maker is not None and maker.name in divided else 0
        whole = any(layer.name in divided for layer in readers)
        by_rows = value in network.outputs or any(layer.name not in divided for layer in readers)
        yield Use(value, by_channels, whole, by_rows)
