"""What the paper's platform would give: throughput and where time goes, simulated, beside what the paper says.

After Figures 9 and 10 of the paper (arXiv 1809.02839): its six networks, minibatches of 128, two and four Tesla P40 on
PCIe 3.0 x16. No such machine is needed and nothing is measured: what a network has to compute is counted from its
shapes, a roofline makes seconds of it (see pipetrain/plan/roofline.py), and the simulator of pipetrain trains with
these. The cluster file is experiments/platforms/tesla_p40.json.

The ways to train:
  model-parallel              the pipeline's stages, one minibatch at a time
  data-parallel (server)      gradients go to the first device, which updates the weights and sends them back
  data-parallel (ring)        gradients are summed in a ring after the backward, every device updates all weights
  data-parallel (overlapped)  the same, summed while the backward still goes on, as far as that lasts
  pipeline                    vanilla and weight stashing, which take the same time
  pipeline (hybrid)           the same, of stages that may have several devices each: which, the planner decides
  spectrain                   as pipeline, and the time to predict weights
  spectrain (hybrid)          as pipeline (hybrid), and the time to predict weights

Throughput is normalised to one device. A device's time per minibatch is computing, waiting for transfers, waiting for
other stages (imbalance), and filling and draining the pipeline; a replica's rows are fewer, and computed less
efficiently, which the roofline counts. Takes about 30 s on one core.

examples:
  python experiments/speedup.py
  python experiments/speedup.py --model snn --devices 4 --tile 32
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, geometric_mean

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import models  # noqa: E402
from experiments.options import writable  # noqa: E402
from experiments.progress import tracked, write_rows  # noqa: E402
from experiments.published import agrees  # noqa: E402
from experiments.traffic import CLASSES, INPUTS  # noqa: E402
from pipetrain.cli.arguments import Folded, count  # noqa: E402
from pipetrain.cli.environment import start_tensorflow  # noqa: E402
from pipetrain.logs import text_table  # noqa: E402
from pipetrain.plan.cluster import Cluster  # noqa: E402
from pipetrain.plan.memory import Training  # noqa: E402
from pipetrain.plan.partition import partition, plan  # noqa: E402
from pipetrain.plan.profile import Profile  # noqa: E402
from pipetrain.plan.roofline import TESLA_P40, Device  # noqa: E402
from pipetrain.plan.stages import Partition  # noqa: E402
from pipetrain.simulation.simulator import simulate  # noqa: E402
from pipetrain.trace.idle import idle  # noqa: E402
from pipetrain.trace.trace import Trace  # noqa: E402

PLATFORM = ROOT / "experiments" / "platforms" / "tesla_p40.json"
DATA_PARALLEL = tuple(f"data-parallel ({how})" for how in ("server", "ring", "overlapped"))
WAYS = (
    *("single", "model-parallel", *DATA_PARALLEL),
    *("pipeline", "pipeline (hybrid)", "spectrain", "spectrain (hybrid)"),
)
FULLY_CONNECTED = ("snn", "transformer", "residual_lstm")  # the paper's FCN and RNN networks


@dataclass(frozen=True)
class Outcome:
    """One network trained one way: seconds per minibatch, and those of an average device by what they go to.

    ``memory_bytes`` is what the fullest device keeps, ``replicas`` the devices of each stage.
    """

    model: str
    devices: int
    way: str
    step_s: float
    compute_s: float
    transfer_s: float
    imbalance_s: float
    fill_s: float
    memory_bytes: int
    replicas: tuple[int, ...] = (1,)
    against_single: float = 1.0

    @property
    def total_s(self) -> float:
        """All of a device's seconds per minibatch, those of filling and draining included."""
        return self.compute_s + self.transfer_s + self.imbalance_s + self.fill_s


@dataclass(frozen=True)
class Statement:
    """A number of the paper, and ours with each way to sum gradients."""

    says: str
    paper: float
    ours: dict[str, float]

    def agrees(self, way: str) -> bool:
        """Whether ours is within 25% of the paper's number as it stands."""
        return agrees(self.ours[way], self.paper)


