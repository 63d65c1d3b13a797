"""Hosts emulated by network namespaces of this machine, joined by a bridge whose ports are limited; needs root."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.core_shares import group, joining

ROOT = Path(__file__).parents[1]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}
PORT = 2222
LEAST_BYTES = 2**16  # of a buffer: it has to hold a packet, and Linux makes large ones of several
BUFFER_S = 0.04  # for which what a port's buffer holds keeps it busy: so long does one message wait for others there
PART = 0.75  # of the cores that workers have together where each has less than one: the program needs some too


class Hosts:
    """Namespaces ``0`` to ``count - 1``, a worker in each: on a core of its own, or with an equal part of the cores.

    ``groups`` are those whose processes share each host's part of the cores, None where it has a whole one.
    """

    def __init__(self, count: int) -> None:
        self.names = [f"bench{os.getpid()}-{n}" for n in range(count)]
        self.addresses = [f"10.78.0.{n + 1}" for n in range(count)]
        self._bridge = f"br{os.getpid()}"
        self.groups: list[Path | None] = [None] * count

    def on(self, number: int, *command: str) -> list[str]:
        """The command, run on a host."""
        return ["ip", "netns", "exec", self.names[number], *command]

    def _port(self, number: int) -> str:
        """The bridge's end of a host's link."""
        return f"{self._bridge}p{number}"

    def limit(self, rate_mbit: int) -> None:
        """Either direction of each host's port carries so much."""
        size_bytes = max(LEAST_BYTES, round(BUFFER_S * rate_mbit * 1e6 / 8))
        for n in range(len(self.names)):
            for device, where in (("eth0", self.on(n)), (self._port(n), [])):
                rate = ["parent", "1:", "classid", "1:1", "htb", "rate", f"{rate_mbit}mbit"]
                _run(*where, "tc", "class", "replace", "dev", device, *rate)
                buffer = ["parent", "1:1", "bfifo", "limit", str(size_bytes)]
                _run(*where, "tc", "qdisc", "replace", "dev", device, *buffer)

    def result_of(self, program: str, *arguments: str) -> Any:
        """What a program on the first host prints at last, as JSON; it is given the workers' addresses."""
        addresses = [f"{address}:{PORT}" for address in self.addresses]
        command = self.on(0, sys.executable, program, *arguments, "--addresses", *addresses)
        with TemporaryDirectory() as cache:  # else the profile would be that of another day
            environment = {**ENVIRONMENT, "XDG_CACHE_HOME": cache}
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment, check=True)
        return json.loads(done.stdout.splitlines()[-1])

    def make(self, ends: ExitStack) -> None:
        """Make what there is to be, which ``ends`` removes; workers answer afterwards."""
        _run("ip", "link", "add", self._bridge, "type", "bridge")
        ends.callback(_run, "ip", "link", "delete", self._bridge)
        _run("ip", "link", "set", self._bridge, "up")
        for n, (name, address) in enumerate(zip(self.names, self.addresses, strict=True)):
            _run("ip", "netns", "add", name)
            ends.callback(_run, "ip", "netns", "delete", name)
            port = self._port(n)
            _run("ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
            _run("ip", "link", "set", port, "master", self._bridge, "up")
            _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                _run("ip", "-n", name, "link", "set", device, "up")
            shaped = ["root", "handle", "1:", "htb", "default", "1"]
            _run(*self.on(n, "tc", "qdisc", "add", "dev", "eth0", *shaped))
            _run("tc", "qdisc", "add", "dev", port, *shaped)  # what the host receives
        self.limit(1000)
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) < len(self.names):
            part = PART * len(cores) / len(self.names)
            self.groups = [group(name, part, ends) for name in self.names]
        workers = [self._worker(n, cores[n % len(cores)]) for n in range(len(self.names))]
        for worker in workers:
            ends.callback(worker.communicate, timeout=20)
        for worker in workers:
            assert worker.stdout is not None and worker.stdout.readline()

    def _worker(self, number: int, core: int) -> subprocess.Popen[str]:
        where = ["--address", self.addresses[number], "--port", str(PORT), "--attended", "--cores", str(core)]
        command = self.on(number, sys.executable, "-m", "pipetrain", "worker", *where, "--inter-threads", "3")
        command, pipe = joining(self.groups[number], command), subprocess.PIPE
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=ENVIRONMENT)


@contextmanager
def emulated(count: int) -> Iterator[Hosts]:
    """So many hosts, while the context lasts; a program that is terminated removes them, too."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with ExitStack() as ends:
        hosts = Hosts(count)
        hosts.make(ends)
        yield hosts


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
