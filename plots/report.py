"""Gather what runs left, figures and tables, into one HTML page that opens offline and reads well on a phone.

Takes folders of any kind: an --output of experiments/run.py or one scheme's folder in it; of experiments/table1.py,
rmse.py, staleness.py, traffic.py or speedup.py. It shows what it finds there, and says what is missing.

examples:
  python plots/report.py runs/all
  python plots/report.py runs/all runs/table1 runs/rmse runs/staleness runs/traffic runs/speedup
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from pipetrain.cli.arguments import Folded
from plots import missing, page, runs, studies
from plots.comparison import comparison

STUDIES = {
    "table1": studies.accuracy,
    "rmse": studies.errors,
    "staleness": studies.stale,
    "traffic": studies.volume,
    "speedup": studies.platform,
}


class Given(NamedTuple):
    """The folders that were given, by what is in them."""

    compared: list[list[runs.Run]]
    table1: list[Path]
    rmse: list[Path]
    staleness: list[Path]
    traffic: list[Path]
    speedup: list[Path]
    notes: list[str]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status: 2 where there is nothing to show."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Folded)
    parser.add_argument("runs", nargs="+", type=Path, help="folders that experiments left")
    parser.add_argument("--output", type=Path, help="(default: report.html in the first of them)")
    options = parser.parse_args(arguments)
    try:
        print(write(options.runs, options.output or options.runs[0] / "report.html"))
    except (OSError, ValueError) as error:
        print(f"report.py: {error}", file=sys.stderr)
        return 2
    return 0


def write(folders: Sequence[Path], output: Path) -> Path:
    """The page of these folders. Raises ValueError where there is nothing in any of them."""
    given = sorted_out(folders)
    if not any(given[:-1]):
        raise ValueError(
            f"There is nothing to show. Received: {', '.join(map(str, folders))}. "
            "Try the --output of experiments/run.py."
        )
    with tempfile.TemporaryDirectory() as scratch:
        parts = [part for section in _sections(given, Path(scratch)) for part in section]
    output.write_text(page.page("Training runs of pipetrain", parts), encoding="utf-8")
    return output


def sorted_out(folders: Sequence[Path]) -> Given:
    """What kind of experiment each folder is of; notes say which folders have nothing."""
    given = Given([], [], [], [], [], [], [])
    alone = []
    for folder in folders:
        kind = _kind(folder)
        if kind == "runs":
            alone.append(folder)
        elif kind:
            getattr(given, kind).append(folder)
        else:
            given.notes.append(f"{folder}: there is no run in it.")
    if alone:
        given.compared.extend(_readable(alone, given.notes))
    return given


def _kind(folder: Path) -> str:
    """Of which experiment a folder is; nothing if of none."""
    for kind in ("traffic", "speedup"):
        if (folder / f"{kind}.json").exists():
            return kind
    if next(folder.glob("*/*/seed*/summary.json"), None):
        return "table1"
    try:
        config = runs.load(folder / "config.json")
    except ValueError:
        config = {}
    for key, kind in {"horizons": "rmse", "policy": "staleness", "scheme": "runs"}.items():
        if key in config:
            return kind
    return "runs" if next(folder.glob("*/config.json"), None) else ""


def _readable(folders: Sequence[Path], notes: list[str]) -> list[list[runs.Run]]:
    """The runs that can be read; of the others a note."""
    whole = [each for folder in folders for each in ([folder] if _is_run(folder) else sorted(folder.glob("*/")))]
    kept = []
    for folder in filter(_is_run, whole):
        try:
            runs.read(folder)
            kept.append(folder)
        except missing.DAMAGED as error:
            notes.append(str(error))
    return runs.find(kept) if kept else []


def _is_run(folder: Path) -> bool:
    return (folder / "config.json").exists()


def _sections(given: Given, scratch: Path) -> Iterator[list[str]]:
    """The parts of the page, one experiment after another."""
    yield [
        page.paragraph(
            "A pipeline cuts a network into stages, puts each stage on a device of its own, and keeps them all at work "
            "by letting many minibatches be under way at once. A scheme decides in which order the stages work and "
            "which version of the weights each minibatch reads."
        )
    ]
    for those in given.compared:
        yield comparison(those, scratch)
    for kind, section in STUDIES.items():
        for folder in getattr(given, kind):
            yield section(folder, scratch)
    if given.notes:
        yield [page.heading("What could not be read"), page.bullets(given.notes)]


if __name__ == "__main__":
    sys.exit(main())
