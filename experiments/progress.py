"""What commands show while they are at work, and rows of results that are kept as they come."""

from __future__ import annotations

import csv
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

Item = TypeVar("Item")
WIDTH = 24


def tracked(items: Sequence[Item], named: Sequence[str]) -> Iterator[Item]:
    """The items one after another, with a bar on standard error, or with a line each where that is no terminal."""
    begun_s, on_terminal = time.monotonic(), sys.stderr.isatty()
    for done, (item, name) in enumerate(zip(items, named, strict=True)):
        if on_terminal:
            _show(done, len(items), name, time.monotonic() - begun_s)
        else:
            print(f"{done + 1}/{len(items)} {name}", file=sys.stderr)
        yield item
    if on_terminal and items:
        _show(len(items), len(items), "", time.monotonic() - begun_s)
        print(file=sys.stderr)


def _show(done: int, count: int, name: str, taken_s: float) -> None:
    filled = WIDTH * done // count
    bar = f"[{'#' * filled}{'.' * (WIDTH - filled)}] {done}/{count} {taken_s:.0f} s {name}"
    print(f"\r{bar:<78.78}", end="", file=sys.stderr, flush=True)


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Rows as CSV, with the keys of the first as the header; whole or not at all."""
    part = path.with_name(f".{path.name}.part")
    with part.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]) if rows else [], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return part.replace(path)
