"""Worker processes on this machine, which end with the process that started them."""

from __future__ import annotations

import os
import select
import subprocess
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import pairwise
from types import TracebackType
from typing import Any, TypeVar

import tensorflow as tf

from pipetrain.cluster.hosts import LOOPBACK, split, worker
from pipetrain.cluster.server import MOST, check_port
from pipetrain.compute.cores import cores
from pipetrain.logs import quiet_stderr
from pipetrain.schemes.arguments import is_count

VISIBLE = "CUDA_VISIBLE_DEVICES"
START_S = 60.0  # TensorFlow is imported within
END_S = 5.0
Item = TypeVar("Item")


class LocalWorkers:
    """Workers on this machine, each on cores and GPUs of its own; ``connect`` takes their ``addresses``.

    It is a context manager: the workers end with the context, and with this process, however that ends and whatever
    processes it has forked. What they write goes to the standard output and error of this process. Every user of this
    machine can reach them, and so run code with the rights of whoever started them.

    Args:
        count: number of workers.
        cpu_devices: logical CPU devices of each.
        ports: the port of each; by default any that are free.

    Raises ValueError for a count below 1, for devices that no worker has, and for ports that are none or in use;
    ChildProcessError for a worker that does not start.
    """

    def __init__(self, count: int, cpu_devices: int = 1, ports: Sequence[int] | None = None) -> None:
        _check(count, cpu_devices, ports)
        self._cpu_devices, self._cores = cpu_devices, divided(cores(), count)
        with quiet_stderr():  # of what TensorFlow says where there is no driver
            gpus = len(tf.config.list_physical_devices("GPU"))
        self._gpus = divided_gpus(gpus, count, os.environ.get(VISIBLE))
        self._announcements: dict[int, int] = {}  # of workers that are starting, the descriptors to read addresses from
        self.processes: list[subprocess.Popen[bytes]] = []
        self.addresses: list[str] = []
        try:
            for n in range(count):
                self._start(n, ports[n] if ports else 0)
            self.addresses = self._announced(range(count))
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
            self._start(n, split(self.addresses[n])[1])
        self._announced(lost)

    def _start(self, n: int, port: int) -> None:
        source, sink = os.pipe()
        try:
            process = _started(self._cores[n], self._gpus[n], self._cpu_devices, port, sink)
        except BaseException:
            os.close(source)
            raise
        finally:
            os.close(sink)
        self.processes[n : n + 1] = [process]
        self._announcements[n] = source

    def _announced(self, numbers: Iterable[int]) -> list[str]:
        until_s = time.monotonic() + START_S
        return [_address(self.processes[n], self._announcements.pop(n), until_s) for n in numbers]

    def end(self) -> None:
        """End the workers."""
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            _reap(process)
        while self._announcements:  # of workers that have not been waited for
            os.close(self._announcements.popitem()[1])

    def __enter__(self) -> LocalWorkers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end()


def _check(count: Any, cpu_devices: Any, ports: Sequence[int] | None) -> None:
    if not is_count(count) or not (ports is None or (isinstance(ports, Sequence) and len(ports) == count)):
        raise ValueError(
            f"There is at least one worker, each with a port. Received: count={count!r}, ports={ports!r}. "
            "Try LocalWorkers(2)."
        )
    if not is_count(cpu_devices) or cpu_devices > MOST:
        raise ValueError(f"A worker has from 1 to {MOST} devices. Received: cpu_devices={cpu_devices!r}. Try 1.")
    for port in ports or ():
        if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port < 2**16:
            raise ValueError(f"A port is a number up to {2**16 - 1}. Received: ports={ports!r}. Try 0 for any.")
        if port and list(ports or ()).count(port) > 1:
            raise ValueError(f"Each worker has a port of its own. Received: ports={ports!r}. Try 0 for any.")
        check_port(LOOPBACK, port)


def _reap(process: subprocess.Popen[bytes]) -> None:
    """Wait for its end, and kill it if that does not come."""
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:  # stopped, or busy in a kernel
        process.kill()
        process.wait()
    if process.stdin:
        process.stdin.close()


def divided_gpus(gpus: int, workers: int, visible: str | None) -> list[str | None]:
    """For each worker the value of CUDA_VISIBLE_DEVICES, where there are so many GPUs, or those that are ``visible``.

    With more workers than GPUs neighbours share one. None, as it is, where there are none.
    """
    if gpus == 0:
        return [None] * workers
    names = visible.split(",")[:gpus] if visible else list(map(str, range(gpus)))
    return [",".join(each) for each in divided(names, workers)]


def divided(items: Sequence[Item], workers: int) -> list[list[Item]]:
    """For each worker its part of so many items, neighbours; where workers are more, neighbours share one."""
    firsts = [n * len(items) // workers for n in range(workers + 1)]
    return [[*items[first : max(last, first + 1)]] for first, last in pairwise(firsts)]


def _started(
    own: Sequence[int], gpus: str | None, cpu_devices: int, port: int, announce: int
) -> subprocess.Popen[bytes]:
    where = ("--port", port, "--cpu-devices", cpu_devices, "--cores", ",".join(map(str, own)))
    command = worker(*where, "--attended", os.getpid(), "--announce", announce)
    # A session of its own: Ctrl-C is for the controller, which ends them when it has drained. Its output is inherited:
    # a pipe that nobody reads would hold it up when that is full.
    environment = {**os.environ, **({} if gpus is None else {VISIBLE: gpus})}
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, pass_fds=[announce], start_new_session=True, env=environment
    )


def _address(process: subprocess.Popen[bytes], source: int, until_s: float) -> str:
    """What the worker says that its address is."""
    with os.fdopen(source) as announcement:
        ready, _, _ = select.select([announcement], [], [], max(until_s - time.monotonic(), 0))
        line = announcement.readline() if ready else ""
    if line:
        return line.strip()
    if not ready:
        raise ChildProcessError(f"A worker did not start within {START_S:.0f} s. Try again when the machine is idle.")
    with suppress(subprocess.TimeoutExpired):
        process.wait(END_S)
    raise ChildProcessError(
        f"A worker ended before it served, and may have said why. Received: exit status {process.returncode}. "
        "Try python -m pipetrain worker, which takes the same options."
    )
