"""Which layers should be data-parallel and which model-parallel, by what each computes for a byte that it sends.

Source: Das et al. 2016, "Distributed Deep Learning Using Synchronous Stochastic Gradient Descent" (arXiv 1602.06709).
All is counted for single precision, 4 bytes a number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

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


Kind = Literal["data", "model"]
# Three products of 2 operations a weight, position and row, over a gradient of 4 bytes; sent while others compute.
DATA = 1.5
# The same three over two exchanges of 4 bytes an input: of activations, and of their gradients.
MODEL = 0.75
# What the source's inequality has in place of MODEL: one product over one exchange.
PRINTED_MODEL = 0.5


def data_ratio(layer: LayerShape, rows: float, overlap: bool = True) -> float:
    """FLOP a byte of a data-parallel layer: ``1.5 * positions * rows``, half of it where nothing is sent meanwhile.

    ``rows`` are those of one device.
    """
    return DATA * layer.positions * rows * (1.0 if overlap else 0.5)


def model_ratio(layer: LayerShape, devices: int) -> float:
    """FLOP a byte of a layer whose channels are divided: ``0.75 * channels * kernel * size_ratio / devices``."""
    return MODEL * _outputs_read(layer) / devices


def least_rows(layer: LayerShape, system: float, overlap: bool = True) -> int:
    """The rows that each device needs at least, so that data parallelism of the layer computes as long as it sends.

    ``system`` is the ratio of a device's FLOP/s to the bytes/s of its link.
    """
    return max(1, math.ceil(system / data_ratio(layer, 1, overlap) - 1e-9))


def most_devices(layer: LayerShape, system: float) -> int:
    """The devices over which the channels may be divided at most, so that the layer computes as long as it sends.

    0 where even one's share of the operations would be too few.
    """
    return math.floor(model_ratio(layer, 1) / system + 1e-9) if system else layer.channels


def break_even_rows(layer: LayerShape, overlap: bool = True, printed: bool = False) -> float:
    """The rows of a whole minibatch at which both ratios are equal; with fewer model parallelism sends less.

    ``0.75 * channels * kernel * size_ratio / (1.5 * positions)``, whatever the number of devices: half the units of a
    dense layer. As ``printed`` the source compares one product's operations by one exchange of activations with three
    products' by one exchange of gradients, ``0.5`` in place of ``0.75``: a third of the units.
    """
    return (PRINTED_MODEL if printed else MODEL) * _outputs_read(layer) / data_ratio(layer, 1, overlap)


def choice(layer: LayerShape, rows: int, overlap: bool = True, printed: bool = False) -> Kind:
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
        overlap: whether gradients are sent while other layers compute.
        printed: take the source's inequality as it is printed.

    Raises ValueError for counts below 1, and a ratio that is negative or not finite.
    """

    layers: Sequence[LayerShape]
    devices: int
    rows: int
    system: float
    overlap: bool = True
    printed: bool = False

    def __post_init__(self) -> None:
        for name in ("devices", "rows"):
            checked_count(name, getattr(self, name), "A number from 1 up is needed", 4)
        if not 0 <= self.system < math.inf:
            raise ValueError(
                "A system has so many operations a second for each byte a second, 0 or more. Received: "
                f"system={self.system!r}. Try system=386."
            )

    def choices(self) -> dict[str, Kind]:
        """How each layer should be divided, by name."""
        return {each.name: choice(each, self.rows, self.overlap, self.printed) for each in self.layers}

    def __str__(self) -> str:
        header = ("layer", "weights", "data FLOP/B", "model FLOP/B", "least rows", "most devices", "even at", "better")
        rows = []
        for layer in self.layers:
            kind = choice(layer, self.rows, self.overlap, self.printed)
            ratios = {
                "data": data_ratio(layer, self.rows / self.devices, self.overlap),
                "model": model_ratio(layer, self.devices),
            }
            even = break_even_rows(layer, self.overlap, self.printed)
            rows.append(
                (
                    layer.name,
                    f"{layer.weights:,}",
                    *(f"{ratio:.1f}" for ratio in ratios.values()),
                    f"{least_rows(layer, self.system, self.overlap)}",
                    f"{most_devices(layer, self.system)}",
                    f"{even:.0f}",
                    kind if ratios[kind] >= self.system else f"{kind}, waits",
                )
            )
        sends = "gradients sent while others compute" if self.overlap else "nothing sent while others compute"
        title = (
            f"{self.devices} devices, {self.rows} rows a minibatch, {self.system:.0f} FLOP/B a device, {sends}"
            f"{', the inequality as printed' if self.printed else ''}"
        )
        return f"{title}\n{text_table(header, rows)}"
