"""A chain of blocks cut into stages, and what each of them costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipetrain.logs import counted, text_table
from pipetrain.pictures.tables import Tabular, table
from pipetrain.plan.cost import PREDICTING, Costs, Place, sent_to_each
from pipetrain.plan.memory import Holding, Training, demand, demand_of, moments
from pipetrain.plan.profile import BlockProfile, Profile, crossing_bytes, crossing_elements, mib, squarish
from pipetrain.plan.search import StageChoice
from pipetrain.schemes.compression import FLOAT_BYTES, Compression
from pipetrain.schemes.dry_run import waiting
from pipetrain.schemes.schedules import Schedule
from pipetrain.schemes.scheme import Scheme

if TYPE_CHECKING:
    from pipetrain.pictures.figure import Picture

DEFAULT_TRAINING = Training()


@dataclass(frozen=True)
class StagePlan:
    """Blocks ``first`` to ``last`` (both included) of the chain on ``replicas`` devices, and what they cost.

    Forward, backward and update seconds and ``sent_bytes`` are per minibatch, for all replicas together; ``total_s`` is
    what one replica takes per minibatch, transfers and predicting weights included; ``memory_bytes`` what each holds
    when its device holds most; ``compiled`` whether XLA compiles it; ``prediction_s`` what predicting weights takes of
    ``total_s``; ``product_bytes`` and ``product_s`` the weights whose gradients are made once for all microbatches of a
    minibatch, and what that takes of ``backward_s``; ``shared_bytes`` the weights that other stages have too, and
    ``summing_s`` what sending their gradients takes of ``total_s``; ``late_s`` what those weight gradients take of
    ``backward_s`` that may be made later than the gradients of the stage's inputs. ``output_bytes`` and ``floats`` are
    those of its last block; ``uncoded_bytes`` its weights whose gradients are sent as they are.
    """

    first: str
    last: str
    blocks: int
    forward_s: float
    backward_s: float
    weight_bytes: int
    output_bytes: int
    total_s: float
    update_s: float = 0.0
    replicas: int = 1
    device: int = 0
    sent_bytes: int = 0
    memory_bytes: int = 0
    compiled: bool = False
    prediction_s: float = 0.0
    product_bytes: int = 0
    product_s: float = 0.0
    shared_bytes: int = 0
    summing_s: float = 0.0
    late_s: float = 0.0
    floats: tuple[int, int] | None = None
    coding_s: tuple[float, float] = (0.0, 0.0)
    messages_s: float = 0.0
    uncoded_bytes: int = 0
    step_s: float = 0.0

    def crossing_bytes(self, compression: Compression | None) -> int:
        """What crosses the cut after it, each way, compressed so."""
        return crossing_bytes(self.output_bytes, self.floats, compression)

    def summed_bytes(self, compression: Compression) -> int:
        """A message of its weights' gradients, compressed so, as if its blocks had one matrix each, all alike."""
        elements = (self.weight_bytes - self.uncoded_bytes) // FLOAT_BYTES // self.blocks
        return self.blocks * compression.sent_bytes(squarish(elements)) if elements else 0

    def exchanged_bytes(self, compression: Compression) -> float:
        """What each of its replicas sends each other: such a message, and what it does not have."""
        return self.summed_bytes(compression) + float(sent_to_each(self.uncoded_bytes, self.replicas))

    def is_exact(self, scheme: Scheme, is_last: bool) -> bool:
        """Whether what crosses the cut after it, and what its replicas sum, arrives as it is by this scheme."""
        crossing, summed = scheme.compression, scheme.replica_compression
        if not is_last and crossing_elements(self.output_bytes, self.floats, crossing):
            return False
        elements = (self.weight_bytes - self.uncoded_bytes) // FLOAT_BYTES // self.blocks
        return summed is None or self.replicas == 1 or not elements or not summed.encodes(squarish(elements))


PAIRS = ("floats", "coding_s")  # fields of a stage that are no single numbers, and in no table


