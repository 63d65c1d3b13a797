"""What all figures share: colours that colour-blind readers can tell apart, and one way to save."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib.figure import Figure

# Okabe and Ito's palette: one colour per scheme, the same in every figure.
COLOURS = {
    "single": "#000000",
    "data-parallel": "#56B4E9",
    "vanilla": "#E69F00",
    "weight-stashing": "#CC79A7",
    "vertical-sync": "#A6761D",
    "spectrain": "#D55E00",
    "spike-compensation": "#7B3294",
    "2bw": "#5AAE61",
    "gpipe": "#009E73",
    "1f1b": "#0072B2",
}
STYLES = {"single": "--", "data-parallel": "--", "gpipe": ":", "1f1b": "-."}


def save(figure: Figure, path: Path) -> Path:
    """Write the figure as PNG, and as SVG beside it."""
    figure.savefig(path, dpi=150)
    figure.savefig(path.with_suffix(".svg"))
    return path
