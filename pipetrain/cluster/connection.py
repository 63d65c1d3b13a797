"""The controller's way to the workers of a cluster, through TensorFlow's own runtime, and its signs of life."""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from typing import Any, TypeVar, cast

import tensorflow as tf

from pipetrain.cluster.hosts import RUN, Hosts, job_of, split
from pipetrain.cluster.server import (
    ABOUT,
    ALIVE,
    END,
    GOES_ON,
    OWNER,
    SERVED,
    keep_to_loopback,
    listening,
    without_proxy_to,
)
from pipetrain.cluster.sockets import NO_HOST, probed
from pipetrain.compute.cores import cores
from pipetrain.run.control import CallThread

RETRY_S = 0.2
TELL_S = 5.0  # who waits longer says for whom
_logger = logging.getLogger(__name__)


def check_answers(hosts: Hosts, timeout_s: float) -> None:
    """Raise ConnectionError for workers that do not answer: TensorFlow itself would wait for minutes, or exit.

    Raises ValueError for two addresses of one worker.
    """
    begun_s = time.monotonic()
    _check_names(hosts)
    with ThreadPoolExecutor(len(hosts.workers)) as pool:
        asked = [pool.submit(_unreachable, address, begun_s + timeout_s) for address in hosts.workers]
        left = wait(asked, TELL_S).not_done
        if left:
            late = [address for address, each in zip(hosts.workers, asked, strict=True) if each in left]
            _logger.info("Waiting up to %g s for workers: %s.", timeout_s, ", ".join(late))
    answers = [each.result() for each in asked]
    silent = [f"{address} ({why})" for address, why in zip(hosts.workers, answers, strict=True) if why]
    if silent:
        raise ConnectionError(
            f"Workers do not answer. Received: {', '.join(silent)}, tried for {time.monotonic() - begun_s:.0f} s. "
            "Try starting them there with python -m pipetrain worker, other addresses, or opening the port."
        )


def _check_names(hosts: Hosts) -> None:
    """Raise ValueError for two addresses of one worker, as far as names tell."""
    known: dict[Any, str] = {}
    for address in hosts.workers:
        found = []
        with contextlib.suppress(OSError, UnicodeError):  # no such host, which will be said
            found = [each[4][:2] for each in socket.getaddrinfo(*split(address), type=socket.SOCK_STREAM)]
        for each in found:
            if known.setdefault(each, address) != address:
                raise ValueError(
                    f"Two of the addresses are of one worker. Received: {known[each]} and {address}. "
                    "Try one address of each."
                )


def _unreachable(address: str, until_s: float) -> str:
    """Why no gRPC server answers there; empty if one does.

    A name that there is not will not come, unless a scheduler is about to publish it.
    """
    final = ("",) if job_of(address) else ("", NO_HOST)
    while True:
        why = probed(address, max(until_s - time.monotonic(), RETRY_S))
        if why in final or time.monotonic() + RETRY_S > until_s:
            return why
        time.sleep(RETRY_S)


def check_versions(hosts: Hosts, versions: Sequence[str | None]) -> None:
    """Raise ValueError for another TensorFlow: they may understand each other, and kernels compute something else."""
    others = [
        f"{address} has {version}"
        for address, version in zip(hosts.workers, versions, strict=True)
        if version not in (None, tf.__version__)
    ]
    if others:
        raise ValueError(
            f"Workers have another TensorFlow. Received: {', '.join(others)}; the controller has {tf.__version__}. "
            "Try the same version everywhere, and then a new process."
        )


def check_jobs(hosts: Hosts, jobs: Sequence[str]) -> None:
    """Raise ValueError for workers of other jobs than a launcher has told; a program that nobody launched joins any.

    Two jobs may have been given the same ports: the second one's worker cannot listen there, and the first's does.
    """
    others = {
        address: f"{address} of {f'job {job}' if job else 'no job'}"
        for address, job in zip(hosts.workers, jobs, strict=True)
        if job_of(address) not in (None, job)
    }
    if others:
        raise ValueError(
            f"Workers are another job's. Received: {', '.join(others.values())}; this is job "
            f"{job_of(next(iter(others)))}. Try other ports by --port, or when that job has ended; --job names a job."
        )


def check_served(hosts: Hosts, runs: Sequence[str]) -> None:
    """Raise ValueError for workers that another launcher's scripts have used, and that are not to go on after it."""
    run = os.environ.get(RUN, "")
    left = [address for address, other in zip(hosts.workers, runs, strict=True) if run and other not in ("", run)]
    if left:
        raise ValueError(
            f"Workers are left over from an earlier launch, and are asked to end. Received: {', '.join(left)}. Try "
            "again; or --wait, or one name for both by --job, on all hosts, for workers that go on with who launches "
            "next."
        )


BEAT_S = 5.0


