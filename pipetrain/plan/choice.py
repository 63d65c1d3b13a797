"""Every way to train one model on some devices, with what is predicted and measured of it, and the one taken."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any, NamedTuple

from pipetrain.logs import text_table
from pipetrain.pictures.tables import Tabular, table
from pipetrain.plan.partition import NoPlan
from pipetrain.plan.profile import Profile, mib, unsteady
from pipetrain.plan.stages import Partition
from pipetrain.schemes.options import TransferOptions, flat, keywords, name_of, options_of

if TYPE_CHECKING:
    from pipetrain.pictures.figure import Picture

MARGIN = 1.03  # what a less simple way must gain to be worth it
SAME = 1.01  # seconds nearer to each other are equal
NEAR = 1.35  # of the fastest prediction: a way that takes so long at most may be the fastest when it is tried
FAIR = 2.0  # and one device, of which nobody wants to be slower, if it takes so long at most
TRIED = 6  # ways at most, beside one device
WIDTH = 80  # characters of a line that a person reads
ERRORS = 2  # standard errors of the profile to either side of a prediction
HEADER: tuple[str, ...] = ("way to train", "samples/s", "gain", "MiB", "not taken")
KINDS = ("single", "data parallelism", "grid", "pipeline", "hybrid")  # the simplest first
LOSING = (
    "compression",
    "replica_compression",
    "synchrony",
    "topology",
)  # options by which a scheme sends less
# Accuracy of 8 dense layers on Fashion-MNIST, less that of exact training, by momentum SGD: 4 workers, 4 stages of 1f1b
# (docs/guide/slow-networks.md), and 8 stages of target (docs/results/staleness.md).
MEASURED = {
    **{"bfloat16": -0.004, "int8": -0.009, "int4": -0.008, "sign": -0.015, "power-sgd": -0.015, "top-k": -0.012},
    "sign:majority": -0.002,  # with a learning rate of its own
    **{"local:8": 0.0, "local:32": -0.011, "stale:1": -0.015, "gossip": -0.006, "gossip:complete": -0.006},
    **{"bfloat16 across cuts": -0.001, "int8 across cuts": -0.010, "int4 across cuts": -0.005},
    **{"target with M=1": -0.004, "target with M=2": 0.007, "target with M=4": 0.015, "target with M=8": 0.009},
}
BASELINE = "baseline"  # a kind that is predicted to compare with, and never taken


class Way(NamedTuple):
    """One way to train: the ``arguments`` of ``PipelineModel`` for it, and what is predicted.

    ``kind`` is one of ``KINDS``, or ``BASELINE``; ``step_s`` are the seconds of a minibatch, ``memory_bytes`` what the
    fullest device holds, ``fits`` whether that keeps to the limit. ``trial_s`` is what a minibatch took in a trial,
    None without one, infinite where the way cannot train the model. Ways of one ``family`` take about the same; without
    one it is the scheme's name. ``is_exact``: whether it trains as the unsplit model does; ``is_set``: whether it is
    what the user has chosen; ``order``: of its transfers, by which it is predicted, empty where it has none.
    """

    kind: str
    arguments: Mapping[str, Any]
    devices: int
    step_s: float
    memory_bytes: int
    fits: bool = True
    trial_s: float | None = None
    family: str = ""
    is_exact: bool = True
    is_set: bool = False
    order: str = ""

    def is_like(self, other: Way) -> bool:
        """Whether both have the same options, and the same is predicted of them."""
        return self.told == other.told and (self.step_s, self.memory_bytes) == (
            other.step_s,
            other.memory_bytes,
        )

    @property
    def predicted(self) -> Mapping[str, Any]:
        """The arguments with the order of transfers by which it is predicted, so that a trial tries no others."""
        scheme = options_of(self.arguments["scheme"]) if self.order else None
        if not isinstance(scheme, TransferOptions):
            return self.arguments
        return {**self.arguments, "scheme": replace(scheme, order=self.order)}

    @property
    def known_s(self) -> float:
        """The seconds of a minibatch: measured, else predicted."""
        return self.step_s if self.trial_s is None else self.trial_s

    @property
    def is_pipeline(self) -> bool:
        """Whether the model is cut."""
        return self.kind in ("pipeline", "hybrid")

    def __str__(self) -> str:
        told = {name: value for name, value in self.told.items() if name not in ("scheme", "cuts", "order")}
        parts = (f"M={value}" if name == "microbatches" else f"{name} {_listed(value)}" for name, value in told.items())
        return ", ".join([self.name, *parts])

    @property
    def name(self) -> str:
        """The scheme's."""
        return name_of(self.arguments["scheme"])

    @property
    def losses(self) -> int:
        """In how many respects it sends something else than all, at once, to all."""
        return sum(self.told.get(name) is not None for name in LOSING)

    @property
    def quality(self) -> str:
        """What is not exact of it, and the accuracy that was measured of that; empty if nothing is."""
        if self.is_exact:
            return ""
        where = {"compression": " across cuts" if self.is_pipeline else "", "replica_compression": " of replicas"}
        given = {name: each for name in LOSING if (each := self.told.get(name)) is not None}
        names = [f"{each}{where.get(name, '')}" for name, each in given.items()]
        if "horizon" in self.told:
            names.append(f"{self.told['horizon']} with M={self.told.get('microbatches', 1)}")
        parts = [f"{each} {MEASURED[each]:+.3f}" if each in MEASURED else f"{each} not measured" for each in names]
        return (
            f"Not exact. Accuracy of a small network, less that of exact training: {', '.join(parts)}; see "
            "docs/guide/slow-networks.md."
        )

    @property
    def told(self) -> dict[str, Any]:
        """The arguments with the scheme's name, and its options by their names."""
        return flat(**self.arguments)


