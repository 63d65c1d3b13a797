"""A model as the formulas of a grid's traffic know it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from pipetrain.compute.graph.blocks import Chain
from pipetrain.compute.graph.wide_layers import WideLayer, wide_layers
from pipetrain.plan.grid_network import GridLayer, GridNetwork


def network_of(chain: Chain, wide: Sequence[WideLayer] | None = None) -> GridNetwork:
    """Its blocks, the weights of each that no earlier one has, and its values; sizes that are open count as 1."""
    wide = wide_layers(chain.blocks) if wide is None else wide
    by_block = {layer.block: layer for layer in wide}
    seen: set[int] = set()
    layers = []
    for number, block in enumerate(chain.blocks):
        weights = {id(each): each for call in block.calls for each in call.weights if id(each) not in seen}
        seen |= set(weights)
        writes = [value for call in block.calls for value in call.writes]
        reads = {value for call in block.calls for value in call.reads} - {*writes}
        layers.append(
            GridLayer(
                block.name,
                sum(_elements(chain.symbol(value)) for value in writes),
                sum(math.prod(each.shape) for each in weights.values()),
                by_block[number].size if number in by_block else 0,
                tuple(sorted(reads)),
                tuple(writes),
            )
        )
    count = 1 + max((value for layer in layers for value in (*layer.reads, *layer.writes)), default=-1)
    inputs, outputs = chain.crossing(0), chain.crossing(len(chain.blocks))
    elements = [_elements(chain.symbol(value)) for value in range(max(count, *(n + 1 for n in (*inputs, *outputs))))]
    return GridNetwork(tuple(layers), tuple(elements), tuple(inputs), tuple(outputs), tuple(sorted(chain.trained())))


def _elements(symbol: Any) -> int:
    return math.prod(size or 1 for size in symbol.shape[1:])
