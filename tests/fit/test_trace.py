"""What a run records: spans, transfers and sums of gradients; and why its stages waited."""

from __future__ import annotations

import itertools
import json
import threading
import time

import inside
import keras
import networks
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import config

import pipetrain
from pipetrain.compute.functions.kernels import gc_paused
from pipetrain.compute.functions.stage import Stage
from pipetrain.compute.functions.stage_values import Inputs
from pipetrain.run import channels, control, pipeline
from pipetrain.trace.idle import Idle, idle, pauses
from pipetrain.trace.records import ENDING, Span
from pipetrain.trace.trace import Trace

ROWS, BATCH, WIDTH = 10 * 16, 16, 16


@pytest.fixture(autouse=True)
def nothing_is_collected():
    """Late in the suite Python looks for garbage for a second: no stage's fault."""
    with gc_paused():
        yield


def traced(scheme, replicas=(1, 1), epochs=2, **settings):
    x, y = networks.data(ROWS)
    pm = networks.pipeline(cuts=networks.cuts(6, len(replicas)), scheme=scheme, replicas=replicas, **settings)
    pm.fit(x, y, batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0)
    return pm


def again(pm, **settings):
    """The trace of training for two epochs more, when all is traced."""
    before = pm.trace
    pm.fit(*networks.data(ROWS), batch_size=BATCH, epochs=2, shuffle=False, verbose=0, **settings)
    after = pm.trace
    sent, starts = after.transfers[len(before.transfers) :], after.starts[len(before.starts) :]
    return Trace.of(after.spans[len(before.spans) :], sent, starts=starts)


def check(trace):
    """Each replica computes or has a reason not to, at any time."""
    found, waited = pauses(trace), dict.fromkeys(trace.rows, 0.0)
    for each in trace.transfers:
        assert each.start_s <= each.end_s
        if each.op == "R" and each.from_replica == each.to_replica:
            waited[each.from_stage, each.from_replica] += each.end_s - each.start_s
    for (stage, replica), causes in idle(trace).items():
        mine = trace.spans[(trace.spans.stage == stage) & (trace.spans.replica == replica)]
        busy_s = float((mine.end_s - mine.start_s).sum()) - waited[stage, replica]
        assert busy_s + causes.total_s == pytest.approx(trace.duration_s, abs=1e-9)
        assert min(causes) >= 0
        own = [each for each in found if (each.stage, each.replica) == (stage, replica)]
        assert all(a.end_s <= b.start_s + 1e-9 for a, b in itertools.pairwise(own))
        for cause, seconds in zip(("transfer", "imbalance", "fill"), causes, strict=True):
            assert sum(each.end_s - each.start_s for each in own if each.cause == cause) == pytest.approx(seconds)


def causes(trace, stage, start_s, end_s):
    """Why the stage was idle between these times, in seconds."""
    found = dict.fromkeys(("imbalance", "transfer", "fill"), 0.0)
    for each in pauses(trace):
        if each.stage == stage:
            found[each.cause] += max(0.0, min(each.end_s, end_s) - max(each.start_s, start_s))
    return found