@dataclass(frozen=True, repr=False)
class Choice(Tabular):
    """The ways to train a model, of which one is ``taken``; prints as a table.

    Its rows, for pandas and for CSV files, are the ways, the fastest by prediction first.

    Taken is the simplest that fits the devices' memory and is within 3% of the fastest that fits, an exact one if there
    is one; of the ways that were tried, if any were. Ways that do not train as the unsplit model does are taken only
    where that is allowed.

    Args:
        batch_size: rows of a minibatch.
        ways: that were predicted, one device first.
        spread: the standard error of the profile's seconds, as a part of them.
        cut_of: gives the cut of a way that is a pipeline, and what no cut's slowest stage can be below, see
            ``least_slowest_s``.
        limit_bytes: the memory of a device, None for no limit.
        left_out: schedules for which the model has too few layers.
        allows_inexact: whether ways that are not exact may be taken.

    Raises NoPlan, a ValueError, if no way fits the memory.
    """

    batch_size: int
    ways: Sequence[Way]
    spread: float = 0.0
    cut_of: Callable[[Way], tuple[Partition, float]] | None = None
    limit_bytes: int | None = None
    left_out: Sequence[str] = ()
    allows_inexact: bool = False

    def __post_init__(self) -> None:
        """Raise NoPlan if none fits."""
        if not self._possible:
            leanest = min(self._candidates, key=lambda way: way.memory_bytes)
            raise NoPlan(
                f"No way to train fits the devices. Received: a memory of {mib(self.limit_bytes or 0)} MiB each; the "
                f"leanest way, {leanest}, needs {mib(leanest.memory_bytes)}. Try more devices, smaller minibatches or "
                "recompute=True."
            )

    @property
    def _candidates(self) -> list[Way]:
        """The ways of which one is taken."""
        return [way for way in self.ways if way.kind != BASELINE and (way.is_exact or self.allows_inexact)]

    @property
    def _possible(self) -> list[Way]:
        """Those that fit."""
        return [way for way in self._candidates if way.fits]

    @cached_property
    def taken(self) -> Way:
        """The way to train, with its cuts."""
        way = self.fastest
        return way if self.cut is None else way._replace(arguments={**way.arguments, "cuts": self.cut.cuts})

    @property
    def cut(self) -> Partition | None:
        """That of the way taken, if it is a pipeline."""
        return self._cut[0] if self._cut else None

    @cached_property
    def _cut(self) -> tuple[Partition, float] | None:
        return self.cut_of(self.fastest) if self.cut_of and self.fastest.is_pipeline else None

    @property
    def _contenders(self) -> list[Way]:
        """Those of which the fastest counts: that were tried, if any were."""
        return [way for way in self._possible if way.trial_s is not None] or self._possible

    @cached_property
    def fastest(self) -> Way:
        """The way to train, without its cuts."""
        fastest_s = min(way.known_s for way in self._contenders)
        near = [way for way in self._contenders if way.known_s <= MARGIN * fastest_s]
        return min(near, key=lambda way: (not way.is_exact, KINDS.index(way.kind), way.losses, way.known_s))

    @property
    def near(self) -> list[Way]:
        """The ways of which prediction cannot tell which is the fastest: what they take is to be tried.

        Of each family the fastest that fits, if that is within 35% of the fastest of all, at most six; and one device
        if that is within twice the fastest.
        """
        found: dict[str, Way] = {}
        for way in sorted(self._possible, key=lambda way: way.step_s):
            found.setdefault(way.family or way.name, way)
        least_s = min((way.step_s for way in found.values()), default=0.0)
        one = [way for way in found.values() if way.kind == KINDS[0] and way.step_s <= FAIR * least_s]
        others = [way for way in found.values() if way.kind != KINDS[0] and way.step_s <= NEAR * least_s]
        return [*one, *others[:TRIED]]

    def with_trials(self, seconds: Sequence[tuple[Way, float]]) -> Choice:
        """The choice, knowing what a minibatch took by these of its ways."""
        ways = list(self.ways)
        for way, trial_s in seconds:
            ways[ways.index(way)] = way._replace(trial_s=trial_s)
        return replace(self, ways=ways)

    @property
    def gap(self) -> float | None:
        """By how much the slowest stage of the cut taken may exceed the best cut's, at most; None without a cut."""
        if self._cut is None:
            return None
        cut, least_s = self._cut
        return cut.slowest_s / least_s - 1 if least_s else None

    @property
    def reason(self) -> str:
        """Why this way is taken, in a sentence."""
        taken, one = self.taken, next((way for way in self.ways if way.kind == KINDS[0] and way.fits), None)
        tried = taken.trial_s is not None
        others = [way for way in self._possible if way.kind != taken.kind]
        others = [way for way in others if (way.trial_s is not None) == tried and way.known_s < math.inf]
        parts = []
        if one is not None and one != taken and (one.trial_s is not None) == tried:
            said = "in a trial it was" if tried else "it is predicted to be"
            parts.append(f"{said} {one.known_s / taken.known_s:.2f}x as fast as one device")
        if others:
            best = min(others, key=lambda way: way.known_s)
            than = best.known_s / taken.known_s
            if than >= MARGIN:
                parts.append(f"{than:.2f}x as fast as the best of another kind, {best}")
            else:
                parts.append(f"no way of another kind is {MARGIN - 1:.0%} faster (the best is {best})")
        elif same := [way for way in self._contenders if way != self.fastest and way.known_s < math.inf]:
            following = min(same, key=lambda way: way.known_s)
            parts.append(f"{following.known_s / taken.known_s:.2f}x as fast as the next, {following}")
        faster = [way for way in self._candidates if not way.fits and way.step_s * MARGIN < taken.step_s]
        if faster:
            first = min(faster, key=lambda way: way.step_s)
            parts.append(f"{first} would be {taken.step_s / first.step_s:.2f}x as fast, and does not fit")
        said = "; ".join(parts) or "there is no other"
        return f"{said[0].upper()}{said[1:]}."

    @property
    def one_s(self) -> float | None:
        """The seconds of a minibatch on one device."""
        return next((way.step_s for way in self.ways if way.name == KINDS[0]), None)

    def explained(self, shown: Partition | None = None, note: str = "") -> Explanation:
        """A cut, that of the way taken if no other is given, the table, and a note."""
        cut = shown or self.cut
        parts = [cut.text(self.one_s) if cut else "", str(self), note]
        return Explanation("\n\n".join(filter(None, parts)), self, cut, note)

    def __repr__(self) -> str:
        return f"<Choice of {len(self.ways)} ways: {self.fastest}>"

    @property
    def is_advice(self) -> bool:
        """Whether the user has chosen a way, so that another one is only recommended."""
        return any(way.is_set for way in self.ways)

    def __str__(self) -> str:
        return "\n".join([text_table(self._header, self._rows), *self._told("\n")])

    def _repr_html_(self) -> str:
        return self.to_html()

    def to_html(self, note: str = "") -> str:
        """The table as HTML with what is said of it, and a note; the way taken in bold."""
        said = "\n".join(filter(None, [*self._told(" "), note]))
        return table("", self._header, self._rows, [self._ways.index(self.fastest)], said)

    def plot(self, path: str | Path | None = None) -> Picture:
        """The ways by predicted samples/s with its range, what was measured in trials, and the way taken.

        Needs matplotlib: ``pip install "pipetrain[plot]"``.

        Args:
            path: a file to save it to, of the kind that its name ends in.

        Returns:
            The matplotlib figure.
        """
        from pipetrain.plan import pictures

        return pictures.choice(self).saved(path)

    @property
    def _ways(self) -> list[Way]:
        """The ways in the order in which they are shown."""
        return sorted(self.ways, key=lambda way: way.step_s)

    @property
    def _is_tried(self) -> bool:
        return any(way.trial_s is not None for way in self.ways)

    @property
    def _header(self) -> tuple[str, ...]:
        return (*HEADER[:2], "tried", *HEADER[2:]) if self._is_tried else HEADER

    @property
    def _rows(self) -> list[tuple[str, ...]]:
        rows = [self._row(way) for way in self._ways]
        if not self._is_tried:
            return rows
        return [(*row[:2], self._tried(way), *row[2:]) for row, way in zip(rows, self._ways, strict=True)]

    def _told(self, between: str) -> list[str]:
        """What is below the table; ``between`` the lines of a long sentence."""
        lines = []
        if self.left_out:
            lines.append(f"The model has too few layers for {', '.join(self.left_out)}.")
        word = "Recommended" if self.is_advice else "Taken"
        told = f"{word}: {keywords(self.taken.arguments)}. {self.reason} {self.taken.quality}"
        lines += ["", between.join(wrap(told, WIDTH, break_long_words=False, break_on_hyphens=False))]
        if self.gap is not None:
            lines.append(f"Another cut could make the slowest stage {self.gap:.0%} faster at most.")
        if warning := unsteady(self.spread):
            lines.append(warning)
        return lines

    def _columns(self) -> dict[str, Sequence[Any]]:
        ways, around = self._ways, ERRORS * self.spread
        rates = [self.batch_size / way.step_s for way in ways]
        return {
            "way": [str(way) for way in ways],
            "kind": [way.kind for way in ways],
            "scheme": [way.name for way in ways],
            "devices": [way.devices for way in ways],
            "step_s": [way.step_s for way in ways],
            "samples_per_second": rates,
            "samples_per_second_low": [max(0.0, 1 - around) * rate for rate in rates],
            "samples_per_second_high": [(1 + around) * rate for rate in rates],
            "trial_s": [way.trial_s for way in ways],
            "memory_bytes": [way.memory_bytes for way in ways],
            "fits": [way.fits for way in ways],
            "is_exact": [way.is_exact for way in ways],
            "taken": [way == self.fastest for way in ways],
            "not_taken": [self.why_not(way) for way in ways],
        }

    def _rate(self, way: Way) -> str:
        """Its rate, and by what part of it the rate may be lower or higher."""
        return f"{self.batch_size / way.step_s:.0f} ±{ERRORS * self.spread:.0%}"

    def _tried(self, way: Way) -> str:
        """Its rate in a trial."""
        if way.trial_s is None:
            return "-"
        return f"{self.batch_size / way.trial_s:.0f}" if way.trial_s < math.inf else "refused"

    def _row(self, way: Way) -> tuple[str, ...]:
        gain = f"{self.one_s / way.step_s:.2f}x" if self.one_s else "-"
        label = f"{way} (as set)" if way.is_set else str(way)
        return label, self._rate(way), gain, mib(way.memory_bytes), self.why_not(way)

    def why_not(self, way: Way) -> str:
        """Why a way is not taken; empty for the one that is."""
        if way == self.fastest:
            return ""
        if way.kind == BASELINE:
            return "to compare"
        if way not in self._candidates:
            return "not exact"
        if not way.fits:
            return "too much memory"
        if way.trial_s is None and self.fastest.trial_s is not None:
            return "not tried"
        if way.known_s > MARGIN * min(each.known_s for each in self._contenders):
            return "slower"
        return "no faster" if way.kind == self.fastest.kind else "less simple"


