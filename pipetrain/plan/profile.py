"""What a model's blocks cost, measured; and profiles made from it: of fewer blocks, or other microbatches."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pipetrain.logs import counted, text_table
from pipetrain.pictures.tables import Tabular, table
from pipetrain.plan.grid_cost import GridNetwork
from pipetrain.schemes.compression import FLOAT_BYTES, Compression

if TYPE_CHECKING:
    from pipetrain.pictures.figure import Picture

NOISY = 0.1  # a spread that people should know of


@dataclass(frozen=True)
class Seconds:
    """What a block takes for a minibatch: its forward, its backward, and the optimizer's step."""

    forward_s: float
    backward_s: float
    update_s: float

    @property
    def total_s(self) -> float:
        """All three."""
        return self.forward_s + self.backward_s + self.update_s

    def times(self, factor: float, update_factor: float) -> Seconds:
        """The same, longer by these factors."""
        return Seconds(factor * self.forward_s, factor * self.backward_s, update_factor * self.update_s)

    def later(self, loss_s: float) -> Seconds:
        """The same with a loss after the forward."""
        return replace(self, forward_s=self.forward_s + loss_s)


class Coding(NamedTuple):
    """What a compression, by its text, takes on a device: the seconds of a message, and of each of its elements."""

    compression: str
    encode_s: tuple[float, float]
    decode_s: tuple[float, float]

    def encoding_s(self, elements: float, messages: float = 1.0) -> float:
        """To make messages of so many elements together."""
        return messages * self.encode_s[0] + elements * self.encode_s[1]

    def decoding_s(self, elements: float, messages: float = 1.0) -> float:
        """To make values of them again."""
        return messages * self.decode_s[0] + elements * self.decode_s[1]

    def summing_s(self, elements: float, workers: int, feedback: bool) -> tuple[float, float]:
        """For gradients that are sent to so many workers: what each takes before its own is sent, and afterwards.

        With error feedback the sender decodes its own message, to learn what it lacks; of the sum all are decoded.
        """
        decoding_s = self.decoding_s(elements)
        return self.encoding_s(elements) + feedback * decoding_s, workers * decoding_s

    def times(self, factor: float) -> Coding:
        """The same on a device that is so many times as slow."""
        both = ((factor * each[0], factor * each[1]) for each in (self.encode_s, self.decode_s))
        return Coding(self.compression, *both)