class Heartbeat(threading.Thread):
    """Writes to one worker every so many seconds, for as long as the process lasts."""

    def __init__(self, device: str) -> None:
        super().__init__(name=f"heartbeat to {device}", daemon=True)
        self._device, self._ended = device, threading.Event()
        atexit.register(self.end)

    def run(self) -> None:
        """The thread's body."""
        while not self._ended.is_set():
            try:
                with tf.device(self._device):
                    tf.io.write_file(ALIVE, f"{os.getpid()} {time.time()}")
            except tf.errors.OpError:  # it has died; one that is started anew, and joined, gets them again
                pass
            self._ended.wait(BEAT_S)

    def end(self) -> None:
        """Write no more; waits a moment for one that is on its way, and no longer: the worker may be gone."""
        self._ended.set()
        self.join(1.0)


JOB = "worker"
JOINED_S = 10.0  # workers that answer join within, on a busy machine too
TWICE = "Invalid rendezvous key"  # in what TensorFlow says where a worker is given twice

Value = TypeVar("Value")
Given = Any  # a mapping, addresses, a path, or one of TensorFlow's cluster resolvers, which have no types


def connect(cluster: Given = None, timeout_s: float = 20.0) -> list[str]:
    """Join the workers of a cluster; returns their devices, GPUs or else CPU devices, in the order of the workers.

    Call it before any variable or model is made: TensorFlow can read variables made before, but no longer write them.
    Afterwards stages are placed on these devices by default. Called again for the same cluster, it joins workers that
    have been restarted.

    Args:
        cluster: a hosts file, addresses ``host:port``, ``{"workers": addresses}``, or one of TensorFlow's cluster
            resolvers (such as Slurm's, Kubernetes'), of which the job ``worker`` is used. By default that of the
            environment variable TF_CONFIG.
        timeout_s: how long to wait for workers that do not answer yet; those that answer have as long again to join,
            and at least ten seconds.

    Raises:
        ValueError: for an argument that describes no cluster, a worker with another version of TensorFlow, one
            given by two addresses, or one of another job than the script's, which ``pipetrain launch`` runs, or of an
            earlier launch.
        ConnectionError: for workers that do not answer, with the reason for each, or do not join.
        RuntimeError: if a variable or model was made before, or another cluster has been joined.
    """
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, (int, float)) or not 0 < timeout_s < math.inf:
        raise ValueError(f"Workers are waited for some time. Received: timeout_s={timeout_s!r}. Try 20.0.")
    hosts = described_by(cluster)
    spec = tf.train.ClusterSpec({JOB: list(hosts.workers)})
    _check_time(spec)
    check_answers(hosts, timeout_s)
    _let_messages_in()
    without_proxy_to(split(address)[0] for address in hosts.workers)
    before = set(listening())
    devices, versions, jobs, runs = _within(max(timeout_s, JOINED_S), hosts, lambda: _join(spec))
    _JOINED.append(spec)
    with contextlib.suppress(OSError):  # workers never call the controller: nobody else needs to reach it
        keep_to_loopback(set(listening()) - before)
    check_jobs(hosts, jobs)
    check_versions(hosts, versions)
    check_served(hosts, runs)
    for task in range(len(hosts.workers)):
        _take(task)
        _beat(task)
    return devices


def _join(spec: tf.train.ClusterSpec) -> tuple[list[str], list[Any], list[str], list[str]]:
    """The workers' devices, their versions of TensorFlow, whose they are, and of which launcher's run they were."""
    tf.config.experimental_connect_to_cluster(spec)
    tasks = range(spec.num_tasks(JOB))
    versions, jobs = [about(task).get("tensorflow") for task in tasks], [_job(task) for task in tasks]
    return remote_devices(), versions, jobs, [_run(task) for task in tasks]


def _within(limit_s: float, hosts: Hosts, join: Callable[[], Value]) -> Value:
    """``join()``, in a thread that is left after so long: TensorFlow's calls wait for who says nothing without end."""
    thread, until_s = CallThread(join), time.monotonic() + limit_s
    thread.start()
    thread.ended(lambda: time.monotonic() > until_s)
    received = f"Received: {', '.join(hosts.workers)}"
    if thread.is_alive():
        raise ConnectionError(
            f"Workers answer, but do not join within {limit_s:g} s: one is stopped, or no worker. {received}. "
            "Try python -m pipetrain worker there, and then a new process."
        )
    try:
        return cast(Value, thread.outcome())
    except tf.errors.OpError as error:
        if TWICE in error.message:
            raise ValueError(
                f"Two of the addresses are of one worker. {received}. Try one address of each, in a new process."
            ) from error
        raise ConnectionError(
            f"TensorFlow cannot join the workers: {error.message.splitlines()[0]}. {received}. "
            "Try python -m pipetrain worker there, and then a new process."
        ) from error


def _let_messages_in() -> None:
    """Let a worker run two operations at a time at least: with one, nothing that arrives is taken while it computes.

    Workers take the number from this process, whatever their own is. Where TensorFlow has started it is fixed.
    """
    threading = tf.config.threading
    with contextlib.suppress(RuntimeError):
        threading.set_inter_op_parallelism_threads(max(2, threading.get_inter_op_parallelism_threads() or len(cores())))


_JOINED: list[tf.train.ClusterSpec] = []  # TensorFlow's runtime is one for the process, and does not tell


