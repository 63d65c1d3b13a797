"""Tables for notebooks: HTML that needs no style sheet, by day and by night, with every text escaped."""

from __future__ import annotations

import csv
from collections.abc import Collection, Sequence
from html import escape
from importlib import import_module
from pathlib import Path
from typing import Any


class Tabular:
    """An object with rows; a subclass says by ``_columns`` what is in them."""

    def _columns(self) -> dict[str, Sequence[Any]]:
        """The values of every column by its name, equally many of each."""
        raise NotImplementedError

    def to_pandas(self) -> Any:
        """The rows as a ``pandas.DataFrame``. Raises ModuleNotFoundError where pandas is not installed."""
        try:
            pandas = import_module("pandas")
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"A DataFrame needs pandas, which pipetrain does not. Missing: {error.name}. "
                "Try pip install pandas, or to_csv(path), which needs nothing.",
                name=error.name,
            ) from error
        return pandas.DataFrame(self._columns())

    def to_csv(self, path: str | Path) -> None:
        """Write the rows to a file of comma-separated values, below a line with the columns' names."""
        columns = self._columns()
        with Path(path).open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(columns)
            writer.writerows(zip(*columns.values(), strict=True))


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
