"""PyTorch's ways to train a network: on one pinned core, and with two pinned processes (DDP and pipeline schedules).

As its users would write it: eager, channels first, fused SGD, one thread a process, gloo between the processes. The
pipelines have one or two stages on either process, cut where PyTorch's own blocks balance best, and 4 microbatches.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.networks import Network, data
from benchmarks.sides import FIRST, Figures

if TYPE_CHECKING:
    import torch
    from torch import nn

ALONE = "PyTorch, 1 core"
MICROBATCHES = 4
LEARNING_RATE, MOMENTUM = 1e-3, 0.9
TOLERANCE = 1e-5  # of weights after five steps, which move them by 1e-3 and more
Step = Callable[["torch.Tensor", "torch.Tensor"], Any]


class TorchJob(NamedTuple):
    """One process: alone where it meets nobody, or one of two that meet at a file."""

    network: Network
    steps: int
    rank: int = 0
    meeting: str | None = None


def installed() -> bool:
    """Whether there is a PyTorch to compare with."""
    return importlib.util.find_spec("torch") is not None


def teams(network: Network, steps: int) -> list[list[TorchJob]]:
    """One process alone, and two together."""
    meeting = str(Path(tempfile.mkdtemp(prefix="benchmark-")) / "meeting")
    return [[TorchJob(network, steps)], [TorchJob(network, steps, rank, meeting) for rank in range(2)]]


def work(job: TorchJob) -> Iterator[dict[str, Figures]]:
    """Samples/s of every way that this process takes part in, once a round."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[job.rank]})
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch

    from benchmarks.torch_networks import Chain, blocks

    torch.set_num_threads(1)
    torch.manual_seed(0)
    whole = Chain(blocks(job.network))
    x, y = batches(job.network, job.steps)
    if job.meeting is None:
        sides, bounds = {ALONE: plain_step(deepcopy(whole))}, [None]
    else:
        torch.distributed.init_process_group("gloo", f"file://{job.meeting}", rank=job.rank, world_size=2)
        balanced = balanced_cuts(whole, x[0])
        check(job.rank, whole, balanced, x[0], y[0])
        torch.manual_seed(job.rank)  # of dropout
        sides = {name: way.make(job.rank, deepcopy(whole), balanced) for name, way in TOGETHER.items()}
        bounds = [balanced[way.stages].bound for way in TOGETHER.values()]
    for step in sides.values():
        timed(step, x[:FIRST], y[:FIRST])
    yield {}
    while True:
        seconds = [timed(step, x, y) for step in sides.values()]
        yield {
            name: Figures(job.network.batch_size / each, bound)
            for name, each, bound in zip(sides, seconds, bounds, strict=True)
        }


def batches(network: Network, steps: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Minibatches, channels first."""
    import torch

    x, y = (torch.from_numpy(each) for each in data(network, steps * network.batch_size))
    if x.dim() == 4:
        x = x.permute(0, 3, 1, 2).contiguous()
    return list(x.split(network.batch_size)), list(y.long().split(network.batch_size))


def timed(step: Step, x: list[torch.Tensor], y: list[torch.Tensor]) -> float:
    """Seconds a step, after the first few."""
    start_s = 0.0
    for n, batch in enumerate(zip(x, y, strict=True), start=1):
        step(*batch)
        if n == FIRST:
            start_s = time.perf_counter()
    return (time.perf_counter() - start_s) / max(1, len(x) - FIRST)


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """SGD with momentum."""
    import torch

    return torch.optim.SGD(model.parameters(), LEARNING_RATE, MOMENTUM, fused=True)


def plain_step(model: nn.Module) -> Step:
    """The loop of one process."""
    import torch

    sgd, entropy = optimizer(model), torch.nn.CrossEntropyLoss()

    def step(x: torch.Tensor, y: torch.Tensor) -> float:
        loss = entropy(model(x), y)
        loss.backward()
        sgd.step()
        sgd.zero_grad()
        return loss.item()

    return step


class Cut(NamedTuple):
    """Blocks before which a stage begins, the first one's 0 and the end included, and what the cut allows at most."""

    places: tuple[int, ...]
    bound: float


Make = Callable[[int, "nn.Module", Mapping[int, Cut]], Step]


class Way(NamedTuple):
    """A way to train on two processes, and the stages that each of them has, in order."""

    make: Make
    placement: tuple[tuple[int, ...], ...]

    @property
    def stages(self) -> int:
        """How many there are."""
        return 1 + max(map(max, self.placement))


def ddp_step(rank: int, model: nn.Module, balanced: Mapping[int, Cut]) -> Step:
    """Each process trains on its half of the rows."""
    import torch

    one = plain_step(torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True))
    return lambda x, y: one(x.chunk(2)[rank], y.chunk(2)[rank])


