"""A page's part about the runs of several schemes: what they came to, their figures and timelines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pipetrain.schemes.table import GRIDS, HORIZONS, PIPELINES, TRANSFERRING, TREES
from pipetrain.trace.idle import messages
from pipetrain.trace.timeline import first_of_steady, pieces
from pipetrain.trace.trace import Trace
from plots import breakdown, learning_curves, memory, page, runs, throughput, timeline, transfers
from plots.missing import attempt

BOXES = 10  # minibatches in a timeline
STEPS = 2  # in one that shows the packs of a plan of transfers
MIB = 2**20
OF_TREES = ("children", "tree_depth", "stragglers")
AGAINST = "Against single: how many times the samples per second of the whole network on one device. "
BEST = "Losses and accuracy are the best that were seen; accuracy is on data that training does not see."
DASHED = " The dashed line is the whole network on one device, and what reaches beyond it gains from the pipeline."


def comparison(those: Sequence[runs.Run], scratch: Path) -> list[str]:
    """The runs of several schemes that lie side by side: settings, table, figures, timelines, what is missing."""
    missing = [f"{run.scheme} has not ended: it has no summary." for run in those if not run.summary]
    traces = _traces(those, missing)
    figures = [*_figures(those, traces, scratch, missing)]
    timelines = [part for run, trace in traces for part in _timeline(run, trace, scratch, missing)]
    return [
        page.heading(those[0].title),
        page.definitions(settings(those)),
        page.heading("How the schemes compare" if len(those) > 1 else "What it came to", 3),
        page.table(*compared(those)),
        page.paragraph(AGAINST * (single_rate(those) is not None) + BEST, aside=True),
        page.figures(figures),
        *([page.heading("What the stages did", 3), page.paragraph(TIMELINES), *timelines] if timelines else []),
        *([page.heading("What is missing", 3), page.bullets(missing)] if missing else []),
    ]


def settings(those: Sequence[runs.Run]) -> list[tuple[str, str]]:
    """What the runs were told, as far as it is the same for all of them; what is not, scheme by scheme."""
    names = dict.fromkeys(key for run in those for key in run.config if _matters(key, run.config))
    pairs = [("schemes", ", ".join(run.scheme for run in those))]
    for name in names:
        values = {run.scheme: _said(run.config.get(name)) for run in those}
        same = len(set(values.values())) == 1
        said = values[those[0].scheme] if same else ", ".join(f"{key}: {value}" for key, value in values.items())
        if said:
            pairs.append((name.replace("_", " "), said))
    for run in those:
        if run.summary.get("taken"):
            taken = ", ".join(f"{name} {_said(value)}" for name, value in run.summary["taken"].items())
            pairs.append((f"{run.scheme} took", f"{taken}. {run.summary.get('reason') or ''}"))
    if said := kernels(those):
        pairs.append(("kernels", said))
    peak = max((run.summary.get("peak_memory_bytes") or 0 for run in those), default=0)
    return [*pairs, ("most memory of the process", f"{peak / MIB:,.0f} MiB")] if peak else pairs


def _matters(key: str, config: dict[str, Any]) -> bool:
    """Whether a setting says something of a run of this scheme."""
    if key in OF_TREES:
        return config["scheme"] in TREES
    if key == "horizon":
        return config["horizon"] != HORIZONS[0]
    return key != "scheme" and (key != "stretch_momentum" or config.get("horizon") == "target")


def single_rate(those: Sequence[runs.Run]) -> float | None:
    """The samples per second of the whole network on one device, if that was measured too."""
    return runs.throughput(those).get("single") if len(those) > 1 else None


def kernels(those: Sequence[runs.Run]) -> str:
    """Which stages of which scheme XLA compiled; empty if nothing says."""
    found: dict[str, list[str]] = {}
    for run in those:
        try:
            stages = (run.partition() or {}).get("stages", [])
        except ValueError:  # which the figure of memory will say
            continue
        if stages:
            compiled = [str(n) for n, stage in enumerate(stages) if stage.get("compiled")]
            every = "TensorFlow's" if not compiled else "XLA" if len(compiled) == len(stages) else ""
            found.setdefault(every or f"XLA in stage{'s' * (len(compiled) > 1)} {', '.join(compiled)}", []).append(
                run.scheme
            )
    if len(found) == 1:
        return next(iter(found))
    return "; ".join(f"{', '.join(schemes)}: {how}" for how, schemes in found.items())


def _said(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {each}" for key, each in value.items())
    if isinstance(value, bool):
        return "yes" if value else ""
    return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def compared(those: Sequence[runs.Run]) -> tuple[list[str], list[list[str]]]:
    """The header and the rows of the table of schemes."""
    base = single_rate(those)
    against = ["against single"] if base else []
    header = ["scheme", "samples/s", *against, "best accuracy", "min training loss", "min validation loss"]
    rows = []
    for run in those:
        speed = run.summary.get("samples_per_second")
        best = [run.summary.get(key) for key in ("max_val_accuracy", "min_train_loss", "min_val_loss")]
        cells = [_number(speed, ",.0f")]
        if base:
            cells.append(_number(speed / base if speed else None, ".2f", "x"))
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
        "Bars: samples per second of each scheme",
        "How many samples each scheme trains on per second.",
    ),
    "breakdown": Figure(
        breakdown.draw,
        "Stacked bars: the share of the stages' time spent computing and idle, by cause, for each scheme",
        "What the stages' time goes into, while the pipeline is full: computing, waiting for something that is on its "
        "way (transfer), or waiting because another stage is not done yet (imbalance); pauses for evaluations are "
        "left out. Between the CPU devices of one process nothing is copied: there, transfers take next to no time.",
    ),
    "transfers": Figure(
        transfers.draw,
        "Stacked bars: KiB that devices send each other for each minibatch, by what is sent, for each scheme",
        "What devices send each other for each minibatch: what crosses the cuts between stages goes down as "
        "activations and comes back as gradients; the replicas of a stage, if there are any, sum the gradients of its "
        "weights.",
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
    "about each point (of short runs as measured); lower losses and higher accuracy are better. Synchronous schemes "
    "compute the same, so that their curves lie one over another.",
)

TIMELINES = (
    "From the middle of each run. Every row is a stage; every box is the forward or the backward of one minibatch, or "
    "of one of its parts, and has its number and, small, the version of the stage's weights. Where the stage waits, "
    "the shading says for what."
)


def _figures(
    those: Sequence[runs.Run], traces: Sequence[tuple[runs.Run, Trace]], scratch: Path, missing: list[str]
) -> Iterator[str]:
    """The figures that these runs have files for; for the others a line more in ``missing``."""
    folders = [run.folder for run in those]
    traced = [run.folder for run, _ in traces]
    sending = [run.folder for run, trace in traces if len(trace.transfers)]
    base = single_rate(those)
    for name, figure in FIGURES.items():
        given = {"breakdown": traced, "transfers": sending}.get(name, folders)
        what = f"The figure {name!r}"
        drawn = attempt(what, missing, figure.draw, given, scratch / f"{name}.png") if given else None
        if drawn:
            yield page.picture(drawn, figure.alt, figure.caption + (DASHED if name == "throughput" and base else ""))
    curves = attempt("The figure 'learning curves'", missing, learning_curves.draw, folders, scratch / "curves.png")
    if curves:
        narrow = learning_curves.draw(folders, scratch / "narrow.png", narrow=True)
        yield page.picture(curves, *CURVES, narrow=narrow)


def _traces(those: Sequence[runs.Run], missing: list[str]) -> list[tuple[runs.Run, Trace]]:
    """The runs that kept a trace with something in it."""
    found = [(run, attempt(f"The trace of {run.scheme}", missing, run.trace)) for run in those]
    without = [run.scheme for run in those if not (run.folder / "trace.json").exists()]
    kept = [(run, trace) for run, trace in found if trace is not None]
    silent = [run.scheme for run, trace in kept if len(trace.rows) > 1 and not len(trace.transfers)]
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
    path, what = scratch / f"timeline-{run.scheme}.png", f"The timeline of {run.scheme}"
    count = STEPS if len(messages(trace.transfers)) else BOXES
    first = first_of_steady(trace, count)
    drawn = attempt(what, missing, timeline.draw, trace, path, first=first, minibatches=count)
    if drawn:
        known = PIPELINES | TRANSFERRING | TREES | GRIDS
        about = f" ({known[run.scheme].about})" if run.scheme in known else ""
        alt = f"Timeline: forward and backward boxes of every stage under {run.scheme}"
        unit = "microbatch" if pieces(trace) > 1 else "minibatch"
        yield page.picture(drawn, alt, f"{run.scheme}{about}: from {unit} {first} on.", wide=True)
