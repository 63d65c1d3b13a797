"""Cuts whose stages fit the devices' memory, and what would help where none do."""

from __future__ import annotations

from collections.abc import Callable

from pipetrain.plan.cost import Costs, Memory, Place
from pipetrain.plan.memory import Demand, Training, demand, even_demand
from pipetrain.plan.profile import Profile, mib
from pipetrain.plan.search import CLOSE, HUGE, Limit, Problem, Reach, fastest
from pipetrain.plan.stages import Partition, described
from pipetrain.schemes.table import HORIZONS

Need = Callable[[Training, int, int], Demand]
Attempt = tuple[int | None, Need]
ENOUGH = 1.001  # the leanest cut is looked for to a thousandth


class NoPlan(ValueError):
    """No cut of the model fits the devices' memory."""


class Capacity:
    """What fits so many bytes a device.

    What a stage keeps depends on how many stages there are. A first search takes every stage to keep what it would if
    the pipeline began with it. That is never more than it keeps: if nothing fits, nothing does for any number of
    stages; if what is found fits even so, none is better. Else, every number of stages is tried. Where more stages need
    more microbatches, of which each keeps less, there is no such first search.
    """

    def __init__(self, profile: Profile, costs: Costs, problem: Problem, training: Training) -> None:
        self._profile, self._costs, self._problem, self._training = profile, costs, problem, training

    def fastest(self, limit_bytes: int, at_least_s: float) -> Partition:
        """The partition that fits whose slowest stage is fastest; ``at_least_s`` is a time that is known to be needed.

        Raises NoPlan, naming the stage that is too large in the leanest partition, and what would help.
        """
        best, slowest_s = None, HUGE
        attempts = self._attempts()
        for total, need in attempts:
            limit = self._limit(limit_bytes, total, need)
            found = fastest(self._problem, limit, at_least_s, slowest_s)
            if found is None:
                if total is None:
                    break
                continue
            candidate = described(self._profile, self._costs, found, self._training)
            if total is None:
                at_least_s = self._problem.slowest_s(found)
                _nearest_first(attempts, len(found))
            if candidate.fullest_bytes <= limit_bytes:
                best, slowest_s = candidate, self._problem.slowest_s(found)
                if slowest_s <= at_least_s * CLOSE:
                    break
        if best is None:
            best = self.leanest(limit_bytes)  # of a device's several stages, a looser limit may lead to what fits
            if best.fullest_bytes > limit_bytes:
                raise NoPlan(self._what_would_fit(limit_bytes, best))
        return best

    def any(self, limit_bytes: float) -> Partition | None:
        """Some partition that fits, however slow; None if there is none."""
        attempts = self._attempts()
        for total, need in attempts:
            found = Reach(self._problem, HUGE, self._limit(limit_bytes, total, need)).stages()
            if found is not None:
                candidate = described(self._profile, self._costs, found, self._training)
                if candidate.fullest_bytes <= limit_bytes:
                    return candidate
                if total is None:
                    _nearest_first(attempts, len(found))
            elif total is None:
                return None
        return None

    def leanest(self, at_least_bytes: float) -> Partition:
        """The partition whose fullest device holds least, to a thousandth; more than ``at_least_bytes``."""
        best = self.any(HUGE)
        assert best is not None  # without a limit there is always a way
        low = at_least_bytes
        while best.fullest_bytes > ENOUGH * low and best.fullest_bytes > low + 1:
            middle = (low + best.fullest_bytes) / 2
            leaner = self.any(middle)
            if leaner is None:
                low = middle
            else:
                best = leaner
        return best

    def _attempts(self) -> list[Attempt]:
        """For how many stages to search, None standing for any number, and what each is taken to keep.

        A device's several stages are taken to keep equal parts of what is there when they hold most together; then, as
        that refuses nothing but may not fit, each what it keeps at its own fullest.
        """
        if self._training.chosen.schedule.chunks > 1:
            return [(self._problem.stages, even_demand), (self._problem.stages, demand)]
        if self._problem.stages is not None:
            return [(self._problem.stages, demand)]
        totals = range(1, min(self._problem.devices, self._problem.blocks) + 1)
        varies = len({self._training.microbatches_of(total) for total in totals}) > 1
        return [(total, demand) for total in (*(() if varies else (None,)), *totals)]

    def _limit(self, limit_bytes: float, total: int | None, need: Need) -> Limit:
        """What stages keep in a pipeline of ``total`` stages, or of those from each one to the end."""

        def memory(place: Place, left: int) -> Memory:
            stages = total or left
            return self._costs.memory(place.replicas, need(self._training, stages - left, stages))

        # of a device's several stages each is given an equal part, which may refuse what would fit
        return Limit(memory, limit_bytes / self._training.chosen.schedule.chunks, total)

    def _what_would_fit(self, limit_bytes: int, leanest: Partition) -> str:
        together = max(leanest.on_devices, key=lambda stages: sum(stage.memory_bytes for stage in stages))
        keep = " and ".join(f"stage {leanest.stages.index(each)} ({each.first} - {each.last})" for each in together)
        plain = self._training._replace(horizon=HORIZONS[0])
        others = {} if plain == self._training else {"horizon='round-trip'": plain}
        others |= {
            "recompute=True": self._training._replace(recompute=True),
            "scheme='vanilla', which keeps no old weights": self._training.under("vanilla"),
            "scheme='1f1b' with 8 microbatches": self._training.under("1f1b")._replace(microbatches=8),
        }
        helps = [
            what
            for what, training in others.items()
            if self._training.chosen.schedule.chunks == training.chosen.schedule.chunks
            and Capacity(self._profile, self._costs, self._problem, training).any(limit_bytes)
        ]
        horizon = "" if plain == self._training else f", horizon={self._training.horizon!r}"
        return (
            f"No cut of {self._profile.model!r} fits the devices' memory: in the leanest one, {keep} "
            f"keep{'s' * (len(together) == 1)} {mib(leanest.fullest_bytes)} MiB a device, "
            f"{mib(leanest.fullest_bytes - limit_bytes)} MiB too much. Received: memory_bytes={limit_bytes} "
            f"({mib(limit_bytes)} MiB), devices={self._problem.devices // self._training.chosen.schedule.chunks}, "
            f"scheme={str(self._training.scheme)!r}{horizon}. "
            f"Try {'; '.join([*helps, 'a smaller batch; or more devices'])}."
        )


def _nearest_first(attempts: list[Attempt], stages: int) -> None:
    """All but the first in the order of how near they are to this number of stages."""
    attempts[1:] = sorted(attempts[1:], key=lambda attempt: abs((attempt[0] or 0) - stages))
