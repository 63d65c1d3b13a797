"""Settings of one run of the pipeline's threads."""

from __future__ import annotations

from typing import NamedTuple


class RunSettings(NamedTuple):
    """Settings that hold from one start of the threads to the next drain.

    ``updates``: those of the optimizer so far. ``steps``: those of this ``fit`` so far, from which snapshots count.
    ``snapshot_every``: the weights are kept whenever this number of steps has been made; 0 for never. ``loss_is_mean``:
    whether a minibatch's loss is the mean (else the sum) over its rows. ``exact_times``: whether threads wait for GPUs
    and workers, so that the trace has their times of completion.
    """

    updates: int = 0
    steps: int = 0
    snapshot_every: int = 0
    loss_is_mean: bool = True
    exact_times: bool = False
