"""Four networks on 1 to 64 nodes by balance equations: strong scaling, hours to train, least rows of a device.

After Das et al. (Intel, arXiv 1602.06709). Nothing is measured: each layer's operations and bytes are counted, a node
computes a fixed part of its peak, and a link carries a fixed number of bytes a second. Each layer is divided by rows or
in blocks of inputs and outputs, whichever has more operations for each byte. Gradients of layers divided by rows go on
beside the computing as far as it lasts; exchanges of activations are waited for. So
  step = max(computing, gradients' bytes / bandwidth) + activations' bytes / bandwidth.

The node is two Xeon E5-2698v3 with FDR InfiniBand, the source's with 386 FLOP for each byte; --system is another
number of these, such as {aws:g} for an Amazon c4.8xlarge (18 cores of 2.9 GHz) with 10-Gbit Ethernet: speed-ups are
then of such nodes, seconds are not. The part of the peak that it reaches, and how many epochs are trained, are not
given there as one number: both are options. Takes 2 s.

examples:
  python experiments/balance_scaling.py
  python experiments/balance_scaling.py --model vgg_a --rows 512 --nodes 128
  python experiments/balance_scaling.py --model vgg_a --model overfeat_fast --system {aws:g} --nodes 16
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from experiments.options import writable  # noqa: E402
from experiments.progress import write_rows  # noqa: E402
from experiments.published import verdict  # noqa: E402
from pipetrain.cli.arguments import Folded, count, part, positive_number  # noqa: E402
from pipetrain.logs import text_table  # noqa: E402
from pipetrain.plan.balance import LayerShape, best_parts, block_bytes, block_ratio, data_ratio, least_rows  # noqa: E402

PEAK_FLOPS_PER_S = 2 * 16 * 2.3e9 * 32  # two processors of 16 cores, 32 single-precision operations a cycle
SYSTEM = 386.0  # its FLOP for each byte of FDR InfiniBand, as the source has it
AWS = round(18 * 2.9e9 * 32 / 1.25e9)  # of a c4.8xlarge's cores for each byte of 10-Gbit Ethernet
IMAGES, EPOCHS = 1_281_167, 90  # of ImageNet's 1,000 classes
NODES = (1, 2, 4, 8, 16, 32, 64)
NUMBER_BYTES = 4


def convolution(name: str, maps: int, channels: int, side: int, kernel: int, stride: int = 1) -> LayerShape:
    """One with square kernels, ``side`` positions a side, and biases; ``maps`` are the inputs of an output."""
    read = ((side - 1) * stride + kernel) ** 2
    weights = channels * (maps * kernel**2 + 1)
    return LayerShape(name, channels, maps * read, channels * side**2, weights, kernel**2, side**2, read)


NETWORKS = {
    # Krizhevsky et al. 2012; the second, fourth and fifth convolution have two groups
    "alexnet": (
        convolution("conv1", 3, 96, 55, 11, 4),
        convolution("conv2", 48, 256, 27, 5),
        convolution("conv3", 256, 384, 13, 3),
        convolution("conv4", 192, 384, 13, 3),
        convolution("conv5", 192, 256, 13, 3),
        LayerShape.dense("fc6", 9216, 4096),
        LayerShape.dense("fc7", 4096, 4096),
        LayerShape.dense("fc8", 4096, 1000),
    ),
    # Simonyan and Zisserman 2014, configuration A
    "vgg_a": (
        convolution("conv1", 3, 64, 224, 3),
        convolution("conv2", 64, 128, 112, 3),
        convolution("conv3_1", 128, 256, 56, 3),
        convolution("conv3_2", 256, 256, 56, 3),
        convolution("conv4_1", 256, 512, 28, 3),
        convolution("conv4_2", 512, 512, 28, 3),
        convolution("conv5_1", 512, 512, 14, 3),
        convolution("conv5_2", 512, 512, 14, 3),
        LayerShape.dense("fc6", 25088, 4096),
        LayerShape.dense("fc7", 4096, 4096),
        LayerShape.dense("fc8", 4096, 1000),
    ),
    # Sermanet et al. 2014, the fast model
    "overfeat_fast": (
        convolution("conv1", 3, 96, 56, 11, 4),
        convolution("conv2", 96, 256, 24, 5),
        convolution("conv3", 256, 512, 12, 3),
        convolution("conv4", 512, 1024, 12, 3),
        convolution("conv5", 1024, 1024, 12, 3),
        LayerShape.dense("fc6", 36864, 3072),
        LayerShape.dense("fc7", 3072, 4096),
        LayerShape.dense("fc8", 4096, 1000),
    ),
    # Seide et al. 2011: seven hidden layers, of 11 frames of speech
    "cd_dnn": (
        LayerShape.dense("fc1", 429, 2048),
        *(LayerShape.dense(f"fc{n}", 2048, 2048) for n in range(2, 8)),
        LayerShape.dense("fc8", 2048, 9304),
    ),
}
ROWS, OTHER_ROWS = 256, {"cd_dnn": 1024}  # of a minibatch; of speech, which has no epochs of images
# Times one node: network, nodes, rows, FLOP for each byte. Of Ethernet the source says about 14, of no single network.
PAPER = {
    ("vgg_a", 64, 256, SYSTEM): 53.0,
    ("vgg_a", 128, 512, SYSTEM): 90.0,
    ("overfeat_fast", 64, 256, SYSTEM): 42.0,
    ("cd_dnn", 16, 1024, SYSTEM): 6.5,
    ("vgg_a", 16, 256, AWS): 14.0,
    ("overfeat_fast", 16, 256, AWS): 14.0,
}


class Outcome(NamedTuple):
    """A network on so many nodes: seconds of a step by what they go to, and how its layers are divided."""

    network: str
    nodes: int
    rows: int
    computing_s: float
    gradients_s: float
    activations_s: float
    divided: str
    system: float = SYSTEM

    @property
    def step_s(self) -> float:
        """Gradients beside computing, activations after it."""
        return max(self.computing_s, self.gradients_s) + self.activations_s


def outcome(network: str, nodes: int, rows: int, efficiency: float, overlap: float, system: float) -> Outcome:
    """One network on so many nodes, each layer divided in the way that has more operations for each byte.

    ``system``: the operations of a node's peak for each byte of its link.
    """
    layers, bytes_per_s = NETWORKS[network], PEAK_FLOPS_PER_S / system
    flops = sum((3 if n else 2) * each.flops for n, each in enumerate(layers)) * rows / nodes
    gradients = activations = 0.0
    divided = []
    for layer in layers if nodes > 1 else ():
        parts = best_parts(layer, nodes)
        if parts is None or data_ratio(layer, rows / nodes, overlap) >= block_ratio(layer, parts):
            gradients += NUMBER_BYTES * layer.weights * (2 - overlap)
        else:
            activations += block_bytes(layer, parts) * rows
            divided.append(f"{layer.name} {parts}")
    computing_s = flops / (efficiency * PEAK_FLOPS_PER_S)
    sent_s = gradients / bytes_per_s, activations / bytes_per_s
    return Outcome(network, nodes, rows, computing_s, *sent_s, " ".join(divided), system)


def hours(each: Outcome, epochs: float) -> float:
    """To train for so many epochs of ImageNet."""
    return epochs * IMAGES / each.rows * each.step_s / 3600


def report(found: Sequence[Outcome], epochs: float, overlap: float) -> str:
    """A table for each network with the least rows of its layers, and the source's numbers beside ours."""
    parts, alone = [], {each.network: each for each in found if each.nodes == 1}
    for name, one in alone.items():
        rows = [
            (
                *(str(each.nodes), f"{1e3 * each.computing_s:.1f}", f"{1e3 * each.gradients_s:.1f}"),
                *(f"{1e3 * each.activations_s:.1f}", f"{one.step_s / each.step_s:.1f}x"),
                *(f"{each.rows / each.step_s:.0f}", "-" if name in OTHER_ROWS else f"{hours(each, epochs):.1f}"),
                _joined((layer.name, parts.get(layer.name, "")) for layer in NETWORKS[name]) or "-",
            )
            for each in found
            if each.network == name
            for parts in [dict(zip(*[iter(each.divided.split())] * 2, strict=True))]
        ]
        header = (
            *("nodes", "computing ms", "gradients ms", "activations ms", "speed-up", "rows/s"),
            *(f"hours of {epochs:g} epochs", "blocks (inputs x outputs)"),
        )
        least = _joined((each.name, str(least_rows(each, one.system, overlap))) for each in NETWORKS[name])
        about = f"{name}, {one.rows} rows a minibatch, {one.system:g} FLOP for each byte"
        told = f"Least rows of a node with which a layer divided by rows computes as long as it sends:\n{least}"
        parts.append(f"{about}\n\n{text_table(header, rows)}\n\n{told}")
    beside = [
        (each.network, str(each.nodes), str(each.rows), f"{PAPER[key]:g}x", f"{ours:.1f}x", verdict(ours, PAPER[key]))
        for each in found
        if (key := (each.network, each.nodes, each.rows, each.system)) in PAPER
        for ours in [alone[each.network].step_s / each.step_s]
    ]
    if beside:
        header = ("network", "nodes", "rows", "source", "ours", "within 25%")
        parts.append(f"Beside the source\n\n{text_table(header, beside)}")
    return "\n\n".join(parts)


