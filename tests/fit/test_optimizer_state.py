"""What an optimizer has gathered, by every way in which Keras gives, sets, saves and loads it."""

from __future__ import annotations

import copy
import pickle
import re

import inside
import keras
import networks
import numpy as np
import parameters
import pytest
from networks import compiled, fit
from parameters import by_default

import pipetrain
from pipetrain.schemes.table import NAMES

X, Y = networks.data(80)  # four minibatches
SYNCHRONOUS = ("1f1b", "gpipe", "single", "data-parallel")


def momentum():
    return keras.optimizers.SGD(0.05, momentum=0.9)


OPTIMIZERS = {
    "momentum": momentum,
    "plain": lambda: keras.optimizers.SGD(0.05),
    "nesterov": lambda: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True),
    "decaying": lambda: keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 3, 0.5), momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.01, amsgrad=True),
    "nadam": lambda: keras.optimizers.Nadam(0.01),  # with what is of no single weight
    "rmsprop": lambda: keras.optimizers.RMSprop(0.01, momentum=0.5, centered=True),
    "adagrad": lambda: keras.optimizers.Adagrad(0.05),  # whose slots do not begin with zero
    "adafactor": lambda: keras.optimizers.Adafactor(0.01),
    "lion": lambda: keras.optimizers.Lion(0.001),
    "muon": lambda: keras.optimizers.Muon(0.01),  # has slots for some weights only
}


def make(scheme, optimizer=momentum):
    if scheme != "data-parallel":
        return compiled(scheme, optimizer=optimizer())
    pm = pipetrain.PipelineModel(networks.small(), scheme=scheme, devices=("CPU:0", "CPU:1"))
    pm.compile(optimizer(), networks.crossentropy())
    return pm


def state(model):
    """The optimizer's variables, by their names in Keras but for the optimizer's own and the model's."""
    variables = model.optimizer.variables
    names = [re.sub(r"^small_|(?<=^variable)_\d+$", "", variable.path.split("/")[-1]) for variable in variables]
    unique = [name if names.count(name) == 1 else f"{name} {n}" for n, name in enumerate(names)]
    return {name: variable.numpy() for name, variable in zip(unique, variables)}


def stages_state(pm):
    """The slots at work in the stages, by weight and kind."""
    return {(slot.weight.path, slot.kind): slot.variable.numpy() for slot in inside.stages(pm).slots()}


def assert_same(one, other, tolerance=0.0):
    assert list(one) == list(other)
    for name in one:
        np.testing.assert_allclose(one[name], other[name], rtol=tolerance, atol=tolerance, err_msg=name)


def by_keras_file(trained, fresh, folder):
    """The whole model in a file; what is loaded is compiled, and trains on by itself."""
    trained.save(folder / "m.keras")
    return keras.models.load_model(folder / "m.keras")


def by_wrapping(trained, fresh, folder):
    """A loaded model, trained on as a pipeline, by the optimizer it has."""
    loaded = by_keras_file(trained, fresh, folder)
    if isinstance(trained, pipetrain.PipelineModel):
        parts = networks.parts(trained.scheme, "d1")
        pm = pipetrain.PipelineModel(loaded, **parts, scheme=trained.scheme, devices=("CPU:0", "CPU:1"))
        pm.compile(loaded.optimizer, networks.crossentropy())
        return pm
    return loaded


def by_weights_file(trained, fresh, folder):
    trained.save_weights(folder / "w.weights.h5")
    with fresh.distribute_strategy.scope():
        fresh.optimizer.build(fresh.trainable_variables)  # as Keras wants it, else it leaves the slots out
    fresh.load_weights(folder / "w.weights.h5")
    return fresh


def by_variables(trained, fresh, folder):
    fresh.set_weights(trained.get_weights())
    with fresh.distribute_strategy.scope():
        fresh.optimizer.build(fresh.trainable_variables)
        for mine, theirs in zip(fresh.optimizer.variables, trained.optimizer.variables):
            mine.assign(theirs.numpy())
    return fresh


