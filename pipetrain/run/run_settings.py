"""What a run of the pipeline's threads begins with."""

from __future__ import annotations

from typing import NamedTuple


class RunSettings(NamedTuple):
    """What holds from one start of the threads to the next drain.

    ``updates``: those of the optimizer so far. ``steps``: those of this ``fit`` so far, from which snapshots count.
    ``snapshot_every``: the weights after every so many steps are kept; 0 for none. ``loss_is_mean``: whether a
    minibatch's loss is the mean (else the sum) over its rows. ``exact_times``: whether threads wait for GPUs and
    workers, so that the trace has their times of completion.
    """

    updates: int = 0
    steps: int = 0
    snapshot_every: int = 0
    loss_is_mean: bool = True
    exact_times: bool = False
