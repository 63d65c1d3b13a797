"""Schemes as objects that own their options: ``SpecTrain(horizon="target")``, ``CodedReduce(children=3)``.

Each is a frozen dataclass: its fields are the options that this scheme has, checked when it is made. Command lines take
the text of their help, and the kinds of values, from the same fields. The name alone means the default options.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache
from numbers import Real
from typing import Any, ClassVar

from pipetrain.schemes.arguments import checked_count
from pipetrain.schemes.coded_reduce import Tree, checked_tree
from pipetrain.schemes.compression import (
    COMPRESSIONS,
    CUTS,
    NONE,
    Compression,
    check_crossing,
    compression_of,
    crosses_cuts,
    summing,
)
from pipetrain.schemes.grid import Grid, check_grid
from pipetrain.schemes.scheme import Scheme
from pipetrain.schemes.synchrony import (
    Asynchronous,
    Gossip,
    Synchrony,
    check_synchrony,
    check_together,
    check_topology,
    synchrony_of,
    topology_of,
)
from pipetrain.schemes.table import (
    AUTO,
    CODED,
    EVERY_NAME,
    GRID,
    HORIZONS,
    PIPELINES,
    RECOMMENDED,
    SERVING,
    TRANSFERRING,
    UNCUT,
    check_name,
    check_options,
    chunked,
    takes,
)
from pipetrain.schemes.table import scheme as scheme_of_table
from pipetrain.schemes.table import uncompressed as uncompressed_scheme
from pipetrain.schemes.transfers.orders import AUTO as BEST_ORDER
from pipetrain.schemes.transfers.orders import ORDERS, check_order, check_servers
from pipetrain.schemes.transfers.plan import Plan

STALENESS = ("none", "predicted")  # what ``auto`` may allow of the weights that gradients are made with
# What ``auto`` may choose beside training that equals the unsplit model's: predicted weights, compressed gradients,
# workers that join their weights after some steps, workers that average theirs with neighbours', and gradients that are
# applied a step later.
ALLOWED = ("staleness", "compression", "local", "gossip", "stale")
OF_PIPELINES = ("compression", "replica_compression")  # what may be compressed of these
DEFAULT_POLICY = {  # the options of ``table.scheme``
    "horizon": HORIZONS[0],
    "spike_compensation": False,
    "rescale_steps": None,
    "stretch_momentum": "auto",
}


def described(about: str, **command_line: Any) -> dict[str, Any]:
    """Metadata of a scheme's field: the text of its help and the arguments of its option on a command line.

    ``by_default`` among these is what help says of the default where the value does not tell.
    """
    return {"about": about, **command_line}


SPIKES = "momentum makes up for what it would have done with a gradient until this is applied (arXiv 2003.11666)"
RESCALE = "learning rates are divided by the staleness, with an effect that fades over N steps (arXiv 1910.05124)"


@dataclass(frozen=True)
class SchemeOptions:
    """A scheme with its options. Raises ValueError, TypeError for values that it cannot have."""

    name: ClassVar[str]

    def __post_init__(self) -> None:
        """Raise ValueError, TypeError for values that the scheme cannot have; no compression has one value, None."""
        for each in OF_PIPELINES:
            if getattr(self, each, None) == NONE:
                object.__setattr__(self, each, None)
        self._check()

    def _check(self) -> None:
        pass

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.given.items())})"

    @property
    def scheme(self) -> Scheme:
        """The schedule and the policy, with these options. Raises ValueError for what is no pipeline."""
        return scheme_of_table(self.name)

    @property
    def given(self) -> dict[str, Any]:
        """The options that are not the default, by name."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {each.name: values[each.name] for each in fields(self) if values[each.name] != each.default}


def check_replica_compression(given: Any, scheme: str) -> None:
    """Raise ValueError, TypeError for no compression, and for a scheme without replicas; None is the default."""
    lacks = scheme in EVERY_NAME and scheme not in owners("replica_compression")
    if summing(given) is not None and lacks:
        raise ValueError(
            "Only pipelines of one stage a device have replicas, which sum gradients. Received: "
            f"replica_compression={given!r}, scheme={scheme!r}. Try leaving it out, or scheme='1f1b'."
        )


def check_compression(given: Any, scheme: str) -> None:
    """Raise ValueError, TypeError for no compression, and for a scheme that does not have it; None is the default."""
    if compression_of(given) is None or scheme in TRANSFERRING:
        return
    if scheme in UNCUT:
        raise ValueError(
            f"Only pipelines, {' and '.join(TRANSFERRING)} compress what they send. Received: compression={given!r}, "
            f"scheme={scheme!r}. Try leaving it out."
        )
    check_crossing(given, scheme)


