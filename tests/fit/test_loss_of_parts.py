"""Losses that are no means over rows: where minibatches are divided they train as in plain Keras, or are refused."""

from __future__ import annotations

from functools import cache, partial

import keras
import networks
import numpy as np
import pytest
from networks import normal
from parameters import by_default, combinations

L, ops, losses = keras.layers, keras.ops, keras.losses
WORDS, LENGTH, CLASSES, ROWS = 20, 5, 7, 22  # of which the last minibatch has fewer

DIVIDING = {
    "1f1b": {"cuts": ("cut",), "microbatches": 3},
    "replicas": {"cuts": ("cut",), "scheme": "gpipe", "microbatches": 2, "replicas": (1, 2)},
    "all-reduce": {"stages": 2, "order": "none"},
    "parameter-server": {"stages": 3, "order": "none"},
    "grid": {"grid": (1, 2)},
    "coded-reduce": {"children": 2, "stragglers": 0},
    "2bw": {"cuts": ("cut",), "microbatches": 2},
    "spectrain": {"cuts": ("cut",), "microbatches": 2, "horizon": "target"},
}
SYNCHRONOUS = [name for name in DIVIDING if name not in ("2bw", "spectrain")]


def tagger(masked=False):
    keras.utils.set_random_seed(0)
    words = keras.Input((LENGTH,), dtype="int32")
    y = L.Dense(6, "tanh", name="cut")(L.Embedding(WORDS, 4, mask_zero=masked)(words))
    return keras.Model(words, L.Dense(CLASSES)(y))


def regressor():
    keras.utils.set_random_seed(0)
    x = keras.Input((4,))
    return keras.Model(x, L.Dense(2)(L.Dense(5, "tanh", name="cut")(x)))


def words():
    """Of each row another number of labels is 0."""
    rng = np.random.default_rng(0)
    x, y = rng.integers(WORDS, size=(ROWS, LENGTH)), rng.integers(CLASSES, size=(ROWS, LENGTH))
    return x, np.where(np.arange(LENGTH) < 1 + np.arange(ROWS)[:, None] % LENGTH, y, 0)


def run(built, loss, x, y, sample_weight=None, **how):
    model = networks.in_way(built, **how) if how else built
    model.compile(keras.optimizers.SGD(0.1), loss)
    settings = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}
    history = model.fit(x, y, sample_weight=sample_weight, **settings).history
    return history["loss"], model.get_weights()


def assert_alike(got, expected):
    np.testing.assert_allclose(got[0], expected[0], rtol=1e-5)
    networks.assert_close(got[1], expected[1], 1e-6)


def how(name):
    return {"scheme": name, **DIVIDING[name]}


WEIGHTED = {
    "ignore_class": (lambda: losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0), False),
    "ignore_class, weights": (lambda: losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0), True),
    "mean_with_sample_weight": (
        lambda: losses.SparseCategoricalCrossentropy(from_logits=True, reduction="mean_with_sample_weight"),
        True,
    ),
    "masked": (lambda: losses.SparseCategoricalCrossentropy(from_logits=True), False),
    "masked, mean_with_sample_weight, ignore_class": (
        lambda: losses.SparseCategoricalCrossentropy(
            from_logits=True, ignore_class=0, reduction="mean_with_sample_weight"
        ),
        True,
    ),
    "masked, ignore_class, weights": (
        lambda: losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0),
        True,
    ),
    "both": (
        lambda: losses.SparseCategoricalCrossentropy(
            from_logits=True, ignore_class=0, reduction="mean_with_sample_weight"
        ),
        True,
    ),
}


def weights():
    return np.linspace(0, 3, ROWS * LENGTH).reshape(ROWS, LENGTH)


@cache
def plain(name):
    make, weighs = WEIGHTED[name]
    return run(tagger("masked" in name), make(), *words(), weights() if weighs else None)


@pytest.mark.parametrize(
    ("scheme", "name"),
    combinations(
        SYNCHRONOUS,
        [*WEIGHTED],
        default=[("replicas", "both")],
        wide=[
            ("all-reduce", "ignore_class, weights"),
            ("1f1b", "ignore_class"),
            ("1f1b", "masked, ignore_class, weights"),
        ],
    ),
)
def test_what_labels_or_weights_divide_by_is_that_of_the_whole_minibatch(scheme, name):
    make, weighs = WEIGHTED[name]
    got = run(tagger("masked" in name), make(), *words(), weights() if weighs else None, **how(scheme))
    assert_alike(got, plain(name))


