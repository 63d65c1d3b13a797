"""A synchronous schedule of your own, with two stages on each device (breadth first, arXiv 2211.05953).

Two devices, four stages, three microbatches, one column a unit of time, as ``python examples/own_schedule.py`` prints
it::

    0: 0F0  0F1  0F2  2F0  2F1  2F2  .    .    2B0  2B1  2B2  0B0  0B1  0B2
    1: .    1F0  1F1  1F2  3F0  3F1  3F2  3B0  3B1  3B2  1B0  1B1  1B2  .
"""

from pipetrain.schemes import Action, Schedule, Scheme
from pipetrain.schemes.dry_run import grid, replay
from pipetrain.schemes.policies import FlushPolicy
from pipetrain.schemes.schedules import orders


def breadth_first(device, devices, groups):
    """All microbatches of a minibatch through one stage before the next; backward likewise, from the last stage."""
    stages = (device, device + devices)
    for group in groups:
        for stage in stages:
            yield from (Action("F", stage, microbatch) for microbatch in group)
        for stage in reversed(stages):
            yield from (Action("B", stage, microbatch) for microbatch in group)


two_stages = Schedule(breadth_first, chunks=2)
looped = Scheme("breadth-first", two_stages, FlushPolicy(), "synchronous, two stages a device", splits=True)
# pipetrain.PipelineModel(model, stages=4, scheme=looped, devices=("CPU:0", "CPU:1"), microbatches=3)

if __name__ == "__main__":  # the table above
    print(grid(replay(orders(breadth_first, devices=2, minibatches=1, microbatches=3))))