@dataclass(frozen=True, repr=False, kw_only=True)
class PipelineOptions(SchemeOptions):
    """A pipeline, of which what crosses the cuts may be compressed."""

    compression: str | Compression | None = field(
        default=None,
        metadata=described(
            f"of activations and their gradients between stages ({', '.join(each.name for each in CUTS)}), also with "
            "a block's size, as in int8:64; the weights are then others than without",
            metavar="NAME[:VALUE]",
            by_default="none",
        ),
    )

    def _check(self) -> None:
        check_compression(self.compression, self.name)

    @property
    def scheme(self) -> Scheme:
        """The schedule and the policy, with these options."""
        return self._of_table()._replace(compression=compression_of(self.compression))

    def _of_table(self) -> Scheme:
        return scheme_of_table(self.name)


@dataclass(frozen=True, repr=False, kw_only=True)
class ReplicatedOptions(PipelineOptions):
    """A pipeline of one stage a device, which may have several devices: the gradients that these sum, too."""

    replica_compression: str | Compression | None = field(
        default=None,
        metadata=described(
            f"of the gradients that a stage's devices sum, where it has several ({', '.join(COMPRESSIONS)}), with the "
            "value of its first option; the weights are then others than without",
            metavar="NAME[:VALUE]",
            by_default="none",
        ),
    )

    def _check(self) -> None:
        super()._check()
        summing(self.replica_compression)

    @property
    def scheme(self) -> Scheme:
        """The schedule and the policy, with these options."""
        return super().scheme._replace(replica_compression=compression_of(self.replica_compression))


@dataclass(frozen=True, repr=False, kw_only=True)
class AsynchronousOptions(ReplicatedOptions):
    """A pipeline that never drains between minibatches."""

    def _check(self) -> None:
        super()._check()
        check_options(self.name, **self._policy())

    def _policy(self) -> dict[str, Any]:
        return {**DEFAULT_POLICY, **{name: getattr(self, name) for name in DEFAULT_POLICY if hasattr(self, name)}}

    def _of_table(self) -> Scheme:
        return scheme_of_table(self.name, **self.policy)

    @property
    def policy(self) -> dict[str, Any]:
        """All options of ``table.scheme``, with numbers that JSON can hold."""
        found = {name: value.item() if hasattr(value, "item") else value for name, value in self._policy().items()}
        horizon = found["horizon"]
        return found | {"horizon": horizon if isinstance(horizon, str) else float(horizon)}


@dataclass(frozen=True, repr=False, kw_only=True)
class Vanilla(AsynchronousOptions):
    """``vanilla``: an asynchronous pipeline whose forwards and backwards read the newest weights.

    Args:
        spike_compensation: a gradient with a staleness of D updates is applied as momentum would have applied it by
            then; for SGD with momentum. Source: Kosson et al. 2020 (arXiv 2003.11666).
        rescale_steps: learning rates are divided by the staleness of the gradient, with an effect that decreases to
            none over this many steps; where it is at most 1, nothing changes. Source: PipeMare (arXiv 1910.05124).
        compression: what becomes of activations and their gradients between stages: ``bfloat16``, ``float16``,
            ``int8`` or ``int4``, also with a block's size, ``"int8:64"``, or an object such as
            ``pipetrain.Int8(block=64)``, or one of your own. What has no gradients is sent as it is.
        replica_compression: what becomes of the gradients that the devices of a stage sum, where it has several: any
            of those that ``AllReduce`` has, such as ``int8``, ``top-k:0.01`` or ``pipetrain.PowerSGD(rank=4)``.
    """

    name: ClassVar[str] = "vanilla"
    spike_compensation: bool = field(default=False, metadata=described(SPIKES))
    rescale_steps: int | None = field(default=None, metadata=described(RESCALE, metavar="N"))


@dataclass(frozen=True, repr=False, kw_only=True)
class WeightStashing(Vanilla):
    """``weight-stashing``: a backward reads the version that its forward has read. Source: PipeDream (1806.03377).

    Options as those of ``Vanilla``.
    """

    name: ClassVar[str] = "weight-stashing"


@dataclass(frozen=True, repr=False, kw_only=True)
class VerticalSync(Vanilla):
    """``vertical-sync``: a minibatch reads one version at all stages. Source: PipeDream (arXiv 1806.03377).

    Options as those of ``Vanilla``.
    """

    name: ClassVar[str] = "vertical-sync"


@dataclass(frozen=True, repr=False, kw_only=True)
class SpikeCompensation(AsynchronousOptions):
    """``spike-compensation``: ``Vanilla(spike_compensation=True)``. Source: Kosson et al. 2020 (arXiv 2003.11666).

    Args:
        rescale_steps: as that of ``Vanilla``.
        compression: likewise.
        replica_compression: likewise.
    """

    name: ClassVar[str] = "spike-compensation"
    rescale_steps: int | None = field(default=None, metadata=described(RESCALE, metavar="N"))