def by_own_variables(trained, fresh, folder):
    store = {}
    trained.optimizer.save_own_variables(store)
    fresh.set_weights(trained.get_weights())
    fit(fresh, X[:8], Y[:8], epochs=1)  # and other slots than these before
    fresh.set_weights(trained.get_weights())
    with fresh.distribute_strategy.scope():
        fresh.optimizer.load_own_variables(store)
    return fresh


def by_state_tree(trained, fresh, folder):
    fit(fresh, X[:8], Y[:8], epochs=1)
    tree = trained.get_state_tree("numpy_array")
    fresh.set_state_tree(_renamed(tree, fresh))
    return fresh


def _renamed(tree, model):
    """The state tree for an optimizer of another name."""
    (variables,) = tree["optimizer_variables"].values()
    return {**tree, "optimizer_variables": {model.optimizer.name: variables}}


def by_compile_again(trained, fresh, folder):
    trained.compile(trained.optimizer, networks.crossentropy())
    return trained


def by_compile_config(trained, fresh, folder):
    """The settings go by the config, the slots by themselves."""
    fresh.compile_from_config(trained.get_compile_config())
    return by_variables(trained, fresh, folder)


WAYS = [
    by_keras_file,
    by_wrapping,
    by_weights_file,
    by_variables,
    by_own_variables,
    by_state_tree,
    by_compile_again,
    by_compile_config,
]


def restored(scheme, optimizer, way, folder):
    """Trained, handed on, and trained on: the state handed on, and the weights and the state in the end."""
    folder.mkdir(exist_ok=True)
    trained, fresh = (make(scheme, optimizer) for _ in range(2))
    fit(trained, X, Y)
    before = state(trained)
    model = way(trained, fresh, folder)
    taken = state(model)
    fit(model, X, Y)
    return before, taken, model.get_weights(), state(model)


@pytest.mark.wide
@pytest.mark.parametrize("way", by_default(WAYS, by_keras_file))
@pytest.mark.parametrize("scheme", by_default(SYNCHRONOUS, "1f1b"))
def test_handed_on_training_goes_on_as_in_plain_keras(scheme, way, tmp_path):
    want, got = (restored(each, momentum, way, tmp_path / each) for each in ("keras", scheme))
    for ours, theirs in zip(got, want):
        if isinstance(ours, dict):
            assert_same(ours, theirs, 1e-5)
        else:
            networks.assert_close(ours, theirs)
    assert_same(got[0], got[1])


@pytest.mark.wide
@pytest.mark.parametrize("name", by_default(OPTIMIZERS, "nadam"))
@pytest.mark.parametrize("scheme", by_default(SYNCHRONOUS, "1f1b"))
@pytest.mark.parametrize("way", by_default([by_keras_file, by_wrapping], by_wrapping))
def test_every_optimizer_is_handed_on_as_in_plain_keras(scheme, name, way, tmp_path):
    want, got = (restored(each, OPTIMIZERS[name], way, tmp_path / each) for each in ("keras", scheme))
    assert_same(got[0], got[1])
    assert_same(got[3], want[3], 2e-5)
    networks.assert_close(got[2], want[2], 2e-5)


@pytest.mark.parametrize("scheme", by_default([name for name in NAMES if name != "data-parallel"], "spectrain"))
def test_the_optimizer_s_variables_are_those_at_work(scheme):
    """Bitwise, and as many of them as in plain Keras."""
    pm = make(scheme)
    fit(pm, X, Y, epochs=2)
    names = {each.path: f"{each.path.split('/', 1)[1].replace('/', '_')}_momentum" for each in pm.trainable_variables}
    mine, found = state(pm), stages_state(pm)
    for path, name in names.items():
        np.testing.assert_array_equal(mine[name], found[path, "momentums"])
        assert mine[name].any()
    assert mine["iteration"] == 8
    assert [len(each) for each in (mine, pm.optimizer.momentums)] == [2 + len(names), len(names)]


