"""A straight-line NumPy reference of every asynchronous scheme: no threads, no pipeline, no package code.

A tanh MLP with a softmax cross-entropy head under momentum SGD. Stage k's weights after v updates are kept in
``versions[k][v]`` for ever, so each rule reads as it is written in the documentation.
"""

from __future__ import annotations

import numpy as np


def train(scheme, layers, ends, batches, learning_rate, momentum, velocity=None):
    """Train on ``batches`` from one start of the pipeline to its drain; returns (layers, velocity).

    ``layers`` are (kernel, bias) pairs, all tanh but the last; ``ends`` the index after each stage's last layer.
    """
    stages = len(ends)
    spans = list(zip([0, *ends[:-1]], ends))
    start = [[tuple(np.array(a, np.float64) for a in layers[j]) for j in range(a, b)] for a, b in spans]
    versions = [[stage] for stage in start]
    if velocity is None:
        velocity = [[tuple(np.zeros_like(a) for a in layer) for layer in stage] for stage in start]
    velocities = [[v] for v in velocity]  # velocities[k][v]: the slot when the weights are versions[k][v]

    # Minibatch i's forward at stage k runs when the stage has made v_F updates; its backward when it has made i. In
    # this order every version that is read exists: backward i needs forward i, which needs versions up to i.
    for i, (x, y) in enumerate(batches):
        kept, activation = [], np.asarray(x, np.float64)
        for k in range(stages):
            activation, saved = forward(
                read(scheme, "F", i, k, stages, versions, velocities), activation, k == stages - 1
            )
            kept.append(saved)
        gradient = softmax(activation)
        gradient[np.arange(len(y)), y] -= 1.0
        gradient /= len(y)
        for k in reversed(range(stages)):
            weights = read(scheme, "B", i, k, stages, versions, velocities)
            gradient, by_weight = backward(weights, kept[k], gradient, k == stages - 1)
            moved = [
                tuple(momentum * m - learning_rate * g for m, g in zip(slots, gradients))
                for slots, gradients in zip(velocities[k][i], by_weight)
            ]
            velocities[k].append(moved)
            versions[k].append([tuple(w + m for w, m in zip(ws, ms)) for ws, ms in zip(versions[k][i], moved)])
    return [layer for k in range(stages) for layer in versions[k][-1]], [v[-1] for v in velocities]


def read(scheme, op, i, k, stages, versions, velocities):
    """The weights of F(i) or B(i) at stage k."""
    newest = max(0, i - (stages - 1 - k))
    if scheme == "vanilla":
        return versions[k][newest] if op == "F" else versions[k][i]
    if scheme == "weight-stashing":
        return versions[k][newest]
    if scheme == "vertical-sync":
        return versions[k][max(0, i - (stages - 1))]
    assert scheme == "spectrain"
    version = newest if op == "F" else i
    ahead = min(i, stages - 1 - k) + k // 2 if op == "F" else k // 2
    return [
        tuple(w + ahead * m for w, m in zip(ws, ms)) for ws, ms in zip(versions[k][version], velocities[k][version])
    ]


def forward(weights, x, last_stage):
    """Through one stage; returns the output and what its backward needs."""
    saved = []
    for n, (kernel, bias) in enumerate(weights):
        linear = x @ kernel + bias
        output = linear if last_stage and n == len(weights) - 1 else np.tanh(linear)
        saved.append((x, output))
        x = output
    return x, saved


def backward(weights, saved, gradient, last_stage):
    """Back through one stage with these weights and forward's activations."""
    gradients = []
    for n in reversed(range(len(weights))):
        x, output = saved[n]
        linear = gradient if last_stage and n == len(weights) - 1 else gradient * (1.0 - output**2)
        gradients.append((x.T @ linear, linear.sum(axis=0)))
        gradient = linear @ weights[n][0].T
    return gradient, gradients[::-1]


def softmax(logits):
    shifted = np.exp(logits - logits.max(axis=1, keepdims=True))
    return shifted / shifted.sum(axis=1, keepdims=True)
