"""``verbose=0`` writes nothing on the standard streams, and ``verbose=1`` the lines that say what takes long."""

from __future__ import annotations

import re

import keras
import networks
import numpy as np
import parameters
import pytest

import pipetrain
from pipetrain.callbacks import PipelineCheckpoint
from pipetrain.checkpoint.store import Store
from pipetrain.compute.functions import kernels
from pipetrain.compute.profiling import progress
from pipetrain.frontend import auto
from pipetrain.frontend.auto import AutoStrategy
from pipetrain.plan.choice import Choice, Way
from pipetrain.run import window

TENSORFLOWS = re.compile(r"\d{4}-\d\d-\d\d .*: [IWEF] |[IWEF]\d{4} |WARNING: All log messages before absl")
NEAR = [
    Way("single", {"scheme": "single"}, 1, 1.0, 1),
    Way("pipeline", {"scheme": "1f1b", "microbatches": 2, "cuts": ("d0",)}, 2, 1.1, 1),
]
X, Y = networks.data(16)


@pytest.fixture(autouse=True)
def info_again():
    yield
    pipetrain.set_verbosity("info")


@pytest.fixture
def impatient(monkeypatch, tmp_path):
    """Everything takes long, and nothing is known from before."""
    monkeypatch.setattr(progress, "PATIENCE_S", -1.0)
    monkeypatch.setattr(kernels, "PATIENCE_S", 0.0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("WARM_UP_S", "TIMED_S"):
        monkeypatch.setattr(window, name, 0.0)
    monkeypatch.setattr(auto, "finalists", lambda seconds, predicted: [*range(len(seconds))])
    monkeypatch.setattr(AutoStrategy, "choice", lambda self, rows, shapes: Choice(8, NEAR))


def asynchronous():
    """Profiled and cut at its first ``fit``, with a longer momentum."""
    return networks.pipeline(networks.mlp(2), scheme="spectrain", stages=2, horizon="target", microbatches=1)


def compiled():
    return networks.pipeline(networks.mlp(2), scheme="vanilla", cuts=("d0",), jit_compile=True)


def chosen():
    pm = pipetrain.PipelineModel(networks.mlp(2), scheme="auto", devices=("CPU:0", "CPU:1"))
    pm.compile(keras.optimizers.SGD(0.05, momentum=0.9), loss=networks.crossentropy())
    return pm


SAID = {
    asynchronous: [
        "Momentum is stretched (stretch_momentum): SGD's momentum=0.9 becomes 0.92, and its learning rate is "
        "multiplied by 0.8.",
        "Profiling the model's layers, 20 s at most",
    ],
    compiled: ["XLA compiles d0.", "XLA compiles d1."],
    chosen: ["Trying 2 of them in turns.", "Trying 2 ways to train."],
}


def written(capfd):
    """What is on both streams, by their file descriptors, but for TensorFlow's own log."""
    out, err = capfd.readouterr()
    return out + "".join(line for line in err.splitlines(True) if not TENSORFLOWS.match(line))


def own_lines(out):
    """Those that are neither Keras' epochs nor its bars."""
    return sorted(line for line in out.splitlines() if re.match(r"[A-Z]", line) and not line.startswith("Epoch"))


@pytest.mark.parametrize("make", SAID)
def test_a_quiet_fit_writes_nothing(make, impatient, capfd):
    make().fit(X, Y, batch_size=8, verbose=0)
    assert written(capfd) == ""


@pytest.mark.parametrize("make", parameters.by_default(SAID, asynchronous, wide=(compiled, chosen)))
def test_what_takes_long_is_said_on_standard_output(make, impatient, capfd):
    make().fit(X, Y, batch_size=8, verbose=1)
    out, _ = capfd.readouterr()
    assert own_lines(out) == SAID[make]


CUTS = ("cut", "first", "second", "third")
TARGET, MUON = pipetrain.SpecTrain(horizon="target"), pipetrain.AttentiveMuon


def reader(every_position):
    """Words in; a class for each of them, or for all."""
    words = keras.Input((3,), dtype="int32")
    x = keras.layers.Embedding(8, 4)(words)
    x = keras.layers.Add(name="cut")([x, keras.layers.MultiHeadAttention(1, 4)(x, x)])
    for name in CUTS[1:]:
        x = keras.layers.Dense(4, name=name)(x)
    return keras.Model(words, keras.layers.Dense(8)(x if every_position else keras.layers.Flatten()(x)))


@pytest.mark.parametrize(
    ("way", "optimizer", "cuts", "every_position", "said"),
    [
        ({"scheme": "vanilla"}, "adam", 1, True, ["With Adam and late gradients language models learn slowly"]),
        ({"scheme": "vanilla"}, "adam", 1, False, []),
        ({"scheme": "1f1b"}, "adam", 1, True, []),
        ({"scheme": "vanilla"}, MUON, 1, True, []),
        ({"scheme": "vanilla"}, MUON, 4, True, []),
        ({"scheme": TARGET}, MUON, 4, True, []),
        (
            {"scheme": TARGET, "microbatches": 1},
            MUON,
            4,
            True,
            ["With microbatches=1 and 5 stages language models learn sl"],
        ),
    ],
)
def test_it_is_said_that_language_models_learn_slowly_by_late_gradients(
    way, optimizer, cuts, every_position, said, caplog
):
    pm = pipetrain.PipelineModel(reader(every_position), cuts=CUTS[:cuts], **way)
    pm.compile(optimizer if optimizer == "adam" else optimizer(), loss=networks.crossentropy(), jit_compile=False)
    words = np.zeros((8, 3), "int32")
    with caplog.at_level("INFO", "pipetrain"):
        for _ in range(2):
            pm.fit(words, words if every_position else words[:, 0], batch_size=4, verbose=1)
    assert [line[:57] for line in caplog.messages if "language models" in line] == said


@pytest.mark.wide
@pytest.mark.parametrize("make", SAID)
def test_above_info_only_keras_bars_are_shown(make, impatient, capfd):
    pipetrain.set_verbosity("warning")
    make().fit(X, Y, batch_size=8, verbose=1)
    out, _ = capfd.readouterr()
    assert own_lines(out) == []
    assert {*re.findall(r"(\d+)/(\d+)", out)} == {("1", "2"), ("2", "2")}  # of the epoch's two minibatches


@pytest.mark.wide
def test_evaluations_and_plans_within_a_quiet_fit_write_nothing(impatient, capfd):
    """Each profiles anew, for another number of rows."""
    pm = asynchronous()

    def look(epoch, logs):
        pm.explain(4)
        pm.evaluate(X, Y, batch_size=4, verbose=0)
        pm.predict(X, batch_size=5, verbose=0)

    callback = keras.callbacks.LambdaCallback(on_epoch_end=look)
    pm.fit(X, Y, batch_size=8, verbose=0, validation_data=(X, Y), callbacks=[callback])
    assert written(capfd) == ""
    pm.explain(2)
    told = own_lines(capfd.readouterr().out)  # of whole minibatches, and of microbatches
    assert told == ["Profiling the model's layers, 20 s at most"] * 2


@pytest.mark.wide
def test_each_fit_says_by_its_own_argument_that_xla_compiles(impatient, capfd, monkeypatch):
    """For data of another kind functions of the same stages are made anew, by a quieter or a louder ``fit``."""
    monkeypatch.setattr(kernels, "PATIENCE_S", 60.0)
    pm = compiled()
    pm.fit(X, Y, batch_size=8, verbose=1)
    monkeypatch.setattr(kernels, "PATIENCE_S", 0.0)
    capfd.readouterr()
    pm.fit(X, Y, batch_size=8, sample_weight=np.ones(len(X), "float32"), verbose=0)
    assert written(capfd) == ""
    pm.fit(X, Y.astype("int64"), batch_size=8, verbose=1)
    assert own_lines(capfd.readouterr().out) == SAID[compiled]


def checkpointed(folder, epochs, verbose):
    pm = networks.pipeline(networks.mlp(2), scheme="single", stages=1)
    pm.fit(X, Y, batch_size=8, epochs=epochs, verbose=verbose, callbacks=[PipelineCheckpoint(folder, every_steps=1)])


def test_a_quiet_run_that_goes_on_warns_of_what_is_wrong_alone(tmp_path, capfd):
    checkpointed(tmp_path, 1, 0)
    newest = Store(tmp_path, 3).paths()[-1]
    newest.write_bytes(newest.read_bytes()[:-100])
    with pytest.warns(UserWarning, match=f"{newest.name} is damaged.*; the one before it is used"):
        checkpointed(tmp_path, 2, 0)
    assert written(capfd) == ""


@pytest.mark.wide
@pytest.mark.parametrize(("level", "shown"), [("info", "damaged Going"), ("warning", "damaged"), ("error", "")])
def test_what_is_wrong_with_a_checkpoint_is_a_warning(level, shown, tmp_path, capfd, recwarn):
    pipetrain.set_verbosity(level)
    checkpointed(tmp_path, 1, 0)
    newest = Store(tmp_path, 3).paths()[-1]
    newest.write_bytes(newest.read_bytes()[:-100])
    checkpointed(tmp_path, 2, 2)
    assert re.findall("^Going|(?<=is )damaged", capfd.readouterr().out, re.MULTILINE) == shown.split()
    warned = [str(each.message) for each in recwarn if each.category is UserWarning]
    assert not [each for each in warned if "step-" in each]


def test_a_bar_comes_with_the_line_above_it(impatient, capfd):
    for level in ("warning", "info"):
        pipetrain.set_verbosity(level)
        progress.Progress(f"At {level}.", 2).add(2)
    out, _ = capfd.readouterr()
    assert out.startswith("At info.\n") and "2/2" in out


def test_many_stages_of_spectrain_are_told_of_the_target_once(capfd):
    x, y = networks.data(32)
    for stages, told in ((5, 1), (4, 0)):
        pm = pipetrain.PipelineModel(networks.mlp(), cuts=networks.cuts(6, stages), scheme="spectrain")
        pm.compile("sgd", networks.crossentropy())
        pm.fit(x, y, 8, verbose=0)
        assert "horizon='target'" not in capfd.readouterr().out
        for _ in range(2):
            pm.fit(x, y, 8, verbose=2)
        assert capfd.readouterr().out.count("horizon='target'") == told