Mean = Callable[[list[float]], float]
Profiled = Callable[[int], Profile]  # of so many rows


def profiles(model: str, device: Device) -> Profiled:
    """The network's profile by rows."""
    from pipetrain.compute.profiling.operation_count import analytic

    network = models.build(model, INPUTS[model], CLASSES.get(model, 10))
    return lambda rows: analytic(network, rows, device)


def outcomes(
    model: str, profiled: Profiled, devices: int, batch_size: int, cluster: Cluster, minibatches: int
) -> list[Outcome]:
    """Every way to train one network on so many devices; ``single`` is the first."""
    whole = profiled(batch_size)
    links = Cluster(cluster.levels)  # memory is reported, and limits nothing: the paper's networks did run
    rows = math.ceil(batch_size / devices)
    copies = plan(profiled(rows).scaled(batch_size), [len(whole.blocks)], links, [devices], Training("single"))
    one = plan(whole, [len(whole.blocks)], links, training=Training("single"))
    stages = partition(whole, devices, links, training=Training("vanilla"))
    hybrid = partition(whole, devices, links, replicate=True, training=Training("vanilla"))
    found = {
        "single": (one, simulate(one, "single", links, minibatches)),
        "model-parallel": (stages, simulate(stages, "gpipe", links, minibatches, microbatches=1)),
        **{
            f"data-parallel ({how})": (copies, simulate(copies, "data-parallel", links, minibatches, reduction=how))
            for how in ("server", "ring")
        },
        "pipeline": (stages, simulate(stages, "vanilla", links, minibatches)),
        "pipeline (hybrid)": (hybrid, simulate(hybrid, "vanilla", links, minibatches)),
        "spectrain": (stages, simulate(stages, "spectrain", links, minibatches)),
        "spectrain (hybrid)": (hybrid, simulate(hybrid, "spectrain", links, minibatches)),
    }
    results = {way: outcome(model, devices, way, *each, minibatches) for way, each in found.items()}
    results["data-parallel (overlapped)"] = overlapped(
        results["data-parallel (ring)"], copies.stages[0].backward_s / devices
    )
    single_s = results["single"].step_s
    return [replace(results[way], against_single=single_s / results[way].step_s) for way in WAYS]


def outcome(model: str, devices: int, way: str, cut: Partition, trace: Trace, minibatches: int) -> Outcome:
    """What a trace says; ``devices`` are those that there are, all of which ``single`` counts as one."""
    waits = list(idle(trace).values())
    transfer_s, imbalance_s, fill_s = (fmean(each) / minibatches for each in zip(*waits, strict=True))
    compute_s = trace.duration_s / minibatches - transfer_s - imbalance_s - fill_s
    seconds = trace.step_s, compute_s, transfer_s, imbalance_s, fill_s
    return Outcome(model, devices, way, *seconds, cut.fullest_bytes, tuple(each.replicas for each in cut.stages))


def overlapped(ring: Outcome, backward_s: float) -> Outcome:
    """The ring with as much of its transfers as the backward lasts going on beside it: the most that can be hidden."""
    hidden_s = min(backward_s, ring.transfer_s)
    return replace(
        ring,
        way="data-parallel (overlapped)",
        step_s=ring.step_s - hidden_s,
        transfer_s=ring.transfer_s - hidden_s,
    )


