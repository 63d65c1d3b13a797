"""What has rows gives them to pandas and to files of comma-separated values."""

from __future__ import annotations

import csv
from collections.abc import Sequence
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
