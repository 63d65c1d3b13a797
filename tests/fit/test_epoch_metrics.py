"""What an epoch's logs and the progress bar say of a pipeline."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import struct
import sys
import termios
import threading
import time

import inside
import keras
import networks
import parameters
import pytest

import pipetrain
from pipetrain.callbacks import Snapshots
from pipetrain.checkpoint.state import TrainingTime
from pipetrain.frontend.runner_fit import EpochMetrics
from pipetrain.run import pipeline
from pipetrain.run.pipeline import Activity


def clock(*times_s):
    """A clock that reads so at each look at it."""
    left = iter(times_s)
    return lambda: next(left)


def test_figures_are_those_since_the_epoch_s_first_step():
    metrics = EpochMetrics(TrainingTime(clock(3.0, 4.0, 10.0, 14.0, 19.0, 20.0, 21.0)))
    metrics.begin_epoch(0, None)
    for rows in (100, 300):
        metrics.end_step(rows, Activity(5.0, 4, True))
    assert metrics.of_epoch(700, Activity(13.0, 4, True)) == {"samples_per_s": 150.0, "bubble": 0.5}
    metrics.begin_epoch(700, Activity(None, 4, True))
    metrics.end_step(900, Activity(None, 4, True))
    assert metrics.of_epoch(950, Activity(None, 4, True)) == {"samples_per_s": 50.0}


def test_figures_begin_when_every_stage_has_made_an_update():
    """Before it, stages trace their functions."""
    metrics = EpochMetrics(TrainingTime(clock(0.0, 1.0, 20.0, 21.0)))
    metrics.begin_epoch(0, None)
    metrics.end_step(100, Activity(1.0, 2, False))
    metrics.end_step(200, Activity(8.0, 2, True))
    assert metrics.of_epoch(300, Activity(9.0, 2, True)) == {"samples_per_s": 100.0, "bubble": 0.5}


def test_an_epoch_of_one_step_has_figures_too():
    """Else files with a column for each would have none after a short first epoch."""
    metrics = EpochMetrics(TrainingTime(clock(0.0, 1.0, 2.0, 3.0)))
    metrics.begin_epoch(0, None)
    metrics.end_step(100, Activity(1.0, 2, True))
    assert metrics.of_epoch(100, Activity(1.0, 2, True)) == {"samples_per_s": 50.0, "bubble": 0.75}


def test_figures_are_without_the_time_that_evaluations_take():
    time = TrainingTime(clock(0.0, 1.0, 10.0, 11.0, 61.0, 62.0))
    metrics = EpochMetrics(time)
    metrics.begin_epoch(0, None)
    metrics.end_step(100, Activity(5.0, 4, True))
    with time.paused(), time.paused():
        pass
    assert metrics.of_epoch(300, Activity(9.0, 4, True)) == {"samples_per_s": 100.0, "bubble": 0.5}


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


@pytest.mark.wide
@pytest.mark.parametrize("scheme", parameters.by_default(["vanilla", "1f1b", "data-parallel"], "1f1b"))
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


FIGURES = {"samples_per_s", "bubble"}


@pytest.mark.wide
@pytest.mark.parametrize("scheme", parameters.by_default(["spectrain", "1f1b"], "1f1b"))
@pytest.mark.parametrize("verbose", [0, 1, 2])
def test_figures_are_logs_of_every_epoch(scheme, verbose, capsys, tmp_path):
    """Seen by the user's callbacks as by History, not by evaluations; without a terminal the bar shows them."""
    seen = []
    look = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: seen.append({*logs}),
        on_train_batch_end=lambda batch, logs: seen.append({*logs}),
        on_test_end=lambda logs: seen.append({*logs}),
    )
    files = [keras.callbacks.CSVLogger(tmp_path / "log.csv"), keras.callbacks.TensorBoard(tmp_path)]
    pm, data = networks.pipeline(scheme=scheme), networks.data()
    settings = {"batch_size": 64, "epochs": 2, "verbose": verbose, "validation_data": data}
    history = pm.fit(*data, **settings, callbacks=[look, *files]).history
    metrics = {"loss", "accuracy"}
    assert history.keys() == FIGURES | metrics | {"val_loss", "val_accuracy"}
    assert {len(values) for values in history.values()} == {2}
    assert all(0 < each < 1e6 for each in history["samples_per_s"])
    assert all(0 <= each <= 1 for each in history["bubble"])
    assert [each for each in seen if each & FIGURES] == [{*history}] * 2
    head, *rows = (tmp_path / "log.csv").read_text().splitlines()
    assert {*head.split(",")} > FIGURES
    assert len(rows) == 2
    said = capsys.readouterr().out
    assert [said.count(f"{figure}: ") for figure in sorted(FIGURES)] == [2 * (verbose > 0)] * 2


