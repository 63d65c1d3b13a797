"""What a way does not take is refused before anything is made of it, with what was received and what to try."""

from __future__ import annotations

import networks
import pytest
import ways_to_train
from ways_to_train import WAYS

OPTIONS = {
    "cuts": ("no such layer",),
    "replicas": (0, 0, 0, 0),
    "microbatches": 0,
    "chunks": 0,
    "recompute": "yes",
    "horizon": "yesterday",
    "spike_compensation": "yes",
    "rescale_steps": 0,
    "stretch_momentum": "yes",
    "order": "alphabetical",
    "servers": 0,
    "staleness": "some",
    "memory_bytes": 0,
    "children": 0,
    "depth": 0,
    "stragglers": -1,
    "grid": (0, 1),
    "devices": ("CPU:99",),
}


def test_what_no_way_takes_is_refused_by_every_way_and_leaves_the_model_as_it_was(way):
    model = ways_to_train.network(WAYS[way])
    weights, layers = model.get_weights(), [*model.layers]
    for option, value in OPTIONS.items():
        with pytest.raises((ValueError, TypeError), match=r"Received: .*\. Try "):
            networks.in_way(model, **{**WAYS[way].options, option: value})
        networks.assert_equal(model.get_weights(), weights)
        assert model.layers == layers and not model.compiled
