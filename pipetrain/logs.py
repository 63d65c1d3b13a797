"""What pipetrain says: lines of the logger ``pipetrain`` on standard output; and standard error, held back.

Every module that says something has a logger of its own name. They have one handler, which prints the message alone,
and pass nothing on to the root logger: where a program has configured that, each line would stand there twice.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections.abc import Iterator
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
