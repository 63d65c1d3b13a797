"""Worker processes on other hosts, started by OpenSSH and reached through its tunnels alone."""

from __future__ import annotations

import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from importlib import metadata
from types import TracebackType
from typing import TYPE_CHECKING

from pipetrain.cluster.hosts import LOOPBACK, launched_worker, split
from pipetrain.cluster.server import GONE_S
from pipetrain.logs import quiet_stderr

if TYPE_CHECKING:
    from pipetrain.cluster.local_workers import LocalWorkers

SAID = "Worker at "  # what a worker says when it serves
BUSY = ("forwarding failed", "Nothing can listen", "cannot listen to port")  # what is said of ports in use
START_S = 60.0  # TensorFlow is imported within, on a host that may be busy
END_S = 10.0
RENEW_S = 3.0  # for the connection to a host that does not answer any more
TRIES = 3  # with other ports
LINES = 8  # of what a host says, told where its worker does not start
OPTIONS = {
    "BatchMode": "yes",  # nobody is asked for a password
    "ConnectTimeout": "8",
    "ExitOnForwardFailure": "yes",
    "ServerAliveInterval": "5",
    "ServerAliveCountMax": "3",
    "ControlMaster": "no",  # a connection of its own, that ends with this process
    "ControlPath": "none",
    "ForwardAgent": "no",
    "ForwardX11": "no",
    "PermitLocalCommand": "no",
}


class SshWorkers:
    """A worker on each host; ``connect`` takes their ``addresses``, which are loopback ones.

    Workers listen on their host's loopback interface only. The ports are the same on all hosts: OpenSSH forwards those
    of the other workers, so that each worker has the same address everywhere, and no port is open on any network. What
    two of the hosts send each other goes through this one. It is a context manager: workers and tunnels end with the
    context, and with this process. Users of one of the hosts can reach the workers from there.

    Args:
        hosts: as OpenSSH takes them, each once; ``localhost`` is this one, without OpenSSH.
        cpu_devices: logical CPU devices of each worker.
        python: the command of Python on the hosts; by default this one's path.
        ssh: the command of OpenSSH's client, with further options.
        say: is given what a host writes, line by line, and the host.
        gone_s: workers that are cut off from this host end after so long without a sign of life.

    Raises:
        ConnectionError: for a host that cannot be reached, or whose worker does not start, with what it says.
    """

    def __init__(
        self,
        hosts: Sequence[str],
        cpu_devices: int = 1,
        python: Sequence[str] = (),
        ssh: Sequence[str] = ("ssh",),
        say: Callable[[str, str], None] = lambda host, line: None,
        gone_s: float = GONE_S,
    ) -> None:
        self._hosts, self._cpu_devices, self._say, self._gone_s = list(hosts), cpu_devices, say, gone_s
        self._python, self._ssh = list(python) or [sys.executable], list(ssh)
        self._local: LocalWorkers | None = None
        self.connections: dict[str, Connection] = {}
        self.addresses: list[str] = []
        for left in reversed(range(TRIES)):
            try:
                self._start(free_ports(len(hosts)))
            except BaseException as error:
                self.end()
                if not (left and isinstance(error, ConnectionError) and any(each in str(error) for each in BUSY)):
                    raise
            else:
                return

    def _start(self, ports: Sequence[int]) -> None:
        self.addresses = [f"{LOOPBACK}:{port}" for port in ports]
        of_host = dict(zip(self._hosts, ports, strict=True))
        for host in of_host:
            if host != "localhost":
                self._connect(host)
        if "localhost" in of_host:
            with quiet_stderr():  # TensorFlow, which the other hosts are not to wait for
                from pipetrain.cluster.local_workers import LocalWorkers
            self._local = LocalWorkers(1, self._cpu_devices, [of_host["localhost"]])
        self._wait_until_serving()

    def _connect(self, host: str) -> None:
        ports = [split(address)[1] for address in self.addresses]
        port = ports.pop(self._hosts.index(host))
        self.connections[host] = Connection(host, self._command(host, port, ports), self._say, shlex.join(self._ssh))

    def _wait_until_serving(self) -> None:
        until_s = time.monotonic() + START_S
        while waiting := [each for each in self.connections.values() if not each.serves]:
            for connection in waiting:
                connection.check(until_s)
            time.sleep(0.05)

    def _command(self, host: str, port: int, others: Sequence[int]) -> list[str]:
        """OpenSSH with a worker at the other end, whose port is brought here, and other workers' ports there."""
        forwarded = ["-L", f"{LOOPBACK}:{port}:{LOOPBACK}:{port}"]
        for each in others:
            forwarded += ["-R", f"{LOOPBACK}:{each}:{LOOPBACK}:{each}"]
        more = ["--forwarded", ",".join(map(str, others))] if others else []
        for name in ("tensorflow", "pipetrain"):
            with suppress(metadata.PackageNotFoundError):
                more += ["--expect", f"{name}=={metadata.version(name)}"]
        # As Python finds the package there, which this host's folders say nothing of.
        worker = launched_worker(port, self._cpu_devices, self._gone_s, *more, python=self._python, root="")
        options = [part for name, value in OPTIONS.items() for part in ("-o", f"{name}={value}")]
        said = f"exec {shlex.join(worker)} 2>&1"  # to a shell that is known, whichever the user's is
        return [*self._ssh, "-T", *options, *forwarded, "--", host, f"exec {shlex.join(['sh', '-c', said])}"]

    @property
    def names(self) -> dict[str, str]:
        """The host of each address."""
        return dict(zip(self.addresses, self._hosts, strict=True))

    def renew(self, addresses: Iterable[str]) -> None:
        """End these workers if they have not ended, and start others in their places, with the same addresses.

        Raises ConnectionError, ChildProcessError for one that does not start.
        """
        lost = [self._hosts[self.addresses.index(address)] for address in addresses]
        if "localhost" in lost and self._local is not None:
            self._local.renew(self._local.addresses)
        others = [host for host in lost if host != "localhost"]
        for host in others:
            self.connections[host].close()
            self.connections[host].end(time.monotonic() + RENEW_S)
            self._connect(host)
        self._wait_until_serving()

    def end(self) -> None:
        """End workers and tunnels."""
        for connection in self.connections.values():
            connection.close()
        until_s = time.monotonic() + END_S
        for connection in self.connections.values():
            connection.end(until_s)
        self.connections = {}
        if self._local is not None:
            self._local.end()
            self._local = None

    def __enter__(self) -> SshWorkers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end()


