"""How a model is laid out: its blocks, where it is cut, and the device of each stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import keras

from pipetrain.cluster.connection import place
from pipetrain.compute.cores import is_remote
from pipetrain.compute.functions.inference import Inference
from pipetrain.compute.functions.stage import Stage
from pipetrain.compute.functions.stage_function import LossFunction
from pipetrain.compute.functions.state import Division
from pipetrain.compute.functions.weight_group import Shared
from pipetrain.compute.graph.blocks import Chain
from pipetrain.compute.graph.cuts import cut_points, why_together
from pipetrain.compute.graph.input_shapes import Shapes, checked_shapes, shapes_of_model
from pipetrain.compute.graph.segment import Segment
from pipetrain.compute.graph.sharing import sharing
from pipetrain.compute.onednn import left_out
from pipetrain.compute.profiling.operation_count import estimated_s, is_little
from pipetrain.compute.profiling.profile_cache import cached_profile
from pipetrain.frontend.attributes import known
from pipetrain.frontend.device_choice import assign, described
from pipetrain.frontend.input_data import DEFAULT_ROWS
from pipetrain.frontend.kernel_choice import KernelChoice
from pipetrain.plan.cluster import Cluster
from pipetrain.plan.memory import Training
from pipetrain.plan.partition import partition, plan
from pipetrain.plan.profile import Profile
from pipetrain.plan.stages import DEFAULT_TRAINING, Partition
from pipetrain.plan.text_table import counted
from pipetrain.schemes.arguments import is_count
from pipetrain.schemes.options import AnyScheme, name_of
from pipetrain.schemes.schedules import Schedule, has_halves
from pipetrain.schemes.scheme import Scheme, UpdateRule
from pipetrain.schemes.table import ONE_FORWARD_ONE_BACKWARD, UNCUT
from pipetrain.simulation.every_way import Chooser, PipelineLayout

Compiling = TypeVar("Compiling", Stage, Inference)

CALL_S, MOST_AT_ONCE = 0.03, 8  # of functions that have several minibatches: seconds, and how many
MOST_STEPS = 32  # minibatches of a call where they are asked for: more take many seconds to trace


class Decision(NamedTuple):
    """Where a model is cut, by the number of blocks up to the end of each stage, and which stages XLA compiles."""

    ends: list[int]
    compiled: list[bool]


class Placement:
    """The stages of a model, by number, by cuts or by partition.

    Args:
        model: a Sequential or Functional model.
        stages: their number, a ``Partition`` of this model, or None for one per device.
        cuts: the last layer of every stage but the final one, instead of ``stages``.
        devices: full TensorFlow device names.
        replicas: how many devices each stage has; None for those of a ``Partition``, or one.
        schedule: how many stages a device has, and which.
        training: how it is trained in so many stages, which decides on the memory that they need.
        memory_bytes: what a device holds, to which the cut keeps where that is open; None for no limit.

    ``shapes`` are those of the inputs, as far as anything has told what the model leaves open; None if nothing has.
    ``verbose`` is whether work that takes long is shown.

    Raises:
        ValueError, TypeError: for a model whose layers cannot be seen, for more stages than blocks, for cuts or a
            partition that are not this model's.
    """

    def __init__(
        self,
        model: keras.Model,
        stages: int | Partition | None,
        cuts: Sequence[str] | None,
        devices: Sequence[str],
        replicas: Sequence[int] | None = None,
        schedule: Schedule = ONE_FORWARD_ONE_BACKWARD,
        training: Callable[[int], Training] = lambda stages: DEFAULT_TRAINING,
        memory_bytes: int | None = None,
    ) -> None:
        self.chain, self._schedule, self.verbose = Chain(model), schedule, True
        if not self.chain.blocks:
            raise ValueError(f"There is nothing to cut. Received: model={model.name!r} without layers. Try one with.")
        self.shapes = shapes_of_model(model)
        self._given = self._partition = stages if isinstance(stages, Partition) else None
        self._is_cut = False
        self._ends: list[int] | None = None
        if self._partition is not None:
            if cuts is not None:
                raise ValueError("Stages are given twice. Received: stages=Partition and cuts. Try one of them.")
            cuts = self._partition.cuts
        if cuts is not None:
            self._ends, self._is_cut = cut_points(self.chain.blocks, cuts), True
        if self._partition is not None and tuple(replicas or self._partition.replicas) != self._partition.replicas:
            raise ValueError(
                f"Replicas are given twice. Received: replicas={replicas!r}, a partition with those of "
                f"{self._partition.replicas}. Try leaving replicas out."
            )
        if self._partition is not None:
            replicas = self._partition.replicas
        if stages is None and isinstance(replicas, Sequence):
            stages = len(replicas)
        self.stages = len(self._ends) if self._ends else self._checked_count(stages, len(devices))
        if isinstance(stages, int) and stages != self.stages:
            raise ValueError(
                f"The cuts make {self.stages} stages. Received: stages={stages}, cuts={cuts!r}. Try leaving stages out."
            )
        self.training, self._kernels = training(self.stages), KernelChoice(self.stages)
        self._memory_bytes, self._compared_on = memory_bytes, list[str]()
        self._steps: int | None = None  # of a call, if that is asked
        self.replicas = _checked_replicas(replicas, self.stages)
        self._devices = self._assigned(devices)
        if memory_bytes is not None and self._schedule.chunks == 1 and len(devices) < sum(self.replicas):
            raise ValueError(
                "What several stages hold together on a device is not planned. Received: "
                f"memory_bytes={memory_bytes}, {sum(self.replicas)} stages and replicas, {len(devices)} devices. "
                "Try as many devices, or leaving memory_bytes out."
            )
        if self._partition is not None:  # which may have left some out, to begin a stage on the next host
            planned = [stage.device + n for stage in self._partition.stages for n in range(stage.replicas)]
            self._devices = [devices[n] for n in planned] if max(planned) < len(devices) else self._devices

    def _assigned(self, devices: Sequence[str]) -> list[str]:
        """The device of each stage's replicas, in order. Raises ValueError for stages that the schedule cannot have."""
        count = self._schedule.devices(self.stages)
        if self._schedule.chunks == 1:
            return assign(devices, sum(self.replicas))
        if max(self.replicas) > 1:
            raise ValueError(
                f"A schedule of {self._schedule.chunks} stages a device has no replicas. Received: "
                f"replicas={self.replicas}. Try replicas=None, or a schedule of one stage a device."
            )
        on = assign(devices, count)
        return [on[self._schedule.place(stage, count)] for stage in range(self.stages)]

    def adopt(self, ends: Sequence[int], compiled: Sequence[bool]) -> bool:
        """Take over another run's cuts and kernels where nothing but a profile has decided on them; whether new."""
        is_new = not self._is_cut and len(ends) == self.stages and list(ends) != self.ends
        if is_new:
            self._ends, self._partition = list(ends), None
            self._kernels.reopen()
        if list(ends) == (self.ends or []):
            self._ends = list(ends)
            is_new |= self._kernels.decide(compiled)
        return is_new

    def learn_optimizer(self, slots: int, gathers: bool) -> None:
        """How many variables the optimizer has for each weight, and whether it uses all gradients at once."""
        self.training = self.training._replace(slots=slots, gathers=gathers)

    def learn_steps(self, steps_per_execution: int | None) -> None:
        """How many minibatches a call is to have, if that is asked."""
        self._steps = steps_per_execution

    def learn_kernels(self, jit_compile: bool | str) -> None:
        """Whether XLA compiles the stages, or ``"auto"``: those that are faster so. Where it is cut stays."""
        if self._kernels.ask(jit_compile):
            self.training = self.training._replace(jit_compile=jit_compile)
            self._ends = self.ends
            self._partition = self._given

    def learn(self, shapes: Shapes | None) -> None:
        """What the inputs are like, if something tells."""
        self.shapes = shapes or self.shapes

    def ask(self, input_shapes: Any) -> None:
        """What the user says they are like. Raises ValueError for what they cannot be."""
        if input_shapes is not None:
            self.shapes = checked_shapes(self.chain.model, input_shapes)

    @property
    def can_build(self) -> bool:
        """Whether cut and kernels are decided, or what is known of the inputs is enough to decide on them."""
        return self.shapes is not None or (self.ends is not None and self.decided_kernels is not None)

    def about(self) -> dict[str, Any]:
        """Cut and kernels, as far as they are decided, replicas, and the inputs' shapes, for a checkpoint."""
        return {
            "ends": self.ends or [],
            "compiled": self.decided_kernels or [],
            "replicas": list(self.replicas),
            "input_shapes": self.shapes,
        }

    @property
    def distinct_devices(self) -> list[str]:
        """The devices in use, each once."""
        return list(dict.fromkeys(self._devices))

    @property
    def stages_on(self) -> dict[str, list[int]]:
        """The stages on every device in use."""
        found: dict[str, list[int]] = {device: [] for device in self._devices}
        numbers = (stage for stage, count in enumerate(self.replicas) for _ in range(count))
        for stage, device in zip(numbers, self._devices, strict=True):
            found[device].append(stage)
        return found

    def _checked_count(self, stages: object, devices: int) -> int:
        blocks = len(self.chain.blocks)
        chunks = self._schedule.chunks
        if blocks < chunks:
            raise ValueError(
                f"The schedule has {chunks} stages on each device, and the model {self.chain.model.name!r} only "
                f"{counted(blocks, 'layer')} to make stages of{why_together(self.chain.blocks)}. Received: "
                f"stages={stages!r}. Try a schedule of one stage a device, such as scheme='1f1b'."
            )
        count = max(1, min(devices, blocks // chunks)) * chunks if stages is None else stages
        if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= blocks:
            if blocks == 1:
                raise ValueError(
                    f"The model {self.chain.model.name!r} can only be one stage{why_together(self.chain.blocks)}. "
                    f"Received: stages={stages!r}. Try stages=1, or a model that has layers to cut between."
                )
            raise ValueError(
                f"The model {self.chain.model.name!r} has {blocks} layers, each in one stage"
                f"{why_together(self.chain.blocks)}. Received: stages={stages!r}. Try a number from 1 to {blocks}."
            )
        return count

    def compare_on(self, devices: Sequence[str], memory_bytes: int | None) -> None:
        """Other ways are compared on these devices, with so much memory each: those among which this one was chosen."""
        self._compared_on, self._memory_bytes = list(devices), memory_bytes

    def explanation(self, batch_size: int, scheme: AnyScheme) -> str:
        """A text: the cut of the model, and every way to train it on as many devices, this scheme among them.

        All is predicted from the same profiles as ``scheme="auto"`` chooses by.
        """
        if self.ends is None:
            self.partition(batch_size, self.verbose)
        devices = len(self._compared_on) or self._schedule.devices(sum(self.replicas))
        whole = self._profile(batch_size, self.verbose, microbatches=1)
        pieces = self._profile(batch_size, self.verbose, microbatches=devices) if 1 < devices <= batch_size else None
        mirrored = not any(map(is_remote, self._compared_on or self._devices))
        every = Chooser(whole, devices, self._cluster, self.training, pieces, mirrored=mirrored)
        own = every
        if name_of(scheme) not in UNCUT:
            layout = PipelineLayout(self.replicas, self.ends)
            own = Chooser(whole, devices, self._cluster, self.training, pieces, mirrored=mirrored, layout=layout)
        way, cut = own.of(scheme, self.training.microbatches)
        choice = every.choice((way, cut))
        shown = self._given if self._given is not None and self._given.batch_size == batch_size else cut
        return "\n\n".join(filter(None, [shown.text(choice.one_s), str(choice), left_out()]))

    @property
    def _cluster(self) -> Cluster:
        """How the devices are joined, and what each may hold."""
        return replace(described(self._compared_on or self._devices), memory_bytes=self._memory_bytes)

    def _profile(
        self, batch_size: int, verbose: bool, shapes: Shapes | None = None, microbatches: int | None = None
    ) -> Profile:
        """Measured with the rows of the microbatches that the training has, or of so many."""
        pieces = min(microbatches or self.training.microbatches, batch_size)
        shapes, device = shapes or self.shapes or checked_shapes(self.chain.model, None), self._devices[0]
        with_xla = self._kernels.asked is not False
        return cached_profile(self.chain, batch_size, shapes, device, verbose, place(device), with_xla, pieces)

    def partition(self, batch_size: int, verbose: bool = False) -> Partition:
        """The cut of the model with the kernels of each stage; profiles it at this batch size where either is open.

        It does so too where the stages run other kernels than those with which a partition was planned. That is shown
        if it is to be ``verbose``, unless a ``fit`` with ``verbose=0`` is under way.
        """
        verbose = verbose and self.verbose
        if self._partition is None:
            self._partition = self._measured(batch_size, verbose)
        if [stage.compiled for stage in self._partition.stages] != self.decided_kernels:
            self._partition = self._measured(batch_size, verbose)
        return self._partition

    def _measured(self, batch_size: int, verbose: bool, shapes: Shapes | None = None) -> Partition:
        measured = self._profile(batch_size, verbose, shapes)
        cluster, training = self._cluster, self.training
        ends = self._ends if self._partition is None else self.ends
        if ends:
            return plan(measured, ends, cluster, self.replicas, training, self.decided_kernels)
        devices = self._schedule.devices(sum(self.replicas))
        return partition(measured, devices, cluster, replicas=self.replicas, training=training)

    @property
    def ends(self) -> list[int] | None:
        """The number of blocks up to the end of each stage; None if nothing has decided the cut yet."""
        if self._ends is None and self.stages == 1:
            return [len(self.chain.blocks)]
        if self._ends is None and self._partition is not None:
            return cut_points(self.chain.blocks, self._partition.cuts)
        return self._ends

    @property
    def decided(self) -> Decision | None:
        """Cut and kernels, those of TensorFlow where nothing has decided on kernels; None while the cut is open."""
        ends = self.ends
        return None if ends is None else Decision(ends, self.decided_kernels or [False] * self.stages)

    def measured(self, batch_size: int, shapes: Shapes) -> Decision:
        """What a profile at this batch size and for such inputs would decide; nothing is decided by that."""
        cut = self._measured(batch_size, self.verbose, shapes)
        return Decision(cut_points(self.chain.blocks, cut.cuts), [stage.compiled for stage in cut.stages])

    def _check_rows_first(self, ends: Sequence[int]) -> None:
        """ValueError if what a replicated stage gets or gives cannot be divided by rows."""
        if any(tensor.shape[:1] != (None,) for tensor in self.chain.specs(0)):
            return  # the number of rows is fixed: nothing to tell them by
        for n, end in enumerate(ends[:-1]):
            for tensor in self.chain.specs(end) if max(self.replicas[n : n + 2]) > 1 else ():
                if tensor.shape[:1] != (None,):
                    raise ValueError(
                        "What crosses from or to a replicated stage must have the batch first. Received: a tensor of "
                        f"shape {tuple(tensor.shape)} after {self.chain.blocks[end - 1].name!r}, replicas="
                        f"{self.replicas}. Try a cut somewhere else, or replicas=1 there."
                    )

    @property
    def decided_kernels(self) -> list[bool] | None:
        """Of each stage, whether XLA compiles it; None if nothing has decided it yet."""
        if self._kernels.compiled is None:
            if self._partition is not None:
                self._kernels.decide([stage.compiled for stage in self._partition.stages])
            elif self.training.kernels(self.stages) is False:  # whatever a profile would say
                self._kernels.decide([False] * self.stages)
        return self._kernels.compiled

    def _decide_kernels(self, batch_size: int) -> list[bool]:
        """Of each stage, whether XLA compiles it, decided by a profile at this batch size if that is open.

        Where the cut is given and a minibatch is little work, nothing is measured, and nothing compiled.
        """
        if self.decided_kernels is None:
            if self.ends is not None and is_little(self.chain, batch_size):
                self._kernels.decide([False] * self.stages)
            else:
                self.partition(batch_size, self.verbose)
        return known(self.decided_kernels)

    @property
    def asked_kernels(self) -> bool | str:
        """What ``compile(jit_compile=...)`` asks for."""
        return self._kernels.asked

    def build(
        self, rows: int | None, optimizer: keras.optimizers.Optimizer, loss: LossFunction, scheme: Scheme
    ) -> list[list[Stage]]:
        """Every stage's replicas, each on its device and with its kernels, those of the last with the loss.

        ``rows`` are those of a minibatch, None where they are not known.
        """
        batch_size = rows or DEFAULT_ROWS
        ends = self.ends or cut_points(self.chain.blocks, self.partition(batch_size, self.verbose).cuts)
        losses, recompute = [*[None] * (self.stages - 1), loss], self.training.recompute
        compiled, microbatches = self._decide_kernels(batch_size), self.training.microbatches
        halved = has_halves(scheme.schedule.order, scheme.schedule.devices(self.stages), microbatches)
        placed = self._placed(ends)
        groups = sharing([segment.trainable_variables for segment, _ in placed])

        def rule(stage: int, first: int | None = None) -> UpdateRule:
            return scheme.rule(stage, self.stages, microbatches, first)

        built = [
            [
                Stage(
                    segment,
                    device,
                    optimizer,
                    losses[k],
                    recompute,
                    rule(k),
                    division=Division(microbatches, len(on)),
                    summed_rows=rows or 0 if microbatches > 1 and len(on) == 1 and not halved else 0,
                    compiled=compiled[k],
                    shared=[
                        Shared(k, each.holders, each.weights, rule(k, each.first))
                        for each in groups
                        if k in each.holders
                    ],
                )
                for device in on
            ]
            for k, (segment, on) in enumerate(placed)
        ]
        return self._said(built)

    def whole(self) -> Segment:
        """All blocks as one layer, where the model is not cut."""
        ((segment, _),) = self._placed([len(self.chain.blocks)])
        return segment

    @property
    def replica_devices(self) -> list[str]:
        """The device of every replica, in order."""
        return list(self._devices)

    def minibatches_at_once(self, batch_size: int) -> int:
        """How many minibatches a call of a function has: what is asked, or as many as take a call's time, by estimate.

        What is measured would be another number each time, and learning rates take effect by it.
        """
        if self._steps is not None:
            return min(self._steps, MOST_STEPS)
        try:
            minibatch_s = estimated_s(self.chain, batch_size) / self.stages
        except (AttributeError, TypeError, ValueError):  # nothing is known of such layers
            return 1
        return max(1, min(MOST_AT_ONCE, int(CALL_S / max(minibatch_s, CALL_S / MOST_AT_ONCE))))

    def profile(self, batch_size: int, parts: int) -> Profile:
        """The model's blocks for such a minibatch in so many parts, measured with the rows of one if need be."""
        return self._profile(batch_size, self.verbose, microbatches=parts)

    def inferences(self, decision: Decision) -> list[list[Inference]]:
        """Every stage's replicas for a pipeline that only runs forwards, with this cut and these kernels."""
        built = [
            [Inference(segment, device, Division(1, len(on)), by_xla) for device in on]
            for (segment, on), by_xla in zip(self._placed(decision.ends), decision.compiled, strict=True)
        ]
        return self._said(built)

    def _said(self, stages: list[list[Compiling]]) -> list[list[Compiling]]:
        """The same stages; whether a line says that XLA compiles them is as for other work that takes long.

        XLA compiles anew for other shapes, in calls of ``fit`` and ``evaluate`` that may be told otherwise.
        """
        for stage in (stage for replicas in stages for stage in replicas):
            stage.show_compiling(lambda: self.verbose)
        return stages

    def _placed(self, ends: Sequence[int]) -> list[tuple[Segment, list[str]]]:
        """Every stage's blocks and the devices of its replicas."""
        self._check_rows_first(ends)
        devices = iter(self._devices)
        spans = zip([0, *ends[:-1]], ends, self.replicas, strict=True)
        return [(self.chain.segment(first, end), [next(devices) for _ in range(count)]) for first, end, count in spans]


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
