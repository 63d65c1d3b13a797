"""What pipetrain says: lines of the logger ``pipetrain`` on standard output, tables; and standard error, held back.

Every module that says something has a logger of its own name. They have one handler, which prints the message alone,
and pass nothing on to the root logger: where a program has configured that, each line would stand there twice.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}
BELOW_BAR = {"pipetrain_begins": "\n"}  # ``extra`` of a record, where a progress bar may not have ended its line

_logger = logging.getLogger("pipetrain")


class _Lines(logging.Handler):
    """The messages alone, as lines of what ``sys.stdout`` is when they come."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print it; what ``print`` raises is raised."""
        print(f"{getattr(record, 'pipetrain_begins', '')}{self.format(record)}", flush=True)


def set_up() -> None:
    """Give the logger its level and its handler, unless the program has given it others before."""
    if _logger.level == logging.NOTSET:
        _logger.setLevel(logging.INFO)
    if not _logger.handlers:
        _logger.addHandler(_Lines())
        _logger.propagate = False


def set_verbosity(level: int | str) -> None:
    """Show lines of pipetrain from this level up; progress bars of its own, as of profiles, come with ``"info"``.

    ``"info"``, the default, shows all that ``verbose=1`` asks for. ``"warning"`` leaves only lines that tell of a
    checkpoint with which something is wrong, ``"error"`` none. What ``verbose=0`` asks not to be shown is shown at no
    level. Python's ``warnings`` have their own filters, and the bars of Keras' ``fit``, ``evaluate`` and ``predict``
    follow ``verbose`` alone.

    Args:
        level: one of ``logging``'s levels, such as ``logging.WARNING``, or its name.

    Raises:
        ValueError: a level that ``logging`` does not have.
    """
    found = LEVELS.get(level.lower()) if isinstance(level, str) else level
    if isinstance(found, bool) or not isinstance(found, int) or found not in LEVELS.values():
        raise ValueError(
            f"Lines are shown from one of logging's levels up. Received: level={level!r}. "
            "Try 'info', 'warning' or 'error'."
        )
    _logger.setLevel(found)


@contextmanager
def quiet_stderr() -> Iterator[None]:
    """Hold back what is written to standard error, by native code too; show it if an exception is raised."""
    sys.stderr.flush()
    saved = os.dup(2)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        except BaseException:
            held.seek(0)
            os.write(saved, held.read())
            raise
        finally:
            sys.stderr.flush()
            os.dup2(saved, 2)
            os.close(saved)


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
