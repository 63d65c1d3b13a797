"""Coded gradients in simulated time: a tree of workers, of which those that are late are left behind."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from pipetrain.plan.cluster import Cluster
from pipetrain.plan.profile import Profile
from pipetrain.schemes.arguments import checked_count
from pipetrain.schemes.coded_reduce import ROOT, Tree, checked_tree
from pipetrain.schemes.gradient_codes import decoding
from pipetrain.simulation.costs import between_steps_s
from pipetrain.simulation.kernel import Kernel, SimulatedMessage, varying
from pipetrain.simulation.simulated_trace import trace_of_devices
from pipetrain.trace.records import What
from pipetrain.trace.trace import Trace

OVER = -2  # the step when none is


class TreeSetting(NamedTuple):
    """What each worker computes in ``seconds``, what weights or gradients have in bytes, and what else a step takes.

    The root is device 0 of the cluster, worker w device w + 1. ``update_s`` is the root's, ``caller_s`` what is between
    two steps. ``factor(worker)`` gives by how much longer a worker's computing takes.
    """

    tree: Tree
    seconds: float
    size_bytes: int
    update_s: float
    caller_s: float
    cluster: Cluster
    factor: Callable[[int], float]


def simulate_tree(
    profile: Profile,
    children: int,
    depth: int = 1,
    stragglers: int = 1,
    cluster: Cluster | None = None,
    minibatches: int = 8,
    speeds: Sequence[float] | None = None,
    slowdown: float = 0.0,
    seed: int = 0,
) -> Trace:
    """Simulate ``coded-reduce`` of a profiled model.

    Every worker computes for its share of the profile's seconds, ``1 / sum_{l=1..L} (n/(s+1))^l``. The root is replica
    0 of the trace, worker w replica w + 1. A parent asks for the messages of as many children as it needs, when they
    are ready; to the root all its children send. A device sends one message at a time, and receives one; no more
    of them compute at once than the cluster has processors. Of what calls take there are the cluster's ``overhead_s``,
    ``call_s`` and ``caller_work_s`` once a step; what sums take is not simulated.

    Args:
        profile: what the blocks cost for a whole minibatch.
        children: n, of the root and of each worker above the last level.
        depth: L, the levels of the tree.
        stragglers: s, how many children of a parent may be late.
        cluster: how devices are joined, the root being the first of them.
        minibatches: how many are trained.
        speeds: of the workers, 1 being that of the profile, beside the cluster's; by default all 1.
        slowdown: how much the seconds of computing vary: the standard deviation, as a part of the mean, of random
            factors (lognormal, with mean 1).
        seed: of these.

    Raises ValueError for a tree that cannot be, for counts below 1, and for other numbers of speeds than of workers.
    """
    tree, longer = checked_tree(children, depth, stragglers), varying(slowdown, seed)
    checked_count("minibatches", minibatches, "Training has at least one minibatch", 8)
    every = [1.0] * tree.workers if speeds is None else list(speeds)
    if len(every) != tree.workers or not all(0 < each < math.inf for each in every):
        raise ValueError(
            f"Every worker has a speed above 0. Received: speeds={speeds!r} of {tree.workers} workers. "
            "Try leaving speeds out."
        )

    def factor(worker: int) -> float:
        return longer() / every[worker]

    blocks = profile.trained
    whole_s = sum(block.seconds.forward_s + block.seconds.backward_s for block in blocks)
    shared = {weight: size for block in blocks for weight, size in block.shared}
    own = sum(block.weight_bytes - sum(size for _, size in block.shared) for block in blocks)
    update_s = sum(block.optimizer_s for block in blocks)
    size_bytes = own + sum(shared.values())
    cluster = cluster or Cluster()
    caller_s = between_steps_s(profile, cluster)
    setting = TreeSetting(tree, float(tree.load) * whole_s, size_bytes, update_s, caller_s, cluster, factor)
    return TreeTraining(setting, minibatches).run()


class _Worker:
    """What a worker is at: the step it computes or waits in, if any, and what it has of that step."""

    def __init__(self) -> None:
        self.step = -1  # which it has had last
        self.is_computing = self.is_done = False
        self.has_weights = False


class TreeTraining:
    """So many steps of a tree, one after another."""

    def __init__(self, setting: TreeSetting, steps: int) -> None:
        self._setting, self._tree, self._steps = setting, setting.tree, steps
        factors = [partial(setting.factor, worker) for worker in range(self._tree.workers)]
        self._kernel = Kernel(setting.cluster, [lambda: 1.0, *factors], switched=False)
        self._workers = [_Worker() for _ in range(self._tree.workers)]
        self._step = -1
        self._arrived: dict[int, list[int]] = {}

    def run(self) -> Trace:
        """All steps."""
        self._begin()
        self._kernel.clock.run()
        return trace_of_devices(self._kernel, joined=False)

    def _begin(self) -> None:
        self._step += 1
        if self._step == self._steps:
            return
        self._arrived = {}
        for worker in self._workers:
            worker.has_weights = worker.is_done = False
        self._kernel.call()
        for child in self._tree.below(ROOT):
            self._offer(ROOT, child)

    def _offer(self, parent: int, child: int) -> None:
        """Send a child the weights, if it is free."""
        worker = self._workers[child]
        if not worker.is_computing and worker.step < self._step:
            worker.step, worker.is_computing = self._step, True
            self._send("W", parent, child, partial(self._compute, child, self._step))

    def _compute(self, number: int, step: int) -> None:
        """A worker has the weights: it sends them on, and computes."""
        if step != self._step:
            self._free(number)
            return
        self._workers[number].has_weights = True
        for child in self._tree.below(number):
            self._offer(number, child)
        self._kernel.devices[number + 1].do(self._setting.seconds, "FB", step, partial(self._computed, number, step))

    def _computed(self, number: int, step: int, start_s: float) -> None:
        worker = self._workers[number]
        self._free(number)
        if step != self._step:
            return
        worker.is_done = True
        if not self._tree.below(number):
            self._deliver(number)
        else:
            self._decode(number)

    def _free(self, number: int) -> None:
        """A worker computes no more: it takes the newest step, if its parent has the weights of that."""
        worker, parent = self._workers[number], self._tree.parent(number)
        worker.is_computing = False
        if worker.step < self._step < self._steps and (parent == ROOT or self._workers[parent].has_weights):
            self._offer(parent, number)

    def _deliver(self, number: int) -> None:
        """A worker has all that its parent wants of it."""
        parent = self._tree.parent(number)
        if parent == ROOT:
            self._send("R", number, ROOT, partial(self._arrive, number, self._step))
        else:
            self._arrive(number, self._step)

    def _arrive(self, number: int, step: int) -> None:
        if step != self._step:
            return
        parent = self._tree.parent(number)
        self._arrived.setdefault(parent, []).append(number)
        self._decode(parent)

    def _decode(self, parent: int) -> None:
        """Go on if the children that are there have the sum, and the parent its own."""
        arrived = self._arrived.get(parent, [])
        found = decoding(self._tree.code, [self._tree.place(child) for child in arrived])
        if found is None or (parent != ROOT and not self._workers[parent].is_done):
            return
        if parent == ROOT:
            self._update()
            return
        self._workers[parent].is_done = False  # it decodes once
        first, left = self._tree.below(parent)[0], [len(found)]

        def came() -> None:
            left[0] -= 1
            if not left[0] and step == self._step:
                self._deliver(parent)

        step = self._step
        for place, _ in found:
            self._send("R", first + place, parent, came)

    def _update(self) -> None:
        """The root has the sum: whoever is late is left behind."""
        step, self._step = self._step, OVER
        self._kernel.devices[0].do(self._setting.update_s, "B", step, partial(self._updated, step))

    def _updated(self, step: int, start_s: float) -> None:
        def go_on() -> None:
            self._step = step
            self._begin()

        self._kernel.clock.at(self._kernel.clock.now + self._setting.caller_s, go_on)

    def _send(self, what: What, source: int, sink: int, arrives: Callable[[], None]) -> None:
        """Send weights or gradients, if there are any."""
        if not self._setting.size_bytes:
            self._kernel.clock.at(self._kernel.clock.now, arrives)
            return
        message = SimulatedMessage(what, self._step, source + 1, sink + 1, self._setting.size_bytes)
        self._kernel.send(message, arrives)
