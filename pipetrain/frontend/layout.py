"""Where the stages of a model are: between which blocks, on which devices, by which kernels; and these stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import keras
import tensorflow as tf

from pipetrain.cluster.bandwidth import joined
from pipetrain.cluster.connection import remote_devices
from pipetrain.compute.cores import cores, full_name, is_processor, is_remote, with_job
from pipetrain.compute.functions.inference import Inference
from pipetrain.compute.functions.split import size_bytes
from pipetrain.compute.functions.stage import Stage
from pipetrain.compute.functions.stage_function import LossFunction
from pipetrain.compute.functions.state import Division
from pipetrain.compute.functions.weight_groups import Shared
from pipetrain.compute.graph.blocks import Chain, cut_points, why_together
from pipetrain.compute.graph.inputs import Shapes
from pipetrain.compute.graph.segment import Segment
from pipetrain.compute.graph.sharing import embeddings, sharing
from pipetrain.compute.optimizer.gradient_scaling import build_scale, stepping
from pipetrain.compute.optimizer.slots import Slot, adopt
from pipetrain.compute.tensorflow_private import memory_of_devices
from pipetrain.compute.transfers.compression import ReplicaSums
from pipetrain.logs import counted
from pipetrain.plan.cluster import PCIE_3, SHARED_MEMORY, Cluster, Level
from pipetrain.plan.stages import Partition
from pipetrain.schemes.arguments import is_count
from pipetrain.schemes.schedules import Schedule, has_halves
from pipetrain.schemes.scheme import Scheme, UpdateRule
from pipetrain.schemes.table import ONE_FORWARD_ONE_BACKWARD
from pipetrain.simulation.costs import THREAD_ACTION_S


def available() -> list[str]:
    """The devices that stages go to by default: workers', if this process has joined a cluster, else its own.

    Of its own: logical CPU devices if there are several, else GPUs, else the CPU.
    """
    if workers := remote_devices():
        return workers
    cpus, gpus = tf.config.list_logical_devices("CPU"), tf.config.list_logical_devices("GPU")
    chosen = cpus if len(cpus) > 1 or not gpus else gpus
    return [device.name for device in chosen]


def resolve(devices: Sequence[str] | None) -> list[str]:
    """Full TensorFlow names of ``devices``, such as ``CPU:0``; ``available()`` where None.

    Raises ValueError for a name TensorFlow does not have, listing those it has.
    """
    if devices is None:
        return available()
    if isinstance(devices, str) or not devices:
        raise ValueError(f"One device name or more is needed. Received: devices={devices!r}. Try devices=('CPU:0',).")
    return [full_name(name) for name in devices]


def assign(devices: Sequence[str], stages: int) -> list[str]:
    """A device for each stage: neighbours share one where there are fewer devices than stages."""
    used = devices[:stages]
    return [used[stage * len(used) // stages] for stage in range(stages)]


def described(devices: Sequence[str], within_functions: bool = False) -> Cluster:
    """What the planner should know of these devices: those of one processor share its memory, others PCIe.

    Links between processes and hosts are measured: for messages ``within_functions`` over all devices, as are all of
    processors, though the stages of a layer that calls Python are called by threads; or for calls.
    """
    if any(map(is_remote, devices)):
        return joined(devices, within_functions or all(map(is_processor, devices)))
    if all("CPU" in device for device in devices):
        return Cluster((Level(SHARED_MEMORY),), processors=len(cores()))
    return Cluster((Level(PCIE_3),), overhead_s=THREAD_ACTION_S)


def described_for(model: keras.Model, devices: Sequence[str], memory_bytes: int | None) -> Cluster:
    """These devices as ``described``, with what each may hold to train this model; None stands for what it has.

    A processor has no limit. A GPU that has the model's own variables (see ``pipetrain.on_host``) has so much less for
    training. All devices count as the smallest of them.
    """
    if memory_bytes is None:
        had, taken = memory_of_devices(), Counter[str]()
        for variable in model.variables:
            taken[variable.value.device] += size_bytes(variable.value)
        gpus = [with_job(device) for device in devices if not is_processor(device)]
        memory_bytes = max(1, min(had[gpu] - taken[gpu] for gpu in gpus)) if gpus else None
    return replace(described(devices), memory_bytes=memory_bytes)


def check_local(devices: Sequence[str]) -> None:
    """Refuse devices of other processes, which MirroredStrategy does not reach."""
    if any(map(is_remote, devices)):
        raise ValueError(
            f"data-parallel has its copies on this process's devices. Received: devices={[*devices]}. "
            "Try scheme='all-reduce', which reaches other hosts."
        )


def check_remembered(memories: Sequence[Any], devices: int) -> None:
    """Refuse recurrent layers that remember the rows of a whole minibatch, of which each device has a part."""
    if memories and devices > 1:
        raise ValueError(
            "A stateful recurrent layer remembers the rows of a whole minibatch. Received: scheme='data-parallel' with "
            f"{devices} devices, and a model with such a layer. Try scheme='all-reduce', or stateful=False."
        )


class Layout(NamedTuple):
    """The stages of a model. What is decided later, by a profile or a checkpoint, makes another one.

    Attributes:
        replicas: how many devices each stage has.
        devices: full TensorFlow names, one for every replica of the first stage, the second, and so on.
        ends: the number of blocks up to the end of each stage; None while the cut is open.
        compiled: of each stage, whether XLA compiles it; None while that is open.
    """

    replicas: tuple[int, ...]
    devices: tuple[str, ...]
    ends: tuple[int, ...] | None = None
    compiled: tuple[bool, ...] | None = None

    @property
    def stages(self) -> int:
        """How many there are."""
        return len(self.replicas)

    @property
    def is_decided(self) -> bool:
        """Whether neither the cut nor the kernels are open."""
        return self.ends is not None and self.compiled is not None

    @property
    def devices_of_stages(self) -> list[list[str]]:
        """For each stage those of its replicas."""
        devices = iter(self.devices)
        return [[next(devices) for _ in range(count)] for count in self.replicas]

    @property
    def distinct_devices(self) -> list[str]:
        """The devices in use, each once."""
        return list(dict.fromkeys(self.devices))

    @property
    def stages_on(self) -> dict[str, list[int]]:
        """The stages on every device in use."""
        found: dict[str, list[int]] = {device: [] for device in self.devices}
        for stage, devices in enumerate(self.devices_of_stages):
            for device in devices:
                found[device].append(stage)
        return found

    def segments(self, chain: Chain) -> list[Segment]:
        """Every stage's blocks. Raises ValueError if what a replicated stage gets or gives has no rows to divide."""
        assert self.ends is not None
        self._check_rows_first(chain)
        return [chain.segment(first, end) for first, end in zip([0, *self.ends[:-1]], self.ends, strict=True)]

    def _check_rows_first(self, chain: Chain) -> None:
        if any(tensor.shape[:1] != (None,) for tensor in chain.specs(0)):
            return  # the number of rows is fixed: nothing to tell them by
        for n, end in enumerate((self.ends or ())[:-1]):
            for tensor in chain.specs(end) if max(self.replicas[n : n + 2]) > 1 else ():
                if tensor.shape[:1] != (None,):
                    raise ValueError(
                        "What crosses from or to a replicated stage must have the batch first. Received: a tensor of "
                        f"shape {tuple(tensor.shape)} after {chain.blocks[end - 1].name!r}, replicas="
                        f"{self.replicas}. Try a cut somewhere else, or replicas=1 there."
                    )


