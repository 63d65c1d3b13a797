"""Schemes with how they predict and their microbatches, as command lines and tables name them."""

from __future__ import annotations

import argparse
import re
from typing import NamedTuple

from pipetrain.cli.arguments import horizon
from pipetrain.schemes import table
from pipetrain.schemes.options import AnyScheme, check_microbatches, splits, with_horizon
from pipetrain.schemes.text_form import chosen, in_full

NAMES = (*table.NAMES, *table.SCHEDULED)


class Variant(NamedTuple):
    """A scheme with its horizon and microbatches; as text ``spectrain/target/M=2``, without what is not given.

    ``file`` names the scheme where it is none of the table: ``FILE.csv``, or ``FILE.py:NAME``.
    """

    scheme: str
    horizon: str | float = table.HORIZONS[0]
    microbatches: int | None = None
    file: str | None = None

    def __str__(self) -> str:
        ahead = self.horizon if isinstance(self.horizon, str) else f"{self.horizon:g}"
        pieces = f"M={self.microbatches}" if self.microbatches and self.splits else ""
        return "/".join(filter(None, (self.scheme, "" if ahead == table.HORIZONS[0] else ahead, pieces)))

    @property
    def way(self) -> AnyScheme:
        """The scheme with its horizon."""
        return with_horizon(chosen(self.file or self.scheme), self.horizon)

    @property
    def splits(self) -> bool:
        """Whether it divides minibatches into microbatches."""
        return splits(self.way)


def variant(text: str) -> Variant:
    """What such a text names. Raises argparse.ArgumentTypeError for a scheme that is none, or has no such horizon."""
    try:
        name, *rest = _parts(text)
        pieces = int(rest.pop()[2:]) if rest and rest[-1].startswith("M=") else None
        ahead = horizon("/".join(rest)) if rest else table.HORIZONS[0]
        way = chosen(name)
        if way == name and name not in NAMES:
            raise ValueError(f"unknown scheme {name!r}. Try {table.instead_of(name, NAMES)}")
        table.check_name(way)
        table.check_horizon(way, ahead)
        check_microbatches(pieces, with_horizon(way, ahead))
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error).replace("%", "%%")) from error
    return Variant(str(way), ahead, pieces, in_full(name))


def _parts(text: str) -> list[str]:
    """Of a file's scheme the name has slashes of its own, and no horizon follows it."""
    found = re.fullmatch(r"(.*\.(?:csv|py:\w+))(?:/(M=\d+))?", text)
    return [part for part in found.groups() if part] if found else text.split("/")
