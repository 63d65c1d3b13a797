"""A straight-line NumPy reference of every asynchronous scheme: no threads, no pipeline, no package code.

A tanh MLP with a softmax cross-entropy head, in which a layer's kernel may be the transpose of another's. Every copy's
weights after v updates are kept in ``versions[v]`` for ever, so each rule reads as it is written in the documentation.
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
    """Keras' Adam, and AdamW where there is decay; mu is its ``beta_1``."""

    decay: float = 0.0
    mu: float = 0.9

    def step(self, slots, gradient, rate, t):
        m = self.mu * slots.get("m", 0.0) + (1 - self.mu) * gradient
        v = 0.999 * slots.get("v", 0.0) + 0.001 * gradient**2
        unbiased = np.sqrt(1 - 0.999**t) / (1 - self.mu**t)
        return {"m": m, "v": v}, -rate * unbiased * m / (np.sqrt(v) + EPSILON)


class Lion(NamedTuple):
    """Keras' Lion, whose velocity the package has no formula for."""

    decay: float = 0.0

    def step(self, slots, gradient, rate, t):
        m = slots.get("m", 0.0)
        return {"m": 0.99 * m + 0.01 * gradient}, -rate * np.sign(0.9 * m + 0.1 * gradient)


class Nadam(NamedTuple):
    """Keras' Nadam, likewise."""

    mu: float = 0.9
    decay: float = 0.0

    def step(self, slots, gradient, rate, t):
        now, later = (self.mu * (1 - 0.5 * 0.96**n) for n in (t, t + 1))
        product = slots.get("product", 1.0) * now
        m = self.mu * slots.get("m", 0.0) + (1 - self.mu) * gradient
        v = 0.999 * slots.get("v", 0.0) + 0.001 * gradient**2
        ahead = later * m / (1 - product * later) + (1 - now) * gradient / (1 - product)
        step = -rate * ahead / (np.sqrt(v / (1 - 0.999**t)) + EPSILON)
        return {"m": m, "v": v, "product": product}, step


class RmsProp(NamedTuple):
    """Keras' RMSprop."""

    mu: float = 0.0
    decay: float = 0.0

    def step(self, slots, gradient, rate, t):
        v = 0.9 * slots.get("v", 0.0) + 0.1 * gradient**2
        m = self.mu * slots.get("m", 0.0) + rate * gradient / np.sqrt(v + EPSILON)
        return {"m": m, "v": v}, -m


class Settings(NamedTuple):
    """How to train; ``rate(t)`` is the learning rate after t minibatches.

    ``every`` so many minibatches are one update by the mean of their gradients. ``average`` is the momentum of the
    weights' averages, None for none, that replace the weights after every ``overwrites`` updates (0: never).
    ``microbatches`` and ``reach``: M and c of ``target``; ``horizon``: s of ``2bw``.
    """

    scheme: str
    rate: object
    optimizer: object = Sgd()
    spikes: bool = False
    rescale_steps: int = 0
    every: int = 1
    average: float | None = None
    overwrites: int = 0
    microbatches: int = 1
    reach: float = 1.0
    horizon: float = 0.0


def stretched(settings, stages):
    """The settings of ``target`` with M < N as it trains: a longer momentum, of SGD a smaller rate, and c = 1.5.

    None of it with M >= N, or for an optimizer without a momentum that is known.
    """
    m, optimizer, rate = settings.microbatches, settings.optimizer, settings.rate
    if m >= stages or not getattr(optimizer, "mu", 0):
        return settings
    factor = min(1.0, 1.6 / (1 + (stages - 1) / m))
    changed = {"mu": 1 - (1 - optimizer.mu) * factor}
    if isinstance(optimizer, Sgd | RmsProp):
        changed["decay"] = optimizer.decay / factor
        settings = settings._replace(rate=lambda t: factor * rate(t))
    return settings._replace(optimizer=optimizer._replace(**changed), reach=1.5)


def chosen(settings, stages, options):
    """The settings as they train so many stages, and the pipeline's options that ask for them."""
    options = {"scheme": settings.scheme, **options}
    if settings.scheme in ("local", "fitted", "target"):
        options |= {"scheme": "spectrain", "horizon": settings.scheme}
    if settings.scheme == "target":
        options["microbatches"] = settings.microbatches
        settings = stretched(settings, stages) if options.get("stretch_momentum", True) else settings
    if settings.horizon:
        options["horizon"] = settings.horizon
    return settings, options


