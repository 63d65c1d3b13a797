"""The links between workers and their processors, measured: bandwidth, speeds, and what else needs processors."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from itertools import combinations
from typing import Any

import numpy as np
import tensorflow as tf

from pipetrain.cluster.connection import about, joins, task_of
from pipetrain.compute.cores import HOST, cores, finish, is_processor, is_remote, own_machine
from pipetrain.plan.cluster import PCIE_3, SHARED_MEMORY, Cluster, Level, Link, devices_on_cores
from pipetrain.schemes.transfers.plan import Message

REPEATS = 7
HOPS = 40  # of a message to and fro, by which its latency is measured
ACTIONS = 10  # one after another, by which an action's overhead is measured
LONG_S = 0.1  # a copy that takes so much longer than an empty one tells the bandwidth
SMALLEST_BYTES, LARGEST_BYTES = 2**16, 2**25
FASTEST_BYTES_PER_S = 1e11  # no copy between processes is faster, whatever other work does to the clock


def joined(devices: Sequence[str], within_functions: bool = False) -> Cluster:
    """The cluster of these devices: what joins each two of them, what calls take, and how many work at once.

    Devices of one process share its memory or PCIe; the link between each two hosts is measured, as is that between
    processes of one host, once for as long as the workers are the same: for messages that a thread's calls wait for,
    and calls for each action; or, ``within_functions`` over all devices, for messages whose latency is less, and calls
    of all devices.
    """
    _forget_former_workers()
    own = Link(SHARED_MEMORY.bandwidth_bytes_per_s)
    between = [[own] * len(devices) for _ in devices]
    for (i, first), (j, last) in combinations(enumerate(devices), 2):
        between[i][j] = between[j][i] = _link(first, last, within_functions)
    slowest = max((link for row in between for link in row), key=lambda link: link.seconds(LARGEST_BYTES))
    remote = tuple(filter(is_remote, devices))
    overhead_s, call_s = (0.0, _call_of_all_s(remote)[0]) if within_functions else (_overhead_s(remote), 0.0)
    return Cluster(
        (Level(slowest),),
        None,
        _at_once(devices),
        tuple(map(tuple, between)),
        overhead_s,
        call_s,
        cores=_own_cores(devices),
    )


def with_processors(cluster: Cluster, devices: Sequence[str]) -> Cluster:
    """The cluster of these devices with what is known of their processors only by seconds of measuring.

    That is how fast each computes while all do, and what messages and this program take of them.
    """
    remote = tuple(filter(is_remote, devices))
    are_workers = remote == tuple(devices) and all(map(is_processor, devices))
    return replace(
        cluster,
        message_work=Message(*message_work(devices, cluster)),
        speeds=_speeds(joins(), remote, apart(cluster, len(devices))) if are_workers else (),
        caller_work_s=_caller_work_s(devices, cluster) if remote else (),
    )


def _link(first: str, last: str, within_functions: bool) -> Link:
    if first == last:
        return SHARED_MEMORY
    if task_of(first) == task_of(last):
        return PCIE_3 if "GPU" in first + last else SHARED_MEMORY
    hosts = frozenset((_host(first), _host(last)))
    between = hosts, *_ONE_OF.setdefault(hosts, (first, last))
    link = _measured(*between)
    return replace(link, latency_s=_hop_s(*between)) if within_functions else link


_ONE_OF: dict[frozenset[str], tuple[str, str]] = {}  # devices by which the link between two hosts is measured
_KNOWN_AT = {"joins": 0}  # what is cached here


def _forget_former_workers() -> None:
    if _KNOWN_AT["joins"] != joins():
        for known in (_about, _measured, _hop_s, _overhead_s, _call_of_all_s):
            known.cache_clear()
        _ONE_OF.clear()
        _KNOWN_AT["joins"] = joins()


def _host(device: str) -> str:
    task = task_of(device)
    return "controller" if task is None else str(_about(task).get("host", task))


def _machine(device: str) -> str:
    """That on whose cores a CPU device computes: hosts that are containers may share a machine's."""
    return own_machine() if (task := task_of(device)) is None else str(_about(task).get("machine", _host(device)))


