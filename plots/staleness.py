"""Draw validation accuracy over the number of stages, a line for each policy and a panel for each learning rate.

example:
  python plots/staleness.py runs/staleness --output staleness.png
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from plots import command
from plots.style import COLOURS, TARGETS, save

# A colour alone does not tell ten lines apart: policies that are related share one, and differ in marker and dashes.
LOOKS = {
    "single": (COLOURS["single"], "", "--"),
    "vanilla": (COLOURS["vanilla"], "o", "-"),
    "vanilla + rescaling": (COLOURS["vanilla"], "v", ":"),
    "weight-stashing": (COLOURS["weight-stashing"], "s", "-"),
    "2bw": (COLOURS["2bw"], "P", ":"),
    "vertical-sync": (COLOURS["vertical-sync"], "D", "-"),
    "spectrain": (COLOURS["spectrain"], "o", "-"),
    "spectrain/local": ("#0072B2", "^", "-."),
    "spectrain/fitted": ("#56B4E9", "*", "-"),
    **{f"spectrain/target/M={m}": (TARGETS[m], marker, "-") for m, marker in zip(TARGETS, "<>ph", strict=True)},
    "2bw/1.5": (COLOURS["2bw"], "d", "-"),
    "spike-compensation": (COLOURS["spike-compensation"], "X", "--"),
}
OTHER = ("#666666", "h", ":")


def draw(study: Path, output: Path) -> Path:
    """One figure from a study's ``config.json`` and ``summary.json``."""
    config, summary = (
        json.loads((study / f"{name}.json").read_text(encoding="utf-8")) for name in ("config", "summary")
    )
    rates = config["learning_rate"]
    figure = Figure(figsize=(max(8.0, 3.4 * len(rates)), 5.5), layout="constrained")
    panels = figure.subplots(1, len(rates), sharey=True, squeeze=False)[0]
    for panel, rate in zip(panels, rates, strict=True):
        _fill(panel, [row for row in summary["rows"] if row["learning_rate"] == rate], config)
        panel.set(title=f"learning rate {rate:g}", xlabel="stages", ylim=limits(summary["rows"]))
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("validation accuracy")
    figure.suptitle(
        f"{config['depth']} dense layers of width {config['width']}, {config['steps']} minibatches of "
        f"{config['batch_size']}, momentum {config['momentum']:g}\n"
        f"mean of {config['seeds']} seeds, 95% interval; what leaves the panel below diverged, a cross: no finite loss",
        fontsize="medium",
    )
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    return save(figure, output)


def limits(rows: Sequence[dict]) -> tuple[float, float]:
    """Of the axis: all rows fit in but those that diverged, which would flatten the others."""
    kept = [row for row in rows if row["mean"] is not None and not row["diverged"]]
    ends = [row["mean"] + sign * (row["half_width"] or 0.0) for row in kept for sign in (-1, 1)]
    return (max(0.0, min(ends) - 0.03), min(1.0, max(ends) + 0.03)) if ends else (0.0, 1.0)


def _fill(panel: Axes, rows: Sequence[dict], config: dict) -> None:
    """Stages are places on the axis, one beside the other; policies stand a little apart, that bars do not overlap."""
    places = {stages: place for place, stages in enumerate(config["stages"])}
    staged = [policy for policy in config["policy"] if policy != "single"]
    for policy in config["policy"]:
        colour, marker, dashes = LOOKS.get(policy, OTHER)
        some = [row for row in rows if row["policy"] == policy]
        means = [float("nan") if row["mean"] is None else row["mean"] for row in some]
        if policy == "single":
            panel.axhline(means[0], color=colour, linestyle=dashes, label=policy)
            half = some[0]["half_width"] or 0.0
            panel.axhspan(means[0] - half, means[0] + half, color=colour, alpha=0.08)
            continue
        shift = min(0.1, 0.75 / len(staged)) * (staged.index(policy) - (len(staged) - 1) / 2)
        lost = [places[row["stages"]] + shift for row in some if row["mean"] is None]
        panel.plot(lost, [0.02] * len(lost), "x", color=colour, transform=panel.get_xaxis_transform())
        panel.errorbar(
            [places[row["stages"]] + shift for row in some],
            means,
            [row["half_width"] or 0.0 for row in some],
            color=colour,
            marker=marker,
            linestyle=dashes,
            capsize=2.5,
            label=policy,
        )
    panel.set_xticks(range(len(places)), [str(stages) for stages in places])
    panel.set_xlim(-0.5, len(places) - 0.5)


if __name__ == "__main__":
    sys.exit(command.of_folder(__doc__, draw, "experiments/staleness.py", "staleness.png"))
