"""Worker processes on this machine, which end with the process that started them."""

from __future__ import annotations

import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType

from pipetrain.cluster.hosts import split
from pipetrain.compute.cores import cores

START_S = 60.0  # TensorFlow is imported within
END_S = 5.0


class LocalWorkers:
    """Workers on this machine, each on cores of its own; ``connect`` takes their ``addresses``.

    It is a context manager: the workers end with the context, and with this process, however that ends.

    Args:
        count: number of workers.
        cpu_devices: logical CPU devices of each.
        ports: the port of each; by default any that are free.

    Raises ValueError for a count below 1; ChildProcessError for a worker that does not start.
    """

    def __init__(self, count: int, cpu_devices: int = 1, ports: Sequence[int] | None = None) -> None:
        if not isinstance(count, int) or count < 1 or (ports is not None and len(ports) != count):
            raise ValueError(
                f"There is at least one worker, each with a port. Received: count={count!r}, ports={ports!r}. "
                "Try LocalWorkers(2)."
            )
        known, self._cpu_devices = cores(), cpu_devices
        self._cores: list[list[int]] = []
        self.processes: list[subprocess.Popen[str]] = []
        self.addresses: list[str] = []
        try:
            for n in range(count):
                own = known[n * len(known) // count : (n + 1) * len(known) // count] or [known[n % len(known)]]
                self._cores.append(own)
                self.processes.append(_started(own, cpu_devices, ports[n] if ports else 0))
            until_s = time.monotonic() + START_S
            self.addresses = [_address(process, until_s) for process in self.processes]
        except BaseException:
            self.end()
            raise

    def renew(self, addresses: Iterable[str]) -> None:
        """End these workers if they have not ended, and start others in their places.

        Raises ChildProcessError for one that does not start.
        """
        lost = [self.addresses.index(address) for address in addresses]
        for n in lost:
            self.processes[n].kill()
            _reap(self.processes[n])
            self.processes[n] = _started(self._cores[n], self._cpu_devices, split(self.addresses[n])[1])
        until_s = time.monotonic() + START_S
        for n in lost:
            _address(self.processes[n], until_s)

    def end(self) -> None:
        """End the workers."""
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            _reap(process)

    def __enter__(self) -> LocalWorkers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end()


def _reap(process: subprocess.Popen[str]) -> None:
    """Wait for its end, and kill it if that does not come."""
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:  # stopped, or busy in a kernel
        process.kill()
        process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe:
            pipe.close()


def _started(own: Sequence[int], cpu_devices: int, port: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "pipetrain", "worker", "--port", str(port), "--cpu-devices", str(cpu_devices)]
    command += ["--cores", ",".join(map(str, own)), "--attended"]
    # This very package, wherever the program has it from.
    paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    # A session of its own: Ctrl-C is for the controller, which ends them when it has drained.
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        start_new_session=True,
    )


def _address(process: subprocess.Popen[str], until_s: float) -> str:
    """What the worker says that its address is."""
    assert process.stdout is not None  # it is a pipe
    ready, _, _ = select.select([process.stdout], [], [], max(until_s - time.monotonic(), 0))
    line = process.stdout.readline() if ready else ""
    match = re.match(r"Worker at (\S+),", line)
    if match is None:
        raise ChildProcessError(
            f"A worker did not start within {START_S:.0f} s. Received: {' '.join(process.args)!r}, exit status "  # type: ignore[arg-type]
            f"{process.poll()}. Try that command by itself."
        )
    return match[1]