@dataclass(frozen=True, repr=False, kw_only=True)
class SpecTrain(Vanilla):
    """``spectrain``: an asynchronous pipeline whose weights are predicted, ``W + s * v``. Source: arXiv 1809.02839.

    Args:
        horizon: how far it predicts: ``round-trip`` as the paper has it; ``local``, up to the minibatch's own backward,
            which reads the same predicted weights (kept until then); ``fitted``, as the paper, but with the multiple of
            the velocity that recently was nearest to the weights then reached at this stage; ``target``, to one version
            for all stages, forward and backward, with as many microbatches as wanted and never drained between
            minibatches.
        stretch_momentum: for ``target`` with fewer microbatches M than N stages: ``compile`` makes the stages' momentum
            longer, ``1-mu' = f * (1-mu)`` with ``f = 1.6 / (1 + (N-1)/M)`` if that is below 1, and multiplies learning
            rates by f where momentum sums gradients (SGD, RMSprop); predictions then reach half as far again.
            ``"auto"``: for SGD with momentum, Adam and other optimizers of Keras whose momentum is known; True:
            ValueError for others; False: never.
        spike_compensation: as that of ``Vanilla``.
        rescale_steps: likewise.
        compression: likewise.
        replica_compression: likewise.
    """

    name: ClassVar[str] = "spectrain"
    horizon: str = field(
        default="round-trip",
        metadata=described(
            f"how weights are predicted ({', '.join(HORIZONS)}): as the paper has it; up to the minibatch's own "
            "backward, which then reads the same predicted weights; by that multiple of the velocity that came nearest "
            "of late; or to one version for all stages",
            metavar="NAME",
        ),
    )
    stretch_momentum: bool | str = field(
        default="auto",
        metadata=described(
            "whether horizon target makes momentum longer, with fewer microbatches than stages", metavar="auto|yes|no"
        ),
    )


@dataclass(frozen=True, repr=False, kw_only=True)
class TwoBW(AsynchronousOptions):
    """``2bw``: one version for a minibatch's microbatches at all stages, that before the newest. Source: PipeDream-2BW.

    It is arXiv 2006.09503, section 3.1.

    Args:
        horizon: how many updates ahead of that version weights are predicted, 0 as published; 1.5 is recommended.
        spike_compensation: as that of ``Vanilla``.
        compression: likewise.
        replica_compression: likewise.
    """

    name: ClassVar[str] = "2bw"
    spike_compensation: bool = field(default=False, metadata=described(SPIKES))
    horizon: float = field(
        default=0,
        metadata=described(f"how many updates ahead weights are predicted, {RECOMMENDED} for example", metavar="X"),
    )

    def _policy(self) -> dict[str, Any]:
        published = isinstance(self.horizon, Real) and not isinstance(self.horizon, bool) and self.horizon == 0
        return {**super()._policy(), **({"horizon": HORIZONS[0]} if published else {})}


@dataclass(frozen=True, repr=False)
class GPipe(ReplicatedOptions):
    """``gpipe``: all forwards of a minibatch, then all backwards. Source: arXiv 1811.06965.

    Args:
        compression: as that of ``Vanilla``.
        replica_compression: likewise.
    """

    name: ClassVar[str] = "gpipe"


@dataclass(frozen=True, repr=False)
class OneFOneB(GPipe):
    """``1f1b``: one forward, one backward, in turns. Source: arXiv 2006.09503; options of ``GPipe``."""

    name: ClassVar[str] = "1f1b"


@dataclass(frozen=True, repr=False)
class ZBH1(GPipe):
    """``zb-h1``: backwards in halves, the memory of 1F1B. Source: arXiv 2401.10241; options of ``GPipe``."""

    name: ClassVar[str] = "zb-h1"


@dataclass(frozen=True, repr=False)
class ZBH2(GPipe):
    """``zb-h2``: backwards in halves, twice the memory of 1F1B. Source: arXiv 2401.10241; options of ``GPipe``."""

    name: ClassVar[str] = "zb-h2"


@dataclass(frozen=True, repr=False)
class ZBV(PipelineOptions):
    """``zb-v``: backwards in halves, two stages a device. Source: arXiv 2401.10241; ``compression`` as above."""

    name: ClassVar[str] = "zb-v"


@dataclass(frozen=True, repr=False)
class VHalf(PipelineOptions):
    """``v-half``: as ``zb-v``, with half the memory. Source: arXiv 2405.15362; ``compression`` as above."""

    name: ClassVar[str] = "v-half"


