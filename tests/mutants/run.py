"""Make each fault of ``faults.py`` in a copy of the repository, and see which test notices it.

What git tracks is copied to a temporary folder as it is in the working tree. There every fault is made, the tests run
until one fails, and the fault is undone. A test that fails without any fault notices nothing, so the tests are to pass
as they are; a fault that lets one wait for ever is noticed when that test's time is over.

Examples:

    python tests/mutants/run.py --output faults.jsonl
    python tests/mutants/run.py --only busy-link slow-updates --tests "tests/test_simulator.py -k link"

The first takes hours: each fault may need all tests of the default tier. If it is stopped, it goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import cache_from_source
from pathlib import Path
from typing import NamedTuple

from faults import FAULTS, Fault

ROOT = Path(__file__).resolve().parents[2]
PYTEST = ("-x", "-q", "-p", "no:cacheprovider", "-n", "0")
NO_TESTS = (3, 4, 5)  # pytest's exit codes for an error of its own, for wrong arguments, and where no test was chosen
FAILED = re.compile(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", re.MULTILINE)
WHY = re.compile(r"^E +(.*)$", re.MULTILINE)


class Result(NamedTuple):
    """Whether a test noticed a fault, and which one; the seconds until then, or of all tests.

    ``why`` is what was wrong there, or pytest's exit code where it does not say.
    """

    name: str
    caught: bool
    test: str
    why: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.name}: {self.test if self.caught else 'not caught'} ({self.seconds:.0f} s)"


def copied(folder: Path) -> None:
    """Copy what git tracks to the folder, as it is in the working tree."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():  # it may be removed, and git not know that yet
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


@contextmanager
def made(fault: Fault, root: Path) -> Iterator[None]:
    """Meanwhile the fault is in the source there. Raises ValueError if its place is not found exactly once."""
    path = root / fault.file
    text = path.read_text(encoding="utf-8")
    if (count := text.count(fault.before)) != 1:
        raise ValueError(f"{fault.name}: {fault.before!r} stands {count} times in {fault.file}, not once.")
    try:
        _written(path, text.replace(fault.before, fault.after))
        yield
    finally:
        _written(path, text)


def _written(path: Path, text: str) -> None:
    """Write a module of which Python is to use nothing that it has compiled before."""
    path.write_text(text, encoding="utf-8")
    Path(cache_from_source(str(path))).unlink(missing_ok=True)


def tested(fault: Fault, root: Path, arguments: Sequence[str]) -> Result:
    """Run the tests with the fault. Raises RuntimeError if none were run."""
    start_s = time.monotonic()
    with made(fault, root):
        command = [sys.executable, "-m", "pytest", *PYTEST, *arguments]
        environment = {**os.environ, "PYTHONPATH": str(root)}
        ran = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    if ran.returncode in NO_TESTS:
        raise RuntimeError(f"No tests were run.\n{ran.stdout[-2000:]}{ran.stderr[-2000:]}")
    failed, why = FAILED.search(ran.stdout), WHY.search(ran.stdout)
    return Result(
        fault.name,
        ran.returncode != 0,
        failed[1] if failed else "",
        why[1] if why else f"exit code {ran.returncode}",
        round(time.monotonic() - start_s, 1),
    )


def chosen(names: Sequence[str] | None, output: Path | None) -> list[Fault]:
    """The faults of these names, or all, without those of which the output has a result."""
    done: set[str] = set()
    if output is not None and output.exists():
        done = {json.loads(line)["name"] for line in output.read_text(encoding="utf-8").splitlines()}
    return [fault for fault in FAULTS if (not names or fault.name in names) and fault.name not in done]


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    about, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=about, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="NAME",
        choices=[fault.name for fault in FAULTS],
        help="the faults to make (default: all)",
    )
    parser.add_argument(
        "--tests", default="", metavar="ARGUMENTS", help="pytest's arguments (default: the tests that run by default)"
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="where to add results, a line of JSON each; what it has is left out"
    )
    return parser.parse_args(arguments)


def main() -> int:
    """Every fault that is asked for; 1 if some were not caught."""
    given = parsed()
    everything_caught = True
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        root = Path(name)
        copied(root)
        for fault in chosen(given.only, given.output):
            result = tested(fault, root, shlex.split(given.tests))
            print(result, flush=True)
            everything_caught &= result.caught
            if given.output is not None:
                with given.output.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(result._asdict()) + "\n")
    return 0 if everything_caught else 1


if __name__ == "__main__":
    sys.exit(main())