@pytest.mark.wide
@pytest.mark.parametrize("scheme", ["spectrain", "1f1b"])
def test_a_run_records_what_it_sends(scheme, tmp_path):
    pieces = 2 if scheme == "1f1b" else 1
    pm = traced(scheme, (1, 2), microbatches=pieces if pieces > 1 else None)
    trace = pm.trace
    down, up, sums = (trace.transfers[trace.transfers.op == op] for op in "FBR")
    assert len(down) == len(up) == 2 * 10 * pieces * 2
    assert len(sums) == 2 * 10 * 2
    assert set(down.size_bytes.tolist()) == set(up.size_bytes.tolist()) == {BATCH // pieces // 2 * WIDTH * 4}
    gradients = sum(layer.count_params() for layer in pm.model.layers[3:]) * 4
    assert all(sum(pair) == 2 * gradients for pair in zip(*[iter(sums.size_bytes.tolist())] * 2, strict=True))
    assert {(each.from_stage, each.to_stage, each.from_replica) for each in down} == {(0, 1, 0)}
    assert {(each.from_stage, each.to_stage, each.to_replica) for each in up} == {(1, 0, 0)}
    spans = {each.replica: [span for span in trace.spans if span.replica == each.replica] for each in trace.spans}
    for each in trace.transfers:  # within the span of the action that it comes from
        op = "B" if each.op == "R" else each.op
        assert any(
            span[:3] == (op, each.from_stage, each.microbatch)
            and span.start_s <= each.start_s <= each.end_s <= span.end_s
            for span in spans[each.from_replica]
        )
    check(trace)
    trace.save(tmp_path / "trace.json")
    assert list(Trace.load(tmp_path / "trace.json").transfers) == list(trace.transfers)


def test_what_is_sent_is_measured_by_its_shape():
    wide = networks.pipeline(cuts=networks.cuts(6, 2), scheme="vanilla")
    x, y = networks.data(2 * BATCH + 5)
    wide.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    assert wide.trace.transfers.size_bytes.tolist().count(BATCH * WIDTH * 4) == 2 * 2 * 2
    assert wide.trace.transfers.size_bytes.tolist().count(5 * WIDTH * 4) == 2 * 2


@pytest.mark.wide
@pytest.mark.parametrize("cut", ["a", "b"])
def test_and_by_the_number_of_words_to_a_row_and_of_rows_that_a_layer_makes_of_these(cut):
    words = keras.Input((None, 3))
    apart = keras.layers.Dense(4, name="b")(keras.ops.reshape(keras.layers.Dense(4, name="a")(words), (-1, 4)))
    again = keras.ops.reshape(keras.layers.Dense(4)(apart), (6, -1, 4))
    model = keras.Model(words, keras.layers.Dense(1)(keras.layers.GlobalAveragePooling1D()(again)))
    lengths = [5, 2, 7, 2]
    pm = pipetrain.PipelineModel(model, cuts=[cut], scheme="vanilla")
    pm.compile("sgd", "mse")
    pm.fit(((np.ones((6, length, 3)), np.ones((6, 1))) for length in lengths), verbose=0)
    for op in "FB":
        of_op = pm.trace.transfers[pm.trace.transfers.op == op]
        assert of_op.size_bytes.tolist() == [6 * length * 4 * 4 for length in lengths]


def test_a_late_stage_is_imbalance(monkeypatch):
    original = Stage.backward

    def late(self, weights, given, *others):
        if isinstance(given, Inputs):  # of the last stage, which goes forward in the same call
            time.sleep(0.02)
        return original(self, weights, given, *others)

    inside.by_threads(monkeypatch)
    pm = traced("vanilla", epochs=1)
    monkeypatch.setattr(Stage, "backward", late)
    trace = again(pm)
    check(trace)
    waited = dict.fromkeys(("imbalance", "transfer", "fill"), 0.0)
    for sent in trace.transfers[trace.transfers.op == "B"]:  # until then, the last stage had not computed it
        own = [each for each in trace.spans if each[:3] == ("F", 1, sent.microbatch)]
        begun_s = max(each.start_s for each in own if each.start_s <= sent.start_s)
        assert sent.start_s - begun_s >= 0.02
        for cause, seconds in causes(trace, 0, begun_s, sent.start_s).items():
            waited[cause] += seconds
    assert waited["imbalance"] > 0 and waited["transfer"] == 0


@pytest.mark.wide
def test_a_late_transfer_is_transfer(monkeypatch):
    original = channels.transfer

    def late(tensor, device):
        if threading.current_thread().name.startswith("pipetrain stage"):  # not what the caller posts
            time.sleep(0.02)
        return original(tensor, device)

    # By threads, which copy what they send; in one function nothing is copied between processors of a process.
    inside.by_threads(monkeypatch)
    pm = traced("gpipe", microbatches=1, epochs=1)
    monkeypatch.setattr(channels, "transfer", late)
    trace = again(pm)
    check(trace)
    for sent in trace.transfers:  # to a stage that has nothing else to do
        assert sent.end_s - sent.start_s >= 0.02
        waited = causes(trace, sent.to_stage, sent.start_s, sent.end_s)
        assert waited["transfer"] + waited["fill"] > 0 and waited["imbalance"] == 0
    assert all(each.transfer_s >= 9 * 2 * 0.02 for each in idle(trace).values())


@pytest.mark.wide
def test_what_an_evaluation_takes_between_two_epochs_is_no_imbalance():
    rest = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: time.sleep(0.4))
    trace = again(traced("vanilla", epochs=1), callbacks=[rest])
    check(trace)
    spans = trace.spans
    (begun_s,) = spans.start_s[(spans.stage == 0) & (spans.op == "F") & (spans.microbatch == trace.starts[-1])]
    ended_s = spans.end_s[spans.start_s < begun_s].max()
    assert begun_s - ended_s > 0.4
    between = [each for each in pauses(trace) if each.start_s < begun_s and each.end_s > ended_s]
    assert [(each.stage, each.cause) for each in between] == [(0, "fill"), (1, "fill")]


