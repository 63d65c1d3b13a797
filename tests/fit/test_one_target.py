"""Training with one target for all stages: memory, repeatability, and the momentum that compile makes longer."""

from __future__ import annotations

import inside
import keras
import networks
import numpy as np
import parameters
import pytest
from keras import optimizers

from pipetrain.compute.optimizer.clone import stretched_settings
from pipetrain.run.stage_work import StageWork

ROWS = 12 * 16
TWO_VERSIONS = {"scheme": "2bw", "horizon": 1.5, "microbatches": 3}
ROUND_TRIP = {"horizon": "round-trip", "microbatches": None}


class Signs(optimizers.Optimizer):
    """A user's own: it goes by the sign of the gradient."""

    def update_step(self, gradient, variable, learning_rate):
        rate = keras.ops.cast(learning_rate, variable.dtype)
        self.assign_sub(variable, rate * keras.ops.sign(gradient))


def momentum():
    return optimizers.SGD(0.05, momentum=0.9, weight_decay=0.1)


def trained(make=momentum, **options):
    """The pipeline of four stages after a fit, a drain and half a fit."""
    x, y = networks.data(ROWS)
    options = {"horizon": "target", "microbatches": 2, **options}
    pm = networks.pipeline(networks.mlp(), make(), cuts=networks.cuts(6, 4), **options)
    for rows in (ROWS, ROWS // 2):
        networks.fit(pm, x[:rows], y[:rows], batch_size=16)
    return pm


@pytest.mark.wide
@pytest.mark.parametrize(
    ("options", "most"),
    [({}, 0), *parameters.rarely(({"microbatches": 5}, 0)), (TWO_VERSIONS, 1)],
)
def test_no_old_version_is_stored_between_actions(options, most, monkeypatch):
    """Of predicted two versions one is, and none where all stages have one target; of the actions that there are."""
    perform, kept = StageWork.perform, []

    def counted(self, action, received):
        result = perform(self, action, received)
        kept.append(self._weights.own.kept)
        return result

    inside.by_threads(monkeypatch)
    monkeypatch.setattr(StageWork, "perform", counted)
    trained(**options)
    assert len(kept) > 18 * 4
    assert max(kept) == most


@pytest.mark.wide
@pytest.mark.parametrize("options", parameters.by_default([{}, TWO_VERSIONS], {}))
@pytest.mark.parametrize("make", parameters.by_default([momentum, lambda: optimizers.Lion(1e-3)], momentum))
def test_the_same_weights_whatever_the_timing(make, options, monkeypatch):
    once = trained(make, **options).get_weights()
    networks.delay(monkeypatch, 0.005, "forward", "backward", "update")
    networks.assert_equal(trained(make, **options).get_weights(), once)


@pytest.mark.wide
@pytest.mark.parametrize(
    "options",
    parameters.by_default(
        [{"recompute": True}, {"replicas": (1, 2, 1, 1)}, {"jit_compile": True}], {"recompute": True}
    ),
)
@pytest.mark.parametrize("scheme", parameters.by_default([{}, TWO_VERSIONS], TWO_VERSIONS))
def test_recomputation_replicas_and_xla_train_the_same(scheme, options):
    networks.assert_close(trained(**scheme, **options).get_weights(), trained(**scheme).get_weights())


@pytest.mark.wide
@pytest.mark.parametrize("kind", parameters.by_default([Signs, optimizers.Muon, optimizers.Adafactor], Signs))
@pytest.mark.parametrize("options", parameters.by_default([{}, ROUND_TRIP], {}))
def test_optimizers_without_a_formula_train(kind, options):
    """Weights that have gone somewhere, and are finite."""
    pm = trained(lambda: kind(1e-3), **options)
    for before, after in zip(networks.mlp().get_weights(), pm.get_weights(), strict=True):
        assert np.isfinite(after).all()
        assert (before != after).any()


@pytest.mark.wide
def test_compile_makes_momentum_longer_and_fit_says_so(capsys):
    """``1.6 / (1 + 3/2)`` with four stages and two microbatches; the compiled optimizer stays as it is."""
    pm = trained()
    factor = 1.6 / 2.5
    assert capsys.readouterr().out == ""
    networks.fit(pm, *networks.data(32), batch_size=16, verbose=2)
    said = capsys.readouterr().out
    assert "SGD's momentum=0.9 becomes 0.936, and its learning rate is multiplied by 0.64." in said
    assert (pm.optimizer.momentum, pm.optimizer.weight_decay) == (0.9, 0.1)
    for (stage,) in inside.replicas(pm):
        assert stage._groups.own.optimizer.momentum == pytest.approx(1 - factor * 0.1)
        assert stage._groups.own.optimizer.weight_decay == pytest.approx(0.1 / factor)
        assert float(stage._groups.own.optimizer.learning_rate) == pytest.approx(0.05 * factor)
    pm.optimizer.learning_rate = 0.01
    networks.fit(pm, *networks.data(32), batch_size=16)
    assert [float(stage._groups.own.optimizer.learning_rate) for (stage,) in inside.replicas(pm)] == pytest.approx(
        [0.01 * factor] * 4
    )


@pytest.mark.wide
@pytest.mark.parametrize(
    ("make", "options", "said"),
    [
        (lambda: optimizers.Adam(1e-3), {}, "Adam's beta_1=0.9 becomes 0.9467."),
        (lambda: optimizers.Muon(1e-3), {}, "Muon's momentum=0.95 becomes 0.9733 and adam_beta_1=0.9 becomes 0.9467."),
        (momentum, {"stretch_momentum": False}, ""),
        (momentum, {"microbatches": 3}, ""),
        (lambda: Signs(1e-3), {}, ""),
        (lambda: optimizers.SGD(1e-3), {}, ""),
    ],
)
def test_what_is_made_longer(make, options, said, capsys):
    pm = networks.pipeline(optimizer=make(), **{"horizon": "target", "microbatches": 1, **options})
    networks.fit(pm, *networks.data(32), batch_size=16, verbose=2)
    assert said in (out := capsys.readouterr().out)
    assert bool(said) == ("stretch_momentum" in out)


def test_what_has_no_momentum_that_is_known_is_refused_if_it_is_asked_for():
    with pytest.raises(ValueError, match=r"no momentum that is known.*optimizer=Signs, stretch_momentum=True.*'auto'"):
        networks.pipeline(optimizer=Signs(1e-3), horizon="target", microbatches=1, stretch_momentum=True)


def test_decoupled_weight_decay_stays_what_it_is_where_the_learning_rate_is_multiplied():
    """Keras multiplies one by the other."""
    optimizer = optimizers.SGD(0.05, momentum=0.9, weight_decay=0.25)
    settings, factor = stretched_settings(optimizer, 0.5)
    assert (settings, factor) == ({"momentum": 0.95, "weight_decay": 0.5}, 0.5)
    assert factor * settings["weight_decay"] == optimizer.weight_decay


@pytest.mark.wide
def test_another_optimizer_is_asked_anew():
    """Compiled without a momentum, and then with one."""
    pm = networks.pipeline(optimizer=optimizers.SGD(0.05), horizon="target", microbatches=1)
    for optimizer, longer in ((optimizers.SGD(0.05, momentum=0.5), True), (optimizers.Adagrad(0.05), False)):
        pm.compile(optimizer, loss=networks.crossentropy())
        networks.fit(pm, *networks.data(32), batch_size=16)
        rates = [float(stage._groups.own.optimizer.learning_rate) for (stage,) in inside.replicas(pm)]
        assert rates == pytest.approx([0.05 * (1.6 / 3 if longer else 1)] * 3)
