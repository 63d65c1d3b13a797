"""What the grid that sends the least would take, if it divides any layer by its outputs."""

from __future__ import annotations

from typing import NamedTuple

from pipetrain.plan.cluster import Cluster
from pipetrain.plan.grid_cost import elsewhere_bytes
from pipetrain.plan.profile import Profile
from pipetrain.schemes.grid import Grid
from pipetrain.simulation.grid.simulator import chosen_grid, simulate_grid


class GridEstimate(NamedTuple):
    """A grid, the seconds of a step, and what a device need not have of the whole model: other devices' parts."""

    grid: Grid
    step_s: float
    elsewhere_bytes: int


def estimated_grid(
    profile: Profile, devices: int, cluster: Cluster, slots: int, asked: Grid | None = None
) -> GridEstimate | None:
    """The grid that is asked for, or that of so many devices that sends the least; with ``slots`` for each weight.

    None where it is not known which layers can be divided, and where none should be: that grid is an all-reduce.
    """
    if profile.network is None:
        return None
    grid = chosen_grid(profile, devices, cluster, asked)
    if grid.outputs == 1 and asked is None:
        return None
    elsewhere = elsewhere_bytes(profile.network, grid, grid.layers or (), slots)
    return GridEstimate(grid, simulate_grid(profile, devices, cluster, grid).step_s, elsewhere)
