"""Schemes side by side, as simulated for the same model and devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from pipetrain.logs import text_table
from pipetrain.plan.cluster import Cluster
from pipetrain.plan.memory import Training
from pipetrain.plan.profile import Profile
from pipetrain.plan.stages import DEFAULT_TRAINING, Partition
from pipetrain.schemes.coded_reduce import Tree, widest
from pipetrain.schemes.compression import Compression
from pipetrain.schemes.grid import Grid, check_grid
from pipetrain.schemes.options import (
    AnyScheme,
    CodedReduce,
    SchemeOptions,
    TransferOptions,
    check_microbatches,
    check_owned,
    each_compressing,
    name_of,
    options_of,
    owners,
    splits,
)
from pipetrain.schemes.synchrony import Gossip, Synchrony
from pipetrain.schemes.table import CODED, GRID, TRANSFERRING
from pipetrain.schemes.transfers.orders import AUTO, ORDERS
from pipetrain.schemes.transfers.tictac import Overlap
from pipetrain.simulation.coded_reduce import simulate_tree
from pipetrain.simulation.every_way import Chooser
from pipetrain.simulation.grid import simulate_grid
from pipetrain.simulation.profiled import simulate_order
from pipetrain.simulation.simulator import simulate
from pipetrain.trace.idle import Idle, idle, overlap
from pipetrain.trace.trace import Trace

ORDERED = ("minibatches", "slowdown", "seed")  # options of those whose transfers are ordered
OVERLAP = ("scheme", "sending/computing (rho)", "overlap", "scheduling efficiency", "computing")
HEADER = ("scheme", "devices", "samples/s", "against single", "bubble", "busiest", "most idle", "transfer")


@dataclass(frozen=True)
class Comparison:
    """Simulated traces of several schemes, each of the partition that suits it; prints as a table.

    ``bubble`` is the share of all devices' time outside any action; ``busiest`` and ``most idle`` are the stages whose
    devices compute for most and least of their time; ``transfer`` is the share of all devices' time in which they wait
    for what is on its way, which is not told of devices with several stages. Where no cut fits the devices,
    there is no trace. Of schemes that order their transfers a second table tells ``Overlap``, of the device that
    computes for the least part of its time.
    """

    batch_size: int
    partitions: dict[str, Partition | None]
    traces: dict[str, Trace]
    single: Trace | None

    def __str__(self) -> str:
        tables = [text_table(HEADER, [self._row(scheme) for scheme in self.partitions])]
        least = {
            scheme: min(each.values(), key=lambda one: one.computing_part)
            for scheme, each in ((scheme, overlap(trace)) for scheme, trace in self.traces.items())
            if each and scheme in TRANSFERRING
        }
        if least:
            rows = [
                (scheme, f"{one.rho:.2f}", *(f"{part:.0%}" for part in _parts(one))) for scheme, one in least.items()
            ]
            tables.append(text_table(OVERLAP, rows))
        return "\n\n".join(tables)

    def _row(self, scheme: str) -> tuple[str, ...]:
        if scheme not in self.traces:
            return scheme, *["-"] * (len(HEADER) - 2), "no cut fits"
        trace = self.traces[scheme]
        causes = idle(trace)
        shares = _busy_shares(trace, causes)
        busiest, idlest = max(shares, key=lambda name: shares[name]), min(shares, key=lambda name: shares[name])
        transfer_s = sum(each.transfer_s for each in causes.values())
        shared = trace.ranks < len(causes)
        return (
            scheme,
            str(trace.ranks),
            f"{self.batch_size / trace.step_s:.0f}",
            f"{self.single.step_s / trace.step_s:.2f}x" if self.single else "-",
            f"{trace.bubble():.1%}",
            f"{busiest}: {shares[busiest]:.0%}",
            f"{idlest}: {shares[idlest]:.0%}",
            "-" if shared else f"{transfer_s / (trace.duration_s * trace.ranks):.1%}",
        )


def _parts(one: Overlap) -> tuple[float, float, float]:
    return one.coefficient, one.efficiency, one.computing_part


def _busy_shares(trace: Trace, causes: Mapping[tuple[int, int], Idle]) -> dict[str, float]:
    """The share of its time in which each device computes, by the name of its stage and replica, or of its stages."""
    shares = {place: 1 - each.total_s / trace.duration_s for place, each in causes.items()}
    names = dict(zip(trace.rows, trace.row_names(), strict=True))
    if trace.ranks == len(shares):
        return {names[place]: share for place, share in shares.items()}
    spans, on = trace.spans, dict[str, list[tuple[int, int]]]()
    for place in shares:
        first = int(np.argmax((spans.stage == place[0]) & (spans.replica == place[1])))
        on.setdefault(spans.device[first], []).append(place)
    return {" and ".join(names[place] for place in each): sum(shares[place] for place in each) for each in on.values()}


def compare(
    profile: Profile,
    num_devices: int,
    schemes: Sequence[AnyScheme],
    cluster: Cluster | None = None,
    training: Training | None = None,
    microbatches: int | None = None,
    of_microbatches: Profile | None = None,
    order: str = AUTO,
    tree: Tree | None = None,
    grid: object = None,
    servers: int | None = None,
    compression: str | Compression | None = None,
    replica_compression: str | Compression | None = None,
    synchrony: str | Synchrony | None = None,
    topology: str | Gossip | None = None,
    **options: Any,
) -> Comparison:
    """Simulate each scheme with the partition that suits it, and ``single`` to compare with.

    Pipelines have the cost model's fastest stages, with several devices each where that helps; the schemes whose
    devices share the rows have all devices, ``all-reduce`` and ``parameter-server`` with transfers in an order. Rates,
    cuts and memory are those by which ``choose`` compares.

    Args:
        profile: what the blocks cost.
        num_devices: how many devices there are.
        schemes: their names, objects with options of their own, or schemes of your own or of files.
        cluster: how devices are joined and what they hold.
        training: what decides on the memory; its scheme does not matter.
        microbatches: pieces of a minibatch, of the schemes that split it.
        of_microbatches: the profile for these schemes, if it is another.
        order: of the transfers of those schemes that order them; like the options below, of those that have none yet.
        tree: of ``coded-reduce``, whose root is a device beside the workers; by default one worker for each device, all
            of them the root's children, of which one may be late.
        grid: of the scheme of this name; by default the one that sends the least.
        servers: of ``parameter-server``, on as many of the devices; by default on all.
        compression: of the gradients of those schemes that order their transfers, and of what crosses pipelines' cuts.
        replica_compression: of the gradients that the devices of a pipeline's stage sum.
        synchrony: of ``all-reduce``; of ``parameter-server`` if it is ``stale``.
        topology: of ``all-reduce``.
        options: of ``simulate``.

    Raises:
        ValueError: what cannot be planned or simulated; ``microbatches`` where none of the schemes splits minibatches.
    """
    cluster, training = cluster or Cluster(), training or DEFAULT_TRAINING
    schemes = each_compressing(schemes, compression, replica_compression)
    sent = {
        "order": order,
        "servers": servers,
        "compression": compression,
        "synchrony": synchrony,
        "topology": topology,
    }
    divided = check_grid(grid, GRID)
    own = {CODED: tree and CodedReduce(*tree), GRID: divided if isinstance(divided, Grid) else None}
    schemes = [own.get(each) or each if isinstance(each, str) else each for each in schemes]
    schemes = _sending(schemes, sent)
    named = {name_of(scheme): scheme for scheme in schemes}
    if any(named[name_of(each)] != each for each in schemes):
        raise ValueError(
            f"Each scheme has a row. Received: schemes={[*map(name_of, schemes)]}. Try a call for each of its options."
        )
    split = {name: splits(training.under(scheme).scheme) for name, scheme in named.items()}
    for name in [name for name in named if split[name]] or named:
        check_microbatches(microbatches, training.under(named[name]).scheme)
    chooser = Chooser(profile, num_devices, cluster, training, of_microbatches)
    parts = chooser.copies
    partitions: dict[str, Partition | None] = {}
    for name, scheme in named.items():
        way, cut = chooser.of(scheme, microbatches if split[name] else None)
        partitions[name] = cut if way.fits else None
    _, one = chooser.of("single")
    traces = {}
    ordered = {option: options[option] for option in ORDERED if option in options}
    for name, each in partitions.items():
        if each is not None and (trace := _unstaged(named[name], parts, num_devices, chooser.cluster, ordered)):
            traces[name] = trace
        elif each is not None:
            count = microbatches if split[name] else None
            traces[name] = simulate(each, named[name], chooser.cluster, microbatches=count, **options)
    return Comparison(
        profile.batch_size,
        partitions,
        traces,
        traces.get("single") or simulate(one, "single", chooser.cluster, **options),
    )


def _unstaged(
    scheme: AnyScheme, profile: Profile, devices: int, cluster: Cluster, options: Mapping[str, Any]
) -> Trace | None:
    """The trace of a scheme that orders its transfers, has a tree or a grid; None of others, which have stages."""
    name = name_of(scheme)
    if isinstance(scheme, TransferOptions):
        return simulate_order(profile, name, devices, cluster, **_options(scheme), **options)
    if name == CODED:
        tree = scheme.tree if isinstance(scheme, CodedReduce) else widest(devices)
        return simulate_tree(profile, *tree, cluster.with_program(), **options)
    if name == GRID:
        return simulate_grid(profile, devices, cluster, scheme if isinstance(scheme, Grid) else None, **options)
    return None


def _sending(schemes: Sequence[AnyScheme], given: Mapping[str, Any]) -> list[AnyScheme]:
    """The schemes, those that order their transfers with these options, as far as they have none of their own.

    An option's value that one of them alone has is that one's. Raises ValueError for a value that none has.
    """
    mine = [name for name in map(name_of, schemes) if name in TRANSFERRING]
    for option, value in given.items():
        if having := [name for name in mine if name in owners(option)]:
            check_owned({option: value}, *having)
    return [_with(options_of(each), given) if name_of(each) in TRANSFERRING else each for each in schemes]


def _with(scheme: SchemeOptions, given: Mapping[str, Any]) -> SchemeOptions:
    open_ones = [each.name for each in fields(scheme) if getattr(scheme, each.name) == each.default]
    own = {name: given[name] for name in open_ones if name in given and _takes(scheme.name, name, given[name])}
    return replace(scheme, **own)


def _takes(scheme: str, option: str, value: Any) -> bool:
    try:
        check_owned({option: value}, scheme)
    except ValueError:
        return False
    return True


def _options(scheme: TransferOptions) -> dict[str, Any]:
    """The arguments of ``simulate_order``; of a plan of one's own the simplest order that is about the fastest."""
    options = {each.name: getattr(scheme, each.name) for each in fields(scheme)}
    return options if scheme.order in ORDERS else {**options, "order": AUTO}
