"""Draw the learning curves of experiments/table1.py: a row for each network, a curve for each scheme.

Curves are means over the seeds: lightly what was measured, and boldly the mean of every point and the 20 about it.

example:
  python plots/table1.py runs/table1 --output curves.png
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from matplotlib.figure import Figure

from plots import command
from plots.learning_curves import PANELS, curve, limit
from plots.style import COLOURS, save, scheme_of

Rows = list[dict[str, float]]


def draw(folder: Path, output: Path) -> Path:
    """One figure from the ``summary.json`` and ``history.jsonl`` of all runs under a folder that have ended.

    Curves are of the seeds that did not diverge, or, where all of them did, of all until the first divergence.
    """
    networks = read(folder)
    figure = Figure(figsize=(14, 3.3 * len(networks) + 0.7), layout="constrained")
    grid = figure.subplots(len(networks), len(PANELS), squeeze=False)
    handles: dict[str, Any] = {}
    for panels, (network, schemes) in zip(grid, networks.items(), strict=True):
        notes = []
        for scheme in sorted(schemes, key=place):
            curves, note = chosen(schemes[scheme])
            notes += [f"{scheme}: {note}"] if note else []
            for panel, key in zip(panels, PANELS, strict=True):
                handles[scheme] = curve(panel, scheme, *means(curves, key))
        for panel, (key, name) in zip(panels, PANELS.items(), strict=True):
            panel.set(title=f"{network}: {name}", xlabel="step")
            panel.grid(alpha=0.3)
            limit(panel, key)
        if notes:
            panels[0].text(0.98, 0.96, "\n".join(notes), transform=panels[0].transAxes, ha="right", va="top", size=8)
    figure.legend(handles.values(), handles, loc="outside upper center", ncols=len(handles), frameon=False)
    return save(figure, output)


def place(name: str) -> tuple[int, str]:
    """Of a scheme or a variant among the others: as colours are listed, then those that have none."""
    known = list(COLOURS)
    return (known.index(scheme_of(name)) if scheme_of(name) in known else len(known), name)


def read(folder: Path) -> dict[str, dict[str, list[tuple[Rows, int | None]]]]:
    """By network, and scheme or variant of one, the rows of history of every run and where it diverged, if it did.

    Raises ValueError where no run has ended.
    """
    networks: dict[str, dict[str, list[tuple[Rows, int | None]]]] = {}
    for path in sorted(folder.glob("*/*/seed*/summary.json")):
        lines = path.with_name("history.jsonl").read_text(encoding="utf-8").splitlines()
        summary = json.loads(path.read_text(encoding="utf-8"))
        run = ([json.loads(line) for line in lines], summary["diverged_at"])
        networks.setdefault(summary["model"], {}).setdefault(path.parts[-3], []).append(run)
    if not networks:
        raise ValueError(
            f"No run has ended. Received: {str(folder)!r}. Try the --output of experiments/table1.py, once one has."
        )
    return networks


def chosen(runs: Sequence[tuple[Rows, int | None]]) -> tuple[list[Rows], str]:
    """The histories that are drawn, and what is to be said of those that diverged."""
    diverged = [step for _, step in runs if step is not None]
    steady = [rows for rows, step in runs if step is None]
    if not diverged:
        return steady, ""
    at = f"diverged at step {', '.join(map(str, diverged))} in {len(diverged)} of {len(runs)} seeds"
    return (steady, f"{at}, not drawn") if steady else ([rows for rows, _ in runs], at)


def means(curves: Sequence[Rows], key: str) -> tuple[list[float], list[float]]:
    """Steps, and the mean over the curves, as far as the shortest of them goes."""
    shared = list(zip(*curves, strict=False))
    return [rows[0]["step"] for rows in shared], [fmean(row[key] for row in rows) for rows in shared]


if __name__ == "__main__":
    sys.exit(command.of_folder(__doc__, draw, "experiments/table1.py", "table1.png"))
