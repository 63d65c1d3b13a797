"""Checkpoints of which every worker writes its own part."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys

import killed_training
import networks
import numpy as np
import pytest
import sharded
import tensorflow as tf
from checkpointed import arrays, pipeline, run

from pipetrain.callbacks import PipelineCheckpoint
from pipetrain.checkpoint import bundles
from pipetrain.checkpoint import bundles as bundles_module
from pipetrain.checkpoint import shards as shards_module
from pipetrain.checkpoint.bundles import Sharding
from pipetrain.checkpoint.shards import INDEX, shards_of
from pipetrain.checkpoint.state import as_arrays
from pipetrain.checkpoint.store import Store

DEVICES = ("CPU:0", "CPU:1", "CPU:2")


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    """CPUs in the place of workers."""
    sharded.stand_in(monkeypatch.setattr)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def values(seed=0):
    """Of a controller and of two workers, of all kinds."""
    draw = np.random.default_rng(seed)
    found = {"weight/0": draw.normal(size=3), "beside/0": np.arange(2)}
    for n, device in enumerate(DEVICES[1:], 1):
        with tf.device(device):
            found[f"weight/{n}"] = tf.constant(draw.normal(size=(5, 70)), tf.float32)
            found[f"slot/{n}/momentum"] = tf.constant(draw.normal(size=(4,)), tf.bfloat16)
            found[f"flight/{n}"] = tf.constant(["some", "words"])
            found[f"state/{n}"] = tf.constant([[True, False]])
            found[f"state/{n}/none"] = tf.zeros((0, 3), tf.int64)
    return found


def written(store, step, seed=0, **about):
    """A checkpoint with shards, and its arrays as a controller alone would have written them."""
    given = values(seed)
    made = Sharding(store.directory).write(step, given)
    store.write(step, as_arrays(made.left), about, made.shards)
    return as_arrays(given)


def assert_arrays(found, wanted):
    assert found.keys() == wanted.keys()
    for name, each in wanted.items():
        np.testing.assert_array_equal(found[name], each, strict=True)


def files_of(folder, step):
    return sorted(folder.glob(f"step-{step:08}*"))


def shards_in(folder, step):
    return sorted(folder.glob(f"step-{step:08}-*"))


@pytest.fixture
def two(tmp_path):
    """A directory with two checkpoints, and what they hold."""
    store = Store(tmp_path / "checkpoints", 3)
    return store.directory, written(store, 4, seed=1), written(store, 8, seed=2)


def test_what_workers_write_is_what_one_process_would(two):
    folder, _, wanted = two
    assert len(files_of(folder, 8)) == 5  # of two shards, each with an index
    found, damaged = Store(folder, 3).newest()
    assert found.about["step"] == 8 and found.about["format"] == 3 and not damaged
    assert_arrays(found.arrays, wanted)
    with np.load(found.path) as manifest:
        assert {*manifest.files} == {"about", "weight/0", "beside/0"}


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def empty(path):
    path.write_bytes(b"")


def longer(path):
    path.write_bytes(path.read_bytes() + b"\0")


def gone(path):
    path.unlink()


@pytest.mark.parametrize("spoil", [cut, empty, longer, gone])
def test_every_file_in_turn(spoil, two, tmp_path):
    """A checkpoint one of whose files is not what was written is damaged, and the one before it is used."""
    folder, before, _ = two
    for n, path in enumerate(files_of(folder, 8)):
        copy = shutil.copytree(folder, tmp_path / str(n))
        spoil(copy / path.name)
        if path.suffix == ".npz" and spoil is longer:  # an archive may have something after it
            continue
        found, damaged = Store(copy, 3).newest()
        assert found.about["step"] == 4
        assert_arrays(found.arrays, before)
        if path.suffix != ".npz":
            (what,) = damaged
            assert re.search(rf"step-00000008\.npz is damaged \({path.name} (is missing|has)", what)
            assert (copy / "step-00000008.damaged").exists()


def test_every_bit_of_a_shard(two, tmp_path):
    """Of those that decide on something: a flipped one changes no value without a word."""
    folder, before, wanted = two
    draw = np.random.default_rng(3)
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    for path in shards_in(folder, 8):
        whole = path.read_bytes()
        for place in draw.integers(8 * len(whole), size=60):
            spoilt = bytearray(whole)
            spoilt[place // 8] ^= 1 << place % 8
            (copy / path.name).write_bytes(spoilt)
            found, damaged = Store(copy, 3).newest()
            assert_arrays(found.arrays, before if damaged else wanted)
            if damaged:
                assert path.name in damaged[0]
                (copy / "step-00000008.damaged").rename(copy / "step-00000008.npz")
            else:
                assert path.suffix != INDEX
        (copy / path.name).write_bytes(whole)


@pytest.mark.parametrize("step", [4, 8])
def test_a_shard_of_another_run_or_step_is_none(step, two, tmp_path):
    folder, before, _ = two
    other = Store(tmp_path / "other", 3)
    written(other, step, seed=5)
    for mine, theirs in zip(shards_in(folder, 8), shards_in(other.directory, step), strict=True):
        shutil.copy(theirs, mine)
    found, (what,) = Store(folder, 3).newest()
    assert_arrays(found.arrays, before)
    assert "damaged, or of another checkpoint" in what


def test_what_cannot_be_read_now_is_not_damaged(two, monkeypatch):
    folder, _, _ = two
    shard = next(each for each in shards_in(folder, 8) if each.suffix == INDEX)
    read = shards_module.Path.read_bytes

    def refused(self):
        if self == shard:
            raise PermissionError(13, "Permission denied", str(self))
        return read(self)

    monkeypatch.setattr(shards_module.Path, "read_bytes", refused)
    with pytest.raises(ValueError, match=rf"{shard.name}: Permission denied.*go on from step-00000004"):
        Store(folder, 3).newest()
    assert (folder / "step-00000008.npz").exists()


def test_too_little_memory_is_no_damage(two, monkeypatch):
    folder, _, _ = two

    def exhausted(prefix, shard):
        raise tf.errors.ResourceExhaustedError(None, None, "OOM when allocating tensor")

    monkeypatch.setattr(bundles, "restored", exhausted)
    with pytest.raises(ValueError, match=r"not enough memory.*Try more memory"):
        Store(folder, 3).newest()
    assert (folder / "step-00000008.npz").exists()


def test_a_directory_that_was_copied_elsewhere_works(two, tmp_path):
    folder, _, wanted = two
    copy = shutil.copytree(folder, tmp_path / "elsewhere [1] *" / "else")
    shutil.rmtree(folder)
    store = Store(copy, 3)
    assert_arrays(store.newest()[0].arrays, wanted)
    kept = written(store, 12)
    assert_arrays(Store(copy, 3).newest()[0].arrays, kept)


def test_shards_go_with_their_file(tmp_path):
    store = Store(tmp_path, 2)
    for step in (4, 8, 12, 16):
        written(store, step, seed=step)
    assert not files_of(tmp_path, 4) and not files_of(tmp_path, 8)
    assert len(files_of(tmp_path, 12)) == len(files_of(tmp_path, 16)) == 5
    wanted = written(store, 16, seed=1)  # again, as at the end of training
    assert len(files_of(tmp_path, 16)) == 5
    assert_arrays(Store(tmp_path, 2).newest()[0].arrays, wanted)
    again = Store(tmp_path, 1)
    again.newest()
    written(again, 20)
    assert {path[:13] for path in names(tmp_path)} == {"step-00000020"}


def test_copies_of_a_file_keep_its_shards(tmp_path):
    store = Store(tmp_path, 1)
    wanted = written(store, 4, seed=1)
    shutil.copy(tmp_path / "step-00000004.npz", tmp_path / "step-best.npz")
    written(store, 8)
    assert len(files_of(tmp_path, 4)) == 4
    Store(tmp_path, 1).sweep()
    for path in files_of(tmp_path, 8):
        path.unlink()
    assert_arrays(Store(tmp_path, 1).newest()[0].arrays, wanted)


def test_sweeping_removes_what_no_file_names(two):
    folder, _, _ = two
    before = names(folder)
    shards = Sharding(folder).write(12, values()).shards
    begun = folder / f"{shards[0].name}.data-00000-of-00001.tempstate123"
    begun.touch()
    (folder / ".probe-1234-0").touch()
    other = folder / "step-00000012-mine.txt"
    other.touch()
    Store(folder, 3).sweep()
    assert names(folder) == sorted([*before, other.name])
    (folder / "step-00000008.npz").write_bytes(b"")  # nobody knows what it names
    Store(folder, 3).sweep()
    assert names(folder) == sorted([*before, other.name])


def test_names_of_shards_lead_nowhere_else(two):
    folder, _, _ = two
    with np.load(folder / "step-00000008.npz") as archive:
        arrays = dict(archive)
    about = json.loads(arrays["about"].tobytes())
    about["shards"][0]["name"] = "../../somebody's"
    np.savez(folder / "step-00000008.npz", **arrays | {"about": np.frombuffer(json.dumps(about).encode(), np.uint8)})
    found, (what,) = Store(folder, 3).newest()
    assert found.about["step"] == 4 and "which is no shard" in what


def test_a_worker_that_does_not_see_the_directory_writes_nothing(tmp_path, monkeypatch):
    """The controller then writes what it holds, which is said once."""
    answers = bundles_module._answers
    monkeypatch.setattr(
        bundles_module, "_answers", lambda device, *given: "CPU:2" in device and answers(device, *given)
    )
    sharding = Sharding(tmp_path)
    made = sharding.write(4, values())
    assert len(made.shards) == 1 and {"weight/0", "weight/1"} <= made.left.keys()
    assert re.search(r"not one that .*CPU:1 can write to: this program writes their tensors", sharding.untold)
    sharding.untold = ""
    sharding.write(8, values())
    assert sharding.untold == ""
    assert not [*tmp_path.glob(".probe*")]


def test_a_worker_that_sees_another_directory_is_told_apart(tmp_path, monkeypatch):
    """Of the same name, on its own disk."""
    monkeypatch.setattr(tf.io, "read_file", lambda path: tf.constant("another"))
    sharding = Sharding(tmp_path)
    assert sharding.write(4, values()).shards == [] and sharding.untold
    assert names(tmp_path) == []


def test_a_shard_that_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
    sharding = Sharding(tmp_path)
    sharding.write(4, values())
    before = names(tmp_path)

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shards_module.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        sharding.write(8, values())
    assert names(tmp_path) == before


@pytest.mark.parametrize("scheme", ["spectrain", pytest.param("1f1b", marks=pytest.mark.wide)])
def test_training_goes_on_bitwise_from_shards(scheme, tmp_path):
    whole, _ = run(None, every_steps=None, scheme=scheme)
    run(tmp_path / "first", stop_after=17, scheme=scheme)
    (tmp_path / "first").rename(tmp_path / "moved")
    with np.load(max((tmp_path / "moved").glob("step-*.npz"))) as archive:
        about = json.loads(archive["about"].tobytes())
    assert len(shards_of(about)) == 2
    pm, _ = run(tmp_path / "moved", scheme=scheme)
    networks.assert_equal(pm.get_weights(), whole.get_weights())


def test_what_is_not_finite_is_not_written(tmp_path):
    pm = pipeline(scheme="1f1b")
    saving = PipelineCheckpoint(tmp_path, every_steps=2)
    given = tf.constant(np.nan)
    original = Sharding.write

    def spoilt(self, step, values):
        if step == 6:
            name = next(name for name, each in values.items() if name.startswith("weight/") and "CPU:2" in each.device)
            with tf.device("CPU:2"):
                values = {**values, name: tf.fill(values[name].shape, given)}
        return original(self, step, values)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Sharding, "write", spoilt)
        with pytest.warns(UserWarning, match="Weights or slots of step 6 are not finite"):
            pm.fit(**arrays(), epochs=1, verbose=0, callbacks=[saving])
    assert not files_of(tmp_path, 6) and files_of(tmp_path, 8)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kills_at_every_flush_change_nothing(tmp_path):
    """While a shard, the file that names shards, or the directory is flushed."""
    whole = tmp_path / "whole.npz"
    killed_training.STEP_S = 0.0
    killed_training.main("", whole)

    def trained(kill_at):
        command = [sys.executable, sharded.__file__, kill_at, tmp_path / "checkpoints", tmp_path / "result.npz"]
        return subprocess.run([*map(str, command), "spectrain"], timeout=300, check=False).returncode

    for kill_at in range(1, 14):  # six a checkpoint: in the first, in the second of a run that went on, in the third
        assert trained(kill_at) == -signal.SIGKILL
    assert trained(0) == 0
    with np.load(whole) as wanted, np.load(tmp_path / "result.npz") as found:
        networks.assert_equal([found[each] for each in found.files], [wanted[each] for each in wanted.files])
