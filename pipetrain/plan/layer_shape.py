"""A layer whose outputs may be divided over devices, as the formulas of communication know it."""

from __future__ import annotations

from dataclasses import dataclass


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
