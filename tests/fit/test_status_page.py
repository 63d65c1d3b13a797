"""The page that shows how far training is."""

from __future__ import annotations

import json
import socket
import threading
import urllib.error
import urllib.request

import keras
import networks
import pytest

from pipetrain.callbacks import PipelineCheckpoint, StatusPage


def got(port, path="/status.json", host=None):
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers={"Host": host} if host else {})
    with urllib.request.urlopen(request, timeout=5) as answer:
        return answer.read().decode()


@pytest.mark.parametrize("scheme", ["spectrain", pytest.param("data-parallel", marks=pytest.mark.wide)])
def test_a_fit_shows_how_far_it_is(scheme, tmp_path):
    page, seen = StatusPage(0), []
    looking = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(got(page.port)))
    pm, (x, y) = networks.pipeline(networks.mlp(), stages=2, scheme=scheme), networks.data(120)
    kept = PipelineCheckpoint(tmp_path, every_steps=2)
    pm.fit(x, y, batch_size=20, epochs=2, verbose=0, callbacks=[kept, page, looking])
    first, last = map(json.loads, seen)
    assert (first["epoch"], last["epoch"], last["epochs"], last["step"], last["steps"]) == (1, 2, 2, 6, 6)
    assert last["scheme"] == scheme and last["state"] == "trains" and last["last_checkpoint"] == 10
    assert last["logs"]["loss"] > 0 and [each["worker"] for each in last["devices"]] == [None, None]
    stages = [each["stages"] for each in last["devices"]]
    assert stages == ([[0], [1]] if scheme == "spectrain" else [[0], [0]])
    assert [each["staleness"] for each in last["devices"]] == ([[1], [0]] if scheme == "spectrain" else [[0], [0]])
    assert (0 < last["bubble"] < 1) if scheme == "spectrain" else last["bubble"] is None
    assert last["last_epoch"]["loss"] == last["logs"]["loss"]
    with pytest.raises(urllib.error.URLError):
        got(page.port)  # it ends with fit
    assert not any(each.name == "status page" for each in threading.enumerate())


def test_the_page_is_for_this_machine_s_names_alone_and_escapes_what_it_shows():
    page, seen, refused = StatusPage(0), [], []

    def look(epoch, logs):
        seen.append(got(page.port, "/"))
        for path, host in (("/", "evil.example"), ("/etc/passwd", None)):
            with pytest.raises(urllib.error.HTTPError) as error:
                got(page.port, path, host)
            refused.append(error.value.code)

    pm = networks.pipeline(networks.mlp(), stages=2)
    pm.name = "<b>mine</b>"
    looking = keras.callbacks.LambdaCallback(on_epoch_end=look)
    pm.fit(*networks.data(60), verbose=0, callbacks=[page, looking])
    assert refused == [403, 404]
    assert "&lt;b&gt;mine" in seen[0] and "<b>" not in seen[0] and "http://" not in seen[0]


def test_the_environment_may_ask_for_it(monkeypatch):
    pm, (x, y), seen = networks.pipeline(networks.mlp(), stages=2), networks.data(60), []
    own, port = StatusPage(0), free_port()
    monkeypatch.setenv("PIPETRAIN_STATUS_PORT", str(port))
    looking = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(got(port)))
    pm.fit(x, y, verbose=0, callbacks=[looking])
    pm.fit(x, y, verbose=0, callbacks=[own])  # the user's takes its place
    with socket.socket() as taken, pytest.warns(UserWarning, match="No page can be served there"):
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setenv("PIPETRAIN_STATUS_PORT", str(taken.getsockname()[1]))
        pm.fit(x, y, verbose=0)
    assert len(seen) == 1 and own.port not in (0, port)
    monkeypatch.setenv("PIPETRAIN_STATUS_PORT", "http")
    with pytest.raises(ValueError, match=r"A port is a number.*PIPETRAIN_STATUS_PORT='http'"):
        pm.fit(x, y, verbose=0)


def test_a_fit_of_which_no_epoch_is_left_has_a_page_too():
    page, seen = StatusPage(0), []
    looking = keras.callbacks.LambdaCallback(on_train_end=lambda logs: seen.append(json.loads(got(page.port))))
    pm = networks.pipeline(networks.mlp(), stages=2)
    pm.fit(*networks.data(60), epochs=1, initial_epoch=1, verbose=0, callbacks=[page, looking])
    assert [(each["state"], each["step"], each["last_epoch"]) for each in seen] == [("has ended", 0, {})]


def free_port():
    with socket.socket() as each:
        each.bind(("127.0.0.1", 0))
        return each.getsockname()[1]


def test_a_port_in_use_is_told_before_training():
    first, (x, y) = StatusPage(0), networks.data(60)
    pm = networks.pipeline(networks.mlp(), stages=2)

    def begin(logs):
        with pytest.raises(ValueError, match="No page can be served there"):
            networks.pipeline(networks.mlp(), stages=2).fit(x, y, verbose=0, callbacks=[StatusPage(first.port)])

    pm.fit(x, y, verbose=0, callbacks=[first, keras.callbacks.LambdaCallback(on_train_begin=begin)])
    with pytest.raises(ValueError, match="A port is a number"):
        StatusPage(-1)
    with pytest.raises(ValueError, match="A port is a number up to 65535"):
        StatusPage(70000)