@pytest.mark.wide
def test_the_newest_are_kept(monkeypatch):
    monkeypatch.setattr(pipeline, "KEPT_SPANS", 30)
    trace = traced("vanilla").trace
    assert len(trace.spans) == 30
    assert {span.stage for span in trace.spans} == {0, 1}
    assert 0 < len(trace.transfers) <= 30
    assert trace.transfers.start_s.min() >= 0
    check(trace)


def test_a_run_that_fails_has_a_trace(monkeypatch):
    def broken(self, *args):
        raise KeyError("boom")

    monkeypatch.setattr(Stage, "backward", broken)
    pm = networks.pipeline(cuts=networks.cuts(6, 3), scheme="vanilla")
    x, y = networks.data(ROWS)
    with pytest.raises(KeyError):
        pm.fit(x, y, batch_size=BATCH, verbose=0)
    check(pm.trace)
    assert idle(Trace()) == {}
    assert Idle(1, 2, 3).total_s == 6


def test_devices_are_waited_for_if_the_trace_shall_be_exact(monkeypatch):
    waited = []
    monkeypatch.setattr(control, "finish", waited.append)
    inside.by_threads(monkeypatch)
    pm = traced("vanilla", epochs=1)
    assert not pm.exact_trace
    assert not waited
    pm.exact_trace = True
    x, y = networks.data(ROWS)
    pm.fit(x, y, batch_size=BATCH, verbose=0)
    assert len({*waited}) == 2
    assert len(waited) == 10 * (2 + 1 + 2 + 2)  # at each action's end, before F of stage 0 sends, and after gradients


def test_deterministic_operations_train_without_a_clock():
    """TensorFlow refused the clock between the last stage's forward and backward."""
    keras.utils.set_random_seed(0)
    tf.config.experimental.enable_op_determinism()
    try:
        trace = traced("vanilla", epochs=1).trace
    finally:
        config.disable_op_determinism()
    assert len(trace.spans) == 2 * 2 * 10
    check(trace)


def test_traces_survive_chrome_json(tmp_path):
    spans = [Span("F", 0, 0, "CPU:0", 10.0, 10.5, 0), Span("B", 1, 0, "CPU:1", 10.5, 11.5, 3)]
    trace = Trace.of(reversed(spans))
    assert (trace.stages, trace.duration_s) == (2, 1.5)
    assert trace.bubble() == pytest.approx(0.5)
    trace.save(tmp_path / "trace.json")
    loaded = Trace.load(tmp_path / "trace.json")
    assert [span[:4] for span in loaded.spans] == [span[:4] for span in trace.spans]
    assert [span.end_s for span in loaded.spans] == pytest.approx([0.5, 1.5])
    assert Trace(()).bubble() == 0.0


WAYS = {
    "vanilla": {"cuts": ["d2"]},
    "1f1b": {"cuts": ["d2"], "microbatches": 2},
    "all-reduce": {"devices": ["CPU:0", "CPU:1"]},
    "coded-reduce": {"devices": ["CPU:0", "CPU:1"], "children": 2, "stragglers": 0},
}


