"""The arguments of the commands: kinds of values, the options that belong to schemes, and help texts."""

from __future__ import annotations

import argparse
import math
import shutil
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from itertools import groupby
from pathlib import Path
from typing import Any, get_args, get_type_hints

from pipetrain.plan.cluster import size_bytes
from pipetrain.schemes.compression import compression_of
from pipetrain.schemes.options import (
    DEFAULT_POLICY,
    OPTIONS,
    AsynchronousOptions,
    PipelineOptions,
    ReplicatedOptions,
    allowed,
    described,
    owners,
)
from pipetrain.schemes.scheme import Scheme
from pipetrain.schemes.synchrony import synchrony_of, topology_of
from pipetrain.schemes.table import GRID, HORIZONS
from pipetrain.schemes.text_form import SUFFIX, chosen

MICROBATCHES = 4  # of a minibatch, where nothing says it


def positive_number(text: str) -> float:
    """A finite number above 0."""
    if not (value := _finite(text)) > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def from_zero(text: str) -> float:
    """A finite number from 0 up."""
    if not (value := _finite(text)) >= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 up")
    return value


def part(text: str) -> float:
    """A number from 0 to 1."""
    if not 0 <= (value := _finite(text)) <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 1")
    return value


def _finite(text: str) -> float:
    """The number; NaN, which compares with nothing, for what is none and for infinity."""
    try:
        value = float(text)
    except ValueError:
        return math.nan
    return value if math.isfinite(value) else math.nan


def budget(text: str) -> float:
    """Seconds above 0, or ``inf``."""
    return float(text) if text == "inf" else positive_number(text)


