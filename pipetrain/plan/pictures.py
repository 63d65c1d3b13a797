"""Drawings of plans: a profile's blocks, a partition's stages, the ways of a choice."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from pipetrain.logs import counted
from pipetrain.pictures.figure import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    LIGHT,
    NAMED,
    ORANGE,
    SKY,
    VERMILION,
    WIDTH,
    YELLOW,
    Axes,
    Line2D,
    Patch,
    Picture,
    height_of,
    name_rows,
    on_white,
    plain,
    shortened,
)
from pipetrain.plan.choice import ERRORS, Choice, Way
from pipetrain.plan.profile import Profile
from pipetrain.plan.stages import Partition, StagePlan

MIB = 2**20
NAME, WAY = 14, 44  # characters of the name of a layer, and of a way
FEW = 3  # devices that are not named one by one
ROOM = 1.25  # times the longest bar: what is written beside it has room
TIMES = {"forward": SKY, "backward": ORANGE, "update": GREEN, "other": YELLOW}


@on_white
def profile(shown: Profile) -> Picture:
    """What every block takes, and how large its weights and outputs are; below the blocks a loss and a metric."""
    blocks = shown.blocks
    beside = {"(loss)": shown.loss_s, "(metric)": shown.metric_s}
    beside = {name: seconds for name, seconds in beside.items() if seconds}
    figure = Picture(WIDTH, height_of(len(blocks) + len(beside)))
    times, sizes = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    thickness = 0.8 if len(blocks) <= NAMED else 1.0
    for row, block in enumerate(blocks):
        parts = (block.forward_s, block.backward_s, block.update_s)
        _stacked(times, row, parts, thickness, hatch="///" if block.estimated else "")
        if block.compiled is not None:
            times.plot([block.compiled.total_s * 1e3], [row], "D", color=BLACK, markersize=4)
        sizes.barh(row - thickness / 4, block.weight_bytes / MIB, thickness / 2, color=BLUE)
        sizes.barh(row + thickness / 4, block.output_bytes / MIB, thickness / 2, color=VERMILION)
    for row, seconds in enumerate(beside.values(), len(blocks)):
        times.barh(row, seconds * 1e3, thickness, color=LIGHT)
    name_rows(times, [*(shortened(block.name, 3 * NAME) for block in blocks), *beside])
    plain(times, f"milliseconds for a minibatch of {shown.batch_size} rows")
    plain(sizes, "MiB")
    sizes.tick_params(axis="y", left=False)
    handles = [Patch(color=TIMES[part], label=part) for part in ("forward", "backward", "update")]
    if any(block.estimated for block in blocks):
        handles.append(Patch(facecolor="white", edgecolor=GREY, hatch="///", label="estimated"))
    marks = [Line2D([], [], color=BLACK, marker="D", linestyle="", markersize=4, label="all of it with XLA")]
    handles += [Patch(color=BLUE, label="weights"), Patch(color=VERMILION, label="outputs, across a cut here")]
    _legend(figure, [*handles, *(marks if shown.is_compiled else [])])
    within = f" (within {shown.spread:.0%})" if shown.spread >= 0.005 else ""
    title = f"Profile of {shown.model}: {counted(len(blocks), 'block')}, {shown.total_s * 1e3:.1f} ms{within}"
    figure.suptitle(title, x=0.01, ha="left")
    return figure


@on_white
def partition(shown: Partition, devices: Mapping[int, str] | None = None, above: str = "") -> Picture:
    """What the stages of every device take and hold, and which device all wait for, and which is fullest.

    ``devices`` are the names of devices by their numbers, as far as they are known; ``above`` is a line above the
    title.
    """
    rows = shown.on_devices
    figure = Picture(WIDTH, height_of(2 * len(rows)) + 0.4)
    times, sizes = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    totals = [sum(stage.total_s for stage in together) for together in rows]
    held = [sum(stage.memory_bytes for stage in together) for together in rows]
    slowest, fullest = (max(range(len(rows)), key=each.__getitem__) for each in (totals, held))
    for row, together in enumerate(rows):
        _stacked(times, row, _parts(together), 0.7)
        sizes.barh(row, held[row] / MIB, 0.7, color=BLUE)
    _mark(times, slowest, totals[slowest] * 1e3, f"bottleneck: {_rounded(totals[slowest] * 1e3)} ms")
    _mark(sizes, fullest, held[fullest] / MIB, f"fullest: {_rounded(held[fullest] / MIB)} MiB")
    name_rows(times, [_row_name(shown, together, devices or {}) for together in rows])
    plain(times, f"milliseconds for a minibatch of {shown.batch_size} rows")
    plain(sizes, "MiB held by each of its devices")
    sizes.tick_params(axis="y", left=False)
    names = {"forward": "forward", "backward": "backward", "other": "update, transfers, predicting weights"}
    _legend(figure, [Patch(color=TIMES[part], label=name) for part, name in names.items()])
    about = "at most" if shown.simulated_s is None else "about"
    title = (
        f"{shown.model} in {counted(len(shown.stages), 'stage')}: {about} {shown.samples_per_second:,.0f} samples/s, "
        f"{shown.speedup:.2f}x one device"
    )
    figure.suptitle("\n".join(filter(None, [above, title])), x=0.01, ha="left")
    return figure


@on_white
def parameters(title: str, counts: Mapping[str, int]) -> Picture:
    """How many parameters every stage trains, where nothing else is known of it."""
    figure = Picture(WIDTH, height_of(2 * len(counts)))
    panel = figure.subplots()
    for row, count in enumerate(counts.values()):
        panel.barh(row, count, 0.7, color=BLUE)
        panel.annotate(f"{count:,}", (count, row), (4, 0), textcoords="offset points", va="center", fontsize=9)
    name_rows(panel, [shortened(name, WAY) for name in counts])
    panel.set_xlim(0, ROOM * max(1, *counts.values()))
    panel.xaxis.set_major_formatter("{x:,.0f}")
    plain(panel, "trained parameters")
    figure.suptitle(title, x=0.01, ha="left")
    return figure


@on_white
def choice(shown: Choice) -> Picture:
    """The ways by predicted samples/s, each with its range, with what was measured of those that were tried."""
    ways = sorted(shown.ways, key=lambda way: way.step_s)
    figure = Picture(WIDTH, height_of(len(ways)) + 0.4)
    panel = figure.subplots()
    around = ERRORS * shown.spread
    for row, way in enumerate(ways):
        predicted = shown.batch_size / way.step_s
        panel.errorbar(
            predicted, row, xerr=around * predicted, fmt="o", color=BLUE, capsize=3, mfc=SKY if way.fits else "white"
        )
        if way.trial_s is not None and way.trial_s < math.inf:
            panel.plot([shown.batch_size / way.trial_s], [row], "D", color=VERMILION)
    most = max(shown.batch_size / min(way.step_s, way.known_s) for way in ways) * (1 + around)
    for row, way in enumerate(ways):
        panel.text(1.03 * most, row, _said(shown, way), va="center", fontsize=9)
    name_rows(panel, [shortened(f"{way} (as set)" if way.is_set else str(way), WAY) for way in ways])
    taken = ways.index(shown.fastest)
    panel.axhspan(taken - 0.5, taken + 0.5, color=YELLOW, alpha=0.35, linewidth=0)
    panel.set_xlim(0, ROOM * most)
    panel.xaxis.set_major_formatter("{x:,.0f}")
    plain(panel, f"samples/s with minibatches of {shown.batch_size} rows")
    handles = [_dot("o", SKY, BLUE, f"predicted ±{around:.0%}" if around >= 0.005 else "predicted")]
    if not all(way.fits for way in ways):
        handles.append(_dot("o", "white", BLUE, "predicted, and does not fit the memory"))
    if any(way.trial_s is not None for way in ways):
        handles.append(_dot("D", VERMILION, VERMILION, "measured in a trial"))
    _legend(figure, handles)
    word = "recommended" if shown.is_advice else "taken"
    figure.suptitle(f"{counted(len(ways), 'way')} to train; {word}: {shown.fastest}", x=0.01, ha="left")
    return figure


def _parts(together: Sequence[StagePlan]) -> tuple[float, ...]:
    """Of a device's seconds with these stages those of forwards, of backwards, none of updates alone, and the rest."""
    forward_s, backward_s = (
        sum(getattr(stage, name) / stage.replicas for stage in together) for name in ("forward_s", "backward_s")
    )
    rest_s = sum(stage.total_s for stage in together) - forward_s - backward_s
    return forward_s, backward_s, 0.0, max(0.0, rest_s)


