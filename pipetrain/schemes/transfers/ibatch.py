"""iBatch: neighbouring layers whose variables travel as one message, so that few messages hide behind computing.

Source: Wang, Pi, Zhou, *Scalable Distributed DL Training: Batching Communication and Computation*, AAAI 2019. There a
greedy algorithm chooses the batches; here the exact optimum is among the candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipetrain.schemes.transfers.plan import Pack, Phase, Plan, Workload


class LayerChain(NamedTuple):
    """Layers in a row: the startup of a message ``T_s``, and each layer's transfer ``T_t`` and computing ``C``."""

    startup_s: float
    transfer_s: tuple[float, ...]
    computing_s: tuple[float, ...]

    def end_s(self, ends: Sequence[int]) -> float:
        """When all is computed, for batches that end after so many layers each.

        Batch k has arrived at ``k T_s + sum of T_t`` up to its last layer, and is computed from then on or from the end
        of the batch before.
        """
        end_s, first = 0.0, 0
        for k, last in enumerate(ends, start=1):
            arrived_s = k * self.startup_s + sum(self.transfer_s[:last])
            end_s = max(end_s, arrived_s) + sum(self.computing_s[first:last])
            first = last
        return end_s


def ibatch(workload: Workload, serves: bool) -> Plan:
    """The best batches for the forward, and for the backward their mirror image.

    Backwards in time, gradients that leave a layer after its backward are weights that arrive before its forward: the
    batches that end the one soonest end the other soonest.
    """
    found, names = [], []
    for is_forward in (True, False):
        name, ends = best(chain_of(workload, is_forward))
        trained = [workload.owned[k] for k in workload.trained]
        found.append(tuple(workload.pack([n for each in trained[a:b] for n in each]) for a, b in pairwise([0, *ends])))
        names.append(name)
    pulls, pushes = found
    name = f"ibatch ({names[0]}, {names[1]})" if serves else f"ibatch ({names[1]})"
    return Plan(Phase(pulls if serves else ()), Phase(_reversed(pushes), 0), name=name)


def best(chain: LayerChain) -> tuple[str, list[int]]:
    """The name of the way whose batches end soonest, and where these end; of equal ones the first."""
    ways = {
        "optimum": optimum(chain),
        "transfers hidden": transfers_hidden(chain),
        "computing hidden": computing_hidden(chain),
        "layer by layer": list(range(1, len(chain.computing_s) + 1)),
    }
    return min(ways.items(), key=lambda way: chain.end_s(way[1]))


def optimum(chain: LayerChain) -> list[int]:
    """The ends of the batches that are computed soonest, exactly.

    ``F[k][j] = min over i of max(F[k-1][i], k T_s + sum T_t[1..j]) + sum C[i+1..j]`` is the least time for the first j
    layers in k batches. Of equal ones it has the fewest batches.
    """
    count = len(chain.computing_s)
    sent, computed = np.array(_sums(chain.transfer_s)), np.array(_sums(chain.computing_s))
    within = np.where(np.arange(count + 1)[:, None] < np.arange(count + 1), 0.0, np.inf)  # i < j
    before = np.where(np.arange(count + 1), np.inf, 0.0)
    chosen: list[NDArray[np.int64]] = []
    ends_s: list[float] = []
    for k in range(1, count + 1):
        arrived_s = k * chain.startup_s + sent
        every = np.maximum(before[:, None], arrived_s) + computed - computed[:, None] + within
        chosen.append(every.argmin(axis=0))
        before = every.min(axis=0)
        ends_s.append(float(before[count]))
    ends, last = [], count
    for places in reversed(chosen[: ends_s.index(min(ends_s)) + 1] if ends_s else []):
        ends.append(last)
        last = int(places[last])
    return ends[::-1]


def transfers_hidden(chain: LayerChain) -> list[int]:
    """Greedy: each batch is the largest that arrives while the one before is computed; a layer alone where none does.

    The first batch, behind which there is nothing to hide, is the first layer.
    """
    ends = [1] if chain.computing_s else []
    while ends and ends[-1] < len(chain.computing_s):
        hidden = sum(chain.computing_s[(ends[-2] if len(ends) > 1 else 0) : ends[-1]])
        takes = _takes(chain, ends[-1])
        ends.append(max((last for last, takes_s in takes.items() if takes_s <= hidden), default=ends[-1] + 1))
    return ends


def computing_hidden(chain: LayerChain) -> list[int]:
    """Greedy: each batch is the smallest behind whose transfer the one before is computed; all the rest where none is.

    The first batch is the first layer.
    """
    ends = [1] if chain.computing_s else []
    while ends and ends[-1] < len(chain.computing_s):
        hidden = sum(chain.computing_s[(ends[-2] if len(ends) > 1 else 0) : ends[-1]])
        takes = _takes(chain, ends[-1])
        enough = (last for last, takes_s in takes.items() if takes_s >= hidden)
        ends.append(min(enough, default=len(chain.computing_s)))
    return ends


def _takes(chain: LayerChain, first: int) -> dict[int, float]:
    """What the message of a batch takes that begins there, by where it ends."""
    sent = _sums(chain.transfer_s[first:])
    return {first + n: chain.startup_s + each for n, each in enumerate(sent[1:], start=1)}


def _sums(values: Sequence[float]) -> list[float]:
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    return sums


def chain_of(workload: Workload, forward: bool) -> LayerChain:
    """The layers that own variables, each with the computing of those after it that own none.

    What is computed before the first of them needs no transfer and is left out.
    """
    trained = workload.trained
    computing = [0.0] * len(trained)
    for k, layer in enumerate(workload.layers):
        if trained and k >= trained[0]:
            computing[sum(n <= k for n in trained) - 1] += layer.forward_s if forward else layer.backward_s
    transfer = [workload.message.s_per_byte * workload.pack(workload.owned[k]).size_bytes for k in trained]
    return LayerChain(workload.message.overhead_s, tuple(transfer), tuple(computing))


def _reversed(packs: Sequence[Pack]) -> tuple[Pack, ...]:
    return tuple(pack._replace(variables=pack.variables[::-1]) for pack in reversed(packs))
