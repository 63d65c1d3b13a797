"""A plan of transfers: which variables travel in one message, in which order, and how many messages are under way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from pipetrain.schemes.arguments import is_count

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
