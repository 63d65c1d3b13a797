"""Parts of wide layers' outputs, measured by themselves: which layers, how many parts, alike ones once."""

from __future__ import annotations

import keras
import pytest

import pipetrain
from pipetrain.compute.profiling import profiler
from pipetrain.plan.profile import BlockProfile, Profile

L = keras.layers


def made():
    layers = [L.Dense(64, "relu", name="a"), L.Dense(64, "relu", name="b"), L.Dense(64, "relu", name="c")]
    return keras.Sequential(
        [keras.Input((64,)), *layers, L.Dense(3, "softmax", name="narrow"), L.Dense(4, name="last")]
    )


def test_wide_layers_have_slices_and_alike_ones_are_measured_once(monkeypatch):
    measured = []

    def profile(model, rows, device, verbose):
        measured.append((model.layers[-1].units, rows, model.layers[-2].count_params()))
        seconds = float(len(measured))
        blocks = tuple(BlockProfile(name, seconds, 2 * seconds, 8, 8) for name in ("before", "part"))
        return Profile("part", rows, blocks)

    monkeypatch.setattr(profiler, "profile", profile)
    model = made()
    before = [each.numpy() for each in model.variables]
    whole = Profile("whole", 16, tuple(BlockProfile(each.name, 1.0, 1.0, 8, 8) for each in model.layers))
    found = {block.name: block.slices for block in profiler.with_slices(whole, model, (1, 2, 8)).blocks}
    assert found["a"] == found["b"] == found["c"] == ((2, 1.0, 2.0), (8, 2.0, 4.0))
    assert found["narrow"] == ()  # softmax needs all of its outputs
    assert found["last"] == ((2, 3.0, 6.0),)
    assert measured == [(32, 16, 64), (8, 16, 64), (2, 16, 3)]
    assert all((a == b.numpy()).all() for a, b in zip(before, model.variables))


@pytest.mark.wide
@pytest.mark.measures
def test_slices_are_measured():
    model = keras.Sequential([keras.Input((256,)), L.Dense(1024, name="wide"), L.Dense(2, name="out")])
    measured = pipetrain.profile(model, 512, verbose=False)
    wide, _ = profiler.with_slices(measured, model, (16,)).blocks
    ((parts, forward_s, backward_s),) = wide.slices
    assert parts == 16 and 0 < forward_s < wide.forward_s and 0 < backward_s < wide.backward_s