@dataclass(frozen=True, repr=False)
class VMin(PipelineOptions):
    """``v-min``: as ``zb-v``, with a third of the memory. Source: arXiv 2405.15362; ``compression`` as above."""

    name: ClassVar[str] = "v-min"


@dataclass(frozen=True, repr=False)
class Interleaved(PipelineOptions):
    """``interleaved``: 1F1B of several stages a device. Source: Megatron-LM (arXiv 2104.04473).

    Args:
        chunks: how many stages each device has.
        compression: as that of ``Vanilla``.
    """

    name: ClassVar[str] = "interleaved"
    chunks: int = field(default=2, metadata=described("stages on a device", metavar="N"))

    def _of_table(self) -> Scheme:
        return scheme_of_table(chunked(self.name, self.chunks))

    def _check(self) -> None:
        super()._check()
        chunked(self.name, self.chunks)


@dataclass(frozen=True, repr=False)
class LoopedBFS(Interleaved):
    """``looped-bfs``: several stages a device, each for all microbatches. Source: arXiv 2211.05953.

    Options as those of ``Interleaved``.
    """

    name: ClassVar[str] = "looped-bfs"


@dataclass(frozen=True, repr=False)
class TransferOptions(SchemeOptions):
    """Data parallelism whose transfers a plan orders, and whose gradients may be compressed on their way."""

    order: str | Plan = field(
        default="auto",
        metadata=described(
            "of the transfers",
            choices=(BEST_ORDER, *ORDERS),
            metavar="NAME",
            by_default="auto, the simplest within 3% of the fastest by simulation, and in training by trials",
        ),
    )
    compression: str | Compression | None = field(
        default=None,
        metadata=described(
            f"of gradients on their way ({', '.join(COMPRESSIONS)}), with the value of its first option, as in "
            "top-k:0.01; the weights are then others than without",
            metavar="NAME[:VALUE]",
            by_default="none",
        ),
    )

    def _check(self) -> None:
        check_order(self.order, self.name)
        compression_of(self.compression)


@dataclass(frozen=True, repr=False)
class AllReduce(TransferOptions):
    """``all-reduce``: the whole model on every device, gradients are summed for all.

    Args:
        order: of the transfers: ``auto``, the simplest that is about the fastest in trials of those that a profile and
            the measured links predict to be near it; ``none``, in whatever order they are ready; ``layerwise``, a
            message for each layer; ``tic`` or ``tac`` (TicTac, arXiv 1803.03288), ``ibatch`` (AAAI 2019), ``caramel``
            (arXiv 2004.14020); or a ``pipetrain.schemes.transfers.plan.Plan``. The weights are the same in every order,
            bitwise.
        compression: what becomes of gradients on their way: ``bfloat16``, ``float16``, ``int8``, ``int4``, ``sign``,
            ``top-k``, ``random-k`` or ``power-sgd``, also with a value, ``"top-k:0.001"``, or an object such as
            ``pipetrain.TopK(share=0.001)``. Every device sends its own gradients to all that need them.
        synchrony: ``synchronous``; or ``local``, ``"local:32"``, ``pipetrain.LocalSGD(steps=32)``: each worker updates
            weights of its own, and after so many steps all go on from one, with ``fragments=4`` a part of the layers
            at a time. What is sent then, and what is compressed, is by how much these differ from the weights before.
            Or ``stale``, ``"stale:1"``: gradients are sent and applied while the next step computes.
        topology: ``direct``, where each worker sends to all others; ``ring``, where it sends to the next one alone, of
            which sums are made part by part; or ``gossip``, ``"gossip:torus"``, ``pipetrain.Gossip(graph=...)``: each
            worker has weights of its own, which it averages with its neighbours' after every step, or after every so
            many with ``local``.
    """

    name: ClassVar[str] = "all-reduce"
    synchrony: str | Synchrony | None = field(
        default=None,
        metadata=described(
            "when workers join their weights: synchronous, in every step; local:STEPS, after so many of their own; or "
            "stale:1, while the next step computes",
            metavar="NAME[:NUMBER]",
            by_default="synchronous",
        ),
    )
    topology: str | Gossip | None = field(
        default=None,
        metadata=described(
            "who sends to whom: direct, each worker to all; ring, each to the next one; or gossip, gossip:torus, "
            "gossip:complete, each averages its weights with its neighbours'",
            metavar="NAME[:GRAPH]",
            by_default="direct",
        ),
    )

    def _check(self) -> None:
        super()._check()
        check_synchrony(self.synchrony, self.name)
        check_topology(self.topology, self.name)
        check_together(self.topology, self.synchrony, self.compression)