class Connection:
    """OpenSSH's client at work, with a worker at the other end that ends with it.

    Args:
        host: at the other end.
        command: with its arguments.
        say: is given the host, and each line that it writes once the worker serves.
        ssh: OpenSSH's client with the options that it was given.
    """

    def __init__(self, host: str, command: Sequence[str], say: Callable[[str, str], None], ssh: str = "ssh") -> None:
        self.host, self._say, self._ssh = host, say, ssh
        self._lines: list[str] = []  # the last ones
        self._serves = threading.Event()
        # A session of its own: a terminal's Ctrl-C is for the controller, which ends workers when it has drained.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        )
        self._reader = threading.Thread(target=self._read, name=f"output of {host}", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            text = line.decode(errors="replace").rstrip()
            self._lines = [*self._lines[1 - LINES :], text]
            if self._serves.is_set():
                with suppress(OSError):  # nobody reads it any more
                    self._say(self.host, text)
            elif text.startswith(SAID):
                self._serves.set()

    @property
    def has_ended(self) -> bool:
        """Whether there is no connection any more."""
        return self._process.poll() is not None

    @property
    def last(self) -> str:
        """The last line that the host, or OpenSSH, has written."""
        return next((line for line in reversed(self._lines) if line), "")

    @property
    def serves(self) -> bool:
        """Whether the worker has said that it serves."""
        return self._serves.is_set()

    def check(self, until_s: float) -> None:
        """Raise ConnectionError if the worker has ended before it serves, or does not serve by then."""
        if self.has_ended:
            self._reader.join(1.0)
            raise ConnectionError(self._problem())
        if time.monotonic() > until_s:
            raise ConnectionError(
                f"The worker on {self.host} does not serve within {START_S:.0f} s. Received: "
                f"{self.last or 'nothing from it'}. Try python -m pipetrain worker there."
            )

    def _problem(self) -> str:
        status, said = self._process.returncode, " / ".join(line for line in self._lines if line) or "nothing"
        if any(each in said for each in BUSY):
            return (
                f"A port is in use on {self.host}, or is forwarded by OpenSSH's own configuration. Received: {said}. "
                "Try again; localhost for this machine; a host by one name only."
            )
        if status == 255:  # OpenSSH's own
            remedy = "must work without a password: by a key that ssh-agent holds, for example"
            if "Host key verification failed" in said:
                remedy = "asks whether you know the host's key"
            return (
                f"OpenSSH does not reach {self.host}. Received: {said.rstrip('.')}. Try {self._ssh} {self.host} true, "
                f"which {remedy}."
            )
        if status in (126, 127):
            return f"There is no such Python on {self.host}. Received: {said}. Try --python PATH, its path there."
        if "No module named 'pipetrain'" in said:
            return (
                f"Python on {self.host} has no pipetrain. Received: {self.last}. Try installing it there, or --python "
                "PATH of a Python that has it."
            )
        return (
            f"The worker on {self.host} does not start (exit status {status}). Received: {said}. "
            "Try python -m pipetrain worker there."
        )

    def close(self) -> None:
        """Let the worker know that it is to end, by the end of its standard input."""
        if self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()

    def end(self, until_s: float) -> None:
        """Wait until then for the connection to end, and then end it."""
        try:
            self._process.wait(max(until_s - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            self._process.terminate()
            try:
                self._process.wait(1.0)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._reader.join(1.0)


def free_ports(count: int) -> list[int]:
    """Ports of this host's loopback interface on which nobody listens now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind((LOOPBACK, 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()