def _stacked(panel: Axes, row: int, seconds: Sequence[float], thickness: float, hatch: str = "") -> None:
    """Bars one after another, in the colours of ``TIMES``."""
    left_ms = 0.0
    for each_s, colour in zip(seconds, TIMES.values(), strict=False):
        panel.barh(
            row, each_s * 1e3, thickness, left=left_ms, color=colour, hatch=hatch, edgecolor="white", linewidth=0
        )
        left_ms += each_s * 1e3


def _mark(panel: Axes, row: int, longest: float, text: str) -> None:
    """Frame the longest bar, and say beside it what it is."""
    panel.barh(row, longest, 0.7, color="none", edgecolor=VERMILION, linewidth=2)
    panel.annotate(
        text, (0, row - 0.36), (2, 2), textcoords="offset points", va="bottom", fontsize=9, color=VERMILION,
        fontweight="bold", annotation_clip=False,
    )  # fmt: skip


def _rounded(value: float) -> str:
    """To three digits, larger numbers to ones."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _row_name(shown: Partition, together: Sequence[StagePlan], devices: Mapping[int, str]) -> str:
    """The stages of a row, the first and the last layer of each, and where they are."""
    names = [
        f"stage {shown.stages.index(stage)}: {shortened(stage.first, NAME)}"
        + (f" - {shortened(stage.last, NAME)}" if stage.blocks > 1 else "")
        for stage in together
    ]
    first = together[0]
    on = [devices.get(first.device + n, f"device {first.device + n}") for n in range(first.replicas)]
    return "\n".join([*names, ", ".join(on) if len(on) < FEW else f"{on[0]} to {on[-1]}"])


def _said(shown: Choice, way: Way) -> str:
    """Beside a way: what became of it."""
    if way == shown.fastest:
        return "recommended" if shown.is_advice else "taken"
    if way.trial_s == math.inf:
        return "refused in a trial"
    return shown.why_not(way)


def _dot(marker: str, fill: str, edge: str, label: str) -> Line2D:
    return Line2D([], [], marker=marker, linestyle="", markerfacecolor=fill, markeredgecolor=edge, label=label)


def _legend(figure: Picture, handles: Sequence[Patch | Line2D]) -> None:
    figure.legend(handles=list(handles), loc="outside lower left", ncols=3, frameon=False, fontsize=9)
