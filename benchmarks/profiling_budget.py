"""What a cut loses when only the largest kinds of a network's blocks are measured, for all of keras.applications.

Every kind of block of each network is timed, all kinds one after another, six to twenty times: the full profile. A
budgeted one has the times of those kinds alone that have the most operations, and estimates the others by a roofline
fitted to these. The loss of its cut is ``slowest stage, by the full profile's times / slowest stage of the best cut
- 1``. "20 s" is the default budget: as many kinds as are traced within its part for tracing, by the processor time of
each. "Full" is the loss of the full profile's own cut: cuts are by every second pass, and judged by the others, so that
it is what measuring cannot tell. "20 s against full" is what the budget costs: how much longer the slowest stage of its
cut takes than that of the full profile's. Results are appended to a file of JSON lines; networks that are in it are
left out. It is processor time that is taken, on one device, so that other programs disturb little. Takes about half an
hour on one idle core.

examples:
  python benchmarks/profiling_budget.py --output applications.jsonl
  python benchmarks/profiling_budget.py --output applications.jsonl --report
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from pipetrain.logs import text_table
from pipetrain.plan.partition import partition, plan
from pipetrain.plan.profile import BlockProfile, Profile
from pipetrain.plan.roofline import FittedRoofline, Measured, Product, Work, block_profile

ROWS, DEVICE, STAGES, PASSES, LEAST_PASSES, PASSES_S = 16, "/device:CPU:0", 4, 20, 6, 10.0
SIZES = (32, 64, 75, None)  # of images; the least that a network takes, or its own
SHARES = (0.1, 0.25, 0.5, 0.75)  # of the kinds


def measure(name: str, known: dict[str, Any]) -> dict[str, Any]:
    """The times of every kind of a network's blocks; what is ``known`` from another network is not run again."""
    from pipetrain.compute.cores import pinned
    from pipetrain.compute.graph.blocks import Chain
    from pipetrain.compute.graph.inputs import checked_shapes
    from pipetrain.compute.profiling import block_passes
    from pipetrain.compute.profiling.block_functions import BlockFunctions
    from pipetrain.compute.profiling.block_passes import Placed
    from pipetrain.compute.profiling.kinds import Kinds, cost_key

    model, size = _network(name)
    chain = Chain(model)
    kinds = Kinds(chain, ROWS, checked_shapes(model, None))
    keys = [
        f"{cost_key(chain.blocks[kind.blocks[0]])} {kind.segment.differentiable} {kind.segment.returns} {kind.inputs}"
        for kind in kinds.all
    ]
    new, traced_s, placed = [], [], []
    for key, kind in zip(keys, kinds.all, strict=True):
        if key not in known:
            start_s = time.process_time()
            functions = kind.traced.functions if kind.traced else BlockFunctions(kind.segment, kind.inputs)
            new.append(key)
            traced_s.append(time.process_time() - start_s)
            placed.append(Placed(kind.segment, functions, kind.inputs, kind.outputs))
    if placed:
        with pinned(DEVICE), mock.patch.object(block_passes, "time", SimpleNamespace(perf_counter=time.process_time)):
            once = block_passes.local_pass(placed, DEVICE)
            once()
            taken, start_s = [], time.process_time()
            while len(taken) < PASSES and (len(taken) < LEAST_PASSES or time.process_time() - start_s < PASSES_S):
                taken.append(once())
        for n, key in enumerate(new):
            forward_s, backward_s = [each.forward[n] for each in taken], [each.backward[n] for each in taken]
            known[key] = {"trace_s": traced_s[n], "forward_s": forward_s, "backward_s": backward_s}
    number = {id(kind): n for n, kind in enumerate(kinds.all)}
    return {
        "model": name,
        "size": size,
        "of": [number[id(kind)] for kind in kinds.of],
        "labels": [kind.label for kind in kinds.all],
        "works": [kind.work._asdict() for kind in kinds.all],
        "kinds": [known[key] for key in keys],
        "output_bytes": [
            sum(4 * int(np.prod(kinds.like[value].shape)) for value in chain.crossing(n + 1))
            for n in range(len(chain.blocks))
        ],
    }


def _network(name: str) -> tuple[Any, int | None]:
    """The network for the smallest images that it takes, and their size."""
    import keras

    for size in SIZES:
        shape = {} if size is None else {"input_shape": (size, size, 3)}
        try:
            return getattr(keras.applications, name)(weights=None, **shape), size
        except ValueError:
            continue
    raise ValueError(f"A network takes images of some size. Received: {name!r}. Try another.")


def _works(found: dict[str, Any]) -> list[Work]:
    return [Work(**{**work, "products": tuple(Product(*each) for each in work["products"])}) for work in found["works"]]