@dataclass(frozen=True)
class Partition(Tabular):
    """A chain of blocks cut into stages, of whose devices ``processors`` work at once; prints as a table.

    Its rows, for pandas and for CSV files, are the stages, with the fields of ``StagePlan``.

    ``metric_s`` is what a minibatch's metrics take in the caller's thread, beside the stages, and ``call_s`` what its
    call takes, 0 for asynchronous schemes, of which one call has several and the next one waits. ``speed`` is that of
    the slowest device while all compute, 1 being the profile's. ``simulated_s`` is what a minibatch takes where the
    schedule flushes, as simulated over the cluster's links; None where it was not simulated.
    """

    model: str
    batch_size: int
    stages: tuple[StagePlan, ...]
    training: Training = DEFAULT_TRAINING
    processors: float = math.inf
    metric_s: float = 0.0
    call_s: float = 0.0
    simulated_s: float | None = None
    speed: float = 1.0

    @property
    def cuts(self) -> tuple[str, ...]:
        """The last block of every stage but the final one."""
        return tuple(stage.last for stage in self.stages[:-1])

    @property
    def replicas(self) -> tuple[int, ...]:
        """How many devices each stage has."""
        return tuple(stage.replicas for stage in self.stages)

    @property
    def devices(self) -> int:
        """How many devices its stages are on."""
        return sum(together[0].replicas for together in self.on_devices)

    @property
    def is_exact(self) -> bool:
        """Whether it trains as the unsplit model does: no gradient is late, and nothing is encoded on its way."""
        scheme, last = self.training.chosen, len(self.stages) - 1
        return not scheme.asynchronous and all(each.is_exact(scheme, n == last) for n, each in enumerate(self.stages))

    @property
    def slowest_s(self) -> float:
        """Seconds per minibatch of the slowest device, with all of its stages: the pipeline's own bound."""
        return max(sum(stage.total_s for stage in together) for together in self.on_devices)

    @property
    def fullest_bytes(self) -> int:
        """The peak memory of the device that needs most, for all of its stages."""
        return max(sum(stage.memory_bytes for stage in together) for together in self.on_devices)

    @property
    def on_devices(self) -> list[list[StagePlan]]:
        """The stages that are together on the same devices: one, unless the schedule gives a device several."""
        together: dict[int, list[StagePlan]] = {}
        for stage in self.stages:
            together.setdefault(stage.device, []).append(stage)
        return [*together.values()]

    @property
    def step_s(self) -> float:
        """Predicted seconds per minibatch once the pipeline is full: those of the slowest stage.

        Synchronous schemes fill and drain the pipeline for every minibatch: ``simulated_s``, or where that is not known
        what the schedule takes in units of time, for ``gpipe`` and ``1f1b`` ``(1 + (N-1)/M)`` times as many, which is
        right of equal stages. All stages' work and the metrics' divided by the processors, if that is more. All that at
        the devices' ``speed``, and a call.
        """
        if self.simulated_s is not None:
            return self.simulated_s
        work_s = sum(stage.total_s * stage.replicas for stage in self.stages) + self.metric_s
        schedule, microbatches = self.training.chosen.schedule, self.training.microbatches
        filling = 0.0
        if schedule.flushes:
            filling = waiting(schedule.order, schedule.devices(len(self.stages)), microbatches)
        return max((1 + filling) * self.slowest_s, work_s / self.processors) / self.speed + self.call_s

    @property
    def samples_per_second(self) -> float:
        """The predicted throughput once the pipeline is full: one minibatch per ``step_s``."""
        return self.batch_size / self.step_s

    @property
    def speedup(self) -> float:
        """The bound on the pipeline's throughput against one device: compute of all stages / ``step_s``."""
        return (
            sum(stage.forward_s + stage.backward_s + stage.update_s + stage.step_s for stage in self.stages)
            / self.step_s
        )

    @property
    def sent_bytes(self) -> int:
        """What all devices together send per minibatch: activations, their gradients, and weights' gradients to sum."""
        return sum(stage.sent_bytes for stage in self.stages)

    def __str__(self) -> str:
        return self.text()

    def text(self, one_s: float | None = None) -> str:
        """The table of stages; ``one_s`` are the seconds of a minibatch on one device, to compare with."""
        return f"{self._title(one_s)}\n{text_table(self._header, self._rows)}"

    def to_html(self, one_s: float | None = None) -> str:
        """The same as HTML, with the stages of the slowest device in bold."""
        slowest = max(self.on_devices, key=lambda together: sum(stage.total_s for stage in together))
        return table(self._title(one_s), self._header, self._rows, [self.stages.index(each) for each in slowest])

    def _repr_html_(self) -> str:
        return self.to_html()

    def plot(self, path: str | Path | None = None) -> Picture:
        """Bars of what the stages of every device take and hold, with the device that all others wait for.

        Needs matplotlib: ``pip install "pipetrain[plot]"``.

        Args:
            path: a file to save it to, of the kind that its name ends in.

        Returns:
            The matplotlib figure.
        """
        from pipetrain.plan import pictures

        return pictures.partition(self).saved(path)

    def _title(self, one_s: float | None) -> str:
        return (
            f"{self.model}: {counted(len(self.stages), 'stage')}, batch {self.batch_size}, "
            f"{'at most' if self.simulated_s is None else 'about'} "
            f"{self.samples_per_second:.0f} samples/s "
            f"({one_s / self.step_s if one_s else self.speedup:.2f}x one device)"
        )

    @property
    def _is_compiled(self) -> bool:
        return any(stage.compiled for stage in self.stages)

    @property
    def _header(self) -> tuple[str, ...]:
        header = (
            "stage", "blocks", "replicas", "forward ms", "backward ms", "parameters", "memory MiB", "sends MiB", "load",
        )  # fmt: skip
        return (*header, "kernels") if self._is_compiled else header

    @property
    def _rows(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = [
            (
                f"{k}: {stage.first} - {stage.last}",
                str(stage.blocks),
                str(stage.replicas),
                f"{stage.forward_s * 1e3:.2f}",
                f"{stage.backward_s * 1e3:.2f}",
                f"{stage.weight_bytes // 4:,}",
                mib(stage.memory_bytes),
                mib(stage.sent_bytes),
                f"{stage.total_s / self.slowest_s:.0%}",
            )
            for k, stage in enumerate(self.stages)
        ]
        if not self._is_compiled:
            return rows
        return [(*row, "XLA" if stage.compiled else "TensorFlow") for row, stage in zip(rows, self.stages, strict=True)]

    def _columns(self) -> dict[str, Sequence[Any]]:
        each = [{"stage": k, **asdict(stage)} for k, stage in enumerate(self.stages)]
        return {name: [row[name] for row in each] for name in each[0] if name not in PAIRS}


def predictions(training: Training, stage: int, stages: int) -> int:
    """How many times a minibatch stage k of N predicts weights."""
    return sum(training.chosen.predictions(stage, stages, training.microbatches_of(stages)))


def located(place: Place, schedule: Schedule, stages: int) -> Place:
    """Where a stage is whose place was counted in stages: on the device that the schedule says."""
    if schedule.chunks == 1:
        return place
    devices = schedule.devices(stages)
    device, after = (schedule.place(each, devices) for each in (place.device, min(place.after, stages - 1)))
    return place._replace(device=device, replicas=1, after=after)


def described(
    profile: Profile,
    costs: Costs,
    choices: Sequence[StageChoice],
    training: Training,
    compiled: Sequence[bool] | None = None,
) -> Partition:
    """The partition into the chosen stages, ``compiled`` by XLA or not as is given, or as is best by their costs."""
    stages, each_bytes = [], _memory_bytes(costs, choices, training)
    for n, (first, end, counted_place) in enumerate(choices):
        counted_place = counted_place._replace(predictions=predictions(training, n, len(choices)))
        place = located(counted_place, training.chosen.schedule, len(choices))
        place = costs.chosen(place, first, end) if compiled is None else place._replace(compiled=compiled[n])
        part, seconds = profile.blocks[first:end], costs.computing(first, end, place.compiled)
        stages.append(
            StagePlan(
                first=part[0].name,
                last=part[-1].name,
                blocks=len(part),
                forward_s=seconds.forward_s,
                backward_s=seconds.backward_s,
                weight_bytes=costs.weight_bytes(first, end),
                output_bytes=part[-1].output_bytes if end < len(profile.blocks) else 0,
                total_s=costs.seconds(place).of(first, end),
                update_s=seconds.update_s,
                step_s=costs.step_s(first, end),
                replicas=place.replicas,
                device=place.device,
                sent_bytes=int(costs.sent_bytes(first, end, place.replicas)),
                memory_bytes=math.ceil(each_bytes[n]),
                compiled=place.compiled,
                prediction_s=PREDICTING * place.predictions * seconds.update_s,
                product_bytes=sum(block.product_bytes for block in part),
                product_s=costs.products_s(first, end, place.compiled),
                shared_bytes=costs.shared_bytes(first, end),
                summing_s=costs.summing_s(place, first, end),
                late_s=costs.late_s(first, end, place.compiled),
                floats=part[-1].floats,
                coding_s=costs.coding_s(part[-1]) if end < len(profile.blocks) else (0.0, 0.0),
                messages_s=sum(sum(costs.messages_s(block, place.replicas)) for block in part),
                uncoded_bytes=_uncoded_bytes(part),
            )
        )
    devices = max(each.device + each.replicas for each in stages)
    call_s = 0.0 if training.chosen.asynchronous else costs.cluster.calls_s(devices)
    return Partition(
        profile.model,
        profile.batch_size,
        tuple(stages),
        training,
        costs.cluster.processors,
        profile.metric_s,
        call_s,
        speed=min(costs.cluster.speeds_of(devices)),
    )


def _uncoded_bytes(part: Sequence[BlockProfile]) -> int:
    """Of a stage's weights, each counted once."""
    shared = {number: size for block in part for number, size in block.shared if number in block.shared_rows}
    return sum(block.rows_bytes for block in part) + sum(shared.values())


def _memory_bytes(costs: Costs, choices: Sequence[StageChoice], training: Training) -> list[float]:
    """What each stage holds at its fullest; of a device's several stages, when they hold most together."""
    stages, schedule = len(choices), training.chosen.schedule
    if schedule.chunks == 1:
        return [
            costs.memory(place.replicas, demand(training, n, stages)).of(first, end)
            for n, (first, end, place) in enumerate(choices)
        ]
    training.chosen.check()

    @cache
    def stage_bytes(stage: int, holding: Holding, works: bool) -> float:
        first, end, _ = choices[stage]
        return costs.memory(1, demand_of(training, stage, stages, holding, works)).of(first, end)

    found: dict[int, float] = {}
    for device in range(schedule.devices(stages)):
        own = schedule.stages_on(device, stages)
        each = (
            [stage_bytes(n, holding, n == moment.stage) for n, holding in zip(own, moment.holdings, strict=True)]
            for moment in moments(training, device, stages)
        )
        found.update(zip(own, max(each, key=sum), strict=True))
    return [found[stage] for stage in range(stages)]
