"""gRPC's way to workers, which no proxy knows: a variable such as ``http_proxy`` would let calls wait without end."""

from __future__ import annotations

import os
from collections.abc import Iterable

PROXY = "grpc_proxy"  # goes before https_proxy and http_proxy
EXCEPTIONS = ("no_grpc_proxy", "no_proxy")  # the first of them that is set


def without_proxy() -> None:
    """Let gRPC use none in this process; what reads ``http_proxy`` itself goes on with it."""
    os.environ[PROXY] = ""


def without_proxy_to(hosts: Iterable[str]) -> None:
    """Let gRPC use none to these hosts, and to other hosts the one that it would."""
    found = (os.environ[name] for name in EXCEPTIONS if name in os.environ)
    known = [each.strip() for each in next(found, "").split(",") if each.strip()]
    os.environ[EXCEPTIONS[0]] = ",".join(dict.fromkeys([*known, *hosts]))
