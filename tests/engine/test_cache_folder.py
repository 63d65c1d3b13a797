"""Where the cache is: a user without a home, or with one that cannot be used, trains without it."""

from __future__ import annotations

import errno
import itertools
import pwd
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import keras
import networks
import numpy as np
import pytest

import pipetrain
from pipetrain.compute.graph.blocks import Chain
from pipetrain.compute.graph.inputs import checked_shapes
from pipetrain.compute.profiling import limits, profiler
from pipetrain.compute.profiling.limits import KeptTrials
from pipetrain.compute.profiling.timing import time_step
from pipetrain.plan.profile import BlockProfile, Coding, Profile
from pipetrain.schemes.compression import Compression

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


class Own(Compression):
    """One of the user's, of which nothing is known but what it is."""

    def encode(self, values):
        return [values]

    def decode(self, parts):
        return parts[0]


def test_what_compressions_take_is_measured_once_by_all_processes(monkeypatch, tmp_path):
    """So that ``auto`` knows its trials again; what is not whole, and what another compression takes, is not read."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(profiler, "_known", {})
    seconds, remote = itertools.count(1), "/job:worker/replica:0/task:1/device:CPU:0"
    monkeypatch.setattr(
        profiler, "time_coding", lambda each, device: Coding(str(each), (next(seconds) / 3, 0.1), (0.2, 0.3))
    )
    plain = Profile("m", 8, (BlockProfile("a", 1.0, 1.0, 0, 0),))

    def taken(*compressions, device="CPU:0", place=""):
        profiler._known.clear()  # as in another process
        return profiler.with_codings(plain, compressions, device, place).codings

    first = taken("int8", "int4")
    assert taken("int4", "int8", None)[::-1] == first and next(seconds) == 3
    for path in (tmp_path / "pipetrain").glob("coding-*.json"):
        path.write_text("[1, 2]")
    again = taken("int8", "int4")
    assert again != first and taken("int8", "int4") == again
    assert taken("int8", device="GPU:0") != again[:1]
    assert taken(Own()) != taken(Own()) and taken("int8", device=remote) != taken("int8", device=remote)
    assert taken("int8", device=remote, place="a") == taken("int8", device=remote, place="a")
    assert len([*(tmp_path / "pipetrain").iterdir()]) == 4


class OwnSteps(keras.optimizers.SGD):
    """One of the user's."""


def test_the_steps_of_muon_and_of_own_optimizers_are_measured_and_others_are_a_pass(monkeypatch, tmp_path):
    """Once for each kind of weights; the small ones take what SGD's do; those of Keras are kept for all processes."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(profiler, "_known", {})
    measured = []

    def time_step(optimizer, weight, device):
        measured.append(weight.path)
        return 10.0

    monkeypatch.setattr(profiler, "time_step", time_step)
    layers = [keras.layers.Dense(20, name=f"wide{n}") for n in range(3)]
    chain = Chain(keras.Sequential([keras.Input((20,)), *layers, keras.layers.Dense(400, name="last")]))
    plain = profiler.profile_chain(chain, 4, checked_shapes(chain.model, None), "CPU:0", False)

    def taken(optimizer):
        profiler._known.clear()  # as in another process
        return [each.step_s for each in profiler.with_steps(plain, chain, optimizer, "CPU:0").blocks]

    assert taken(None) == taken(keras.optimizers.Adam()) == [0.0] * 4 and not measured
    found = taken(keras.optimizers.Muon())
    assert [round(each) for each in found] == [10, 10, 10, 20] and all(each != round(each) for each in found[:3])
    assert [path.split("/", 1)[1] for path in measured] == ["wide0/kernel", "last/kernel", "last/bias"]
    assert taken(keras.optimizers.Muon(0.5)) == found and len(measured) == 3
    assert taken(keras.optimizers.Muon(momentum=0.5)) == found and len(measured) == 6
    for _ in range(2):
        taken(OwnSteps())
    assert len(measured) == 12


class Whole(keras.optimizers.SGD):
    """One that steps for several weights together alone."""

    def build(self, variables):
        assert len(variables) > 1
        super().build(variables)


def test_an_optimizer_that_makes_no_step_for_one_weight_alone_counts_as_sgd(monkeypatch):
    monkeypatch.setattr(profiler, "_known", {})
    chain = Chain(networks.mlp())
    plain = profiler.profile_chain(chain, 4, checked_shapes(chain.model, None), "CPU:0", False)
    assert sum(each.step_s for each in profiler.with_steps(plain, chain, Whole(), "CPU:0").blocks) < 1e-3


def test_what_a_step_takes(monkeypatch):
    """Muon's makes a matrix orthogonal, SGD's adds; neither changes the weight."""
    weight = keras.Variable(np.ones((256, 256), "float32"))
    both = keras.optimizers.Muon(), keras.optimizers.SGD()
    muon, sgd = (min(time_step(optimizer, weight, "CPU:0") for _ in range(3)) for optimizer in both)
    assert muon > 2 * sgd > 0
    np.testing.assert_array_equal(weight, np.ones((256, 256)))


def test_plans_count_the_steps_of_the_compiled_optimizer(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(profiler, "_known", {})
    monkeypatch.setattr(profiler, "time_step", lambda *_: 10.0)
    for optimizer, least, most in [(keras.optimizers.Muon(), 5, 100), (keras.optimizers.Adam(), 0, 1)]:
        pm = pipetrain.PipelineModel(networks.mlp(), stages=2, scheme="1f1b")
        pm.compile(optimizer, loss=networks.crossentropy())
        assert least <= min(stage.step_s for stage in pm.partition(16).stages) < most