def count(text: str) -> int:
    """A whole number from 1 up."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 up")
    return int(text)


def whole(text: str) -> int:
    """A whole number from 0 up."""
    return 0 if text == "0" else count(text)


def text_for(check: Callable[[str], object]) -> Callable[[str], str]:
    """The text itself, where the check accepts it. Raises ArgumentTypeError with what it says of another."""

    def checked(text: str) -> str:
        try:
            check(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
        return text

    return checked


def horizon(text: str) -> str | float:
    """The name of a horizon, or a number of updates from 0 up."""
    if text in HORIZONS:
        return text
    try:
        return from_zero(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is none of {', '.join(HORIZONS)}, nor a number from 0 up"
        ) from error


def auto_or_bool(text: str) -> bool | str:
    """``auto``, or True for ``yes`` and False for ``no``."""
    if text not in ("auto", "yes", "no"):
        raise argparse.ArgumentTypeError(f"{text!r} is none of auto, yes, no")
    return text if text == "auto" else text == "yes"


def input_shape(text: str) -> tuple[str, tuple[int, ...]]:
    """Sizes without the batch, such as ``64,64,3``, and the name of the input before them, as in ``image=64,64,3``."""
    name, _, sizes = text.rpartition("=")
    try:
        return name, tuple(count(each.strip()) for each in sizes.split(","))
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no shape, such as 64,64,3 or NAME=64,64,3: {error}") from error


def input_shapes(given: Sequence[tuple[str, tuple[int, ...]]]) -> Any:
    """Such shapes in order, or by name; None if there are none. Raises ValueError for some of each, or one twice."""
    names = [name for name, _ in given]
    if any(names) and (not all(names) or len({*names}) < len(names)):
        raise ValueError(
            "Shapes are given in the inputs' order, or once for each by its name. "
            f"Received: --input-shape for {names}. Try NAME=64,64,3 for each."
        )
    return (dict(given) if any(names) else [shape for _, shape in given]) or None


def size(text: str) -> int:
    """Bytes, such as 16GiB."""
    try:
        return size_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def port(text: str) -> int:
    """A number of a port; 0 for any that is free."""
    if not text.isdigit() or int(text) >= 2**16:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port from 0 to {2**16 - 1}")
    return int(text)


def cores(text: str) -> list[int]:
    """Processor cores, such as ``0,2-3``."""
    try:
        spans = [[int(end) for end in part.split("-")] for part in text.split(",")]
        if any(len(span) > 2 or span[-1] < span[0] for span in spans):
            raise ValueError
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} names no cores, such as 0,2-3") from error
    return [core for span in spans for core in range(span[0], span[-1] + 1)]


def scheme_named(text: str, chunks: int | None) -> str | Scheme:
    """The scheme of this name with so many stages on a device if given, or that of a file. Raises ValueError."""
    if text.endswith(SUFFIX) and not Path(text).is_file():
        raise ValueError(
            f"There is no such file. Received: --scheme {text}. Try one that exists; python -m pipetrain schedule "
            "--scheme zb-v --csv FILE writes one."
        )
    return chosen(text, chunks)


def add_scheme(parser: argparse.ArgumentParser, names: Collection[str], about: str = "", **options: Any) -> None:
    """The option that says which scheme, or which schedule of a file."""
    parser.add_argument(
        "--scheme",
        metavar="NAME",
        help=f"{', '.join(names)}; or the name of a file in {SUFFIX} with a schedule; or FILE.py:NAME, a Scheme, a "
        f"Schedule or a policy of your own{about}",
        **options,
    )


@dataclass(frozen=True)
class _OfGrid:
    """The scheme ``grid``, which is a tuple, as the others are described."""

    grid: Sequence[int] | None = field(
        default=None,
        metadata=described(
            "over how many devices the outputs of wide layers are divided, and over how many parts the rows",
            metavar=("OUTPUTS", "ROWS"),
            nargs=2,
            by_default="the grid and the layers that send the least",
        ),
    )


SCHEMES: dict[str, type[Any]] = {**OPTIONS, GRID: _OfGrid}
KINDS = {  # where the field's type does not say it
    "allow": text_for(allowed),
    "compression": text_for(compression_of),
    "replica_compression": text_for(compression_of),
    "grid": count,
    "horizon": horizon,
    "stretch_momentum": auto_or_bool,
    "synchrony": text_for(synchrony_of),
    "topology": text_for(topology_of),
}


def add_scheme_options(
    parser: argparse.ArgumentParser,
    wanted: Iterable[str],
    *,
    flags: Mapping[str, str] | None = None,
    defaults: Mapping[str, Any] | None = None,
    by_default: Mapping[str, str] | None = None,
) -> dict[str, list[str]]:
    """Add the wanted options of schemes, in a group for all that the same schemes have. Returns each scheme's flags.

    An option that is not given is what ``with_options`` takes for one that is left out.

    Args:
        parser: which has to know these options.
        wanted: the names of the options.
        flags: those that are not the option's name, such as ``{"depth": "--tree-depth"}``.
        defaults: values that this command line has for options that are not given.
        by_default: what help says of such options, in place of a value.
    """
    flags, defaults, by_default = flags or {}, defaults or {}, by_default or {}
    groups: dict[tuple[str, ...], list[str]] = {}
    for each in wanted:
        groups.setdefault(tuple(owners(each)), []).append(each)
    of_scheme: dict[str, list[str]] = {name: [] for names in groups for name in names}
    for names, options in groups.items():
        group = parser.add_argument_group(*_title(names))
        for each in options:
            flag = flags.get(each, f"--{each.replace('_', '-')}")
            told = by_default.get(each, _said(defaults.get(each)))
            default = defaults.get(each, DEFAULT_POLICY.get(each))
            group.add_argument(flag, default=default, help=_help(each, told), **_arguments(each))
            for name in names:
                of_scheme[name].append(flag)
    return of_scheme


def _title(names: Sequence[str]) -> tuple[str, str | None]:
    """A group's title, and the names of its schemes where that does not have them."""
    asynchronous = [name for name, scheme in OPTIONS.items() if issubclass(scheme, AsynchronousOptions)]
    others = [name for name in asynchronous if name not in names]
    if {*names} <= {*asynchronous} and len(others) < len(names):
        return f"options of asynchronous schemes{' but ' if others else ''}{_listed(others)}", ", ".join(names)
    if {*names} == {name for name, scheme in OPTIONS.items() if issubclass(scheme, ReplicatedOptions)}:
        return "options of pipelines of one stage a device", ", ".join(names)
    pipelines = {name for name, scheme in OPTIONS.items() if issubclass(scheme, PipelineOptions)}
    if pipelines <= {*names}:
        others = [name for name in names if name not in pipelines]
        return f"options of {_listed(['pipelines', *others])}", ", ".join(names)
    return f"options of {_listed(names)}", None


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def _fields(name: str) -> dict[Field[Any], list[str]]:
    """The fields of an option, one where its schemes agree, with the schemes' names."""
    found: dict[Field[Any], list[str]] = {}
    for scheme in owners(name):
        for each in fields(SCHEMES[scheme]):
            if each.name == name:
                found.setdefault(each, []).append(scheme)
    return found


