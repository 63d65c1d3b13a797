"""What a trace takes of memory: so much, however long a fit is; nothing, if none is wanted."""

from __future__ import annotations

import gc

import inside
import keras
import networks
import numpy as np
import parameters
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pipetrain
from pipetrain.run import pipeline
from pipetrain.run.stage_work import StageWork
from pipetrain.trace import records
from pipetrain.trace.records import Recent, Span, Spans, Transfers

BATCH, STEPS = 8, 30


def span(n):
    return Span("F", n % 3, n, f"CPU:{n % 2}", float(n), n + 0.5, n)


@given(st.lists(st.one_of(st.none(), st.integers(0, 9)), max_size=60), st.integers(0, 12), st.integers(1, 5))
def test_the_newest_records_are_those_of_a_list(appended, count, chunk):
    """One is appended (None), or several at once; more than a quarter more than those kept are never there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "TUPLES", chunk)
        kept, every = Recent(Spans, count), []
        for several in appended:
            new = [span(len(every) + n) for n in range(1 if several is None else several)]
            if several is None:
                kept.append(new[0])
            else:
                kept.extend(Spans.of(new))
            every += new
            assert kept._packed <= count + count // 4
            assert len(kept._new) < max(chunk, 1)
        assert list(kept.columns()) == (every[-count:] if count else [])
        kept.clear()
        assert list(kept.columns()) == []


def test_columns_of_other_devices_are_joined():
    parts = [[span(0), span(2)], [span(1)], [], [span(3), span(4)]]
    assert list(Spans.joined([Spans.of(part) for part in parts])) == [each for part in parts for each in part]
    assert list(Transfers.joined([Transfers.of(())])) == []


WAYS = {
    "1f1b": {"stages": 3, "microbatches": 2},
    "zb-v": {"stages": 4, "microbatches": 4},
    "spectrain": {"stages": 3},
    "gpipe, replicas": {"stages": 2, "replicas": (2, 1), "microbatches": 2},
    "all-reduce": {"stages": 2, "order": "layerwise"},
    "parameter-server": {"stages": 2, "order": "layerwise"},
    "coded-reduce": {"children": 3},
    "grid": {"grid": (1, 2)},
}


def made(way, **more):
    keras.utils.set_random_seed(0)
    settings = {"devices": [f"CPU:{n}" for n in range(4)]} if way == "zb-v" else {}
    pm = networks.in_way(networks.mlp(), scheme=way.split(",")[0], **WAYS[way], **settings, **more)
    pm.compile(keras.optimizers.SGD(0.05), networks.crossentropy())
    return pm


@pytest.mark.wide
@pytest.mark.parametrize("way", parameters.by_default(WAYS, "1f1b", "all-reduce", "coded-reduce"))
def test_without_a_trace_nothing_is_recorded_and_training_is_the_same(way):
    x, y = networks.data(BATCH * 4)
    weights = []
    for trace in (True, False):
        pm = made(way)
        pm.is_traced = trace
        pm.exact_trace = True  # of which nothing is to be seen either
        pm.fit(x, y, BATCH, epochs=2, shuffle=False, verbose=0)
        pm.evaluate(x, y, BATCH, verbose=0)
        assert (len(pm.trace.spans) > 0) == trace
        assert trace or len(pm.trace.transfers) == 0
        assert pipetrain.idle(pm.trace) or not trace
        weights.append(pm.get_weights())
    networks.assert_close(*weights)


@pytest.mark.wide
@pytest.mark.parametrize("way", parameters.by_default(["threads", *WAYS], "threads", "1f1b", "all-reduce"))
def test_a_trace_that_is_wanted_again_is_of_the_fits_since_then(way, monkeypatch):
    if way == "threads":
        inside.by_threads(monkeypatch)
    x, y = networks.data(BATCH * 2)
    pm, found = made("1f1b" if way == "threads" else way), []
    for is_wanted in (True, False, True):
        pm.is_traced = is_wanted
        pm.fit(x, y, BATCH, shuffle=False, verbose=0)
        found.append(len(pm.trace.spans))
    first, without, again = found
    assert (without, again) == (0, first) and first > 0


@pytest.mark.parametrize("value", ["no", 1000, None])
def test_a_trace_is_kept_or_not(value):
    pm = pipetrain.PipelineModel(networks.mlp(), stages=2, scheme="spectrain")
    with pytest.raises(ValueError, match=rf"Received: is_traced={value!r}. Try"):
        pm.is_traced = value


class Count(keras.callbacks.Callback):
    """How many records there are after a minibatch: those that were made columns, and those that were not yet."""

    def __init__(self):
        super().__init__()
        self.most = 0

    def on_train_batch_end(self, batch, logs=None):
        gc.collect()
        found = (each for each in gc.get_objects() if isinstance(each, Recent))
        self.most = max(self.most, sum(each._packed + len(each._new) for each in found))


@pytest.mark.wide
@pytest.mark.parametrize("way", parameters.by_default(["1f1b", "gpipe, replicas", "coded-reduce"], "1f1b"))
def test_a_fit_that_never_drains_records_no_more_than_so_many(way, monkeypatch):
    gc.collect()
    monkeypatch.setattr(pipeline, "KEPT_SPANS", 40)
    monkeypatch.setattr("pipetrain.run.coded_runner.KEPT_SPANS", 40)
    monkeypatch.setattr(records, "TUPLES", 4)
    x, y = networks.data(BATCH * STEPS)
    before = sum(each._packed + len(each._new) for each in gc.get_objects() if isinstance(each, Recent))
    counting, pm = Count(), made(way)
    pm.fit(x, y, BATCH, verbose=0, callbacks=[counting])
    # of spans twice those kept, of transfers on three ways at most; a quarter more, and what is no whole chunk
    assert counting.most - before < 1.25 * 40 * (2 + 3 * 2) + 100
    assert len(pm.trace.spans) <= 40 and len(pm.trace.transfers) <= 40 * (1 if way != "coded-reduce" else 2)
    assert pm.trace.spans.microbatch.max() >= STEPS - 1


@pytest.mark.wide
def test_what_is_evaluated_is_not_recorded(monkeypatch):
    told = []
    transfers = StageWork.transfers
    monkeypatch.setattr(StageWork, "transfers", lambda self: told.append(transfers(self)) or told[-1])
    inside.forwards_by_threads(monkeypatch)
    pm = made("1f1b")
    x, y = networks.data(BATCH * 2)
    pm.evaluate(x, y, BATCH, verbose=0)
    assert told and all(len(each) == 0 for each in told)
    assert np.isfinite(pm.get_weights()[0]).all()
