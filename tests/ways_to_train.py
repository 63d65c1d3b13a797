"""Every way to train one small network, compiled once in a process, and what it is to come to.

Synchronous ways come to what plain Keras comes to; the others have a rule, by which ``reference`` trains.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import keras
import networks
import numpy as np
import parameters
import pytest
import reference
from transfer_plans import late_plan, returned_plan

from pipetrain.schemes.grid import Grid
from pipetrain.schemes.table import PIPELINES

DEPTH, WIDTH, BATCH, ROWS = 4, 8, 8, 50  # whose last minibatch has fewer rows than microbatches or devices
PIECES, RATE = 3, 0.05
X, Y = networks.data(ROWS)


class Way(NamedTuple):
    """The options of a PipelineModel; the rule of one that is asynchronous; whether it clips by all gradients' norm."""

    options: dict
    rule: reference.Settings | None = None
    clips: bool = False

    @property
    def scheme(self):
        return self.options["scheme"]

    @property
    def is_pipeline(self):
        return self.scheme in PIPELINES

    @property
    def stages(self):
        return len(self.options.get("cuts", ())) + 1


class Outcome(NamedTuple):
    """Weights after training, what it said of every epoch, and an evaluation."""

    weights: list
    history: dict
    evaluation: list


def on(count):
    return tuple(f"CPU:{n}" for n in range(count))


def asynchronous(name, rule=None, stages=3, options=None):
    """A pipeline of so many stages; ``rule`` has what its settings have beside the scheme."""
    settings = reference.Settings(name, lambda t: RATE, **(rule or {}))
    _, given = reference.chosen(settings, stages, options or {})
    return Way({"cuts": networks.cuts(DEPTH, stages), **given}, settings)


def synchronous(scheme, stages=3, clips=False, **options):
    return Way({"scheme": scheme, "cuts": networks.cuts(DEPTH, stages), "microbatches": PIECES, **options}, clips=clips)


def copies(scheme, devices=3, clips=False, **options):
    return Way({"scheme": scheme, "devices": on(devices), **options}, clips=clips)


CORRECTED = {"spike_compensation": True, "rescale_steps": 20}
WAYS = {
    **{name: asynchronous(name) for name in ("vanilla", "weight-stashing", "vertical-sync", "spike-compensation")},
    "spectrain": asynchronous("spectrain"),
    "spectrain, four stages": asynchronous("spectrain", stages=4),
    "spectrain, local": asynchronous("local"),
    "spectrain, fitted": asynchronous("fitted"),
    "spectrain, target": asynchronous("target", {"microbatches": 2}),
    "spectrain, corrected": asynchronous("spectrain", {"spikes": True, "rescale_steps": 20}, options=CORRECTED),
    "spectrain, recompute": asynchronous("spectrain", options={"recompute": True}),
    "spectrain, replicas": asynchronous("spectrain", options={"replicas": (1, 2, 1)}),
    "2bw": asynchronous("2bw", options={"microbatches": PIECES}),
    "2bw, predicted": asynchronous("2bw", {"horizon": 1.5}, options={"microbatches": PIECES}),
    "gpipe": synchronous("gpipe"),
    "1f1b": synchronous("1f1b", clips=True),
    "1f1b, recompute": synchronous("1f1b", recompute=True),
    "1f1b, replicas": synchronous("1f1b", stages=2, replicas=(2, 1), clips=True),
    **{name: synchronous(name, stages=2, devices=on(2)) for name in ("zb-h1", "zb-h2")},
    **{name: synchronous(name, stages=4, devices=on(2)) for name in ("interleaved", "looped-bfs")},
    **{name: synchronous(name, stages=4, devices=on(2)) for name in ("zb-v", "v-half", "v-min")},
    "all-reduce": copies("all-reduce", clips=True, order="layerwise"),
    "all-reduce, late": copies("all-reduce", order=late_plan(networks.mlp(DEPTH, WIDTH))),
    "parameter-server": copies("parameter-server", clips=True, order="push-pull"),
    "parameter-server, returned": copies("parameter-server", order=returned_plan(networks.mlp(DEPTH, WIDTH))),
    "grid": copies("grid", 2, clips=True, grid=Grid(2, 1, ("d1", "d2"))),
    "grid, rows": copies("grid", 4, grid=(2, 2)),
    "coded-reduce": copies("coded-reduce", 4, clips=True, children=4),
    "coded-reduce, three": copies("coded-reduce", children=3),
    "data-parallel": copies("data-parallel", clips=True),
    "single": Way({"scheme": "single"}, clips=True),
}
TO_THE_BIT = tuple(name for name in WAYS if name != "coded-reduce, three")  # whose sums are as workers come
WITH_AUTO = {**WAYS, "auto": copies("auto", 2)}
EACH_MECHANISM = ("spectrain", "zb-v", "all-reduce", "grid", "coded-reduce", "single")
WITH_LATE = (*EACH_MECHANISM, "all-reduce, late")  # gradients that are left to the next step
OTHER_CASES = (  # of a mechanism that another way has too; and data-parallel, whose own tests cover more
    *(
        "spike-compensation",
        "spectrain, four stages",
        "spectrain, local",
        "spectrain, recompute",
        "spectrain, replicas",
    ),
    *("2bw, predicted", "spectrain, corrected", "all-reduce, late", "gpipe"),
    *("2bw", "1f1b, recompute", "zb-h1", "zb-h2", "interleaved", "looped-bfs", "v-half", "v-min", "grid, rows"),
    *("parameter-server, returned", "coded-reduce, three", "data-parallel"),
)
MOST = tuple(name for name in WAYS if name not in OTHER_CASES)


