"""Timing changes nothing; an exception anywhere reaches the caller; nothing hangs and no thread is left."""

from __future__ import annotations

from functools import partialmethod

import networks
import numpy as np
import pytest

from pipetrain.compute.stage import Stage
from pipetrain.plan.schemes import SCHEMES

ROWS, BATCH = 12 * 16, 16
LIKE_OTHERS = ("vertical-sync", "spike-compensation")  # whose actions and mailboxes are those of vanilla
SCHEMES = [pytest.param(name, marks=pytest.mark.slow) if name in LIKE_OTHERS else name for name in SCHEMES]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_delays_change_no_bit(scheme, monkeypatch):
    x, y = networks.data(rows=ROWS)
    weights = []
    for delay_s in (0.0, 0.01):
        networks.delay(monkeypatch, delay_s, "forward", "backward", "step", "update")
        pm = networks.pipeline(scheme=scheme)
        history = pm.fit(x, y, batch_size=BATCH, epochs=2, verbose=0).history
        weights.append((pm.get_weights(), history))
    networks.assert_equal(weights[0][0], weights[1][0])
    assert weights[0][1] == weights[1][1]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_an_exception_in_any_stage_reaches_the_caller(scheme, monkeypatch):
    x, y = networks.data(rows=ROWS)
    pm = networks.pipeline(scheme=scheme)
    pm.fit(x, y, batch_size=BATCH, verbose=0)
    stages = pm._engine.layout.stages
    for k in range(stages):
        for methods, op in ((["forward"], "F"), (["backward", "step"], "B")):
            calls = []

            def broken(self, *args, original, k=k, calls=calls, op=op):
                if self is pm._engine._pipeline._stages[k][0]:
                    calls.append(op)
                    if len(calls) == 6:
                        raise KeyError("boom")
                return original(self, *args)

            with monkeypatch.context() as patch:
                for method in methods:
                    patch.setattr(Stage, method, partialmethod(broken, original=getattr(Stage, method)))
                with pytest.raises(KeyError, match="boom") as caught:
                    pm.fit(x, y, batch_size=BATCH, verbose=0)
            note = "\n".join(caught.value.__notes__)
            kind = "forward" if op == "F" else "backward"
            minibatch = 5 if pm._engine.microbatches == 1 else 1  # the sixth of microbatches by four
            assert f"stage {k}, {kind} of minibatch {minibatch}" in note
            assert f"(action {k}{op}5)" in note
    history = pm.fit(x, y, batch_size=BATCH, verbose=0).history
    assert np.isfinite(history["loss"][-1])


def test_an_interrupt_ends_the_threads_and_keeps_the_weights():
    import keras

    x, y = networks.data(rows=ROWS)
    pm = networks.pipeline()
    before = pm.get_weights()

    def interrupt(batch, logs):
        if batch == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pm.fit(
            x, y, batch_size=BATCH, verbose=0, callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=interrupt)]
        )
    assert any((a != b).any() for a, b in zip(before, pm.get_weights()))
    pm.fit(x, y, batch_size=BATCH, verbose=0)


def test_a_broken_data_source_is_heard():
    def source():
        x, y = networks.data(rows=64)
        for n in range(4):
            yield x[16 * n : 16 * n + 16], y[16 * n : 16 * n + 16]
        raise RuntimeError("the disk is gone")

    with pytest.raises(Exception, match="the disk is gone"):
        networks.pipeline().fit(source(), steps_per_epoch=8, verbose=0)


@pytest.mark.parametrize("scheme", ["spectrain", "1f1b", "single", "data-parallel"])
def test_nan_stops_and_names_the_step(scheme):
    x, y = networks.data(rows=ROWS)
    x[5 * BATCH : 6 * BATCH] = np.nan
    pm = networks.pipeline(scheme=scheme)
    before = pm.get_weights()
    with pytest.raises(FloatingPointError, match="nan at step 6"):
        pm.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    networks.assert_equal(before, pm.get_weights())
