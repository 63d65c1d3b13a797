"""A worker: TensorFlow's own server in a process of its own, whose devices stages are placed on."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from pipetrain.cluster import host_memory
from pipetrain.cluster.hosts import LOOPBACK, is_loopback, split, with_port
from pipetrain.cluster.sockets import watch_workers
from pipetrain.logs import quiet_stderr

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


# TensorFlow's file system in memory: what a process writes there, and a controller reads, on the worker's device.
ABOUT, ALIVE, END = "ram://pipetrain/worker", "ram://pipetrain/controller", "ram://pipetrain/end"
OWNER, SERVED = "ram://pipetrain/job", "ram://pipetrain/served"
GOES_ON = "ram://pipetrain/goes-on"  # there if another launcher may take over
MOST = 1024  # devices and threads of a worker: more than any machine has cores
JOINS_S = 600.0  # in which a controller joins a worker that was started for it
NAMED_S = 60.0  # in which a scheduler publishes a host's name
GONE_S = 60.0  # a controller that has given no sign of life for so long has gone
LEAVES_S = 3.0  # a controller that has asked workers to end leaves within, and lets go of what it has in them
ATTEND_S = 0.5  # between two looks whether whoever started a worker is there
LOOPBACK_INTERFACE = b"lo\0"


class Serving(NamedTuple):
    """How a worker serves.

    Args:
        address: of this machine, where it is reached; only a loopback one keeps others out.
        port: 0 for any that is free.
        cores: that the process keeps to; None for those it has.
        cpu_devices: how many logical CPU devices there are.
        intra_threads: that one operation uses; None for the cores, divided among the devices.
        inter_threads: operations that run at a time; None for one for each device.
        waits: for the next controller when one has gone; else it ends.
        attended: the process that started it, 0 for its parent: it ends when that or standard input does. None for
            a worker that goes on.
        announce: a file descriptor to which its address is written, and which is then closed, in place of a line on
            standard output.
        gone_s: a controller that has given no sign of life for so long has gone.
        forwarded: ports of this machine that OpenSSH forwards to other workers: only loopback addresses may have them.
        job: whose worker it is, which a controller of another job refuses.
    """

    address: str = LOOPBACK
    port: int = 2222
    cores: Sequence[int] | None = None
    cpu_devices: int = 1
    intra_threads: int | None = None
    inter_threads: int | None = None
    waits: bool = True
    attended: int | None = None
    announce: int | None = None
    gone_s: float = GONE_S
    forwarded: Sequence[int] = ()
    job: str = ""


def serve(serving: Serving) -> None:
    """Serve until SIGTERM, Ctrl-C or, as far as it is asked for, the end of whoever started or controlled it.

    Raises ValueError, before TensorFlow starts, for a port in use, an address that is not this machine's, and cores
    that this process may not use.
    """
    starter = serving.attended or os.getppid()
    _await_name(serving)
    check_port(serving.address, serving.port)
    check_forwarded(serving.forwarded)
    _pin(serving.cores)
    without_proxy()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    stop, begun = threading.Event(), threading.Event()
    if serving.attended is not None:
        for attend in (partial(_attend, starter), _read_input):
            threading.Thread(target=_stop_after, args=(attend, stop, begun), daemon=True).start()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    with quiet_stderr():
        address = _start(serving)
    if serving.announce is None:  # printed, not logged: the process serves alone, and other programs read its output
        _print(f"Worker at {address}, {serving.cpu_devices} CPU device(s). {_exposure(serving)}")
    else:
        with os.fdopen(serving.announce, "w") as announced:
            announced.write(f"{address}\n")
    watch_workers(split(address)[1])
    begun.set()
    _wait(stop, serving)
    host_memory.sweep()
    # TensorFlow's server cannot be stopped, and interpreter and server may wait for each other at the end.
    with contextlib.suppress(OSError):  # whoever read standard output may have gone
        sys.stdout.flush()
    os._exit(0)


def _start(serving: Serving) -> str:
    """Start TensorFlow's server, which so far knows of no other task; its address."""
    import tensorflow as tf

    from pipetrain.compute.cores import cores, give_own_pools, own_host, own_machine

    give_own_pools()
    config = tf.compat.v1.ConfigProto(
        device_count={"CPU": serving.cpu_devices},
        intra_op_parallelism_threads=serving.intra_threads or max(1, len(cores()) // serving.cpu_devices),
        inter_op_parallelism_threads=serving.inter_threads or serving.cpu_devices,
    )
    cluster = {"worker": [with_port(serving.address, serving.port)]}
    try:
        server = tf.distribute.Server(cluster, job_name="worker", task_index=0, config=config, start=False)
    except tf.errors.OpError as error:
        raise ValueError(
            f"TensorFlow's server does not start: {error.message}. Received: {cluster['worker'][0]}. Try another port."
        ) from error
    port = int(server.target.rsplit(":", 1)[1])
    if is_loopback(serving.address):
        try:
            keep_to_loopback(listening(port))
        except OSError as error:
            raise ValueError(
                f"This system cannot keep TensorFlow's server to this machine: {error}. Received: {serving.address}. "
                "Try an address of this machine, within a network that you trust."
            ) from error
    about = {"tensorflow": tf.__version__, "host": own_host(), "machine": own_machine(), "cores": cores()}
    if (memory := host_memory.folder()) is not None:
        about["memory"] = str(memory)
    tf.io.gfile.makedirs(os.path.dirname(ABOUT))
    goes_on = {GOES_ON: ""} if serving.attended is None or serving.gone_s > GONE_S else {}
    for name, text in {ABOUT: json.dumps(about), OWNER: serving.job, **goes_on}.items():
        with tf.io.gfile.GFile(name, "w") as file:
            file.write(text)
    server.start()
    return with_port(serving.address, port)


def keep_to_loopback(descriptors: Iterable[int]) -> None:
    """Let no other machine reach these sockets: TensorFlow's servers listen on all addresses.

    Raises OSError where the system cannot.
    """
    for descriptor in descriptors:
        with socket.socket(fileno=os.dup(descriptor)) as each:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, LOOPBACK_INTERFACE)


