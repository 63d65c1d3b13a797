"""Connections to workers: whether one answers, which processes have connected, and the end of those that hang."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

from pipetrain.cluster.hosts import split, with_port

# HTTP/2's connection preface, with empty settings, which a gRPC server answers with its own settings.
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
SETTINGS_FRAME = 4
NO_HOST, SILENT = "no such host", "no answer"
ASK_S = 1.0  # between two questions to a worker
ANSWER_S = 2.0  # how long it has to answer one
MISSED = 4  # so many without an answer, one after another: it is lost. One alone may be this process', held up itself


def probed(address: str, timeout_s: float) -> str:
    """Probe what listens there once: why no gRPC server answers, empty if one does."""
    host, port = split(address)
    try:
        with socket.create_connection((host, port), timeout_s) as each:
            each.settimeout(timeout_s)
            each.sendall(PREFACE)
            answer = each.recv(9)
        if not answer:  # such as of a tunnel, behind which nobody listens
            return "the connection is closed"
        return "" if len(answer) > 3 and answer[3] == SETTINGS_FRAME else "something else listens there"
    except (socket.gaierror, UnicodeError):  # the latter of names that cannot be any host's
        return NO_HOST
    except TimeoutError:
        return SILENT
    except OSError as error:
        return (error.strerror or str(error)).lower()


def missing(addresses: Iterable[str]) -> dict[str, str]:
    """Those of the workers that do not answer, though asked more than once, and why."""
    asked = list(addresses)
    with ThreadPoolExecutor(max(len(asked), 1)) as pool:
        return {address: why for address, why in zip(asked, pool.map(_why_not, asked), strict=True) if why}


def _why_not(address: str) -> str:
    for left in reversed(range(MISSED)):
        why = probed(address, ANSWER_S)
        if not why or not left:
            return why
        time.sleep(ASK_S / MISSED)
    return ""


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
