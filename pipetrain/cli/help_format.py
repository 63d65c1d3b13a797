"""Help texts as wide as the terminal."""

from __future__ import annotations

import argparse
import shutil
import textwrap
from collections.abc import Iterable, Mapping
from itertools import groupby


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
