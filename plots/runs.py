"""The files of runs, read for figures."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipetrain.schemes.table import NAMES
from pipetrain.trace.trace import Trace


@dataclass(frozen=True)
class Run:
    """One scheme's run: its folder, what it was told, and what it came to (nothing, if it has not ended)."""

    folder: Path
    config: dict[str, Any]
    summary: dict[str, Any]

    @property
    def scheme(self) -> str:
        """The scheme's name."""
        return self.config["scheme"]

    @property
    def title(self) -> str:
        """What was trained on, for people."""
        about = "{model} on {dataset}, {stages} stages, batch {batch_size}"
        return about.format(**{key: self.config.get(key, "?") for key in ("model", "dataset", "stages", "batch_size")})

    def history(self) -> list[dict[str, float]]:
        """The rows of its history; of a damaged file, those before the damage."""
        path, rows = self.folder / "history.jsonl", []
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            try:
                rows.append(json.loads(line))
            except ValueError:
                break
        return rows

    def values(self, key: str) -> tuple[list[float], list[float]]:
        """The steps of its history, and what it measured at each of them."""
        rows = self.history()
        return [row["step"] for row in rows], [row[key] for row in rows]

    def trace(self) -> Trace | None:
        """What its stages did and when; None if that was not kept, or there is nothing in it."""
        path = self.folder / "trace.json"
        try:
            trace = Trace.load(path)
        except FileNotFoundError:
            return None
        except (KeyError, TypeError, ValueError) as error:
            raise _damaged(path, error) from error
        return trace if len(trace.spans) else None

    def partition(self) -> dict[str, Any] | None:
        """How the model was cut; None if that was not kept."""
        path = self.folder / "partition.json"
        return load(path) if path.exists() else None


def load(path: Path) -> Any:
    """A JSON file's content. Raises ValueError where it cannot be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _damaged(path, error) from error


def read(folder: Path) -> Run:
    """One run. Raises ValueError where there is none."""
    config, summary = load(folder / "config.json"), folder / "summary.json"
    if not isinstance(config, dict) or "scheme" not in config:
        raise _damaged(folder / "config.json", "no scheme")
    return Run(folder, config, load(summary) if summary.exists() else {})


def find(folders: Iterable[Path]) -> list[list[Run]]:
    """The runs in these folders, or right below them: those that lie side by side together, in the schemes' order.

    Raises ValueError where there are none.
    """
    found: dict[Path, Run] = {}
    for folder in map(Path, folders):
        whole = [folder] if (folder / "config.json").exists() else [*folder.glob("*/")]
        inside = [each for each in whole if (each / "config.json").exists()]
        if not inside:
            raise ValueError(f"There is no run. Received: {str(folder)!r}. Try the --output of experiments/run.py.")
        found |= {each.resolve(): read(each) for each in inside}
    together: dict[Path, list[Run]] = {}
    for place, run in found.items():
        together.setdefault(place.parent, []).append(run)
    return [sorted(those, key=_place) for those in together.values()]


def throughput(runs: Sequence[Run]) -> dict[str, float]:
    """Samples per second of those runs that were long enough to measure them."""
    measured = {run.scheme: run.summary.get("samples_per_second") for run in runs}
    return {scheme: value for scheme, value in measured.items() if value}


def _place(run: Run) -> tuple[int, str]:
    return (NAMES.index(run.scheme) if run.scheme in NAMES else len(NAMES), run.scheme)


def _damaged(path: Path, why: object) -> ValueError:
    return ValueError(f"A run's file cannot be read ({why}). Received: {str(path)!r}. Try another folder.")