def statements(results: Sequence[Outcome]) -> list[Statement]:
    """The paper's, about its largest number of devices, for the networks that there are.

    Averages of ratios are geometric means: no arithmetic mean over six networks can be +98.5% with +310.3% for three of
    them, and theirs is a geometric one if the other three are at 0.96. "Computing +63.1%" may be read in two ways.
    """
    devices = max(each.devices for each in results)
    by = {(each.model, each.way): each for each in results if each.devices == devices}
    names = list(dict.fromkeys(model for model, _ in by))
    connected = [name for name in names if name in FULLY_CONNECTED]

    def of_each(some: Sequence[str], number: Callable[[Outcome, Outcome], float], mean: Mean) -> dict[str, float]:
        return {way: mean([number(by[name, way], by[name, "spectrain"]) for name in some]) for way in DATA_PARALLEL}

    found = [
        Statement("pipelining over data parallelism, average gain", 0.985, of_each(names, _gain, _average_gain)),
        Statement("pipelining over data parallelism, largest gain", 8.91, of_each(names, _gain, max)),
    ]
    if connected:
        found += [
            Statement(
                "FCN/RNN: data parallelism, of one device",
                0.385,
                of_each(connected, lambda data, _: data.against_single, geometric_mean),
            ),
            Statement(
                "FCN/RNN: pipelining over data parallelism, gain", 3.103, of_each(connected, _gain, _average_gain)
            ),
            Statement(
                "FCN/RNN: pipelining, of one device (the last two)",
                0.385 * 4.103,
                of_each(connected, lambda _, pipeline: pipeline.against_single, geometric_mean),
            ),
        ]
    return [
        *found,
        Statement(
            "transfers, part of data parallelism's time",
            0.267,
            of_each(names, lambda data, _: data.transfer_s / data.total_s, fmean),
        ),
        Statement(
            "transfers, part of pipelining's time",
            0.0452,
            of_each(names, lambda _, pipeline: pipeline.transfer_s / pipeline.total_s, fmean),
        ),
        Statement(
            "computing, data parallelism's seconds over pipelining's",
            0.631,
            of_each(names, lambda data, pipeline: data.compute_s / pipeline.compute_s - 1, _average_gain),
        ),
        Statement(
            "or computing, pipelining's part of time over data parallelism's",
            0.631,
            {
                way: fmean(by[name, "spectrain"].compute_s / by[name, "spectrain"].total_s for name in names)
                / fmean(by[name, way].compute_s / by[name, way].total_s for name in names)
                - 1
                for way in DATA_PARALLEL
            },
        ),
    ]


def _gain(data: Outcome, pipeline: Outcome) -> float:
    return pipeline.against_single / data.against_single - 1


def _average_gain(gains: Sequence[float]) -> float:
    return geometric_mean([1 + gain for gain in gains]) - 1


def report(results: Sequence[Outcome], memory_bytes: int | None) -> str:
    """Figures 9 and 10 as tables, and the statements."""
    parts = []
    for devices in dict.fromkeys(each.devices for each in results):
        some = [each for each in results if each.devices == devices]
        parts.append(f"Throughput on {devices} devices, normalised to one\n\n{_throughput(some)}")
        parts.append(f"Devices of each stage, where stages may have several: {_replicas(some)}.")
        parts.append(f"Time of {devices} devices: computing / transfers / imbalance / fill\n\n{_times(some)}")
        full = [f"{each.model} {each.way}" for each in some if memory_bytes and each.memory_bytes > memory_bytes]
        if full:
            parts.append(f"More than a device's memory: {', '.join(full)}.")
    parts.append(f"Beside the paper (on {max(each.devices for each in results)} devices)\n\n{compared(results)}")
    return "\n\n".join(parts)


def compared(results: Sequence[Outcome]) -> str:
    """The table of statements: the paper's number, ours, and whether they agree within 25%."""
    rows = [
        (
            each.says,
            _percent(each.paper),
            *(f"{_percent(each.ours[way])} {_yes(each.agrees(way))}" for way in each.ours),
        )
        for each in statements(results)
    ]
    return text_table(("statement", "paper", *(way.removeprefix("data-parallel ") for way in DATA_PARALLEL)), rows)


def _throughput(some: Sequence[Outcome]) -> str:
    by = {(each.model, each.way): each for each in some}
    names = list(dict.fromkeys(each.model for each in some))
    rows = [
        (name, f"{by[name, 'single'].step_s * 1e3:.1f}", *(f"{by[name, way].against_single:.2f}" for way in WAYS[1:]))
        for name in names
    ]
    return text_table(("network", "single ms", *WAYS[1:]), rows)