def pipeline(schedule_name: str, *placement: tuple[int, ...]) -> Way:
    """A schedule of ``torch.distributed.pipelining``."""
    count = sum(map(len, placement))

    def made(rank: int, model: nn.Module, balanced: Mapping[int, Cut]) -> Step:
        import torch
        from torch.distributed import pipelining
        from torch.distributed.pipelining import schedules

        numbers = placement[rank]
        mine = [part(model, number, balanced[count]) for number in numbers]
        stages = [
            pipelining.PipelineStage(each, number, count, torch.device("cpu"))
            for each, number in zip(mine, numbers, strict=True)
        ]
        entropy = torch.nn.CrossEntropyLoss()
        kind = getattr(schedules, schedule_name)
        schedule = kind(stages if len(stages) > 1 else stages[0], MICROBATCHES, loss_fn=entropy)
        sgd = optimizer(torch.nn.ModuleList(mine))

        def step(x: torch.Tensor, y: torch.Tensor) -> float:
            losses: list[torch.Tensor] = []
            reads = (x,) if 0 in numbers else ()
            scores = {"target": y, "losses": losses} if count - 1 in numbers else {}
            schedule.step(*reads, **scores, return_outputs=False)
            sgd.step()
            sgd.zero_grad()
            return torch.stack(losses).mean().item() if losses else 0.0

        return step

    return Way(made, placement)


def part(model: nn.Module, stage: int, cut: Cut) -> nn.Module:
    """One of the stages, in the mode of the whole."""
    from benchmarks.torch_networks import Chain, Received

    blocks = list(model.blocks)[cut.places[stage] : cut.places[stage + 1]]
    return Chain([Received(), *blocks] if stage else blocks).train(model.training)


LOOPED, V = ((0, 2), (1, 3)), ((0, 3), (1, 2))
TOGETHER = {
    "PyTorch DDP": Way(ddp_step, ((0,), (0,))),
    "PyTorch ScheduleGPipe": pipeline("ScheduleGPipe", (0,), (1,)),
    "PyTorch Schedule1F1B": pipeline("Schedule1F1B", (0,), (1,)),
    "PyTorch ScheduleInterleaved1F1B": pipeline("ScheduleInterleaved1F1B", *LOOPED),
    "PyTorch ScheduleLoopedBFS": pipeline("ScheduleLoopedBFS", *LOOPED),
    "PyTorch ScheduleInterleavedZeroBubble": pipeline("ScheduleInterleavedZeroBubble", *LOOPED),
    "PyTorch ScheduleZBVZeroBubble": pipeline("ScheduleZBVZeroBubble", *V),
    "PyTorch ScheduleDualPipeV": pipeline("ScheduleDualPipeV", *V),
}


def balanced_cuts(whole: nn.Module, x: torch.Tensor) -> dict[int, Cut]:
    """For so many stages the cut whose slowest one is fastest, by the first process' clock.

    The bound is that of two processes with as many stages each, which are as slow as the slowest one.
    """
    import torch

    walks = [walk_s(deepcopy(whole.blocks), x) for _ in range(5)]
    seconds = torch.tensor([min(each) for each in zip(*walks, strict=True)], dtype=torch.float64)
    torch.distributed.broadcast(seconds, 0)
    sums = [0.0, *itertools.accumulate(seconds.tolist())]
    found = {1: Cut((0, len(seconds)), 2.0)}  # each process has all blocks, and half of the rows
    for stages in (2, 4):

        def slowest_s(places: tuple[int, ...]) -> float:
            return max(sums[end] - sums[begin] for begin, end in itertools.pairwise(places))

        inner = itertools.combinations(range(1, len(seconds)), stages - 1)
        places = min(((0, *each, len(seconds)) for each in inner), key=slowest_s)
        found[stages] = Cut(places, 2 * sums[-1] / (stages * slowest_s(places)))
    return found


def walk_s(blocks: Any, x: torch.Tensor) -> list[float]:
    """Seconds that every block's forward and backward take, in a walk over all."""
    seconds, values = [], (x,)
    for block in blocks:
        inputs = tuple(each.detach().requires_grad_(each.is_floating_point()) for each in values)
        start_s = time.perf_counter()
        given = block(*inputs)
        values = given if isinstance(given, tuple) else (given,)
        sum(each.sum() for each in values).backward()
        seconds.append(time.perf_counter() - start_s)
    return seconds


def check(rank: int, whole: nn.Module, balanced: Mapping[int, Cut], x: torch.Tensor, y: torch.Tensor) -> None:
    """Five steps of every way move weights as one process moves them, and the loss falls; RuntimeError otherwise.

    Without dropout and with BatchNorm's moving statistics, which are the only ones that a part of the rows has too.
    """
    import torch

    def trained(make: Make) -> nn.Module:
        model = deepcopy(whole).eval()
        step = make(rank, model, balanced)
        losses = [step(x, y) for _ in range(5)]
        if losses[0] and not losses[-1] < losses[0]:
            raise RuntimeError(f"The loss does not fall. Received: {losses}.")
        return model

    alone = trained(lambda rank, model, balanced: plain_step(model))
    if all(torch.equal(a, b) for a, b in zip(whole.parameters(), alone.parameters(), strict=True)):
        raise RuntimeError("No weight moves.")
    for name, way in TOGETHER.items():
        ours = trained(way.make)
        for stage in way.placement[rank]:
            pair = [part(model, stage, balanced[way.stages]).parameters() for model in (ours, alone)]
            apart = max((float((a - b).detach().abs().max()) for a, b in zip(*pair, strict=True)), default=0.0)
            if apart > TOLERANCE:
                raise RuntimeError(f"{name} trains other weights than one process does. Received: {apart} apart.")
