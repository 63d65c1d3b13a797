"""What a run is told, and what it comes to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.variants import Variant
from pipetrain.logs import counted
from pipetrain.schemes.coded_reduce import checked_tree
from pipetrain.schemes.options import (
    DEFAULT_POLICY,
    OF_PIPELINES,
    AnyScheme,
    owners,
    splits,
    with_horizon,
    with_options,
)
from pipetrain.schemes.scheme import Scheme
from pipetrain.schemes.table import AUTO, CODED, HORIZONS, PIPELINES, UNCUT, has, takes
from pipetrain.schemes.text_form import chosen

CHECKPOINTS = "checkpoints"  # the folder, within a run's
# Options of some schemes that are no policies
OWN = ("grid", "order", *OF_PIPELINES, "synchrony", "topology", "servers", "allow")
OF_TREE = {"children": "children", "depth": "tree_depth", "stragglers": "stragglers"}  # as settings call these


@dataclass(frozen=True)
class Settings:
    """What decides a run's result."""

    scheme: str
    model: str
    dataset: str
    stages: int
    batch_size: int
    steps: int
    learning_rate: float
    momentum: float
    eval_every: int
    seed: int
    microbatches: int | None
    size: dict[str, int]
    checkpoint_every: int = 0
    optimizer: str = "momentum"
    horizon: str | float = HORIZONS[0]
    spike_compensation: bool = False
    rescale_steps: int | None = None
    stretch_momentum: bool | str = "auto"
    grid: Sequence[int] | None = None
    order: str | None = None
    compression: str | None = None
    replica_compression: str | None = None
    synchrony: str | None = None
    topology: str | None = None
    servers: int | None = None
    allow: str | None = None
    children: int = 3
    tree_depth: int = 1
    stragglers: int = 1
    file: str | None = None  # that names the scheme: FILE.csv, or FILE.py:NAME
    replicas: Sequence[int] | None = None  # devices of each stage, of schemes whose stages may have several

    @property
    def way(self) -> str | Scheme:
        """The scheme, that of its file if it has one. Raises ValueError where the file has none, or another one now."""
        if self.file is None:
            return self.scheme
        found = chosen(self.file)
        if str(found) != self.scheme:
            raise ValueError(
                f"The scheme of the file has another name now. Received: {self.file!r} with {found}, for a run of "
                f"{self.scheme}. Try the name that it had."
            )
        return found

    @property
    def tree(self) -> dict[str, int]:
        """The arguments of a tree of workers, for a scheme that has one."""
        return {name: getattr(self, own) for name, own in OF_TREE.items()} if self.scheme == CODED else {}

    @property
    def scheme_with_options(self) -> AnyScheme:
        """What ``PipelineModel`` is to train by. Raises ValueError for options that the scheme does not have."""
        return with_options(self.way, **self.tree, **{name: getattr(self, name) for name in (*DEFAULT_POLICY, *OWN)})

    @property
    def has_replicas(self) -> bool:
        """Whether stages of this scheme may have several devices each: those of pipelines with one stage a device."""
        if self.file is None and (self.scheme in UNCUT or self.scheme == AUTO):
            return False
        way = self.way
        return (way if isinstance(way, Scheme) else PIPELINES[way]).schedule.chunks == 1

    @property
    def devices(self) -> int:
        """On how many it trains: one for each stage or as many as its replicas, or one for each worker of a tree."""
        if self.tree:
            return checked_tree(**self.tree).workers
        return sum(self.replicas) if self.replicas else self.stages

    @property
    def layout(self) -> dict[str, Any]:
        """The arguments of ``PipelineModel`` that say where it trains.

        Schemes whose stages cannot have several devices have as many devices, or stages, in all.
        """
        if self.tree or self.scheme == AUTO:
            return {}
        if self.replicas and self.has_replicas:
            return {"stages": len(self.replicas), "replicas": tuple(self.replicas)}
        return {"stages": self.devices}

    @property
    def label(self) -> str:
        """The scheme, with its horizon and microbatches where these are given: ``spectrain/target/M=2``."""
        return str(Variant(self.scheme, self.horizon, self.microbatches, self.file))


@dataclass(frozen=True)
class Summary:
    """What a run came to; ``diverged_at`` is the step of the first loss that was not finite, or None."""

    scheme: str
    model: str
    dataset: str
    stages: int
    batch_size: int
    steps: int
    samples_per_second: float | None
    min_train_loss: float | None
    min_val_loss: float | None
    max_val_accuracy: float | None
    peak_memory_bytes: int
    diverged_at: int | None
    taken: dict[str, Any] | None = None  # by auto: the arguments of PipelineModel
    reason: str | None = None  # why


def described(settings: Settings) -> str:
    """How many stages, and on how many devices each where these are several."""
    stages = counted(settings.layout.get("stages", settings.devices), "stage")
    if not (settings.replicas and settings.has_replicas):
        return stages
    return f"{stages} on {'-'.join(map(str, settings.replicas))} devices"


def microbatches_for(
    scheme: str | Scheme, schemes: Iterable[str | Scheme], microbatches: int | None, horizon: str | float = HORIZONS[0]
) -> int | None:
    """Those of this scheme in a run of several: none where it does not split minibatches and another one does."""
    splitting = [name for name in schemes if splits(with_horizon(name, horizon))]
    return microbatches if scheme in splitting or not splitting else None


def options_of(scheme: str | Scheme, given: Mapping[str, Any]) -> dict[str, Any]:
    """The given options as far as this scheme has them, in a run of several; the defaults of the others."""

    def is_had(name: str, value: Any) -> bool:
        if name in OWN:
            return str(scheme) in owners(name)
        return takes(scheme, value) if name == "horizon" else has(scheme, name)

    return {name: value if is_had(name, value) else DEFAULT_POLICY.get(name) for name, value in given.items()}
