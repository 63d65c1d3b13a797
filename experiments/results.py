"""Runs found in a folder, and the paper's Table 1 made of them: as text, and as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby
from pathlib import Path

from experiments import resuming
from experiments.intervals import interval, shown
from experiments.records import Settings, Summary, described
from pipetrain.logs import counted, text_table
from pipetrain.schemes.table import DATA_PARALLEL, NAMES

REFERENCES = (DATA_PARALLEL, "single")  # synchronous, the same gradient of each minibatch
FREE = ("scheme", "file", "horizon", "microbatches", "seed")  # what may be different between the runs of a network
# Chen et al. 2018 (arXiv 1809.02839), section 4: validation accuracy against data parallelism, in points.
PAPER = {"vanilla": "-0.55", "weight-stashing": "-1.1", "spectrain": "0"}
PAPER_EXCEPTIONS = {("residual_lstm", "spectrain"): "below 0"}


@dataclass(frozen=True)
class Run:
    """One run that has ended."""

    settings: Settings
    summary: Summary


@dataclass(frozen=True)
class Cell:
    """What a table shows in one place, whether that is the best of its network, and the seeds' values behind it."""

    text: str
    best: bool = False
    values: tuple[float, ...] = ()


@dataclass(frozen=True)
class Section:
    """One network's part of the table."""

    model: str
    about: str
    header: tuple[str, ...]
    rows: list[tuple[Cell, ...]]


def folder(output: Path, settings: Settings) -> Path:
    """Where a run writes its files."""
    return output / settings.model / settings.label.replace("/", "-").replace("=", "") / f"seed{settings.seed}"


def gather(output: Path) -> list[Run]:
    """The runs under a folder that have ended: by network, scheme and seed. Raises ValueError for damaged files."""
    found = []
    for path in output.glob("*/*/seed*/config.json"):
        summary = resuming.summary(path.parent)
        if summary is not None:
            found.append(Run(resuming.recorded(path), summary))
    return sorted(found, key=_place)


def _place(run: Run) -> tuple[str, int, str, str, int]:
    settings = run.settings
    at = NAMES.index(settings.scheme) if settings.scheme in NAMES else len(NAMES)
    return settings.model, at, settings.scheme, settings.label, settings.seed


def check_alike(settings: Iterable[Settings]) -> None:
    """Raises ValueError where runs of one network differ in more than the scheme, its horizon and the seed."""
    first: dict[str, Settings] = {}
    keys = [field.name for field in fields(Settings) if field.name not in FREE]
    for each in settings:
        other = first.setdefault(each.model, each)
        different = [key for key in keys if getattr(each, key) != getattr(other, key)]
        if different:
            received = "; ".join(f"{key} {getattr(other, key)} and {getattr(each, key)}" for key in different)
            raise ValueError(
                f"Runs that are compared have equal settings. Received: {each.model} with {received}. "
                "Try another --output, or delete the runs that are there."
            )


def sections(runs: Sequence[Run]) -> list[Section]:
    """The table, network by network, of runs as ``gather`` sorts them."""
    return [_section(model, list(those)) for model, those in groupby(runs, key=lambda run: run.settings.model)]


def _section(model: str, runs: Sequence[Run]) -> Section:
    schemes = {name: list(those) for name, those in groupby(runs, key=lambda run: run.settings.label)}
    references = [name for name in REFERENCES if name in schemes]
    columns = [
        _column(schemes, lambda run: run.summary.min_train_loss, min, 4),
        _column(schemes, lambda run: run.summary.min_val_loss, min, 4),
        _column(schemes, _percent, max, 2),
    ]
    header = ("scheme", "seeds", "min training loss", "min validation loss", "max validation accuracy, %")
    for reference in references:
        columns.append([_difference(those, schemes[reference]) for those in schemes.values()])
        header = (*header, f"against {reference}, points")
    if references:
        columns.append([Cell(PAPER_EXCEPTIONS.get((model, name), PAPER.get(name, ""))) for name in schemes])
        header = (*header, "the paper")
    if any(run.summary.diverged_at for run in runs):
        columns.append([Cell(_divergence(those)) for those in schemes.values()])
        header = (*header, "diverged")
    names = [(Cell(name), Cell(str(len(those)))) for name, those in schemes.items()]
    rows = [(*first, *cells) for first, cells in zip(names, zip(*columns, strict=True), strict=True)]
    return Section(model, _about(runs[0].settings), header, rows)


