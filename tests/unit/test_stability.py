"""The largest stable steps: known values, and simulations on either side of them."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from experiments import stability
from experiments.stability import largest, largest_step
from pipetrain.schemes.policies import stretched
from pipetrain.schemes.table import scheme


@pytest.mark.parametrize(
    ("policy", "step"),
    [("single", 3.8), ("vanilla", 0.0323), ("spectrain", 0.0593), ("2bw", 0.1), ("2bw/1.5", 0.3025)],
)
def test_known_steps_at_eight_stages(policy, step):
    assert largest(policy, 8, 0.9) == pytest.approx(step, abs=1e-4)


def test_one_target_at_eight_stages():
    """About ten times what it is without a prediction, and more with more microbatches."""
    steps = [largest(f"spectrain/target/M={count}", 8, 0.9) for count in (1, 2, 4, 8)]
    assert steps == pytest.approx([0.2074, 0.3517, 0.5550, 0.7641], abs=1e-4)


def test_heavy_ball_is_stable_up_to_twice_one_and_its_momentum():
    for mu in (0.0, 0.5, 0.99):
        assert largest_step({0: 1.0}, mu) == pytest.approx(2 * (1 + mu), rel=1e-6)
    assert all(largest(policy, 1, 0.9) == pytest.approx(3.8) for policy in ("vanilla", "spectrain", "vertical-sync"))
    assert largest_step({1: 1.0}, 0.0) == pytest.approx(1.0)  # z^2 - z + x: roots of modulus sqrt(x)


def diverges(chosen, stages, microbatches, step, mu=0.9, minibatches=3000):
    """Stage by stage and microbatch by microbatch, from the first minibatch on."""
    factor = chosen.rule(0, stages, microbatches).stretch
    mu = stretched(mu, factor)
    weights, velocities = [[1.0] for _ in range(stages)], [[0.0] for _ in range(stages)]
    for i in range(minibatches):
        gradient = 0.0
        for m in range(i * microbatches, (i + 1) * microbatches):
            for stage in range(stages):
                version, ahead = chosen.policy.forward(chosen.reader(m, stage, stages, microbatches))
                read = weights[stage][version] + ahead * velocities[stage][version]
                gradient += read / (stages * microbatches)
        for stage in range(stages):
            velocities[stage].append(mu * velocities[stage][-1] - factor * step * gradient)
            weights[stage].append(weights[stage][-1] + velocities[stage][-1])
    late = [abs(weight) for weight in weights[0][-500:]]
    return max(late) > max(map(abs, weights[0][minibatches // 2 :][:500]))


@pytest.mark.parametrize(
    ("policy", "options", "microbatches"),
    [
        ("vanilla", ("vanilla",), 1),
        ("spectrain", ("spectrain",), 1),
        ("spectrain/target/M=1", ("spectrain", "target"), 1),
        ("spectrain/target/M=4", ("spectrain", "target"), 4),
        ("2bw/1.5", ("2bw", 1.5), 5),
    ],
)
def test_a_simulation_is_stable_below_and_not_above(policy, options, microbatches):
    step = largest(policy, 6, 0.9)
    assert not diverges(scheme(*options), 6, microbatches, 0.97 * step)
    assert diverges(scheme(*options), 6, microbatches, 1.03 * step)


@pytest.mark.wide
def test_the_command_line(tmp_path, capsys):
    assert stability.main(["--stages", "8", "--stages", "2", "--output", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "2 stages" in said
    assert (tmp_path / "stability.png").exists()
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["stages"] == [2, 8]
    assert summary["steps"]["vanilla"][1] == largest("vanilla", 8, 0.9)
    rows = {each["policy"]: each for each in csv.DictReader((tmp_path / "stability.csv").open(encoding="utf-8"))}
    assert [*rows] == stability.policies()
    assert [*rows["vanilla"]] == ["policy", "2 stages", "8 stages"]
    assert float(rows["vanilla"]["8 stages"]) == largest("vanilla", 8, 0.9)
    page = Path(__file__).parents[2] / "docs" / "results" / "stability.csv"
    assert {*rows["vanilla"]} < {*csv.DictReader(page.open(encoding="utf-8")).fieldnames}
    with pytest.raises(SystemExit):
        stability.parse(["--momentum", "1"])