@dataclass(frozen=True, repr=False)
class ParameterServer(TransferOptions):
    """``parameter-server``: the weights and the optimizer's slots are on servers, the gradients come from all devices.

    Args:
        order: as that of ``AllReduce``, with ``push-pull``, where weights come back as soon as they are updated, in
            place of ``caramel``.
        compression: as that of ``AllReduce``; weights come back as they are.
        servers: on how many of the devices the weights and the optimizer's slots are, each layer's on one of them, so
            that each has about as many bytes; None: on all.
        synchrony: ``synchronous``; ``stale``, as that of ``AllReduce``; or ``asynchronous``, where every worker takes
            whole minibatches at its own pace, ``"asynchronous:3"``, ``pipetrain.Asynchronous(bound=3)``.
    """

    name: ClassVar[str] = SERVING
    servers: int | None = field(
        default=None, metadata=described("on how many of the devices the weights are", metavar="N", by_default="all")
    )
    synchrony: str | Synchrony | None = field(
        default=None,
        metadata=described(
            "when gradients are applied: synchronous, in their own step; stale:1, while the next one computes; or "
            "asynchronous, those of each worker when they are there",
            metavar="NAME[:NUMBER]",
            by_default="synchronous",
        ),
    )

    def _check(self) -> None:
        super()._check()
        check_servers(self.servers, self.name)
        check_synchrony(self.synchrony, self.name)
        check_together(None, self.synchrony, self.compression)
        if isinstance(synchrony_of(self.synchrony), Asynchronous) and self.order not in (BEST_ORDER, "none"):
            raise ValueError(
                "Workers that go at their own pace have no step in which transfers have an order. Received: "
                f"order={self.order!r}, synchrony={self.synchrony!r}. Try order='none'."
            )


@dataclass(frozen=True, repr=False)
class CodedReduce(SchemeOptions):
    """``coded-reduce``: data parallelism over a tree of workers that bears stragglers. Source: arXiv 1902.01981.

    Each of the ``n + ... + n^L`` workers is on a device of its own and has ``1 / sum_{l=1..L} (n/(s+1))^l`` of every
    minibatch's rows. The weights are those of the unsplit model.

    Args:
        children: n, how many children the root, which is this process, and each worker above the last level has.
        depth: L, of how many levels the tree is.
        stragglers: s, how many children of a parent may be late.
    """

    name: ClassVar[str] = CODED
    children: int = field(metadata=described("of every parent in the tree of workers", metavar="N"))
    depth: int = field(default=1, metadata=described("levels of the tree", metavar="L"))
    stragglers: int = field(
        default=1, metadata=described("children of a parent that may be late", metavar="S", least=0)
    )

    def _check(self) -> None:
        _ = self.tree

    @property
    def tree(self) -> Tree:
        """The tree of workers."""
        return checked_tree(self.children, self.depth, self.stragglers)


@dataclass(frozen=True, repr=False)
class Auto(SchemeOptions):
    """``auto``: the fastest way on the given devices, in a trial of those that are predicted to be near the fastest.

    Args:
        staleness: what it may choose: ``none``, training that equals the unsplit model's; or ``predicted``, pipelines
            that never drain, whose weights are predicted (``SpecTrain(horizon="target")``), too.
        allow: what else it may choose, a tuple or a text with commas: ``staleness``, which is ``predicted`` above;
            ``compression``, an all-reduce with compressed gradients, and pipelines whose cuts are crossed by 8 bits;
            ``local``, an all-reduce whose workers join their weights after 8 steps; ``gossip``, one whose workers
            average theirs with their neighbours' on a ring; ``stale``, one whose gradients are applied while the next
            step computes. Of the last four also two together, as far as these can be.
    """

    name: ClassVar[str] = AUTO
    staleness: str = field(
        default="none",
        metadata=described(
            "what may be taken: none, training that equals the unsplit model's, or pipelines with predicted "
            "weights too",
            choices=STALENESS,
        ),
    )
    allow: str | tuple[str, ...] = field(
        default=(),
        metadata=described(
            f"what else may be taken, with commas between: {', '.join(ALLOWED)}", metavar="NAMES", by_default="nothing"
        ),
    )

    def _check(self) -> None:
        _ = self.allowed

    @property
    def allowed(self) -> frozenset[str]:
        """What it may choose beside training that equals the unsplit model's."""
        return allowed(self.allow, self.staleness)


OPTIONS: dict[str, type[SchemeOptions]] = {
    each.name: each
    for each in (
        *(SpecTrain, TwoBW, Vanilla, WeightStashing, VerticalSync, SpikeCompensation, Interleaved, LoopedBFS),
        *(GPipe, OneFOneB, ZBH1, ZBH2, ZBV, VHalf, VMin),
        *(AllReduce, ParameterServer, CodedReduce, Auto),
    )
}
EVERY_OPTION = (*dict.fromkeys(each.name for kind in OPTIONS.values() for each in fields(kind)), "grid")