@pytest.mark.wide
@pytest.mark.parametrize("exact", [False, True])
def test_no_bubble_is_known_of_devices_whose_calls_return_early(exact, monkeypatch):
    """As on GPUs: the time of a call says nothing of the work."""
    monkeypatch.setattr(pipeline, "is_prompt", lambda device: False)
    inside.by_threads(monkeypatch)
    pm = networks.pipeline(scheme="vanilla")
    pm.exact_trace = exact
    history = pm.fit(*networks.data(), batch_size=16, verbose=0).history
    assert "samples_per_s" in history
    assert ("bubble" in history) == exact


@pytest.mark.wide
@pytest.mark.parametrize("scheme", ["all-reduce", "grid"])
def test_other_ways_of_training_tell_their_speed(scheme):
    """Their steps are one function each, of which nobody knows how busy the devices are."""
    pm = pipetrain.PipelineModel(networks.mlp(), scheme=scheme, devices=["CPU:0", "CPU:1"])
    pm.compile("sgd", "sparse_categorical_crossentropy")
    history = pm.fit(*networks.data(), batch_size=16, verbose=0).history
    assert history.keys() == {"loss", "samples_per_s"}


class Terminal:
    """A pseudo-terminal of so many columns, as standard output."""

    def __init__(self, columns, monkeypatch):
        self.columns, self._patch = columns, monkeypatch

    def __enter__(self):
        self._leader, follower = pty.openpty()
        fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, self.columns, 0, 0))
        self._out, self._read = open(follower, "w"), b""
        self._thread = threading.Thread(target=self._reading)
        self._thread.start()
        self._patch.setattr(sys, "stdout", self._out)
        return self

    def _reading(self):
        with contextlib.suppress(OSError):  # the other end is closed
            while more := os.read(self._leader, 4096):
                self._read += more

    def __exit__(self, *_):
        self._patch.undo()
        self._out.close()
        self._thread.join()
        os.close(self._leader)

    @property
    def lines(self):
        """What is left on the screen."""
        text, lines, row, column = re.sub("\x1b\\[[0-9;]*m", "", self._read.decode()), [""], 0, 0
        for letter in text:
            if letter in "\b\r":
                column = 0 if letter == "\r" else max(column - 1, 0)
                continue
            if letter == "\n" or column == self.columns:
                row, column = row + 1, 0
                lines += [""]
            if letter != "\n":
                lines[row] = lines[row][:column].ljust(column) + letter + lines[row][column + 1 :]
                column += 1
        return [line.rstrip() for line in lines if line.strip()]


def evaluated(model, x, y, **settings):
    settings.pop("epochs")
    model.evaluate(x, y, **settings)
    model.predict(x, **settings)


def fitted(model, x, y, **settings):
    model.fit(x, y, **settings)


WAYS = {
    "fit": (fitted, {}),
    "one line an epoch": (fitted, {"verbose": 2}),
    "validation": (fitted, {"validation_split": 0.5}),
    "evaluate and predict": (evaluated, {}),
}


@pytest.mark.wide
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("columns", [80, 120, 200])
def test_as_many_lines_are_left_as_by_plain_keras(way, columns, monkeypatch):
    """A line that is longer than the terminal's is left behind at each step."""
    call, settings = WAYS[way]
    x, y = networks.data(480)
    left = []
    single = networks.compiled("keras")
    for model in (single, networks.compiled("1f1b")):
        slow = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: time.sleep(0.06)
        )  # the bar's interval
        with Terminal(columns, monkeypatch) as terminal:
            call(model, x, y, **{"batch_size": 40, "epochs": 2, "verbose": 1, "callbacks": [slow], **settings})
        left.append(terminal.lines)
    keras_left, ours = left
    assert len(ours) == len(keras_left)
    if columns == 200 and call is fitted:
        assert sum(" - samples_per_s: " in line and " - bubble: " in line for line in ours) == 2


@pytest.mark.wide
def test_a_bar_of_the_user_s_own_is_the_only_one(monkeypatch):
    own = keras.callbacks.ProgbarLogger()
    with Terminal(200, monkeypatch) as terminal:
        networks.compiled("1f1b").fit(*networks.data(40), batch_size=20, verbose=1, callbacks=[own])
    assert sum("loss: " in line for line in terminal.lines) == 1


def test_the_plan_is_explained():
    pm = networks.pipeline()
    text = pm.explain(batch_size=16)
    assert "3 stages, batch 16" in text
    assert "Recommended:" in text
