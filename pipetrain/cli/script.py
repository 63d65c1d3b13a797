"""The process of a script that ``pipetrain launch`` runs: it joins the workers, and is the script from then on.

Its arguments are ``PID REPORT [--end-workers] [SCRIPT [ARGUMENT ...]]``: PID is the process that launches, and REPORT
the file descriptor of a pipe to it, on which it is told that workers were joined, and that one was lost. TF_CONFIG
names the workers.
"""

from __future__ import annotations

import atexit
import builtins
import os
import runpy
import signal
import sys
import threading
import time
from contextlib import suppress
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, TracebackType

STARTED_S, JOINED_S, END_S = 60.0, 20.0, 5.0


def main() -> int:
    """Join the workers, then run the script, if there is one; its exit status."""
    launcher, report, *arguments = sys.argv[1:]
    os.set_inheritable(int(report), False)  # it is nothing of what the script starts
    atexit.register(_end_alone, os.getpid(), int(launcher))
    threading.Thread(target=_attend, args=(int(launcher),), daemon=True).start()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    from pipetrain.cluster.supervision import END, JOINED, LOST, LOST_WORKER
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
        if ends_workers:  # some may have been joined
            end_workers()
        os._exit(2)  # TensorFlow may wait for workers that do not answer
    try:
        os.write(int(report), JOINED)
        return _run(script) if script else 0
    except SystemExit:
        raise
    except BaseException as error:
        trace = _of_script(error)
        if isinstance(error, pipetrain.WorkerLost):  # what TensorFlow has said of it tells less
            error.__cause__, error.__suppress_context__ = None, True
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        if isinstance(error, KeyboardInterrupt):
            return 128 + signal.SIGINT
        if isinstance(error, pipetrain.WorkerLost):
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError):
                    stream.flush()
            os.write(int(report), LOST_WORKER)
            os._exit(LOST)
        return 1
    finally:
        if ends_workers:
            end_workers()


def _patience_s(ends_workers: bool, script: list[str]) -> float:
    """How long workers may take to answer: such as others start meanwhile, such as serve, and such as are to end."""
    if not script:
        return END_S
    return STARTED_S if ends_workers else JOINED_S


def _run(arguments: list[str]) -> int:
    """As Python would: what the script imports, it looks for in its folder first."""
    is_module = arguments[0] == "-m"
    sys.argv = arguments[is_module:]
    if not getattr(sys.flags, "safe_path", False):  # of 3.11 on
        sys.path.insert(0, os.getcwd() if is_module else str(Path(arguments[0]).resolve().parent))
    if not is_module:
        _run_file(arguments[0])
    elif _is_there(arguments[1]):
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        print(
            f"pipetrain launch: There is no such module. Received: -m {arguments[1]}. Try a module of {sys.path[0]}, "
            "or one that is installed; without -m, a file.",
            file=sys.stderr,
        )
        return 2
    return 0


def _run_file(name: str) -> None:
    """Run a file as the module ``__main__``, which stays that, unlike with ``runpy``."""
    path = os.path.abspath(name)
    main = ModuleType("__main__")
    main.__file__, main.__loader__ = path, SourceFileLoader("__main__", path)
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    exec(compile(Path(path).read_bytes(), path, "exec", dont_inherit=True), main.__dict__)


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):  # one that a package of it imports
            raise
        return False


def _of_script(error: BaseException) -> TracebackType | None:
    """The error's traceback from the script's first frame on."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals.get("__name__") in ("runpy", __name__):
        trace = trace.tb_next
    return trace


def _attend(launcher: int) -> None:
    """End with the process that launches: a script that goes on alone would hold workers that are ending.

    What the script has started ends with it: at once, as the script does, or when the script has heeded SIGTERM.
    """
    from pipetrain.cluster.supervision import LEAVE_S

    while os.getppid() == launcher:
        time.sleep(0.5)
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(LEAVE_S)
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _end_alone(own: int, launcher: int) -> None:
    """At the very end, where the process that launches has gone: end what the script has started."""
    if os.getpid() == own and os.getppid() != launcher:  # not in a process that the script has forked
        os.killpg(os.getpgrp(), signal.SIGKILL)
