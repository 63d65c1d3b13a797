"""Whose files a directory of checkpoints has, and who may write there."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from argparse import Namespace
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import keras
import networks
import numpy as np
import parameters
import pytest

from experiments import options, resuming, run, supervision
from pipetrain.callbacks import PipelineCheckpoint
from pipetrain.checkpoint import store as stores
from pipetrain.checkpoint.directory_lock import DirectoryLock
from pipetrain.checkpoint.store import Store, steps_done

BATCH, STEPS = 8, 6
WEIGHTS = {"weight/0": np.arange(6.0)}


def written(store, *steps):
    for step in steps:
        store.write(step, WEIGHTS, {"updates": step})


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def fit(folder, callbacks=(), epochs=1, every_steps=1, model=None, rate=0.05, **settings):
    keras.utils.set_random_seed(0)
    pm = networks.pipeline(model, keras.optimizers.SGD(rate, momentum=0.9), scheme="single", stages=1)
    x, y = networks.data(BATCH * STEPS)
    checkpoint = PipelineCheckpoint(folder, every_steps, **settings)
    pm.fit(x, y, BATCH, epochs, shuffle=False, verbose=2, callbacks=[*callbacks, checkpoint])
    return pm, checkpoint.resumed_at


@pytest.mark.parametrize("keep", [1, 3])
def test_copies_are_neither_the_newest_nor_removed(keep, tmp_path):
    """Nor do they count among those that are kept."""
    written(Store(tmp_path, keep), 4, 8)
    copies = ["step-00000008-backup.npz", "step-best.npz"]
    for copy in copies:
        shutil.copy(tmp_path / "step-00000008.npz", tmp_path / copy)
    store = Store(tmp_path, keep)
    assert store.newest()[0].path.name == "step-00000008.npz"
    written(store, 12, 16, 20)
    assert names(tmp_path) == sorted([*copies, *(f"step-{step:08}.npz" for step in (12, 16, 20)[-keep:])])
    assert Store(tmp_path, keep).newest()[0].about["step"] == steps_done(tmp_path) == 20


def test_the_step_is_that_in_the_file(tmp_path):
    """Whatever its name and its date, and wherever it was copied to; only copies are left, and none is lost."""
    written(Store(tmp_path / "first", 3), 4, 8)
    shutil.copytree(tmp_path / "first", tmp_path / "copied")
    old, new = (tmp_path / "copied" / f"step-0000000{step}.npz" for step in (4, 8))
    old.rename(old.with_name("step-00000099.npz"))
    new.rename(new.with_name("step-best.npz"))
    os.utime(new.with_name("step-best.npz"), (1, 1))
    store = Store(tmp_path / "copied", 1)
    found, damaged = store.newest()
    assert found.about["step"] == steps_done(tmp_path / "copied") == 8 and not damaged
    written(store, 12)
    assert names(tmp_path / "copied") == ["step-00000012.npz", "step-00000099.npz", "step-best.npz"]


def dangling(path):
    path.symlink_to(path.with_name("elsewhere"))


def loop(path):
    path.symlink_to(path)


def directory(path):
    path.mkdir()


def changed(path, **about):
    shutil.copy(path.with_name("step-00000008.npz"), path)
    with np.load(path) as archive:
        arrays = dict(archive)
    found = json.loads(arrays["about"].tobytes()) | about
    np.savez(path, **arrays | {"about": np.frombuffer(json.dumps(found).encode(), dtype=np.uint8)})


def newer(path):
    changed(path, step=12, format=stores.FORMAT + 1)


def foreign(path):
    np.savez(path, mine=np.arange(3))


def closed(path):
    """To this user."""
    shutil.copy(path.with_name("step-00000008.npz"), path)
    path.chmod(0)


WHOLE = {
    dangling: "No such file or directory",
    loop: "Too many levels of symbolic links",
    directory: "Is a directory",
    newer: "it has format 4, of a newer version of pipetrain; this one reads 3",
    foreign: "it is no checkpoint of pipetrain",
    closed: "Permission denied",
}


@pytest.mark.parametrize("spoil", WHOLE)
def test_what_is_not_damaged_is_told_as_what_it_is(spoil, tmp_path):
    """And stays as it is: no step is lost without a word. Older than the newest it is of no account."""
    if spoil is closed and os.geteuid() == 0:
        pytest.skip("whose permissions are not asked for")
    written(Store(tmp_path, 3), 4, 8)
    newest = tmp_path / "step-00000012.npz"
    spoil(newest)
    before = names(tmp_path)
    with pytest.raises(ValueError, match=rf"{WHOLE[spoil]}.*Received: .*{newest.name}.*Try .*go on from step-00000008"):
        Store(tmp_path, 3).newest()
    assert names(tmp_path) == before
    changed(tmp_path / "step-00000016.npz", step=16)
    assert Store(tmp_path, 3).newest()[0].about["step"] == 16
    shutil.move(tmp_path / "step-00000016.npz", tmp_path / "step-00000012.npz.away")
    newest.rename(tmp_path / "step-mine.npz")  # is nobody's but the user's
    assert Store(tmp_path, 3).newest()[0].about["step"] == 8


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), OSError(errno.EMFILE, "Too many open")])
def test_a_disk_that_fails_does_not_make_a_checkpoint_damaged(error, monkeypatch, tmp_path):
    written(Store(tmp_path, 3), 4, 8)
    read = Path.open

    def opened(self, *given, **settings):
        if self.name == "step-00000008.npz":
            raise error
        return read(self, *given, **settings)

    def load(path, **settings):
        opened(path).close()
        return loaded(path, **settings)

    loaded = np.load
    monkeypatch.setattr(Path, "open", opened)
    monkeypatch.setattr(np, "load", load)
    with pytest.raises(ValueError, match=f"{error.strerror}. Received: .*00000008.npz'. Try again when"):
        Store(tmp_path, 3).newest()
    assert names(tmp_path) == ["step-00000004.npz", "step-00000008.npz"]


def test_too_little_memory_is_no_damage(monkeypatch, tmp_path):
    """A file whose header asks for too much is."""
    written(Store(tmp_path, 3), 4, 8)

    def read(path):
        if path.name == "step-00000008.npz":
            raise MemoryError
        return whole(path)

    whole = stores.read
    monkeypatch.setattr(stores, "read", read)
    with pytest.raises(ValueError, match=r"not enough memory.*Try more memory"):
        Store(tmp_path, 3).newest()
    newest = tmp_path / "step-00000008.npz"
    newest.write_bytes(newest.read_bytes().replace(b"'shape': (6,)", b"'shape': (9,)"))
    found, damaged = Store(tmp_path, 3).newest()
    assert found.about["step"] == 4
    assert len(damaged) == 1 and names(tmp_path) == ["step-00000004.npz", "step-00000008.damaged"]


def test_a_directory_that_cannot_be_read_is_not_an_empty_one(monkeypatch, tmp_path):
    def closed(path):
        raise PermissionError(errno.EACCES, "Permission denied")

    written(Store(tmp_path, 3), 4)
    monkeypatch.setattr(os, "listdir", closed)
    with pytest.raises(ValueError, match=r"directory of checkpoints cannot be read: Permission denied.*Try"):
        Store(tmp_path, 3).newest()


def test_checkpoints_of_two_runs_are_told_apart(tmp_path):
    """Those of one run, gone on with in another process, are not; of version 0.1.0 nothing is known."""
    written(Store(tmp_path / "a", 3), 4, 8)
    again = Store(tmp_path / "a", 3)
    again.newest()
    written(again, 12)
    assert Store(tmp_path / "a", 3).newest()[0].about["step"] == 12
    written(Store(tmp_path / "b", 3), 16)
    shutil.copy(tmp_path / "b" / "step-00000016.npz", tmp_path / "a")
    with pytest.raises(ValueError, match=r"of several runs\. .*step-00000012.npz and step-00000016.npz\. Try"):
        Store(tmp_path / "a", 3).newest()


@pytest.fixture
def mounted(tmp_path):
    """``mounted(*options, at=None)``: a folder that is a file system of its own.

    Where nothing may be mounted, the test is skipped.
    """
    made = []

    def mount(*options, at=None):
        folder = at or tmp_path / f"mounted{len(made)}"
        folder.mkdir(exist_ok=True)
        try:
            subprocess.run(["mount", *options, str(folder)], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("nothing can be mounted")
        made.append(folder)
        return folder

    yield mount
    for folder in reversed(made):
        subprocess.run(["umount", str(folder)], check=True)


class At(keras.callbacks.Callback):
    """Does something at the beginning of a step, when the checkpoint of the step before is on its way."""

    def __init__(self, **of_step):
        super().__init__()
        self._of_step = {int(name[1:]): do for name, do in of_step.items()}

    def on_train_batch_begin(self, batch, logs=None):
        self._of_step.get(batch, lambda: None)()


def is_written(folder):
    """Wait for the first checkpoint, which a thread writes while training goes on."""
    until_s = time.monotonic() + 30
    while not any(name.startswith("step-") for name in names(folder)):
        assert time.monotonic() < until_s
        time.sleep(0.01)


def fill(folder):
    """Let no byte be left there."""
    with suppress(OSError), (folder / "full").open("wb", buffering=0) as file:
        while file.write(bytes(1 << 16)):
            pass
    with suppress(OSError), (folder / "full").open("ab", buffering=0) as file:
        while file.write(b"0"):
            pass


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_on_a_full_disk_checkpoints_that_are_there_stay(mounted, capsys):
    """Training goes on, and so do checkpoints when there is room again."""
    folder = mounted("-t", "tmpfs", "-o", "size=1m", "tmpfs")
    fit(folder, [At(_2=lambda: (is_written(folder), fill(folder)), _4=(folder / "full").unlink)])
    said = capsys.readouterr().out
    # That of step 2 may still be on its way when the disk is full.
    told = r"The checkpoint of step [23] could not be written \(No space left on device\); the newest is step-000000"
    assert re.search(told, said)
    assert not [name for name in names(folder) if not name.startswith("step-")]
    found, damaged = Store(folder, 3).newest()
    assert found.about["step"] == STEPS and not damaged
    fill(folder)
    fit(folder, epochs=2)
    assert "could not be written (No space left on device); the newest is step-00000006.npz." in capsys.readouterr().out
    assert Store(folder, 3).newest()[0].about["step"] == STEPS


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("limit", [0, 1, 100, 400, 1000])
def test_a_file_that_may_grow_no_further_is_not_left_half_written(limit, tmp_path):
    """Wherever the limit is: in an array, or in the archive's directory."""
    store = Store(tmp_path, 3)
    written(store, 4)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (min(limit, (tmp_path / "step-00000004.npz").stat().st_size - 1), before[1])
    )
    try:
        with pytest.raises(OSError, match="File too large"):
            written(store, 8)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert names(tmp_path) == ["step-00000004.npz"] and store.newest()[0].about["step"] == 4


