"""Help texts as wide as the terminal."""

from __future__ import annotations

import argparse
import textwrap
from itertools import groupby


class Folded(argparse.RawDescriptionHelpFormatter):
    """Folds the paragraphs of descriptions; what is indented, such as examples and lists, stays as it is written."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = text.strip("\n").split("\n\n")
        return "\n\n".join(textwrap.indent(_folded(each, width - len(indent)), indent) for each in paragraphs)


def _folded(paragraph: str, width: int) -> str:
    parts = groupby(paragraph.split("\n"), key=lambda line: line.startswith(" "))
    return "\n".join("\n".join(lines) if as_is else textwrap.fill(" ".join(lines), width) for as_is, lines in parts)