def _arguments(name: str) -> dict[str, Any]:
    """What ``add_argument`` needs to know of an option."""
    found = _fields(name)
    field, schemes = next(iter(found.items()))
    hint = get_type_hints(SCHEMES[schemes[0]])[name]
    if hint is bool:
        return {"action": "store_true"}
    metavars = [*dict.fromkeys(each.metadata["metavar"] for each in found if "metavar" in each.metadata)]
    given = {"metavar": metavars[0] if len(metavars) == 1 else "|".join(metavars)} if metavars else {}
    given |= {key: field.metadata[key] for key in ("choices", "nargs") if key in field.metadata}
    if name in KINDS:
        return {**given, "type": KINDS[name]}
    if int in (hint, *get_args(hint)):
        return {**given, "type": count if field.metadata.get("least", 1) else whole}
    return given


def _help(name: str, told: str) -> str:
    """The text of an option's help, as argparse wants it; ``told`` of the default, or the fields' own."""
    found: dict[str, list[str]] = {}
    for each, schemes in _fields(name).items():
        found.setdefault(_about(each, told), []).extend(schemes)
    texts = [(f"for {_listed(schemes)}, " if len(found) > 1 else "") + text for text, schemes in found.items()]
    return "; ".join(texts).replace("%", "%%")


def _about(field: Field[Any], told: str) -> str:
    metadata = field.metadata
    names = f": {', '.join(metadata['choices'])}" if "choices" in metadata and "metavar" in metadata else ""
    default = told or metadata.get("by_default", _said(field.default))
    return f"{metadata['about']}{names}" + (f" (default: {default})" if default else "")


def _said(default: Any) -> str:
    return "" if default in (None, MISSING) or isinstance(default, bool) else str(default)


class Folded(argparse.RawDescriptionHelpFormatter):
    """Folds the paragraphs of descriptions; what is indented, such as examples and lists, stays as it is written.

    Names that have hyphens stay in one piece.
    """

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = text.strip("\n").split("\n\n")
        return "\n\n".join(textwrap.indent(_folded(each, width - len(indent)), indent) for each in paragraphs)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return _lines(" ".join(text.split()), width)


def listed(entries: Mapping[str, Iterable[str]]) -> str:
    """A list of names, beside each of them its texts, every one of which begins a line."""
    indent = max(map(len, entries)) + 3
    width = shutil.get_terminal_size().columns - 2 - indent  # as argparse has it
    between = f"\n{'':<{indent}}"
    beside = {
        name: between.join(line for text in texts for line in _lines(text, width)) for name, texts in entries.items()
    }
    return "\n".join(f"  {name:<{indent - 2}}{text}".rstrip() for name, text in beside.items())


def _folded(paragraph: str, width: int) -> str:
    parts = groupby(paragraph.split("\n"), key=lambda line: line.startswith(" "))
    return "\n".join("\n".join(lines) if as_is else "\n".join(_lines(" ".join(lines), width)) for as_is, lines in parts)


def _lines(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, max(width, 11), break_on_hyphens=False)
