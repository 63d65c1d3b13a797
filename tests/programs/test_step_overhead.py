"""Work that is counted, never timed: eager operations, bytes between devices, traced functions.

The tables say what a step costs today. Whoever makes it cheaper lowers them here.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import inside
import networks
import pytest
import tensorflow as tf
from tensorflow.python import pywrap_tfe
from tensorflow.python.eager import context
from tensorflow.python.framework import func_graph

from pipetrain.compute.functions import kernels

STAGES, ROWS, WIDTH, FLOAT_BYTES, LABEL_BYTES = 3, 16, 16, 4, 4
CUT_BYTES = ROWS * WIDTH * FLOAT_BYTES
CALL = "StatefulPartitionedCall"


class Calls(NamedTuple):
    """Of one minibatch by thread: of each stage, of the last one, and of the caller."""

    stage: dict[str, int]
    last: dict[str, int]
    caller: dict[str, int]


# Forward; backward and update; the last stage's all in one. The caller reads data and the rate, and updates the metrics
# and the optimizer's count. Where it reads nothing ahead, whether there is more is asked apart.
ONE, TWO = {CALL: 1}, {CALL: 2}
CALLER = TWO
# Of two microbatches: gradients are added within backward; the first stage's update is part of the last one, other
# stages first send gradients up; rows taken, losses and predictions joined.
TWICE, PIECES = {CALL: 4}, {"StridedSlice": 4, "Mul": 2, "AddN": 1, "ConcatV2": 1}
CALLS = {
    "vanilla": Calls(TWO, ONE, CALLER),
    "spectrain": Calls(TWO, ONE, CALLER),  # predicting is part of forward and backward
    "weight-stashing": Calls({CALL: 3}, ONE, CALLER),  # weights are read where they are kept
    "1f1b": Calls(TWICE, TWO, {**CALLER, **PIECES, "IteratorGetNextAsOptional": 1, "OptionalHasValue": 1}),
}

# Tensors that these calls give Python, which gives up its lock for each that it lets go. Outputs, what backward will
# need (one, whatever the layers), and the gradient of the inputs, which stage 0 is not asked for; of the last stage
# loss, predictions, that gradient, and when the forward was done. The caller has x, y, the next minibatch and two
# numbers (whether it is there, the learning rate) from one call, loss and accuracy from the other.
HELD = {"vanilla": Calls({CALL: 3}, {CALL: 4}, {CALL: 6}), "spectrain": Calls({CALL: 3}, {CALL: 4}, {CALL: 6})}

# Functions traced for each stage in its life: the two halves and the backward nested in the first, the backward with
# the update (the last stage's with the forward, too), and what gives the weights.
STAGE_TRACES = {"forward": 1, "differentiate": 1, "backward": 1, "call": 1, "list": 1}
# Each reads or predicts them in its own call: forward and backward, which are one at the last stage, and what gives
# them alone. A forward that predicts once the pipeline is full has nothing to predict before: traced both ways.
WITH_WEIGHTS = {
    "vanilla": {"_with_newest": 3 * STAGES - 1},
    "spectrain": {"_with_newest": 3 * STAGES - 2, "_with_predicted": STAGES},
}


class Work:
    """Eager operations by (thread, operation) and, of these, the bytes of inputs that were on other devices."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: Counter = Counter()
        self.bytes: Counter = Counter()
        self.held: Counter = Counter()
        self._default = tf.zeros([]).device
        # All eager operations go through one of these, tf.raw_ops and called functions included.
        fast, slow = pywrap_tfe.TFE_Py_FastPathExecute, pywrap_tfe.TFE_Py_Execute

        def fast_path(handle, name, op, *arguments):
            outputs = fast(handle, name, op, *arguments)  # raises for what the slow one is then asked
            self._add(name, arguments, outputs)
            return outputs

        def slow_path(handle, device, name, inputs, *others):
            outputs = slow(handle, device, name, inputs, *others)
            self._add(name, inputs, outputs)
            return outputs

        monkeypatch.setattr(pywrap_tfe, "TFE_Py_FastPathExecute", fast_path)
        monkeypatch.setattr(pywrap_tfe, "TFE_Py_Execute", slow_path)

    def _add(self, name: str, inputs: Iterable, outputs: object) -> None:
        key = threading.current_thread().name, name
        self.calls[key] += 1
        self.held[key] += len([*_tensors([outputs])])
        on = context.context().device_name or next((each.device for each in _tensors([outputs])), self._default)
        for each in _tensors(inputs):
            if each.device != on and each.dtype != tf.resource:
                self.bytes[key] += each.shape.num_elements() * each.dtype.size

    def per_minibatch(self, pm) -> tuple[dict[str, dict[str, float]], ...]:
        """Calls, bytes and tensors held of a minibatch, by thread: what eight more of them take than eight do."""
        found = []
        for count in (8, 16):
            self.calls.clear()
            self.bytes.clear()
            self.held.clear()
            train(pm, count)
            found.append((Counter(self.calls), Counter(self.bytes), Counter(self.held)))
        return tuple(map(_by_thread, *found))


def _tensors(values: Iterable) -> Iterator[tf.Tensor]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _tensors(value)
        elif isinstance(value, tf.Tensor):
            yield value


def _by_thread(few: Counter, many: Counter) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for thread, name in many:
        each = (many[thread, name] - few[thread, name]) / 8
        if each:
            found.setdefault(thread, {})[name] = each
    return found


def train(pm, minibatches, epochs=1):
    x, y = networks.data(ROWS * minibatches)
    pm.fit(x, y, batch_size=ROWS, epochs=epochs, shuffle=False, verbose=0)


