"""Models that leave dimensions open beside the batch: planned for a shape that is given, or the first minibatch's."""

from __future__ import annotations

import itertools

import keras
import networks
import numpy as np
import parameters
import pytest
import tensorflow as tf
from keras import layers as L

import pipetrain
from pipetrain.callbacks import PipelineCheckpoint
from pipetrain.cli import main as command_line
from pipetrain.compute.graph.inputs import checked_shapes, shapes_of_data, shapes_of_model
from pipetrain.frontend.planner import cached_profile

SCHEMES = [
    "single", "data-parallel", "vanilla", "weight-stashing", "vertical-sync", "spectrain", "spike-compensation", "2bw",
    "gpipe", "1f1b",
]  # fmt: skip
CLASSES = 3


def images():
    """Two paddings and strides: an image of one pixel would have no pixel left."""
    keras.utils.set_random_seed(0)
    given = keras.Input((None, None, 3), name="image")
    x = L.Conv2D(4, 3, activation="relu", name="c0")(given)
    x = L.MaxPooling2D(2, name="p0")(x)
    x = L.Conv2D(6, 3, activation="relu", name="c1")(x)
    x = L.GlobalAveragePooling2D(name="mean")(x)
    return keras.Model(given, L.Dense(CLASSES, name="out")(x))


def text():
    keras.utils.set_random_seed(0)
    given = keras.Input((None,), dtype="int32", name="words")
    x = L.Embedding(20, 6, name="e")(given)
    x = L.Conv1D(6, 3, name="c")(x)
    x = L.GlobalMaxPooling1D(name="most")(x)
    return keras.Model(given, L.Dense(CLASSES, name="out")(x))


def loop():
    keras.utils.set_random_seed(0)
    given = keras.Input((None,), dtype="int32", name="words")
    x = L.LSTM(5, name="lstm")(L.Embedding(20, 6, mask_zero=True, name="e")(given))
    return keras.Model(given, L.Dense(CLASSES, name="out")(x))


def both(structure):
    """An image and a text, in a list or a dictionary, and numbers of which all is known."""
    keras.utils.set_random_seed(0)
    image, words, known = (
        keras.Input((None, None, 3), name="image"),
        keras.Input((None,), dtype="int32", name="words"),
        keras.Input((2,), name="known"),
    )
    of_image = L.GlobalAveragePooling2D(name="mean")(L.Conv2D(4, 3, name="c0")(image))
    of_words = L.GlobalAveragePooling1D(name="words_mean")(L.Conv1D(5, 3, name="c1")(L.Embedding(20, 6)(words)))
    x = L.Concatenate(name="joined")([of_image, of_words, L.Dense(3, name="d")(known)])
    inputs = [image, words, known]
    if structure == "dictionary":
        inputs = {"picture": image, "sentence": words, "known": known}
    return keras.Model(inputs, L.Dense(CLASSES, name="out")(x))


MODELS = {
    "images": (images, [(12, 10, 3)]),
    "text": (text, [(9,)]),
    "list": (lambda: both("list"), [(8, 9, 3), (7,), (2,)]),
    "dictionary": (lambda: both("dictionary"), [(2,), (8, 9, 3), (7,)]),
    "loop": (loop, [(9,)]),
}
KEYS = ("known", "picture", "sentence")  # in the order in which Keras has a dictionary's


def arrays(name, rows, seed=0):
    """Random minibatches: x in the model's structure, and labels."""
    rng = np.random.default_rng(seed)
    found = [
        rng.integers(0, 20, (rows, *shape)).astype("int32") if len(shape) == 1 and shape != (2,) else
        rng.normal(size=(rows, *shape)).astype("float32")
        for shape in MODELS[name][1]
    ]  # fmt: skip
    x = dict(zip(KEYS, found)) if name == "dictionary" else found[0] if len(found) == 1 else tuple(found)
    return x, rng.integers(0, CLASSES, rows).astype("int32")


def compiled(model, **settings):
    if settings:
        model = networks.in_way(model, **settings)
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), loss=networks.crossentropy())
    return model


@pytest.fixture
def profiled(monkeypatch):
    """The shapes that models were profiled with, each time that one was wanted."""
    found = []

    def noted(chain, batch_size, shapes, *others, **settings):
        found.append(list(shapes))
        return cached_profile(chain, batch_size, shapes, *others, **settings)

    monkeypatch.setattr("pipetrain.frontend.planner.cached_profile", noted)
    return found


