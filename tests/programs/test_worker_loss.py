"""Workers that die, hang or come back: what was lost is said, and training goes on from its checkpoint."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import inside
import keras
import networks
import numpy as np
import pytest
import tensorflow as tf
from transfer_models import noisy

from pipetrain.cluster import health, sockets
from pipetrain.cluster.health import NOTICED_S, HealthMonitor, WorkerLost
from pipetrain.cluster.sockets import remote_addresses, sever
from pipetrain.compute.keras_private import global_seed, with_state_of_keras
from pipetrain.run import control
from pipetrain.run.control import LOST_S, LostWorker
from pipetrain.run.stage_work import StageWork

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).parents[1] / "worker_loss.py"
LATE_CALLS = [("evaluate", "vanilla")]
KINDS = ("vanilla", "all-reduce", "parameter-server", "asynchronous", "grid", "coded-reduce")
LATE_CALLS += [("fit", each) for each in KINDS]
RUN_S = 900  # no run here takes nearly so long, not on a busy machine either; one that hangs is ended


@pytest.fixture
def impatient(monkeypatch):
    """Questions come fast, and answers have to."""
    for module in (sockets, health):
        monkeypatch.setattr(module, "ASK_S", 0.05)
        monkeypatch.setattr(module, "ANSWER_S", 0.1)


@pytest.fixture
def hanging(monkeypatch):
    """The address of something that takes connections and says nothing, in the place of the only worker."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setattr(health, "worker_of", lambda device: address)
        yield address


def test_missing_workers_are_named_with_the_reason(impatient, hanging):
    with socket.create_server(("127.0.0.1", 0)) as once:
        closed = f"127.0.0.1:{once.getsockname()[1]}"
    assert sockets.missing([closed, hanging]) == {closed: "connection refused", hanging: "no answer"}
    assert sockets.missing([]) == {}
    assert sockets.missing(["no..host:1"]) == {"no..host:1": sockets.NO_HOST}


def test_a_call_that_waits_for_a_hanging_worker_is_set_free(impatient, hanging):
    host, port = hanging.split(":")
    with (
        pytest.raises(WorkerLost, match=rf"{hanging}, stages 0, 2: no answer.*PipelineCheckpoint") as caught,
        HealthMonitor({"/job:worker/replica:0/task:0/device:CPU:0": [2, 0]}),
        socket.socket() as call,
    ):
        call.settimeout(280)
        call.connect((host, int(port)))
        assert call.recv(1) == b""  # the other side's end, as far as this one can tell
        raise tf.errors.UnavailableError(None, None, "Socket closed")
    assert caught.value.workers == (hanging,)
    assert isinstance(caught.value.__cause__, tf.errors.UnavailableError)


def test_other_connections_stay_open(hanging):
    with socket.create_server(("127.0.0.1", 0)) as other, socket.create_connection(other.getsockname()) as call:
        accepted, _ = other.accept()
        there = f"127.0.0.1:{other.getsockname()[1]}"
        assert there in remote_addresses(1) and there not in remote_addresses(call.getsockname()[1])
        sever([hanging])
        accepted.sendall(b"x")
        assert call.recv(1) == b"x"
        accepted.close()


FORGOTTEN = (  # what TensorFlow says of the worker of task 1, which names itself task 0 before it joins anybody
    "Unable to find a context_id matching the specified one. From /job:worker/replica:0/task:1",
    'RecvTensor expects a different device incarnation: 1 vs. 2. Your worker job ("/job:worker/replica:0/task:0") was '
    "probably restarted.\nAdditional GRPC error information from remote target /job:worker/replica:0/task:1 while "
    "calling /tensorflow.WorkerService/RecvTensor:",
)