def _column(
    schemes: dict[str, list[Run]],
    value: Callable[[Run], float | None],
    choose: Callable[[Iterable[float]], float],
    digits: int,
) -> list[Cell]:
    """Means with intervals; the best of them is that of a scheme of which no run diverged."""
    values = {name: tuple(x for x in map(value, runs) if x is not None) for name, runs in schemes.items()}
    steady = {
        name: interval(values[name])[0]
        for name, runs in schemes.items()
        if values[name] and not any(run.summary.diverged_at for run in runs)
    }
    best = choose(steady.values()) if len(steady) > 1 else None
    return [
        Cell(shown(some, digits), best is not None and steady.get(name) == best, some) for name, some in values.items()
    ]


def _percent(run: Run) -> float | None:
    accuracy = run.summary.max_val_accuracy
    return None if accuracy is None else 100 * accuracy


def _difference(runs: Sequence[Run], reference: Sequence[Run]) -> Cell:
    """Mean of the differences between runs of the same seed: of the same first weights and the same minibatches."""
    if runs is reference:
        return Cell("")
    accuracy = {run.settings.seed: _percent(run) for run in reference}
    pairs = [(_percent(run), accuracy.get(run.settings.seed)) for run in runs]
    found = tuple(mine - other for mine, other in pairs if mine is not None and other is not None)
    return Cell(shown(found, 2, signed=True), values=found)


def _divergence(runs: Sequence[Run]) -> str:
    steps = [run.summary.diverged_at for run in runs if run.summary.diverged_at]
    if not steps:
        return ""
    return f"at step {', '.join(map(str, steps))} in {len(steps)} of {counted(len(runs), 'seed')}"


def _about(settings: Settings) -> str:
    size = ", ".join(f"{key} {value}" for key, value in settings.size.items()) or "size as published"
    return (
        f"{size}; {settings.dataset}; {_optimizer(settings)}; "
        f"{settings.steps} steps of {settings.batch_size}, metrics every {settings.eval_every}; "
        f"{_stages(settings)}"
    )


def _stages(settings: Settings) -> str:
    """Those of pipelines, whichever scheme this is."""
    return described(replace(settings, scheme="vanilla", file=None))


def _optimizer(settings: Settings) -> str:
    if settings.optimizer == "momentum":
        return f"SGD {settings.learning_rate:g}, momentum {settings.momentum:g}"
    return f"{settings.optimizer} {settings.learning_rate:g}"


def rows(parts: Sequence[Section]) -> list[dict[str, str | float | None]]:
    """Every figure of the table that is a mean over seeds, with the half width of its 95% interval."""
    return [
        {"network": part.model, "scheme": first.text, "figure": name, "mean": mean, "half_width": half_width}
        for part in parts
        for first, *cells in part.rows
        for name, cell in zip(part.header[1:], cells, strict=True)
        if cell.values
        for mean, half_width in [interval(cell.values)]
    ]


def text(parts: Sequence[Section]) -> str:
    """For the terminal; the best of a network has a star."""
    return "\n\n".join(
        f"{part.model}: {part.about}\n"
        + text_table(part.header, [[f"{cell.text}{' *' if cell.best else ''}" for cell in row] for row in part.rows])
        for part in parts
    )


def markdown(parts: Sequence[Section]) -> str:
    """The same; the best of a network is bold."""
    return "\n".join(_markdown(part) for part in parts)


def _markdown(part: Section) -> str:
    def line(cells: Iterable[str]) -> str:
        return f"| {' | '.join(cells)} |"

    rows = [line(f"**{cell.text}**" if cell.best else cell.text for cell in row) for row in part.rows]
    rule = "|---|" + "---:|" * (len(part.header) - 1)
    return "\n".join((f"### {part.model}", "", f"{part.about}.", "", line(part.header), rule, *rows, ""))
