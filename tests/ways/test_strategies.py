"""Who trains by which scheme, and the session of one ``fit``."""

from __future__ import annotations

import inside
import keras
import networks
import parameters
import pytest

import pipetrain
from pipetrain.frontend.data_parallel import DataParallelStrategy
from pipetrain.frontend.fit_session import FitSession
from pipetrain.frontend.grid_strategy import GridStrategy
from pipetrain.frontend.pipeline_strategy import PipelineStrategy
from pipetrain.frontend.strategy import Strategy
from pipetrain.frontend.transfer_strategy import TransferStrategy
from pipetrain.schemes.table import GRID, NAMES, TRANSFERRING

SCHEMES = ["vanilla", "data-parallel", "all-reduce", "grid"]
EACH = pytest.mark.parametrize("scheme", SCHEMES)


@pytest.mark.parametrize("scheme", (*NAMES, *TRANSFERRING, GRID))
def test_every_scheme_has_a_strategy(scheme):
    pm = pipetrain.PipelineModel(networks.small(), stages=2, scheme=scheme)
    expected = {
        "data-parallel": DataParallelStrategy,
        **dict.fromkeys(TRANSFERRING, TransferStrategy),
        GRID: GridStrategy,
    }
    assert type(inside.strategy(pm)) is expected.get(scheme, PipelineStrategy)


@EACH
def test_a_strategy_has_the_protocol_s_members_and_no_others(scheme):
    """None of them is there only for the other's sake."""
    asked = {name for kind in Strategy.__mro__[:2] for name in vars(kind) if not name.startswith("_")}
    strategy = inside.strategy(pipetrain.PipelineModel(networks.small(), stages=2, scheme=scheme))
    classes = type(strategy).__mro__[:-1]
    has = {name for each in (strategy, *classes) for name in vars(each) if not name.startswith("_")}
    assert has - {"evaluator", "grid", "microbatches", "plan"} == asked  # what tests look at


@pytest.mark.wide
@pytest.mark.parametrize("scheme", parameters.by_default(SCHEMES, "vanilla", "all-reduce"))
def test_a_session_lives_as_long_as_its_fit(scheme):
    pm, (x, y) = networks.pipeline(scheme=scheme), networks.data(60)
    seen = []

    def note(*_, **logs):
        seen.append((pm.session, pm.session.is_evaluating))

    noting = keras.callbacks.LambdaCallback(on_train_batch_end=note)
    noting.on_test_batch_end = noting.on_predict_batch_end = note
    noting.on_epoch_end = lambda *_: pm.predict(x, batch_size=60, verbose=0, callbacks=[noting])
    assert pm.session is None
    for _ in range(2):
        networks.fit(pm, x, y, validation_data=(x, y), callbacks=[noting])
        assert pm.session is None
    assert [evaluating for _, evaluating in seen] == 2 * [*3 * [False], *3 * [True], True]
    (first,), (second,) = ({session for session, _ in part} for part in (seen[:7], seen[7:]))
    assert isinstance(first, FitSession) and first is not second
    pm.train_on_batch(x, y)
    assert pm.session is None


@pytest.mark.wide
@EACH
def test_a_session_ends_with_the_exception_that_ends_its_fit(scheme):
    pm, (x, y) = networks.pipeline(scheme=scheme), networks.data(60)
    weights = pm.get_weights()

    def stop(*_, **logs):
        raise KeyError("enough")

    with pytest.raises(KeyError, match="enough"):
        networks.fit(pm, x, y, callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=stop)])
    assert pm.session is None
    pm.set_weights(weights)
    networks.fit(pm, x, y)


@pytest.mark.wide
@pytest.mark.parametrize("scheme", parameters.by_default(SCHEMES, "vanilla", "all-reduce"))
def test_prediction_is_not_disturbed_by_what_its_callbacks_do(scheme):
    """Prediction goes on with its own data when a callback of it evaluates, predicts, or trains another model."""
    pm, other, (x, y) = networks.pipeline(scheme=scheme), networks.pipeline(scheme=scheme), networks.data(40)
    want = pm.predict(x, batch_size=20, verbose=0)

    def disturb(*_, **logs):
        pm.evaluate(x[:20], y[:20], verbose=0)
        pm.predict(x[20:], verbose=0)
        networks.fit(other, x, y)

    disturbing = keras.callbacks.LambdaCallback(on_predict_batch_begin=disturb)
    networks.assert_equal([pm.predict(x, batch_size=20, verbose=0, callbacks=[disturbing])], [want])


@pytest.mark.wide
def test_exact_times_are_those_of_the_fit_that_begins_with_them():
    pm, (x, y) = networks.pipeline(scheme="vanilla"), networks.data(40)
    seen = []
    note = keras.callbacks.LambdaCallback(on_train_begin=lambda logs: seen.append(pm.session.exact_trace))
    for wanted in (False, True, False):
        pm.exact_trace = wanted
        networks.fit(pm, x, y, callbacks=[note])
    assert seen == [False, True, False]