def joins() -> int:
    """How often workers have been joined: those of an earlier time may have been started anew, and elsewhere."""
    return len(_JOINED)


_HEARTBEATS: dict[int, Heartbeat] = {}  # by the worker's task


def _beat(task: int) -> None:
    if task not in _HEARTBEATS:
        _HEARTBEATS[task] = Heartbeat(_cpu(task))
        _HEARTBEATS[task].start()


def described_by(cluster: Given) -> Hosts:
    """The workers that ``connect`` would join. Raises ValueError for what describes none."""
    if cluster is None:
        text = os.environ.get("TF_CONFIG")
        if not text:
            raise ValueError("There is no cluster. Received: cluster=None, no TF_CONFIG. Try a hosts file.")
        return Hosts.of_tf_config(text)
    if isinstance(cluster, (str, os.PathLike)):
        return Hosts.load(cluster)
    if hasattr(cluster, "cluster_spec"):
        cluster = cluster.cluster_spec()
    if isinstance(cluster, tf.train.ClusterSpec):
        cluster = cluster.as_dict()
    return Hosts.given(cluster)


def end_workers(limit_s: float = 5.0) -> None:
    """Ask all workers of this job that are joined to end; those that do not hear it within this time are left."""
    threads = []
    for task in range(_JOINED[-1].num_tasks(JOB) if _JOINED else 0):
        threads.append(CallThread(partial(_ask_to_end, task)))
        threads[-1].start()
    until_s = time.monotonic() + limit_s
    for thread in threads:
        thread.ended(lambda: time.monotonic() > until_s)


def _ask_to_end(task: int) -> None:
    if _job(task) == (job_of(_JOINED[-1].task_address(JOB, task)) or ""):
        with tf.device(_cpu(task)):
            tf.io.write_file(END, "")


def remote_devices() -> list[str]:
    """The workers' GPUs, or CPU devices of those that have none, in the order of the workers."""
    by_task: dict[int, list[tf.DeviceSpec]] = {}
    for device in tf.config.list_logical_devices():
        spec = tf.DeviceSpec.from_string(device.name)
        if spec.job == JOB and spec.device_type in ("CPU", "GPU"):
            by_task.setdefault(spec.task, []).append(spec)
    chosen = []
    for _, specs in sorted(by_task.items()):
        gpus = [spec for spec in specs if spec.device_type == "GPU"]
        chosen += gpus or specs
    return [spec.to_string() for spec in chosen]


def task_of(device: str) -> int | None:
    """Which worker's device this is; None for one of this process."""
    spec = tf.DeviceSpec.from_string(device)
    return spec.task if spec.job == JOB else None


def _cpu(task: int) -> str:
    return f"/job:{JOB}/replica:0/task:{task}/device:CPU:0"


def about(task: int) -> dict[str, Any]:
    """What a worker says of itself: versions, host, cores; empty for a server that is not this package's."""
    with tf.device(_cpu(task)):
        try:
            return dict(json.loads(tf.io.read_file(ABOUT).numpy()))
        except tf.errors.NotFoundError:
            return {}


def _job(task: int) -> str:
    """Whose worker it is; empty for one of nobody in particular."""
    return _noted(task, OWNER) or ""


def _run(task: int) -> str:
    """Which launcher's run the worker was of; empty for one that may be of any."""
    if not os.environ.get(RUN) or _noted(task, GOES_ON) is not None:
        return ""
    return _noted(task, SERVED) or ""


def _take(task: int) -> None:
    """Note that the worker is of this launcher's run."""
    if run := os.environ.get(RUN):
        with tf.device(_cpu(task)):
            tf.io.write_file(SERVED, run)


def _noted(task: int, name: str) -> str | None:
    """What a file in the worker's memory holds; None without it.

    To read one that there is not would fail, which TensorFlow writes on both sides' terminals.
    """
    with tf.device(_cpu(task)):
        if not int(tf.size(tf.io.matching_files(name))):
            return None
        return str(tf.io.read_file(name).numpy().decode())


def place(device: str) -> str:
    """On which host and cores a worker's device is, and with which devices beside it; empty for one of this process."""
    task = task_of(device)
    return "" if task is None else f"{sorted(about(task).items())}, {len(remote_devices())} devices"


def _check_time(spec: tf.train.ClusterSpec) -> None:
    if _JOINED and _JOINED[-1] != spec:
        raise RuntimeError(
            "TensorFlow has joined another cluster already, and cannot change it without losing variables. "
            f"Received: cluster={spec.as_dict()}, joined {_JOINED[-1].as_dict()}. Try a new process."
        )
    made = 0 if _JOINED else sum(issubclass(type(each), tf.Variable) for each in gc.get_objects())
    if made:
        raise RuntimeError(
            f"It is too late to join a cluster: TensorFlow would no longer write the {made} variables that there are. "
            "Received: pipetrain.connect after variables or models were made. Try it first."
        )


def worker_of(device: str) -> str | None:
    """The address of the worker whose device this is; None for one of this process."""
    spec = tf.DeviceSpec.from_string(device)
    return _JOINED[-1].task_address(JOB, spec.task) if spec.job == JOB and _JOINED else None
