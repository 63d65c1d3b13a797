"""Stages on real worker processes of this machine. Controllers are processes too: each joins one cluster."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parents[1]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(HERE.parent), "TF_CPP_MIN_LOG_LEVEL": "3"}
SCHEMES = (
    "vanilla",
    "weight-stashing",
    "vertical-sync",
    "spectrain",
    "spectrain/local",
    "spectrain/fitted",
    "spike-compensation",
    "2bw",
    "gpipe",
    "1f1b",
    "single",
    "vanilla/recompute",
    "gpipe/norm",
    "spectrain/resumed",
    "gpipe/resumed",
    "all-reduce",
    "all-reduce/late",
    "all-reduce/caramel",
    "all-reduce/resumed",
    "all-reduce/ring",
    "all-reduce/gossip",
    "all-reduce/stale:1",
    "parameter-server",
    "parameter-server/tac",
    "parameter-server/ibatch",
    "parameter-server/push-pull",
    "parameter-server/one-server",
    "parameter-server/resumed",
    "parameter-server/stale:1",
    "parameter-server/asynchronous:0",
    "coded-reduce",
    "coded-reduce/resumed",
    "grid",
    "grid/rows",
    "grid/resumed",
)


def trained(workers, *cases):
    """What ``worker_training.py`` found, by case."""
    command = [sys.executable, str(HERE / "worker_training.py"), str(workers), *cases]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=ENVIRONMENT)
    found = {each["case"]: each for each in map(json.loads, done.stdout.splitlines())}
    assert found.keys() == set(cases), done.stderr[-3000:]
    return found


def assert_as_in_one_process(found):
    """Weights after two epochs, and what fit, evaluate and predict said."""
    assert {case: each for case, each in found.items() if each["weights"] > 1e-6 or each["said"] > 1e-5} == {}


@pytest.fixture(scope="module")
def two_workers():
    """One process that joins two workers and trains on them."""
    cases = "spectrain", "gpipe/norm", "all-reduce/late", "spectrain/in-flight", "parameter-server/replayed"
    return trained(2, "join", *cases)


@pytest.mark.wide
def test_two_workers_train_as_one_process_does(two_workers):
    assert_as_in_one_process({case: two_workers[case] for case in ("spectrain", "gpipe/norm", "all-reduce/late")})


@pytest.mark.wide
def test_what_is_in_flight_on_workers_is_in_checkpoints(two_workers):
    """Stopped and resumed, training ends bitwise as without checkpoints."""
    assert two_workers["spectrain/in-flight"]["different"] == 0


@pytest.mark.wide
def test_what_workers_did_at_their_own_pace_is_replayed_bitwise(two_workers):
    assert two_workers["parameter-server/replayed"]["different"] == 0


@pytest.mark.wide
def test_local_workers_are_joined_measured_and_ended(two_workers):
    joined = two_workers["join"]
    names = [f"/job:worker/replica:0/task:{task}/device:CPU:0" for task in range(2)]
    assert joined["devices"] == joined["again"] == joined["available"] == names
    first, second = map(set, joined["cores"])
    if len(os.sched_getaffinity(0)) > 1:
        assert not first & second and joined["processors"] == 2
    assert 0 < joined["bandwidth"] < 1e12 and joined["latency_s"] > 0
    assert "joined another cluster already" in joined["other"]
    assert joined["statuses"] == [0, 0]


@pytest.mark.wide
def test_predictions_on_workers_are_always_of_the_newest_weights():
    """Of trained and frozen ones, of statistics, and on a worker that was started anew."""
    command = [sys.executable, str(HERE / "worker_evaluations.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["lost"] and found["right"] == found["asked"], found


@pytest.mark.wide
@pytest.mark.parametrize("scheme", ["all-reduce", "parameter-server", "1f1b", "spectrain", "grid"])
def test_workers_are_sent_what_has_changed_and_nothing_else(scheme):
    """Weights, state and slots that callbacks assign arrive bitwise; what they leave as it is stays where it is."""
    command = [sys.executable, str(HERE / "worker_copies.py"), scheme]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "retracing" not in done.stderr
    asked, always = (json.loads(done.stdout.splitlines()[-1])[each] for each in ("asked", "sent"))
    assert asked["digests"] == always["digests"]
    assert len({*asked["digests"]}) == len(asked["digests"])
    usual, _ = asked["sent"]["nothing"]  # statistics that differ among workers, and what is too small to be asked for
    whole, _ = always["sent"]["nothing"]
    assert usual < whole / 2
    for change, (after, later) in asked["sent"].items():
        assert later == usual, change
        assert usual <= after < whole, change
    assert asked["sent"]["the same values"][0] == usual < asked["sent"]["a frozen weight"][0]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 3])
def test_every_scheme_on_workers_trains_as_in_one_process(workers):
    assert_as_in_one_process(trained(workers, *SCHEMES))


@pytest.mark.slow
def test_replicas_on_workers_train_as_in_one_process():
    assert_as_in_one_process(trained(3, "vanilla/replicas", "gpipe/replicas", "gpipe/replicas/norm"))