def least_slowest_s(profile: Profile, devices: int, replicate: bool = False) -> float:
    """What the slowest stage of any cut for so many devices takes at least, in seconds a minibatch.

    ``max(sum(f + b + u) / devices, max(f + b + u))`` over the blocks' forward, backward and update, each with its
    faster kernels; with ``replicate``, stages have several devices, which share forward and backward but not updates:
    ``sum(f + b) / devices``. Transfers are left out.
    """
    each = [min((block.seconds, block.compiled or block.seconds), key=lambda s: s.total_s) for block in profile.trained]
    if replicate:
        return sum(min(b.seconds.forward_s + b.seconds.backward_s, s.forward_s + s.backward_s)
                   for b, s in zip(profile.trained, each, strict=True)) / devices  # fmt: skip
    return max(sum(seconds.total_s for seconds in each) / devices, max(seconds.total_s for seconds in each))


def _listed(value: Any) -> str:
    return "-".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


CLOSE, MOST, TURNS = 1.15, 3, 3


def finalists(first_s: Sequence[float], predicted: Sequence[float]) -> list[int]:
    """Numbers of those to try again, the fastest first; none if one stands alone.

    Of three at most one is the simplest of those that took at most 3% longer than the shortest trial, which is what
    would be taken without turns. The others are within 15% of the fastest by ``sqrt(first_s * predicted)``, since what
    else the machine does makes a single trial longer. The simplest of these is among them, since it is taken even if
    another is a little faster.

    Args:
        first_s: seconds of a minibatch in the trial of each, infinite if it failed; the simplest comes first.
        predicted: seconds of each by prediction, or in what proportion they are to each other.
    """
    both = [math.sqrt(trial_s * each) for trial_s, each in zip(first_s, predicted, strict=True)]
    least_s = min(both, default=math.inf)
    close = sorted((n for n, each in enumerate(both) if each <= CLOSE * least_s < math.inf), key=both.__getitem__)
    if not close:
        return []
    by_trial = next(n for n, each in enumerate(first_s) if each <= MARGIN * min(first_s))
    chosen = sorted([*dict.fromkeys([by_trial, min(close), *close])][:MOST], key=both.__getitem__)
    return chosen if len(chosen) > 1 else []