AnyScheme = str | Scheme | SchemeOptions | Grid  # what ``PipelineModel(scheme=...)`` takes


def name_of(scheme: AnyScheme) -> str:
    """The name of a scheme. Raises ValueError, TypeError for what is none."""
    if isinstance(scheme, type) and issubclass(scheme, SchemeOptions):
        raise TypeError(
            f"A scheme is an object. Received: scheme={scheme.__name__}, a class. "
            f"Try scheme=pipetrain.{scheme.__name__}()."
        )
    if isinstance(scheme, SchemeOptions):
        return scheme.name
    if isinstance(scheme, Grid):
        check_grid(scheme, GRID)
        return GRID
    return AUTO if scheme == AUTO else check_name(scheme)


@cache
def built(scheme: AnyScheme) -> Scheme:
    """The scheme itself, with its options. Raises ValueError for what is no pipeline."""
    if isinstance(scheme, SchemeOptions):
        return scheme.scheme
    return scheme_of_table(scheme if isinstance(scheme, Scheme) else name_of(scheme))


def with_horizon(scheme: str | Scheme, horizon: str | float) -> AnyScheme:
    """The scheme with this horizon, if it has it."""
    return with_options(scheme, horizon=horizon) if takes(scheme, horizon) else scheme


def splits(scheme: AnyScheme) -> bool:
    """Whether the scheme divides minibatches into microbatches."""
    return (isinstance(scheme, Scheme) or name_of(scheme) in PIPELINES) and built(scheme).splits


def check_microbatches(microbatches: Any, scheme: AnyScheme) -> None:
    """Refuse anything but None or a count, and several microbatches of a scheme that does not split minibatches."""
    if microbatches is None:
        return
    count = checked_count("microbatches", microbatches, "A batch has at least one microbatch", 4)
    if count > 1 and not splits(scheme):
        splitting = [each.name for each in PIPELINES.values() if each.splits]
        raise ValueError(
            f"This scheme does not split a minibatch. Received: microbatches={microbatches!r}, "
            f"scheme={name_of(scheme)!r}. Try leaving it out, or one of: {', '.join(splitting)}; "
            "or horizon='target' for spectrain."
        )


def policy_of(scheme: AnyScheme) -> dict[str, Any]:
    """What of a scheme's options decides on the weights, as JSON can hold it: of ``table.scheme``, and what is sent."""
    if isinstance(scheme, TransferOptions):
        sent: dict[str, Any] = {"compression": compression_of(scheme.compression)}
        if isinstance(scheme, AllReduce | ParameterServer):
            sent["synchrony"] = synchrony_of(scheme.synchrony)
        if isinstance(scheme, AllReduce):
            sent["topology"] = topology_of(scheme.topology)
        return {**DEFAULT_POLICY, **{name: str(each) for name, each in sent.items() if each is not None}}
    policy = scheme.policy if isinstance(scheme, AsynchronousOptions) else dict(DEFAULT_POLICY)
    found = {name: compression_of(getattr(scheme, name, None)) for name in OF_PIPELINES}
    return {**policy, **{name: str(each) for name, each in found.items() if each is not None}}


def scheduled(scheme: AnyScheme) -> str | Scheme:
    """What plans and schedules call the scheme: its name, or a ``Scheme``: one's own, or of so many stages a device."""
    if isinstance(scheme, Interleaved):
        return chunked(scheme.name, scheme.chunks)
    return scheme if isinstance(scheme, Scheme) else name_of(scheme)


def flat(scheme: AnyScheme, **others: Any) -> dict[str, Any]:
    """The scheme's name, its options that are not the default, and ``others``, for a line of text or a file."""
    if isinstance(scheme, Grid):
        return {"scheme": GRID, "grid": tuple(scheme[: 2 if scheme.layers is None else 3]), **others}
    given = scheme.given if isinstance(scheme, SchemeOptions) else {}
    plain = {name: str(each) if isinstance(each, Compression) else each for name, each in given.items()}
    return {"scheme": str(scheme), **plain, **others}


def owners(option: str) -> list[str]:
    """The names of the schemes that have an option of this name."""
    if option == "grid":
        return [GRID]
    return [name for name, kind in OPTIONS.items() if option in {each.name for each in fields(kind)}]


def options_of(scheme: AnyScheme) -> SchemeOptions:
    """The options of a scheme that has some, the defaults where it is a name. Raises ValueError for what is missing."""
    if isinstance(scheme, SchemeOptions):
        return scheme
    name = name_of(scheme)
    if name == CODED:
        _check_children({})
    return OPTIONS[name]()


