"""A straight-line NumPy reference of every asynchronous scheme: no threads, no pipeline, no package code.

A tanh MLP with a softmax cross-entropy head. Stage k's weights after v updates are kept in ``versions[k][v]`` for
ever, so each rule reads as it is written in the documentation. All of a stage's arrays are in one list.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

EPSILON = 1e-7


class Sgd(NamedTuple):
    """Keras' SGD, its slot called m."""

    mu: float = 0.9
    nesterov: bool = False
    decay: float = 0.0

    def step(self, slots, gradient, rate, t):
        m = self.mu * slots.get("m", 0.0) - rate * gradient
        return {"m": m}, self.mu * m - rate * gradient if self.nesterov else m


class Adam(NamedTuple):
    """Keras' Adam, and AdamW where there is decay."""

    decay: float = 0.0

    def step(self, slots, gradient, rate, t):
        m = 0.9 * slots.get("m", 0.0) + 0.1 * gradient
        v = 0.999 * slots.get("v", 0.0) + 0.001 * gradient**2
        unbiased = np.sqrt(1 - 0.999**t) / (1 - 0.9**t)
        return {"m": m, "v": v}, -rate * unbiased * m / (np.sqrt(v) + EPSILON)


class RmsProp(NamedTuple):
    """Keras' RMSprop."""

    mu: float = 0.0
    decay: float = 0.0

    def step(self, slots, gradient, rate, t):
        v = 0.9 * slots.get("v", 0.0) + 0.1 * gradient**2
        m = self.mu * slots.get("m", 0.0) + rate * gradient / np.sqrt(v + EPSILON)
        return {"m": m, "v": v}, -m


class Settings(NamedTuple):
    """How to train; ``rate(t)`` is the learning rate of the update after t others."""

    scheme: str
    rate: object
    optimizer: object = Sgd()
    spikes: bool = False
    rescale_steps: int = 0


class State:
    """What stages remember from one start of the pipeline to the next, and the updates so far."""

    def __init__(self, layers):
        self.layers, self.updates, self.slots, self.last, self.sums = layers, 0, {}, {}, {}


def train(settings, state, ends, batches):
    """Train ``state`` on ``batches`` from one start of the pipeline to its drain.

    ``state.layers`` are (kernel, bias) pairs, all tanh but the last; ``ends`` the index after each stage's last layer.
    """
    stages = [Stage(settings, state, k, len(ends), span) for k, span in enumerate(zip([0, *ends[:-1]], ends))]
    # Minibatch i's forward at stage k runs when the stage has made v_F updates; its backward when it has made i. In
    # this order every version that is read exists: backward i needs forward i, which needs versions up to i.
    for i, (x, y) in enumerate(batches):
        kept, activation = [], np.asarray(x, np.float64)
        for stage in stages:
            activation, saved = forward(stage.read("F", i), activation, stage is stages[-1])
            kept.append(saved)
        gradient = softmax(activation)
        gradient[np.arange(len(y)), y] -= 1.0
        gradient /= len(y)
        for stage in reversed(stages):
            gradient, by_weight = backward(stage.read("B", i), kept[stage.k], gradient, stage is stages[-1])
            stage.update(i, by_weight, state.updates + i)
    for stage in stages:
        stage.hand_back(state)
    state.updates += len(batches)


