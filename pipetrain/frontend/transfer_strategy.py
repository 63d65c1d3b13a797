"""Data parallelism whose transfers a plan orders: by parameter servers, or by all-reduce."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import keras
import tensorflow as tf

from pipetrain.checkpoint.arrays import assign, collected
from pipetrain.cluster.message_work import message_work
from pipetrain.compute.functions.stage import Stage
from pipetrain.compute.optimizer.clipping import limit
from pipetrain.compute.optimizer.loss_scaling import stepping
from pipetrain.compute.optimizer.overrides import whole_step
from pipetrain.compute.profiling.progress import Progress
from pipetrain.compute.transfers.step import TransferStep
from pipetrain.compute.transfers.weights import Weights, WeightsPart
from pipetrain.compute.transfers.worker import Worker
from pipetrain.frontend.attributes import known
from pipetrain.frontend.checks.optimizer import check_loss_scaling, check_whole
from pipetrain.frontend.device_choice import described
from pipetrain.frontend.input_data import DEFAULT_ROWS
from pipetrain.frontend.planner import Planner
from pipetrain.frontend.runner_strategy import RunnerStrategy
from pipetrain.frontend.transfer_planning import embeddings, input_bytes, is_measured, planned, workload_of
from pipetrain.plan.cluster import Cluster
from pipetrain.plan.run_off import TURNS, fastest, finalists
from pipetrain.run.pipeline import HOST
from pipetrain.run.step_runner import StepRunner
from pipetrain.run.trial import minibatch_s
from pipetrain.run.worker_rows import WorkerRows
from pipetrain.schemes.scheme import Scheme
from pipetrain.schemes.table import SERVING
from pipetrain.schemes.transfers.orders import AUTO
from pipetrain.schemes.transfers.plan import Plan
from pipetrain.schemes.transfers.workload import Message
from pipetrain.simulation.data_parallel.profiled import message_of
from pipetrain.simulation.data_parallel.setting import Setting

# After these a worker may be lost, or an optimizer not be finite: `abort` forgets the pipeline, and what it left.
FORGETTING = (FloatingPointError, ConnectionError, tf.errors.OpError)


class TransferStrategy(RunnerStrategy):
    """A stage that is the whole model, on several devices, whose steps are one function each.

    What a ``fit`` has to do with Keras' loop, metrics, checkpoints and evaluation is as for a pipeline of this stage.

    Args:
        planner: of the model, whose layout is one stage, whose replicas are the workers.
        scheme: one of ``TRANSFERRING``.
        order: of the transfers, by name or as a plan.
        servers: on how many of the devices the weights are, if the scheme has servers.

    ``plan`` is the one that was made of it, once there is a pipeline. Of several that simulation cannot tell apart it
    is the simplest that is near the fastest by trials and simulation together; every order gives the same weights.
    """

    def __init__(self, planner: Planner, scheme: Scheme, order: str | Plan | None, servers: int) -> None:
        super().__init__(planner, scheme)
        self._serves, self._order, self._servers = scheme.name == SERVING, order or AUTO, servers
        self._devices = planner.layout.devices
        self._plans: dict[Plan, float] = {}  # as simulated, the shortest 1; one, once it is known which is taken

    def compiled(self, owner: keras.Model, loss: Any, jit_compile: Any) -> None:
        """The optimizer and the loss are new."""
        check_loss_scaling(owner.optimizer, self._scheme.name, None)
        if self._serves and self._servers > 1:
            check_whole(owner.optimizer, self._scheme.name, f"{self._servers} servers, each with some of the weights")
        if isinstance(self._order, Plan) and self._order.late.packs:
            check_whole(owner.optimizer, self._scheme.name, "weights that the plan updates late")
        super().compiled(owner, loss, jit_compile)
        self._plans = {}

    def _built(self, rows: int | None) -> Sequence[list[Stage]]:
        (segment,) = self.planner.layout.segments(self.planner.chain)
        self._segment = segment
        self._plans = self._plans or self._planned(rows)
        self.plan = next(iter(self._plans))
        loss = self._compilation.metrics.loss
        self._weights = [
            Weights(segment, parts, self.optimizer, loss, len(self._devices))
            for parts in (self._of_servers() if self._serves else self._of_workers())
        ]
        return [list[Stage](self._weights)]

    def _of_servers(self) -> list[list[WeightsPart]]:
        """The weights, once: the part that each server has; there may be fewer of them than servers."""
        workload = workload_of(self.planner.chain, self._segment.trainable_variables, None, Message(), 1)
        held = workload.on_servers(self._servers)
        parts = [WeightsPart(device, each) for device, each in zip(self._devices, held, strict=False)]
        return [[part for part in parts if part.numbers] or parts[:1]]

    def _of_workers(self) -> list[list[WeightsPart]]:
        """The weights on every worker, in two parts if a part of them is updated late."""
        late = set(self.plan.late_variables)
        every = range(len(self._segment.trainable_variables))
        groups = [[n for n in every if n not in late], *([sorted(late)] if late else [])]
        return [[WeightsPart(device, each) for each in groups] for device in self._devices]

    def _new_runner(self) -> Any:
        count = len(self._devices)
        workers = [Worker(self._segment, device, n, count) for n, device in enumerate(self._devices)]
        reads = self._compilation.metrics.read_predictions
        return StepRunner(
            self._weights,
            workers,
            self.plan,
            lambda plan, begun: TransferStep(self._weights, workers, plan, self._serves, HOST, begun, reads),
            WorkerRows(self._devices),
            self._run_settings,
            self._compilation.learning_rate,
        )

    def _runner_for_data(self) -> Any:
        """The runner of the plan that is taken, which is tried before if there are several."""
        runner = super()._runner_for_data()
        if len(self._plans) == 1:
            return runner
        del runner  # which is not to be there while one with other parts of the weights is tried
        fitted = self._count.fitted(self._runner)
        with self._kept():
            taken = self._fastest(self._plans, fitted)
        runner = self._by(taken, (), fitted)
        gc.collect()  # the functions of the others
        return runner

    def _fastest(self, simulated: dict[Plan, float], fitted: int) -> Plan:
        """The simplest near the fastest. Those near it are tried again in turns, since a machine's speed drifts."""
        plans, first_s = [*simulated], []
        try:
            progress = Progress(f"Trying {len(plans)} orders of transfers.", len(plans) * self.planner.verbose)
            for plan in plans:
                first_s.append(self._tried_s(plan, plans, fitted))
                progress.add(1)
            both = [math.sqrt(each_s * part) for each_s, part in zip(first_s, simulated.values(), strict=True)]
            near = finalists(both)
            trials_s = {n: [first_s[n]] for n in near or range(len(plans))}
            turns = len(near) * (TURNS - 1) * self.planner.verbose
            progress = Progress(f"Trying {len(near)} of them again, in turns.", turns)
            last = [plans[n] for n in near]
            here = [n for n in reversed(near) if self._takes(plans[n])]
            for of_one_runner in (here, [n for n in reversed(near) if n not in here]):
                for n in of_one_runner * (TURNS - 1):
                    trials_s[n].append(self._tried_s(plans[n], last, fitted))
                    progress.add(1)
        finally:
            self._plans = simulated
        return plans[fastest(trials_s, [*simulated.values()])]

    def _tried_s(self, plan: Plan, keeps: Sequence[Plan], fitted: int) -> float:
        """Seconds of a minibatch by this plan, after which those in ``keeps`` may be tried."""
        try:
            return minibatch_s(self._by(plan, keeps, fitted), known(self._compilation.data.first))
        except BaseException as error:
            if not isinstance(error, FORGETTING):
                self._runner = None  # the next trial is of another plan
            raise

    def _takes(self, plan: Plan) -> bool:
        """Whether there is a runner that can make steps by this plan."""
        return self._runner is not None and bool(self._runner.takes(plan))

    def _by(self, plan: Plan, keeps: Sequence[Plan], fitted: int) -> Any:
        """The runner of steps by this plan, after so many updates of this ``fit``: the one that is there, if it can.

        That keeps its functions for the plans in ``keeps``.
        """
        self._plans = {plan: 1.0}
        if self._takes(plan):
            self._runner.take(plan, keeps)
            self.plan = plan
        else:
            self._runner = None
            gc.collect()  # its functions, before there are others
            self._make_runner(known(self._fit).session.rows)
        self._count.set_fitted(fitted, self._runner)
        return super()._runner_for_data()

    @contextmanager
    def _kept(self) -> Iterator[None]:
        """In the end weights, state and what the optimizer has gathered are as they were, whatever a trial does."""
        arrays = collected(self.model, self._stages.slots(), self._stages.shared())
        try:
            yield
        finally:
            assign(self.model, arrays, self._stages.slots(), self._stages.shared())

    def _setting(self, rows: int | None, is_measured: bool = True) -> Setting:
        """The workers as the simulator takes them, for minibatches of so many rows.

        If it ``is_measured``, the model is profiled, and links and what messages take of the processors are measured;
        else nothing takes time.
        """
        variables, planner, workers = self._segment.trainable_variables, self.planner, len(self._devices)
        profile, message, work, cluster = None, Message(), Message(), Cluster()
        if is_measured:
            cluster = described(self._devices, within_functions=True)
            message = message_of(cluster, workers, self._serves)
            if message != Message():  # else no order hides anything
                profile = planner.profile(rows or DEFAULT_ROWS, workers)
                work = Message(*message_work(self._devices, cluster))
                message = replace(message, overhead_s=message.overhead_s + 2 * work.overhead_s)  # at either end
        workload = workload_of(planner.chain, variables, profile, message, workers)
        sent = input_bytes(self.model, planner.shapes, (rows or DEFAULT_ROWS) // workers)
        return Setting(
            workload,
            workers,
            self._serves,
            cluster,
            cluster.overhead_s,
            servers=self._servers,
            whole=True,
            input_bytes=sent,
            at_once=self._needs_all or bool(stepping(self.optimizer).gradient_accumulation_steps),
            message_work=work,
        )

    @property
    def _needs_all(self) -> bool:
        """Whether all gradients are needed at once: their norm, or by a class of the user's."""
        steps = stepping(self.optimizer)
        return limit(steps.global_clipnorm) is not None or bool(whole_step(steps))

    def _planned(self, rows: int | None) -> dict[Plan, float]:
        """The plans of the order as simulated, measured where it depends on that."""
        rows_alone = embeddings(self.model, self._segment.trainable_variables)
        return planned(self._order, self._setting(rows, is_measured(self._order)), rows_alone, self._needs_all)
