"""Most figures of the sources, one command after another; with --quick each of them small, as a test that all work.

Each command is a process of its own, which writes to a folder of its own, and what it prints is kept there as
output.txt. One that has ended well is not run again: stop this program when you like and give it again. The table of
what the figures came to is docs/results/index.md.

With --quick it takes about two minutes on two idle cores, and what comes out says nothing. Without it, most of a day:
table1.py alone, with the networks and the data of docs/results/table1.md, takes three hours.

examples:
  python experiments/all.py --quick
  python experiments/all.py --only traffic --only speedup
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from experiments.options import writable  # noqa: E402
from experiments.progress import tracked, write_rows  # noqa: E402
from pipetrain.cli.arguments import Folded, listed  # noqa: E402
from pipetrain.logs import text_table  # noqa: E402

OUTPUT = "{output}"  # in arguments: the command's folder
FOLDER = "{folder}"  # and that which all have theirs in


class Command(NamedTuple):
    """A program of this folder: what it makes, the arguments to make it small and whole, and how long whole takes."""

    name: str
    makes: str
    quick: str
    whole: str
    takes: str

    def arguments(self, folder: Path, quick: bool) -> list[str]:
        """Those of the program, with the folder that it writes to."""
        given = self.quick if quick else self.whole
        places = {OUTPUT: str(folder / self.name), FOLDER: str(folder)}
        return [_placed(part, places) for part in given.split()]


def _placed(part: str, places: dict[str, str]) -> str:
    for name, path in places.items():
        part = part.replace(name, path)
    return part


SMALL = "--width 8 --depth 3 --stages 2 --steps 6 --learning-rate 0.01"
COMMANDS = (
    Command("traffic", "SpecTrain's Figures 3 and 4", "--model vgg16 --output {output}", "--output {output}", "20 s"),
    Command(
        "rmse", "SpecTrain's Figure 8", f"--horizons 1 2 {SMALL} --output {{output}}", "--width 256 --output {output}",
        "30 s",
    ),
    Command(
        "speedup", "SpecTrain's Figures 9 and 10", "--model vgg16 --devices 4 --minibatches 20 --output {output}",
        "--output {output}", "30 s",
    ),
    Command(
        "table1", "SpecTrain's Table 1, of the SNN",
        f"--model snn --seeds 1 --eval-every 3 --scheme single --scheme spectrain {SMALL} --output {{output}}",
        "--model snn --width 256 --seeds 5 --scheme single --scheme vanilla --scheme weight-stashing "
        "--scheme spectrain --output {output}", "1 h",
    ),
    Command("over_time", "accuracy over seconds, of Table 1's runs", "{folder}/table1", "{folder}/table1", "1 min"),
    Command(
        "staleness", "what staleness costs",
        "--policy single --policy spectrain --stages 2 --seeds 1 --steps 4 --learning-rate 0.01 --output {output}",
        "--output {output}", "15 min",
    ),
    Command(
        "slow_networks", "accuracy over seconds, by bandwidth",
        "--policy all-reduce/int8 --workers 2 --seeds 1 --steps 4 --every 2 --width 8 --output {output}",
        "--output {output}", "6 min",
    ),
    Command("stability", "the largest stable steps", "--stages 2 --output {output}", "--output {output}", "2 s"),
    Command(
        "grid_scaling", "Figures 5 to 7 of integrated parallelism",
        "--width 64 --processes 1 --processes 4 --output {output}", "--output {output}", "20 s",
    ),
    Command(
        "balance_scaling", "four networks by balance equations", "--nodes 4 --output {output}", "--output {output}",
        "2 s",
    ),
    Command(
        "ordered_transfers", "TicTac, iBatch and CARAMEL", "--network googlenet --nodes 2 --output {output}",
        "--output {output}", "4 min",
    ),
    Command(
        "coded_reduce", "CodedReduce on 84 and on 156 workers", "--tree 4,1 --row-us 10 --steps 4 --output {output}",
        "--output {output}", "1 min",
    ),
    Command(
        "which_way", "which way to train wins where", "--model vgg16 --devices 4 --output {output}",
        "--output {output}", "10 min",
    ),
)  # fmt: skip


class Ended(NamedTuple):
    """How a command ended: its exit status and the seconds that it took."""

    name: str
    status: int
    seconds: float
    command: str


def run(command: Command, folder: Path, quick: bool) -> Ended:
    """Run one command, unless it has ended well before; what it prints goes to its folder."""
    output = writable(folder / command.name)
    line = [str(ROOT / "experiments" / f"{command.name}.py"), *command.arguments(folder, quick)]
    before = _ended(output / "ended.json")
    if before is not None and before.status == 0 and before.command == " ".join(line):
        return before
    begun_s = time.monotonic()
    with (output / "output.txt").open("w", encoding="utf-8") as printed:
        done = subprocess.run([sys.executable, *line], stdout=printed, stderr=subprocess.STDOUT, check=False)
    found = Ended(command.name, done.returncode, round(time.monotonic() - begun_s, 1), " ".join(line))
    (output / "ended.json").write_text(json.dumps(found._asdict(), indent=1), encoding="utf-8")
    return found


def _ended(path: Path) -> Ended | None:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return Ended(**found)
    except (OSError, TypeError, ValueError):
        return None


def report(found: Sequence[Ended], folder: Path) -> str:
    """What each command came to, and where what failed says why."""
    rows = [
        (each.name, "done" if not each.status else f"failed ({each.status})", f"{each.seconds:.0f}") for each in found
    ]
    failed = [f"{each.name} failed: {folder / each.name / 'output.txt'}" for each in found if each.status]
    return "\n".join([text_table(("command", "", "seconds"), rows), *failed])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status: 1 if a command failed, 2 for arguments that cannot be used."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Folded)
    names = [each.name for each in COMMANDS]
    parser.add_argument("--quick", action="store_true", help="every command small")
    parser.add_argument("--only", action="append", choices=names, help="may be given several times (default: all)")
    parser.add_argument("--output", type=Path, metavar="DIR", help="where results go (default: runs/figures)")
    about = listed({each.name: (each.makes, f"{each.takes}: {each.name}.py {each.whole}") for each in COMMANDS})
    parser.epilog = f"commands, with how long they take on two cores:\n{about}"
    options = parser.parse_args(arguments)
    chosen = [each for each in COMMANDS if each.name in (options.only or names)]
    found: list[Ended] = []
    try:
        folder = writable(options.output or ROOT / "runs" / ("figures-quick" if options.quick else "figures"))
        for command in tracked(chosen, [each.name for each in chosen]):
            found.append(run(command, folder, options.quick))
            write_rows(folder / "ended.csv", [each._asdict() for each in found])
    except ValueError as error:
        print(f"all.py: {error}", file=sys.stderr)
        return 2
    print(report(found, folder))
    return 1 if any(each.status for each in found) else 0


if __name__ == "__main__":
    sys.exit(main())