def with_options(scheme: AnyScheme, **given: Any) -> AnyScheme:
    """The scheme with these options; None, and what is the default of ``table.scheme``, is as if it were left out.

    Raises ValueError, TypeError for an option that the scheme does not have, and for a value that it cannot have.
    """
    given = {name: value for name, value in given.items() if not _is_left_out(name, value)}
    if not given:
        return scheme
    if isinstance(scheme, SchemeOptions | Grid):
        remedy = "leaving them out"
        if isinstance(scheme, SchemeOptions):
            own = {option: value for option, value in given.items() if scheme.name in owners(option)}
            remedy = f"scheme={written(replace(scheme, **own))}"
        raise ValueError(
            f"A scheme that is an object has its options. Received: scheme={written(scheme)}, {keywords(given)}. "
            f"Try {remedy}."
        )
    name = name_of(scheme)
    check_owned(given, scheme)
    if isinstance(scheme, Scheme):
        sent: Any = {each: compression_of(given.pop(each, getattr(scheme, each))) for each in OF_PIPELINES}
        return scheme_of_table(scheme, **{**DEFAULT_POLICY, **given})._replace(**sent)
    given = {option: value for option, value in given.items() if name in owners(option)}  # others have no effect
    if not given:
        return scheme
    if name == CODED:
        _check_children(given)
    if name == GRID:
        grid = check_grid(given["grid"], GRID)
        return grid if isinstance(grid, Grid) else GRID  # of which the name alone is the automatic one
    return OPTIONS[name](**given)


def compressing(scheme: AnyScheme, **sent: str | Compression | None) -> AnyScheme:
    """The scheme with these compressions, see ``OF_PIPELINES``, as far as it is a pipeline that has none yet."""
    is_pipeline = isinstance(scheme, Scheme) or name_of(scheme) in PIPELINES
    mine = {name: compression_of(each) for name, each in sent.items()} if is_pipeline else {}
    wanted = {
        name: sent[name]
        for name, each in mine.items()
        if each is not None
        and (isinstance(scheme, Scheme) or name_of(scheme) in owners(name))
        and (isinstance(scheme, str) or getattr(scheme, name) is None)
    }
    if not wanted:
        return scheme
    return replace(scheme, **wanted) if isinstance(scheme, SchemeOptions) else with_options(scheme, **wanted)


def each_compressing(
    schemes: Sequence[AnyScheme],
    compression: str | Compression | None,
    replica_compression: str | Compression | None = None,
) -> list[AnyScheme]:
    """The schemes with these compressions; where others send gradients, cuts have none that is for these alone."""
    if any(name_of(each) in TRANSFERRING for each in schemes) and not crosses_cuts(compression_of(compression)):
        compression = None
    return [compressing(each, compression=compression, replica_compression=replica_compression) for each in schemes]


def compressions_of(scheme: AnyScheme) -> list[Compression]:
    """All that it compresses by."""
    found = [compression_of(getattr(scheme, name, None)) for name in OF_PIPELINES]
    return [each for each in found if each is not None]


def uncompressed(scheme: AnyScheme) -> AnyScheme:
    """The scheme, of which, if it is a pipeline, all arrives as it is sent."""
    if isinstance(scheme, PipelineOptions):
        return replace(scheme, **{each: None for each in OF_PIPELINES if scheme.name in owners(each)})
    return uncompressed_scheme(scheme) if isinstance(scheme, Scheme) else scheme


def without_sums(scheme: AnyScheme) -> AnyScheme:
    """The scheme, which compresses nothing that replicas sum."""
    if isinstance(scheme, ReplicatedOptions):
        return replace(scheme, replica_compression=None)
    return scheme._replace(replica_compression=None) if isinstance(scheme, Scheme) else scheme


def check_owned(given: Mapping[str, Any], *schemes: AnyScheme) -> None:
    """Raise ValueError, TypeError for an option, but None, that none of the schemes has, or with such a value."""
    given = {name: value for name, value in given.items() if not _is_left_out(name, value)}
    names = [name_of(scheme) for scheme in schemes]
    policy = {name: value for name, value in given.items() if name in DEFAULT_POLICY}
    for name, value in given.items():
        having = [each for each in names if each in owners(name)]
        _check_any(name, value, having or names[:1])
    for scheme in schemes if policy and len(schemes) == 1 else ():
        check_options(scheme if isinstance(scheme, Scheme) else name_of(scheme), **{**DEFAULT_POLICY, **policy})


