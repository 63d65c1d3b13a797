"""Draw the bytes that devices send per minibatch: data parallelism beside the pipeline, a pair of bars a network.

example:
  python plots/traffic.py runs/traffic --output traffic.png
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from matplotlib.figure import Figure

from plots import command
from plots.style import COLOURS, save

SIDES = {"data-parallel": ("data_parallel_bytes", -0.2), "pipeline": ("pipeline_bytes", 0.2)}
FILL = {"data-parallel": COLOURS["data-parallel"], "pipeline": COLOURS["spectrain"]}


def draw(path: Path, output: Path) -> Path:
    """One figure from what ``experiments/traffic.py`` wrote, on a logarithmic axis, with every network's ratio."""
    data = json.loads(path.read_text(encoding="utf-8"))
    networks = data["networks"]
    figure = Figure(figsize=(1.5 * len(networks) + 2.5, 4.2), layout="constrained")
    axes = figure.subplots()
    for side, (key, shift) in SIDES.items():
        sizes_mb = [each[key] / 1e6 for each in networks]
        axes.bar([n + shift for n in range(len(networks))], sizes_mb, 0.38, color=FILL[side], label=side)
    for n, each in enumerate(networks):
        highest_mb = max(each["data_parallel_bytes"], each["pipeline_bytes"]) / 1e6
        axes.annotate(f"{each['ratio']:.3g}x", (n, highest_mb), (0, 3), textcoords="offset points", ha="center")
    axes.set(yscale="log", ylabel="megabytes per minibatch")
    axes.margins(y=0.12)
    axes.set_xticks(range(len(networks)), [each["model"] for each in networks])
    axes.set_title(f"sent between {data['devices']} devices, batch {data['batch_size']}", loc="left")
    figure.legend(loc="outside upper right", ncols=2, frameon=False)
    return save(figure, output)


if __name__ == "__main__":
    sys.exit(command.of_folder(__doc__, draw, "experiments/traffic.py", "traffic.png", "traffic.json"))
