"""What a training step computes and sends, and a plan of transfers: which variables travel in one message, and when.

A workload has layers with their seconds, variables with their bytes, and what a message takes. A plan says in which
order messages leave, and how many are under way at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from pipetrain.schemes.arguments import is_count
from pipetrain.schemes.splitting import shared_out


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
    """Layers in an order in which they can run forward, the bytes of each variable, and what messages take.

    ``rows`` are the variables whose gradients are rows of embeddings, which no compression changes.
    """

    layers: tuple[Layer, ...]
    sizes_bytes: tuple[int, ...]
    message: Message = Message()
    rows: frozenset[int] = frozenset()

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

    def fragments(self, count: int) -> tuple[tuple[int, ...], ...]:
        """The variables of each of so many fragments of the weights: a layer's are in one, and each has layers of all
        depths.

        Of each ``count`` layers in turn that have variables every fragment is given one, the largest going to the
        fragment of the fewest bytes so far. Layers of one size are those of Streaming DiLoCo's strided fragments (arXiv
        2501.18512), layer i in fragment ``i % count``; whatever their sizes, no fragment has more bytes than another by
        more than the largest layer's. Fragments beyond the number of layers have none.
        """
        layers = [self.owned[k] for k in self.trained]
        sizes_bytes = [sum(self.sizes_bytes[n] for n in variables) for variables in layers]
        found, held_bytes = [list[int]() for _ in range(count)], [0] * count
        for first in range(0, len(layers), count):
            turn = sorted(range(first, min(first + count, len(layers))), key=lambda k: -sizes_bytes[k])
            for k, fragment in zip(turn, sorted(range(count), key=held_bytes.__getitem__), strict=False):
                found[fragment] += layers[k]
                held_bytes[fragment] += sizes_bytes[k]
        return tuple(tuple(sorted(each)) for each in found)

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


WINDOW = 2  # messages under way: of two, one travels while the other's acknowledgement does


class Pack(NamedTuple):
    """Variables, by number, that travel as one message of so many bytes.

    A large variable may travel in several messages: this is then number ``chunk`` of its ``chunks``, see
    ``splitting.rows_of`` for which elements these are.
    """

    variables: tuple[int, ...]
    size_bytes: int
    chunk: int = 0
    chunks: int = 1


class Phase(NamedTuple):
    """Packs in the order in which they are sent, at most ``window`` of them under way; 0: each when it is ready.

    A pack is under way until its receivers have acknowledged it. Gradients that a step waits for need no order: it ends
    when all are there, and acknowledgements take time.

    Packs of less than half the phase's mean do not count in a window above 1: while such a one is all that is under
    way, a link waits for acknowledgements.
    """

    packs: tuple[Pack, ...] = ()
    window: int = WINDOW

    @property
    def variables(self) -> list[int]:
        """Those of all packs, each once, in the order of their numbers."""
        return sorted({n for pack in self.packs for n in pack.variables})

    @property
    def awaited(self) -> list[int | None]:
        """For each pack the place of the one whose acknowledgement it waits for, if there is one.

        It is the latest one that counts and that has ``window - 1`` others that count between it and the pack.
        """
        least = sum(pack.size_bytes for pack in self.packs) / max(1, len(self.packs)) / 2
        found: list[int | None] = []
        counted: list[int] = []  # the places of the packs so far that count
        for place, pack in enumerate(self.packs):
            found.append(counted[-self.window] if 0 < self.window <= len(counted) else None)
            if pack.size_bytes >= least or self.window == 1:
                counted.append(place)
        return found

    def of(self, held: Collection[int], sizes_bytes: Sequence[int]) -> Phase:
        """What of it is between the workers and a server that holds these variables: parts of packs, in their order."""
        packs = []
        for pack in self.packs:
            variables = tuple(n for n in pack.variables if n in held)
            if variables:
                is_whole = len(variables) == len(pack.variables)
                size_bytes = pack.size_bytes if is_whole else sum(sizes_bytes[n] for n in variables)
                packs.append(pack._replace(variables=variables, size_bytes=size_bytes))
        return self._replace(packs=tuple(packs))


class Plan(NamedTuple):
    """All transfers of one training step.

    ``pulls`` are weights that come from a parameter server before the forward; there are none where every device has
    the weights. ``pushes`` are gradients that are sent, or summed over all devices, in the backward that makes them,
    ``late`` those that are summed while the next step's forward runs. ``name`` says how the plan was made. ``returned``
    are weights that the server sends to all workers as soon as they are updated, for the next step's forward; before
    the first step they are sent once.
    """

    pulls: Phase
    pushes: Phase
    late: Phase = Phase()
    name: str = "own"
    returned: Phase = Phase()

    @property
    def returned_variables(self) -> list[int]:
        """Those whose weights the workers keep from one step to the next."""
        return self.returned.variables

    @property
    def returning(self) -> Plan:
        """The same packs, whose weights are all returned when they are updated, and none pulled."""
        packs = (*self.returned.packs, *self.pulls.packs)
        return self._replace(
            pulls=Phase(), returned=Phase(packs, (self.pulls if self.pulls.packs else self.returned).window)
        )

    def in_time(self, needed: Collection[int]) -> Plan:
        """The plan with those of the late packs in this backward that have needed variables."""
        now = [pack for pack in self.late.packs if {*needed} & {*pack.variables}]
        late = tuple(pack for pack in self.late.packs if pack not in now)
        pushes = (*self.pushes.packs, *reversed(now))  # what the forward needs last, the backward makes first
        return self._replace(pushes=self.pushes._replace(packs=pushes), late=Phase(late, self.late.window))

    @property
    def late_variables(self) -> list[int]:
        """Those that are updated in the next step."""
        return self.late.variables

    def are_late(self, together: Sequence[int]) -> bool:
        """Whether variables that are updated together are so in the next step."""
        return bool(together) and any(together[0] in pack.variables for pack in self.late.packs)


def check_plan(plan: object, sizes_bytes: Sequence[int], serves: bool) -> Plan:
    """The plan, if it moves every variable once each way. Raises ValueError for another, TypeError for what is none.

    Args:
        plan: what was given.
        sizes_bytes: of every variable.
        serves: whether weights come from a server, pulled or returned, else every device has them.
    """
    if not isinstance(plan, Plan):
        raise TypeError(
            f"An order of transfers is a name or a Plan. Received: order={plan!r}. Try order='auto', or "
            "Plan(pulls, pushes) of pipetrain.schemes.transfers.plan."
        )
    for field in ("pulls", "pushes", "late", "returned"):
        _check_phase(field, getattr(plan, field))
    absent = {"late": "wait for a next step"} if serves else {"pulls": "are pulled", "returned": "come from a server"}
    for field, why in absent.items():
        if getattr(plan, field).packs:
            raise ValueError(
                f"With this scheme no variables {why}. Received: {field}={getattr(plan, field).packs!r}. "
                f"Try {field}=Phase()."
            )
    if serves:
        _check_phases(plan, "pulls", "returned", len(sizes_bytes))
    _check_phases(plan, "pushes", "late", len(sizes_bytes))
    return plan


def _check_phases(plan: Plan, one: str, other: str, count: int) -> None:
    """ValueError unless these two phases together move each variable once, in one of them."""
    first, second = getattr(plan, one), getattr(plan, other)
    _check_partition(f"{one} and {other}", (*first.packs, *second.packs), count)
    both = {*first.variables} & {*second.variables}
    if both:
        raise ValueError(
            "A variable is there when all its chunks have arrived, so they travel in one phase. Received: "
            f"variables {sorted(both)} in {one} and {other}. Try them in one of these."
        )


def _check_phase(field: str, phase: object) -> None:
    if not isinstance(phase, Phase) or not is_count(phase.window, 0):
        raise ValueError(
            f"A phase has packs, and a window from 0 up. Received: {field}={phase!r}. "
            f"Try Phase(packs, window={WINDOW})."
        )
    for pack in phase.packs:
        whole = isinstance(pack, Pack) and is_count(pack.chunks) and is_count(pack.chunk, 0) and pack.variables
        if not whole or pack.chunk >= pack.chunks or (pack.chunks > 1 and len(pack.variables) > 1):
            raise ValueError(
                "A pack has variables, or is a chunk of one variable, the first of n being number 0 of n. Received: "
                f"{pack!r} in {field}. Try Pack((0, 1), 4096)."
            )


def _check_partition(field: str, packs: Iterable[Pack], count: int) -> None:
    """ValueError unless each variable's chunks are there, each once."""
    found = Counter((n, pack.chunk, pack.chunks) for pack in packs for n in pack.variables)
    expected = Counter({(n, chunk, chunks): 1 for n, _, chunks in found for chunk in range(chunks)})
    missing = [n for n in range(count) if not any(n == m for m, *_ in found)]
    unknown = [n for n, *_ in found if not is_count(n, 0) or n >= count]
    cut = Counter(n for n, chunk, _ in expected if chunk == 0)
    twice = [n for n, times in cut.items() if times > 1] + [each[0] for each in found if found[each] > 1]
    parts = [n for n, *_ in expected - found]
    if missing or unknown or twice or parts:
        raise ValueError(
            f"Every variable is sent once. Received: {field} without {sorted({*missing, *parts})}, with "
            f"{sorted({*twice})} more than once and {unknown} that are not among the {count} variables. "
            "Try each variable in one pack."
        )
