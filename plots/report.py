"""Gather what runs left, figures and tables, into one HTML page that opens offline and reads well on a phone.

Takes folders of any kind: an --output of experiments/run.py or one scheme's folder in it; of experiments/table1.py,
rmse.py, staleness.py or traffic.py. It shows what it finds there, and says what is missing.

examples:
  python plots/report.py runs/all
  python plots/report.py runs/all runs/table1 runs/rmse runs/staleness runs/traffic --output report.html
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from pipetrain.plan.schemes import SCHEMES
from pipetrain.plan.trace import Trace
from plots import breakdown, learning_curves, memory, page, rmse, runs, staleness, table1, throughput, timeline, traffic

BOXES = 10  # minibatches in a timeline
MIB = 2**20
DAMAGED = (ValueError, KeyError, TypeError, OSError)


class Studies(NamedTuple):
    """The folders that were given, by what is in them."""

    compared: list[list[runs.Run]]
    table1: list[Path]
    rmse: list[Path]
    staleness: list[Path]
    traffic: list[Path]
    notes: list[str]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status: 2 where there is nothing to show."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
    studies = sorted_out(folders)
    if not any(studies[:-1]):
        raise ValueError(
            f"There is nothing to show. Received: {', '.join(map(str, folders))}. "
            "Try the --output of experiments/run.py."
        )
    with tempfile.TemporaryDirectory() as scratch:
        parts = [part for section in _sections(studies, Path(scratch)) for part in section]
    output.write_text(page.page("Training runs of pipetrain", parts), encoding="utf-8")
    return output


def sorted_out(folders: Sequence[Path]) -> Studies:
    """What kind of experiment each folder is of; notes say which folders have nothing."""
    studies = Studies([], [], [], [], [], [])
    alone = []
    for folder in folders:
        kind = _kind(folder)
        if kind == "runs":
            alone.append(folder)
        elif kind:
            getattr(studies, kind).append(folder)
        else:
            studies.notes.append(f"{folder}: there is no run in it.")
    if alone:
        studies.compared.extend(_readable(alone, studies.notes))
    return studies


def _kind(folder: Path) -> str:
    """Of which experiment a folder is; nothing if of none."""
    if (folder / "traffic.json").exists():
        return "traffic"
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
        except DAMAGED as error:
            notes.append(str(error))
    return runs.find(kept) if kept else []


def _is_run(folder: Path) -> bool:
    return (folder / "config.json").exists()


def _sections(studies: Studies, scratch: Path) -> Iterator[list[str]]:
    """The parts of the page, one experiment after another."""
    yield [
        page.paragraph(
            "A pipeline cuts a network into stages, puts each stage on a device of its own, and keeps them all at work "
            "by letting many minibatches be under way at once. A scheme decides in which order the stages work and "
            "which version of the weights each minibatch reads."
        )
    ]
    for those in studies.compared:
        yield comparison(those, scratch)
    for kind, section in {"table1": accuracy, "rmse": errors, "staleness": stale, "traffic": volume}.items():
        for folder in getattr(studies, kind):
            yield section(folder, scratch)
    if studies.notes:
        yield [page.heading("What could not be read"), page.bullets(studies.notes)]


def comparison(those: Sequence[runs.Run], scratch: Path) -> list[str]:
    """The runs of several schemes that lie side by side: settings, table, figures, timelines, what is missing."""
    missing = [f"{run.scheme} has not ended: it has no summary." for run in those if not run.summary]
    traces = _traces(those, missing)
    figures = [*_figures(those, [run for run, _ in traces], scratch, missing)]
    timelines = [part for run, trace in traces for part in _timeline(run, trace, scratch, missing)]
    return [
        page.heading(those[0].title),
        page.definitions(settings(those)),
        page.heading("How the schemes compare", 3),
        page.table(*compared(those)),
        page.paragraph(
            "Against single: how many times the samples per second of the whole network on one device. Losses and "
            "accuracy are the best that were seen; accuracy is on data that training does not see.",
            aside=True,
        ),
        page.figures(figures),
        *([page.heading("What the stages did", 3), page.paragraph(TIMELINES), *timelines] if timelines else []),
        *([page.heading("What is missing", 3), page.bullets(missing)] if missing else []),
    ]


def settings(those: Sequence[runs.Run]) -> list[tuple[str, str]]:
    """What the runs were told, as far as it is the same for all of them; what is not, scheme by scheme."""
    names = dict.fromkeys(key for run in those for key in run.config if key != "scheme")
    pairs = [("schemes", ", ".join(run.scheme for run in those))]
    for name in names:
        values = {run.scheme: _said(run.config.get(name)) for run in those}
        same = len(set(values.values())) == 1
        said = values[those[0].scheme] if same else ", ".join(f"{key}: {value}" for key, value in values.items())
        if said:
            pairs.append((name.replace("_", " "), said))
    peak = max((run.summary.get("peak_memory_bytes") or 0 for run in those), default=0)
    return [*pairs, ("most memory of the process", f"{peak / MIB:,.0f} MiB")] if peak else pairs


def _said(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {each}" for key, each in value.items())
    if isinstance(value, bool):
        return "yes" if value else ""
    return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def compared(those: Sequence[runs.Run]) -> tuple[list[str], list[list[str]]]:
    """The header and the rows of the table of schemes."""
    header = ["scheme", "samples/s", "against single", "best accuracy", "min training loss", "min validation loss"]
    base = runs.throughput(those).get("single")
    rows = []
    for run in those:
        speed = run.summary.get("samples_per_second")
        best = [run.summary.get(key) for key in ("max_val_accuracy", "min_train_loss", "min_val_loss")]
        cells = [_number(speed, ",.0f"), _number(speed / base if speed and base else None, ".2f", "x")]
        rows.append([run.scheme, *cells, *(_number(value, ".4f") for value in best)])
    if any(run.summary.get("diverged_at") for run in those):
        header.append("diverged")
        for row, run in zip(rows, those, strict=True):
            step = run.summary.get("diverged_at")
            row.append(f"at step {step}" if step else "")
    return header, rows


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"


class Figure(NamedTuple):
    """A figure of runs: how it is drawn, what a reader who does not see it is told, and its caption."""

    draw: Callable[[Sequence[Path], Path], Path]
    alt: str
    caption: str


FIGURES = {
    "throughput": Figure(
        throughput.draw,
        "Bars: samples per second of each scheme, against one device",
        "How many samples each scheme trains on per second: the dashed line is the whole network on one device, and "
        "what reaches beyond it gains from the pipeline.",
    ),
    "breakdown": Figure(
        breakdown.draw,
        "Stacked bars: the share of the stages' time spent computing and idle, by cause, for each scheme",
        "What the stages' time goes into, while the pipeline is full: computing, waiting for something that is on its "
        "way (transfer), or waiting because another stage is not done yet (imbalance); pauses for evaluations are "
        "left out.",
    ),
    "memory": Figure(
        memory.draw,
        "Bars: estimated memory of every stage, for each scheme",
        "The most that each stage keeps in its device's memory, as the planner estimates it: the first stages wait "
        "longest for their gradients and keep the most minibatches, and some schemes keep old weights too.",
    ),
}
CURVES = (
    "Curves of training loss, validation loss and validation accuracy over the steps, for each scheme",
    "How well the network does after so many minibatches: lightly what was measured, boldly the mean of the 20 values "
    "about each point (of short runs as measured); lower losses and higher accuracy are better.",
)

TIMELINES = (
    "From the middle of each run. Every row is a stage; every box is the forward or the backward of one minibatch, or "
    "of one of its parts, and has its number and, small, the version of the stage's weights; elsewhere the stage waits."
)


def _figures(those: Sequence[runs.Run], traced: Sequence[runs.Run], scratch: Path, missing: list[str]) -> Iterator[str]:
    """The figures that these runs have files for; for the others a line more in ``missing``."""
    folders = [run.folder for run in those]
    for name, figure in FIGURES.items():
        given = [run.folder for run in traced] if figure.draw is breakdown.draw else folders
        what = f"The figure {name!r}"
        drawn = _attempt(what, missing, figure.draw, given, scratch / f"{name}.png") if given else None
        if drawn:
            yield page.picture(drawn, figure.alt, figure.caption)
    curves = _attempt("The figure 'learning curves'", missing, learning_curves.draw, folders, scratch / "curves.png")
    if curves:
        narrow = learning_curves.draw(folders, scratch / "narrow.png", narrow=True)
        yield page.picture(curves, *CURVES, narrow=narrow)


def _traces(those: Sequence[runs.Run], missing: list[str]) -> list[tuple[runs.Run, Trace]]:
    """The runs that kept a trace with something in it."""
    found = [(run, _attempt(f"The trace of {run.scheme}", missing, run.trace)) for run in those]
    without = [run.scheme for run in those if not (run.folder / "trace.json").exists()]
    kept = [(run, trace) for run, trace in found if trace is not None]
    silent = [run.scheme for run, trace in kept if trace.stages > 1 and not len(trace.transfers)]
    if without:
        missing.append(f"The timelines of {', '.join(without)}: no trace was kept.")
    if silent:
        missing.append(
            f"The transfers of {', '.join(silent)}: they were not recorded, so that waiting for one counts as waiting "
            "for other stages."
        )
    return kept


def _timeline(run: runs.Run, trace: Trace, scratch: Path, missing: list[str]) -> Iterator[str]:
    """What the stages did in the middle of a run."""
    first, path = middle(run, trace), scratch / f"timeline-{run.scheme}.png"
    what = f"The timeline of {run.scheme}"
    drawn = _attempt(what, missing, timeline.draw, trace, path, first=first, minibatches=BOXES)
    if drawn:
        about = f" ({SCHEMES[run.scheme].about})" if run.scheme in SCHEMES else ""
        alt = f"Timeline: forward and backward boxes of every stage under {run.scheme}"
        yield page.picture(drawn, alt, f"{run.scheme}{about}: from number {first} on.", wide=True)


def middle(run: runs.Run, trace: Trace) -> int:
    """A minibatch, or the first part of one, about the middle of the run, some steps after an evaluation."""
    every = run.config.get("eval_every") or 1
    steps = run.summary.get("steps") or 1
    pieces = max(1, (1 + int(trace.spans.minibatch.max())) // steps)
    return pieces * (every * (steps // 2 // every) + every // 4)


def _attempt(what: str, missing: list[str], make: Callable[..., Any], *given: Any, **more: Any) -> Any:
    """What is made; None, and a line more in ``missing``, where files are not there or damaged."""
    try:
        return make(*given, **more)
    except DAMAGED as error:
        missing.append(f"{what}: {error}")
        return None


def accuracy(folder: Path, scratch: Path) -> list[str]:
    """A folder of experiments/table1.py."""
    missing: list[str] = []
    parts = [page.heading("Accuracy of every scheme, over several seeds")]
    path = folder / "table1.md"
    if path.exists():
        parts += markdown(path.read_text(encoding="utf-8"))
        parts.append(page.paragraph("Means over the seeds, with their 95% intervals; bold: the best.", aside=True))
    else:
        missing.append(f"The table: {path} is not there. Make it with experiments/table1.py --gather.")
    parts += _wide(
        folder,
        scratch,
        missing,
        table1.draw,
        "Curves of losses and accuracy over the steps: a row for each network, a curve for each scheme",
        "Means over the seeds of what was measured (light) and of the 20 values about each point (bold).",
    )
    return [*parts, *([page.bullets(missing)] if missing else [])]


def markdown(text: str) -> list[str]:
    """Headings, tables and paragraphs of a file that experiments/table1.py wrote."""
    parts: list[str] = []
    for block in text.split("\n\n"):
        lines = block.strip().splitlines()
        if not lines:
            continue
        if lines[0].startswith("#"):
            parts.append(page.heading(lines[0].lstrip("# "), 3))
        elif lines[0].startswith("|"):
            header, _, *rows = ([cell.strip() for cell in line[1:-1].split("|")] for line in lines)
            parts.append(page.table(header, rows))
        else:
            parts.append(page.paragraph(" ".join(lines), aside=True))
    return parts


def errors(folder: Path, scratch: Path) -> list[str]:
    """A folder of experiments/rmse.py."""
    return _study(
        "How near predicted weights come",
        folder,
        scratch,
        rmse.draw,
        "Curves of the error of stale and of predicted weights over the steps, a panel for each s",
        "How far (root of the mean square) the weights that a minibatch finds are from those that training has s "
        "updates later, and how far the predicted ones: the lower curve is nearer.",
    )


def stale(folder: Path, scratch: Path) -> list[str]:
    """A folder of experiments/staleness.py."""
    return _study(
        "What staleness costs",
        folder,
        scratch,
        staleness.draw,
        "Validation accuracy over the number of stages, a line for each policy",
        "The more stages, the older the weights that a minibatch reads: what accuracy each way to deal with that "
        "still reaches, beside training on one device.",
    )


def volume(folder: Path, scratch: Path) -> list[str]:
    """A folder of experiments/traffic.py."""
    return _study(
        "What devices send each other",
        folder / "traffic.json",
        scratch,
        traffic.draw,
        "Bars: megabytes sent per minibatch by data parallelism and by a pipeline, for each network",
        "Data parallelism sends every weight's gradient, a pipeline only what crosses its cuts: megabytes per "
        "minibatch, and how many times less the pipeline sends.",
    )


def _study(
    title: str, path: Path, scratch: Path, draw: Callable[[Path, Path], Path], alt: str, caption: str
) -> list[str]:
    missing: list[str] = []
    parts = _wide(path, scratch, missing, draw, alt, caption)
    return [page.heading(title), *parts, *([page.bullets(missing)] if missing else [])]


def _wide(
    path: Path, scratch: Path, missing: list[str], draw: Callable[[Path, Path], Path], alt: str, caption: str
) -> list[str]:
    drawn = _attempt(f"The figure of {path}", missing, draw, path, scratch / "figure.png")
    return [page.picture(drawn, alt, caption, wide=True)] if drawn else []


if __name__ == "__main__":
    sys.exit(main())
