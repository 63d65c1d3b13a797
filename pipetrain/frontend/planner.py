"""What is measured and predicted of a model in stages: its profile, where it is cut, and other ways to train it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import keras

from pipetrain.cluster.bandwidth import with_processors
from pipetrain.cluster.connection import place
from pipetrain.compute.cores import is_remote
from pipetrain.compute.graph.blocks import Chain, cut_points
from pipetrain.compute.graph.inputs import Shapes, checked_shapes, shapes_of_model
from pipetrain.compute.processor import left_out
from pipetrain.compute.profiling.operation_count import is_little
from pipetrain.compute.profiling.profiler import cached_profile, with_codings, with_steps
from pipetrain.frontend.input_data import DEFAULT_ROWS
from pipetrain.frontend.layout import KeptLayout, Layout, described_for
from pipetrain.plan.choice import Explanation
from pipetrain.plan.cluster import Cluster
from pipetrain.plan.memory import Training
from pipetrain.plan.partition import partition, plan
from pipetrain.plan.profile import Profile
from pipetrain.plan.stages import Partition
from pipetrain.schemes.compression import Compression
from pipetrain.schemes.options import AnyScheme, compressions_of, name_of
from pipetrain.schemes.table import UNCUT
from pipetrain.simulation.every_way import Chooser, PipelineLayout


class Planner:
    """Decides what the arguments of a ``PipelineModel`` leave open of its layout, by a profile of the model.

    Args:
        chain: the model's blocks.
        layout: of the stages, as far as the arguments tell.
        training: how they are trained.
        given: the ``Partition`` that is given, if one is.
        memory_bytes: what a device holds, to which the cut keeps where that is open; None for what the devices have.
        compared_on: the devices on which other ways are compared with this one; by default its own.

    ``layout`` is what is decided by now, ``training`` with what ``compile`` has told. ``shapes`` are those of the
    inputs, as far as anything has told what the model leaves open; None if nothing has. ``verbose`` is whether work
    that takes long is shown.
    """

    def __init__(
        self,
        chain: Chain,
        layout: Layout,
        training: Training,
        given: Partition | None = None,
        memory_bytes: int | None = None,
        compared_on: Sequence[str] = (),
    ) -> None:
        self.chain, self.training, self.verbose = chain, training, True
        self.shapes = shapes_of_model(chain.model)
        self._is_cut = layout.ends is not None
        self._given = self._partition = given
        self._memory_bytes, self._compared_on = memory_bytes, list(compared_on)
        self.layout = layout._replace(compiled=self._kernels(layout.stages))
        self._optimizer: keras.optimizers.Optimizer | None = None
        self._for_evaluation: dict[bool | str, Layout] = {}  # by what was asked of the kernels

    def _kernels(self, stages: int) -> tuple[bool, ...] | None:
        """Of each stage, whether XLA compiles it; None where a profile has to tell."""
        if self.training.jit_compile != "auto":
            return (self.training.jit_compile is True,) * stages
        if self._partition is not None:
            return _kernels_of(self._partition)
        return (False,) * stages if self.training.kernels(stages) is False else None

    def learn_training(self, training: Training, optimizer: keras.optimizers.Optimizer) -> None:
        """What ``compile`` tells of it, and what makes its steps.

        Kernels that are asked for anew are open again; where it is cut stays.
        """
        is_new = training.jit_compile != self.training.jit_compile
        self.training, self._optimizer = training, optimizer
        if is_new:
            self._partition = self._given
            self.layout = self.layout._replace(compiled=self._kernels(self.layout.stages))

    def learn_shapes(self, shapes: Shapes | None) -> None:
        """What the inputs are like, if something tells."""
        self.shapes = shapes or self.shapes

    def ask(self, input_shapes: Any) -> None:
        """What the user says they are like. Raises ValueError for what they cannot be."""
        if input_shapes is not None:
            self.shapes = checked_shapes(self.chain.model, input_shapes)

    @property
    def planned(self) -> Partition | None:
        """The plan of the stages, given or made from a profile; None where nothing was measured."""
        return self._partition

    @property
    def can_decide(self) -> bool:
        """Whether the layout is decided, or what is known of the inputs is enough to decide on it."""
        return self.shapes is not None or self.layout.is_decided

    def decided(self, rows: int | None) -> Layout:
        """The layout for minibatches of so many rows, None where that is not known; what is open, a profile decides.

        Where the cut is given and a minibatch is little work, nothing is measured, and nothing compiled.
        """
        batch_size = rows or DEFAULT_ROWS
        if self.layout.ends is not None and self.layout.compiled is None and is_little(self.chain, batch_size):
            self.layout = self.layout._replace(compiled=(False,) * self.layout.stages)
        if not self.layout.is_decided:
            self.partition(batch_size, self.verbose)
        return self.layout

    def adopt(self, kept: KeptLayout) -> bool:
        """Take over another run's cut and kernels where nothing but a profile has decided on them; whether new."""
        layout = self.layout
        is_new = not self._is_cut and len(kept.ends) == layout.stages and kept.ends != layout.ends
        if is_new:
            self._partition = None
            self.layout = layout = layout._replace(ends=kept.ends, compiled=self._kernels(layout.stages))
        is_open = self.training.jit_compile == "auto" and len(kept.compiled) == layout.stages
        if is_open and kept.ends == layout.ends and kept.compiled != layout.compiled:
            self.layout, is_new = layout._replace(compiled=kept.compiled), True
        return is_new

    def about(self) -> dict[str, Any]:
        """Cut and kernels, as far as they are decided, replicas, and the inputs' shapes, for a checkpoint."""
        return {
            "ends": list(self.layout.ends or ()),
            "compiled": list(self.layout.compiled or ()),
            "replicas": list(self.layout.replicas),
            "input_shapes": self.shapes,
        }

    def partition(self, batch_size: int, verbose: bool = False) -> Partition:
        """The cut of the model with the kernels of each stage; profiles it at this batch size where either is open.

        It does so too where the stages run other kernels than those with which a partition was planned. That is shown
        if it is to be ``verbose``, unless a ``fit`` with ``verbose=0`` is under way.
        """
        found, verbose = self._partition, verbose and self.verbose
        if found is None:
            found = self._decide(self._measured(batch_size, verbose))
        if _kernels_of(found) != self.layout.compiled:
            found = self._decide(self._measured(batch_size, verbose))
        return found

    def _decide(self, cut: Partition) -> Partition:
        ends, compiled = self.layout.ends or self._ends_of(cut), self.layout.compiled or _kernels_of(cut)
        self._partition, self.layout = cut, self.layout._replace(ends=ends, compiled=compiled)
        return cut

    def _ends_of(self, cut: Partition) -> tuple[int, ...]:
        return tuple(cut_points(self.chain.blocks, cut.cuts))

    def _measured(self, batch_size: int, verbose: bool, shapes: Shapes | None = None) -> Partition:
        measured, cluster, training = self._profile(batch_size, verbose, shapes), self._cluster, self.training
        ends, replicas = self.layout.ends, self.layout.replicas
        if ends is not None and (len(ends) > 1 or self._partition is not None):
            return plan(measured, ends, cluster, replicas, training, self.layout.compiled)
        devices = training.chosen.schedule.devices(sum(replicas))
        return partition(measured, devices, cluster, replicas=replicas, training=training)

    def layout_for_evaluation(self, shapes: Shapes) -> Layout:
        """The one that is decided; else what a profile for such inputs would decide, and nothing is decided by that."""
        layout, asked = self.layout, self.training.jit_compile
        if layout.ends is not None:
            return layout._replace(compiled=layout.compiled or (False,) * layout.stages)
        if asked not in self._for_evaluation:
            cut = self._measured(DEFAULT_ROWS, self.verbose, shapes)
            self._for_evaluation[asked] = layout._replace(ends=self._ends_of(cut), compiled=_kernels_of(cut))
        return self._for_evaluation[asked]

    def profile(self, batch_size: int, parts: int, compressions: Iterable[str | Compression] = ()) -> Profile:
        """The model's blocks for such a minibatch in so many parts, measured with the rows of one if need be.

        With what these compressions take, too.
        """
        measured = self._profile(batch_size, self.verbose, microbatches=parts)
        device = self.layout.devices[0]
        return with_codings(measured, compressions, device, place(device))

    def _profile(
        self, batch_size: int, verbose: bool, shapes: Shapes | None = None, microbatches: int | None = None
    ) -> Profile:
        """Measured with the rows of the microbatches that the training has, or of so many."""
        pieces = min(microbatches or self.training.microbatches, batch_size)
        shapes, device = shapes or self.shapes or checked_shapes(self.chain.model, None), self.layout.devices[0]
        with_xla = self.training.jit_compile is not False
        found = cached_profile(self.chain, batch_size, shapes, device, verbose, place(device), with_xla, pieces)
        found = with_steps(found, self.chain, self._optimizer, device, place(device))
        return with_codings(found, compressions_of(self.training.scheme), device, place(device))

    def explanation(self, batch_size: int, scheme: AnyScheme) -> Explanation:
        """A text: the cut of the model, and every way to train it on as many devices, this scheme among them.

        All is predicted from the same profiles as ``scheme="auto"`` chooses by.
        """
        if self.layout.ends is None:
            self.partition(batch_size, self.verbose)
        cluster = with_processors(self._cluster, self._devices)
        devices = len(self._compared_on) or self.training.chosen.schedule.devices(sum(self.layout.replicas))
        sent = compressions_of(scheme)
        whole = self.profile(batch_size, 1, sent)
        pieces = self.profile(batch_size, devices, sent) if 1 < devices <= batch_size else None
        mirrored = not any(map(is_remote, self._devices))
        every = Chooser(whole, devices, cluster, self.training, pieces, mirrored=mirrored)
        own = every
        if name_of(scheme) not in UNCUT:
            layout = PipelineLayout(self.layout.replicas, self.layout.ends)
            own = Chooser(whole, devices, cluster, self.training, pieces, mirrored=mirrored, layout=layout)
        way, cut = own.of(scheme, self.training.microbatches)
        choice = every.choice((way, cut))
        shown = self._given if self._given is not None and self._given.batch_size == batch_size else cut
        return choice.explained(shown, left_out())

    @property
    def _cluster(self) -> Cluster:
        """How the devices are joined, and what each may hold."""
        return described_for(self.chain.model, self._devices, self._memory_bytes)

    @property
    def _devices(self) -> Sequence[str]:
        """Those on which ways to train are compared: all that there are, or those of the layout."""
        return self._compared_on or self.layout.devices


def _kernels_of(cut: Partition) -> tuple[bool, ...]:
    return tuple(stage.compiled for stage in cut.stages)