@pytest.mark.wide
@pytest.mark.parametrize("scheme", by_default(["2bw", "spectrain"], "spectrain"))
def test_so_it_is_where_pipelines_do_not_drain(scheme):
    """The same as a mean over rows of which each is weighted by what its minibatch has."""
    x, y = words()
    kept = (y != 0).astype("float64")
    for start in range(0, ROWS, 8):
        kept[start : start + 8] /= kept[start : start + 8].mean()
    expected = run(tagger(), losses.SparseCategoricalCrossentropy(from_logits=True), x, y, kept, **how(scheme))
    ignoring = losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0)
    assert_alike(run(tagger(), ignoring, x, y, **how(scheme)), expected)


@pytest.mark.wide
@pytest.mark.parametrize("scheme", by_default(SYNCHRONOUS, "1f1b"))
def test_every_output_has_what_it_is_divided_by(scheme):
    """Mean, sum and what labels divide by side by side, weighted, the labels in another structure than the outputs."""
    x, y = words()

    def several():
        keras.utils.set_random_seed(0)
        given = keras.Input((LENGTH,), dtype="int32")
        z = L.Dense(6, "tanh", name="cut")(L.Embedding(WORDS, 4)(given))
        made = {name: L.Dense(CLASSES, name=name)(z) for name in ("a", "b", "c")}
        return keras.Model(given, made)

    def train(**settings):
        model = networks.in_way(several(), **settings) if settings else several()
        kind = losses.SparseCategoricalCrossentropy
        each = {
            "c": kind(from_logits=True, ignore_class=0),
            "a": kind(from_logits=True, reduction="sum"),
            "b": kind(from_logits=True),
        }
        model.compile(keras.optimizers.SGD(0.01), each, loss_weights={"a": 0.1, "b": 2.0, "c": 0.5})
        labels = {"b": y, "c": y, "a": (y + 1) % CLASSES}
        history = model.fit(x, labels, batch_size=8, epochs=2, shuffle=False, verbose=0).history
        return history["loss"], model.get_weights()

    assert_alike(train(**how(scheme)), train())


def padded(y, outputs):
    each = losses.sparse_categorical_crossentropy(y, outputs, from_logits=True)
    keep = ops.cast(y != 0, each.dtype)
    return ops.sum(each * keep) / ops.sum(keep)


def ignoring(y, outputs):
    return losses.sparse_categorical_crossentropy(y, outputs, from_logits=True, ignore_class=3)


def missing(y, outputs):
    known = ops.logical_not(ops.isnan(y))
    return ops.sum(ops.where(known, ops.square(ops.where(known, y, 0.0) - outputs), 0.0)) / ops.sum(
        ops.cast(known, "float32")
    )


def unlike_r2(y, outputs):
    return ops.sum(ops.square(y - outputs)) / ops.sum(ops.square(y - ops.mean(y)))


def unlike_r2_of_one(y, outputs):
    """Infinite for a single row."""
    return unlike_r2(y[:, :1], outputs[:, :1])


def balanced(y, outputs):
    """Each side of a threshold counts as much, however many labels it has."""
    high = ops.cast(y > 17.25, "float32")
    of_high = ops.sum(high * ops.square(y - outputs)) / (ops.sum(high) + 1.0)
    return of_high + ops.sum((1 - high) * ops.square(y - outputs)) / (ops.sum(1 - high) + 1.0)


def root(y, outputs):
    return ops.sqrt(ops.mean(ops.square(y - outputs)))


def hardest(y, outputs):
    return ops.max(ops.square(y - outputs))


def below_zero(y, outputs):
    """Of those outputs alone, by their number: probabilities have none."""
    below = ops.cast(outputs < 0, "float32")
    return ops.sum(ops.square(y - outputs) * below) / (ops.sum(below) + 1.0)


class Centred(losses.Loss):
    """A number for each row, which depends on the others."""

    def call(self, y, outputs):
        return ops.mean(ops.square(y - outputs - ops.mean(y - outputs)), -1)


class Whole(losses.Loss):
    def __call__(self, y, outputs, sample_weight=None):
        return unlike_r2(y, outputs)


