"""What the progress bar says of a pipeline."""

from __future__ import annotations

import networks
import pytest

from pipetrain.frontend import progress_metrics
from pipetrain.run.pipeline import Activity


def test_figures_are_those_since_the_epoch_s_first_step(monkeypatch):
    clock = iter([10.0, 12.0, 14.0, 20.0, 21.0])
    monkeypatch.setattr(progress_metrics.time, "perf_counter", lambda: next(clock))
    figures = progress_metrics.ProgressMetrics()
    assert figures.figures(100, Activity(5.0, 4, 2)) == {}
    assert figures.figures(300, Activity(9.0, 4, 4)) == {"samples_per_s": 100, "in_flight": 4, "bubble": 0.5}
    assert figures.figures(700, Activity(17.0, 4, 3)) == {"samples_per_s": 150, "in_flight": 4, "bubble": 0.25}
    figures.begin_epoch()
    assert figures.figures(900, None) == {}
    assert figures.figures(950, None) == {"samples_per_s": 50}


@pytest.mark.parametrize("scheme", ["spectrain", "1f1b"])
def test_the_bar_shows_them_and_history_does_not(scheme, capsys):
    pm = networks.pipeline(scheme=scheme)
    history = pm.fit(*networks.data(), batch_size=16, epochs=2, verbose=1).history
    said = capsys.readouterr().out
    assert all(figure in said for figure in ("samples_per_s: ", "in_flight: 4.0000", "bubble: 0."))
    assert history.keys() == {"loss", "accuracy"}


def test_the_plan_is_explained():
    pm = networks.pipeline()
    text = pm.explain(batch_size=16)
    assert "4 stages, batch 16" in text
    assert "Recommended:" in text
