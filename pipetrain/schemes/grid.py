"""A grid of devices: the outputs of wide layers are divided along one side of it, minibatches along the other.

Source: Gholami et al. 2018, "Integrated Model, Batch, and Domain Parallelism in Training Neural Networks" (arXiv
1712.04432), whose P_r x P_c grid this is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from pipetrain.schemes.arguments import is_count
from pipetrain.schemes.splitting import rows_of

AUTO = "auto"


class Grid(NamedTuple):
    """``outputs`` (P_r) devices have the outputs of a wide layer together, for one of ``rows`` (P_c) parts of the rows.

    Device number ``part * outputs + rank`` has the rank's outputs for that part of the rows, so that neighbours are a
    model group. A layer that is not divided has its weights on every device, each of which computes it for its own part
    of the group's rows: for such layers the grid is 1 x (P_r * P_c).

    ``layers`` are the names of the layers whose outputs are divided; None for all that can be, and have as many outputs
    as there are devices in a model group.
    """

    outputs: int
    rows: int
    layers: tuple[str, ...] | None = None

    @property
    def devices(self) -> int:
        """How many there are."""
        return self.outputs * self.rows

    def group(self, part: int) -> range:
        """The devices of a model group: those that have the same rows."""
        return range(part * self.outputs, (part + 1) * self.outputs)

    def batch_group(self, rank: int) -> range:
        """The devices that have the same outputs of wide layers."""
        return range(rank, self.devices, self.outputs)

    def channels(self, size: int) -> list[range]:
        """Of a layer with so many outputs, those of each rank."""
        return [rows_of(size, rank, self.outputs) for rank in range(self.outputs)]

    def counts(self, rows: int) -> tuple[int, ...]:
        """How many of a minibatch's rows are each device's own."""
        return tuple(len(rows_of(rows, device, self.devices)) for device in range(self.devices))


def check_grid(grid: Any, scheme: str) -> Any:
    """A ``Grid``, or ``"auto"``, for the scheme ``grid``, None for others. Raises ValueError, TypeError for no grid."""
    if scheme != "grid":
        if grid is not None:
            raise ValueError(
                f"Only the scheme 'grid' has one. Received: grid={grid!r}, scheme={scheme!r}. Try scheme='grid'."
            )
        return None
    if grid is None or (isinstance(grid, str) and grid == AUTO):
        return AUTO
    if isinstance(grid, str) or not isinstance(grid, Sequence) or len(grid) not in (2, 3):
        raise TypeError(
            "A grid is two numbers: over how many devices outputs are divided, and over how many rows are. "
            f"Received: grid={grid!r}. Try grid=(2, 2), or grid='auto'."
        )
    if not all(is_count(each) for each in grid[:2]):
        raise ValueError(f"A grid's sides are counts from 1 up. Received: grid={grid!r}. Try grid=(2, 2).")
    return Grid(int(grid[0]), int(grid[1]), *_checked_layers(grid))


def _checked_layers(grid: Sequence[Any]) -> list[tuple[str, ...] | None]:
    if len(grid) == 2 or grid[2] is None:
        return [None]
    if isinstance(grid[2], str) or not all(isinstance(each, str) for each in grid[2]):
        raise TypeError(
            "The layers that a grid divides are a tuple of names. Received: "
            f"grid={tuple(grid)!r}. Try Grid({grid[0]}, {grid[1]}, layers=('dense',))."
        )
    return [tuple(grid[2])]