def listening(port: int | None = None) -> list[int]:
    """This process' descriptors that listen, on this port or any, by Linux' own tables."""
    sockets = set()
    for table in ("tcp", "tcp6"):
        path = Path(f"/proc/self/net/{table}")
        for line in path.read_text(encoding="ascii").splitlines()[1:] if path.exists() else ():
            fields = line.split()
            if fields[3] == "0A" and port in (None, int(fields[1].rpartition(":")[2], 16)):
                sockets.add(f"socket:[{fields[9]}]")
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one that lists them
            if os.readlink(f"/proc/self/fd/{descriptor}") in sockets:
                found.append(int(descriptor))
    return found


def _exposure(serving: Serving) -> str:
    if is_loopback(serving.address):
        return (
            "Only this machine can reach it. Every user of this machine can run code here with the rights of whoever "
            "started it: TensorFlow's server asks for no password."
        )
    return (
        "Whoever reaches this port, on any address of this machine, can run code here: TensorFlow's server asks for no "
        "password and encrypts nothing. Keep it within a network that you trust, or a tunnel."
    )


def _await_name(serving: Serving) -> None:
    """Wait until this host's name is known: a scheduler may publish it when its processes have started."""
    until_s = time.monotonic() + NAMED_S
    while serving.job and time.monotonic() < until_s:
        try:
            socket.getaddrinfo(serving.address, None)
            return
        except (OSError, UnicodeError):
            time.sleep(ATTEND_S)