@dataclass(frozen=True)
class BlockProfile:
    """One block (a layer, as a rule) at the profile's batch size.

    ``output_bytes`` is what crosses a cut made right after this block, skips over it included;
    ``weight_bytes`` its trainable weights; ``activation_bytes`` what it keeps of one minibatch from forward to
    backward; ``update_s`` a step of SGD with momentum, which takes as long for a part of the minibatch as for all of
    it, and ``step_s`` what the optimizer's own step takes beyond that;
    ``workspace_bytes`` what its kernels have for themselves while they are at work on the minibatch, and
    ``row_workspace_bytes`` on one row of it, which may be as much. ``product_bytes`` are those of its weights whose
    gradients are made once for all microbatches of a minibatch, as products over its rows. ``compiled`` is what it
    takes where XLA compiles it, None where it cannot or was not tried. ``shared`` are the bytes of those of its weights
    that other blocks have too, by the weights' numbers. ``fixed_bytes`` are its variables that are not trained: frozen
    weights and state, of which a stage has one version and no slots. ``late_bytes`` are those of its weights whose
    gradients may be made later than its inputs' gradients; None where that is not known. ``estimated``: its seconds,
    and what it keeps, were not measured for want of time, but estimated from blocks that were. ``slices`` are the
    seconds of its forward and of its backward with one of so many equal parts of its outputs, by the number of parts.
    ``floats`` is how many of the numbers that cross the cut have gradients, and their bytes: a compression makes these
    fewer; None where all that crosses is such numbers of 4 bytes. ``rows_bytes`` are those of its weights whose
    gradients are rows of an embedding, which are sent as they are; those that other blocks have too, whose gradients
    only a pipeline sends so, are ``shared_rows``, by the weights' numbers.
    """

    name: str
    forward_s: float
    backward_s: float
    output_bytes: int
    weight_bytes: int
    activation_bytes: int = 0
    update_s: float = 0.0
    workspace_bytes: int = 0
    row_workspace_bytes: int = 0
    product_bytes: int = 0
    compiled: Seconds | None = None
    shared: tuple[tuple[int, int], ...] = ()
    fixed_bytes: int = 0
    late_bytes: int | None = None
    estimated: bool = False
    slices: tuple[tuple[int, float, float], ...] = ()
    floats: tuple[int, int] | None = None
    rows_bytes: int = 0
    shared_rows: tuple[int, ...] = ()
    step_s: float = 0.0

    def crossing_bytes(self, compression: Compression | None) -> int:
        """What crosses a cut right after this block, each way, compressed so."""
        return crossing_bytes(self.output_bytes, self.floats, compression)

    @property
    def uncoded_bytes(self) -> int:
        """Its weights whose gradients the replicas of a stage send as they are."""
        return self.rows_bytes + sum(size for number, size in self.shared if number in self.shared_rows)

    def crossing_elements(self, compression: Compression | None) -> int:
        """How many of the numbers that cross a cut right after it are encoded."""
        return crossing_elements(self.output_bytes, self.floats, compression)

    def summed_elements(self, compression: Compression | None) -> int:
        """How many elements of its weights' gradients are encoded where these are sent, as if they were one matrix."""
        elements = (self.weight_bytes - self.uncoded_bytes) // FLOAT_BYTES
        return elements if compression and elements and compression.encodes(squarish(elements)) else 0

    def summed_bytes(self, compression: Compression) -> int:
        """A message of these gradients, compressed so."""
        elements = (self.weight_bytes - self.uncoded_bytes) // FLOAT_BYTES
        return compression.sent_bytes(squarish(elements)) if elements else 0

    @property
    def seconds(self) -> Seconds:
        """Those of TensorFlow's own kernels."""
        return Seconds(self.forward_s, self.backward_s, self.update_s)

    @property
    def optimizer_s(self) -> float:
        """The whole step of the optimizer: of SGD with momentum, and what its own takes beyond that."""
        return self.update_s + self.step_s

    def with_kernels(self, compiled: bool) -> Seconds:
        """Those of the kernels that a stage has: XLA's, where it could compile this block, or TensorFlow's."""
        return self.compiled if compiled and self.compiled else self.seconds

    def longer(self, factor: float, update_factor: float) -> BlockProfile:
        """The same block taking longer by these factors, with any kernels."""
        seconds = self.seconds.times(factor, update_factor)
        compiled = self.compiled and self.compiled.times(factor, update_factor)
        slices = tuple((parts, factor * forward_s, factor * backward_s) for parts, forward_s, backward_s in self.slices)
        return replace(self, **asdict(seconds), compiled=compiled, slices=slices, step_s=update_factor * self.step_s)

    def slice_s(self, parts: float) -> tuple[float, float]:
        """Seconds of its forward and of its backward with one of so many equal parts of its outputs.

        Between parts that are known, and beyond them, logarithms of the seconds go as those of the parts do; never down
        to less than the part of the whole where nothing is known.
        """
        known = ((1, self.forward_s, self.backward_s), *sorted(self.slices))
        if len(known) == 1 or parts == 1:
            return self.forward_s / parts, self.backward_s / parts
        last = next((n for n, (each, *_) in enumerate(known) if each >= parts), len(known) - 1)
        (fewer, *first), (more, *second) = known[max(last - 1, 0)], known[max(last, 1)]
        place = math.log(parts / fewer) / math.log(more / fewer)
        forward_s, backward_s = (_between(a, b, place) for a, b in zip(first, second, strict=True))
        return forward_s, backward_s

    def workspace_of(self, rows: float, batch_size: int) -> float:
        """The workspace of so many rows: at most what each would have alone, and no more than for a whole minibatch.

        Beyond that it is taken to go with the rows.
        """
        alone = max(self.row_workspace_bytes, self.workspace_bytes / batch_size)
        return min(rows * alone, max(rows / batch_size, 1.0) * self.workspace_bytes)


