"""In a program's function every call on a device waits for the call before it there, whatever else orders them."""

from __future__ import annotations

import re
from itertools import pairwise

import inside
import keras
import networks
import pytest
import tensorflow as tf
import ways_to_train

import pipetrain
from pipetrain.compute.program import arguments, function
from pipetrain.compute.program.function import ProgramFunction
from pipetrain.run import pipeline, program_runner

L = keras.layers
PIPELINES = [name for name, way in ways_to_train.WAYS.items() if way.is_pipeline]
BY_DEFAULT = ("spectrain",)
BY_THREADS = ("spectrain, fitted", "single")
BY_FUNCTIONS = ways_to_train.over(
    *(name for name in PIPELINES if name not in BY_THREADS), default=BY_DEFAULT, wide=PIPELINES
)


@pytest.fixture
def graphs(monkeypatch):
    """Those of all functions of programs that are traced."""
    found, made = [], ProgramFunction.__init__

    def init(self, concrete, *others, **settings):
        made(self, concrete, *others, **settings)
        found.append(concrete.graph)

    monkeypatch.setattr(ProgramFunction, "__init__", init)
    return found


def earlier(operations):
    """All operations for which these wait."""
    found, waiting = set(), list(operations)
    while waiting:
        each = waiting.pop()
        for before in (*each.control_inputs, *(tensor.op for tensor in each.inputs)):
            if before not in found:
                found.add(before)
                waiting.append(before)
    return found


def assert_in_order(graph):
    units = {}
    for each in graph.get_operations():
        has_effect = each.op_def.is_stateful and each.type not in ("Timestamp", "Placeholder")
        if has_effect and (name := re.match(r"action_(\d+)_(\d+)/", each.name)):
            units.setdefault(int(name[1]), {}).setdefault(int(name[2]), []).append(each)
    assert units
    for calls in units.values():
        numbers = sorted(calls)
        for before, after in pairwise(numbers):
            for each in calls[after]:
                assert {*calls[before]} <= earlier([each]), f"{each.name} does not wait for action {before}"


@BY_FUNCTIONS
def test_every_call_waits_for_the_one_before_it(way, graphs):
    pm = ways_to_train.anew(way)
    inside.forget_functions(pm)
    ways_to_train.fit(pm)
    assert graphs
    for graph in graphs:
        assert_in_order(graph)


class Stopped(L.Layer):
    def call(self, x):
        return tf.stop_gradient(x)


@pytest.mark.parametrize("scheme", ["vanilla", pytest.param("1f1b", marks=pytest.mark.wide)])
def test_shared_weights_without_a_gradient_in_their_last_stage(scheme, graphs):
    x = keras.Input((networks.FEATURES,))
    twice = L.Dense(networks.FEATURES)
    y = L.Activation("linear", name="first")(twice(x))
    z = Stopped()(twice(L.Activation("tanh", name="second")(y)))
    model = keras.Model(x, L.Dense(networks.CLASSES)(L.Add()([y, z])))
    pm = pipetrain.PipelineModel(model, scheme=scheme, cuts=("first", "second"))
    pm.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    networks.fit(pm, *networks.data(60))
    assert graphs
    for graph in graphs:
        assert_in_order(graph)


@BY_FUNCTIONS
def test_workers_fetch_nothing_from_this_process(way, monkeypatch):
    """They may not reach it, and are given what they need. Here all devices but the last one play workers."""
    host, made = pipeline.HOST.replace("CPU:0", "CPU:5"), function.call_of
    called = []

    def recording(concrete, *others):
        call = made(concrete, *others)

        def recorded(tensors):
            called.append((concrete, [each.device for each in tensors]))
            return call(tensors)

        return recorded

    monkeypatch.setattr(program_runner, "HOST", host)
    monkeypatch.setattr(function, "call_of", recording)
    for module in (function, arguments):
        monkeypatch.setattr(module, "is_remote", lambda device: device != host)
    pm = ways_to_train.made(way)
    ways_to_train.fit(pm)
    pm.evaluate(ways_to_train.X, ways_to_train.Y, verbose=0)
    assert called
    for concrete, devices in called:
        here = {each.op for each, device in zip(concrete.inputs, devices) if device == host}
        operations = concrete.graph.get_operations()
        here |= {each for each in operations if each.device == host}
        for each in operations:
            needed = {tensor.op for tensor in each.inputs} | {*each.control_inputs}
            assert each.device == host or each.type == "Placeholder" or not needed & here, f"{each.name} fetches"
