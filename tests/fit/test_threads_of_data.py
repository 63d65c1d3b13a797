"""What reads data is let go of at the end of each call, without Python's collection of garbage: it has threads."""

from __future__ import annotations

import gc

import networks
import pytest
from tensorflow.python.data.ops.iterator_ops import OwnedIterator


def iterators() -> int:
    """How many iterators of TensorFlow's there are, each with threads of its own."""
    return sum(isinstance(each, OwnedIterator) for each in gc.get_objects())


@pytest.mark.wide
@pytest.mark.parametrize(
    "settings",
    [
        {"scheme": "1f1b", "stages": 2},
        pytest.param({"scheme": "spectrain", "stages": 2}, marks=pytest.mark.slow),
        pytest.param({"scheme": "single"}, marks=pytest.mark.slow),
        {"scheme": "all-reduce"},
        pytest.param({"scheme": "parameter-server"}, marks=pytest.mark.slow),
        pytest.param({"scheme": "grid", "grid": (1, 2)}, marks=pytest.mark.slow),
        {"scheme": "coded-reduce", "children": 2},
    ],
    ids=lambda settings: settings["scheme"],
)
def test_no_call_leaves_a_reader_of_data(settings):
    pm = networks.in_way(networks.mlp(), devices=("CPU:0", "CPU:1"), **settings)
    pm.compile("sgd", networks.crossentropy())
    x, y = networks.data(40)
    calls = [
        lambda: networks.fit(pm, x, y, epochs=2, validation_data=(x, y)),
        lambda: pm.evaluate(x, y, batch_size=16, verbose=0),
        lambda: pm.predict(x, batch_size=16, verbose=0),
    ]
    for call in calls:
        call()  # the first time anything may be kept
    gc.collect()
    gc.disable()
    try:
        before = iterators()
        for call in calls:
            call()
            assert iterators() == before
    finally:
        gc.enable()
