"""What a step on a grid of devices sends, by blocks, their weights and values, and the grid that sends the least.

Source: Gholami et al. 2018, "Integrated Model, Batch, and Domain Parallelism in Training Neural Networks" (arXiv
1712.04432), Equation 8.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

from pipetrain.plan.cluster import Link
from pipetrain.schemes.arguments import checked_count
from pipetrain.schemes.grid import Grid


class GridLayer(NamedTuple):
    """A block of a model as formulas of a grid know it: its outputs and weights, elements of one row and of all.

    ``wide`` is how many outputs can be divided, 0 where none can. ``reads`` and ``writes`` are values, by number, whose
    elements the network has. ``variables`` are the weights' elements by variables, where that is known.
    """

    name: str
    outputs: int
    weights: int
    wide: int = 0
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    variables: tuple[int, ...] = ()

    @property
    def messages(self) -> tuple[int, ...]:
        """The elements of each message that has its weights' gradients: one for each variable."""
        return self.variables or (self.weights,)


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
            GridLayer(f"dense_{n}", b, b * (a + 1), b, (n,), (n + 1,), (a * b, b))
            for n, (a, b) in enumerate(pairwise(widths))
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
            GridLayer(name, outputs, weights, wide, *map(tuple, values))
            for name, outputs, weights, wide, *values in data["layers"]
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


FLOAT_BYTES = 4
# Exchanges of activations in a step: Equation 8 gathers outputs, and sums the gradients of inputs on every device,
# which is two; here each device gets the sums of its own outputs only, which is one.
PUBLISHED, SENT = 3, 2


class Traffic(NamedTuple):
    """The bytes that all devices send in a step: activations, their gradients, and weights' gradients and sums."""

    gathered: int
    scattered: int
    reduced: int

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self)


def traffic(network: GridNetwork, grid: Grid, divided: Collection[str], rows: int) -> Traffic:
    """What is sent, message by message, for a minibatch of which every device has a row at least.

    Args:
        network: the model.
        grid: the devices.
        divided: the names of the layers whose outputs are divided.
        rows: of the minibatch.
    """
    counts = grid.counts(rows)
    groups = [[counts[n] for n in grid.group(part)] for part in range(grid.rows)]
    trained = frozenset(network.trained)
    gathered = scattered = 0
    for use in uses(network, divided if grid.outputs > 1 else ()):
        value, by_channels, whole, by_rows = use
        size = FLOAT_BYTES * network.elements[value]
        of_all = sum(sum(group) * (grid.outputs - 1) * size for group in groups) if whole else 0
        exchanged = 0
        if by_channels and by_rows:  # each device has so many of the channels, and gets its rows of the others
            own = [len(each) for each in grid.channels(by_channels)]
            exchanged = sum(
                count * size * (by_channels - own[rank]) // by_channels
                for group in groups
                for rank, count in enumerate(group)
            )
        if value not in network.inputs or not whole:
            gathered += of_all + exchanged
            scattered += of_all + exchanged if value in trained else 0
    reduced = 0
    for layer in network.layers:
        size = FLOAT_BYTES * layer.weights
        if layer.name in divided and grid.outputs > 1:
            reduced += 2 * (grid.rows - 1) * size
        else:
            reduced += 2 * (grid.devices - 1) * size
    return Traffic(gathered, scattered, reduced)


def layer_seconds(
    layer: GridLayer, grid: Grid, rows: int, link: Link, exchanges: int = SENT, is_first: bool = False
) -> float:
    """Equation 8's term of one layer.

    ``k (a ceil(log2 P_r) + b (B/P_c) ((P_r-1)/P_r) d) + 2 (a ceil(log2 P_c) + b ((P_c-1)/P_c) |W|/P_r)`` with k = 3 as
    published, of which the gradients of inputs are two, that the first layer does not have; b is the time of 4 bytes.
    """
    a, b = link.latency_s, FLOAT_BYTES / link.bandwidth_bytes_per_s
    outputs, parts = grid.outputs, grid.rows
    gathering = a * math.ceil(math.log2(outputs)) + b * rows / parts * (outputs - 1) / outputs * layer.outputs
    summing = a * math.ceil(math.log2(parts)) + b * (parts - 1) / parts * layer.weights / outputs
    return (1 if is_first else exchanges) * gathering + 2 * summing


