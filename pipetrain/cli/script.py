"""The process of a script that ``pipetrain launch`` runs: it joins the workers, and is the script from then on.

Usage: ``python -m pipetrain.cli.script PID [--end-workers] [SCRIPT [ARGUMENT ...]]``, where PID is the process that
launches, and TF_CONFIG names the workers. Exit status ``LOST`` says that a worker was lost.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path

STARTED_S, JOINED_S, END_S = 60.0, 20.0, 5.0


def main() -> None:
    """Join the workers, then run the script, if there is one; its exit status."""
    launcher, *arguments = sys.argv[1:]
    threading.Thread(target=_attend, args=(int(launcher),), daemon=True).start()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    from pipetrain.cluster.supervision import END, LOST
    from pipetrain.logs import quiet_stderr

    with quiet_stderr():  # of what TensorFlow greets with
        import pipetrain
        from pipetrain.cluster.connection import end_workers
    ends_workers = arguments[:1] == [END]
    script = arguments[ends_workers:]
    try:
        with quiet_stderr():
            pipetrain.connect(timeout_s=_patience_s(ends_workers, script))
    except (ConnectionError, ValueError) as error:
        if script:
            print(f"pipetrain launch: {error}", file=sys.stderr)
        os._exit(2)  # TensorFlow may wait for workers that do not answer
    try:
        if script:
            _run(script)
    except pipetrain.WorkerLost:
        traceback.print_exc()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
        os._exit(LOST)
    finally:
        if ends_workers:
            end_workers()


def _patience_s(ends_workers: bool, script: list[str]) -> float:
    """How long workers may take to answer: such as others start meanwhile, such as serve, and such as are to end."""
    if not script:
        return END_S
    return STARTED_S if ends_workers else JOINED_S


def _run(arguments: list[str]) -> None:
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path[0] = os.getcwd()
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path[0] = str(Path(arguments[0]).resolve().parent)
        runpy.run_path(arguments[0], run_name="__main__")


def _attend(launcher: int) -> None:
    """End with the process that launches: a script that goes on alone would hold workers that are ending."""
    while os.getppid() == launcher:
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