@pytest.mark.wide
@pytest.mark.parametrize("way", by_default([by_weights_file, by_own_variables, by_wrapping], by_weights_file))
@pytest.mark.parametrize("scheme", by_default([name for name in NAMES if name not in SYNCHRONOUS], "spectrain"))
def test_asynchronous_training_goes_on_bitwise(scheme, way, tmp_path):
    """With momentum, which holds all that is predicted by."""
    whole = make(scheme)
    for _ in range(2):
        fit(whole, X, Y)
    trained = make(scheme)
    fit(trained, X, Y)
    model = way(trained, make(scheme), tmp_path)
    if way is by_wrapping:
        model = pipetrain.PipelineModel(model.model, cuts=("d0", "d1"), scheme=scheme)
        model.compile(model.model.optimizer, networks.crossentropy())
    fit(model, X, Y)
    networks.assert_equal(model.get_weights(), whole.get_weights())
    assert_same(state(model), state(whole))


@pytest.mark.wide
def test_replicas_follow_what_is_set():
    pm = pipetrain.PipelineModel(networks.small(), stages=2, replicas=(2, 1), scheme="1f1b", microbatches=2)
    pm.compile(keras.optimizers.Nadam(0.01), networks.crossentropy())
    plain = make("keras", OPTIMIZERS["nadam"])
    for model in (pm, plain):
        for _ in range(2):
            fit(model, X, Y)
            for n, variable in enumerate(model.optimizer.variables[2:]):
                variable.assign(variable + 0.01 * n)
    assert_same(state(pm), state(plain), 1e-5)
    networks.assert_close(pm.get_weights(), plain.get_weights())


@pytest.mark.wide
def test_every_replica_goes_on_with_the_momentum_that_is_set():
    pm = pipetrain.PipelineModel(networks.mlp(2), stages=1, replicas=(2,), scheme="gpipe", microbatches=1)
    plain = networks.mlp(2)
    for model in (pm, plain):
        model.compile(momentum(), networks.crossentropy())
        for _ in range(2):
            fit(model, X[:40], Y[:40])
            for variable in model.optimizer.momentums:
                variable.assign(variable + 0.01)
    networks.assert_close(pm.get_weights(), plain.get_weights())


@pytest.mark.wide
def test_data_parallelism_knows_the_optimizer_that_it_was_given_again():
    """It trains by a copy, whose slots go along where the original is compiled again."""
    plain, given = make("keras"), momentum()
    pm = pipetrain.PipelineModel(networks.small(), scheme="data-parallel", devices=("CPU:0", "CPU:1"))
    for _ in range(2):
        pm.compile(given, networks.crossentropy())
        fit(pm, X, Y)
        fit(plain, X, Y)
    networks.assert_close(pm.get_weights(), plain.get_weights())
    assert_same(state(pm), state(plain), 1e-5)


@pytest.mark.slow
def test_data_parallelism_gives_back_to_the_optimizer_of_compile_what_its_copy_gathered():
    """By turns with a pipeline, each compiled but once with the same optimizer; and for the model by itself."""
    plain, model, given = make("keras", OPTIMIZERS["nadam"]), networks.small(), OPTIMIZERS["nadam"]()
    several = pipetrain.PipelineModel(model, scheme="data-parallel", devices=("CPU:0", "CPU:1"))
    pm = pipetrain.PipelineModel(model, cuts=("d1",), scheme="gpipe")
    for way in (several, pm, model):
        way.compile(given, networks.crossentropy())
    for way in (several, several, pm, several, model):
        fit(way, X, Y)
        fit(plain, X, Y)
        networks.assert_close(model.get_weights(), plain.get_weights(), 2e-5)
        assert len(given.variables) == len(plain.optimizer.variables)
        assert int(given.iterations) == int(plain.optimizer.iterations)


FROZEN = [("gpipe", "muon")]


@pytest.mark.wide
@pytest.mark.parametrize(
    ("scheme", "name"), parameters.combinations(["gpipe", "single", "data-parallel"], list(OPTIMIZERS), default=FROZEN)
)
def test_a_layer_that_is_frozen_for_a_while_finds_its_slots_again(scheme, name):
    """Compiled with the same optimizer each time; the layer in the middle is frozen for the second."""
    models = [make(way, OPTIMIZERS[name]) for way in ("keras", scheme)]
    optimizers = [model.optimizer for model in models]
    for trainable in (True, False, False, True):
        for model, optimizer in zip(models, optimizers, strict=True):
            model.get_layer("d1").trainable = trainable
            model.compile(optimizer, networks.crossentropy())
            fit(model, X, Y)
        plain, pm = models
        assert len(optimizers[1].variables) == len(optimizers[0].variables)
        networks.assert_close(pm.get_weights(), plain.get_weights())
        assert_same(state(pm), state(plain), 1e-5)


