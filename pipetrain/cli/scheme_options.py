"""The options that belong to schemes, on a command line: their flags, kinds and help are those of the fields."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, get_args, get_type_hints

from pipetrain.cli.argument_types import auto_or_bool, count, horizon, slots
from pipetrain.schemes.options import DEFAULT_POLICY, OPTIONS, AsynchronousOptions, described, owners
from pipetrain.schemes.table import GRID


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
KINDS = {"grid": count, "horizon": horizon, "stretch_momentum": auto_or_bool}  # where the field's type does not say it


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
    metavars = [each.metadata["metavar"] for each in found if "metavar" in each.metadata]
    given = {"metavar": metavars[0] if len(metavars) == 1 else "|".join(metavars)} if metavars else {}
    given |= {key: field.metadata[key] for key in ("choices", "nargs") if key in field.metadata}
    if name in KINDS:
        return {**given, "type": KINDS[name]}
    if int in (hint, *get_args(hint)):
        return {**given, "type": count if field.metadata.get("least", 1) else slots}
    return given


def _help(name: str, told: str) -> str:
    """The text of an option's help, as argparse wants it; ``told`` of the default, or the fields' own."""
    found = _fields(name)
    texts = [
        (f"for {_listed(schemes)}, " if len(found) > 1 else "") + _about(each, told) for each, schemes in found.items()
    ]
    return "; ".join(texts).replace("%", "%%")


def _about(field: Field[Any], told: str) -> str:
    metadata = field.metadata
    names = f": {', '.join(metadata['choices'])}" if "choices" in metadata and "metavar" in metadata else ""
    default = told or metadata.get("by_default", _said(field.default))
    return f"{metadata['about']}{names}" + (f" (default: {default})" if default else "")


def _said(default: Any) -> str:
    return "" if default in (None, MISSING) or isinstance(default, bool) else str(default)