class KeptLayout(NamedTuple):
    """What a checkpoint says of its run: where it was cut, which stages XLA compiled, and the inputs' shapes."""

    ends: tuple[int, ...]
    compiled: tuple[bool, ...]
    shapes: Shapes | None

    @classmethod
    def of(cls, about: dict[str, Any]) -> KeptLayout:
        """That of a checkpoint's ``about``; where old ones say nothing of it, XLA compiled no stage."""
        shapes = about.get("input_shapes") and tuple(map(tuple, about["input_shapes"]))
        ends = tuple(about["ends"])
        return cls(ends, tuple(about.get("compiled", [False] * len(ends))), shapes)


def laid_out(
    chain: Chain,
    stages: int | Partition | None,
    cuts: Sequence[str] | None,
    replicas: Sequence[int] | None,
    devices: Sequence[str],
    schedule: Schedule = ONE_FORWARD_ONE_BACKWARD,
    memory_bytes: int | None = None,
) -> Layout:
    """The layout that the arguments of ``PipelineModel`` ask for; where they leave the cut open, it is open.

    Args:
        chain: the model's blocks.
        stages: their number, a ``Partition`` of this model, or None for one per device.
        cuts: the last layer of every stage but the final one, instead of ``stages``.
        replicas: how many devices each stage has; None for those of a ``Partition``, or one.
        devices: full TensorFlow device names.
        schedule: how many stages a device has, and which.
        memory_bytes: what a device may hold; None for no limit.

    Raises:
        ValueError, TypeError: for a model whose layers cannot be seen, for more stages than blocks, for cuts or a
            partition that are not this model's.
    """
    if not chain.blocks:
        raise ValueError(f"There is nothing to cut. Received: model={chain.model.name!r} without layers. Try one with.")
    given = stages if isinstance(stages, Partition) else None
    if given is not None:
        cuts, replicas = _of_partition(given, cuts, replicas)
    ends = None if cuts is None else tuple(cut_points(chain.blocks, cuts))
    wanted = len(replicas) if stages is None and isinstance(replicas, Sequence) else stages
    count = len(ends) if ends else _checked_count(chain, wanted, len(devices), schedule.chunks)
    if isinstance(wanted, int) and wanted != count:
        raise ValueError(
            f"The cuts make {count} stages. Received: stages={wanted}, cuts={cuts!r}. Try leaving stages out."
        )
    counts = _checked_replicas(replicas, count)
    on = _assigned(devices, count, counts, schedule)
    if memory_bytes is not None and schedule.chunks == 1 and len(devices) < sum(counts):
        raise ValueError(
            "What several stages hold together on a device is not planned. Received: "
            f"memory_bytes={memory_bytes}, {sum(counts)} stages and replicas, {len(devices)} devices. "
            "Try as many devices, or leaving memory_bytes out."
        )
    if given is not None:  # which may have left some out, to begin a stage on the next host
        planned = [stage.device + n for stage in given.stages for n in range(stage.replicas)]
        on = [devices[n] for n in planned] if max(planned) < len(devices) else on
    return Layout(counts, tuple(on), (len(chain.blocks),) if count == 1 else ends)


