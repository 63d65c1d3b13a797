"""Help texts as wide as the terminal."""

from __future__ import annotations

import argparse
import textwrap


class Folded(argparse.RawDescriptionHelpFormatter):
    """Folds the paragraphs of descriptions; what is indented, such as examples and lists, stays as it is written."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = text.strip("\n").split("\n\n")
        return "\n\n".join(textwrap.indent(_folded(each, width - len(indent)), indent) for each in paragraphs)


def _folded(paragraph: str, width: int) -> str:
    lines = paragraph.split("\n")
    if any(line.startswith(" ") for line in lines):
        return paragraph
    return textwrap.fill(" ".join(lines), width)
