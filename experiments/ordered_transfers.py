"""What the papers on the order of transfers report, beside what their settings give in the simulator.

  iBatch (AAAI 2019)         parameter server in parts on every node, 1 to 72 nodes; 10 Gb/s Ethernet of 8 hosts
  TicTac (SysML 2019)        parameter server, 2 to 16 workers, one server for every 4
  CARAMEL (arXiv 2004.14020) all-reduce, 8 and 16 nodes, 10 Gb/s

What a network computes is counted from its shapes, a roofline of the device makes seconds of it, and plans of transfers
run in the simulator of pipetrain. The papers do not say all that decides on the result: what a message takes beside its
bytes is tried at several values, and each network on each device is a line of its own. Rows are those of one worker,
however many there are. Servers are on the workers' hosts.

examples:
  python experiments/ordered_transfers.py
  python experiments/ordered_transfers.py --paper caramel --output caramel.json
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from pipetrain.cli.arguments import Folded, count  # noqa: E402
from pipetrain.cli.quiet import start_tensorflow  # noqa: E402
from pipetrain.logs import text_table  # noqa: E402
from pipetrain.plan.cluster import Cluster, Level, Link  # noqa: E402
from pipetrain.plan.profile import Profile  # noqa: E402
from pipetrain.plan.roofline import TESLA_P40, Device, roofline  # noqa: E402
from pipetrain.schemes.transfers.orders import ORDERS  # noqa: E402
from pipetrain.schemes.transfers.plan import Phase, Plan, Workload, backward_order  # noqa: E402  # noqa: E402
from pipetrain.simulation.data_parallel import Setting, simulate_plan  # noqa: E402
from pipetrain.simulation.profiled import message_of, workload_of  # noqa: E402

if TYPE_CHECKING:
    import keras

IMAGE, CLASSES = (224, 224, 3), 1000
GBIT = 1e9 / 8
STEPS = 3  # of which the last is like all that would follow
# One of the two processors of a Tesla K80: 2496 cores in 13 multiprocessors at 824 MHz; NVIDIA's board specification.
TESLA_K80 = Device("half a Tesla K80", 4.11e12, 240e9, 13)
# A ninth of two Xeon X5570 (8 cores at 2.93 GHz, 8 operations a cycle, 64 GB/s): HP's data sheet of the BL460c G6.
NINTH_OF_BLADE = Device("a ninth of a BL460c G6", 188e9 / 9, 64e9 / 9, 1)


class Paper(NamedTuple):
    """What a paper compares: its best way with others, on which platforms, and what it reports."""

    title: str
    serves: bool
    ways: tuple[str, ...]  # the last is the paper's own
    reported: str
    nodes: tuple[int, ...]
    servers: Callable[[int], int]
    gbit_per_s: float
    devices: tuple[tuple[Device, int], ...]  # with a worker's rows
    networks: tuple[str, ...]
    message_s: tuple[float, ...]


PAPERS = {
    "ibatch": Paper(
        "iBatch",
        True,
        ("one message", "layerwise", "ibatch"),
        "at 72 nodes up to 1.73x one message for all, 1.41x layer by layer",
        (2, 8, 24, 72),
        lambda nodes: nodes,
        10 / 9,
        ((NINTH_OF_BLADE, 1), (NINTH_OF_BLADE, 8)),
        ("vgg16", "resnet50"),
        (5e-4, 1e-2),
    ),
    "tictac": Paper(
        "TicTac",
        True,
        ("none", "tic", "tac"),
        "training up to 1.192x TensorFlow's own order",
        (2, 4, 8, 16),
        lambda nodes: max(1, nodes // 4),
        10.0,
        ((TESLA_K80, 32), (TESLA_P40, 32)),
        ("vgg16", "resnet50", "inception_v3"),
        (5e-4,),
    ),
    "caramel": Paper(
        "CARAMEL",
        False,
        ("one message", "none", "caramel"),
        "up to 3.62x in iteration time",
        (8, 16),
        lambda nodes: 1,
        10.0,
        ((TESLA_K80, 32), (TESLA_P40, 32)),
        ("vgg16", "resnet50", "inception_v3"),
        (5e-5, 5e-4),
    ),
}


NETWORKS = {  # by whom of keras.applications they are made, for which images
    "vgg16": ("VGG16", IMAGE),
    "vgg19": ("VGG19", IMAGE),
    "resnet50": ("ResNet50", IMAGE),
    "resnet101": ("ResNet101", IMAGE),
    "resnet152": ("ResNet152", IMAGE),
    "inception_v3": ("InceptionV3", (299, 299, 3)),
    "xception": ("Xception", (299, 299, 3)),
    "densenet121": ("DenseNet121", IMAGE),
    "mobilenet_v2": ("MobileNetV2", IMAGE),
    "efficientnet_b0": ("EfficientNetB0", IMAGE),
}


class Outcome(NamedTuple):
    """One network on so many nodes: the milliseconds of a step in each way, and of a step without any transfers."""

    paper: str
    network: str
    device: str
    rows: int
    message_ms: float
    nodes: int
    computing_ms: float
    ms: dict[str, float]

    def gain(self, way: str) -> float:
        """How many times as fast the paper's own way is as another one."""
        return self.ms[way] / [*self.ms.values()][-1]