class State:
    """What stages remember from one start of the pipeline to the next, and the updates so far.

    ``layers`` are (kernel, bias) pairs; ``tied`` says of which other layer a layer's kernel is the transpose.
    ``updates`` counts minibatches.
    """

    def __init__(self, layers, tied=()):
        self.layers, self.tied, self.updates = layers, dict(tied), 0
        self.slots, self.velocities, self.decays, self.sums = {}, {}, {}, {}
        self.gathered, self.averages = {}, {}
        self.heard = []  # of every forward: its rows, the sum of their losses, and how many are classified rightly

    def key(self, layer, which):
        """The name of a layer's kernel (0) or bias (1): tied kernels have that of the other layer."""
        return (self.tied.get(layer, layer) if which == 0 else layer), which

    def array(self, key):
        return self.layers[key[0]][key[1]]

    def applied(self, layer, pair):
        """The kernel and bias that a layer applies, from the pair that it trains."""
        kernel, bias = pair
        return [kernel.T if layer in self.tied else kernel, bias]

    def of_pair(self, layer, pair, kernel, bias):
        """The gradients of the pair, from those of kernel and bias."""
        return [kernel.T if layer in self.tied else kernel, bias]

    def assign(self, key, array):
        pair = list(self.layers[key[0]])
        pair[key[1]] = array
        self.layers[key[0]] = tuple(pair)


