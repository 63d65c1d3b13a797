"""Tables for notebooks: HTML that needs no style sheet, by day and by night, with every text escaped."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from html import escape

CELL = "padding:0.2em 0.7em;white-space:nowrap;text-align:"


def table(
    title: str, header: Sequence[str], rows: Sequence[Sequence[str]], marked: Collection[int] = (), note: str = ""
) -> str:
    """A table that scrolls sideways where it is too wide: the first column aligned left, the others right.

    Args:
        title: the line above it, may be empty.
        header: the columns' names.
        rows: cells as text.
        marked: the numbers of rows in bold.
        note: what is below it, may be empty; its lines stay lines.
    """
    head = "".join(_cell("th", cell, n) for n, cell in enumerate(header))
    body = "".join(
        f"<tr{' style=font-weight:bold' if number in marked else ''}>"
        + "".join(_cell("td", cell, n) for n, cell in enumerate(row))
        + "</tr>"
        for number, row in enumerate(rows)
    )
    parts = [
        f"<div><strong>{escape(title)}</strong></div>" if title else "",
        '<div style="overflow-x:auto;max-width:100%"><table style="border-collapse:collapse">'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>",
        *(f"<div>{escape(line)}</div>" for line in note.splitlines()),
    ]
    return f"<div>{''.join(parts)}</div>"


def _cell(tag: str, text: str, column: int) -> str:
    return f'<{tag} style="{CELL}{"right" if column else "left"}">{escape(text)}</{tag}>'
