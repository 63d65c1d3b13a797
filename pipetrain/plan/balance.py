"""Which layers should be data-parallel and which model-parallel, by what each computes for a byte that it sends.

Source: Das et al. 2016, "Distributed Deep Learning Using Synchronous Stochastic Gradient Descent" (arXiv 1602.06709).
All is counted for single precision, 4 bytes a number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from pipetrain.logs import text_table
from pipetrain.schemes.arguments import checked_count


@dataclass(frozen=True)
class LayerShape:
    """A dense layer or a convolution, for one row of a minibatch.

    ``channels`` are its outputs at a position (the source's ofm), ``positions`` how many of these there are (ow * oh),
    ``kernel`` the positions that one output reads (kw * kh), ``read_positions`` all that it reads, padding included.
    ``inputs``, ``outputs`` and ``weights`` are numbers of elements.
    """

    name: str
    channels: int
    inputs: int
    outputs: int
    weights: int
    kernel: int = 1
    positions: int = 1
    read_positions: int = 1

    @classmethod
    def dense(cls, name: str, inputs: int, units: int) -> LayerShape:
        """A dense layer with a bias, of inputs without positions."""
        return cls(name, units, inputs, units, units * (inputs + 1))

    @property
    def size_ratio(self) -> float:
        """The positions of the outputs over those that are read (the source's fsr): 1 for dense layers."""
        return self.positions / self.read_positions

    @property
    def input_maps(self) -> int:
        """The inputs of an output at one position of its kernel (the source's ifm)."""
        if self.kernel == 1:
            return max(1, self.inputs // self.read_positions)
        return max(1, self.weights // (self.channels * self.kernel))  # biases are less than one of them

    @property
    def flops(self) -> int:
        """Of a row's forward: a multiplication and an addition for each weight and position."""
        return 2 * self.channels * self.input_maps * self.kernel * self.positions


Kind = Literal["data", "model"]
# Three products of 2 operations a weight, position and row, over a gradient of 4 bytes; sent while others compute.
DATA = 1.5
# The same three over two exchanges of 4 bytes an input: of activations, and of their gradients.
MODEL = 0.75
# The bytes of two exchanges of 4 a number.
EXCHANGED = 8
# What the source's inequality has in place of MODEL: one product over one exchange.
PRINTED_MODEL = 0.5


def data_ratio(layer: LayerShape, rows: float, overlap: float = 1.0) -> float:
    """FLOP a byte of a data-parallel layer: ``1.5 / (2 - overlap) * positions * rows``.

    ``rows`` are those of one device. ``overlap`` is how much of the exchange goes on meanwhile, from 0, nothing, to 1;
    True and False are 1 and 0.
    """
    return DATA / (2 - overlap) * layer.positions * rows


def model_ratio(layer: LayerShape, devices: int) -> float:
    """FLOP a byte of a layer whose channels are divided: ``0.75 * channels * kernel * size_ratio / devices``."""
    return MODEL * _outputs_read(layer) / devices


class WeightBlocks(NamedTuple):
    """Into how many parts a layer's inputs (the source's ifm) and its outputs (ofm) are divided: blocks of weights."""

    inputs: int
    outputs: int

    @property
    def devices(self) -> int:
        """A block for each."""
        return self.inputs * self.outputs

    def __str__(self) -> str:
        return f"{self.inputs}x{self.outputs}"


def block_bytes(layer: LayerShape, parts: WeightBlocks) -> float:
    """What a device sends for each row of a layer in blocks: ``8 * (read/P_i + outputs/P_o)``.

    Where outputs are divided it gathers the part of the inputs that its block reads, ``read/P_i`` numbers with what
    padding adds, and gives back as many of their gradients. Where inputs are, the blocks' outputs are partial sums:
    these are reduced, and their gradients gathered. Like the source this counts a device's own part too.
    """
    read = layer.input_maps * layer.read_positions / parts.inputs if parts.outputs > 1 else 0.0
    made = layer.channels * layer.positions / parts.outputs if parts.inputs > 1 else 0.0
    return EXCHANGED * (read + made)


def block_ratio(layer: LayerShape, parts: WeightBlocks) -> float:
    """FLOP a byte of a layer in blocks: three products over what ``block_bytes`` counts.

    ``model_ratio`` where outputs alone are divided; infinite where nothing is.
    """
    sent = block_bytes(layer, parts)
    return 3 * layer.flops / parts.devices / sent if sent else math.inf


def best_parts(layer: LayerShape, devices: int) -> WeightBlocks | None:
    """The blocks with the most FLOP a byte on so many devices, of equal ones with the fewest parts of the inputs.

    None where a layer has too few inputs and outputs for any.
    """
    possible = [WeightBlocks(n, devices // n) for n in range(1, devices + 1) if devices % n == 0]
    possible = [each for each in possible if each.inputs <= layer.input_maps and each.outputs <= layer.channels]
    return max(possible, key=lambda each: block_ratio(layer, each), default=None)


def least_rows(layer: LayerShape, system: float, overlap: float = 1.0) -> int:
    """The rows that each device needs at least, so that data parallelism of the layer computes as long as it sends.

    ``system`` is the ratio of a device's FLOP/s to the bytes/s of its link.
    """
    return max(1, math.ceil(system / data_ratio(layer, 1, overlap) - 1e-9))


def most_devices(layer: LayerShape, system: float) -> int:
    """The devices over which the channels may be divided at most, so that the layer computes as long as it sends.

    0 where even one's share of the operations would be too few.
    """
    return math.floor(model_ratio(layer, 1) / system + 1e-9) if system else layer.channels


def break_even_rows(layer: LayerShape, overlap: float = 1.0, printed: bool = False) -> float:
    """The rows of a whole minibatch at which both ratios are equal; with fewer model parallelism sends less.

    ``0.75 * channels * kernel * size_ratio / (1.5 * positions)``, whatever the number of devices: half the units of a
    dense layer. As ``printed`` the source compares one product's operations by one exchange of activations with three
    products' by one exchange of gradients, ``0.5`` in place of ``0.75``: a third of the units.
    """
    return (PRINTED_MODEL if printed else MODEL) * _outputs_read(layer) / data_ratio(layer, 1, overlap)


def choice(layer: LayerShape, rows: int, overlap: float = 1.0, printed: bool = False) -> Kind:
    """How the layer should be divided for minibatches of so many rows in all."""
    return "model" if rows < break_even_rows(layer, overlap, printed) else "data"


def _outputs_read(layer: LayerShape) -> float:
    return layer.channels * layer.kernel * layer.size_ratio


@dataclass(frozen=True)
class Balance:
    """The ratios of a model's layers on so many devices; prints as a table.

    Args:
        layers: those that can be divided.
        devices: how many there are.
        rows: of a minibatch, in all.
        system: the ratio of a device's FLOP/s to the bytes/s of its link.
        overlap: how much of the gradients' exchange goes on while others compute, from 0 to 1; see ``data_ratio``.
        printed: take the source's inequality as it is printed.

    Raises ValueError for counts below 1, and a ratio that is negative or not finite.
    """

    layers: Sequence[LayerShape]
    devices: int
    rows: int
    system: float
    overlap: float = 1.0
    printed: bool = False

    def __post_init__(self) -> None:
        for name in ("devices", "rows"):
            checked_count(name, getattr(self, name), "A number from 1 up is needed", 4)
        if not 0 <= self.system < math.inf:
            raise ValueError(
                "A system has so many operations a second for each byte a second, 0 or more. Received: "
                f"system={self.system!r}. Try system=386."
            )
        if not 0 <= self.overlap <= 1:
            raise ValueError(f"An overlap is a part from 0 to 1. Received: overlap={self.overlap!r}. Try overlap=1.")

    def choices(self) -> dict[str, Kind]:
        """How each layer should be divided, by name."""
        return {each.name: choice(each, self.rows, self.overlap, self.printed) for each in self.layers}

    def __str__(self) -> str:
        header = (
            *("layer", "weights", "data FLOP/B", "model FLOP/B", "blocks", "their FLOP/B"),
            *("least rows", "most devices", "even at", "better"),
        )
        rows = []
        for layer in self.layers:
            kind = choice(layer, self.rows, self.overlap, self.printed)
            ratios = {
                "data": data_ratio(layer, self.rows / self.devices, self.overlap),
                "model": model_ratio(layer, self.devices),
            }
            blocks = best_parts(layer, self.devices)
            even = break_even_rows(layer, self.overlap, self.printed)
            rows.append(
                (
                    layer.name,
                    f"{layer.weights:,}",
                    *(f"{ratio:.1f}" for ratio in ratios.values()),
                    "-" if blocks is None else str(blocks),
                    "-" if blocks is None else f"{block_ratio(layer, blocks):.1f}",
                    f"{least_rows(layer, self.system, self.overlap)}",
                    f"{most_devices(layer, self.system)}",
                    f"{even:.0f}",
                    kind if ratios[kind] >= self.system else f"{kind}, waits",
                )
            )
        sends = {1.0: "gradients sent while others compute", 0.0: "nothing sent while others compute"}.get(
            self.overlap, f"overlap {self.overlap:g}"
        )
        title = (
            f"{self.devices} devices, {self.rows} rows a minibatch, {self.system:.0f} FLOP/B a device, {sends}"
            f"{', the inequality as printed' if self.printed else ''}"
        )
        return f"{title}\n{text_table(header, rows)}"
