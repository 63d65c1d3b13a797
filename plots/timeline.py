"""Draw what every stage, or device of several, did and when: boxes numbered by minibatch, and why it was idle.

Where a plan orders the transfers of data parallelism, a row below each worker's has what came to it, numbered by the
packs of the plan: from when it was sent to when it had arrived, and a mark where it was used, as far as that is known.

examples:
  python plots/timeline.py runs/all/spectrain
  python plots/timeline.py runs/all/spectrain --first 60 --minibatches 6
  python plots/timeline.py trace.json --output timeline.png
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from pipetrain.cli.arguments import Folded, count
from pipetrain.trace import timeline
from pipetrain.trace.trace import Trace
from plots import command
from plots.style import save


def draw(trace: Trace, output: Path, first: int | None = None, minibatches: int = 12, title: str = "") -> Path:
    """The picture of ``Trace.plot`` as PNG and SVG. Raises ValueError where the trace has no such minibatches."""
    return save(timeline.draw(trace, first, minibatches, title), output)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status: 2 where there is nothing to draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Folded)
    parser.add_argument("run", type=Path, help="a run's folder, or a trace file such as simulate writes")
    parser.add_argument(
        "--first",
        type=int,
        metavar="N",
        help="first minibatch, or microbatch of schemes that have them, to show (default: where the pipeline is full)",
    )
    parser.add_argument("--minibatches", type=count, default=12, metavar="N", help="how many (default: 12)")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="(default: timeline.png in the run's folder; FILE.png)"
    )
    options = parser.parse_args(arguments)
    of_run = options.run.is_dir()
    output = options.output or (options.run / "timeline.png" if of_run else options.run.with_suffix(".png"))
    title = options.run.resolve().name if of_run else options.run.stem
    return command.shown(
        parser.prog, lambda: draw(_loaded(options.run), output, options.first, options.minibatches, title)
    )


def _loaded(run: Path) -> Trace:
    """The trace of a run's folder, or of a file. Raises ValueError where there is none."""
    file = run / "trace.json" if run.is_dir() else run
    try:
        return Trace.load(file)
    except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        why = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        raise ValueError(
            f"There is no trace. Received: {str(file)!r} ({why}). Try the folder of one scheme in an "
            "--output of experiments/run.py, or a file that Trace.save or --trace wrote."
        ) from error


if __name__ == "__main__":
    sys.exit(main())