def settled(first_s: Sequence[float], turns_s: Mapping[int, Sequence[float]]) -> list[float]:
    """Seconds of a minibatch of each, where the turns of the finalists tell how they compare with one another.

    For finalist n ``median(turns_s[n]) * sum(first_s of finalists) / sum(medians)``, so that all of them together are
    as far from the others as in the first trials.
    """
    medians = {n: statistics.median(each) for n, each in turns_s.items()}
    scale = sum(first_s[n] for n in medians) / sum(medians.values()) if medians else 1.0
    return [medians[n] * scale if n in medians else each for n, each in enumerate(first_s)]


def fastest(trials_s: Mapping[int, Sequence[float]], predicted: Sequence[float]) -> int:
    """The number of the simplest within 3% of the one whose trials and prediction are shortest together.

    Of that one ``median(trials_s[n]) ** trials * predicted[n]`` is the least: a prediction is taken to tell as well as
    one trial how ways compare, and the middle of several as well as so many. The least of many values that err is too
    short as a rule.

    Args:
        trials_s: seconds of a minibatch in the trials of each that may be the fastest, by its number, equally many.
        predicted: how many times as long as the shortest each is simulated to take; the simplest comes first.
    """
    together = {n: statistics.median(each) ** len(each) * predicted[n] for n, each in trials_s.items()}
    counted = 1 + max(map(len, trials_s.values()))
    return min(n for n, each in together.items() if each <= MARGIN**counted * min(together.values()))


class Explanation(str):
    """The text of ``PipelineModel.explain``, which a notebook shows as tables.

    Attributes:
        choice: the ways to train.
        cut: how the model is cut, None where it is not.
        note: a remark below, may be empty.
    """

    choice: Choice
    cut: Partition | None
    note: str

    def __new__(cls, text: str, choice: Choice, cut: Partition | None = None, note: str = "") -> Explanation:
        """A string with these attributes."""
        made = super().__new__(cls, text)
        made.choice, made.cut, made.note = choice, cut, note
        return made

    def __getnewargs__(self) -> tuple[Any, ...]:
        return str(self), self.choice, self.cut, self.note

    def _repr_html_(self) -> str:
        cut = self.cut.to_html(self.choice.one_s) if self.cut else ""
        return cut + self.choice.to_html(self.note)
