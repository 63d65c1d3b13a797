"""The newest state of a run in the memory of hosts, of which one or two are lost."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import time

import inside
import networks
import numpy as np
import parameters
import pytest
import sharded
import tensorflow as tf
from checkpointed import Stop, arrays, pipeline, run

from pipetrain.callbacks import PipelineCheckpoint
from pipetrain.checkpoint import replication, writer
from pipetrain.checkpoint.replication import Host, Replication
from pipetrain.checkpoint.store import Store
from pipetrain.cluster import host_memory

L = "/job:localhost/replica:0/task:0/device:CPU:"


@pytest.fixture
def hosts(monkeypatch, tmp_path):
    """Two hosts, each with a CPU of this process and a folder; the program's own is a third one."""
    sharded.stand_in(monkeypatch.setattr)
    monkeypatch.setattr(host_memory, "MEMORY", tmp_path)
    folders = [tmp_path / "host-1", tmp_path / "host-2"]
    for each in folders:
        each.mkdir()
    monkeypatch.setattr(
        replication, "_hosts", lambda: [Host([f"{L}{n}"], str(each)) for n, each in enumerate(folders, 1)]
    )
    return folders


def fit(directory, stop_after=None, every_steps=100, scheme="spectrain", epochs=3, callbacks=(), **settings):
    """The model, and the callback; at the end of the run, or where it was stopped."""
    pm = pipeline(scheme=scheme)
    saving = PipelineCheckpoint(directory, every_steps=every_steps, **{"replicate": "memory", **settings})
    more = [Stop(stop_after)] if stop_after else []
    with contextlib.suppress(InterruptedError):
        pm.fit(**arrays(), epochs=epochs, verbose=0, callbacks=[*callbacks, saving, *more])
    return pm, saving


def clear(folder):
    """The host is lost, and there again."""
    shutil.rmtree(folder)
    folder.mkdir()


@pytest.mark.parametrize(
    ("scheme", "stop_after"), [("spectrain", 17), *parameters.widely(("1f1b", 2), ("spectrain", 2), ("1f1b", 17))]
)
def test_what_a_lost_host_held_comes_from_its_neighbour(scheme, stop_after, hosts, tmp_path):
    whole, _ = run(None, every_steps=None, scheme=scheme)
    fit(tmp_path / "checkpoints", stop_after, scheme=scheme)
    clear(hosts[stop_after % 2])
    pm, saving = fit(tmp_path / "checkpoints", scheme=scheme)
    repeated = stop_after - (saving.resumed_at or 0)
    assert 0 <= repeated <= (1 if scheme == "1f1b" else 16), repeated
    if scheme == "1f1b" and stop_after > 1:
        assert saving.resumed_at
    networks.assert_equal(pm.get_weights(), whole.get_weights())


@pytest.mark.wide
def test_the_host_that_is_left_has_what_is_needed(hosts, tmp_path, monkeypatch):
    """Though it can no longer be replicated itself."""
    whole, _ = run(None, every_steps=None, scheme="1f1b")
    fit(tmp_path / "checkpoints", 9, scheme="1f1b")
    clear(hosts[0])
    left = [Host([f"{L}2"], str(hosts[1]))]
    monkeypatch.setattr(replication, "_hosts", lambda: left)
    pm, saving = fit(tmp_path / "checkpoints", scheme="1f1b")
    assert saving.resumed_at >= 7
    networks.assert_equal(pm.get_weights(), whole.get_weights())
    assert not [*host_memory.folder().iterdir()]


def test_the_way_of_a_run_is_known_from_memory(hosts, tmp_path):
    fit(tmp_path / "checkpoints", 3, scheme="1f1b")
    about = {"way": {"scheme": "gpipe"}, "step": 9}
    (folder,) = host_memory.folder().iterdir()
    Store(folder, 2).write(9, {}, about)
    saving = PipelineCheckpoint(tmp_path / "checkpoints", replicate="memory")
    assert saving.way_of_run() == {"scheme": "gpipe"}
    assert PipelineCheckpoint(tmp_path / "checkpoints").way_of_run() is None


@pytest.mark.wide
def test_both_hosts_lost(hosts, tmp_path):
    """The run goes on from the disk."""
    whole, _ = run(None, every_steps=None, scheme="spectrain")
    fit(tmp_path / "checkpoints", 17, every_steps=5)
    for each in hosts:
        clear(each)
    pm, saving = fit(tmp_path / "checkpoints", every_steps=5)
    assert saving.resumed_at == 15
    networks.assert_equal(pm.get_weights(), whole.get_weights())