def train(settings, state, ends, batches):
    """Train ``state`` on ``batches`` from one start of the pipeline to its drain.

    All layers are tanh but the last; ``ends`` the index after each stage's last layer.
    """
    spans = list(zip([0, *ends[:-1]], ends))
    used = [{state.key(n, which) for n in range(*span) for which in (0, 1)} for span in spans]
    stages = [Stage(settings, state, k, spans, used) for k in range(len(ends))]
    # Minibatch i's forward at stage k runs when the stage has made v_F updates; its backward when it has made i. In
    # this order every version that is read exists: backward i needs forward i, which needs versions up to i.
    # A minibatch's microbatches are numbered on: those of minibatch i are i*M ... i*M + M-1.
    many = settings.microbatches
    for i, (x, y) in enumerate(batches):
        sums = {}
        for m in range(i * many, (i + 1) * many):
            rows = slice(*(len(y) * (m - i * many + n) // many for n in (0, 1)))
            kept, activation = [], np.asarray(x[rows], np.float64)
            for stage in stages:
                activation, saved = forward(stage.read("F", m), activation, stage is stages[-1])
                kept.append(saved)
            state.heard.append(heard(activation, y[rows]))
            gradient = softmax(activation)
            gradient[np.arange(len(y[rows])), y[rows]] -= 1.0
            gradient /= len(y)
            for stage in reversed(stages):
                gradient, by_weight = backward(stage.read("B", m), kept[stage.k], gradient, stage is stages[-1])
                for key, each in stage.by_key(m, by_weight):
                    sums[key] = sums.get(key, 0.0) + each
        for stage in stages:
            for copy in stage.copies:
                copy.update(i, sums, state.updates + i)
    for stage in reversed(stages):  # the first one's copies last
        for copy in stage.copies:
            copy.hand_back(state)
    state.updates += len(batches)


class Stage:
    """Stage k of N: its own weights, and a copy of those that it shares with the same other stages, for each such."""

    def __init__(self, settings, state, k, spans, used):
        self.k, self.state, self.span = k, state, spans[k]
        holders = {key: tuple(j for j, keys in enumerate(used) if key in keys) for key in used[k]}
        self.copies = [
            Copy(settings, state, k, len(spans), sorted(key for key in used[k] if holders[key] == group), group)
            for group in sorted({*holders.values()})
        ]

    def pairs(self, op, m):
        """What every layer trains, for F(m) or B(m)."""
        values = {key: array for copy in self.copies for key, array in zip(copy.keys, copy.read(op, m))}
        return [[values[self.state.key(n, which)] for which in (0, 1)] for n in range(*self.span)]

    def read(self, op, m):
        """The kernel and bias of every layer, for F(m) or B(m)."""
        each = zip(range(*self.span), self.pairs(op, m))
        return [array for n, pair in each for array in self.state.applied(n, pair)]

    def by_key(self, m, gradients):
        """The gradients of B(m), which are those of what ``read`` gives, by the weights' names."""
        each = zip(range(*self.span), self.pairs("B", m), gradients[::2], gradients[1::2])
        for n, pair, kernel, bias in each:
            for which, gradient in enumerate(self.state.of_pair(n, pair, kernel, bias)):
                yield self.state.key(n, which), gradient


class Copy:
    """Stage k's copy of weights that the ``holders`` have: every version of it, and of what predictions need."""

    def __init__(self, settings, state, k, stages, keys, holders):
        self.settings, self.k, self.stages, self.keys, self.holders = settings, k, stages, keys, holders
        self.first = holders[0]
        arrays = [np.array(state.array(key), np.float64) for key in keys]
        self.slots = [dict(state.slots.get(key, {})) for key in keys]
        self.gathered, self.averages = (
            [each.get(key, 0.0) for key in keys] for each in (state.gathered, state.averages)
        )
        self.before = state.updates
        velocity = [state.velocities.get(key, np.zeros_like(array)) for key, array in zip(keys, arrays)]
        self.versions, self.velocities = [arrays], [velocity]
        self.decays = [state.decays.get(keys[0], 0.0) if keys else 0.0]
        self.sums = state.sums.get((k, holders), (0.0, 0.0))
        self.ratios = [self.ratio()]

    def hand_back(self, state):
        state.sums[self.k, self.holders] = self.sums
        for key, array, slots, velocity in zip(self.keys, self.versions[-1], self.slots, self.velocities[-1]):
            state.assign(key, array)
            state.slots[key], state.velocities[key], state.decays[key] = slots, velocity, self.decays[-1]
        for key, gathered, average in zip(self.keys, self.gathered, self.averages):
            state.gathered[key], state.averages[key] = gathered, average

    def read(self, op, m):
        """The weights of F(m) or B(m): stage k knows what the first holder had completed when its last F came."""
        many, i = self.settings.microbatches, m // self.settings.microbatches
        newest, current = max(0, m - (self.stages - 1 - self.first)), max(0, m - (self.k - self.first))
        version, ahead = (newest if op == "F" else current) // many, 0
        match self.settings.scheme:
            case "vanilla" | "spike-compensation":
                pass
            case "weight-stashing":
                version = newest
            case "vertical-sync":
                version = max(0, i - (self.stages - 1))
            case "2bw":
                version, ahead = (i - 1, self.settings.horizon) if i else (0, 0)
            case "target":
                target = (max(0, m - (self.stages - 1 - self.k)) + self.settings.reach * (self.stages - 1)) / many
                ahead = max(0.0, target - version)
            case "spectrain" | "fitted":
                ahead = i - version + self.k // 2
            case "local":
                version, ahead = newest, i - newest
            case other:
                raise ValueError(f"The reference has no rule for {other}.")
        done, every = self.before + version, self.settings.every
        ahead = (done + ahead) // every - done // every if every > 1 else ahead
        return self.predicted(version, ahead, self.ratios[version] if self.settings.scheme == "fitted" else 1.0)

    def predicted(self, version, ahead, ratio):
        if not ahead:
            return self.versions[version]
        kept, steps = decayed(self.decays[version], ahead)
        return [kept * w + ratio * steps * v for w, v in zip(self.versions[version], self.velocities[version])]

    def update(self, i, gradients, t):
        """Minibatch i's gradients make version i + 1, after ``t`` other minibatches since training began."""
        settings, staleness = self.settings, i - self.forward_version(i)
        rate = settings.rate(t)
        if settings.rescale_steps:
            rate = rate / max(1, staleness) ** max(0.0, 1 - t / settings.rescale_steps)
        decay = settings.optimizer.decay * rate
        t, within = divmod(t, settings.every)
        weights, velocity = [], []
        for n, (w, key) in enumerate(zip(self.versions[i], self.keys)):
            gradient = self.gathered[n] = self.gathered[n] + gradients[key] / settings.every
            if within < settings.every - 1:  # the next version is like this one
                decay = self.decays[i]
                velocity.append(self.velocities[i][n])
                weights.append(self.averaged(n, w, t))
                continue
            self.gathered[n] = 0.0
            self.slots[n], step = settings.optimizer.step(self.slots[n], gradient, rate, t + 1)
            velocity.append(step)
            if settings.spikes or settings.scheme == "spike-compensation":
                mu = settings.optimizer.mu
                step = mu**staleness * step - (1 - mu**staleness) / (1 - mu) * rate * gradient
            weights.append(self.averaged(n, (1 - decay) * w + step, t))
        self.versions.append(weights)
        self.velocities.append(velocity)
        self.decays.append(decay)
        self.observe(i + 1)
        self.ratios.append(self.ratio())

    def averaged(self, n, weight, t):
        """Average; gives the weight, or what replaces it. The first average is the weight itself."""
        momentum, overwrites = self.settings.average, self.settings.overwrites
        if momentum is None:
            return weight
        self.averages[n] = momentum * self.averages[n] + (1 - momentum) * weight if t else weight
        return self.averages[n] if overwrites and (t + 1) % overwrites == 0 else weight

    def forward_version(self, i):
        """What F(i) of the first stage that has the weights reads."""
        behind = {"vertical-sync": self.stages - 1, "2bw": 1}.get(self.settings.scheme, self.stages - 1 - self.first)
        return max(0, i - behind)

    def observe(self, version):
        """At versions 1 + h, 1 + 2h, ...: how far the weights went in h updates, along the velocity then."""
        horizon = self.stages - 1 - self.first + self.k // 2
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


def heard(logits, labels):
    """The rows, the sum of their losses, and how many are classified rightly."""
    chosen = softmax(logits)[np.arange(len(labels)), labels]
    return len(labels), -np.log(chosen).sum(), int((logits.argmax(axis=1) == labels).sum())


def means(heard):
    """The loss and the accuracy of all that was heard."""
    rows, losses, right = np.sum(heard, axis=0)
    return losses / rows, right / rows