class Stage:
    """Stage k of N: every version of its weights, and of what the prediction from it needs."""

    def __init__(self, settings, state, k, stages, span):
        self.settings, self.k, self.stages, self.span = settings, k, stages, span
        arrays = [np.array(array, np.float64) for layer in state.layers[slice(*span)] for array in layer]
        none = [np.zeros_like(array) for array in arrays]
        self.slots = state.slots.get(k, [{} for _ in arrays])
        velocity, decay = state.last.get(k, (none, 0.0))
        self.versions, self.velocities, self.decays = [arrays], [velocity], [decay]
        self.sums = state.sums.get(k, (0.0, 0.0))
        self.ratios = [self.ratio()]

    def hand_back(self, state):
        flat = self.versions[-1]
        state.layers[slice(*self.span)] = list(zip(flat[::2], flat[1::2]))
        state.slots[self.k], state.sums[self.k] = self.slots, self.sums
        state.last[self.k] = self.velocities[-1], self.decays[-1]

    def read(self, op, i):
        """The weights of F(i) or B(i)."""
        late = self.stages - 1 - self.k
        newest, half = max(0, i - late), self.k // 2
        stale, ahead = min(i, late), 0
        version = newest if op == "F" else i
        match self.settings.scheme:
            case "vanilla" | "spike-compensation":
                pass
            case "weight-stashing":
                version = newest
            case "vertical-sync":
                version = max(0, i - (self.stages - 1))
            case "2bw":
                version = max(0, i - 1)
            case "spectrain" | "fitted":
                ahead = stale + half if op == "F" else half
            case "local":
                version, ahead = newest, stale
        return self.predicted(version, ahead, self.ratios[version] if self.settings.scheme == "fitted" else 1.0)

    def predicted(self, version, ahead, ratio):
        if not ahead:
            return self.versions[version]
        kept, steps = decayed(self.decays[version], ahead)
        return [kept * w + ratio * steps * v for w, v in zip(self.versions[version], self.velocities[version])]

    def update(self, i, gradients, t):
        """Minibatch i's gradients make version i + 1; ``t`` updates were made before, since training began."""
        settings, staleness = self.settings, i - self.forward_version(i)
        rate = settings.rate(t)
        if settings.rescale_steps:
            rate = rate / max(1, staleness) ** max(0.0, 1 - t / settings.rescale_steps)
        decay = settings.optimizer.decay * rate
        weights, velocity = [], []
        for n, (w, gradient) in enumerate(zip(self.versions[i], gradients)):
            self.slots[n], step = settings.optimizer.step(self.slots[n], gradient, rate, t + 1)
            velocity.append(step)
            if settings.spikes or settings.scheme == "spike-compensation":
                mu = settings.optimizer.mu
                step = mu**staleness * step - (1 - mu**staleness) / (1 - mu) * rate * gradient
            weights.append((1 - decay) * w + step)
        self.versions.append(weights)
        self.velocities.append(velocity)
        self.decays.append(decay)
        self.observe(i + 1)
        self.ratios.append(self.ratio())

    def forward_version(self, i):
        behind = {"vertical-sync": self.stages - 1, "2bw": 1}.get(self.settings.scheme, self.stages - 1 - self.k)
        return max(0, i - behind)

    def observe(self, version):
        """At versions 1 + h, 1 + 2h, ...: how far the weights went in h updates, along the velocity then."""
        horizon = self.stages - 1 - self.k + self.k // 2
        if horizon and version > 1 and (version - 1) % horizon == 0:
            then, velocity = self.versions[version - horizon], self.velocities[version - horizon]
            kept, steps = decayed(self.decays[version], horizon)
            gone = [now - kept * before for now, before in zip(self.versions[version], then)]
            along = sum((a * b).sum() for a, b in zip(gone, velocity)) / steps
            square = sum((v * v).sum() for v in velocity)
            self.sums = 0.95 * self.sums[0] + min(max(along, -4 * square), 4 * square), 0.95 * self.sums[1] + square

    def ratio(self):
        return max(0.0, self.sums[0]) / self.sums[1] if self.sums[1] else 1.0


def decayed(decay, updates):
    """What weight decay leaves of the weights, and how many velocities so many updates then add."""
    kept = (1 - decay) ** updates
    return kept, (1 - kept) / decay if decay else updates


def forward(weights, x, last_stage):
    """Through one stage; returns the output and what its backward needs."""
    saved = []
    for n, (kernel, bias) in enumerate(zip(weights[::2], weights[1::2])):
        linear = x @ kernel + bias
        output = linear if last_stage and 2 * n + 2 == len(weights) else np.tanh(linear)
        saved.append((x, output))
        x = output
    return x, saved


def backward(weights, saved, gradient, last_stage):
    """Back through one stage with these weights and forward's activations."""
    gradients = []
    for n in reversed(range(len(saved))):
        x, output = saved[n]
        linear = gradient if last_stage and n == len(saved) - 1 else gradient * (1.0 - output**2)
        gradients[:0] = [x.T @ linear, linear.sum(axis=0)]
        gradient = linear @ weights[2 * n].T
    return gradient, gradients


def softmax(logits):
    shifted = np.exp(logits - logits.max(axis=1, keepdims=True))
    return shifted / shifted.sum(axis=1, keepdims=True)
