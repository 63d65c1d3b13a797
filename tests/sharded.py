"""Devices of this process in the place of workers, which write shards of checkpoints themselves.

``python sharded.py KILL_AT DIRECTORY RESULT SCHEME``: the training of ``killed_training.py`` with such shards, which
dies in its fsync with the number KILL_AT; 0 for never.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]


def stand_in(set_attribute):
    """Let every CPU but the first be another worker's; ``set_attribute`` is that of a ``monkeypatch``, or setattr."""
    from pipetrain.checkpoint import bundles

    set_attribute(bundles, "is_remote", lambda device: not device.endswith("CPU:0"))
    set_attribute(bundles, "processor_of", lambda device: device)


def die_at(count: int) -> None:
    """Let the process die in its count-th fsync."""
    fsync, calls = os.fsync, []

    def dying(descriptor):
        calls.append(descriptor)
        if len(calls) == count:
            os.kill(os.getpid(), signal.SIGKILL)
        fsync(descriptor)

    os.fsync = dying


if __name__ == "__main__":
    from pipetrain.cli.environment import start_tensorflow

    start_tensorflow(3)
    import killed_training

    stand_in(setattr)
    die_at(int(sys.argv[1]))
    killed_training.STEP_S = 0.0
    killed_training.main(*sys.argv[2:])