@cache
def _about(task: int) -> dict[str, object]:
    return about(task)


@cache
def _measured(hosts: frozenset[str], sender: str, receiver: str) -> Link:
    """What a copy takes until the receiver has it and has told the controller, by its bytes.

    So the latency has what a stage waits for beside the bytes: the call, the request to the sender, and the answer.
    """
    empty_s = _seconds(4, sender, receiver)
    size_bytes, taken_s = SMALLEST_BYTES // 2, 0.0
    while size_bytes < LARGEST_BYTES and taken_s < LONG_S:
        size_bytes *= 2
        taken_s = _seconds(size_bytes, sender, receiver, 3) - empty_s
    return Link(min(size_bytes / max(taken_s, 1e-9), FASTEST_BYTES_PER_S), empty_s)


@cache
def _hop_s(hosts: frozenset[str], first: str, last: str) -> float:
    """What a message of few bytes takes between two devices, of a function that sends it to and fro."""

    def seconds(hops: int) -> float:
        @tf.function(autograph=False)
        def run(number: tf.Tensor) -> tf.Tensor:
            for n in range(hops):
                with tf.device((last, first)[n % 2]):
                    number = number + 1.0
            with tf.device(HOST):
                return tf.identity(number)

        return _medians_s(run, first)[0]

    return max(0.0, seconds(HOPS) - seconds(0)) / HOPS