@pytest.mark.wide
def test_lost_again_and_again(hosts, tmp_path):
    whole, _ = run(None, every_steps=None, scheme="1f1b")
    at = []
    for trial in range(5):
        pm, saving = fit(tmp_path / "checkpoints", 3, scheme="1f1b")
        at.append(saving.resumed_at or 0)
        clear(hosts[trial % 2])
    assert at == sorted(set(at)) and at[-1] >= 8
    pm, _ = fit(tmp_path / "checkpoints", scheme="1f1b")
    networks.assert_equal(pm.get_weights(), whole.get_weights())


@pytest.mark.wide
def test_only_what_is_complete_is_used(hosts, tmp_path):
    """A state of which a shard is spoilt, as one that was being written, is left for the one before it."""
    whole, _ = run(None, every_steps=None, scheme="1f1b")
    fit(tmp_path / "checkpoints", 9, scheme="1f1b")
    (folder,) = host_memory.folder().iterdir()
    with np.load(max(folder.glob("step-*.npz"))) as archive:
        about = json.loads(archive["about"].tobytes())
    assert about["step"] >= 7
    name = about["replicas"][0]["name"]
    for host in hosts:
        for path in host.glob(f"*/{name}-*.data*"):
            path.write_bytes(path.read_bytes()[:-1])
    pm, saving = fit(tmp_path / "checkpoints", scheme="1f1b")
    assert saving.resumed_at == about["step"] - 1
    networks.assert_equal(pm.get_weights(), whole.get_weights())


def test_the_end_leaves_nothing_in_memory(hosts, tmp_path):
    fit(tmp_path / "checkpoints", epochs=1)
    assert not [*host_memory.folder().iterdir()]
    assert not (tmp_path / "checkpoints" / replication.NOTE).exists()
    for each in hosts:
        (of_run,) = each.iterdir()
        assert (of_run / host_memory.ENDED).exists()
    assert Store(tmp_path / "checkpoints", 3).newest()[0].about["step"] == 10


@pytest.mark.wide
def test_a_user_who_removes_checkpoints_begins_anew(hosts, tmp_path):
    """Or goes on from an earlier one: what is in memory is then of no use."""
    fit(tmp_path / "checkpoints", 17, every_steps=5)
    copy = shutil.copytree(tmp_path / "checkpoints", tmp_path / "copy")
    (tmp_path / "checkpoints" / "step-00000015.npz").unlink()
    _, saving = fit(tmp_path / "checkpoints", 3, every_steps=5)
    assert saving.resumed_at == 10
    _, saving = fit(copy, 3, every_steps=5)
    assert saving.resumed_at == 15  # not what the run in the other directory has in memory
    for path in copy.iterdir():
        path.unlink()
    _, saving = fit(copy, 3)
    assert saving.resumed_at is None


def test_a_run_that_goes_on_from_memory_at_its_end_writes_its_last_checkpoint(hosts, tmp_path):
    fit(tmp_path / "checkpoints", 30, scheme="1f1b")
    _, saving = fit(tmp_path / "checkpoints", scheme="1f1b")
    assert saving.resumed_at >= 28
    assert Store(tmp_path / "checkpoints", 3).newest()[0].about["step"] == 30
    assert not [*host_memory.folder().iterdir()]


@pytest.mark.parametrize(("replicate", "at"), [("memory", [*range(1, 9)]), ("memory:4", [1, 5]), ("memory:auto", [1])])
def test_states_are_as_far_apart_as_is_said(replicate, at, hosts, tmp_path, monkeypatch):
    """A call of 1f1b is one minibatch. By its cost, of which no time may be taken, the second state never comes."""
    steps, taken = [], Replication.taken
    monkeypatch.setattr(writer, "FIRST_S", 0.0)
    monkeypatch.setattr(replication, "SHARE", 1e-9)
    monkeypatch.setattr(Replication, "taken", lambda self, step, *more: (steps.append(step), taken(self, step, *more)))
    fit(tmp_path / "checkpoints", 9, scheme="1f1b", replicate=replicate)
    assert steps == at


