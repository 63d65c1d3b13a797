"""What a run of data parallelism would be, for a plan of transfers: the same kind of trace as training records."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipetrain.schemes.arguments import checked_count
from pipetrain.schemes.transfers.plan import Plan, check_plan
from pipetrain.simulation.data_parallel.clock import SimulatedDevice, varying
from pipetrain.simulation.data_parallel.messages import SimulatedMessage
from pipetrain.simulation.data_parallel.setting import COUNTED, Setting
from pipetrain.simulation.data_parallel.training import SimulatedTraining
from pipetrain.trace.records import Names, Spans, Transfers
from pipetrain.trace.trace import Trace


def simulate_plan(setting: Setting, plan: Plan, minibatches: int = 8, slowdown: float = 0.0, seed: int = 0) -> Trace:
    """Simulate so many steps of data parallelism whose transfers this plan orders.

    The spans of a worker are the pieces of its forward, ``F``, and of its backward and updates, ``B``, that it does
    without a pause; where it waits between them for weights or sums, there is a pause. ``W`` are messages of weights,
    ``R`` of gradients, each from when it leaves.

    Args:
        setting: the workers, how they are joined, and what they compute.
        plan: of the transfers.
        minibatches: how many are trained.
        slowdown: how much the seconds of layers and updates vary: the standard deviation, as a part of the mean, of
            random factors (lognormal, with mean 1).
        seed: of these.

    Raises ValueError for a plan that does not move every variable once each way, and for counts below 1.
    """
    check_plan(plan, setting.workload.sizes_bytes, setting.serves)
    checked_count("minibatches", minibatches, COUNTED, 8)
    training = SimulatedTraining(setting, plan, minibatches, varying(slowdown, seed))
    messages = training.run()
    return Trace.of(spans_of(training.devices), transfers_of(messages))


def spans_of(devices: Sequence[SimulatedDevice]) -> Spans:
    """The spans of what devices did, as a trace has them."""
    spans = [(worker, span) for worker, device in enumerate(devices) for span in device.spans]
    workers = np.array([worker for worker, _ in spans], dtype=np.int32)
    steps = np.array([span.step for _, span in spans], dtype=np.int32)
    return Spans(
        op=np.array([span.op for _, span in spans], dtype=Spans.dtypes[0]),
        stage=np.zeros_like(workers),
        microbatch=steps,
        device=Names(workers, tuple(f"device:{n}" for n in range(len(devices)))),
        start_s=np.array([span.start_s for _, span in spans], dtype=float),
        end_s=np.array([span.end_s for _, span in spans], dtype=float),
        version=steps,
        replica=workers,
    )


def transfers_of(messages: Sequence[SimulatedMessage]) -> Transfers:
    """Messages, as a trace has them."""
    return Transfers.of(message.transfer for message in messages)