@pytest.mark.parametrize("says", FORGOTTEN, ids=["context", "incarnation"])
def test_a_worker_that_was_started_anew_is_lost_too(impatient, monkeypatch, says):
    """It answers, but knows nothing of what it was given."""
    addresses = {f"/job:worker/replica:0/task:{n}/device:CPU:0": f"127.0.0.1:{n + 1}" for n in range(2)}
    monkeypatch.setattr(health, "worker_of", addresses.get)
    for module in (health, sockets):
        monkeypatch.setattr(module, "probed", lambda address, timeout_s: "")
    stages = {device: [n] for n, device in enumerate(addresses)}
    anew = r"No longer joined to a worker: 127\.0\.0\.1:2, stage 1: it answers, .* anew .*Try pipetrain\.connect"
    with pytest.raises(WorkerLost, match=anew), HealthMonitor(stages):
        raise tf.errors.AbortedError(None, None, says)
    broke = (
        r"No longer joined to workers: .*:1, stage 0: it answers, but its connection broke; .*Try pipetrain\.connect"
    )
    with pytest.raises(WorkerLost, match=broke), HealthMonitor(stages):
        raise tf.errors.UnavailableError(None, None, "Socket closed")
    with pytest.raises(tf.errors.InvalidArgumentError, match="of another kind"), HealthMonitor(stages):
        raise tf.errors.InvalidArgumentError(None, None, "of another kind")