DIVIDED = [("gpipe", 1), ("gpipe", 4), ("1f1b", 1), ("1f1b", 4)]
WAYS = [*DIVIDED, *((scheme, None) for scheme in SCHEMES if scheme not in ("gpipe", "1f1b"))]
CHOSEN = [(("spectrain", None), "dictionary"), (("gpipe", 4), "images"), (("1f1b", 1), "list")]


@pytest.mark.wide
@pytest.mark.parametrize(("way", "name"), parameters.combinations(WAYS, list(MODELS), default=CHOSEN))
def test_arrays_say_what_the_inputs_are_like(name, way, profiled):
    """Synchronous schemes train as plain Keras does, in one microbatch and in several."""
    make, shapes = MODELS[name]
    scheme, microbatches = way
    x, y = arrays(name, 24)
    pm = compiled(make(), stages=2, scheme=scheme, microbatches=microbatches)
    got = networks.fit(pm, x, y, batch_size=8, epochs=2)
    assert np.isfinite(got.history["loss"]).all()
    if scheme in ("gpipe", "1f1b", "single", "data-parallel"):
        plain = compiled(make())
        want = networks.fit(plain, x, y, batch_size=8, epochs=2)
        np.testing.assert_allclose(got.history["loss"], want.history["loss"], rtol=1e-5)
        networks.assert_close(pm.get_weights(), plain.get_weights())
        assert pm.evaluate(x, y, verbose=0) == pytest.approx(plain.evaluate(x, y, verbose=0), rel=1e-5)
        networks.assert_close(pm.predict(x, verbose=0), plain.predict(x, verbose=0))
    assert profiled == [shapes] * len(profiled) and (profiled or scheme in ("single", "data-parallel"))


LENGTHS = (11, 7, 13, 9, 8, 13)


def sentences(lengths=LENGTHS, read=None, rows=6):
    """Minibatches of different lengths out of a generator, which notes what is read of it."""
    for n, length in enumerate(lengths):
        if read is not None:
            read.append(n)
        rng = np.random.default_rng(n)
        yield rng.integers(0, 20, (rows, length)).astype("int32"), rng.integers(0, CLASSES, rows).astype("int32")


def padded(shuffled=False):
    """The same kind of data by ``padded_batch``, whose element_spec leaves the length open; in an order of its own."""
    rng = np.random.default_rng(1)
    rows = [(rng.integers(0, 20, length).astype("int32"), np.int32(n % CLASSES)) for n, length in enumerate([9] * 24)]
    signature = (tf.TensorSpec([None], tf.int32), tf.TensorSpec([], tf.int32))
    data = tf.data.Dataset.from_generator(lambda: iter(rows), output_signature=signature)
    data = data.shuffle(24, seed=3) if shuffled else data
    return data.padded_batch(6)


class Sequence(keras.utils.PyDataset):
    def __len__(self):
        return len(LENGTHS)

    def __getitem__(self, n):
        return next(itertools.islice(sentences(), n, None))


SOURCES = {
    "generator": sentences,
    "PyDataset": Sequence,
    "padded batches": padded,
    "shuffled": lambda: padded(shuffled=True),
}


READ = [("1f1b", "generator"), ("1f1b", "shuffled"), ("vanilla", "padded batches")]


@pytest.mark.wide
@pytest.mark.parametrize(("scheme", "source"), parameters.combinations(SCHEMES, list(SOURCES), default=READ))
def test_the_first_minibatch_decides_where_the_data_do_not_tell(scheme, source, profiled):
    """Minibatches of different lengths, read once and in order: as plain Keras has them."""
    pm = compiled(text(), stages=2, scheme=scheme, microbatches=1 if scheme in ("gpipe", "1f1b") else None)
    got = pm.fit(SOURCES[source](), verbose=0, shuffle=False).history["loss"]
    assert all(shapes in ([(11,)], [(9,)]) for shapes in profiled)
    if scheme in ("single", "data-parallel", "gpipe", "1f1b"):
        plain = compiled(text())
        want = plain.fit(SOURCES[source](), verbose=0, shuffle=False).history["loss"]
        np.testing.assert_allclose(got, want, rtol=1e-5)
        networks.assert_close(pm.get_weights(), plain.get_weights())
    if profiled:
        assert pm.partition().cuts and "Recommended" in pm.explain()  # of what it was trained on


