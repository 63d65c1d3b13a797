"""Keras' progress bar, which leaves as many lines as it does without a pipeline's figures."""

from __future__ import annotations

import math
import os
import sys
from typing import Any

import keras

from pipetrain.frontend.runner_fit import NAMES

BAR, TIMES = 20, len(" 99999s 999ms/step")  # characters of Keras' bar, and of its times at most


class ProgressBar(keras.callbacks.ProgbarLogger):
    """At an epoch's end it shows those of a pipeline's figures that fit into the terminal's line; the logs have all.

    A line that is longer than the terminal's cannot be overwritten. Where the output is no terminal, all fit.
    """

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """The bar's last line."""
        logs = dict(logs or {})
        figures = {name: logs.pop(name) for name in NAMES if name in logs}
        room = _columns() - _width(self.target or self.seen, logs)
        for name, value in figures.items():
            room -= len(_text(name, value))
            if room >= 0:
                logs[name] = value
        super().on_epoch_end(epoch, logs)


def _columns() -> float:
    """Characters of a line; one less than the terminal's, in which a full line would end with an empty one."""
    if not sys.stdout.isatty():
        return math.inf
    return (os.get_terminal_size(sys.stdout.fileno()).columns or math.inf) - 1  # 0 if it does not tell


def _width(steps: int, logs: dict[str, float]) -> int:
    """Characters of the bar's last line, at most."""
    return len(f"{steps}/{steps} ") + BAR + TIMES + sum(len(_text(*each)) for each in logs.items())


def _text(name: str, value: float) -> str:
    """As Keras shows it."""
    return f" - {name}: {value:.4f}" if abs(value) > 1e-3 else f" - {name}: {value:.4e}"
