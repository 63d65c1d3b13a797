"""What ``PipelineModel(scheme=...)`` takes: nothing, a name, an object; options by keyword as in 0.1."""

from __future__ import annotations

import inspect
import re
import warnings

import keras
import networks
import numpy as np
import parameters
import pytest

import pipetrain
from pipetrain.frontend.auto import AutoStrategy
from pipetrain.plan.stages import Partition

DATA = networks.data(48)
ON = ("CPU:0", "CPU:1", "CPU:2")


def trained(pm, optimizer="sgd"):
    pm.compile(optimizer, networks.crossentropy())
    pm.fit(*DATA, 16, shuffle=False, verbose=0)
    return pm.get_weights()


def test_the_constructor_has_few_arguments():
    assert len(inspect.signature(pipetrain.PipelineModel.__init__).parameters) <= 12


@pytest.mark.parametrize(
    ("scheme", "options", "new"),
    [
        *parameters.widely(
            ("spectrain", {"horizon": "target", "stretch_momentum": False}, "SpecTrain(stretch_momentum=False, horizon")
        ),
        ("vanilla", {"rescale_steps": 5}, "Vanilla(rescale_steps=5)"),
        ("coded-reduce", {"children": 3}, "CodedReduce(children=3)"),
        ("grid", {"grid": (1, 2)}, "pipetrain.Grid(1, 2)"),
    ],
)
def test_options_by_keyword_train_as_the_object_does_with_a_warning_that_shows_it(scheme, options, new):
    where = {"devices": ON[:2] if scheme == "grid" else ON}
    where |= {"cuts": networks.cuts(6, 3)} if scheme in ("spectrain", "vanilla") else {}
    with pytest.warns(FutureWarning, match=rf"Received: {next(iter(options))}=.*\. Try scheme=") as seen:
        old = pipetrain.PipelineModel(networks.mlp(), scheme=scheme, **options, **where)
    (told,) = [str(each.message) for each in seen if each.category is FutureWarning]
    line = told.partition("Try scheme=")[2].removesuffix(".")
    assert line.startswith(new) or line.startswith(f"pipetrain.{new.split('(')[0]}") or line == new
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        now = pipetrain.PipelineModel(networks.mlp(), scheme=eval(line), **where)
    same = networks.assert_close if scheme == "coded-reduce" else networks.assert_equal  # sums are as workers come
    same(trained(old), trained(now))


def test_a_keyword_that_never_was_one_is_no_option():
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'horizons'. Did you mean: 'horizon'\?"):
        pipetrain.PipelineModel(networks.mlp(), scheme="spectrain", horizons="target")
    with pytest.raises(TypeError, match=r"'stage'. Did you mean: 'stages'\?"):
        pipetrain.PipelineModel(networks.mlp(), stage=2)
    with pytest.raises(AttributeError, match=r"'SpecTrian'. Did you mean: 'SpecTrain'\?"):
        _ = pipetrain.SpecTrian
    with pytest.warns(FutureWarning, match="Try pm.is_traced = False"):
        assert not pipetrain.PipelineModel(networks.mlp(), scheme="1f1b", trace=False).is_traced
    with pytest.raises(ValueError, match=r"has its options.*Try scheme=pipetrain.SpecTrain\(horizon='local'\)"):
        pipetrain.PipelineModel(networks.mlp(), scheme=pipetrain.SpecTrain(), horizon="local")


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({"cuts": networks.cuts(6, 2)}, marks=pytest.mark.wide),
        {"stages": 2, "microbatches": 2},
        pytest.param({"cuts": networks.cuts(6, 2), "replicas": (2, 1)}, marks=pytest.mark.wide),
        pytest.param({"stages": 3, "devices": ON[:2]}, marks=pytest.mark.wide),
        pytest.param({"stages": 1}, marks=pytest.mark.wide),
    ],
)
def test_without_a_scheme_a_layout_trains_as_the_unsplit_model(layout):
    single = trained(networks.mlp())
    pm = pipetrain.PipelineModel(networks.mlp(), **{"devices": ON, **layout})
    assert pm.scheme == "auto"
    networks.assert_close(trained(pm), single)
    names = {way.name for way in pm.choice.ways}
    assert pm.scheme in names and names <= {"gpipe", "1f1b", "zb-h1", "zb-h2", "single"}
    assert len(pm.partition(16).stages) == len(layout.get("replicas", (1,) * layout.get("stages", 2)))
    if "cuts" in layout:
        assert pm.partition(16).cuts == tuple(layout["cuts"])
    if "microbatches" in layout:
        assert pm.way["microbatches"] == layout["microbatches"]
    assert pm.partition(16).replicas == layout.get("replicas", (1,) * layout.get("stages", 2))


def test_options_of_the_old_default_mean_the_old_default():
    with pytest.warns(FutureWarning, match=r"Try scheme=pipetrain.SpecTrain\(horizon='local'\)"):
        assert pipetrain.PipelineModel(networks.mlp(), stages=2, horizon="local").scheme == "spectrain"
    with pytest.raises(ValueError, match=r"chosen among synchronous ones\. Received: staleness='predicted'"):
        pipetrain.PipelineModel(networks.mlp(), stages=2, scheme=pipetrain.Auto(staleness="predicted"))


@pytest.mark.parametrize("microbatches", [0, -2, "x", 2.5])
def test_microbatches_of_a_layout_are_checked_at_once(microbatches):
    with pytest.raises(ValueError, match=r"Received: microbatches="):
        pipetrain.PipelineModel(networks.mlp(), stages=2, microbatches=microbatches)


