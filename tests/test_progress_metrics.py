"""What the progress bar says of a pipeline."""

from __future__ import annotations

import time

import keras
import networks
import pytest

from pipetrain.callbacks import Snapshots
from pipetrain.checkpoint.training_time import TrainingTime
from pipetrain.frontend import progress_metrics
from pipetrain.run import pipeline
from pipetrain.run.pipeline import Activity


def clock(*times_s):
    """A clock that reads so at each look at it."""
    left = iter(times_s)
    return lambda: next(left)


def test_figures_are_those_since_the_epoch_s_first_step():
    figures = progress_metrics.ProgressMetrics(TrainingTime(clock(3.0, 10.0, 12.0, 14.0, 20.0, 21.0)))
    assert figures.figures(100, Activity(5.0, 4, 2, True)) == {}
    assert figures.figures(300, Activity(9.0, 4, 4, True)) == {"samples_per_s": 100, "in_flight": 4, "bubble": 0.5}
    assert figures.figures(700, Activity(17.0, 4, 3, True)) == {"samples_per_s": 150, "in_flight": 4, "bubble": 0.25}
    figures.begin_epoch()
    assert figures.figures(900, Activity(None, 4, 1, True)) == {}
    assert figures.figures(950, Activity(None, 4, 1, True)) == {"samples_per_s": 50, "in_flight": 1}


def test_figures_begin_when_every_stage_has_made_an_update():
    """Before it, stages trace their functions."""
    figures = progress_metrics.ProgressMetrics(TrainingTime(clock(0.0, 10.0, 20.0, 21.0)))
    assert figures.figures(100, Activity(1.0, 2, 2, False)) == {}
    assert figures.figures(200, Activity(8.0, 2, 2, True)) == {}
    assert figures.figures(300, Activity(9.0, 2, 2, True)) == {"samples_per_s": 100, "in_flight": 2, "bubble": 0.5}


def test_figures_are_without_the_time_that_evaluations_take():
    time = TrainingTime(clock(0.0, 10.0, 11.0, 61.0, 62.0))
    figures = progress_metrics.ProgressMetrics(time)
    assert figures.figures(100, Activity(5.0, 4, 2, True)) == {}
    with time.paused(), time.paused():
        pass
    assert figures.figures(300, Activity(9.0, 4, 4, True)) == {"samples_per_s": 100, "in_flight": 4, "bubble": 0.5}


def test_training_takes_no_time_while_something_else_is_done():
    time = TrainingTime(clock(1.0, 2.0, 5.0, 25.0, 26.0, 30.0, 31.0, 34.0))
    assert time.seconds == 1.0
    with time.paused():
        assert time.seconds == 4.0
        assert time.seconds == 4.0
    assert time.seconds == 5.0
    with time.paused():
        pass
    assert time.seconds == 12.0


@pytest.mark.parametrize("scheme", networks.by_default(["vanilla", "1f1b", "data-parallel"], "1f1b"))
def test_evaluations_and_snapshots_within_fit_stop_its_time(scheme):
    """What a callback and the validation do is timed by no step."""
    pm, (x, y) = networks.pipeline(scheme=scheme), networks.data(100)
    during = []

    def look(*_, **logs):
        session = pm.session
        before = session.time.seconds
        time.sleep(0.01)
        during.append(session.time.seconds - before)

    snapshots = Snapshots(2, look)
    evaluate = keras.callbacks.LambdaCallback(on_test_batch_end=look, on_predict_batch_end=look)
    predict = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: pm.predict(x, verbose=0, callbacks=[evaluate]))
    networks.fit(pm, x, y, validation_data=(x, y), callbacks=[snapshots, evaluate, predict])
    assert len(during) > 8
    assert set(during) == {0.0}
    assert pm.session is None


@pytest.mark.parametrize("scheme", ["spectrain", "1f1b"])
def test_the_bar_shows_them_and_history_does_not(scheme, capsys):
    pm = networks.pipeline(scheme=scheme)
    history = pm.fit(*networks.data(), batch_size=16, epochs=2, verbose=1).history
    said = capsys.readouterr().out
    assert all(figure in said for figure in ("samples_per_s: ", "in_flight: 3.0000", "bubble: 0."))
    assert history.keys() == {"loss", "accuracy"}


@pytest.mark.parametrize("exact", [False, True])
def test_no_bubble_is_known_of_devices_whose_calls_return_early(exact, monkeypatch, capsys):
    """As on GPUs: the time of a call says nothing of the work."""
    monkeypatch.setattr(pipeline, "is_prompt", lambda device: False)
    pm = networks.pipeline(scheme="vanilla")
    pm.exact_trace = exact
    pm.fit(*networks.data(), batch_size=16, verbose=1)
    said = capsys.readouterr().out
    assert "samples_per_s: " in said
    assert ("bubble: " in said) == exact


def test_the_plan_is_explained():
    pm = networks.pipeline()
    text = pm.explain(batch_size=16)
    assert "3 stages, batch 16" in text
    assert "Recommended:" in text
