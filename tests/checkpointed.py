"""Training that keeps checkpoints, stopped and resumed."""

from __future__ import annotations

import keras
import networks

from pipetrain.callbacks import PipelineCheckpoint

BATCH, STEPS = 8, 10


L = keras.layers


class Stop(keras.callbacks.Callback):
    """Ends training with an exception after so many steps."""

    def __init__(self, after):
        super().__init__()
        self._left = after

    def on_train_batch_end(self, batch, logs=None):
        self._left -= 1
        if self._left == 0:
            raise InterruptedError


def model():
    layers = [L.Dense(8, "tanh"), L.Dropout(0.2, seed=1), L.BatchNormalization(), L.Dense(8, "tanh")]
    return keras.Sequential([keras.Input((networks.FEATURES,)), *layers, L.Dense(networks.CLASSES)])


def pipeline(optimizer=None, **settings):
    keras.utils.set_random_seed(0)
    cut = {} if "devices" in settings else {"stages": 3}
    return networks.pipeline(model(), optimizer, **{**cut, **settings})


def arrays():
    x, y = networks.data(BATCH * STEPS)
    return {"x": x, "y": y, "batch_size": BATCH}


def run(directory, stop_after=None, data=arrays, callbacks=(), every_steps=4, verbose=0, **settings):
    """Three epochs; the model and its History, None if it was stopped; without ``every_steps`` no checkpoints."""
    pm = pipeline(**settings)
    more = [Stop(stop_after)] if stop_after else []
    saving = [PipelineCheckpoint(directory, every_steps=every_steps)] if every_steps else []
    try:
        history = pm.fit(**data(), epochs=3, verbose=verbose, callbacks=[*callbacks, *saving, *more]).history
    except InterruptedError:
        return pm, None
    return pm, history


def assert_goes_on_bitwise(directory, **way):
    """Stopped in the midst and resumed, training in this way ends with the weights of a run that was not: that one."""
    whole, _ = run(directory / "whole", **way)
    _, history = run(directory / "stopped", stop_after=STEPS + 3, **way)
    assert history is None
    again, _ = run(directory / "stopped", **way)
    networks.assert_equal(again.get_weights(), whole.get_weights())
    return whole
