"""A cut model against the whole one: outputs, loss, and every gradient."""

from __future__ import annotations

import sys
from itertools import product

import keras
import numpy as np
import tensorflow as tf

from pipetrain.compute.functions.backward import over_stages
from pipetrain.compute.functions.stage import Stage
from pipetrain.compute.functions.stage_values import BoundaryTensors
from pipetrain.compute.functions.weight_binding import Newest
from pipetrain.compute.graph.blocks import Chain


def sample(model, rows=2, seed=0):
    """Inputs of the model's shapes: normal where they are floating-point, small numbers where they are not."""
    rng = np.random.default_rng(seed)
    inputs = []
    for tensor in model.inputs:
        shape = [rows, *(size or 6 for size in tensor.shape[1:])]
        numbers = 2 if "segment" in tensor.name else 5
        values = rng.normal(size=shape) if "float" in tensor.dtype else rng.integers(0, numbers, shape)
        inputs.append(tf.cast(values, tensor.dtype))
    return inputs


def squares(y, outputs, sample_weight):
    """A loss that any outputs have."""
    return tf.add_n([tf.reduce_mean(tf.cast(output, "float32") ** 2) for output in outputs])


def whole(model, inputs):
    """Loss, outputs, the gradient of every weight and the new state, by Keras and one tape."""
    weights = [tf.convert_to_tensor(variable.value) for variable in model.trainable_variables]
    state = [tf.convert_to_tensor(variable.value) for variable in model.non_trainable_variables]

    @tf.function(autograph=False)
    def step(weights, state, inputs):
        with tf.GradientTape() as tape:
            tape.watch(weights)
            given = keras.tree.pack_sequence_as(model.input, inputs)
            outputs, state, penalties = model.stateless_call(weights, state, given, training=True, return_losses=True)
            outputs = keras.tree.flatten(outputs)
            loss = squares(None, outputs, None)
            total = tf.add_n([loss, *penalties])
        return loss, outputs, tape.gradient(total, weights), state

    any_rows = [tf.TensorSpec([None, *x.shape[1:]], x.dtype) for x in inputs]  # as the stages are traced
    return step.get_concrete_function(weights, state, any_rows)(weights, state, inputs)


def cut(model, stages):
    """``stages`` stages, each with as many blocks, traced."""
    chain = Chain(model)
    blocks = len(chain.blocks)
    ends = [blocks * (n + 1) // stages for n in range(stages)]
    parts, masks = [], [None] * len(chain.specs(0))
    for first, end in zip([0, *ends[:-1]], ends, strict=True):
        loss = squares if end == blocks else None
        segment = chain.segment(first, end)
        parts.append(Stage(segment, "/device:CPU:0", keras.optimizers.SGD(0.1), loss))
        masks = parts[-1].trace(masks, (None, None) if loss else None)
    return parts


def through(parts, model, inputs, recompute, halved=False):
    """What ``whole`` gives, through these stages; by backwards in halves if these are wanted."""
    values, results = BoundaryTensors(inputs, [None] * len(inputs)), []
    for part in parts:
        part.recompute = recompute  # asked for when it runs: stages are traced alike
        part.load()
        results.append(part.forward(Newest(), values, (None, None) if part is parts[-1] else None))
        values = results[-1].output
    gradients, state, returned = {}, {}, [1.0]
    for part, result in zip(reversed(parts), reversed(results), strict=True):
        if halved:
            pulled, operands = part.input_gradients(Newest(), result.kept, returned, 1.0)
            by_weight = part.backward(Newest(), operands, [], 1.0).gradients
        else:
            pulled = part.backward(Newest(), result.kept, returned, 1.0)
            by_weight = pulled.gradients
        returned = pulled.by_input
        for variable, gradient in zip(part.segment.trainable_variables, by_weight, strict=True):
            gradients[id(variable)] = over_stages(gradients.get(id(variable)), gradient)
        after = part.snapshot()[len(part.variables) :]
        state.update(zip(map(id, part.segment.non_trainable_variables), after, strict=True))
    by_weight = [gradients[id(variable)] for variable in model.trainable_variables]
    return results[-1].loss, values.tensors, by_weight, [state[id(each)] for each in model.non_trainable_variables]


def worst(got, expected):
    """The largest difference over all tensors, relative to the largest element of any."""
    largest, difference = 0.0, 0.0
    for a, b in zip(got, expected, strict=True):
        assert (a is None) == (b is None)
        if a is None:
            continue
        a, b = (np.asarray(tf.cast(tf.convert_to_tensor(each), "float64")) for each in (a, b))
        assert a.shape == b.shape
        if b.size:
            largest, difference = max(largest, np.abs(b).max()), max(difference, np.abs(a - b).max())
    return difference / largest if difference else 0.0


def error(model, *counts, rows=2, recompute=(False,), halved=(False,)):
    """The worst difference of outputs, loss, gradients and state between the model cut into stages and whole.

    ``counts`` are the numbers of stages to try; each with ``recompute`` as in all of these, and with backwards that are
    ``halved`` or not as in all of these.
    """
    inputs = sample(model, rows)
    expected, errors = whole(model, inputs), []
    for stages in counts:
        parts = cut(model, stages)
        for ways in product(recompute, halved):
            got = through(parts, model, inputs, *ways)
            errors += [worst([got[0]], [expected[0]]), *map(worst, got[1:], expected[1:])]
    assert np.isfinite(errors).all()
    return max(errors)


def error_of_application(name, *counts):
    """The same for a network of ``keras.applications``, on images as small as it takes."""
    # Grappler regroups sums over the whole model, which a cut keeps it from: not what is looked for here.
    tf.config.optimizer.set_experimental_options({"arithmetic_optimization": False})
    try:
        keras.utils.set_random_seed(0)
        size = 75 if name in ("InceptionV3", "InceptionResNetV2", "Xception") else 32
        model = getattr(keras.applications, name)(weights=None, input_shape=(size, size, 3), classes=5)
        return error(model, *counts, rows=8, halved=(False, True))
    finally:
        tf.config.optimizer.set_experimental_options({"arithmetic_optimization": True})


if __name__ == "__main__":
    print(error_of_application(sys.argv[1], *map(int, sys.argv[2:])))