@pytest.mark.wide
def test_one_optimizer_trains_a_model_in_several_ways_by_turns():
    """As a pipeline, by itself, as another pipeline: what each has gathered the next one goes on with."""
    plain, model = networks.small(), networks.small()
    optimizer = keras.optimizers.Adam(0.01)
    ways = [pipetrain.PipelineModel(model, stages=n, scheme="1f1b", microbatches=2) for n in (2, 3)] + [model]
    for way in ways:
        way.compile(optimizer, networks.crossentropy())
    plain.compile(keras.optimizers.Adam(0.01), networks.crossentropy())
    for way in (*ways, *ways):
        fit(way, X, Y)
        fit(plain, X, Y)
        networks.assert_close(model.get_weights(), plain.get_weights(), 2e-5)
    assert int(optimizer.iterations) == 24


@pytest.mark.wide
@pytest.mark.parametrize("scheme", by_default(SYNCHRONOUS, "data-parallel"))
def test_a_plainly_trained_model_is_taken_on_with_its_optimizer(scheme):
    plain, model = make("keras", OPTIMIZERS["adam"]), make("keras", OPTIMIZERS["adam"])
    for each in (plain, model):
        fit(each, X, Y)
    pm = pipetrain.PipelineModel(model, **networks.parts(scheme, "d0"), scheme=scheme, devices=("CPU:0", "CPU:1"))
    pm.compile(model.optimizer, networks.crossentropy())
    fit(plain, X, Y)
    fit(pm, X, Y)
    networks.assert_close(pm.get_weights(), plain.get_weights(), 2e-5)
    assert_same(state(pm), state(plain), 1e-5)


class Counts(keras.callbacks.Callback):
    """Sets the count of steps between two epochs, or in the midst of one."""

    def __init__(self, batch):
        super().__init__()
        self._batch, self._set = batch, False

    def _anew(self):
        if not self._set:
            self._set = True
            self.model.get_weights()
            self.model.optimizer.iterations.assign(100)

    def on_train_batch_end(self, batch, logs=None):
        if batch == self._batch:
            self._anew()

    def on_epoch_begin(self, epoch, logs=None):
        if self._batch is None and epoch == 1:
            self._anew()


@pytest.mark.wide
@pytest.mark.parametrize("batch", by_default([None, 1], 1))
def test_a_count_of_steps_set_within_fit_counts(batch):
    want, got = make("keras", OPTIMIZERS["adam"]), make("1f1b", OPTIMIZERS["adam"])
    for model in (want, got):
        fit(model, X, Y, epochs=3, callbacks=[Counts(batch)])
    networks.assert_close(got.get_weights(), want.get_weights(), 2e-5)
    assert int(got.optimizer.iterations) == int(want.optimizer.iterations)


class Interruption(keras.callbacks.Callback):
    """Ends the second epoch with KeyboardInterrupt."""

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if (self._epoch, batch) == (1, 1):
            raise KeyboardInterrupt


@pytest.mark.wide
@pytest.mark.parametrize("scheme", by_default(NAMES, "1f1b"))
@pytest.mark.parametrize("name", by_default(["momentum", "adam", "adagrad"], "momentum"))
def test_backup_and_restore_goes_on_exactly_or_is_refused(scheme, name, tmp_path):
    def backup():
        return keras.callbacks.BackupAndRestore(tmp_path / "backup")

    if scheme in ("spectrain", "spike-compensation") and name != "momentum":
        name = "adam" if scheme == "spectrain" else "momentum"  # others are refused without regard to this callback
    whole, first, second = (make(scheme, OPTIMIZERS[name]) for _ in range(3))
    if (scheme, name) == ("spectrain", "adam"):
        with pytest.raises(ValueError, match=r"remembers more.*BackupAndRestore, which leaves out.*PipelineCheckpoint"):
            fit(first, X, Y, callbacks=[backup()])
        assert int(first.optimizer.iterations.numpy()) == 0
        return
    fit(whole, X, Y, epochs=3)
    with pytest.raises(KeyboardInterrupt):
        fit(first, X, Y, epochs=3, callbacks=[backup(), Interruption()])
    history = fit(second, X, Y, epochs=3, callbacks=[backup()]).history
    assert len(history["loss"]) == 2
    networks.assert_equal(second.get_weights(), whole.get_weights())
    assert_same(state(second), state(whole))


