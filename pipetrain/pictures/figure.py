"""A matplotlib figure that a notebook shows and that can be saved; colours that colour-blind readers tell apart."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import TypeVar

try:
    import matplotlib.style
    from matplotlib.axes import Axes as Axes  # whoever draws imports these from here, past no other error
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D as Line2D
    from matplotlib.patches import Patch as Patch
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"Pictures need matplotlib, which pipetrain does not. Missing: {error.name}. "
        'Try pip install "pipetrain[plot]", or pip install ".[plot]" in a clone.',
        name=error.name,
    ) from error

# Okabe and Ito's palette.
BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
YELLOW, BLUE, VERMILION, PURPLE = "#F0E442", "#0072B2", "#D55E00", "#CC79A7"
GREY, LIGHT = "#666666", "#BBBBBB"  # what is secondary

WIDTH = 8.5  # inches of a figure that is to be read at the width of a page
ROW, MARGIN = 0.27, 1.3  # inches of height: of a row of bars, and of what is around them
TALLEST = 14.0  # inches
DPI = 150
NAMED = 46  # rows at most of which each has its name

Draw = TypeVar("Draw", bound=Callable[..., "Picture"])


class Picture(Figure):
    """A figure on white, which a notebook shows without ``pyplot``."""

    def __init__(self, width: float, height: float) -> None:
        super().__init__(figsize=(width, height), facecolor="white", layout="constrained")

    def _repr_png_(self) -> bytes:
        with io.BytesIO() as file:
            self.savefig(file, format="png", dpi=DPI)
            return file.getvalue()

    def saved(self, path: str | Path | None) -> Picture:
        """The same, written to a file of the kind that its name ends in; without a path only the same."""
        if path is not None:
            self.savefig(path, dpi=DPI)
        return self


def on_white(draw: Draw) -> Draw:
    """A drawing function whose pictures do not depend on the style that the user has set."""

    @wraps(draw)
    def drawn(*given: object, **more: object) -> Picture:
        with matplotlib.style.context("default"):
            return draw(*given, **more)

    return drawn  # type: ignore[return-value]


def height_of(rows: int) -> float:
    """Inches of a figure with so many rows of bars."""
    return min(MARGIN + ROW * rows, TALLEST)


def plain(panel: Axes, axis: str, grid: str = "x") -> None:
    """A panel with the name of its axis and a faint grid, without a frame."""
    panel.set_xlabel(axis)
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(axis=grid, alpha=0.3)  # type: ignore[arg-type]
    panel.set_axisbelow(True)


def name_rows(panel: Axes, names: Sequence[str], size: float = 9.0) -> None:
    """Name the rows of a panel, the first on top; of very many rows some of them."""
    every = -(-len(names) // NAMED)
    panel.set_yticks(range(0, len(names), every), names[::every], fontsize=size)
    panel.set_ylim(len(names) - 0.5, -0.5)


def shortened(name: str, most: int) -> str:
    """A name of at most so many characters: the middle of a longer one is left out."""
    half = (most - 1) // 2
    return name if len(name) <= most else f"{name[: most - 1 - half]}…{name[-half:]}"