@pytest.mark.wide
@pytest.mark.parametrize("scheme", WAYS)
def test_numbers_go_on_after_a_drain(scheme, tmp_path, monkeypatch):
    """At the end of an epoch, and in the midst of one; what happens in between is neither one's wait."""
    if scheme == "vanilla":  # in calls of functions all of so short an epoch is under way then
        inside.by_threads(monkeypatch)
    x, y = networks.data(ROWS)
    pm, pieces = pipetrain.PipelineModel(networks.mlp(), scheme=scheme, **WAYS[scheme]), 1 + (scheme == "1f1b")
    pm.compile("sgd", networks.crossentropy())

    def drained(n, logs):
        if n == 5:
            pm.get_weights()
            pm.predict(x[:2], verbose=0)

    drain = keras.callbacks.LambdaCallback(on_train_batch_end=drained)
    pm.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0, callbacks=[drain])
    trace, spans = pm.trace, pm.trace.spans
    assert {*spans.microbatch.tolist()} == {*range(20 * pieces)}
    made = spans[np.isin(spans.op, ENDING)]
    assert (made.version == made.microbatch // pieces).all()
    first, second, third, fourth = trace.starts
    assert (first, third) == (0, 10 * pieces) and first < second < third < fourth < 20 * pieces
    gone_on = spans.start_s[spans.microbatch >= third].min()
    over_s = spans.end_s[spans.microbatch < third].max()
    for each in pauses(trace):
        assert each.cause == "fill" or each.end_s <= over_s or each.start_s >= gone_on
    check(trace)
    trace.save(tmp_path / "trace.json")
    assert Trace.load(tmp_path / "trace.json").starts == trace.starts


@pytest.mark.wide
def test_numbers_of_old_files_are_made_to_go_on(tmp_path):
    """In which microbatches and versions began anew after a drain, and nothing said when."""
    pm = traced("vanilla")
    old, begins = pm.trace.to_chrome(), 0
    for event in old["traceEvents"]:
        args = event.get("args", {})
        if args.get("microbatch", -1) >= 10:
            args["microbatch"] -= 10
            args["weight_version"] = args.get("weight_version", 10) - 10
            begins += 1
    assert begins == 2 * 2 * 10 + 2 * 10
    del old["otherData"]
    (tmp_path / "old.json").write_text(json.dumps(old))
    loaded = Trace.load(tmp_path / "old.json")
    assert loaded.starts == pm.trace.starts == (0, 10)
    for name in ("microbatch", "version"):
        assert getattr(loaded.spans, name).tolist() == getattr(pm.trace.spans, name).tolist()
    assert loaded.transfers.microbatch.tolist() == pm.trace.transfers.microbatch.tolist()


def test_the_steady_state_is_without_filling_and_draining():
    """Two stages, a unit each for F and B: a full asynchronous pipeline waits for nothing, however short the run."""
    order = {0: "F F B F B F B F B F B F B B", 1: "FB" * 7}
    ready, free, spans = {}, {0: 0.0, 1: 0.0}, []
    acts = {0: order[0].split(), 1: list(order[1])}
    count = {(stage, op): 0 for stage in (0, 1) for op in "FB"}
    while any(acts.values()):
        for stage, mine in acts.items():
            while mine:
                op, n = mine[0], count[stage, mine[0]]
                needs = {(0, "F"): None, (0, "B"): (1, "B", n), (1, "F"): (0, "F", n), (1, "B"): None}[stage, op]
                if needs is not None and needs not in ready:
                    break
                start_s = max(free[stage], ready.get(needs, 0.0))
                free[stage] = ready[stage, op, n] = start_s + 1
                spans.append(Span(op, stage, n, f"d{stage}", start_s, start_s + 1, count[stage, "B"]))
                count[stage, op] += 1
                mine.pop(0)
    trace = Trace.of(spans)
    assert trace.steady_bubble() == 0 < trace.bubble()
    assert Trace.of(each for each in spans if each.microbatch < 2).steady_bubble() > 0
    assert Trace().steady_bubble() == 0