def test_a_full_memory_is_told_once_and_trained_on(hosts, tmp_path, monkeypatch):
    def full(self, parts):
        raise tf.errors.ResourceExhaustedError(None, None, "No space left on device")

    monkeypatch.setattr(replication.ShardWriter, "write", full)
    with pytest.warns(UserWarning, match=r"The state of step 1 is not in the memory of hosts \(No space") as told:
        fit(tmp_path / "checkpoints", epochs=1, scheme="1f1b")
    assert len([each for each in told if "memory of hosts" in str(each.message)]) == 1


def test_where_it_cannot_be_it_is_refused(tmp_path):
    for given in ("disk", "memory:0", "memory:", "memory:often", True):
        with pytest.raises(
            ValueError, match=rf"Received: replicate={given!r}\. Try 'memory', 'memory:8'.*'memory:auto'"
        ):
            PipelineCheckpoint(tmp_path, replicate=given)
    with pytest.raises(ValueError, match=r"replicate='memory', one process, without workers\. Try replicate=None"):
        fit(tmp_path)


@pytest.mark.parametrize(
    ("known", "says"),
    [
        ([{"host": "a", "memory": "/m"}] * 2, "2 workers on one machine"),
        ([{"host": "a", "memory": "/m"}, {"host": "b"}], "b:1 without it"),
    ],
)
def test_workers_that_cannot_serve_are_named(known, says, monkeypatch, tmp_path):
    monkeypatch.setattr(replication, "remote_devices", lambda: [f"/job:worker/task:{n}/device:CPU:0" for n in range(2)])
    monkeypatch.setattr(replication, "about", lambda task: known[task])
    monkeypatch.setattr(replication, "worker_of", lambda device: "b:1")
    with pytest.raises(ValueError, match=rf"Received: replicate='memory', .*{says}.*Try .*replicate=None"):
        Replication(Store(tmp_path, 3))


def test_neighbours(monkeypatch):
    """Every host has another one's state, which is that of each of its workers."""
    known = [{"host": host, "memory": f"/{host}"} for host in "abacb"]
    monkeypatch.setattr(replication, "remote_devices", lambda: [f"/job:worker/task:{n}/device:GPU:0" for n in range(5)])
    monkeypatch.setattr(replication, "about", lambda task: known[task])
    found = replication._hosts()
    assert [host.memory for host in found] == ["/a", "/b", "/c"]
    made = Replication.__new__(Replication)
    made._hosts = found
    homes = {device: made._homes(device) for host in found for device in host.devices}
    for device, ((own, by), (other, at)) in homes.items():
        assert by == device and device in own.devices and at in other.devices and own is not other
    assert {own.memory: other.memory for (own, _), (other, _) in homes.values()} == {"/a": "/b", "/b": "/c", "/c": "/a"}


def test_a_folder_is_private(monkeypatch, tmp_path):
    monkeypatch.setattr(host_memory, "MEMORY", tmp_path)
    own = host_memory.folder()
    assert stat.S_IMODE(own.stat().st_mode) == 0o700
    own.chmod(0o755)
    assert host_memory.folder() is None
    own.rmdir()
    own.symlink_to(tmp_path)
    assert host_memory.folder() is None
    monkeypatch.setattr(host_memory, "MEMORY", tmp_path / "none")
    assert host_memory.folder() is None


def test_sweeping(monkeypatch, tmp_path):
    monkeypatch.setattr(host_memory, "MEMORY", tmp_path)
    own = host_memory.folder()
    for name in ("lives", "ended", "stale"):
        (own / name).mkdir()
        (own / name / "0-0of1-own.index.tempstate1").touch()
    (own / "ended" / host_memory.ENDED).touch()
    long_ago_s = time.time() - 2 * host_memory.STALE_S
    os.utime(own / "lives" / "0-0of1-own.index.tempstate1", (long_ago_s, long_ago_s))
    (own / "lives" / "1-0of1-own.index.tempstate2").touch()
    os.utime(own / "stale", (long_ago_s, long_ago_s))
    host_memory.sweep()
    assert [each.name for each in own.iterdir()] == ["lives"]
    assert [each.name for each in (own / "lives").iterdir()] == ["1-0of1-own.index.tempstate2"]


def test_pipelines_run_by_threads_are_refused(hosts, tmp_path, monkeypatch):
    inside.by_threads(monkeypatch)
    with pytest.raises(ValueError, match=r"threads alone know what.*replicate='memory', scheme='spectrain'"):
        fit(tmp_path / "checkpoints")
