"""Trains on workers while whatever they have copies of is changed in between; prints how that went, as JSON.

``python worker_copies.py SCHEME``: once as usual, and once with every value sent whenever workers take them. Of both it
prints a digest of all weights after each epoch, and how many values were sent in the epoch's beginning.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

WORKERS, ROWS, BATCH = 2, 24, 8


def changes(pm, path):
    """What callbacks do at the ends of epochs, by name; each after an epoch that nothing was done after."""
    import numpy as np

    model, generator = pm.model, np.random.default_rng(1)
    normalization = model.get_layer("normalization")
    dense, frozen, dropout = map(model.get_layer, ("first", "frozen", "dropout"))

    def other(variable):
        variable.assign(generator.normal(size=variable.shape).astype("float32") ** 2)

    def momentum():
        slots = [each for each in pm.optimizer.variables if each.path.endswith("first_kernel_momentum")]
        other(*slots)

    return {
        "nothing": lambda: None,
        "the same values": lambda: model.set_weights(model.get_weights()),
        "one element": lambda: dense.kernel.assign(_with_other_element(dense.kernel.numpy())),
        "a statistic": lambda: other(normalization.moving_mean),
        "a frozen weight": lambda: other(frozen.kernel),
        "a seed": lambda: dropout.seed_generator.state.assign([5, 7]),
        "a slot": momentum,
        "a layer's weights": lambda: dense.set_weights([generator.normal(size=each.shape) for each in dense.weights]),
        "a file": lambda: model.load_weights(path),
        "the count": lambda: pm.optimizer.iterations.assign(3),
    }


def _with_other_element(values):
    values[0, 0] += 1e-3
    return values


def network():
    import keras
    import networks

    keras.utils.set_random_seed(0)
    layers = [
        keras.Input((networks.FEATURES,)),
        keras.layers.Dense(64, "tanh", name="first"),
        keras.layers.BatchNormalization(name="normalization"),
        keras.layers.Dropout(0.2, seed=3, name="dropout"),
        keras.layers.Dense(64, "tanh", name="frozen", trainable=False),
        keras.layers.Dense(networks.CLASSES, name="last"),
    ]
    return keras.Sequential(layers)


def digest(arrays):
    return hashlib.sha256(b"".join(each.tobytes() for each in arrays)).hexdigest()


def trained(scheme, devices, data, folder):
    """Digests and counts: of a fit, one of plain Keras' on the same model, a second one, and one that is resumed."""
    import keras
    import networks

    from pipetrain.callbacks import PipelineCheckpoint
    from pipetrain.compute.functions.flat_values import WorkerCopies

    sent, own = [0], WorkerCopies._differ

    def counted(self, copies, values):
        differ = own(self, copies, values)
        sent[-1] += sum(differ)
        return differ

    model = network()
    path = f"{folder}/w.weights.h5"
    model.save_weights(path)
    pm = networks.in_way(model, WORKERS, scheme, devices=devices)
    pm.compile(keras.optimizers.SGD(0.05, momentum=0.9), networks.crossentropy())
    made = changes(pm, path)
    names, digests = list(made), []

    class Change(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            sent.append(0)

        def on_epoch_end(self, epoch, logs=None):
            digests.append(digest(pm.get_weights()))
            if epoch % 2 == 0:
                made[names[epoch // 2]]()

    WorkerCopies._differ = counted
    try:
        settings = {"batch_size": BATCH, "verbose": 0, "shuffle": False}
        pm.fit(*data, epochs=2 * len(made), callbacks=[Change()], **settings)
        of_changes = sent[1:]
        model.compile("sgd", networks.crossentropy())
        model.fit(*data, **settings)
        pm.fit(*data, **settings)
        digests.append(digest(pm.get_weights()))
        for epochs in (1, 2):
            pm.fit(*data, epochs=epochs, callbacks=[PipelineCheckpoint(f"{folder}/kept")], **settings)
            digests.append(digest(pm.get_weights()))
            model.set_weights([each * 2 for each in model.get_weights()])
    finally:
        WorkerCopies._differ = own
    return {"digests": digests, "sent": dict(zip(names, zip(of_changes[1::2], of_changes[2::2])))}


def main(scheme):
    import networks

    import pipetrain

    with pipetrain.LocalWorkers(WORKERS) as workers:
        devices = pipetrain.connect(workers.addresses)
        from pipetrain.compute.functions import flat_values

        data = networks.data(ROWS)
        found = {}
        for name, worth_bytes in {"asked": flat_values.WORTH_BYTES, "sent": 10**9}.items():
            flat_values.WORTH_BYTES = worth_bytes
            with tempfile.TemporaryDirectory() as folder:
                found[name] = trained(scheme, devices, data, folder)
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