def seconds(network: GridNetwork, grid: Grid, divided: Collection[str], rows: int, link: Link) -> float:
    """What the messages of a step take, of which each device sends an equal part: Equation 8 with what is sent here.

    A message's latency counts ``ceil(log2 P)`` times for each exchange among P devices.
    """
    sent = traffic(network, grid, divided, rows).total / grid.devices / link.bandwidth_bytes_per_s
    outputs, rows_of, devices = (math.ceil(math.log2(n)) for n in (grid.outputs, grid.rows, grid.devices))
    wide = sum(layer.name in divided for layer in network.layers)
    others = sum(layer.name not in divided and layer.weights > 0 for layer in network.layers)
    return sent + link.latency_s * (SENT * wide * outputs + 2 * wide * rows_of + 2 * others * devices)


def elsewhere_bytes(
    network: GridNetwork, grid: Grid, divided: Collection[str], slots: int, temporaries: int = 0
) -> int:
    """What of weights, their gradients and ``slots`` of each a device need not have, as others have those parts.

    Nor has the update of the largest layer as large ``temporaries``, if that is divided.
    """
    sizes = [layer.weights for layer in network.layers if layer.name in divided]
    is_largest = max(sizes, default=0) == max((layer.weights for layer in network.layers), default=0)
    count = (2 + slots) * sum(sizes) + temporaries * is_largest * max(sizes, default=0)
    return FLOAT_BYTES * count * (grid.outputs - 1) // grid.outputs


def best_division(network: GridNetwork, grid: Grid, rows: int, link: Link) -> tuple[str, ...]:
    """The layers whose outputs the grid should divide: no single layer more or less makes ``seconds`` less.

    Of what that leads to from none, from all that can be divided, and from those whose own term of Equation 8 is
    smaller so, the best.
    """
    whole = Grid(1, grid.devices)
    possible = [layer for layer in network.layers if layer.wide >= grid.outputs > 1]
    names = frozenset(layer.name for layer in possible)
    pays = frozenset(
        layer.name
        for layer in possible
        if layer_seconds(layer, grid, rows, link) < layer_seconds(layer, whole, rows, link)
    )

    def taken_s(divided: frozenset[str]) -> float:
        return seconds(network, grid, divided, rows, link)

    found = [_improved(start, names, taken_s) for start in dict.fromkeys((frozenset[str](), pays, names))]
    best = min(found, key=taken_s)
    return tuple(layer.name for layer in possible if layer.name in best)


def _improved(
    chosen: frozenset[str], names: frozenset[str], taken_s: Callable[[frozenset[str]], float]
) -> frozenset[str]:
    """What changes of one layer at a time lead to, each kept that makes it less, until none does."""
    least_s, is_new = taken_s(chosen), True
    while is_new:
        is_new = False
        for name in sorted(names):
            other_s = taken_s(chosen ^ {name})
            if other_s < least_s:
                chosen, least_s, is_new = chosen ^ {name}, other_s, True
    return chosen


def best_grid(network: GridNetwork, devices: int, rows: int, link: Link) -> Grid:
    """The grid of so many devices, with the layers that it divides, whose messages take the least time.

    Of equal ones, such as where messages take no time, that with the fewest devices for one layer's outputs. Raises
    ValueError for counts below 1.
    """
    for name, value in (("devices", devices), ("rows", rows)):
        checked_count(name, value, "A number from 1 up is needed", 4)
    found = []
    for outputs in range(1, devices + 1):
        if devices % outputs == 0:
            grid = Grid(outputs, devices // outputs)
            layers = best_division(network, grid, rows, link)
            if layers or outputs == 1:
                found.append(grid._replace(layers=layers))
    return min(found, key=lambda grid: seconds(network, grid, grid.layers or (), rows, link))
