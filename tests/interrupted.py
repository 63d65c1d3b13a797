"""Training by steps of all devices that is interrupted: what has been done counts, and a run goes on from there."""

from __future__ import annotations

import keras
import networks
import pytest

from pipetrain import callbacks


def assert_goes_on(make, single, data, directory, same=networks.assert_equal):
    """A run that stops after four steps and is run again ends as one that was not stopped.

    ``make`` gives a model of the scheme; ``single`` is the same for plain Keras, whose weights after an epoch are those
    of a snapshot on the way. ``data`` are four minibatches.
    """

    def run(name, stop_at=None):
        kept, pm = {}, make()
        pm.compile(keras.optimizers.Adam(0.01), networks.crossentropy())

        def stop(batch, logs):
            if batch == stop_at:
                raise InterruptedError

        used = [
            callbacks.PipelineCheckpoint(directory / name, every_steps=3),
            callbacks.Snapshots(2, lambda step, model: kept.update({step: model.get_weights()})),
            keras.callbacks.LambdaCallback(on_train_batch_end=stop),
        ]
        try:
            networks.fit(pm, *data, epochs=2, callbacks=used)
        except InterruptedError:
            return None, kept
        return pm.get_weights(), kept

    whole, kept = run("whole")
    assert sorted(kept) == [2, 4, 6, 8]
    assert run("parts", stop_at=3)[0] is None
    same(run("parts")[0], whole)
    single.compile(keras.optimizers.Adam(0.01), networks.crossentropy())
    networks.fit(single, *data)
    networks.assert_close(kept[4], single.get_weights())


def assert_keeps_steps(pm, single, data, owner, method, optimizer, monkeypatch):
    """An interrupt just after the third call of a method, which makes a step, leaves its weights to the next run."""
    pm.compile(optimizer(), networks.crossentropy())
    run, done = getattr(owner, method), []

    def interrupted(self, *arguments):
        done.append(run(self, *arguments))
        if len(done) == 3:
            raise KeyboardInterrupt
        return done[-1]

    monkeypatch.setattr(owner, method, interrupted)
    with pytest.raises(KeyboardInterrupt):
        networks.fit(pm, *data)
    single.compile(optimizer(), networks.crossentropy())
    networks.fit(single, data[0][:60], data[1][:60])
    networks.assert_close(pm.get_weights(), single.get_weights())
    assert int(pm.optimizer.iterations) == 3
    for model in (pm, single):
        networks.fit(model, *data)
    networks.assert_close(pm.get_weights(), single.get_weights())
