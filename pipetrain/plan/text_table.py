"""Plain-text tables for people."""

from __future__ import annotations

from collections.abc import Sequence


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns padded to their widest cell: the first aligned left, the others right."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        first, *others = (cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
        return "  ".join((first.strip().ljust(widths[0]), *others)).rstrip()

    return "\n".join((line(header), "  ".join("-" * width for width in widths), *(line(row) for row in rows)))


def counted(number: int, noun: str) -> str:
    """``1 stage``, ``2 stages``, ``2 batches``, ``2 epochs``."""
    return f"{number} {noun}{'' if number == 1 else 'es' if noun.endswith('tch') else 's'}"
