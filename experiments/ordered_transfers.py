"""What three papers on the order of transfers report, beside what their settings give here.

  tictac   TicTac (SysML 2019, arXiv 1803.03288): ten networks by their layers' graph, training and inference, 2 to 16
           workers and a parameter server for every 4, 10 Gb/s, simulated message by message; 3 minutes
  caramel  CARAMEL (arXiv 2004.14020): an all-reduce of 8 and 16 devices in a ring, 10 Gb/s, one of its parts after
           the other; by formulas, 15 s
  ibatch   iBatch (AAAI 2019): servers in parts on every one of 1 to 72 nodes; its two algorithms beside the exact one;
           and a search for the setting in which it gains what is published; by the source's own model, 45 s

Nothing is measured. What a network computes is counted from its shapes, and a roofline of the device makes seconds of
it. What the papers do not say, such as what a message takes beside its bytes, is tried at several values. Results are
kept as they come, as CSV files, and drawn.

examples:
  python experiments/ordered_transfers.py
  python experiments/ordered_transfers.py --paper tictac --network googlenet --nodes 4
  python experiments/ordered_transfers.py --paper ibatch
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from experiments import caramel, ibatch, tictac  # noqa: E402
from experiments.options import writable  # noqa: E402
from experiments.progress import tracked, write_rows  # noqa: E402
from experiments.transfer_networks import NETWORKS  # noqa: E402
from pipetrain.cli.arguments import Folded, count  # noqa: E402
from pipetrain.cli.environment import start_tensorflow  # noqa: E402

PAPERS: dict[str, Any] = {"tictac": tictac, "caramel": caramel, "ibatch": ibatch}


def run(name: str, networks: Sequence[str], nodes: Sequence[int], output: Path) -> list[Any]:
    """All outcomes of one paper, which are written as they come."""
    paper, found = PAPERS[name], list[Any]()
    cells = paper.cells(networks, nodes)
    for cell in tracked(cells, [f"{name}: {cell}" for cell in cells]):
        found += paper.outcomes(cell, found) if paper is ibatch else paper.outcomes(cell)
        write_rows(output / f"{name}.csv", [each._asdict() for each in found])
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status: 2 for arguments that cannot be used."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Folded)
    parser.add_argument("--paper", choices=PAPERS, action="append", help="several times (default: all)")
    parser.add_argument("--network", choices=NETWORKS, action="append", help="(default: those of the paper)")
    parser.add_argument("--nodes", type=count, action="append", metavar="N", help="(default: those of the paper)")
    parser.add_argument("--output", type=Path, metavar="DIR", help="where results go (default: runs/ordered_transfers)")
    options = parser.parse_args(arguments)
    if 1 in (options.nodes or ()) and options.paper != ["ibatch"]:
        parser.error("only ibatch is computed for one node, too")
    try:
        output = writable(options.output or ROOT / "runs" / "ordered_transfers")
    except ValueError as error:
        print(f"ordered_transfers.py: {error}", file=sys.stderr)
        return 2
    start_tensorflow(1)
    for name in options.paper or PAPERS:
        paper = PAPERS[name]
        found = run(name, options.network or paper.NETWORKS, options.nodes or paper.NODES, output)
        from plots.ordered_transfers import draw

        print(f"{paper.report(found)}\n\n{draw(output / f'{name}.csv', output / f'{name}.png')}\n", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
