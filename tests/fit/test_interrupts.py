"""Ctrl-C at any moment: no thread is left, weights are whole, and the same object trains as if nothing had been."""

from __future__ import annotations

import itertools
import pydoc
import random
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import inside
import keras
import networks
import numpy as np
import pytest
import tensorflow as tf
from interruption import LABELS, METHODS, Interrupting, X, assert_trains_as_undisturbed, assert_whole, pipeline, trained
from networks import begin_anew, fit
from parameters import by_default

from pipetrain.schemes.table import NAMES


@pytest.fixture(scope="module")
def undisturbed():
    """What an uninterrupted ``fit`` comes to, and how many calls each method takes in a new model."""
    known = {}

    def of(scheme, method):
        if (scheme, method) not in known:
            pm = pipeline(scheme)
            weights = pm.get_weights()
            with Interrupting() as counting:
                METHODS[method](pm)
            known[scheme, method] = counting.calls, *trained(pm, weights)
        return known[scheme, method]

    return of


MOMENTS = 24  # of each method's first call; a few by default
CASES = [
    (scheme, method, moment)
    for n, (scheme, method) in enumerate(itertools.product(NAMES, METHODS))
    for moment in (range(MOMENTS) if (scheme, method) == ("spectrain", "fit") else range(n % 6, MOMENTS, 6))
]
CHOSEN = [
    ("spectrain", "fit", 4),
    *next([case] for case in CASES if case[:2] == ("1f1b", "train_on_batch")),
    *next([case] for case in CASES if case[:2] == ("1f1b", "evaluate")),
]