def _replicas(some: Sequence[Outcome]) -> str:
    return ", ".join(f"{each.model} {each.replicas}" for each in some if each.way == "pipeline (hybrid)")


def _times(some: Sequence[Outcome]) -> str:
    by = {(each.model, each.way): each for each in some}
    names = list(dict.fromkeys(each.model for each in some))
    return text_table(("network", *WAYS[1:]), [(name, *(_parts(by[name, way]) for way in WAYS[1:])) for name in names])


def _parts(one: Outcome) -> str:
    seconds = (one.compute_s, one.transfer_s, one.imbalance_s, one.fill_s)
    return "/".join(f"{100 * each / one.total_s:.0f}" for each in seconds)


def _percent(value: float) -> str:
    return f"{value:.1%}" if abs(value) < 10 else f"{value:.0%}"


def _yes(agrees: bool) -> str:
    return "yes" if agrees else "no"


def write(output: Path, options: argparse.Namespace, device: Device, results: Sequence[Outcome]) -> Path:
    """Everything as JSON, for the figures."""
    said = [
        {"says": each.says, "paper": each.paper, "ours": each.ours, "agrees": {w: each.agrees(w) for w in each.ours}}
        for each in statements(results)
    ]
    data = {
        "batch_size": options.batch_size,
        "minibatches": options.minibatches,
        "device": device._asdict(),
        "cluster": str(options.cluster.name),
        "outcomes": [asdict(each) for each in results],
        "statements": said,
    }
    path = output / "speedup.json"
    path.write_text(json.dumps(data, indent=1), encoding="utf-8")
    return path


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Folded)
    parser.add_argument("--model", action="append", choices=INPUTS, help="(default: all six)")
    parser.add_argument("--devices", action="append", type=count, metavar="N", help="(default: 2 and 4)")
    parser.add_argument("--batch-size", type=count, default=128, metavar="N", help="rows a minibatch (default: 128)")
    parser.add_argument(
        "--minibatches", type=count, default=200, metavar="N", help="to simulate before the pipeline drains (200)"
    )
    parser.add_argument(
        "--tile", type=count, default=TESLA_P40.tile, metavar="N",
        help="side of the tiles of matrix products: the smaller, the less small minibatches cost (default: 64)",
    )  # fmt: skip
    parser.add_argument("--cluster", type=Path, default=PLATFORM, metavar="FILE", help="(default: tesla_p40.json)")
    parser.add_argument("--output", type=Path, metavar="DIR", help="where results go (default: runs/speedup)")
    return parser.parse_args(arguments)


def simulated(options: argparse.Namespace, cluster: Cluster, device: Device, output: Path) -> list[Outcome]:
    """All that is asked for, whose rows are kept network by network, as CSV.

    Raises ValueError for more devices than a network has blocks.
    """
    start_tensorflow(1)
    results: list[Outcome] = []
    names = options.model or [*INPUTS]
    for name in tracked(names, names):
        profiled = profiles(name, device)
        for devices in options.devices or (2, 4):
            results += outcomes(name, profiled, devices, options.batch_size, cluster, options.minibatches)
        rows = [{**asdict(each), "replicas": "-".join(map(str, each.replicas))} for each in results]
        write_rows(output / "speedup.csv", rows)
    return results


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status: 2 for arguments that cannot be used."""
    options = parse(arguments)
    try:
        cluster = Cluster.load(options.cluster)
        output = writable(options.output or ROOT / "runs" / "speedup")
        device = TESLA_P40._replace(tile=options.tile)
        results = simulated(options, cluster, device, output)
    except (OSError, ValueError) as error:
        print(f"speedup.py: {error}", file=sys.stderr)
        return 2
    path = write(output, options, device, results)
    print(report(sorted(results, key=lambda each: each.devices), cluster.memory_bytes))
    from plots.speedup import draw

    print()
    for picture in draw(path, output):
        print(picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