def lost(number: int, *arguments: str) -> dict:
    """What a process says that lost a worker by this signal."""
    done = subprocess.run(
        [sys.executable, SCRIPT, str(number), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.wide
def test_fit_says_which_worker_was_killed():
    found = lost(signal.SIGKILL)
    assert found["workers"] == [1]
    assert re.search(r"127\.0\.0\.1:\d+, stage 1: connection refused\. .*goes on from the newest", found["message"])
    assert 1 <= found["refusals"] <= 2 * sockets.MISSED  # those of the watch, and when the call had failed
    assert found["threads"] == [] and found["kept"]


@pytest.mark.wide
@pytest.mark.parametrize("idle_s", [0, 8])
def test_a_worker_that_is_lost_while_orders_are_tried_is_said(idle_s):
    """What the optimizer gathered on it is not put back, which TensorFlow would let wait without end."""
    found = lost(signal.SIGKILL, "trial", "all-reduce", str(idle_s))
    assert found["workers"] == [0] and found["kept"]
    assert {*found["threads"]} <= {"pipetrain call to workers"}  # one that was under way waits for the lost worker


@pytest.mark.wide
def test_a_worker_that_is_lost_before_a_way_is_chosen_is_said():
    assert lost(signal.SIGKILL, "choose", "auto", "8")["workers"] == [1]


@pytest.mark.slow
@pytest.mark.parametrize("idle_s", [2, 6, 9])
@pytest.mark.parametrize(("method", "scheme"), LATE_CALLS)
def test_calls_after_the_end_of_a_worker_are_not_waited_for(method, scheme, idle_s):
    """TensorFlow lets them wait until the worker is there again; only those under way fail by themselves."""
    found = lost(signal.SIGKILL, method, scheme, str(idle_s))
    assert found["workers"] == [1] and found["kept"]
    assert found["after_s"] < NOTICED_S + LOST_S + 5


@pytest.mark.wide
def test_a_thread_whose_call_does_not_return_is_left_when_a_worker_is_lost(monkeypatch):
    monkeypatch.setattr(control, "LOST_S", 2.0)  # in which the other threads end
    inside.by_threads(monkeypatch)
    waiting, back = threading.Event(), threading.Event()
    perform = StageWork.perform

    def waits(self, action, received):
        if self.identity.stage == 1 and action.microbatch == 3:
            waiting.set()
            back.wait()
        return perform(self, action, received)

    monkeypatch.setattr(StageWork, "perform", waits)
    pm = networks.pipeline(scheme="vanilla")
    error = WorkerLost("It is gone.", ["a:1"])

    def tell():
        waiting.wait()
        for _ in range(20):  # as a watch does
            inside.strategy(pm).lose(error)
            time.sleep(0.05)

    teller = threading.Thread(target=tell)
    teller.start()
    try:
        with pytest.raises(WorkerLost, match=r"It is gone\.") as caught:
            networks.fit(pm, *networks.data(100))
        assert caught.value is error
        (left,) = [each for each in threading.enumerate() if each.name.startswith("pipetrain")]
    finally:
        back.set()
        teller.join()
    left.join(10)
    assert not left.is_alive()


def test_a_call_to_workers_is_left_if_one_is_lost(monkeypatch):
    monkeypatch.setattr(control, "LOST_S", 0.3)
    lost, back = LostWorker(["/job:worker/replica:0/task:0/device:CPU:0"]), threading.Event()
    assert lost.unless_lost(lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        lost.unless_lost(lambda: 1 / 0)
    threading.Timer(0.5, lambda: lost.told(WorkerLost("It is gone.", ["a:1"]))).start()
    with pytest.raises(WorkerLost, match=r"It is gone\."):
        lost.unless_lost(back.wait)
    (left,) = [each for each in threading.enumerate() if each.name.startswith("pipetrain")]
    back.set()
    left.join(10)
    with pytest.raises(WorkerLost):  # and no other one is made
        lost.unless_lost(lambda: 3)


@pytest.mark.wide
@pytest.mark.parametrize("scheme", ["vanilla", "all-reduce"])
def test_a_loss_after_all_steps_is_of_no_concern_to_the_next_fit(scheme):
    pm, data = networks.pipeline(scheme=scheme, cuts=None, devices=("CPU:0", "CPU:1")), networks.data(40)
    networks.fit(pm, *data)
    before = pm.get_weights()
    inside.strategy(pm).lose(WorkerLost("It is gone.", ["a:1"]))
    networks.fit(pm, *data, epochs=1)
    assert any((mine != old).any() for mine, old in zip(pm.get_weights(), before, strict=True))


@pytest.mark.wide
@pytest.mark.parametrize("settings", [{"scheme": "1f1b", "stages": 2, "microbatches": 1}, {"scheme": "all-reduce"}])
def test_calls_of_another_thread_draw_what_this_one_would(monkeypatch, settings):
    """Keras keeps its global seed for each thread."""

    def trained() -> list[np.ndarray]:
        pm = networks.in_way(noisy(), **settings)
        pm.compile(keras.optimizers.SGD(0.05), networks.crossentropy())
        networks.fit(pm, *networks.data(40), epochs=2)
        return [*pm.get_weights(), np.array(global_seed())]

    expected = trained()
    monkeypatch.setattr("pipetrain.run.control.is_remote", lambda device: True)
    networks.assert_equal(trained(), expected)


def test_variables_that_another_thread_makes_in_a_scope_get_values_once():
    """Layers make seeds in their first call; this thread's list of what has no value yet is not that thread's."""
    make = keras.initializers.Zeros()
    made = []
    with keras.StatelessScope():  # this thread has a list from now on
        keras.Variable(make, shape=(2,))

    def call() -> None:
        with keras.StatelessScope():
            made.append(keras.Variable(make, shape=(2,)))

    thread = threading.Thread(target=with_state_of_keras(call))
    thread.start()
    thread.join()
    with keras.StatelessScope():
        made.append(keras.Variable(make, shape=(2,)))
    assert [each.value.shape for each in made] == [(2,), (2,)]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("scheme", ["all-reduce", "parameter-server", "asynchronous", "grid"])
def test_a_step_over_all_workers_ends_when_one_is_lost(number, scheme):
    found = lost(number, "fit", scheme)
    assert found["workers"] == [1] and found["threads"] == [] and found["kept"]
    assert found["after_s"] < NOTICED_S + 10


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fit", "evaluate", "explain", "train_on_batch"])
def test_a_call_says_which_worker_hangs(method):
    found = lost(signal.SIGSTOP, method)
    assert found["workers"] == [1]
    assert "stage 1: no answer" in found["message"]
    assert found["after_s"] < NOTICED_S + 5
    assert found["threads"] == [] and found["kept"]


class Run:
    """``run.py`` with workers on this machine, from outside."""

    def __init__(self, output: Path, workers: int, *options: object, scheme: str = "spectrain") -> None:
        self.output, self.scheme, self.said = output, scheme, ""
        what = ["--scheme", scheme, "--stages", workers, "--depth", 4, "--width", 32, "--batch-size", 16]
        what += ["--local-workers", workers, "--checkpoint-every", 50, "--eval-every", 1000, "--output", output]
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT / "experiments" / "run.py"), *map(str, [*what, *options])],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        self._limit = threading.Timer(RUN_S, self.process.kill)
        self._limit.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self.said += line

    def step(self) -> int:
        """That of the newest checkpoint."""
        return max((int(path.stem[5:]) for path in self.output.glob("*/checkpoints/step-*.npz")), default=0)

    def children(self, kind: str) -> list[int]:
        """Processes of that kind that the run has started."""
        path = Path(f"/proc/{self.process.pid}/task")
        listed = " ".join(each.read_text() for each in path.glob("*/children"))
        arguments = {pid: Path(f"/proc/{pid}/cmdline").read_text().split("\0") for pid in map(int, listed.split())}
        return [pid for pid, each in arguments.items() if kind in each]

    def kill_one(self, chance: random.Random, kind: str = "worker", number: int = signal.SIGKILL) -> int:
        """Some time after the next checkpoint, one process; the step of the newest checkpoint just before."""
        before = self.step()
        while self.step() == before:
            assert self.process.poll() is None, f"The run ended before its time: {self.said}"
            time.sleep(0.02)
        time.sleep(chance.uniform(0, 1.5))
        newest = self.step()
        os.kill(chance.choice(self.children(kind)), number)
        return newest

    def wait_for_losses(self, count: int) -> None:
        """Until the run has said so often that something was lost."""
        while len(self.went_on_at()) < count:
            assert self.process.poll() is None, f"The run ended before its time: {self.said}"
            time.sleep(0.05)

    def went_on_at(self) -> list[int]:
        """The steps that it went on from, as it says."""
        return [int(step) for step in re.findall(r"^Lost .*going on from step (\d+)", self.said, re.M)]

    def end(self) -> str:
        """Wait for its end; what it said."""
        status = self.process.wait()
        self._reader.join()
        assert status == 0, self.said
        return self.said

    def close(self) -> None:
        """End it, if it has not ended, and what reads from it; its processes end with it."""
        self.process.kill()
        self.process.wait()
        self._limit.cancel()
        self._reader.join()

    def weights(self) -> list[np.ndarray]:
        """Those at its end."""
        return keras.models.load_model(self.output / self.scheme / "model.keras").get_weights()


@pytest.fixture
def start():
    """Starts runs, which end with the test however it ends."""
    runs: list[Run] = []

    def started(*arguments: Any, **settings: Any) -> Run:
        runs.append(Run(*arguments, **settings))
        return runs[-1]

    yield started
    for run in runs:
        run.close()


@pytest.mark.slow
@pytest.mark.timeout(2 * RUN_S)
@pytest.mark.parametrize(
    ("scheme", "kills", "steps", "seed"),
    [
        ("spectrain", 10, 4500, 0),
        *(("all-reduce", 2, 1500, seed) for seed in range(5)),
        *(("parameter-server", 2, 1500, seed) for seed in range(5)),
    ],
)
def test_ten_kills_with_wait_leave_the_weights_of_a_run_without(start, tmp_path, scheme, kills, steps, seed):
    chance = random.Random(seed)
    options = ["--steps", steps, *(["--servers", 1 + seed % 2] if scheme == "parameter-server" else [])]
    whole = start(tmp_path / "whole", 2, *options, scheme=scheme)
    whole.end()
    run = start(tmp_path / "killed", 2, *options, "--wait", 60, scheme=scheme)
    newest = []
    for count in range(kills):
        newest.append(run.kill_one(chance))
        run.wait_for_losses(count + 1)
    said = run.end()
    at = run.went_on_at()
    assert len(at) == kills
    assert all(went >= kept for went, kept in zip(at, newest, strict=True)), said
    for mine, other in zip(run.weights(), whole.weights(), strict=True):
        np.testing.assert_array_equal(mine, other)


@pytest.mark.slow
@pytest.mark.timeout(2 * RUN_S)
def test_ten_kills_with_elastic_are_survived(start, tmp_path):
    chance = random.Random(1)
    for trial in range(5):
        run = start(tmp_path / str(trial), 3, "--steps", 1500, "--elastic")
        newest = []
        for count in range(2):
            newest.append(run.kill_one(chance))
            run.wait_for_losses(count + 1)
        said = run.end()
        assert all(went >= kept for went, kept in zip(run.went_on_at(), newest, strict=True)), said
        assert "with 2 stages on 2 workers that are left" in said
        assert "with 1 stage on 1 worker that is left" in said
        assert json.loads((run.output / "spectrain" / "summary.json").read_text())["steps"] == 1500
        assert all(np.isfinite(each).all() for each in run.weights())


@pytest.mark.slow
@pytest.mark.timeout(2 * RUN_S)
def test_a_run_goes_on_without_its_stopped_worker_and_after_its_controller_was_killed(start, tmp_path):
    chance = random.Random(2)
    run = start(tmp_path / "run", 2, "--steps", 1500, "--wait", 60)
    run.kill_one(chance, number=signal.SIGSTOP)
    run.wait_for_losses(1)
    newest = run.kill_one(chance, kind="--supervised")
    said = run.end()
    assert "(no answer): started anew" in said
    died = re.search(r"The training process died: going on from step (\d+)", said)
    assert died and int(died[1]) >= newest
    whole = start(tmp_path / "whole", 2, "--steps", 1500)
    whole.end()
    for mine, other in zip(run.weights(), whole.weights(), strict=True):
        np.testing.assert_array_equal(mine, other)


def runs(pid: int) -> bool:
    """Whether there is such a process; one that only waits to be counted as ended does not run."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.timeout(2 * RUN_S)
def test_workers_end_with_a_supervisor_that_is_killed(start, tmp_path):
    run = start(tmp_path / "run", 2, "--steps", 100000, "--wait", 60)
    while not run.step():
        assert run.process.poll() is None, run.said
        time.sleep(0.05)
    left = [*run.children("worker"), *run.children("--supervised")]
    assert len(left) == 3
    run.process.kill()
    until_s = time.monotonic() + 120
    while any(map(runs, left)):
        assert time.monotonic() < until_s, "processes are left"
        time.sleep(0.2)


def test_only_workers_can_be_lost(capsys):
    from experiments.run import main

    assert main(["--wait", "5"]) == 2
    assert "Try --cluster or --local-workers" in capsys.readouterr().err
    assert main(["--elastic", "--local-workers", "2", "--checkpoint-every", "0"]) == 2
    assert "Training goes on from checkpoints" in capsys.readouterr().err


@pytest.fixture
def supervised(monkeypatch, tmp_path):
    """A supervision of two workers whose training process has just lost one, which ``missing`` is asked about."""
    import argparse

    from experiments.supervision import SupervisedRun
    from pipetrain.cluster import supervision

    (tmp_path / "hosts.json").write_text('{"workers": ["a:1", "b:1"]}')
    options = argparse.Namespace(cluster=str(tmp_path / "hosts.json"), wait=60.0, elastic=False, resume=None)
    run = SupervisedRun(options, [], tmp_path)
    monkeypatch.setattr(SupervisedRun, "_train", lambda self: supervision.LOST)
    monkeypatch.setattr(supervision, "ASK_S", 0.01)
    monkeypatch.setattr(supervision, "missing", lambda addresses: {"b:1": "no answer"})
    return run


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_between_two_training_processes_is_heard(supervised, number, monkeypatch, capsys):
    """While workers were started anew it was not, and while one was waited for nothing was said."""
    monkeypatch.setattr(supervised, "_awaited", lambda what, lost: os.kill(os.getpid(), number) or {})
    assert supervised.run() == 128 + number
    assert "Stopped. To go on: python experiments/run.py --resume" in capsys.readouterr().out


def test_the_newest_checkpoint_is_not_the_last_by_name(supervised, tmp_path):
    """A scheme that went on from another one's has that one's beside its own."""
    for n, name in enumerate(("vanilla/checkpoints/step-00000900.npz", "spectrain/checkpoints/step-00001000.npz")):
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.touch()
        os.utime(path, (n, n))
    assert supervised._going_on() == "going on from step 1000"