def _seconds(size_bytes: int, sender: str, receiver: str, repeats: int = REPEATS) -> float:
    taken = []
    for n in range(repeats + 1):  # the first makes connections
        with tf.device(sender):  # another tensor every time: TensorFlow keeps what it has copied
            sent = tf.fill([size_bytes // 4], float(n))
            _first(sent).numpy()
        start_s = time.perf_counter()
        with tf.device(receiver):
            _first(tf.identity(sent)).numpy()
        taken.append(time.perf_counter() - start_s)
    return float(np.median(taken[1:]))


@cache
def _overhead_s(devices: tuple[str, ...]) -> float:
    """What an action takes beside its computing, all devices being at it as in training: few bytes sent, and a call."""

    def act(device: str) -> None:
        for n in range(ACTIONS):
            given = tf.fill([1], float(n))  # here
            with tf.device(device):
                _first(given)
        finish(device)

    taken = []
    with ThreadPoolExecutor(len(devices), "pipetrain overhead") as threads:
        for _ in range(REPEATS + 1):  # the first makes connections
            start_s = time.perf_counter()
            list(threads.map(act, devices))
            taken.append((time.perf_counter() - start_s) / ACTIONS)
    return float(np.median(taken[1:]))


@cache
def _call_of_all_s(devices: tuple[str, ...]) -> tuple[float, float]:
    """What a call of a function over all devices takes, each of which has next to nothing to do: in all, and of cores.

    The latter are the seconds of processors that this process takes.
    """

    @tf.function(autograph=False)
    def run(number: tf.Tensor) -> tf.Tensor:
        made = []
        for device in devices:
            with tf.device(device):
                made.append(number + 1.0)
        with tf.device(HOST):
            return tf.add_n(made)

    return _medians_s(run, devices[0])


def _medians_s(run: Callable[[tf.Tensor], tf.Tensor], device: str) -> tuple[float, float]:
    """What the function takes with a number that is on the device, and what this process takes of processors then."""
    with tf.device(device):
        number = tf.zeros([])
    taken = []
    for _ in range(REPEATS + 1):  # the first makes the function
        start_s, before_s = time.perf_counter(), time.process_time()
        run(number).numpy()
        taken.append((time.perf_counter() - start_s, time.process_time() - before_s))
    call_s, work_s = np.median(taken[1:], axis=0)
    return float(call_s), float(work_s)


@tf.function(reduce_retracing=True)
def _first(tensor: tf.Tensor) -> tf.Tensor:
    """Few bytes that are there when all are."""
    return tensor[0]


def _at_once(devices: Sequence[str]) -> float:
    """How many of the devices work at once: CPU devices share the cores that their workers keep to."""
    if any("CPU" not in device for device in devices):
        return float("inf")
    at_once = 0
    by_machine: dict[str, set[str]] = {}
    for device in devices:
        by_machine.setdefault(_machine(device), set()).add(device)
    for members in by_machine.values():
        known = {core for device in members for core in _cores(device)}
        at_once += min(len(known), len(members)) if known else len(members)
    return at_once


def _own_cores(devices: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """The cores of all hosts that each device keeps to, numbered anew; none where a device's are not known."""
    numbers: dict[tuple[str, int], int] = {}
    found = tuple(
        tuple(numbers.setdefault((_machine(device), core), len(numbers)) for core in _cores(device))
        for device in devices
        if "CPU" in device
    )
    return found if len(found) == len(devices) and all(found) else ()


def _cores(device: str) -> list[int]:
    task = task_of(device)
    return cores() if task is None or not is_remote(device) else list(_about(task).get("cores", []))  # type: ignore[call-overload]


# What a step takes of processors while devices compute, for its rows and Keras' loop: so many times what a call takes
# that computes nothing, beside that call itself, which is in ``call_s``. Measured of all-reduce between two workers,
# see docs/guide/slow-networks.md; other ways are taken to be alike.
CALLER_WORK = 5.0


def _caller_work_s(devices: Sequence[str], cluster: Cluster) -> tuple[float, ...]:
    """Of each device the part of this program's work that its cores do; none if an idle core can do it.

    Devices that share several cores share what these do; what a single one does delays each of those that keep to it.
    """
    mine = {(_machine(HOST), core) for core in cores()}
    theirs = [{(_machine(device), core) for core in _cores(device)} if "CPU" in device else set() for device in devices]
    if mine - set[Any]().union(*theirs):
        return ()
    each_s = CALLER_WORK * _call_of_all_s(tuple(filter(is_remote, devices)))[1] / len(mine)
    return tuple(each_s / _sharing(cluster.cores, n) if mine & own else 0.0 for n, own in enumerate(theirs))


def _sharing(cores: Sequence[Sequence[int]], device: int) -> float:
    """How many devices share each of the several cores that a device has; 1 where it has one, or none is known."""
    own = cores[device] if cores else ()
    return 1.0 if len(own) < 2 else max(1.0, *map(devices_on_cores(cores).__getitem__, own))


def apart(cluster: Cluster, devices: int) -> tuple[tuple[int, ...], ...]:
    """Groups of devices that compute at once, none of which waits for a core."""
    groups: list[list[int]] = []
    for device in range(devices):
        for group in groups:
            on_cores = devices_on_cores(cluster.cores[n] for n in (*group, device) if cluster.cores)
            if len(group) < cluster.processors and max(on_cores.values(), default=0.0) < 1 + 1e-9:
                group.append(device)
                break
        else:
            groups.append([device])
    return tuple(map(tuple, groups))


@cache
def _speeds(joined: int, devices: tuple[str, ...], groups: tuple[tuple[int, ...], ...]) -> tuple[float, ...]:
    """How fast each device multiplies matrices while its group does, beside the first one alone."""
    if len(devices) == 1:
        return (1.0,)
    with tf.device(devices[0]):
        turns = tf.constant(100)
        alone = _multiplying(devices[:1])
        turns = tf.constant(int(100 * ALONE_S / max(float(alone(turns).numpy()[-1]), 1e-6)) + 1)
    found, functions = [1.0] * len(devices), [_multiplying([devices[n] for n in group]) for group in groups]
    taken_s = [[each(turns).numpy() for each in (alone, *functions)] for _ in range(SPEED_REPEATS + 1)][1:]
    first_s, *others = [np.median(each, axis=0) for each in zip(*taken_s, strict=True)]
    for group, group_s in zip(groups, others, strict=True):
        for device, seconds in zip(group, group_s, strict=True):
            found[device] = float(first_s[0] / max(seconds, 1e-9))
    return tuple(found)


def _multiplying(devices: Sequence[str]) -> Callable[[tf.Tensor], tf.Tensor]:
    """Multiplies on all devices so many times; gives what each has taken."""

    def run(turns: tf.Tensor) -> tf.Tensor:
        taken = []
        for device in devices:
            with tf.device(device):
                given = tf.identity(turns)
                with tf.control_dependencies([given]):  # else the time that it is on its way would count
                    start_s = tf.timestamp()
                with tf.control_dependencies([start_s]):
                    product = _product(tf.identity(given))
                with tf.control_dependencies([product]):
                    taken.append(tf.timestamp() - start_s)
        with tf.device(HOST):
            return tf.stack([tf.identity(each) for each in taken])

    return tf.function(run, autograph=False)


def _product(turns: tf.Tensor) -> tf.Tensor:
    """What so many multiplications give, on the device of this scope."""
    identity = tf.eye(SIDE)
    _, product = tf.while_loop(lambda n, _: n < turns, lambda n, x: (n + 1, x @ identity), (0, tf.ones([SIDE, SIDE])))
    return product[0, 0]


SPEED_REPEATS, ALONE_S = 5, 0.2  # so many multiplications of so many seconds, by which speeds are measured
SIDE = 256  # of the matrices that are multiplied meanwhile
COMPUTED_S = 0.2  # what the multiplications take; the messages arrive within less
SENT_S, MOST_BYTES = 0.1, 2**20  # what the large messages take together each way, and their bytes at most
LARGE, SMALL = 32, 200  # so many messages each way
WORK_REPEATS = 7


def message_work(devices: Sequence[str], cluster: Cluster) -> tuple[float, float]:
    """Seconds of a computing device that each message takes from it at either end, and seconds for each byte.

    Measured between the first two devices of two processes, on different cores if there are such; ``cluster`` is that
    of the devices.

    By how much longer a device multiplies matrices while it sends and gets messages, as gradients are exchanged during
    a backward. Where a device's cores are more than it computes with, that is nothing.
    """
    apart = [(i, j) for i, j in combinations(range(len(devices)), 2) if task_of(devices[i]) != task_of(devices[j])]
    if not apart:
        return 0.0, 0.0
    i, j = next((pair for pair in apart if not _share_a_core(cluster, *pair)), apart[0])
    return _measured_work(joins(), devices[i], devices[j], cluster.link(i, j).bandwidth_bytes_per_s)


def _share_a_core(cluster: Cluster, i: int, j: int) -> bool:
    return bool(cluster.cores) and not {*cluster.cores[i]}.isdisjoint(cluster.cores[j])


@cache
def _measured_work(joined: int, first: str, last: str, bandwidth_bytes_per_s: float) -> tuple[float, float]:
    size_bytes = 4 + int(min(MOST_BYTES, SENT_S * bandwidth_bytes_per_s) / LARGE)
    functions = [_function(first, last, count, each) for count, each in ((0, 4), (SMALL, 4), (LARGE, size_bytes))]
    with tf.device(first):  # no worker fetches from this process
        turns = tf.constant(100)
        functions[0](turns).numpy()
        turns = tf.constant(int(100 * COMPUTED_S / _call_s(functions[0], turns)) + 1)
    taken_s = np.array([[_call_s(function, turns) for function in functions] for _ in range(WORK_REPEATS + 1)])[1:]
    small_s, large_s = np.median(taken_s[:, 1:] - taken_s[:, :1], axis=0)
    message_s = max(0.0, float(small_s)) / (2 * SMALL)
    return message_s, max(0.0, float(large_s) / (2 * LARGE) - message_s) / size_bytes


def _call_s(function: Callable[[tf.Tensor], Any], turns: tf.Tensor) -> float:
    start_s = time.perf_counter()
    function(turns).numpy()
    return time.perf_counter() - start_s


def _function(first: str, last: str, count: int, size_bytes: int) -> Callable[[tf.Tensor], tf.Tensor]:
    """Multiplies on the first device so many times, while so many messages are sent each way."""

    def run(turns: tf.Tensor) -> tf.Tensor:
        results = []
        with tf.device(first):
            results.append(_product(turns))
        for source, sink in ((first, last), (last, first)):
            for n in range(count):
                with tf.device(source):
                    sent = tf.fill([size_bytes // 4], tf.cast(turns + n, tf.float32))
                with tf.device(sink):
                    results.append(tf.identity(sent)[0])
        with tf.device(HOST):
            return tf.add_n([tf.identity(each) for each in results])

    return tf.function(run, autograph=False)
