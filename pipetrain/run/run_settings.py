"""Settings of one run of the pipeline's threads."""

from __future__ import annotations

from typing import NamedTuple

from pipetrain.compute.optimizer.loss_scaling import LossScale


class RunSettings(NamedTuple):
    """Settings that hold from one start of the threads to the next drain.

    ``updates``: the steps of the optimizer so far. ``steps``: the updates of this ``fit`` so far, from which snapshots
    count. ``snapshot_every``: the weights are kept whenever this number of updates has been made; 0 for never.
    ``loss_is_mean``: whether a minibatch's loss is the mean (else the sum) over its rows. ``exact_times``: whether
    threads wait for GPUs and workers, so that the trace has their times of completion. ``loss_scale``: that of the
    first minibatch. ``is_traced``: whether a trace is kept.
    """

    updates: int = 0
    steps: int = 0
    snapshot_every: int = 0
    loss_is_mean: bool = True
    exact_times: bool = False
    loss_scale: LossScale = LossScale()
    is_traced: bool = True
