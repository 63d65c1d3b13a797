"""Every way to train against plain Keras, over layers, optimizers and clipping: equal, or refused by name.

Every pair of a way, a layer, an optimizer and a kind of clipping is in some case.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from itertools import combinations, product

import keras
import networks
import numpy as np
import pytest

L = keras.layers
ROWS, WORDS = 18, 11  # in minibatches of 7: neither they nor their parts divide evenly
TWO, ONE = ("CPU:0", "CPU:1"), ("CPU:0",)
WAYS = {
    "1f1b": {"scheme": "1f1b", "microbatches": 2, "cuts": ("cut",)},
    "zb-h1": {"scheme": "zb-h1", "microbatches": 3, "cuts": ("cut",)},
    "gpipe": {"scheme": "gpipe", "microbatches": 2, "cuts": ("cut",)},
    "all-reduce": {"scheme": "all-reduce", "order": "layerwise"},
    "parameter-server": {"scheme": "parameter-server", "order": "layerwise"},
    "grid": {"scheme": "grid", "grid": (2, 1)},
    "coded-reduce": {"scheme": "coded-reduce", "children": 2},
    "single": {"scheme": "single"},
    "data-parallel": {"scheme": "data-parallel"},
}
FLUSHED = ("1f1b", "zb-h1", "gpipe")


def _attention(x):
    return L.MultiHeadAttention(2, 3)(x, x)


def _shared(x):
    dense = L.Dense(4, "tanh")
    return dense(dense(x))


LAYERS = {
    "dense": lambda x: L.Dense(5, "relu", kernel_regularizer="l2")(x),
    "convolution": lambda x: L.Conv1D(5, 3, activation="tanh")(x),
    "batch normalization": lambda x: L.BatchNormalization()(x),
    "layer normalization": lambda x: L.LayerNormalization()(x),
    "embedding": lambda x: L.Embedding(WORDS, 4)(x),
    "lstm": lambda x: L.LSTM(4, return_sequences=True)(x),
    "gru": lambda x: L.GRU(4, return_sequences=True)(x),
    "attention": _attention,
    "frozen without compile": lambda x: L.Dense(5, "tanh", name="to_freeze")(x),
    "shared": _shared,
    "dropout": lambda x: L.Dropout(0.0)(x),
    "frozen": lambda x: L.Dense(5, "tanh", trainable=False)(L.Dense(5)(x)),
}
OPTIMIZERS = {
    "sgd": lambda **clips: keras.optimizers.SGD(0.05, **clips),
    "momentum": lambda **clips: keras.optimizers.SGD(0.05, momentum=0.9, **clips),
    "nesterov": lambda **clips: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True, **clips),
    "adam": lambda **clips: keras.optimizers.Adam(0.01, **clips),
    "adamw": lambda **clips: keras.optimizers.AdamW(0.01, weight_decay=0.1, **clips),
    "rmsprop": lambda **clips: keras.optimizers.RMSprop(0.01, momentum=0.5, **clips),
    "adagrad": lambda **clips: keras.optimizers.Adagrad(0.05, **clips),
    "ftrl": lambda **clips: keras.optimizers.Ftrl(0.05, **clips),
    "lion": lambda **clips: keras.optimizers.Lion(0.001, **clips),
    "lamb": lambda **clips: keras.optimizers.Lamb(0.01, **clips),
    "adafactor": lambda **clips: keras.optimizers.Adafactor(0.01, **clips),
}
if hasattr(keras.optimizers, "Muon"):  # in newer versions
    OPTIMIZERS["muon"] = lambda **clips: keras.optimizers.Muon(0.01, **clips)
CLIPS: dict[str, Mapping[str, float]] = {
    "none": {},
    "clipnorm": {"clipnorm": 0.05},
    "clipvalue": {"clipvalue": 0.01},
    "global_clipnorm": {"global_clipnorm": 0.1},
}
FACTORS = (WAYS, LAYERS, OPTIMIZERS, CLIPS)
Case = tuple[str, ...]


def pairs(case: Case) -> set[tuple[int, str, int, str]]:
    return {(m, case[m], n, case[n]) for m, n in combinations(range(len(case)), 2)}


def pairwise() -> Iterator[Case]:
    """Every layer with every optimizer, and the ways and the kinds of clipping in turns, as in a Latin square."""
    ways, layers, optimizers, clips = map(list, FACTORS)
    for (m, layer), (n, optimizer) in product(enumerate(layers), enumerate(optimizers)):
        yield ways[(m + n) % len(ways)], layer, optimizer, clips[(m + n // 3) % len(clips)]


def data(layer: str) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.integers(0, WORDS, (ROWS, 6)) if layer == "embedding" else rng.normal(size=(ROWS, 6, 4)).astype("float32")
    return x, rng.integers(0, 3, ROWS)


def network(layer: str) -> keras.Model:
    keras.utils.set_random_seed(2)
    inputs = keras.Input((6,), dtype="int32") if layer == "embedding" else keras.Input((6, 4))
    x = LAYERS[layer](inputs if layer == "embedding" else L.Dense(4, "tanh")(inputs))
    x = L.Dense(4, "tanh", name="cut")(L.Flatten()(x))
    return keras.Model(inputs, L.Dense(3, name="last")(x))


def trained(layer: str, optimizer: str, clip: str, **how) -> list[np.ndarray]:
    """Weights, losses and an evaluation."""
    model, (x, y) = network(layer), data(layer)
    fitted = networks.in_way(model, **how) if how else model
    fitted.compile(OPTIMIZERS[optimizer](**CLIPS[clip]), networks.crossentropy())
    losses = []
    for epoch in range(2):
        losses += networks.fit(fitted, x, y, batch_size=7).history["loss"]
        if layer == "frozen without compile" and not epoch:
            model.get_layer("to_freeze").trainable = False
    return [*model.get_weights(), np.array([*losses, fitted.evaluate(x, y, batch_size=7, verbose=0)])]


@cache
def of_plain_keras(*case: str) -> list[np.ndarray]:
    return trained(*case)


def settings(way: str, layer: str) -> dict:
    """One device has all rows where a layer has statistics of them: of several, each would see its own."""
    statistics = layer == "batch normalization"
    how = {**WAYS[way], "devices": ONE if statistics and way not in (*FLUSHED, "coded-reduce") else TWO}
    if statistics:
        how |= {"microbatches": 1} if way in FLUSHED else {"grid": (1, 1)} if way == "grid" else {}
    return how


CASES = [*pairwise()]
# By default one of each layer, optimizer and way.
OFTEN = {case for m in range(len(LAYERS)) for case in CASES[m * len(OPTIMIZERS) + m % len(OPTIMIZERS) :][:1]}


@pytest.mark.wide
@pytest.mark.parametrize(
    ("way", "layer", "optimizer", "clip"),
    [pytest.param(*case, marks=[] if case in OFTEN else [pytest.mark.slow]) for case in CASES],
)
def test_training_is_plain_keras_or_is_refused(way, layer, optimizer, clip):
    try:
        got = trained(layer, optimizer, clip, **settings(way, layer))
    except (ValueError, TypeError) as error:
        assert "Received: " in str(error) and "Try " in str(error)
        return
    for mine, theirs in zip(got, of_plain_keras(layer, optimizer, clip), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=2e-5)


def test_every_pair_is_in_some_case():
    assert set().union(*map(pairs, CASES)) == set().union(*map(pairs, product(*FACTORS)))