@pytest.mark.wide
@pytest.mark.parametrize("scheme", by_default(SYNCHRONOUS, "1f1b"))
def test_the_best_model_of_a_checkpoint_trains_on(scheme, tmp_path):
    def resumed(scheme):
        model = make(scheme, OPTIMIZERS["adam"])
        keep = keras.callbacks.ModelCheckpoint(tmp_path / f"{scheme}.keras", save_weights_only=False, save_freq=3)
        fit(model, X, Y, callbacks=[keep])
        loaded = keras.models.load_model(tmp_path / f"{scheme}.keras")
        fit(loaded, X, Y)
        return loaded

    want, got = resumed("keras"), resumed(scheme)
    networks.assert_close(got.get_weights(), want.get_weights(), 2e-5)
    assert_same(state(got), state(want), 1e-5)


def test_an_optimizer_that_has_not_trained_is_as_keras_has_it():
    pm, plain = make("1f1b"), make("keras")
    assert_same(state(pm), state(plain))
    assert pm.optimizer.built == plain.optimizer.built


@pytest.mark.parametrize("scheme", by_default(NAMES, "1f1b", "data-parallel"))
def test_an_optimizer_of_another_model_is_refused_and_keeps_what_it_has(scheme):
    other = make("keras")
    fit(other, X, Y)
    before = state(other)
    with pytest.raises(ValueError, match=r"trained another model.*SGD after 4 steps.*from_config"):
        compiled(scheme, optimizer=other.optimizer)
    assert_same(state(other), before)


def test_an_optimizer_shared_by_two_models_is_refused_before_it_trains_the_second():
    shared = momentum()
    first, second = compiled("1f1b", optimizer=shared), compiled("1f1b", optimizer=shared)
    fit(first, X, Y)
    before, weights = state(first), second.get_weights()
    with pytest.raises(ValueError, match="trained another model"):
        fit(second, X, Y)
    assert_same(state(first), before)
    networks.assert_equal(second.get_weights(), weights)


@pytest.mark.parametrize("scheme", ["1f1b", "data-parallel"])
def test_an_optimizer_set_after_compile_is_refused(scheme):
    pm = make(scheme)
    pm.optimizer = momentum()
    with pytest.raises(ValueError, match=r"optimizer of compile.*Received: optimizer=SGD.*Try compile again"):
        fit(pm, X, Y)


@pytest.mark.wide
@pytest.mark.parametrize("scheme", ["spectrain", "1f1b"])
def test_momentum_that_is_not_finite_is_forgotten(scheme):
    pm = make(scheme)
    fit(pm, X, Y)
    with pytest.raises(FloatingPointError):
        fit(pm, X * np.nan, Y)
    assert all(np.isfinite(value).all() for value in state(pm).values())
    fit(pm, X, Y)
    assert all(np.isfinite(value).all() and value.any() for value in state(pm).values())


