"""A page's parts about other experiments than the comparison of schemes: a function for each kind of folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from plots import page, rmse, runs, speedup, staleness, table1, traffic
from plots.missing import attempt

PLATFORM = (
    (
        "Bars: throughput of each way to train each network, against one device",
        "Throughput normalised to one device, the dashed line (the paper's Figure 9).",
    ),
    (
        "Stacked bars: the share of the devices' time spent computing and waiting, by cause, for each way to train",
        "What an average device's time goes into (the paper's Figure 10).",
    ),
)


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
    drawn = attempt(f"The figure of {path}", missing, draw, path, scratch / "figure.png")
    return [page.picture(drawn, alt, caption, wide=True)] if drawn else []


def platform(folder: Path, scratch: Path) -> list[str]:
    """A folder of experiments/speedup.py."""
    missing: list[str] = []
    path = folder / "speedup.json"
    parts = [
        page.heading("What the paper's platform would give"),
        page.paragraph("Simulated, not measured: what a network computes is counted from its shapes.", aside=True),
    ]
    drawn = attempt(f"The figures of {path}", missing, speedup.draw, path, scratch)
    for picture, texts in zip(drawn or (), PLATFORM, strict=False):
        parts.append(page.picture(picture, *texts, wide=True))
    compared = attempt(f"The table of {path}", missing, statements, path)
    if compared:
        parts += [page.heading("Beside the paper", 3), page.table(*compared)]
        parts.append(page.paragraph("With each way to sum gradients; bold: within 25% of the paper.", aside=True))
    return [*parts, *([page.bullets(missing)] if missing else [])]


def statements(path: Path) -> tuple[list[str], list[list[str]]]:
    """The header and the rows of the table of the paper's numbers and ours. Raises ValueError for a damaged file."""
    found = runs.load(path)["statements"]
    ways = list(found[0]["ours"])
    header = ["statement", "paper", *(way.removeprefix("data-parallel ").strip("()") for way in ways)]
    rows = []
    for each in found:
        ours = {way: f"{each['ours'][way]:.1%}" for way in ways}
        cells = [f"**{ours[way]}**" if each["agrees"][way] else ours[way] for way in ways]
        rows.append([each["says"], f"{each['paper']:.1%}", *cells])
    return header, rows