@pytest.mark.wide
@pytest.mark.parametrize("make", parameters.by_default([text, loop], text))
@pytest.mark.parametrize("scheme", parameters.by_default(["gpipe", "1f1b"], "gpipe"))
def test_microbatches_of_different_lengths_train_as_plain_keras(scheme, make):
    pm, plain = compiled(make(), stages=3, scheme=scheme, microbatches=3), compiled(make())
    for model in (pm, plain):
        model.fit(sentences(), verbose=0)
    networks.assert_close(pm.get_weights(), plain.get_weights())


@pytest.mark.wide
def test_no_minibatch_is_read_twice():
    read = []
    compiled(text(), stages=2, scheme="1f1b").fit(sentences(read=read), verbose=0)
    assert read == list(range(len(LENGTHS)))


@pytest.mark.wide
def test_one_minibatch_at_a_time_and_another_compilation(profiled):
    pm, plain = compiled(text(), stages=2, scheme="1f1b"), compiled(text())
    for model in (pm, plain):
        for x, y in sentences():
            model.train_on_batch(x, y)
        model.compile(keras.optimizers.SGD(0.1), loss=networks.crossentropy())
        model.fit(sentences(), verbose=0)
    networks.assert_close(pm.get_weights(), plain.get_weights())
    assert profiled == [[(11,)]]


@pytest.mark.wide
@pytest.mark.parametrize("method", parameters.by_default(["evaluate", "predict", "test_on_batch"], "predict"))
def test_without_training_the_first_minibatch_decides_too(method, profiled):
    """And training then decides anew."""
    x, y = next(sentences())
    pm, plain = compiled(text(), stages=2), compiled(text())
    want, got = (
        model.predict(tf.data.Dataset.from_tensors(x), verbose=0) if method == "predict" else
        model.test_on_batch(x, y) if method == "test_on_batch" else
        model.evaluate(sentences([11, 8]), verbose=0)
        for model in (plain, pm)
    )  # fmt: skip
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert profiled == [[(11,)]]
    pm.fit(sentences([10, 12]), verbose=0)
    assert profiled == [[(11,)], [(10,)]]