def _check_any(name: str, value: Any, schemes: Sequence[str]) -> None:
    """Raise what the first scheme says against this value of an option, unless another has it."""
    errors = []
    for scheme in schemes:
        try:
            return _check_option(name, value, scheme)
        except (ValueError, TypeError) as error:
            errors.append(error)
    raise errors[0]


def _check_option(name: str, value: Any, scheme: str) -> None:
    if name in ("staleness", "allow"):
        if scheme != AUTO:
            raise ValueError(
                f"Only scheme='auto' chooses by this. Received: {name}={value!r}, scheme={scheme!r}. "
                "Try leaving it out, or scheme='auto'."
            )
        allowed(**({"allow": value} if name == "allow" else {"allow": (), "staleness": value}))
    elif scheme == AUTO:
        raise ValueError(
            f"With scheme='auto' this is chosen, too. Received: {name}={value!r}. Try leaving it out, or a scheme."
        )
    elif name in TREE and scheme != CODED:
        raise ValueError(
            f"Only {CODED} has a tree of workers. Received: {name}={value!r}, scheme={scheme!r}. "
            f"Try leaving it out, or scheme={CODED!r}."
        )
    elif name in CHECKS:
        CHECKS[name](value, scheme)


TREE = ("children", "depth", "stragglers")
CHECKS: dict[str, Callable[[Any, str], object]] = {
    "chunks": lambda chunks, scheme: chunked(scheme, chunks),
    "grid": check_grid,
    "compression": check_compression,
    "replica_compression": check_replica_compression,
    "order": check_order,
    "servers": check_servers,
    "synchrony": check_synchrony,
    "topology": check_topology,
}


def _check_children(given: Mapping[str, Any]) -> None:
    if "children" not in given:
        raise ValueError(
            f"{CODED} needs to know how many children every parent has. Received: children=None. "
            "Try scheme=pipetrain.CodedReduce(children=3)."
        )


def _is_left_out(name: str, value: Any) -> bool:
    default = NONE if name in OF_PIPELINES else DEFAULT_POLICY.get(name)
    return value is None or (type(value) is type(default) and value == default)


def keywords(given: Mapping[str, Any]) -> str:
    """Arguments as they are written in a call."""
    return ", ".join(f"{name}={written(value)}" for name, value in given.items())


def written(value: Any) -> str:
    """A value as it is written in a program that has imported ``pipetrain``."""
    if isinstance(value, Grid):
        return f"pipetrain.Grid{tuple(value[: 2 if value.layers is None else 3])!r}"
    if isinstance(value, Scheme):
        return repr(value.name)
    if isinstance(value, SchemeOptions):
        return f"pipetrain.{type(value).__name__}({keywords(value.given)})"
    is_object = is_dataclass(value) and type(value).__module__.startswith("pipetrain.")
    return f"pipetrain.{value!r}" if is_object else repr(value)


def check_staleness(staleness: Any) -> str:
    """``staleness``; ValueError if it is none that may be allowed."""
    if staleness not in STALENESS:
        raise ValueError(
            "Gradients are made with the newest weights, or with predicted ones. Received: "
            f"staleness={staleness!r}. Try one of: {', '.join(STALENESS)}."
        )
    return str(staleness)


def allowed(allow: Any, staleness: str = STALENESS[0]) -> frozenset[str]:
    """What is allowed beside exact training, of names in a text or a collection, and of ``staleness``.

    Raises ValueError for a name that there is not, TypeError for what has no names.
    """
    if not isinstance(allow, str | Collection):
        raise TypeError(
            f"What is allowed are names. Received: allow={allow!r}. Try some of: {', '.join(ALLOWED)}; or ()."
        )
    names = [each.strip() for each in allow.split(",") if each.strip()] if isinstance(allow, str) else list(allow)
    if unknown := [each for each in names if each not in ALLOWED]:
        raise ValueError(
            f"Unknown names. Received: allow={allow!r}, with {', '.join(map(str, unknown))}. "
            f"Try some of: {', '.join(ALLOWED)}."
        )
    predicted = [ALLOWED[0]] if check_staleness(staleness) != STALENESS[0] else []
    return frozenset([*names, *predicted])


def check_synchronous(allow: Collection[str], is_laid_out: bool) -> None:
    """Refuse what is not exact where the layout is given: the choice is then among synchronous schedules."""
    if is_laid_out and allow:
        asked = f"staleness={STALENESS[1]!r}" if {*allow} == {ALLOWED[0]} else f"allow={tuple(sorted(allow))!r}"
        raise ValueError(
            f"With stages, cuts or replicas, the schedule is chosen among synchronous ones. Received: {asked}. "
            "Try leaving them out, or scheme=pipetrain.SpecTrain(horizon='target')."
        )