def _of_partition(
    given: Partition, cuts: Sequence[str] | None, replicas: Sequence[int] | None
) -> tuple[Sequence[str], Sequence[int]]:
    """Its cuts and replicas, which nobody gives twice."""
    if cuts is not None:
        raise ValueError("Stages are given twice. Received: stages=Partition and cuts. Try one of them.")
    if tuple(replicas or given.replicas) != given.replicas:
        raise ValueError(
            f"Replicas are given twice. Received: replicas={replicas!r}, a partition with those of "
            f"{given.replicas}. Try leaving replicas out."
        )
    return given.cuts, given.replicas


def _checked_count(chain: Chain, stages: object, devices: int, chunks: int) -> int:
    blocks = len(chain.blocks)
    if blocks < chunks:
        raise ValueError(
            f"The schedule has {chunks} stages on each device, and the model {chain.model.name!r} only "
            f"{counted(blocks, 'layer')} to make stages of{why_together(chain.blocks)}. Received: "
            f"stages={stages!r}. Try a schedule of one stage a device, such as scheme='1f1b'."
        )
    count = max(1, min(devices, blocks // chunks)) * chunks if stages is None else stages
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= blocks:
        if blocks == 1:
            raise ValueError(
                f"The model {chain.model.name!r} can only be one stage{why_together(chain.blocks)}. "
                f"Received: stages={stages!r}. Try stages=1, or a model that has layers to cut between."
            )
        raise ValueError(
            f"The model {chain.model.name!r} has {blocks} layers, each in one stage"
            f"{why_together(chain.blocks)}. Received: stages={stages!r}. Try a number from 1 to {blocks}."
        )
    return count


def _checked_replicas(replicas: Sequence[int] | None, stages: int) -> tuple[int, ...]:
    if replicas is None:
        return (1,) * stages
    counts = tuple(replicas) if isinstance(replicas, Sequence) else ()
    if len(counts) != stages or not all(map(is_count, counts)):
        raise ValueError(
            f"Replicas are one number from 1 up for each of {stages} stages. Received: replicas={replicas!r}. "
            f"Try {(2, *(1,) * (stages - 1))}."
        )
    return tuple(map(int, counts))


def _assigned(devices: Sequence[str], stages: int, replicas: tuple[int, ...], schedule: Schedule) -> list[str]:
    """The device of each stage's replicas, in order. Raises ValueError for stages that the schedule cannot have."""
    count = schedule.devices(stages)
    if schedule.chunks == 1:
        return assign(devices, sum(replicas))
    if max(replicas) > 1:
        raise ValueError(
            f"A schedule of {schedule.chunks} stages a device has no replicas. Received: "
            f"replicas={replicas}. Try replicas=None, or a schedule of one stage a device."
        )
    on = assign(devices, count)
    return [on[schedule.place(stage, count)] for stage in range(stages)]


Compiling = TypeVar("Compiling", Stage, Inference)


def training_stages(
    chain: Chain,
    layout: Layout,
    scheme: Scheme,
    optimizer: keras.optimizers.Optimizer,
    loss: LossFunction,
    rows: int | None,
    microbatches: int,
    recompute: bool,
    is_shown: Callable[[], bool],
    summed: float = 0.0,
) -> list[list[Stage]]:
    """Every stage's replicas, each on its device and with its kernels, those of the last stage with the loss.

    Args:
        chain: the model's blocks.
        layout: which is decided.
        scheme: that says by which weights a stage is trained.
        optimizer: of which every replica has a clone.
        loss: of the model's outputs.
        rows: those of a minibatch, None where they are not known.
        microbatches: how many a minibatch has.
        recompute: whether a stage keeps only its inputs.
        is_shown: whether a line says that XLA compiles, asked when it does: it compiles anew for other shapes, in calls
            of ``fit`` and ``evaluate`` that may be told otherwise.
        summed: the momentum by which replicas sum gradients before these are compressed, in place of the optimizer.
    """
    assert layout.compiled is not None
    losses = [*[None] * (layout.stages - 1), loss]
    halved = has_halves(scheme.schedule.order, scheme.schedule.devices(layout.stages), microbatches)
    segments = layout.segments(chain)
    groups = sharing([segment.trainable_variables for segment in segments])

    def rule(stage: int, first: int | None = None) -> UpdateRule:
        return scheme.rule(stage, layout.stages, microbatches, first)

    built = [
        [
            Stage(
                segment,
                device,
                optimizer,
                losses[k],
                recompute,
                rule(k)._replace(momentum=not summed or len(on) == 1),
                division=Division(microbatches, len(on)),
                summed_rows=rows or 0 if microbatches > 1 and len(on) == 1 and not halved else 0,
                compiled=layout.compiled[k],
                shared=[
                    Shared(k, each.holders, each.weights, rule(k, each.first)) for each in groups if k in each.holders
                ],
            )
            for device in on
        ]
        for k, (segment, on) in enumerate(zip(segments, layout.devices_of_stages, strict=True))
    ]
    if scheme.replica_compression is not None:
        weights = chain.model.trainable_variables
        apart = embeddings(chain.model, weights)
        for k, stages in ((k, each) for k, each in enumerate(built) if len(each) > 1):
            later = {id(weight) for each in groups if k in each.holders[1:] for weight in each.weights}
            sums = ReplicaSums(scheme.replica_compression, stages, weights, apart, summed, k, later)
            for number, stage in enumerate(stages):
                stage.sums, stage.worker_slots = sums, sums.slots_of(number)
    return _shown(built, is_shown)


def inference_stages(chain: Chain, layout: Layout, is_shown: Callable[[], bool]) -> list[list[Inference]]:
    """Every stage's replicas for a pipeline that only runs forwards; the arguments as for ``training_stages``."""
    assert layout.compiled is not None
    of_stages = zip(layout.segments(chain), layout.devices_of_stages, layout.compiled, strict=True)
    built = [
        [Inference(segment, device, Division(1, len(on)), by_xla) for device in on] for segment, on, by_xla in of_stages
    ]
    return _shown(built, is_shown)


def _shown(stages: list[list[Compiling]], is_shown: Callable[[], bool]) -> list[list[Compiling]]:
    for stage in (stage for replicas in stages for stage in replicas):
        stage.show_compiling(is_shown)
    return stages


class OptimizedStages:
    """Every stage's replicas, and the optimizers at work in them.

    Args:
        stages: the replicas of every stage in order.
        weights: all that the stages train, in the model's order.
    """

    def __init__(self, stages: Sequence[list[Stage]] = (), weights: Sequence[keras.Variable] = ()) -> None:
        self.replicas, self._weights = list(stages), weights
        self._parts = [part for replicas in self.replicas for stage in replicas for part in stage.parts()]

    @property
    def first(self) -> list[Stage]:
        """The first replica of every stage."""
        return [stage for stage, *_ in self.replicas]

    def traced(self) -> None:
        """Let every stage know which weights gradients reach in all of them."""
        reached = [variable for stage in self.first for variable in stage.reached]
        for stage in (stage for replicas in self.replicas for stage in replicas):
            stage.learn_reached(reached)

    def adopt_from(self, optimizer: keras.optimizers.Optimizer) -> None:
        """What has been set in the compiled optimizer since it was at work, the stages take over; see ``adopt``."""
        adopt(stepping(optimizer), self._weights, self._parts)
        build_scale(optimizer, self._weights)

    def go_on_from(self, others: OptimizedStages) -> None:
        """Take over the slots of others, for weights that both train."""
        gathered = {(id(slot.weight), slot.kind): slot.variable for slot in others.slots()}
        for slot in self.slots():
            if (id(slot.weight), slot.kind) in gathered:  # else its layer was frozen
                slot.variable.assign(gathered[id(slot.weight), slot.kind])

    def slots(self) -> Iterator[Slot]:
        """What all optimizers have gathered, by the model's own variables."""
        return (slot for replicas in self.replicas for stage in replicas for slot in stage.slots())

    def shared(self) -> Iterator[list[Any]]:
        """What each optimizer has gathered that is of no single weight."""
        return (part.shared for part in self._parts)
