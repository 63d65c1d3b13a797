"""Schemes with how they predict and their microbatches, as command lines and tables name them."""

from __future__ import annotations

import argparse
from typing import NamedTuple

from pipetrain.cli.argument_types import horizon
from pipetrain.schemes import table

NAMES = (*table.NAMES, *table.SCHEDULED)


class Variant(NamedTuple):
    """A scheme with its horizon and microbatches; as text ``spectrain/target/M=2``, without what is not given."""

    scheme: str
    horizon: str | float = table.HORIZONS[0]
    microbatches: int | None = None

    def __str__(self) -> str:
        ahead = self.horizon if isinstance(self.horizon, str) else f"{self.horizon:g}"
        pieces = f"M={self.microbatches}" if self.microbatches and self.splits else ""
        return "/".join(filter(None, (self.scheme, "" if ahead == table.HORIZONS[0] else ahead, pieces)))

    @property
    def splits(self) -> bool:
        """Whether it divides minibatches into microbatches."""
        return table.splits(self.scheme, self.horizon)


def variant(text: str) -> Variant:
    """What such a text names. Raises argparse.ArgumentTypeError for a scheme that is none, or has no such horizon."""
    try:
        name, *rest = text.split("/")
        pieces = int(rest.pop()[2:]) if rest and rest[-1].startswith("M=") else None
        ahead = horizon("/".join(rest)) if rest else table.HORIZONS[0]
        if name not in NAMES:
            raise ValueError(f"{name!r} is none of {', '.join(NAMES)}")
        table.check_horizon(name, ahead)
        table.check_microbatches(pieces, name, ahead)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return Variant(name, ahead, pieces)
