"""What a training step computes and sends: layers with their seconds, variables with their bytes, and messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from pipetrain.schemes.splitting import shared_out
from pipetrain.schemes.transfers.plan import Pack


@dataclass(frozen=True)
class Message:
    """What a message takes: ``f(d) = a + b d`` seconds for d bytes, with ``a = overhead_s`` and ``b = s_per_byte``."""

    overhead_s: float = 0.0
    s_per_byte: float = 0.0

    def seconds(self, size_bytes: float) -> float:
        """Of one message."""
        return self.overhead_s + size_bytes * self.s_per_byte


@dataclass(frozen=True)
class Layer:
    """A layer's variables, by number, its seconds, and the numbers of the earlier layers whose outputs it reads.

    ``update_s`` are the seconds of the optimizer's step for the variables that no earlier layer has.
    """

    variables: tuple[int, ...] = ()
    forward_s: float = 0.0
    backward_s: float = 0.0
    after: tuple[int, ...] = ()
    update_s: float = 0.0


@dataclass(frozen=True)
class Workload:
    """Layers in an order in which they can run forward, the bytes of each variable, and what messages take."""

    layers: tuple[Layer, ...]
    sizes_bytes: tuple[int, ...]
    message: Message = Message()

    @classmethod
    def chain(
        cls,
        sizes_bytes: Sequence[int],
        forward_s: Sequence[float],
        backward_s: Sequence[float] | None = None,
        message: Message = Message(),
    ) -> Workload:
        """Layers one after another, each with one variable; without ``backward_s`` backwards take what forwards do."""
        seconds = zip(forward_s, backward_s or forward_s, strict=True)
        layers = [Layer((n,), *each, after=(n - 1,) if n else ()) for n, each in enumerate(seconds)]
        return cls(tuple(layers), tuple(sizes_bytes), message)

    @cached_property
    def owned(self) -> tuple[tuple[int, ...], ...]:
        """Each layer's variables that no earlier one has: what must be there first, and whose gradient is made last."""
        seen: set[int] = set()
        found = []
        for layer in self.layers:
            found.append(tuple(n for n in dict.fromkeys(layer.variables) if n not in seen))
            seen.update(layer.variables)
        return tuple(found)

    @cached_property
    def owner(self) -> dict[int, int]:
        """The first layer of each variable."""
        return {n: k for k, variables in enumerate(self.owned) for n in variables}

    @cached_property
    def update_s(self) -> tuple[float, ...]:
        """The seconds of each variable's update: its layer's, by its part of the bytes."""
        seconds = [0.0] * len(self.sizes_bytes)
        for layer, variables in zip(self.layers, self.owned, strict=True):
            whole = sum(self.sizes_bytes[n] for n in variables)
            for n in variables:
                seconds[n] = layer.update_s * self.sizes_bytes[n] / whole if whole else 0.0
        return tuple(seconds)

    @property
    def trained(self) -> list[int]:
        """The numbers of the layers that own variables."""
        return [k for k, variables in enumerate(self.owned) if variables]

    def on_servers(self, count: int) -> list[list[int]]:
        """The variables of each of so many servers: a layer's are on one, and each has about as many bytes."""
        layers = [self.owned[k] for k in self.trained]
        sizes_bytes = [sum(self.sizes_bytes[n] for n in variables) for variables in layers]
        return [sorted(n for k in mine for n in layers[k]) for mine in shared_out(sizes_bytes, count)]

    def pack(self, variables: Sequence[int]) -> Pack:
        """These variables as one message."""
        return Pack(tuple(variables), sum(self.sizes_bytes[n] for n in variables))

    def first(self, pack: Pack) -> int:
        """The first layer that reads a pack: it is needed there, and complete once that layer has run backward."""
        return min(self.owner[n] for n in pack.variables)


def pulled_s(workload: Workload, packs: Sequence[Pack], start_s: float = 0.0) -> float:
    """When the forward ends, if the packs are sent one after another from 0 on, and layers run in their order.

    A layer begins when the one before has ended and its variables have arrived; the first not before ``start_s``.
    """
    arrived, free_s = [0.0] * len(workload.layers), 0.0
    for pack in packs:
        free_s += workload.message.seconds(pack.size_bytes)
        for n in pack.variables:
            arrived[workload.owner[n]] = free_s
    end_s = start_s
    for layer, there_s in zip(workload.layers, arrived, strict=True):
        end_s = max(end_s, there_s) + layer.forward_s
    return end_s


def made_s(workload: Workload) -> list[float]:
    """When each layer has run backward, the last one beginning at 0."""
    ends, end_s = [], 0.0
    for layer in reversed(workload.layers):
        end_s += layer.backward_s
        ends.append(end_s)
    return ends[::-1]


def pushed_s(workload: Workload, packs: Sequence[Pack]) -> float:
    """When backward and the last message have ended, if the packs are sent in their order, each when it is made."""
    made = made_s(workload)
    free_s = 0.0
    for pack in packs:
        free_s = max(free_s, made[workload.first(pack)]) + workload.message.seconds(pack.size_bytes)
    return max(free_s, made[0] if made else 0.0)


def backward_order(workload: Workload) -> Iterator[int]:
    """The variables in the order in which backward makes their gradients."""
    return (n for variables in reversed(workload.owned) for n in reversed(variables))