@pytest.mark.parametrize(
    "way",
    [
        lambda pm: pickle.dumps(pm),
        lambda pm: copy.deepcopy(pm),
        lambda pm: copy.copy(pm),
        lambda pm: keras.models.clone_model(pm),
        lambda pm: pm.get_config(),
        lambda pm: keras.saving.serialize_keras_object(pm),
        lambda pm: keras.models.save_model(pm, "never-written.keras"),
    ],
    ids=["pickle", "deepcopy", "copy", "clone_model", "get_config", "serialize", "save_model"],
)
def test_copies_are_refused_by_name(way, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # Keras opens the file before it asks for what to write
    with pytest.raises(
        ValueError, match=r"cannot be copied, pickled or described.*Received: get_config of 'small'. Try save"
    ):
        way(networks.fresh("1f1b"))


@pytest.mark.wide
@pytest.mark.parametrize("scheme", by_default(["1f1b", "data-parallel"], "1f1b"))
def test_saving_leaves_the_wrapped_model_as_it_was(scheme, tmp_path):
    """It may be compiled for something else."""
    model = networks.small()
    model.compile("adam", "mse")
    pm = pipetrain.PipelineModel(model, stages=2, scheme=scheme)
    pm.save(tmp_path / "before.keras")
    assert isinstance(keras.models.load_model(tmp_path / "before.keras").optimizer, keras.optimizers.Adam)
    pm.compile(momentum(), networks.crossentropy(), metrics=["accuracy"])
    fit(pm, X, Y)
    before = dict(vars(model))
    pm.save(tmp_path / "after.keras")
    assert dict(vars(model)) == before
    loaded = keras.models.load_model(tmp_path / "after.keras")
    assert isinstance(loaded.optimizer, keras.optimizers.SGD)
    assert loaded.evaluate(X, Y, verbose=0) == pytest.approx(pm.evaluate(X, Y, verbose=0), rel=1e-5)


def test_an_optimizer_that_trained_another_model_is_refused():
    plain = networks.mlp()
    plain.compile(keras.optimizers.SGD(0.1, momentum=0.9), networks.crossentropy())
    fit(plain, *networks.data(60))
    with pytest.raises(ValueError, match=r"trained another model.*SGD after 3 steps.*from_config"):
        networks.pipeline(networks.mlp(), optimizer=plain.optimizer)


@pytest.mark.wide
def test_compiling_again_keeps_momentum_and_steps():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 5, 0.5)
    plain, pm = (make(scheme, lambda: keras.optimizers.SGD(schedule, momentum=0.9)) for scheme in ("keras", "1f1b"))
    for model in (plain, pm):
        fit(model, *networks.data(100))
        model.compile(model.optimizer, networks.crossentropy())
        fit(model, *networks.data(100))
    networks.assert_close(pm.get_weights(), plain.get_weights())
    assert int(pm.optimizer.iterations) == 10


@pytest.mark.wide
def test_a_schedule_goes_by_the_count_of_steps_that_the_user_sets():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 5, 0.5)
    plain, pm = (make(scheme, lambda: keras.optimizers.SGD(schedule)) for scheme in ("keras", "1f1b"))
    for model in (plain, pm):
        fit(model, *networks.data(100))
        model.optimizer.iterations.assign(0)
        fit(model, *networks.data(100))
    networks.assert_close(pm.get_weights(), plain.get_weights())


@pytest.mark.wide
@pytest.mark.parametrize("scheme", ["keras", "1f1b", "spectrain"])
def test_reading_weights_keeps_the_count_of_steps_that_the_user_set(scheme):
    """Reading the weights put back the pipeline's own count."""
    x, y = networks.data(80)
    model = networks.fresh(scheme)
    fit(model, x, y)
    model.optimizer.iterations.assign(100)
    model.get_weights()
    assert int(model.optimizer.iterations) == 100
    fit(model, x, y)
    assert int(model.optimizer.iterations) == 104


@pytest.mark.wide
def test_slots_stay_with_their_layers_whichever_are_frozen():
    """The optimizer's slots go with their layers, whichever are trained."""
    model = networks.mlp(depth=4)
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    pm = pipetrain.PipelineModel(model, stages=2, scheme="1f1b")
    for frozen in ("d1", "d2"):
        for layer in model.layers:
            layer.trainable = layer.name != frozen
        pm.compile(optimizer, loss=networks.crossentropy())
        if frozen == "d2":
            optimizer.learning_rate = 0.0
            before = [weight.numpy() for weight in model.get_layer("d1").weights]
        x, y = networks.data(32)
        pm.fit(x, y, batch_size=16, verbose=0)
    networks.assert_equal([weight.numpy() for weight in model.get_layer("d1").weights], before)