def _joined(layers: Iterable[tuple[str, str]]) -> str:
    """Layers of which something is said, in order: of several in turn that are alike the first and the last."""
    found = [(said, [name for name, _ in alike]) for said, alike in groupby(layers, lambda layer: layer[1]) if said]
    return " ".join(f"{names[0]}{f'..{names[-1]}' if len(names) > 1 else ''} {said}" for said, names in found)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").format(aws=AWS), formatter_class=Folded)
    add = parser.add_argument
    add("--model", action="append", choices=NETWORKS, help="(default: all)")
    add("--nodes", action="append", type=count, metavar="N", help="several times (default: 1 to 64)")
    add("--rows", type=count, metavar="N", help="of a minibatch (default: 256; of cd_dnn 1024)")
    add("--system", type=positive_number, default=SYSTEM, metavar="X", help="FLOP for each byte (default: 386)")
    add("--efficiency", type=positive_number, default=0.7, metavar="X", help="part of the peak reached (default: 0.7)")
    add("--overlap", type=part, default=1.0, metavar="X", help="of the gradients' exchange, 0 to 1 (default: 1)")
    add("--epochs", type=positive_number, default=EPOCHS, metavar="N", help="to train (default: 90, as AlexNet was)")
    add("--output", type=Path, metavar="DIR", help="where results go (default: runs/balance_scaling)")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status: 2 for arguments that cannot be used."""
    options = parse(arguments)
    try:
        output = writable(options.output or ROOT / "runs" / "balance_scaling")
    except ValueError as error:
        print(f"balance_scaling.py: {error}", file=sys.stderr)
        return 2
    found = [
        outcome(name, nodes, rows, options.efficiency, options.overlap, options.system)
        for name in options.model or NETWORKS
        for rows in [options.rows or OTHER_ROWS.get(name, ROWS)]
        for nodes in sorted({1, *(options.nodes or NODES)})
    ]
    path = write_rows(output / "balance_scaling.csv", [{**each._asdict(), "step_s": each.step_s} for each in found])
    from plots.balance_scaling import draw

    print(f"{report(found, options.epochs, options.overlap)}\n\n{draw(path, output / 'balance_scaling.png')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