@pytest.mark.wide
@pytest.mark.parametrize("case", by_default(CASES, *CHOSEN), ids=lambda case: "-".join(map(str, case)))
def test_interrupted_in_its_first_call_it_trains_as_if_it_had_not_been(case, undisturbed):
    scheme, method, moment = case
    want = undisturbed(scheme, method)
    pm = pipeline(scheme)
    weights = pm.get_weights()
    # MirroredStrategy's threads change the number of calls: the last ones may not come.
    expected = suppress(KeyboardInterrupt) if scheme == "data-parallel" else pytest.raises(KeyboardInterrupt)
    with expected, Interrupting(1 + moment * want[0] // MOMENTS):
        METHODS[method](pm)
    assert_whole(pm)
    assert_trains_as_undisturbed(pm, weights, want)


@pytest.mark.parametrize("moment", by_default(["__enter__", "__exit__"], "__exit__"))
def test_interrupted_as_keras_begins_or_ends_a_scope_it_is_left(moment, monkeypatch):
    """A scope that has begun and is not ended would be the thread's for good."""
    scope, pm = keras.src.backend.name_scope, pipeline("spectrain")
    original = getattr(scope, moment)

    def interrupted(self, *why):
        if moment == "__enter__":
            original(self)
        raise KeyboardInterrupt

    with keras.name_scope("outer"):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(scope, moment, interrupted)
            METHODS["fit"](pm)
        assert keras.src.backend.common.name_scope.current_path() == tf.get_current_name_scope() == "outer"
    assert_whole(pm)


@pytest.mark.wide
@pytest.mark.parametrize("scheme", by_default(NAMES, "spectrain"))
def test_interrupted_again_and_again_one_object_trains(scheme, undisturbed):
    """Each interrupt comes a little later, or earlier, than the one before."""
    want = undisturbed(scheme, "fit")
    pm, chance = pipeline(scheme), random.Random(3)
    weights = pm.get_weights()
    for _ in range(12):
        try:
            with Interrupting(chance.randrange(want[0])):
                METHODS["fit"](pm)
        except KeyboardInterrupt:
            assert_whole(pm)
    assert_trains_as_undisturbed(pm, weights, want)


@pytest.mark.wide
@pytest.mark.parametrize("moment", by_default(range(MOMENTS), 11))
def test_interrupted_while_it_is_profiled(moment, undisturbed, tmp_path, monkeypatch):
    """What is measured decides on the cut, which is of no consequence to what a synchronous scheme comes to."""
    want = undisturbed("1f1b", "fit")
    pm = pipeline("1f1b", stages=2)
    weights = pm.get_weights()
    with monkeypatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path / "first"))
        with Interrupting() as counting:
            pipeline("1f1b", stages=2).partition(20)
        patch.setenv("XDG_CACHE_HOME", str(tmp_path / "second"))
        # It takes more calls, or fewer, as the machine is steady or not: the last moment may be over by then.
        with suppress(KeyboardInterrupt), Interrupting(1 + moment * counting.calls // (2 * MOMENTS)):
            pm.partition(20)
        assert_whole(pm)
        got, _ = trained(pm, weights)
    networks.assert_close(got, want[1], 1e-6)


@pytest.mark.wide
@pytest.mark.parametrize("scheme", by_default(["spectrain", "1f1b"], "spectrain"))
def test_interrupted_while_its_threads_start_or_end(scheme, undisturbed, monkeypatch):
    """Between any two of the calls by which a pipeline starts, ends and hands the weights back."""
    from pipetrain.run.pipeline import Pipeline

    want = undisturbed(scheme, "fit")
    for name in ("_start", "_end", "_hand_back"):
        original, pm = getattr(Pipeline, name), pipeline(scheme)
        weights = pm.get_weights()
        counting = Interrupting()

        def counted(self, *args, original=original, counting=counting, **settings):
            with counting:
                return original(self, *args, **settings)

        with monkeypatch.context() as patch:
            patch.setattr(Pipeline, name, counted)
            METHODS["train_on_batch"](pm)
        for at in range(1, counting.calls + 1, max(1, counting.calls // 12)):
            pending = [Interrupting(at)]

            def interrupted(self, *args, original=original, pending=pending, **settings):
                if not pending:
                    return original(self, *args, **settings)
                with pending.pop():
                    return original(self, *args, **settings)

            begin_anew(pm, weights)
            with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
                patch.setattr(Pipeline, name, interrupted)
                METHODS["train_on_batch"](pm)
            assert_whole(pm)
            assert int(pm.optimizer.iterations) == inside.strategy(pm)._fitted() <= 1
        assert_trains_as_undisturbed(pm, weights, want)


@pytest.mark.wide
@pytest.mark.parametrize("scheme", by_default(["1f1b", "spectrain", "2bw"], "spectrain"))
def test_a_snapshot_that_somebody_holds_takes_no_weights_back(scheme):
    """The weights are those of all steps done, also when it is let go of after an interrupt."""
    held = []

    def hold(batch, logs):
        if not held:
            held.append(pm.snapshots())
            if next(held[0], None) is None:
                held.clear()
                return
            raise KeyboardInterrupt

    pm = pipeline(scheme)
    ask = keras.callbacks.LambdaCallback(on_train_begin=lambda logs: pm.session.keep_snapshots(2))
    with pytest.raises(KeyboardInterrupt):
        fit(
            pm,
            np.tile(X, (8, 1)),
            np.tile(LABELS, (8, 1)),
            callbacks=[ask, keras.callbacks.LambdaCallback(on_train_batch_end=hold)],
        )
    done = pm.get_weights()
    held.clear()
    networks.assert_equal(pm.get_weights(), done)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("scheme", ["spectrain", "1f1b", "single", "data-parallel"])
def test_signals_at_random_moments_of_first_steps(scheme):
    """Real ones, whatever the program is doing then: in TensorFlow, too."""
    script, interrupted = Path(__file__).parents[1] / "random_signals.py", 0
    for seed in range(5):  # one may leave TensorFlow where nothing can be traced any more
        run = subprocess.run([sys.executable, str(script), scheme, str(seed)], capture_output=True, text=True)
        assert run.returncode == 0, run.stderr[-3000:]
        interrupted += int(run.stdout.split()[-1])
        if interrupted >= 20:
            break
    assert interrupted >= 20


@pytest.mark.wide
def test_an_optimizer_interrupted_while_it_is_built_has_each_slot_once(monkeypatch):
    """Under data parallelism Keras builds it, in an evaluation too."""
    pm, made = pipeline("data-parallel"), []
    make = keras.optimizers.Optimizer.add_variable_from_reference

    def interrupted(self, *args, **settings):
        made.append(self)
        if len(made) == 3:
            raise KeyboardInterrupt
        return make(self, *args, **settings)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(keras.optimizers.Optimizer, "add_variable_from_reference", interrupted)
        pm.evaluate(X, LABELS, verbose=0)
    fit(pm, X, LABELS)
    slots = [each.path for each in pm.optimizer.variables[2:]]  # after its count and its rate
    assert len(slots) == len(set(slots)) == len(pm.trainable_variables)


@pytest.fixture(autouse=True)
def alarms_interrupt():
    """A timer's signal is Ctrl-C's."""
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    yield
    signal.signal(signal.SIGALRM, before)


@pytest.mark.wide
@pytest.mark.parametrize(
    "kind, method",
    [("pipetrain.run.device_threads.DeviceThread", "ended"), ("pipetrain.run.control.Caller", "ended")],
)
def test_a_second_interrupt_while_threads_end_leaves_a_model_that_trains(kind, method, monkeypatch):
    pm, x, y = networks.pipeline(), *networks.data(200)
    if "DeviceThread" in kind:
        inside.by_threads(monkeypatch)

    def interrupt(batch, logs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt, match="second"):
        errors, original = iter([KeyboardInterrupt("second")]), getattr(pydoc.locate(kind), method)

        def ended(self, *args, **settings):
            for error in errors:
                raise error
            return original(self, *args, **settings)

        patch.setattr(f"{kind}.{method}", ended)
        fit(pm, x, y, callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=interrupt)])
    assert np.isfinite(pm.get_weights()[0]).all()
    fit(pm, x, y)


@pytest.mark.parametrize("scheme", ["keras", "1f1b"])
def test_an_interrupted_fit_counts_its_steps(scheme):
    x, y = networks.data(80)

    def interrupt(batch, logs):
        if batch == 2:
            raise KeyboardInterrupt

    model = networks.fresh(scheme)
    with pytest.raises(KeyboardInterrupt):
        fit(model, x, y, callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=interrupt)])
    assert int(model.optimizer.iterations) == 3
    fit(model, x, y)
    assert int(model.optimizer.iterations) == 7


@pytest.mark.wide
def test_interrupted_while_metrics_get_their_values_no_other_model_is_held_up(monkeypatch):
    """Keras keeps the variables that are still to get values in one list for the whole process."""
    pm, given = pipeline("data-parallel"), []
    give = keras.Variable._deferred_initialize

    def interrupted(self):
        give(self)
        given.append(self)
        if len(given) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(keras.Variable, "_deferred_initialize", interrupted)
        fit(pm, X, LABELS)
    other = networks.small()
    other.compile("sgd", "mse", metrics=["mae"])
    fit(other, X, LABELS)
    fit(pm, X, LABELS)