@dataclass(frozen=True)
class Profile(Tabular):
    """The measured chain of blocks of one model at one batch size; prints as a table.

    Its rows, for pandas and for CSV files, are the blocks, with the fields of ``BlockProfile``.

    ``spread`` is the standard error of all its seconds together, as a part of them, all errors taken to go one way;
    the larger one where it was measured with XLA too. ``loss_s`` is what a loss takes beside the blocks, on
    the last one's device, and ``metric_s`` what a metric takes, in the caller's thread. The seconds are those of all
    ``microbatches`` of a minibatch together, with the rows of one at a time. ``network`` is what the blocks hand on and
    which can be divided by their outputs, None where that is not known. ``budget_s`` are the seconds that it was
    allowed to take where something was left out to keep to them, None where nothing was. ``codings`` are what
    compressions take on the device, as far as that was measured; what others take counts as nothing.

    Raises ValueError for no blocks, or a batch size below 1.
    """

    model: str
    batch_size: int
    blocks: tuple[BlockProfile, ...]
    spread: float = 0.0
    loss_s: float = 0.0
    metric_s: float = 0.0
    microbatches: int = 1
    network: GridNetwork | None = None
    budget_s: float | None = None
    codings: tuple[Coding, ...] = ()

    def __post_init__(self) -> None:
        if not self.blocks or not isinstance(self.batch_size, int) or self.batch_size < 1:
            raise ValueError(
                "A profile has blocks, and a batch of at least one row. Received: "
                f"batch_size={self.batch_size!r}, {counted(len(self.blocks), 'block')}. Try batch_size=128."
            )

    @property
    def total_s(self) -> float:
        """Seconds for one minibatch on one device: every forward and every backward, and the loss."""
        return sum(block.forward_s + block.backward_s for block in self.blocks) + self.loss_s

    def coding(self, compression: Compression | None) -> Coding | None:
        """What a compression takes; None for none, or where that was not measured."""
        return next((each for each in self.codings if compression and each.compression == str(compression)), None)

    @property
    def trained(self) -> tuple[BlockProfile, ...]:
        """The blocks as they train: the last one's forward computes the loss too."""
        *others, last = self.blocks
        compiled = last.compiled and last.compiled.later(self.loss_s)
        return *others, replace(last, forward_s=last.forward_s + self.loss_s, compiled=compiled)

    @property
    def is_compiled(self) -> bool:
        """Whether it was measured with XLA too."""
        return any(block.compiled is not None for block in self.blocks)

    @property
    def warning(self) -> str:
        """A warning if the seconds are not steady, else an empty string."""
        return unsteady(self.spread)

    def scaled(self, batch_size: int) -> Profile:
        """An estimate for another batch size: everything but the weights is proportional to the number of rows.

        It suits networks that keep a device busy with one row; a small batch on a large device is faster than
        estimated.
        """
        rows = batch_size / self.batch_size
        blocks = (
            replace(
                block.longer(rows, 1.0),
                output_bytes=round(rows * block.output_bytes),
                floats=block.floats and (round(rows * block.floats[0]), round(rows * block.floats[1])),
                activation_bytes=round(rows * block.activation_bytes),
                workspace_bytes=round(block.workspace_of(batch_size, self.batch_size)),
            )
            for block in self.blocks
        )
        loss_s, metric_s = rows * self.loss_s, rows * self.metric_s
        return replace(self, batch_size=batch_size, blocks=tuple(blocks), loss_s=loss_s, metric_s=metric_s)

    def faster(self, times: float) -> Profile:
        """An estimate for devices that compute faster by a factor."""
        blocks = tuple(block.longer(1 / times, 1 / times) for block in self.blocks)
        codings = tuple(each.times(1 / times) for each in self.codings)
        return replace(self, blocks=blocks, loss_s=self.loss_s / times, metric_s=self.metric_s / times, codings=codings)

    def to_json(self) -> str:
        """The profile as JSON text; ``from_json`` reads it back equal."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """Read ``to_json``'s text back; raises ValueError when it is not a profile."""
        try:
            data = json.loads(text)
            blocks = tuple(_block(**block) for block in data["blocks"])
            names = "spread", "loss_s", "metric_s", "microbatches", "budget_s"
            beside = {name: data[name] for name in names if name in data}
            network = GridNetwork.of(data["network"]) if data.get("network") else None
            codings = tuple(coding_of(*each) for each in data.get("codings", ()))
            return cls(data["model"], data["batch_size"], blocks, **beside, network=network, codings=codings)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"Not a profile ({error}). Received: {text[:60]!r}. Try a file that save() wrote."
            ) from error

    def save(self, path: str | Path) -> None:
        """Write the profile to a JSON file."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read a profile that ``save`` wrote."""
        return cls.from_json(Path(path).read_text(encoding="utf-8"))

    def __str__(self) -> str:
        lines = [self._title, text_table(self._header, self._rows), self.warning]
        return "\n".join(filter(None, lines))

    def _repr_html_(self) -> str:
        return table(self._title, self._header, self._rows, note=self.warning)

    def plot(self, path: str | Path | None = None) -> Picture:
        """Bars of what every block takes, and of its weights and outputs.

        Needs matplotlib: ``pip install "pipetrain[plot]"``.

        Args:
            path: a file to save it to, of the kind that its name ends in.

        Returns:
            The matplotlib figure.
        """
        from pipetrain.plan import pictures

        return pictures.profile(self).saved(path)

    @property
    def _title(self) -> str:
        title = (
            f"{self.model}: {counted(len(self.blocks), 'block')}, batch {self.batch_size}, {self.total_s * 1e3:.1f} ms"
        )
        title += f" (within {self.spread:.0%})" if self.spread >= 0.005 else ""
        estimated = sum(block.estimated for block in self.blocks)
        return title + (f", {counted(estimated, 'block')} estimated" if estimated else "")

    @property
    def _is_estimated(self) -> bool:
        return any(block.estimated for block in self.blocks)

    @property
    def _header(self) -> tuple[str, ...]:
        return (
            *("block", "forward ms", "backward ms", "output MiB", "weights MiB"),
            *(("with XLA: forward ms", "backward ms") if self.is_compiled else ()),
            *(("seconds",) if self._is_estimated else ()),
        )

    @property
    def _rows(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = [
            (
                *(b.name, f"{b.forward_s * 1e3:.2f}", f"{b.backward_s * 1e3:.2f}"),
                *(mib(b.output_bytes), mib(b.weight_bytes)),
                *(_compiled_ms(b) if self.is_compiled else ()),
                *(("estimated" if b.estimated else "measured",) if self._is_estimated else ()),
            )
            for b in self.blocks
        ]
        for name, seconds in (("(loss)", self.loss_s), ("(metric)", self.metric_s)):
            if seconds:
                rows.append((name, f"{seconds * 1e3:.2f}", *["-"] * (len(self._header) - 2)))
        return rows

    def _columns(self) -> dict[str, Sequence[Any]]:
        nested = ("compiled", "shared", "slices", "floats", "shared_rows")
        names = [each.name for each in fields(BlockProfile) if each.name not in nested]
        columns: dict[str, Sequence[Any]] = {name: [getattr(block, name) for block in self.blocks] for name in names}
        for name in ("forward_s", "backward_s", "update_s"):
            columns[f"compiled_{name}"] = [block.compiled and getattr(block.compiled, name) for block in self.blocks]
        return columns


def _between(first_s: float, second_s: float, place: float) -> float:
    """On the straight line through two logarithms."""
    return first_s * (second_s / first_s) ** place if first_s and second_s else 0.0


def _compiled_ms(block: BlockProfile) -> tuple[str, str]:
    seconds = block.compiled
    return (f"{seconds.forward_s * 1e3:.2f}", f"{seconds.backward_s * 1e3:.2f}") if seconds else ("-", "-")


def squarish(elements: int) -> tuple[int, int]:
    """The sides of a matrix of about so many elements."""
    side = max(1, math.isqrt(elements))
    return side, max(1, round(elements / side))


def crossing_bytes(size_bytes: int, floats: tuple[int, int] | None, compression: Compression | None) -> int:
    """So many bytes of which some are floating-point numbers, see ``BlockProfile``, compressed."""
    count, float_bytes = (size_bytes // FLOAT_BYTES, size_bytes) if floats is None else floats
    if compression is None or not count:
        return size_bytes
    return size_bytes - float_bytes + compression.sent_bytes((count,), float_bytes // count)


def crossing_elements(size_bytes: int, floats: tuple[int, int] | None, compression: Compression | None) -> int:
    """How many of these numbers are encoded: none where messages would be no smaller."""
    count, float_bytes = (size_bytes // FLOAT_BYTES, size_bytes) if floats is None else floats
    is_encoded = compression is not None and count > 0 and compression.encodes((count,), float_bytes // count)
    return count if is_encoded else 0


def _block(
    compiled: dict[str, float] | None = None,
    shared: Any = (),
    slices: Any = (),
    floats: Sequence[int] | None = None,
    shared_rows: Sequence[int] = (),
    **fields: Any,
) -> BlockProfile:
    pairs = tuple((int(number), int(size_bytes)) for number, size_bytes in shared)
    parts = tuple((int(each[0]), float(each[1]), float(each[2])) for each in slices)
    compiled_s = None if compiled is None else Seconds(**compiled)
    pair = None if floats is None else (int(floats[0]), int(floats[1]))
    numbers = tuple(map(int, shared_rows))
    return BlockProfile(**fields, compiled=compiled_s, shared=pairs, slices=parts, floats=pair, shared_rows=numbers)


def coding_of(compression: str, encode_s: Sequence[float], decode_s: Sequence[float]) -> Coding:
    """As JSON has it."""
    encode, decode = ((float(each[0]), float(each[1])) for each in (encode_s, decode_s))
    return Coding(str(compression), encode, decode)


def unsteady(spread: float) -> str:
    """A warning of so large a spread, else an empty string."""
    if spread <= NOISY:
        return ""
    return f"The machine was too busy for steady figures (within {spread:.0%}): profile again when it is idle."


def mib(size_bytes: int) -> str:
    """Bytes as mebibytes: two decimals, or as many as the first two digits need."""
    value = size_bytes / 2**20
    return f"{value:.2f}" if value >= 0.1 or not size_bytes else f"{value:.2g}"


SUMMED = (
    *("forward_s", "backward_s", "weight_bytes", "activation_bytes", "update_s", "step_s"),
    *("product_bytes", "fixed_bytes", "rows_bytes"),
)
LARGEST = ("workspace_bytes", "row_workspace_bytes")  # blocks work one after another


def even_bounds(seconds: Sequence[float], most: int) -> list[int]:
    """Where to divide a chain into at most so many parts that take about equally long: 0, ..., the chain's length.

    Everything is a part of its own where there are no more.
    """
    count = len(seconds)
    if count <= most:
        return list(range(count + 1))
    ends_s = np.cumsum(seconds)
    wanted = np.searchsorted(ends_s, ends_s[-1] * np.arange(1, most) / most, side="right")
    return [0, *sorted({int(end) for end in wanted} - {0, count}), count]


def bounds_of(profile: Profile, most: int) -> list[int]:
    """``even_bounds`` of its blocks; every block is a part of its own where blocks share weights."""
    if any(block.shared for block in profile.blocks):
        return list(range(len(profile.blocks) + 1))
    return even_bounds([block.seconds.total_s for block in profile.blocks], most)


def merged(profile: Profile, bounds: Sequence[int]) -> Profile:
    """The profile with the blocks between two bounds together, named as the last of them: its cuts are the chain's."""
    parts = (profile.blocks[first:last] for first, last in pairwise(bounds))
    return replace(profile, blocks=tuple(part[0] if len(part) == 1 else _together(part) for part in parts))


def _together(blocks: Sequence[BlockProfile]) -> BlockProfile:
    sums = {name: sum(getattr(block, name) for block in blocks) for name in SUMMED}
    largest = {name: max(getattr(block, name) for block in blocks) for name in LARGEST}
    compiled = [block.compiled for block in blocks if block.compiled is not None]
    late = [block.late_bytes for block in blocks if block.late_bytes is not None]
    return replace(
        blocks[-1],
        **sums,
        **largest,
        compiled=Seconds(*map(sum, zip(*map(_seconds, compiled), strict=True)))
        if len(compiled) == len(blocks)
        else None,
        late_bytes=sum(late) if len(late) == len(blocks) else None,
        slices=(),  # no several layers are divided as one
    )


def _seconds(each: Seconds) -> tuple[float, float, float]:
    return each.forward_s, each.backward_s, each.update_s


def divided(whole: Profile, pieces: Profile | None, microbatches: int) -> Profile:
    """An estimate of the profile in so many microbatches; what is measured stays as it is.

    What a block takes is ``a + b * microbatches``: a part that goes with the rows, and one that every microbatch takes
    whatever its rows are, such as reading the weights. Both profiles together give a and b of every block; b is at
    least 0 for more microbatches than ``pieces`` has. Without ``pieces``, or where these are whole minibatches too, b
    is taken to be 0.
    """
    if pieces is None or pieces.microbatches == 1 or microbatches == 1:
        return replace(whole, microbatches=microbatches)
    part = (microbatches - 1) / (pieces.microbatches - 1)

    def between(first_s: float, last_s: float) -> float:
        """The time in between, or beyond."""
        return first_s + (part if last_s > first_s else min(part, 1.0)) * (last_s - first_s)

    def seconds(first: Seconds, last: Seconds) -> Seconds:
        forward_s, backward_s = between(first.forward_s, last.forward_s), between(first.backward_s, last.backward_s)
        return Seconds(forward_s, backward_s, last.update_s)

    def block(first: BlockProfile, last: BlockProfile) -> BlockProfile:
        plain = seconds(first.seconds, last.seconds)
        compiled = seconds(first.compiled, last.compiled) if first.compiled and last.compiled else last.compiled
        slices = first.slices  # which a device of a grid computes for all rows in one call
        return replace(last, forward_s=plain.forward_s, backward_s=plain.backward_s, compiled=compiled, slices=slices)

    blocks = tuple(block(*both) for both in zip(whole.blocks, pieces.blocks, strict=True))
    loss_s = between(whole.loss_s, pieces.loss_s)
    return replace(pieces, blocks=blocks, loss_s=loss_s, microbatches=microbatches)


def undisturbed(whole: Profile, pieces: Profile | None) -> Profile:
    """The profile of whole minibatches, no block of which takes longer than in microbatches, as far as that is known.

    Fewer calls for the same rows take no longer: if they seem to, other programs had the processor meanwhile.
    """
    if pieces is None or pieces.microbatches == 1:
        return whole

    def less(a: Seconds, b: Seconds) -> Seconds:
        return Seconds(min(a.forward_s, b.forward_s), min(a.backward_s, b.backward_s), min(a.update_s, b.update_s))

    def block(own: BlockProfile, other: BlockProfile) -> BlockProfile:
        plain = less(own.seconds, other.seconds)
        compiled = less(own.compiled, other.compiled) if own.compiled and other.compiled else own.compiled
        return replace(own, **asdict(plain), compiled=compiled)

    blocks = tuple(block(*both) for both in zip(whole.blocks, pieces.blocks, strict=True))
    return replace(whole, blocks=blocks, loss_s=min(whole.loss_s, pieces.loss_s))