@pytest.mark.wide
def test_a_layout_is_there_before_the_schedule_is_chosen_and_after_resuming(tmp_path):
    layout = {"stages": 2, "replicas": (2, 1), "devices": ON}

    def fitted(epochs):
        pm = pipetrain.PipelineModel(networks.mlp(), **layout)
        pm.compile("sgd", networks.crossentropy())
        assert [pm.partition(16).replicas, len(pm.partition(16).stages)] == [(2, 1), 2]
        callbacks = [pipetrain.callbacks.PipelineCheckpoint(tmp_path)]
        pm.fit(*DATA, 16, epochs=epochs, shuffle=False, verbose=0, callbacks=callbacks)
        return pm

    first, second = fitted(1), fitted(2)
    assert first.way["replicas"] == (2, 1) and second.way["scheme"] == first.way["scheme"]
    assert first.partition(16).cuts == second.partition(16).cuts
    assert second.partition(16).replicas == (2, 1)


def test_memory_is_for_as_many_devices_as_stages():
    with pytest.raises(ValueError, match=r"Received: memory_bytes=1000000, 3 stages and replicas, 2 devices"):
        pipetrain.PipelineModel(networks.mlp(), stages=3, devices=ON[:2], memory_bytes=10**6)
    with pytest.raises(TypeError, match=r"Received: scheme=SpecTrain, a class. Try scheme=pipetrain.SpecTrain\(\)"):
        pipetrain.PipelineModel(networks.mlp(), stages=2, scheme=pipetrain.SpecTrain)


@pytest.mark.wide
def test_explain_after_a_fit_says_what_the_choice_says():
    pm = pipetrain.PipelineModel(networks.mlp(), stages=2, devices=ON[:2])
    trained(pm)
    assert pm.explain(16).endswith(str(pm.choice)) and "tried" in pm.explain(16)
    assert "Recommended" in pm.explain(32) and len(repr(pm.choice)) < 80


def test_without_anything_all_exact_ways_are_there():
    pm = pipetrain.PipelineModel(networks.mlp(), devices=ON[:2])
    assert isinstance(pm._strategy, AutoStrategy)
    networks.assert_close(trained(pm), trained(networks.mlp()))
    assert {"single", "data parallelism", "pipeline"} <= {way.kind for way in pm.choice.ways}


def test_a_partition_without_a_scheme_is_kept():
    profile = pipetrain.profile(networks.mlp(), 16, verbose=False)
    cut = pipetrain.partition(profile, 2)
    assert isinstance(cut, Partition)
    pm = pipetrain.PipelineModel(networks.mlp(), cut, devices=ON)
    trained(pm)
    assert pm.partition(16).cuts == cut.cuts and np.all(np.isfinite(pm.get_weights()[0]))


def test_explain_says_the_same_of_every_way_whatever_is_set():
    """Rates and memory of all ways, and which is recommended: those by which ``auto`` chooses."""
    tables = {}
    for scheme in (None, "1f1b", "spectrain", "all-reduce", pipetrain.SpecTrain(horizon="target")):
        pm = pipetrain.PipelineModel(networks.mlp(width=64), scheme=scheme, devices=ON[:2])
        pm.compile(keras.optimizers.SGD(0.1, momentum=0.9), networks.crossentropy())
        text = pm.explain(64)
        rows = re.findall(r"^(\S.*?) {2,}(\d+ ±\S+) +(\S+) +(\S+)", text, re.M)
        taken = re.search(r"^(?:Taken|Recommended): (.*?)\. (?:In|It|No|There|\d)", text, re.M | re.S)
        assert taken, text
        word = "Taken" if scheme is None else "Recommended"
        assert f"\n{word}: " in text and ("(as set)" in text) == (scheme is not None)
        found = {label: figures for label, *figures in rows if "as set" not in label}
        tables[str(scheme)] = found | {label.removesuffix(" (as set)"): figures for label, *figures in rows}
        tables[str(scheme)] |= {"taken": re.sub(r", cuts=.*", "", " ".join(taken[1].split()))}
    for scheme, rows in tables.items():
        for label, figures in tables["None"].items():
            assert rows[label] == figures, (scheme, label)


@pytest.mark.wide
def test_a_run_goes_on_in_the_layout_that_is_given_or_says_that_it_cannot(tmp_path):
    def fitted(folder, epochs, **layout):
        pm = pipetrain.PipelineModel(networks.mlp(), devices=ON[:2], **layout)
        pm.compile("sgd", networks.crossentropy())
        callbacks = [pipetrain.callbacks.PipelineCheckpoint(tmp_path / folder)]
        pm.fit(*DATA, 16, epochs=epochs, shuffle=False, verbose=0, callbacks=callbacks)
        return pm

    def told(folder, scheme):
        """As if ``auto`` had taken this in the run of the folder."""
        pm = pipetrain.PipelineModel(networks.mlp(), scheme=scheme, devices=ON[:2])
        pm.way = {"scheme": scheme}
        pm.compile("sgd", networks.crossentropy())
        callbacks = [pipetrain.callbacks.PipelineCheckpoint(tmp_path / folder)]
        pm.fit(*DATA, 16, shuffle=False, verbose=0, callbacks=callbacks)

    fitted("two", 1, stages=2, microbatches=2)
    four = fitted("two", 2, stages=4, microbatches=4)
    assert (four.way["stages"], four.way["microbatches"]) == (4, 4)
    assert len(fitted("two", 3).partition(16).stages) == 4  # as the run was last
    told("one", "single")
    for layout in ({"stages": 2}, {"cuts": networks.cuts(6, 2)}):
        with pytest.raises(ValueError, match=rf"{next(iter(layout))}=.* a checkpoint of scheme='single'. Try"):
            fitted("one", 2, **layout)
