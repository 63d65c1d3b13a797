"""Plain-text tables for people."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

TERMINAL = 80  # columns
GAP = "  "


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns padded to their widest cell: the first aligned left, the others right.

    Where a terminal is too narrow for that, columns' names take several lines: as few as make the table fit, or, if
    none do, as many as they have words.
    """
    cells = [max((len(row[n]) for row in rows), default=0) for n in range(len(header))]
    tallest = max(1, *(len(name.split()) for name in header))
    for height in range(1, tallest + 1):
        widths = [max(width, _narrowest(name, height)) for name, width in zip(header, cells, strict=True)]
        if len(GAP.join("-" * width for width in widths)) <= TERMINAL:
            break

    def line(row: Sequence[str]) -> str:
        first, *others = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        return GAP.join((first.strip().ljust(widths[0]), *others)).rstrip()

    names = [_lines(name, width) for name, width in zip(header, widths, strict=True)]
    above = max(map(len, names))
    beside = zip(*([""] * (above - len(each)) + each for each in names), strict=True)
    return "\n".join((*map(line, beside), GAP.join("-" * width for width in widths), *map(line, rows)))


def _narrowest(name: str, height: int) -> int:
    """The least columns in which a name takes at most so many lines, words being whole."""
    longest = max(map(len, name.split()), default=1)
    return next(width for width in range(longest, len(name) + 2) if len(_lines(name, width)) <= height)


def _lines(name: str, width: int) -> list[str]:
    return textwrap.wrap(name, width, break_on_hyphens=False)


def counted(number: int, noun: str) -> str:
    """``1 stage``, ``2 stages``, ``2 batches``, ``2 epochs``."""
    return f"{number} {noun}{'' if number == 1 else 'es' if noun.endswith('tch') else 's'}"