class Stop(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 3:
            raise InterruptedError


@pytest.mark.wide
@pytest.mark.parametrize("stages", parameters.by_default([2, 3], 3))
@pytest.mark.parametrize("scheme", parameters.by_default(["1f1b", "vanilla"], "1f1b"))
def test_training_goes_on_from_a_checkpoint(scheme, stages, tmp_path, capsys):
    """With as many stages it is cut as before; with others as the first run's first minibatch has it."""

    def fit(pm, folder, *callbacks):
        checkpoint = PipelineCheckpoint(tmp_path / folder, every_steps=2)
        pm.fit(padded(), epochs=2, verbose=2, callbacks=[*callbacks, checkpoint])
        return pm.get_weights()

    settings = {"scheme": scheme, "microbatches": 1 if scheme == "1f1b" else None}
    with pytest.raises(InterruptedError):
        fit(compiled(text(), stages=2, **settings), "stopped", Stop())
    resumed = fit(compiled(text(), stages=stages, **settings), "stopped")
    assert "Going on from" in capsys.readouterr().out
    if scheme == "1f1b" or stages == 2:
        networks.assert_close(resumed, fit(compiled(text(), stages=2, **settings), "whole"), 1e-6)


def test_what_is_asked_for():
    shapes = {
        "images": [(64, 32, 3), [64, 32, 3], [(64, 32, 3)], (64, 32, None), {"image": (64, 32, 3)}],
        "list": [[(8, 9, 3), (7,), (2,)], ((8, 9, 3), (7,), None), {"image": (8, 9, 3), "words": (7,)}],
        "dictionary": [[(2,), (8, 9, 3), (7,)], {"picture": (8, 9, 3), "sentence": [7]}],
    }
    for name, given in shapes.items():
        model = MODELS[name][0]()
        found = {checked_shapes(model, each) for each in given}
        assert found == {((64, 32, 3),) if name == "images" else tuple(MODELS[name][1])}
    assert checked_shapes(networks.mlp(), None) == ((networks.FEATURES,),)


WRONG = [
    ("images", None, r"input 'image' of shape \(None, None, None, 3\), input_shapes=None.*Try.*=\(64, 64, 3\)"),
    ("images", (64, None, 3), r"leaves open.*'image'"),
    ("images", (64, 64, 4), r"does not fit.*\(64, 64, 4\) for 'image' of shape .*Try input_shapes=\(64, 64, 3\)"),
    ("images", (8, 64, 64, 3), "does not fit.*first dimension is the batch"),
    ("images", [(64, 64, 3), (7,)], "takes 1 inputs.*with 2"),
    ("images", (0, 64, 3), "sizes from 1 up"),
    ("images", "64", "sizes from 1 up.*'64'"),
    ("images", 64, "sizes from 1 up.*64"),
    ("images", {"picture": (64, 64, 3)}, r"no such inputs: \['picture'\]"),
    ("text", None, r"'words' of shape \(None, None\).*Try.*\(64,\)"),
    ("list", [(8, 9, 3), None, None], "leaves open.*'words'"),
    ("list", [(8, 9, 3)], "takes 3 inputs.*with 1"),
    ("dictionary", {"picture": (8, 9, 3)}, "'words'.*Try.*'sentence': "),
]


@pytest.mark.parametrize(("name", "given", "message"), WRONG)
def test_what_is_missing_or_does_not_fit_is_said(name, given, message):
    model = MODELS[name][0]()
    pm = pipetrain.PipelineModel(model, stages=2, scheme="spectrain")
    asks = [
        lambda: pipetrain.profile(model, 8, verbose=False, budget_s=None, input_shapes=given),
        lambda: pm.partition(8, input_shapes=given),
        lambda: pm.explain(8, input_shapes=given),
    ]
    for ask in asks:
        with pytest.raises(ValueError, match=rf"(?s){message}") as refused:
            ask()
        assert "Received: " in str(refused.value) and "Try " in str(refused.value)


@pytest.mark.wide
def test_shapes_that_a_plan_is_for(profiled):
    """Also of a model that is trained on others afterwards; a larger image takes more."""
    pm = compiled(images(), stages=2, scheme="1f1b")
    cut = pm.partition(8, input_shapes=(20, 16, 3))
    assert "Recommended" in pm.explain(8)
    assert profiled == [[(20, 16, 3)]] * 3  # explain: also for one device, which computes whole minibatches
    costs = pipetrain.profile(images(), 8, verbose=False, budget_s=None, input_shapes=(32, 20, 3))
    assert costs.blocks[0].output_bytes == 4 * 8 * 30 * 18 * 4
    networks.fit(pm, *arrays("images", 8))
    assert pm.partition() is cut
    assert profiled == [[(20, 16, 3)]] * 3


@pytest.mark.wide
def test_the_cache_tells_shapes_apart(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for shape in ((20, 16, 3), (16, 20, 3), (20, 16, 3)):
        pipetrain.PipelineModel(images(), stages=2, scheme="spectrain").partition(8, input_shapes=shape)
    assert len(list((tmp_path / "pipetrain").iterdir())) == 2


def test_data_that_tell():
    model = both("dictionary")
    x, _ = arrays("dictionary", 4)
    want = tuple(MODELS["dictionary"][1])
    assert shapes_of_data(x, model) == want
    dataset = tf.data.Dataset.from_tensor_slices((x, np.zeros(4))).batch(2)
    assert shapes_of_data(dataset, model) == want
    assert shapes_of_data(dataset.map(lambda x, y: (x, y, y)), model) == want
    assert shapes_of_data(padded(), text()) is None
    assert shapes_of_data(sentences(), text()) is None
    assert shapes_of_data([x["picture"], x["sentence"]], model) is None  # which is refused elsewhere
    line = keras.Sequential([keras.Input((None, 1)), L.Conv1D(2, 2), L.GlobalAveragePooling1D()])
    assert shapes_of_data(np.zeros((4, 9)), line) == shapes_of_data(np.zeros((4, 9, 1)), line) == ((9, 1),)
    assert shapes_of_model(line) is None


@pytest.mark.wide
@pytest.mark.parametrize(
    "layer", parameters.by_default([L.GlobalAveragePooling1D, lambda: L.LSTM(4)], L.GlobalAveragePooling1D)
)
def test_a_fixed_batch_and_unknown_dimensions(layer):
    """The number of rows is the model's."""
    given = keras.Input(batch_shape=(6, None), dtype="int32", name="words")
    keras.utils.set_random_seed(0)
    x = layer()(L.Embedding(20, 6, name="e")(given))
    model = keras.Model(given, L.Dense(CLASSES, name="out")(x))
    plain = compiled(keras.models.clone_model(model))
    plain.set_weights(model.get_weights())
    pm = compiled(model, stages=2, scheme="1f1b", microbatches=1)
    for each in (pm, plain):
        each.fit(sentences(), verbose=0)
    networks.assert_close(pm.get_weights(), plain.get_weights())
    costs = pipetrain.profile(model, 128, verbose=False, budget_s=None, input_shapes=(9,))
    assert costs.blocks[0].output_bytes == 4 * 6 * 9 * 6


@pytest.fixture
def main(tmp_path, capsys):
    """A command for a model in a file and shapes of its inputs: the exit status and what was said."""
    images().save(tmp_path / "images.keras")
    both("list").save(tmp_path / "both.keras")

    def main(file, *arguments, command="plan"):
        given = [f"--input-shape={each}" for each in arguments]
        status = command_line.main([command, str(tmp_path / file), "--devices", "6", "--batch-size", "8", *given])
        return status, "".join(capsys.readouterr())

    return main


@pytest.mark.wide
def test_shapes_on_the_command_line(main, capsys):
    assert main("images.keras", "20,16,3")[0] == 0
    assert main("images.keras", "image=20,16,3")[0] == 0
    status, said = main("images.keras")
    assert status == 2 and "input 'image' of shape (None, None, None, 3)" in said
    assert main("both.keras", "8,9,3", "7", "2")[0] == 0
    assert main("both.keras", "words=7", "image=8,9,3")[0] == 0
    for wrong in (["8,9,3", "words=7"], ["words=7", "words=8"], ["8,9,3"], ["8,9,4", "7", "2"], ["nothing=7"]):
        status, said = main("both.keras", *wrong)
        assert status == 2 and "Received: " in said and "Try " in said
    with pytest.raises(SystemExit):
        main("images.keras", "20x16")
    assert "is no shape, such as 64,64,3" in capsys.readouterr().err


@pytest.mark.wide
def test_shapes_for_a_simulation(main):
    """Read as those of a plan are."""
    assert main("images.keras", "20,16,3", command="simulate")[0] == 0
    status, said = main("images.keras", command="simulate")
    assert status == 2 and "input 'image' of shape (None, None, None, 3)" in said
    status, said = main("both.keras", "8,9,4", "7", "2", command="simulate")
    assert status == 2 and "Received: " in said and "Try " in said


def test_a_sequential_model_is_asked_for_its_shape_too():
    model = keras.Sequential([keras.Input((None, None, 3), name="image"), L.Conv2D(2, 3), L.GlobalMaxPooling2D()])
    for wrong, match in [
        (None, r"leaves open.*'image'.*Try"),
        ((8, 8), r"does not fit.*input_shapes=\(64, 64, 3\)"),
        ({"sound": (8, 8, 3)}, r"no such inputs: \['sound'\]"),
    ]:
        with pytest.raises(ValueError, match=match):
            pipetrain.profile(model, 4, verbose=False, budget_s=None, input_shapes=wrong)
    assert pipetrain.profile(model, 4, verbose=False, budget_s=None, input_shapes={"image": (8, 8, 3)}).blocks
    with pytest.raises(ValueError, match=r"leaves open.*'image'"):
        pipetrain.PipelineModel(model, stages=2, scheme="spectrain").explain(4)


def test_a_model_of_fixed_batch_size_takes_microbatches_and_a_short_last_batch():
    layers = [L.Dense(8, activation="tanh", name="one"), L.Dense(networks.CLASSES)]
    model = keras.Sequential([keras.Input(batch_shape=(20, networks.FEATURES)), *layers])
    pm = pipetrain.PipelineModel(model, cuts=("one",), scheme="gpipe", microbatches=4)
    pm.compile(keras.optimizers.SGD(0.1), networks.crossentropy())
    networks.fit(pm, *networks.data(50))
    assert int(pm.optimizer.iterations) == 3
