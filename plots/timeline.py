"""Draw what every stage did and when: forward and backward boxes numbered by minibatch, idle time left white.

example:
  python plots/timeline.py runs/all/spectrain --first 60 --minibatches 12
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from pipetrain.plan.trace import Trace
from plots.style import save

FILL = {"F": "#56B4E9", "B": "#E69F00"}


def draw(trace: Trace, output: Path, first: int = 0, minibatches: int = 12, title: str = "") -> Path:
    """The span of time from the first to the last action of these minibatches, a row per stage and replica."""
    chosen = [span for span in trace.spans if first <= span.minibatch < first + minibatches]
    if not chosen:
        raise ValueError(f"The trace has no such minibatches. Received: first={first}. Try 0.")
    start_s = min(span.start_s for span in chosen)
    end_s = max(span.end_s for span in chosen)
    shown = [span for span in trace.spans if span.start_s < end_s and span.end_s > start_s]
    rows = {place: row for row, place in enumerate(trace.rows)}
    figure = Figure(figsize=(14, 0.9 + 0.62 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for span in shown:
        left_ms, width_ms = (span.start_s - start_s) * 1e3, (span.end_s - span.start_s) * 1e3
        alpha = 1.0 if first <= span.minibatch < first + minibatches else 0.35
        row = rows[span.stage, span.replica]
        axes.barh(row, width_ms, left=left_ms, height=0.86, color=FILL[span.op], edgecolor="white", alpha=alpha)
        if width_ms > 0.009 * (end_s - start_s) * 1e3:
            middle_ms = left_ms + width_ms / 2
            axes.text(middle_ms, row, span.minibatch, ha="center", va="center", fontsize=8, clip_on=True)
    axes.set(xlim=(0, (end_s - start_s) * 1e3), ylim=(len(rows) - 0.5, -0.5), xlabel="milliseconds", title=title)
    axes.set_yticks(range(len(rows)), trace.row_names())
    handles = [Patch(color=FILL["F"], label="forward"), Patch(color=FILL["B"], label="backward and update")]
    figure.legend(handles=handles, loc="outside upper right", ncols=2, frameon=False)
    return save(figure, output)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a run directory with trace.json")
    parser.add_argument("--first", type=int, default=0, help="first minibatch to show (default: 0)")
    parser.add_argument("--minibatches", type=int, default=12, help="how many (default: 12)")
    parser.add_argument("--output", type=Path, help="(default: timeline.png in the run directory)")
    options = parser.parse_args()
    output = options.output or options.run / "timeline.png"
    print(draw(Trace.load(options.run / "trace.json"), output, options.first, options.minibatches, options.run.name))


if __name__ == "__main__":
    main()