def check_port(address: str, port: int) -> None:
    """Raise ValueError where no worker can listen; TensorFlow's server would say less, and later."""
    where = with_port(address, port)
    if port:
        split(where)
    try:
        family, _, _, _, (host, *_) = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0]
        for kind, name, number in ((family, host, 0), (socket.AF_INET, "", port)):
            with socket.socket(kind) as each:
                each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                each.bind((name, number))
    except (OSError, UnicodeError) as error:
        raise ValueError(
            f"Nothing can listen there: {getattr(error, 'strerror', None) or error}. Received: {where}. "
            "Try another port, an address of this machine (0.0.0.0 where others know it by another), or ending what "
            "listens there."
        ) from error


def check_forwarded(ports: Sequence[int]) -> None:
    """Raise ValueError for a port that OpenSSH's server forwards on other addresses than loopback ones."""
    for table in ("tcp", "tcp6"):
        path = Path(f"/proc/self/net/{table}")
        for line in path.read_text(encoding="ascii").splitlines()[1:] if path.exists() and ports else ():
            _, local, _, state, *_ = line.split()
            host, _, port = local.rpartition(":")
            if state == "0A" and int(port, 16) in ports and not (host.endswith("7F") or host.endswith("01000000")):
                raise ValueError(
                    "OpenSSH's server on this host opens forwarded ports to its network. Received: port "
                    f"{int(port, 16)}. Try GatewayPorts no, or clientspecified, in its sshd_config."
                )


def _pin(cores: Sequence[int] | None) -> None:
    if cores is None:
        return
    try:
        os.sched_setaffinity(0, cores)
    except (AttributeError, OSError) as error:
        raise ValueError(f"These cores cannot be used: {error}. Received: cores={[*cores]}. Try others.") from error


def _stop_after(attend: Callable[[], None], stop: threading.Event, begun: threading.Event) -> None:
    """Stop when whoever is attended to has gone; at once, while TensorFlow starts, which may take long."""
    attend()
    if not begun.is_set():
        os._exit(0)
    stop.set()


def _attend(starter: int) -> None:
    """Whoever that process forked may hold the other end of standard input: its end alone would tell too late.

    A signal at the parent's death (Linux' PR_SET_PDEATHSIG) would come at the end of the thread that started this one.
    """
    while os.getppid() == starter:
        time.sleep(ATTEND_S)


def _read_input() -> None:
    with contextlib.suppress(OSError):
        while os.read(0, 1024):
            pass


def _wait(stop: threading.Event, serving: Serving) -> None:
    """Until asked to stop, by a signal or a controller, or, unless it ``waits``, left by one.

    A worker that somebody attends to is also left by a controller that never joins. It says when controllers come and
    go, unless it announces its address to who started it.
    """
    import tensorflow as tf

    waits, says = serving.waits, serving.announce is None
    last, since_s, is_joined = "", time.monotonic(), False
    while not stop.wait(1.0):
        host_memory.sweep()
        passed_s = time.monotonic() - since_s
        if tf.io.gfile.exists(END):
            _say("The controller has ended: the worker ends.", says)
            stop.wait(LEAVES_S)
            return
        if not tf.io.gfile.exists(ALIVE):
            if not waits and serving.attended is not None and passed_s > JOINS_S:
                return _say(f"No controller has joined within {JOINS_S:.0f} s: the worker ends.", True)
            continue
        with tf.io.gfile.GFile(ALIVE) as file:
            sign = file.read()
        if sign != last:
            if not is_joined:
                _say("A controller has joined.", says)
            last, since_s, is_joined = sign, time.monotonic(), True
        elif is_joined and passed_s > serving.gone_s:
            is_joined, what = False, "waits for the next one" if waits else "ends"
            _say(
                f"The controller has given no sign of life for {serving.gone_s:.0f} s: the worker {what}.",
                says or not waits,
            )
            if not waits:
                return


def _say(what: str, says: bool) -> None:
    if says:
        _print(f"{time.strftime('%H:%M:%S')} {what}")


def _print(line: str) -> None:
    with contextlib.suppress(OSError):  # whoever read standard output may have gone: the worker goes on
        print(line, flush=True)