def pipeline(scheme):
    pieces = 2 if scheme == "1f1b" else None
    return networks.pipeline(cuts=networks.cuts(6, STAGES), scheme=scheme, microbatches=pieces)


@cache
def measured(scheme):
    """A trained pipeline of threads and its work on a minibatch, once for all tests."""
    pm = pipeline(scheme)
    with pytest.MonkeyPatch.context() as patched:
        inside.by_threads(patched)
        train(pm, 8)  # traces
        return pm, *Work(patched).per_minibatch(pm)


@pytest.mark.wide
@pytest.mark.parametrize("scheme", CALLS)
def test_eager_operations_and_bytes_of_a_minibatch(scheme):
    pm, calls, moved, _ = measured(scheme)
    moved = dict(moved)
    expected, pieces = CALLS[scheme], 2 if scheme == "1f1b" else 1
    caller = threading.current_thread().name
    stages = [f"pipetrain stage {stage}" for stage in range(STAGES)]
    assert {*calls} == {caller, *stages}
    for stage, thread in enumerate(stages):
        neighbours = (stage > 0) + (stage < STAGES - 1)
        whole = Counter(expected.last if thread == stages[-1] else expected.stage)
        assert calls[thread] == whole + Counter({CALL: 1} if pieces > 1 and stage else {})
        labels_bytes = ROWS * LABEL_BYTES if thread == stages[-1] else 0
        assert sum(moved.pop(thread).values()) == neighbours * CUT_BYTES + labels_bytes
    assert calls[caller] == expected.caller
    # Beside what crosses the cuts and labels, the last stage's predictions and loss are on another device.
    assert sum(moved.pop(caller).values()) == (ROWS * networks.CLASSES + pieces) * FLOAT_BYTES
    assert not any(moved.values())
    assert sum(pm.trace.transfers.size_bytes.tolist()) == (8 + 8 + 16) * 2 * (STAGES - 1) * CUT_BYTES


@pytest.mark.wide
@pytest.mark.parametrize("scheme", HELD)
def test_tensors_that_python_holds_of_a_minibatch(scheme):
    *_, held = measured(scheme)
    expected = HELD[scheme]
    stages = [f"pipetrain stage {stage}" for stage in range(STAGES)]
    first = {CALL: expected.stage[CALL] - 1}
    assert [held[thread] for thread in stages] == [first, *[expected.stage] * (STAGES - 2), expected.last]
    assert held[threading.current_thread().name] == expected.caller


@pytest.mark.wide
@pytest.mark.parametrize("scheme", WITH_WEIGHTS)
def test_each_function_of_a_stage_is_traced_once(scheme, monkeypatch):
    traced: Counter = Counter()
    collected: list[bool] = []
    trace = func_graph.func_graph_from_py_func

    def counted(name, function, *arguments, **settings):
        if function.__module__.startswith("pipetrain.compute") or function.__name__ == "list":
            traced[function.__name__] += 1
            if threading.current_thread() is threading.main_thread():  # stages' threads may end one another's rest
                collected.append(gc.isenabled())
        return trace(name, function, *arguments, **settings)

    monkeypatch.setattr(func_graph, "func_graph_from_py_func", counted)
    inside.by_threads(monkeypatch)
    inside.forwards_by_threads(monkeypatch)
    pm = pipeline(scheme)
    train(pm, 8)
    expected = {name: STAGES * count for name, count in STAGE_TRACES.items()}
    assert traced == {**expected, **WITH_WEIGHTS[scheme]}
    traced.clear()
    train(pm, 8, epochs=2)  # the same functions, for whatever number of rows
    x, y = networks.data(ROWS + 3)
    pm.fit(x, y, batch_size=ROWS // 2, verbose=0)
    assert not traced
    assert gc.isenabled()
    assert not any(collected)  # else Python looks for garbage among the new graph's nodes, again and again
    pm.evaluate(x, y, verbose=0)
    assert traced == {"_run": STAGES}
    pm.evaluate(x, y, batch_size=5, verbose=0)
    train(pm, 1)
    assert traced == {"_run": STAGES}


@pytest.mark.parametrize("enabled", [True, False])
def test_threads_that_pause_garbage_collection_leave_it_as_it_was(enabled, monkeypatch):
    first, second, asked = kernels.gc_paused(), kernels.gc_paused(), gc.isenabled

    def asked_while_the_first_ends() -> bool:
        found = asked()
        first.__exit__(None, None, None)
        return found

    if not enabled:
        gc.disable()
    try:
        first.__enter__()
        assert not gc.isenabled()
        with monkeypatch.context() as patch:
            patch.setattr(gc, "isenabled", asked_while_the_first_ends)
            second.__enter__()
        second.__exit__(None, None, None)
        assert gc.isenabled() is enabled
    finally:
        gc.enable()


def test_planning_imports_neither_tensorflow_nor_keras():
    code = (
        "import sys, pkgutil, importlib, pipetrain\n"
        "from pipetrain import plan, schemes, simulation, trace\n"
        "for room in (schemes, trace, plan, simulation):\n"
        "    for each in pkgutil.iter_modules(room.__path__, room.__name__ + '.'): importlib.import_module(each.name)\n"
        "assert {*pipetrain.__all__} <= {*dir(pipetrain)}\n"
        "pipetrain.simulate, pipetrain.partition, pipetrain.Profile, pipetrain.Partition, pipetrain.Trace\n"
        "assert not {'tensorflow', 'keras'} & {*sys.modules}\n"
        "loaded = {each for each in sys.modules if each.startswith('pipetrain.compute.')}\n"
        "assert loaded == {'pipetrain.compute.processor'}"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=280, cwd=Path(__file__).parents[2])
