"""What a PipelineModel shows of itself: a line, a table above Keras' own, a picture. Nothing is measured for it."""

from __future__ import annotations

import keras
import networks
import numpy as np
import pytest
from matplotlib.figure import Figure

import pipetrain
from pipetrain.frontend import planner

TWO = ("CPU:0", "CPU:1")


def model(**options):
    pm = pipetrain.PipelineModel(networks.small(), **options)
    pm.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return pm


def shown(pm, **settings):
    """What the summary prints, the stages' table alone."""
    lines = []
    pm.summary(print_fn=lambda text, **_: lines.append(text), **settings)
    return lines[0]


@pytest.fixture
def unmeasured(monkeypatch):
    def refuse(*_, **__):
        pytest.fail("the model is profiled")

    monkeypatch.setattr(planner, "cached_profile", refuse)


@pytest.mark.parametrize(
    ("options", "line", "said"),
    [
        (
            {"stages": 2, "scheme": "1f1b", "devices": TWO},
            "1f1b, 2 stages on 2 devices (CPU:0, CPU:1); not cut yet",
            "not decided yet",
        ),
        (
            {"cuts": ("d0",), "scheme": "spectrain", "devices": TWO},
            "spectrain, 2 stages on 2 devices (CPU:0, CPU:1); cut after d0",
            "",
        ),
        ({"scheme": "all-reduce", "stages": 2}, "all-reduce on 2 devices (CPU:0, CPU:1)", ""),
        ({"scheme": "single"}, "single on 1 device (CPU:0)", ""),
        ({"devices": TWO}, "auto, not chosen yet; 2 devices (CPU:0, CPU:1)", "not chosen yet: the"),
    ],
)
def test_before_training_nothing_is_measured(options, line, said, unmeasured, capsys):
    pm = model(**options)
    assert repr(pm) == f"<PipelineModel {pm.name}: {line}>"
    table = shown(pm)
    assert table.startswith(f"{pm.name}: {line}\n") and said in table
    assert ("0: d0" in table) == (not said)
    assert "MiB" not in table
    assert capsys.readouterr().out == ""
    if said:
        with pytest.raises(ValueError, match=r"There are no stages to draw yet\. Received: .* Try it after fit"):
            pm.plot()
    else:
        assert isinstance(pm.plot(), Figure)


def test_what_a_plan_tells_is_in_the_table_and_the_picture(tmp_path):
    pm = model(stages=2, scheme="1f1b", devices=TWO)
    cut = pm.partition(32)
    table = shown(pm)
    assert f"cut after {cut.cuts[0]}" in repr(pm)
    assert "memory MiB" in table
    figure = pm.plot(tmp_path / "stages.png")
    assert (tmp_path / "stages.png").stat().st_size > 10_000
    rows = [each.get_text() for each in figure.axes[0].get_yticklabels()]
    assert [row.rpartition("\n")[2] for row in rows] == ["CPU:0", "CPU:1"]


def test_what_auto_has_chosen_is_told():
    pm = model(devices=("CPU:0",))
    pm.fit(np.zeros((8, networks.FEATURES), "float32"), np.zeros(8), batch_size=4, verbose=0)
    assert "single (chosen by auto) on 1 device (CPU:0)" in repr(pm)
    assert "memory MiB" in shown(pm)
    said = pm.explain(4)
    assert said.choice is pm.choice and "<table" in said._repr_html_()


def test_keras_own_arguments_are_passed_on(capsys):
    pm = model(cuts=("d0",), scheme="1f1b")
    pm.summary(line_length=50, show_trainable=True)
    mine = capsys.readouterr().out
    pm.model.summary(line_length=50, show_trainable=True)
    assert mine.endswith(capsys.readouterr().out) and "Trai" in mine


def test_many_devices_are_not_listed_one_by_one():
    from pipetrain.frontend.overview import listed, short_name

    assert listed([f"CPU:{n}" for n in range(8)]) == "CPU:0 to CPU:7"
    assert short_name("/job:worker/replica:0/task:3/device:GPU:1") == "worker 3 GPU:1"
    assert short_name("/device:CPU:1") == "CPU:1"