def test_a_read_only_folder_is_refused_or_where_it_becomes_one_told(mounted, tmp_path, capsys):
    """Whoever runs the program; what is there stays."""
    folder, over = mounted("-t", "tmpfs", "-o", "size=1m", "tmpfs"), []
    read_only = partial(mounted, "--bind", "-o", "ro", str(folder), at=folder)
    fit(folder, [At(_3=lambda: (is_written(folder), over.append(read_only())))])
    assert "could not be written (Read-only file system); the newest is step-0000000" in capsys.readouterr().out
    before = names(folder)
    assert [name for name in before if name.startswith("step-")]
    with pytest.raises(ValueError, match=rf"cannot be written there: Read-only file system. .*{folder.name}'. Try ano"):
        fit(folder)
    assert names(folder) == before


def assert_told_or_the_same(folder, newest, whole):
    """The newest file was changed: it says what it said, or is told to be damaged and the one before it is used."""
    found, damaged = Store(folder, 3).newest()
    if found.path == newest:
        assert not damaged and found.about == whole.about and found.arrays.keys() == whole.arrays.keys()
        assert all(np.array_equal(found.arrays[name], each) for name, each in whole.arrays.items())
        return
    assert found.about["step"] == 4 and len(damaged) == 1 and damaged[0].startswith(f"{newest.name} is damaged (")
    assert newest.with_suffix(".damaged").exists()


