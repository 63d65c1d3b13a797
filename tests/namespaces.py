"""Hosts emulated by network namespaces of this machine, joined by a bridge; needs root and iproute2."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

ROOT = Path(__file__).parents[1]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}
PORT = 2222
NEEDED = {"root": os.geteuid() == 0, "ip": shutil.which("ip")}
_number = itertools.count()


class Namespaces:
    """A context: ``count`` namespaces with the addresses ``<net>.1``, ``<net>.2`` ...; their processes end with it.

    ``ends`` takes what a subclass has to end before the namespaces go.
    """

    def __init__(self, count, net):
        # Several may be there at once, in one process too. A network device's name has at most 15 characters.
        self._bridge = f"b{os.getpid()}n{next(_number)}"
        self.addresses = [f"{net}.{n + 1}" for n in range(count)]
        self.spaces = [f"{self._bridge}-{n}" for n in range(count)]

    def __enter__(self):
        with ExitStack() as self.ends:
            self._make()
            self.ends = self.ends.pop_all()
        return self

    def __exit__(self, *_):
        self.ends.close()

    def _make(self):
        run("ip", "link", "add", self._bridge, "type", "bridge")
        self.ends.callback(run, "ip", "link", "delete", self._bridge)
        run("ip", "link", "set", self._bridge, "up")
        for n, (space, address) in enumerate(zip(self.spaces, self.addresses, strict=True)):
            run("ip", "netns", "add", space)
            self.ends.callback(run, "ip", "netns", "delete", space)
            self.ends.callback(self._end_all, n)
            port = f"{self._bridge}p{n}"
            run("ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", space)
            run("ip", "link", "set", port, "master", self._bridge, "up")
            run("ip", "-n", space, "addr", "add", f"{address}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                run("ip", "-n", space, "link", "set", device, "up")

    def on(self, number, *command):
        """The command, run in a namespace."""
        return ["ip", "netns", "exec", self.spaces[number], *map(str, command)]

    def named(self, number, name, hosts, *command):
        """The command, run in a namespace where the machine is called so, and knows others by this file of hosts."""
        inner = f'mount --bind {hosts} /etc/hosts && hostname {name} && exec "$@"'
        space = f"--net=/var/run/netns/{self.spaces[number]}"
        return ["nsenter", space, "unshare", "--uts", "--mount", "sh", "-c", inner, "sh", *map(str, command)]

    def _processes(self, number):
        listed = subprocess.run(["ip", "netns", "pids", self.spaces[number]], capture_output=True, text=True)
        return map(int, listed.stdout.split())

    @contextmanager
    def kept(self):
        """A context that waits until the processes of all namespaces are those of its beginning."""
        before = self._all_processes()
        yield
        wait(lambda: self._all_processes() <= before, "the end of a process")

    def _all_processes(self):
        return {pid for number in range(len(self.spaces)) for pid in self._processes(number)}

    def _end_all(self, number):
        for pid in self._processes(number):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def kill(self, number, argument):
        """Kill the host's processes with this argument."""
        for pid in self._processes(number):
            if argument in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                os.kill(pid, signal.SIGKILL)

    def start(self, command, **settings):
        """A process until the end."""
        quiet = subprocess.DEVNULL
        process = subprocess.Popen(command, stdout=quiet, stderr=quiet, **settings)
        self.ends.callback(process.wait)
        self.ends.callback(process.terminate)


class Workers(Namespaces):
    """Hosts of which the first is a program's, and each of the others has a worker, at the addresses ``workers``.

    ``before(n)`` is a shell's command that each runs first, in the mount namespace of its worker alone.
    """

    def __init__(self, count, net, before=lambda n: "true"):
        super().__init__(count + 1, net)
        self._before = before
        self.workers = [f"{address}:{PORT}" for address in self.addresses[1:]]

    def _make(self):
        super()._make()
        for n, address in enumerate(self.addresses[1:]):
            # ``ip netns exec`` has a mount namespace of its own: what is mounted in it is seen there alone.
            worker = f"exec {sys.executable} -m pipetrain worker --address {address} --port {PORT}"
            self.start(self.on(n + 1, "sh", "-c", f"{self._before(n)} && {worker}"), env=ENVIRONMENT)

    def program(self, *command):
        """A Python program on the first host, when it has ended."""
        line = self.on(0, sys.executable, *command)
        return subprocess.run(line, capture_output=True, text=True, timeout=280, cwd=ROOT, env=ENVIRONMENT)


def run(*command):
    """A command that must succeed."""
    subprocess.run(command, check=True, capture_output=True, text=True)


def wait(is_there, what):
    """Return once ``is_there()``; an error after 30 s."""
    until_s = time.monotonic() + 30
    while not is_there():
        assert time.monotonic() < until_s, f"{what} does not come"
        time.sleep(0.2)