OF_COLUMNS = losses.CosineSimilarity(axis=0)
REFUSED = [
    *(padded, ignoring, partial(padded), missing, unlike_r2, unlike_r2_of_one, balanced, root, hardest, below_zero),
    *(Centred(), Whole(), "dice", OF_COLUMNS),
]


@pytest.mark.wide
@pytest.mark.parametrize("loss", REFUSED)
@pytest.mark.parametrize("scheme", by_default(["1f1b", "all-reduce"], "1f1b"))
def test_what_is_no_mean_over_rows_is_refused_by_name(loss, scheme):
    """Whatever labels come first."""
    name = getattr(loss, "__name__", None) or getattr(loss, "name", "")
    of_words = getattr(loss, "func", loss) in (padded, ignoring)
    x, y = words() if of_words else (normal(ROWS, 4), normal(ROWS, 2))
    y = np.maximum(y, 4) if of_words else y
    built = tagger() if of_words else regressor()
    before = built.get_weights()
    with pytest.raises(ValueError, match=f"cannot be put together from its parts.*loss={name}.*microbatches=1"):
        run(built, loss, x, y, **how(scheme))
    networks.assert_equal(built.get_weights(), before)


def by_rows(y, outputs):
    return ops.mean(ops.square(ops.where(ops.isnan(y), outputs, y) - outputs), -1)


class ByRows(losses.Loss):
    def call(self, y, outputs):
        return ops.square(y - outputs)


@pytest.mark.wide
def test_losses_of_ones_own_that_are_means_over_rows_train_as_in_plain_keras():
    x, y = normal(ROWS, 4), normal(ROWS, 2)
    y[::3] = np.nan
    assert_alike(run(regressor(), by_rows, x, y, **how("1f1b")), run(regressor(), by_rows, x, y))
    y, weight = normal(ROWS, 2), np.linspace(0, 1, ROWS)[:, None]
    own = ByRows(reduction="mean_with_sample_weight")
    assert_alike(run(regressor(), own, x, y, weight, **how("1f1b")), run(regressor(), own, x, y, weight))


@pytest.mark.wide
@pytest.mark.parametrize("loss", ["hinge", losses.SquaredHinge()])
def test_hinge_losses_tell_labels_of_0_and_1_by_all_rows(loss):
    x, y = normal(ROWS, 4), (normal(ROWS, 2) > 0).astype("float32")
    assert_alike(run(regressor(), loss, x, y, **how("1f1b")), run(regressor(), loss, x, y))
    y[5] = -1
    with pytest.raises(ValueError, match=r"cannot be put together.*labels from -1 to 1.*microbatches=1"):
        run(regressor(), loss, x, y, **how("1f1b"))


@pytest.mark.wide
@pytest.mark.parametrize("settings", [how("1f1b"), {"scheme": "data-parallel", "devices": ("CPU:0", "CPU:1")}])
def test_outputs_without_columns_have_one_loss_for_all_rows(settings):
    """Keras takes the mean over the last dimension, which here are the rows, and then weighs or sums that."""

    def built():
        whole = regressor()
        return keras.Model(whole.inputs, ops.sum(whole.output, -1))

    x, y, total = normal(ROWS, 4), normal(ROWS), losses.MeanSquaredError(reduction="sum")
    assert_alike(run(built(), total, x, y, **settings), run(built(), total, x, y))
    with pytest.raises(ValueError, match=r"cannot be put together from its parts.*loss=mse"):
        run(built(), "mse", x, y, np.linspace(0, 1, ROWS), **settings)


def test_masks_that_weights_decide_on_are_refused():
    x = keras.Input((LENGTH, 2))
    y = L.Dense(CLASSES)(L.Masking()(L.Dense(3, "relu", name="cut")(x)))
    with pytest.raises(ValueError, match=r"masked.*microbatches=1"):
        run(keras.Model(x, y), "mse", normal(ROWS, LENGTH, 2), normal(ROWS, LENGTH, CLASSES), **how("1f1b"))


def test_labels_that_fit_the_outputs_of_a_part_alone_are_refused():
    """Of 6 rows in 3 microbatches, each with as many rows as outputs: a label for every output, not for every row."""
    x, y = normal(6, 4), normal(6)
    for settings in ({}, how("1f1b")):
        with pytest.raises(Exception, match="Received" if settings else None):
            run(regressor(), "mse", x, y, **settings)