ARRAYS = WEIGHTS | {"metric/0": np.float32(2), "empty": np.zeros((0, 3)), "flight/0": np.arange(9, dtype=np.uint8)}


def two_of_them(folder):
    """The bytes of the newest of two checkpoints, and what they say."""
    for step in (4, 8):
        store = Store(folder, 3)
        store.newest()
        store.write(step, ARRAYS, {"updates": step, "position": [0, step], "text": "a" * 50})
    found, _ = Store(folder, 3).newest()
    return found.path, found.path.read_bytes(), found


def test_a_file_cut_short_anywhere_is_told(tmp_path):
    newest, content, whole = two_of_them(tmp_path)
    chance = random.Random(0)
    for length in {0, 1, len(content) - 1, *(chance.randrange(len(content)) for _ in range(60))}:
        newest.write_bytes(content[:length])
        assert_told_or_the_same(tmp_path, newest, whole)
        assert not newest.exists()


@pytest.mark.parametrize("bit", parameters.by_default(range(8), 0, wide=(5, 7)))
def test_one_bit_that_is_another_anywhere_is_told_or_changes_nothing(bit, tmp_path):
    """In an array, in what the file says of itself, or in the archive's directory; it is another one at each byte."""
    newest, content, whole = two_of_them(tmp_path)
    told = 0
    for position in range(len(content)):
        flipped = bytearray(content)
        flipped[position] ^= 1 << (bit + position) % 8
        newest.write_bytes(flipped)
        assert_told_or_the_same(tmp_path, newest, whole)
        told += not newest.exists()
    assert told > len(content) / 3


