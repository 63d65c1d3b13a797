"""The paper's networks: their published sizes, and that each trains under every scheme."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

import models
from experiments import datasets, networks, run
from pipetrain.schemes import table

REAL = Path(os.environ.get("TFDS_DATA_DIR") or Path(__file__).parents[3] / "shared" / "tfds")
REDUCED = {
    "snn": ("--depth", "6", "--width", "32"),
    "vgg16": ("--width", "4"),
    "resnet152": ("--depth", "14", "--width", "4"),
    "inception_v4": ("--depth", "1", "--width", "4"),
    "transformer": ("--depth", "1", "--width", "16"),
    "residual_lstm": ("--depth", "3", "--width", "16"),
    "gpt2": ("--depth", "1", "--width", "16"),
    "llama": ("--depth", "1", "--width", "16"),
}


def trainable(model):
    return sum(int(np.prod(variable.shape)) for variable in model.trainable_variables)


@pytest.fixture
def empty(monkeypatch):
    """Weights of zeros, for tests of sizes: to draw and to orthogonalize 300 million numbers takes seconds."""
    for kind in (keras.initializers.VarianceScaling, keras.initializers.Orthogonal, keras.initializers.RandomUniform):
        monkeypatch.setattr(kind, "__call__", lambda self, shape, dtype=None: keras.ops.zeros(shape, dtype))


@pytest.mark.wide
@pytest.mark.usefixtures("empty")
@pytest.mark.parametrize(
    ("name", "shape", "classes", "parameters"),
    [
        ("vgg16", (32, 32, 3), 10, 33_638_218),
        ("resnet152", (224, 224, 3), 1000, 60_192_808),
        ("inception_v4", (299, 299, 3), 1000, 42_679_816),
    ],
)
def test_published_parameter_counts(name, shape, classes, parameters):
    assert trainable(models.build(name, shape, classes)) == parameters


@pytest.mark.usefixtures("empty")
@pytest.mark.parametrize(("depth", "width"), [(6, 512), (1, 16)])
def test_the_transformer_s_parameter_count(depth, width):
    attention, feed = 4 * (width * width + width), 2 * 4 * width * width + 5 * width
    expected = 1000 * width + depth * (3 * attention + 2 * feed + 5 * 2 * width) + 2 * width + 2
    assert trainable(models.build("transformer", (20,), 2, depth=depth, width=width, vocabulary=1000)) == expected


@pytest.mark.parametrize(("depth", "width", "words"), [(12, 256, 8000), (1, 16, 50)])
def test_gpt_2_s_parameter_count(depth, width, words):
    block = 4 * (width * width + width) + 2 * 4 * width * width + 5 * width + 4 * width
    expected = words * width + 20 * width + depth * block + 2 * width
    assert trainable(models.build("gpt2", (20,), words, depth=depth, width=width)) == expected


@pytest.mark.usefixtures("empty")
@pytest.mark.parametrize(("depth", "width"), [(8, 1024), (2, 16)])
def test_the_residual_lstm_s_parameter_count(depth, width):
    half = width // 2
    layer = 4 * width * (half + width + 1) + width * half
    expected = 1000 * half + depth * layer + 2 * half + 2
    assert trainable(models.build("residual_lstm", (20,), 2, depth=depth, width=width, vocabulary=1000)) == expected


def test_llama_without_keras_hub_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "keras_hub", None)
    with pytest.raises(ValueError, match=r"is not installed.*model='llama'.*pip install '\.\[hub\]'"):
        models.build("llama", (20,), 50)


@pytest.mark.usefixtures("empty")
@pytest.mark.parametrize(("depth", "width"), [(32, 2048), (3, 10)])
def test_snn_has_the_published_size(depth, width):
    model = models.build("snn", (28, 28), 10, depth=depth, width=width)
    assert model.count_params() == 784 * width + width + (depth - 1) * (width * width + width) + width * 10 + 10


@pytest.mark.wide
@pytest.mark.parametrize("name", models.NAMES)
def test_every_network_is_plain_keras(name, tmp_path):
    if name == "llama":
        pytest.importorskip("keras_hub")
    shape = (75, 75, 3) if networks.NETWORKS[name].reads == "images" else (20,)
    given = dict(zip(("depth", "width"), (None, None), strict=True))
    for flag, value in zip(REDUCED[name][::2], REDUCED[name][1::2], strict=True):
        given[flag.removeprefix("--")] = int(value)
    model = models.build(name, shape, 9, **networks.sizes(name, given))
    model.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras")
    x = np.random.default_rng(0).integers(0, 9, (2, *shape))
    np.testing.assert_array_equal(loaded(x), model(x))


@pytest.fixture(autouse=True)
def started(monkeypatch):
    """TensorFlow runs already, with the tests' devices."""
    monkeypatch.setattr(run, "start_tensorflow", lambda cpu_devices: None)


