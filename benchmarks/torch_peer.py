"""PyTorch's ways to train a network: on one pinned core, and with two pinned processes (DDP and pipeline schedules).

As its users would write it: eager, channels first, fused SGD, one thread a process, gloo between the processes. The
pipelines have two stages, cut where PyTorch's own blocks balance best, and 4 microbatches.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
import time
from collections.abc import Callable, Iterator
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
        cut, bound = balanced_cut(whole, x[0])
        check(job.rank, whole, cut, x[0], y[0])
        torch.manual_seed(job.rank)  # of dropout
        sides = {name: make(job.rank, deepcopy(whole), cut) for name, make in TOGETHER.items()}
        bounds = [2.0, bound, bound]
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


def ddp_step(rank: int, model: nn.Module, cut: int) -> Step:
    """Each process trains on its half of the rows."""
    import torch

    one = plain_step(torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True))
    return lambda x, y: one(x.chunk(2)[rank], y.chunk(2)[rank])


def pipeline_step(schedule_name: str) -> Callable[[int, nn.Module, int], Step]:
    """Each process has one of two stages."""

    def made(rank: int, model: nn.Module, cut: int) -> Step:
        import torch
        from torch.distributed import pipelining

        mine = part(model, rank, cut)
        stage = pipelining.PipelineStage(mine, rank, 2, torch.device("cpu"))
        entropy = torch.nn.CrossEntropyLoss()
        schedule = getattr(pipelining, schedule_name)(stage, MICROBATCHES, loss_fn=entropy)
        sgd = optimizer(mine)

        def step(x: torch.Tensor, y: torch.Tensor) -> float:
            losses: list[torch.Tensor] = []
            if rank == 0:
                schedule.step(x, return_outputs=False)
            else:
                schedule.step(target=y, losses=losses, return_outputs=False)
            sgd.step()
            sgd.zero_grad()
            return torch.stack(losses).mean().item() if losses else 0.0

        return step

    return made


def part(model: nn.Module, rank: int, cut: int) -> nn.Module:
    """One of the two stages, in the mode of the whole."""
    from benchmarks.torch_networks import Chain, Received

    blocks = list(model.blocks)
    return Chain(blocks[:cut] if rank == 0 else [Received(), *blocks[cut:]]).train(model.training)


TOGETHER: dict[str, Callable[[int, nn.Module, int], Step]] = {
    "PyTorch DDP": ddp_step,
    "PyTorch ScheduleGPipe": pipeline_step("ScheduleGPipe"),
    "PyTorch Schedule1F1B": pipeline_step("Schedule1F1B"),
}


def balanced_cut(whole: nn.Module, x: torch.Tensor) -> tuple[int, float]:
    """Where both halves' blocks take most nearly as long, by the first process' clock; and the bound of that cut."""
    import torch

    walks = [walk_s(deepcopy(whole.blocks), x) for _ in range(5)]
    seconds = [min(each) for each in zip(*walks, strict=True)]
    slowest = {cut: max(sum(seconds[:cut]), sum(seconds[cut:])) for cut in range(1, len(seconds))}
    cut = min(slowest, key=slowest.__getitem__)
    agreed = torch.tensor([cut, sum(seconds) / slowest[cut]])
    torch.distributed.broadcast(agreed, 0)
    return int(agreed[0]), float(agreed[1])


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


def check(rank: int, whole: nn.Module, cut: int, x: torch.Tensor, y: torch.Tensor) -> None:
    """Five steps of every way move weights as one process moves them, and the loss falls; RuntimeError otherwise.

    Without dropout and with BatchNorm's moving statistics, which are the only ones that a part of the rows has too.
    """
    import torch

    trained = {}
    for name, make in {"alone": lambda rank, model, cut: plain_step(model), **TOGETHER}.items():
        model = deepcopy(whole).eval()
        step = make(rank, model, cut)
        losses = [step(x, y) for _ in range(5)]
        if losses[0] and not losses[-1] < losses[0]:
            raise RuntimeError(f"{name}: the loss does not fall. Received: {losses}.")
        trained[name] = list(part(model, rank, cut).parameters())
    before = list(part(whole, rank, cut).parameters())
    if all(torch.equal(a, b) for a, b in zip(before, trained["alone"], strict=True)):
        raise RuntimeError("No weight moves.")
    for name, ours in trained.items():
        apart = max(float((a - b).detach().abs().max()) for a, b in zip(ours, trained["alone"], strict=True))
        if apart > TOLERANCE:
            raise RuntimeError(f"{name} trains other weights than one process does. Received: {apart} apart.")