def _profile(found: dict[str, Any], seconds: Sequence[tuple[float, float]]) -> Profile:
    """With these seconds of every kind."""
    blocks = (
        BlockProfile(f"{n}", *seconds[kind], output_bytes, 0)
        for n, (kind, output_bytes) in enumerate(zip(found["of"], found["output_bytes"], strict=True))
    )
    return Profile(found["model"], ROWS, tuple(blocks))


def medians(found: dict[str, Any], first: int = 0, step: int = 1) -> list[tuple[float, float]]:
    """The seconds of every kind forward and backward, of every so many passes."""
    return [
        (statistics.median(kind["forward_s"][first::step]), statistics.median(kind["backward_s"][first::step]))
        for kind in found["kinds"]
    ]


def largest_first(found: dict[str, Any]) -> list[int]:
    """The kinds in the order in which a budgeted profile measures them: by their counted operations."""
    from pipetrain.compute.profiling.operation_count import ONE_CORE

    estimated = [
        found["of"].count(n) * block_profile(work, ONE_CORE).seconds.total_s for n, work in enumerate(_works(found))
    ]
    return sorted(range(len(estimated)), key=lambda n: -estimated[n])


def reached(found: dict[str, Any]) -> int:
    """How many kinds the default budget has the time to trace, on a processor of its own."""
    from pipetrain.compute.profiling.limits import BUDGET_S
    from pipetrain.compute.profiling.profiler import TRACING

    before_s = np.cumsum([0.0, *(found["kinds"][n]["trace_s"] for n in largest_first(found))])[:-1]
    return int((before_s <= TRACING * BUDGET_S).sum())


def budgeted(found: dict[str, Any], count: int) -> list[tuple[float, float]]:
    """The seconds of every kind where only so many of them were measured, those with the most operations."""
    works, labels, seconds = _works(found), found["labels"], medians(found, 0, 2)
    chosen = largest_first(found)[:count]
    fitted = FittedRoofline([Measured(labels[n], works[n], *seconds[n]) for n in chosen])
    return [seconds[n] if n in chosen else fitted.seconds(labels[n], work) for n, work in enumerate(works)]


def loss(found: dict[str, Any], seconds: Sequence[tuple[float, float]]) -> float:
    """What the cut by these seconds loses, by the times of the passes that they are not from."""
    whole, given = _profile(found, medians(found, 1, 2)), _profile(found, seconds)
    cuts = [int(name) + 1 for name in partition(given, STAGES).cuts]
    return plan(whole, [*cuts, len(whole.blocks)]).slowest_s / partition(whole, STAGES).slowest_s - 1


def report(path: Path) -> str:
    """The table, a network a row, and the largest loss and the median of each column."""
    rows, losses = [], []
    for line in path.read_text().splitlines():
        found = json.loads(line)
        kinds, within = len(found["kinds"]), reached(found)
        shared = [loss(found, budgeted(found, max(1, round(share * kinds)))) for share in SHARES]
        in_20_s, full = loss(found, budgeted(found, within)), loss(found, medians(found, 0, 2))
        each = [*shared, in_20_s, full, (1 + in_20_s) / (1 + full) - 1]
        losses.append(each)
        counts = str(len(found["of"])), str(kinds), str(within)
        rows.append((found["model"], str(found["size"] or "own"), *counts, *(f"{value:.1%}" for value in each)))
    for name, of in (("median", np.median), ("largest", np.max)):
        rows.append((name, "", "", "", "", *(f"{value:.1%}" for value in of(losses, axis=0))))
    shares = [f"{share:.0%}" for share in SHARES]
    header = ("network", "images", "blocks", "kinds", "in 20 s", *shares, "20 s", "full", "20 s against full")
    return text_table(header, rows)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("applications.jsonl"), help="(default: %(default)s)")
    parser.add_argument("--report", action="store_true", help="only print what the file has")
    parser.add_argument("networks", nargs="*", help="(default: all)")
    options = parser.parse_args()
    if not options.report:
        import pipetrain

        pipetrain.set_cpu_devices(1)
        import keras

        done = {json.loads(line)["model"] for line in options.output.open()} if options.output.exists() else set()
        names = options.networks or sorted(name for name in dir(keras.applications) if name[0].isupper())
        known: dict[str, Any] = {}
        for name in [name for name in names if name not in done]:
            found = measure(name, known)
            with options.output.open("a") as file:
                file.write(f"{json.dumps(found)}\n")
            print(name, file=sys.stderr, flush=True)
            keras.backend.clear_session()
            gc.collect()
    print(report(options.output))


if __name__ == "__main__":
    main()
