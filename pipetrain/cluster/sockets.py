"""The processes that this one has connected to, and the end of connections to those that hang."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterable, Iterator

from pipetrain.cluster.hosts import split, with_port
from pipetrain.cluster.probe import ASK_S, SILENT, missing

SEVER_S = 0.2  # between two times: TensorFlow connects anew


def sever(addresses: Iterable[str]) -> None:
    """Close every connection of this process to these addresses, as if the other side had (on Linux)."""
    theirs = set()
    for address in addresses:
        host, port = split(address)
        with contextlib.suppress(OSError):
            theirs |= {each[4][:2] for each in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    for each in _connected():
        with contextlib.suppress(OSError):  # it may have ended by now
            if _remote_address(each) in theirs:
                each.shutdown(socket.SHUT_RDWR)


def remote_addresses(port: int) -> set[str]:
    """Addresses that this process has connected to, which itself listens on a port (on Linux)."""
    found = set()
    for each in _connected():
        with contextlib.suppress(OSError):
            host, theirs = _remote_address(each)
            if each.getsockname()[1] != port:
                found.add(with_port(host, theirs))
    return found


def watch_workers(port: int) -> None:
    """A worker's thread: another worker that hangs must not hold up this one, which waits for what that one sends.

    TensorFlow would wait for ever, and serve no other controller meanwhile.
    """

    def watch() -> None:
        while True:
            time.sleep(ASK_S)
            sever(address for address, why in missing(remote_addresses(port)).items() if why == SILENT)

    threading.Thread(target=watch, name="watch of workers", daemon=True).start()


def _connected() -> Iterator[socket.socket]:
    """This process' connections, each open until the next is asked for."""
    for descriptor in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with contextlib.suppress(OSError):  # it may be closed by now
            if not os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(descriptor))) as each:
                if each.family in (socket.AF_INET, socket.AF_INET6) and each.getpeername():
                    yield each


def _remote_address(each: socket.socket) -> tuple[str, int]:
    host, port = each.getpeername()[:2]
    return host.removeprefix("::ffff:"), port