@pytest.fixture
def data(request, monkeypatch):
    """The embedded images; in slow tests real reviews where a copy is at hand, else sentences made up."""
    if request.node.get_closest_marker("slow") and (REAL / "imdb_reviews").is_dir():
        return {"words": ("--dataset", "imdb_reviews", "--data-dir", str(REAL))}
    rng = np.random.default_rng(0)
    texts = np.array([" ".join(f"word{n}" for n in rng.integers(0, 50, 30)).encode() for _ in range(400)], object)
    parts = [(texts[:300], np.arange(300) % 2), (texts[300:], np.arange(100) % 2)]
    monkeypatch.setattr(datasets, "_from_tfds", lambda name, data_dir: parts)
    return {"words": ()}


def train(name, data, tmp_path, chosen, steps):
    network = networks.NETWORKS[name]
    source = data["words"] if "words" in network.reads else ("--dataset", "fashion_mnist_small")
    flags = [flag for scheme in chosen for flag in ("--scheme", scheme)]
    limits = ("--steps", str(steps), "--eval-every", str(steps), "--batch-size", "16", "--stages", "3")
    assert run.main([*flags, "--model", name, *source, *limits, *REDUCED[name], "--output", str(tmp_path)]) == 0
    return [(tmp_path / scheme / "history.jsonl").read_text() for scheme in chosen]


@pytest.mark.wide
@pytest.mark.parametrize(
    "name", ["gpt2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("vgg16", "transformer"))]
)
def test_networks_train(name, data, tmp_path):
    (history,) = train(name, data, tmp_path, ["spectrain"], 4)
    assert '"step": 4' in history


@pytest.mark.slow
@pytest.mark.timeout(900)  # Inception v4 takes 300 s where a core is slow
@pytest.mark.parametrize("name", models.NAMES)
def test_every_network_trains_under_every_scheme(name, data, tmp_path):
    if name == "llama":
        pytest.importorskip("keras_hub")
    for history in train(name, data, tmp_path, table.NAMES, 20):
        assert '"step": 20' in history


def test_sentences_are_numbered_once(monkeypatch):
    texts = np.array([b"one two three", b"two three " * 20], object)
    monkeypatch.setattr(datasets, "_from_tfds", lambda name, data_dir: [(texts, np.array([0, 1]))] * 2)
    first = datasets.load("imdb_reviews", reads="words")
    assert first.x_train.shape == (2, datasets.WORDS)
    assert first.x_train[0, 3:].tolist() == [0] * 17
    monkeypatch.setattr(datasets, "_numbered", None)  # not called again
    np.testing.assert_array_equal(datasets.load("imdb_reviews", reads="words").x_train, first.x_train)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "transformer", "--dataset", "fashion_mnist_small"), "reads words.*Try imdb_reviews"),
        (("--model", "vgg16", "--depth", "3", "--dataset", "fashion_mnist_small"), "vgg16 has no depth"),
        (("--model", "resnet152", "--depth", "7", "--dataset", "fashion_mnist_small"), "No such depth"),
    ],
)
def test_networks_and_data_that_do_not_go_together(arguments, message, capsys, tmp_path):
    assert run.main(["--scheme", "single", *arguments, "--output", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert re.search(message, error)
