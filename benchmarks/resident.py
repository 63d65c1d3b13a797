"""Peak resident bytes of a process that trains, against what the plan says the stages need, and against plain Keras.

The plan's bytes are those of weights, momentum, gradients, old versions and activations in flight, summed over two
stages. Resident are the most pages that the process ever held (VmHWM of /proc), less those it held before there was a
model: with TensorFlow's traces, its allocator's unused pages and the layers' working memory, which the plan leaves out.
A network's plain Keras trains likewise, on both cores. Each figure is a process of its own.

examples:
  python benchmarks/resident.py
  python benchmarks/resident.py --network dense --scheme weight-stashing --scheme spectrain
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.networks import COMPARED, build, data
from benchmarks.sides import compiled
from pipetrain.cli.environment import start_tensorflow
from pipetrain.logs import text_table
from pipetrain.schemes.table import SCHEMES

KERAS, STEPS, MIB = "Keras", 12, 2**20
PIPELINES = tuple(name for name in SCHEMES if name != "single")


class Bytes(NamedTuple):
    """What the plan says (0 for plain Keras), and what was resident."""

    planned: int
    resident: int


def measure(name: str, scheme: str) -> Bytes:
    """Train in this process."""
    pipeline = scheme != KERAS
    start_tensorflow(2 if pipeline else 1)
    import pipetrain

    network = COMPARED[name]
    x, y = data(network, STEPS * network.batch_size)
    pages = resident("VmRSS")
    model = build(network)
    planned = 0
    if pipeline:
        model = pipetrain.PipelineModel(model, 2, scheme)
    compiled(model, **({} if pipeline else {"jit_compile": False}))
    if pipeline:
        planned = sum(stage.memory_bytes for stage in model.partition(network.batch_size).stages)
        Path("/proc/self/clear_refs").write_text("5")  # profiling is over: the peak begins anew
    model.fit(x, y, batch_size=network.batch_size, verbose=0)
    return Bytes(planned, resident("VmHWM") - pages)


def resident(field: str) -> int:
    """Bytes of this process now (VmRSS), or the most ever (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def apart(name: str, scheme: str, rounds: int) -> Bytes:
    """The medians of processes of their own."""
    found = []
    for _ in range(rounds):
        done = subprocess.run([sys.executable, __file__, "--one", name, scheme], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{name}, {scheme}: {done.stderr}")
        found.append(Bytes(*json.loads(done.stdout.splitlines()[-1])))
    return Bytes(*(int(median(each)) for each in zip(*found, strict=True)))


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", action="append", choices=COMPARED, help="several times if wanted (default: all)")
    parser.add_argument(
        "--scheme", action="append", choices=PIPELINES, help="several times if wanted (default: spectrain)"
    )
    parser.add_argument("--rounds", type=int, default=1, help="medians are of these (default: 1)")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one:
        print(json.dumps(measure(*options.one)))
        return
    rows = []
    for name in options.network or COMPARED:
        plain = apart(name, KERAS, options.rounds)
        rows.append((name, KERAS, "", f"{plain.resident / MIB:.0f}", "", ""))
        for scheme in options.scheme or ["spectrain"]:
            found = apart(name, scheme, options.rounds)
            cells = f"{found.planned / MIB:.0f}", f"{found.resident / MIB:.0f}"
            ratios = f"{found.resident / found.planned:.2f}", f"{found.resident / plain.resident:.2f}"
            rows.append((name, scheme, *cells, *ratios))
    print("MiB that training adds to the process at its fullest")
    print(text_table(("", "", "planned", "resident", "of planned", "of Keras"), rows))


if __name__ == "__main__":
    main()
