"""Whether a worker is there: any gRPC server answers the connection preface, busy or not; one that hangs does not."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from pipetrain.cluster.hosts import split

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