def build(name: str) -> keras.Model:
    """A network by its name, for images as in ImageNet."""
    import keras

    import models

    if name == "vgg16":
        return models.build("vgg16", IMAGE, CLASSES)
    made_by, shape = NETWORKS[name]
    return getattr(keras.applications, made_by)(weights=None, input_shape=shape, classes=CLASSES)


def profiles(names: set[str]) -> Callable[[str, Device, int], Profile]:
    """The profile of a network on a device with so many rows."""
    from pipetrain.compute.profiling.operation_count import operation_counts

    works = {}

    def profile(name: str, device: Device, rows: int) -> Profile:
        if (name, rows) not in works:
            works[name, rows] = operation_counts(networks[name], rows)
        return roofline(name, rows, works[name, rows], device)

    networks = {name: build(name) for name in sorted(names)}
    return profile


def plan_of(way: str, workload: Workload, serves: bool) -> Plan:
    """The plan of an order, or one message for everything each way."""
    if way != "one message":
        return ORDERS[way](workload, serves)
    every = Phase((workload.pack([*backward_order(workload)]),))
    return Plan(every if serves else Phase(), every)


def outcomes(paper: Paper, profile: Callable[[str, Device, int], Profile]) -> Iterator[Outcome]:
    """All networks on all platforms of one paper."""
    for network in paper.networks:
        for device, rows in paper.devices:
            profiled = profile(network, device, rows)
            for message_s in paper.message_s:
                cluster = Cluster((Level(Link(paper.gbit_per_s * GBIT, message_s)),))
                for nodes in paper.nodes:
                    message = message_of(cluster, nodes, paper.serves)
                    workload = workload_of(profiled, 1, message)
                    setting = Setting(workload, nodes, paper.serves, cluster, servers=paper.servers(nodes))
                    ms = {
                        way: 1e3 * simulate_plan(setting, plan_of(way, workload, paper.serves), STEPS).step_s
                        for way in paper.ways
                    }
                    computing_s = sum(layer.forward_s + layer.backward_s for layer in workload.layers)
                    about = paper.title, network, device.name, rows, 1e3 * message_s, nodes
                    yield Outcome(*about, 1e3 * computing_s, ms)


def simulated(paper: Paper, profile: Callable[[str, Device, int], Profile]) -> list[Outcome]:
    """All of a paper's outcomes, while a bar shows how many there are."""
    from pipetrain.compute.profiling.progress import Progress

    alternatives = (paper.networks, paper.devices, paper.message_s, paper.nodes)
    progress = Progress(f"Simulating the settings of {paper.title}.", math.prod(map(len, alternatives)))
    found = []
    for outcome in outcomes(paper, profile):
        found.append(outcome)
        progress.add(1)
    return found


def table(paper: Paper, found: list[Outcome]) -> str:
    """For people: the gains beside what the paper reports."""
    header = ("network", "device", "rows", "message ms", "nodes", "computing ms", *(f"{way} ms" for way in paper.ways))
    header = (*header, *(f"gain over {way}" for way in paper.ways[:-1]))
    rows = [
        (
            each.network,
            each.device,
            str(each.rows),
            f"{each.message_ms:g}",
            str(each.nodes),
            f"{each.computing_ms:.0f}",
            *(f"{ms:.0f}" for ms in each.ms.values()),
            *(f"{each.gain(way):.2f}x" for way in paper.ways[:-1]),
        )
        for each in found
    ]
    best = ", ".join(f"{max(each.gain(way) for each in found):.2f}x {way}" for way in paper.ways[:-1])
    return f"{paper.title} reports {paper.reported}. Simulated here, at most: {best}.\n{text_table(header, rows)}"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Folded)
    parser.add_argument("--paper", choices=PAPERS, action="append", help="(default: all)")
    parser.add_argument("--network", choices=NETWORKS, action="append", help="(default: all of the paper)")
    parser.add_argument("--nodes", type=count, action="append", metavar="N", help="(default: those of the paper)")
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="write the figures there too")
    options = parser.parse_args()
    chosen = [PAPERS[name] for name in options.paper or PAPERS]
    chosen = [
        each._replace(networks=tuple(options.network or each.networks), nodes=tuple(options.nodes or each.nodes))
        for each in chosen
    ]
    start_tensorflow(1)
    profile = profiles({name for paper in chosen for name in paper.networks})
    found = {}
    for paper in chosen:
        found[paper.title] = simulated(paper, profile)
        print(table(paper, found[paper.title]), flush=True)
    if options.output:
        options.output.write_text(
            json.dumps({title: [each._asdict() for each in those] for title, those in found.items()})
        )


if __name__ == "__main__":
    main()