def over(*names, default=None, wide=()):
    """A law over these ways, or all that give the same bits twice.

    Those of ``default`` run by default, those of ``wide`` in that tier, the others with ``-m slow``.
    """
    chosen = names or TO_THE_BIT
    return pytest.mark.parametrize("way", parameters.by_default(chosen, *(default or chosen), wide=wide))


def pipelines():
    return [name for name, way in WAYS.items() if way.is_pipeline]


def network(way):
    """That of the reference; a synchronous one has penalties, too."""
    networks.draw_from(0)
    penalty = None if way.rule else keras.regularizers.L2(0.01)
    layers = [keras.layers.Dense(WIDTH, "tanh", kernel_regularizer=penalty, name=f"d{n}") for n in range(DEPTH - 1)]
    return keras.Sequential([keras.Input((networks.FEATURES,)), *layers, keras.layers.Dense(networks.CLASSES)])


def compiled(model, way):
    clips = {"nesterov": True, "global_clipnorm": 0.3} if way.clips else {}
    model.compile(keras.optimizers.SGD(RATE, momentum=0.9, **clips), networks.crossentropy(), metrics=["accuracy"])
    return model


def made(name):
    """A new PipelineModel of the way."""
    way = WITH_AUTO[name]
    return compiled(networks.in_way(network(way), **way.options), way)


@cache
def _standard(name):
    pm = made(name)
    return pm, pm.get_weights()


def anew(name):
    """The way's model, which is compiled once, with its first weights and an optimizer that has gathered nothing."""
    pm, weights = _standard(name)
    if name == "spectrain, fitted":  # what it has fitted is no variable
        compiled(pm, WAYS[name])
    networks.begin_anew(pm, weights)
    networks.draw_from(0)
    return pm


def fit(model, rows=ROWS, **settings):
    return networks.fit(model, X[:rows], Y[:rows], **{"batch_size": BATCH, **settings})


def outcome(model, rows=ROWS, epochs=2, **settings):
    history = networks.without_figures(fit(model, rows, epochs=epochs, **settings).history)
    evaluation = model.evaluate(X, Y, batch_size=20, verbose=0)
    return Outcome(model.get_weights(), history, evaluation)


@cache
def undisturbed(name):
    """What it comes to in two epochs, the same for all laws."""
    return outcome(anew(name))


@cache
def expected(name, rows=ROWS):
    """What the way is to come to in two epochs."""
    way = WITH_AUTO[name]
    return by_its_rule(way, rows) if way.rule else of_plain_keras(way.clips, rows)


@cache
def of_plain_keras(clips, rows):
    way = Way({}, clips=clips)
    return outcome(compiled(network(way), way), rows)


def by_its_rule(way, rows):
    settings, _ = reference.chosen(way.rule, way.stages, {})
    state = reference.State([tuple(layer.get_weights()) for layer in network(way).layers])
    batches = [(X[n : min(n + BATCH, rows)], Y[n : min(n + BATCH, rows)]) for n in range(0, rows, BATCH)]
    history = {"loss": [], "accuracy": []}
    for _ in range(2):
        state.heard = []
        reference.train(settings, state, networks.ends(DEPTH, way.stages), batches)
        for name, value in zip(("loss", "accuracy"), reference.means(state.heard)):
            history[name].append(value)
    weights = [array for layer in state.layers for array in layer]
    logits, _ = reference.forward(weights, X, True)
    return Outcome(weights, history, list(reference.means([reference.heard(logits, Y)])))


def assert_came_to(got, want, tolerance=1e-5):
    networks.assert_close(got.weights, want.weights, tolerance)
    assert got.history.keys() == want.history.keys()
    for name, values in want.history.items():
        np.testing.assert_allclose(got.history[name], values, rtol=1e-4, err_msg=name)
    np.testing.assert_allclose(got.evaluation, want.evaluation, rtol=1e-4)


def assert_bitwise(got, want):
    networks.assert_equal(got.weights, want.weights)
    assert got.history == want.history and got.evaluation == want.evaluation
