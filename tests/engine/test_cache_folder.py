"""Where the cache is: a user without a home, or with one that cannot be used, trains without it."""

from __future__ import annotations

import errno
import pwd
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import networks
import numpy as np
import pytest

import pipetrain
from pipetrain.compute.profiling import limits
from pipetrain.compute.profiling.limits import KeptTrials
from pipetrain.plan.profile import Profile

CHOICE = SimpleNamespace(batch_size=8, near=[SimpleNamespace(told={}, step_s=1.0, memory_bytes=1)])


def no_home(monkeypatch, tmp_path):
    """A container's user, or a batch job without an environment."""
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", Mock(side_effect=KeyError("getpwuid(): uid not found: 12345")))


def home_that_is_not_there(monkeypatch, tmp_path):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HOME", str(tmp_path / "file" / "nonexistent"))


def relative_home(monkeypatch, tmp_path):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "relative")


def cache_that_is_a_file(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))


@pytest.mark.wide
@pytest.mark.parametrize("unusable", [no_home, home_that_is_not_there, relative_home, cache_that_is_a_file])
def test_a_model_is_profiled_and_trained_without_a_cache(unusable, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    unusable(monkeypatch, tmp_path)
    before = sorted(tmp_path.rglob("*"))
    x, y = networks.data(16)
    pm = pipetrain.PipelineModel(networks.mlp(), stages=2, scheme="1f1b")
    pm.compile("sgd", networks.crossentropy())
    pm.fit(x, y, batch_size=8, verbose=0)
    assert np.isfinite(pm.get_weights()[0]).all()
    trials = KeptTrials(CHOICE, ())
    trials.keep([1.0])
    assert KeptTrials(CHOICE, ()).seconds == []
    assert sorted(tmp_path.rglob("*")) == before  # nor is anything left in the current folder


@pytest.mark.parametrize("given", ["", "relative"])
def test_a_relative_cache_home_is_ignored(given, monkeypatch, tmp_path):
    """As the XDG Base Directory Specification says."""
    monkeypatch.setenv("XDG_CACHE_HOME", given)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert limits.folder() == tmp_path / ".cache" / "pipetrain"


@pytest.mark.wide
@pytest.mark.parametrize("bad", [b"", b"\xff\xfe", b"[]", b"5", b'{"model": "a"}'])
def test_a_cache_file_that_is_none_is_measured_anew(bad, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    pipetrain.PipelineModel(networks.mlp(), stages=2, scheme="spectrain").partition(batch_size=16)
    (file,) = (tmp_path / "pipetrain").iterdir()
    file.write_bytes(bad)
    pipetrain.PipelineModel(networks.mlp(), stages=2, scheme="spectrain").partition(batch_size=16)
    assert len(file.read_bytes()) > 100
    trials = KeptTrials(CHOICE, ())
    trials.keep([1.0])
    (file,) = (tmp_path / "pipetrain").glob("trials-*.json")
    file.write_bytes(bad)
    assert KeptTrials(CHOICE, ()).seconds == []


def test_a_full_disk_leaves_no_half_of_a_profile(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def save(self, path):
        Path(path).write_text('{"model"')
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Profile, "save", save)
    pipetrain.PipelineModel(networks.mlp(), stages=2, scheme="spectrain").partition(batch_size=16)
    assert list((tmp_path / "pipetrain").iterdir()) == []
