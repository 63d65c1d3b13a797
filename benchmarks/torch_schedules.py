"""Write PyTorch's own pipeline schedules as files, by its own code: what `python -m pipetrain schedule` reads.

Needs PyTorch 2.13, which need not be beside TensorFlow: run it with the Python of another environment.

examples:
  python benchmarks/torch_schedules.py --devices 4 --microbatches 8 --output schedules
  python -m pipetrain schedule --scheme schedules/ScheduleZBVZeroBubble.csv
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path
from typing import Any

SINGLE = ("ScheduleGPipe", "Schedule1F1B")  # a stage a device; the others have two
MULTI = (
    "ScheduleInterleaved1F1B",
    "ScheduleLoopedBFS",
    "ScheduleInterleavedZeroBubble",
    "ScheduleZBVZeroBubble",
    "ScheduleDualPipeV",
)


def write(devices: int, microbatches: int, output: Path) -> list[Path]:
    """A file for each schedule, of so many devices and microbatches; returns them."""
    from torch.distributed import pipelining
    from torch.distributed.pipelining import schedules
    from torch.distributed.pipelining.stage import _PipelineStageBase

    class Stage(_PipelineStageBase):
        """What a schedule asks of a stage, without a process group."""

        def __init__(self, number: int, stages: int) -> None:
            self.stage_index, self.num_stages = number, stages
            self.group_size, self.group_rank, self.group = devices, 0, None
            self.stage_index_to_group_rank = {n: n % devices for n in range(stages)}
            self.submod = None

        def _nothing(self, *_: Any) -> Any:
            return None

        _prepare_forward_infra = _prepare_backward_infra = _create_grad_recv_info = _nothing

    def loss(*_: Any) -> None: ...

    output.mkdir(parents=True, exist_ok=True)
    written = []
    for name in (*SINGLE, *MULTI):
        kind = getattr(schedules, name, None) or getattr(pipelining, name)
        chunks = 1 if name in SINGLE else 2
        stages = [Stage(n * devices, chunks * devices) for n in range(chunks)]
        if name in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV"):
            stages[1].stage_index = 2 * devices - 1
        made = kind(stages[0] if name in SINGLE else stages, microbatches, loss_fn=loss)
        order = made._get_pipeline_order() if name in SINGLE else made.pipeline_order
        written.append(output / f"{name}.csv")
        with written[-1].open("w", newline="") as file:
            csv.writer(file).writerows(order[rank] for rank in range(devices))
    return written


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=4, metavar="N", help="(default: 4)")
    parser.add_argument("--microbatches", type=int, default=8, metavar="N", help="of a minibatch (default: 8)")
    parser.add_argument("--output", type=Path, default=Path(), help="the folder to write to (default: this one)")
    options = parser.parse_args()
    print("\n".join(map(str, write(options.devices, options.microbatches, options.output))))


if __name__ == "__main__":
    main()
