"""What commands show while they are at work, and rows of results that are kept as they come."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tqdm import tqdm

Item = TypeVar("Item")
BAR = "{bar:24} {n_fmt}/{total_fmt} {elapsed}<{remaining} {desc}"  # the name comes last: a narrow terminal shortens it


def tracked(items: Sequence[Item], named: Sequence[str]) -> Iterator[Item]:
    """The items one after another, with a bar on standard error, or with a line each where that is no terminal."""
    on_terminal = sys.stderr.isatty()
    with tqdm(total=len(items), file=sys.stderr, disable=not on_terminal, bar_format=BAR) as bar:
        for number, (item, name) in enumerate(zip(items, named, strict=True), start=1):
            bar.set_description_str(name)
            if not on_terminal:
                print(f"{number}/{len(items)} {name}", file=sys.stderr)
            yield item
            bar.update()
        bar.set_description_str("")


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Rows as CSV, with the keys of the first as the header; whole or not at all."""
    part = path.with_name(f".{path.name}.part")
    with part.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]) if rows else [], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return part.replace(path)
