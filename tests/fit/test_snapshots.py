"""Snapshots: the weights after every so many steps, while training goes on."""

from __future__ import annotations

import networks
import pytest
from networks import fit

from pipetrain.callbacks import Snapshots

BATCH = 16


@pytest.mark.wide
def test_two_snapshots_callbacks_are_refused_and_none_stays_asked_for():
    pm, x, y = networks.pipeline(), *networks.data(100)
    with pytest.raises(ValueError, match="Only one Snapshots"):
        fit(pm, x, y, callbacks=[Snapshots(2, lambda step, model: None), Snapshots(5, lambda step, model: None)])

    def fails(step, model):
        raise KeyError(step)

    with pytest.raises(KeyError):
        fit(pm, x, y, callbacks=[Snapshots(2, fails)])
    assert pm.session is None
    fit(pm, x, y)


@pytest.mark.wide
def test_draining_within_a_snapshot_is_an_error_not_a_deadlock():
    pm, x, y = networks.pipeline(), *networks.data(200)
    with pytest.raises(RuntimeError, match=r"stages rest.*model that the function is given"):
        fit(pm, x, y, callbacks=[Snapshots(2, lambda step, model: pm.evaluate(x, y, verbose=0))])
    fit(pm, x, y)


@pytest.mark.wide
@pytest.mark.parametrize("scheme", ["single", "data-parallel", "gpipe"])
def test_snapshots_in_the_other_schemes(scheme):
    x, y = networks.data(6 * BATCH)
    steps = []
    pm = networks.pipeline(scheme=scheme)
    pm.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[Snapshots(2, lambda step, model: steps.append(step))])
    assert steps == [2, 4, 6]
