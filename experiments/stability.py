"""How large a step may be: the largest stable step of delayed heavy ball, by policy, number of stages and momentum.

The loss is quadratic in what all stages' weights add up to, with curvature lambda: `lambda/2 * (sum of the stages'
weights)^2 / N`. A microbatch's gradient is then lambda times the mean of what its forwards have read, which is the same
at every stage, and whatever backwards read. The stages' weights begin alike and stay alike, so that one sequence says
it all: `w[i+1] = w[i] + mu*(w[i] - w[i-1]) - x * sum_d c_d * w[i-d]`, where `x = rate * lambda`, and c_d are how much
of version i-d is read on the mean, predictions included. Once the pipeline is full this does not change with time: it
is stable as long as all roots of its characteristic polynomial are within the unit circle. What is said is the step up
to which it is, by the rate that `compile` is given: where momentum is stretched, the polynomial has the longer momentum
and the smaller rate.

`single` is heavy ball itself, stable up to `2 * (1 + mu)`. Nothing is trained: it takes about two seconds.

examples:
  python experiments/stability.py
  python experiments/stability.py --stages 8 --momentum 0.95
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from experiments.options import writable  # noqa: E402
from experiments.policies import POLICIES  # noqa: E402
from experiments.progress import write_rows  # noqa: E402
from pipetrain.cli.arguments import Folded, count, from_zero  # noqa: E402
from pipetrain.logs import text_table  # noqa: E402
from pipetrain.plan.memory import Training  # noqa: E402
from pipetrain.schemes.policies import stretched  # noqa: E402
from pipetrain.schemes.scheme import Scheme  # noqa: E402

STAGES = (1, 2, 4, 8, 16, 32)
LEFT_OUT = ("vanilla + rescaling", "spike-compensation", "spectrain/fitted", "weight-stashing")  # the last: as vanilla
STEPS = np.geomspace(1e-5, 10, 400)  # of which the first unstable one is looked for
WITHIN = 1 - 1e-10  # a root that is nearer to the unit circle is on it


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status: 2 for arguments that cannot be used."""
    options = parse(arguments)
    try:
        output = writable(Path(options.output or ROOT / "runs" / "stability"))
    except ValueError as error:
        print(f"stability.py: {error}", file=sys.stderr)
        return 2
    steps = {policy: [largest(policy, each, options.momentum) for each in options.stages] for policy in policies()}
    content = {"momentum": options.momentum, "stages": options.stages, "steps": steps}
    (output / "summary.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    from plots.stability import draw

    header = ("policy", *(f"{each} stage{'s' * (each > 1)}" for each in options.stages))
    write_rows(
        output / "stability.csv", [dict(zip(header, (name, *some), strict=True)) for name, some in steps.items()]
    )
    rows = [(policy, *(f"{each:.4f}" for each in some)) for policy, some in steps.items()]
    print(f"Largest stable step, rate * curvature, at momentum {options.momentum:g}\n\n{text_table(header, rows)}\n")
    print(draw(output, output / "stability.png"))
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Folded)
    default = " ".join(map(str, STAGES))
    parser.add_argument(
        "--stages",
        type=count,
        action="append",
        metavar="N",
        help=f"pipeline stages; may be given several times (default: {default})",
    )
    parser.add_argument(
        "--momentum", type=from_zero, default=0.9, metavar="X", help="mu, below 1 (default: %(default)s)"
    )
    parser.add_argument("--output", metavar="DIR", help="where results go (default: runs/stability)")
    options = parser.parse_args(arguments)
    if options.momentum >= 1:
        parser.error(f"--momentum {options.momentum:g} is not below 1")
    options.stages = sorted({*(options.stages or STAGES)})
    return options


def policies() -> list[str]:
    """Those whose steps depend on what forwards read alone."""
    return [policy for policy in POLICIES if policy not in LEFT_OUT]


def largest(policy: str, stages: int, mu: float) -> float:
    """The largest stable step of a policy of ``policies.POLICIES`` at so many stages."""
    settings = dict(POLICIES[policy])
    chosen = Training().under(settings.pop("scheme")).chosen
    pieces = settings.get("microbatches", max(1, stages - 1) if chosen.splits else 1)
    if not chosen.asynchronous:
        return largest_step({0: 1.0}, mu)
    factor = chosen.rule(0, stages, pieces).stretch
    return largest_step(reads(chosen, stages, pieces), stretched(mu, factor), factor)


def reads(chosen: Scheme, stages: int, microbatches: int) -> dict[int, float]:
    """How much of version i-d the forwards of minibatch i read, on the mean of stages and microbatches; by d."""
    minibatch, found = 3 * stages, defaultdict[int, float](float)
    part = 1 / (stages * microbatches)
    for stage in range(stages):
        for microbatch in range(minibatch * microbatches, (minibatch + 1) * microbatches):
            version, ahead = chosen.policy.forward(chosen.reader(microbatch, stage, stages, microbatches))
            found[minibatch - version] += part * (1 + ahead)
            if ahead:
                found[minibatch - version + 1] -= part * ahead
    return dict(found)


def largest_step(terms: Mapping[int, float], mu: float, factor: float = 1.0) -> float:
    """The x up to which ``w[i+1] = w[i] + mu*(w[i] - w[i-1]) - factor * x * sum_d terms[d] * w[i-d]`` is stable."""
    low, high = 0.0, next((step for step in STEPS if not _is_stable(terms, mu, factor * step)), np.inf)
    if np.isfinite(high):
        low = max((step for step in STEPS if step < high), default=0.0)
        while high - low > 1e-9 * high:
            middle = (low + high) / 2
            low, high = (middle, high) if _is_stable(terms, mu, factor * middle) else (low, middle)
    return float(high)


def _is_stable(terms: Mapping[int, float], mu: float, step: float) -> bool:
    polynomial = np.zeros(max(1, *terms) + 2)
    polynomial[:3][: len(polynomial)] += np.array([1.0, -1.0 - mu, mu])[: len(polynomial)]
    for delay, part in terms.items():
        polynomial[1 + delay] += step * part
    return bool(np.abs(np.roots(polynomial)).max() < WITHIN)


if __name__ == "__main__":
    sys.exit(main())