WRITER = """
import sys
import time
import numpy as np
from pipetrain.checkpoint.store import Store
store = Store(sys.argv[1], 3)
print("ready", flush=True)
sys.stdin.readline()
for step in range(1, 60):
    store.write(step, {"weight/0": np.full(2000, step)}, {"updates": step})
"""


def test_two_programs_that_write_there_without_a_lock_leave_whole_files(tmp_path):
    """Of a file system that has no locks; whose files these are is told."""
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": Path(__file__).parents[2]}
    writers = [subprocess.Popen(command, **pipes) for _ in range(2)]
    assert [each.stdout.readline() for each in writers] == ["ready\n"] * 2
    for each in writers:
        each.stdin.write("go\n")
        each.stdin.flush()
    assert [each.communicate(timeout=100) and each.returncode for each in writers] == [0, 0]
    runs = set()
    for path in Store(tmp_path, 3).paths():
        with np.load(path) as archive:
            about = json.loads(archive["about"].tobytes())
            assert (archive["weight/0"] == about["step"]).all()
        runs.add(about["run"])
    assert runs and all(name.startswith("step-") for name in names(tmp_path))
    if len(runs) > 1:
        with pytest.raises(ValueError, match="of several runs"):
            Store(tmp_path, 3).newest()


@pytest.mark.wide
def test_another_program_is_refused_and_named(tmp_path):
    """Also a second ``fit`` of this one; whoever comes later is not."""

    class Again(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            with pytest.raises(ValueError, match="Another program writes there") as raised:
                fit(tmp_path)
            said.append(str(raised.value))

    said = []
    fit(tmp_path, [Again()])
    assert len(said) == STEPS
    assert f"process {os.getpid()} on {socket.gethostname()}" in said[0]
    assert f"Received: directory='{tmp_path}'. Try another directory" in said[0]
    assert fit(tmp_path, epochs=2)[1] == STEPS
    assert all(name.startswith("step-") for name in names(tmp_path))


LEFT = """
import os, sys, time
from pathlib import Path
from pipetrain.checkpoint.directory_lock import DirectoryLock
lock = DirectoryLock(Path(sys.argv[1]), "directory")
lock.__enter__()
if sys.argv[2] == "forks" and not os.fork():
    lock.__exit__(None, None, None)  # which is not its own
os.write(1, b"%d\\n" % os.getpid())
time.sleep(100)
"""


@pytest.mark.parametrize("forks", ["forks", "alone"])
def test_a_lock_ends_with_the_process_and_not_with_those_that_it_forked(forks, tmp_path):
    program = [sys.executable, "-c", LEFT, str(tmp_path), forks]
    pids = []
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as process:
        try:
            pids = [int(process.stdout.readline()) for _ in range(2 if forks == "forks" else 1)]
            with pytest.raises(ValueError, match=f"process {process.pid} on {socket.gethostname()}"):
                DirectoryLock(tmp_path, "directory").__enter__()
            process.kill()
            process.wait()
            with DirectoryLock(tmp_path, "directory") as unlocked:
                assert unlocked == ""
                assert (tmp_path / ".lock").read_text().startswith(f"process {os.getpid()} ")
            assert names(tmp_path) == []
        finally:
            for pid in pids:
                if pid != process.pid:
                    os.kill(pid, signal.SIGKILL)
            process.kill()


def test_a_file_system_without_locks_is_said_and_trained_on(monkeypatch, tmp_path, capsys):
    def flock(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    fit(tmp_path)
    assert f"{tmp_path} cannot be locked (No locks available): see that no other program" in capsys.readouterr().out
    assert steps_done(tmp_path) == STEPS


def test_a_lock_whose_file_was_just_removed_is_taken_of_the_new_one(monkeypatch, tmp_path):
    """Between the opening and the locking whoever held it has let it go."""
    lock, real, times = DirectoryLock(tmp_path, "directory"), fcntl.flock, []

    def flock(*given):
        if not times:
            (tmp_path / ".lock").unlink()
        times.append(given)
        return real(*given)

    monkeypatch.setattr(fcntl, "flock", flock)
    with lock, pytest.raises(ValueError, match="Another program"):
        DirectoryLock(tmp_path, "directory").__enter__()
    assert len(times) == 3


def test_files_that_are_never_found_again_are_no_locks(monkeypatch, tmp_path):
    """It does not try without end, as where a file system numbers its files anew each time."""
    monkeypatch.setattr(os.path, "samestat", lambda *_: False)
    with DirectoryLock(tmp_path, "directory") as unlocked:
        assert unlocked == "the lock's file is another one each time"


def test_another_user_s_lock_counts(monkeypatch, tmp_path):
    """Its file can be read, and not be written to; that of a program that was killed is taken."""
    opened = os.open

    def as_another(path, flags, *mode):
        if flags & os.O_RDWR:
            raise PermissionError(errno.EACCES, "Permission denied")
        return opened(path, flags, *mode)

    theirs, mine = (DirectoryLock(tmp_path, "directory") for _ in range(2))
    with theirs, monkeypatch.context() as patch:
        patch.setattr(os, "open", as_another)
        with pytest.raises(ValueError, match=f"Another program writes there: process {os.getpid()} "):
            mine.__enter__()
    (tmp_path / ".lock").write_text("process 1 on another")
    monkeypatch.setattr(os, "open", as_another)
    with mine as unlocked, pytest.raises(ValueError, match="Another program"):
        assert unlocked == ""
        DirectoryLock(tmp_path, "directory").__enter__()


class Spoil(keras.callbacks.Callback):
    """At this step an update after which no weight is finite, though the loss before it is."""

    def __init__(self, at):
        super().__init__()
        self._at = at

    def on_train_batch_begin(self, batch, logs=None):
        if batch == self._at:
            self.model.optimizer.learning_rate = float("inf")


@pytest.mark.wide
@pytest.mark.parametrize("at", [3, STEPS - 1])
def test_weights_that_are_not_finite_replace_no_checkpoint(at, tmp_path, capsys):
    """In the midst of training, and at its end."""
    try:
        fit(tmp_path, [Spoil(at)], keep=1)
    except FloatingPointError:
        assert at == 3
    said = capsys.readouterr().out
    assert (
        f"Weights or slots of step {at + 1} are not finite: no checkpoint is made of them; the newest is step-000000"
        in said
    )
    assert said.count("not finite") == 1
    (found, _) = Store(tmp_path, 1).newest()
    assert found.about["step"] == at
    assert all(np.isfinite(each).all() for each in found.arrays.values())


@keras.saving.register_keras_serializable("checkpoint_directory")
class Masked(keras.layers.Layer):
    """Has had an infinity since it was made."""

    def build(self, shape):
        self.mask = self.add_weight(shape=(2,), initializer=keras.initializers.Constant(-np.inf), trainable=False)

    def call(self, x):
        return x + 0 * keras.ops.exp(self.mask[0])


def test_weights_that_have_never_been_finite_are_kept(tmp_path, capsys):
    layers = [keras.layers.Dense(4), Masked(), keras.layers.Dense(networks.CLASSES)]
    fit(tmp_path, model=keras.Sequential([keras.Input((networks.FEATURES,)), *layers]))
    assert steps_done(tmp_path) == STEPS
    assert "finite" not in capsys.readouterr().out


@pytest.mark.wide
def test_a_checkpoint_that_is_not_finite_is_said(tmp_path, capsys):
    """Of an earlier version, which wrote such."""
    fit(tmp_path)
    path = tmp_path / f"step-{STEPS:08}.npz"
    with np.load(path) as archive:
        arrays = {name: archive[name] * np.nan if name == "weight/0" else archive[name] for name in archive.files}
    np.savez(path, **arrays)
    with pytest.raises(FloatingPointError):
        fit(tmp_path, epochs=2)
    assert f"Weights in {path} are not finite. Try moving it elsewhere" in capsys.readouterr().out
    assert steps_done(tmp_path) == STEPS


def test_of_another_model_the_file_is_named(tmp_path):
    fit(tmp_path)
    with pytest.raises(ValueError, match=rf"of another model. Received: '.*step-{STEPS:08}.npz' with .*Try"):
        fit(tmp_path, model=keras.Sequential([keras.Input((networks.FEATURES,)), keras.layers.Dense(networks.CLASSES)]))


def test_a_directory_that_is_removed_meanwhile_is_made_again(tmp_path):
    remove = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: batch or shutil.rmtree(tmp_path / "a")
    )
    fit(tmp_path / "a", [remove])
    assert [name for name in names(tmp_path / "a") if not name.startswith("step-")] == []
    assert steps_done(tmp_path / "a") == STEPS


def test_runs_that_begin_in_one_second_have_folders_of_their_own(monkeypatch, tmp_path):
    monkeypatch.setattr(options.time, "strftime", lambda form: "20261127-224800")
    made = [options.new_folder(tmp_path / "runs").name for _ in range(3)]
    assert made == ["20261127-224800", "20261127-224800-2", "20261127-224800-3"]


def test_a_run_s_folder_is_its_own(tmp_path, capsys):
    arguments = ["--output", str(tmp_path), "--steps", "1"]
    with ExitStack() as ends:
        options.owned(tmp_path, ends)
        for more in ([], ["--local-workers", "2", "--wait", "5"]):
            assert run.main([*arguments, *more]) == 2
            assert f"process {os.getpid()} on {socket.gethostname()}. Received: output=" in capsys.readouterr().err
    assert names(tmp_path) == []


def test_a_supervisor_knows_that_training_has_begun_whatever_the_clock(tmp_path):
    """A file server's may be behind."""
    (tmp_path / "hosts.json").write_text('{"workers": ["a:1"]}')
    given = Namespace(resume=None, data_dir=None, cluster=tmp_path / "hosts.json", wait=1.0, elastic=False)
    (tmp_path / "1f1b").mkdir()
    config = tmp_path / "1f1b" / "config.json"
    for earlier in (False, True):  # with and without a run that has ended there
        supervised = supervision.SupervisedRun(given, ["--steps", "9"], tmp_path)
        assert supervised._what() == ["--steps", "9", "--output", str(tmp_path)]
        part = tmp_path / "part"
        part.write_text("{}")
        os.utime(part, (1 + earlier, 1 + earlier))
        part.replace(config)
        assert supervised._what() == ["--resume", str(tmp_path)]


def test_copies_do_not_keep_a_run_from_being_resumed(tmp_path):
    """The folder of its checkpoints may have files of the user's."""
    folder = tmp_path / "spectrain" / resuming.CHECKPOINTS
    written(Store(folder, 3), 4, 8)
    shutil.copy(folder / "step-00000004.npz", folder / "step-best.npz")
    assert resuming.is_unfinished(tmp_path / "spectrain")
    assert steps_done(folder) == 8
