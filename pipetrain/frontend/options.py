"""The arguments of ``PipelineModel``, as they are handed on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from pipetrain.plan.stages import Partition
from pipetrain.schemes.options import AnyScheme, name_of, policy_of
from pipetrain.schemes.table import AUTO


class Options(NamedTuple):
    """How a model is to be trained: the arguments of ``PipelineModel``."""

    scheme: AnyScheme = AUTO
    stages: int | Partition | None = None
    cuts: Sequence[str] | None = None
    devices: Sequence[str] | None = None
    replicas: Sequence[int] | None = None
    microbatches: int | None = None
    recompute: bool = False
    memory_bytes: int | None = None

    @property
    def name(self) -> str:
        """The scheme's, or ``auto``."""
        return name_of(self.scheme)

    @property
    def layout(self) -> tuple[Any, Any, Any]:
        """What is given of a pipeline's layout."""
        return self.stages, self.cuts, self.replicas

    @property
    def policy(self) -> dict[str, Any]:
        """The options of ``schemes.table.scheme``, for a checkpoint too."""
        return policy_of(self.scheme)
