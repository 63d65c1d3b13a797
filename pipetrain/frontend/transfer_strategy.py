"""Data parallelism whose transfers a plan orders: by parameter servers, or by all-reduce."""

from __future__ import annotations

import gc
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import keras
import tensorflow as tf

from pipetrain.checkpoint.state import OF_DEVICE, Arrays
from pipetrain.cluster.bandwidth import with_processors
from pipetrain.compute.cores import HOST
from pipetrain.compute.functions.split import size_bytes, specs
from pipetrain.compute.functions.stage import Stage
from pipetrain.compute.graph.blocks import Chain
from pipetrain.compute.graph.inputs import Shapes, memory_rows
from pipetrain.compute.graph.sharing import embeddings
from pipetrain.compute.optimizer.clone import plain_momentum, whole_step
from pipetrain.compute.optimizer.gradient_scaling import limit, stepping
from pipetrain.compute.profiling.progress import Progress
from pipetrain.compute.transfers.compression import Compressor
from pipetrain.compute.transfers.outer_step import Mixing, OuterStep, OwnWeights
from pipetrain.compute.transfers.step import OwnPaceStep, TransferStep
from pipetrain.compute.transfers.weights import Weights, WeightsPart, Worker
from pipetrain.frontend.contexts import known
from pipetrain.frontend.input_data import DEFAULT_ROWS
from pipetrain.frontend.layout import described
from pipetrain.frontend.planner import Planner
from pipetrain.frontend.refusals import check_loss_scaling, check_votes, check_whole
from pipetrain.frontend.runner_strategy import RunnerStrategy
from pipetrain.plan.choice import TURNS, fastest, finalists
from pipetrain.plan.cluster import Cluster
from pipetrain.plan.profile import Profile, Seconds
from pipetrain.run.control import RunSettings
from pipetrain.run.step_runner import Arrivals, OwnPaceRunner, StepRunner
from pipetrain.run.window import minibatch_s
from pipetrain.run.worker_rows import WorkerRows
from pipetrain.schemes.compression import compression_of
from pipetrain.schemes.options import AllReduce, ParameterServer, TransferOptions
from pipetrain.schemes.scheme import Scheme, UpdateRule
from pipetrain.schemes.synchrony import (
    RING,
    Asynchronous,
    Gossip,
    LocalSGD,
    Stale,
    check_fragments,
    hides_joins,
    join_fragments,
    join_steps,
    synchrony_of,
    topology_of,
)
from pipetrain.schemes.table import SERVING
from pipetrain.schemes.transfers.orders import AUTO, MEASURED, ORDERS
from pipetrain.schemes.transfers.plan import Layer, Message, Phase, Plan, Workload, check_plan
from pipetrain.simulation.costs import between_steps_s
from pipetrain.simulation.data_parallel import Setting
from pipetrain.simulation.profiled import coded, message_of, near, updating_alone


def workload_of(
    chain: Chain,
    variables: Sequence[Any],
    profile: Profile | None,
    message: Message,
    workers: int,
    rows: Iterable[int] = (),
) -> Workload:
    """A model's blocks as layers, with one worker's seconds by the profile of a minibatch, if there is one.

    ``variables`` are the trained ones in the order of their numbers, ``rows`` those whose gradients are rows.
    """
    numbers = {id(each): n for n, each in enumerate(variables)}
    made_by: dict[int, int] = {}
    layers = []
    for k, block in enumerate(chain.blocks):
        after = {made_by[value] for call in block.calls for value in call.reads if value in made_by} - {k}
        made_by |= {value: k for call in block.calls for value in call.writes}
        used = dict.fromkeys(numbers[id(each)] for call in block.calls for each in call.weights)
        seconds = profile.trained[k].seconds if profile else Seconds(0.0, 0.0, 0.0)
        own_s = seconds.forward_s / workers, seconds.backward_s / workers
        layers.append(
            Layer(tuple(used), *own_s, tuple(sorted(after)), profile.trained[k].optimizer_s if profile else 0.0)
        )
    return Workload(tuple(layers), tuple(map(size_bytes, specs(variables))), message, frozenset(rows))


def planned(order: str | Plan, setting: Setting, apart: set[int], at_once: bool) -> dict[Plan, float]:
    """The plan of an order, or the user's, checked; where it is open, all that may be the fastest, the simplest first.

    With each, how many times as long as the shortest it is simulated to take. No variable of those ``apart``, whose
    gradients are rows, is late; none at all where all gradients are needed ``at_once``.
    """
    workload = setting.workload
    if not isinstance(order, str):
        return {check_plan(order, workload.sizes_bytes, setting.serves): 1.0}
    plans = near(setting) if order == AUTO else {ORDERS[order](workload, setting.serves): 1.0}
    found: dict[Plan, tuple[Plan, float]] = {}  # of several that differ in their names alone, the first
    for plan, part in plans.items():
        made = plan.in_time(set(workload.owner) if at_once else apart)
        found.setdefault(made._replace(name=""), (made, part))
    return dict(found.values())


def is_measured(order: str | Plan) -> bool:
    """Whether the order depends on what layers and messages take."""
    return isinstance(order, str) and order in (AUTO, *MEASURED)


def input_bytes(model: keras.Model, shapes: Shapes | None, rows: int) -> int:
    """The bytes of so many rows of the inputs; 0 where their shapes are not known."""
    sizes = [math.prod(size or 0 for size in shape) for shape in shapes or ()]
    dtypes = [tf.as_dtype(each.dtype).size for each in model.inputs[: len(sizes)]]
    return rows * sum(size * width for size, width in zip(sizes, dtypes, strict=True))


# After these a worker may be lost, or an optimizer not be finite: `abort` forgets the pipeline, and what it left.
FORGETTING = (FloatingPointError, ConnectionError, tf.errors.OpError)


class TransferStrategy(RunnerStrategy):
    """A stage that is the whole model, on several devices, whose steps are one function each.

    What a ``fit`` has to do with Keras' loop, metrics, checkpoints and evaluation is as for a pipeline of this stage.

    Args:
        planner: of the model, whose layout is one stage, whose replicas are the workers.
        scheme: one of ``TRANSFERRING``.
        options: the scheme's.
        servers: on how many of the devices the weights are, if the scheme has servers.

    ``plan`` is the one that was made of it, once there is a pipeline. Of several that simulation cannot tell apart it
    is the simplest that is near the fastest by trials and simulation together; every order gives the same weights.
    """

    def __init__(self, planner: Planner, scheme: Scheme, options: TransferOptions, servers: int) -> None:
        super().__init__(planner, scheme)
        self._serves, self._order, self._servers = scheme.name == SERVING, options.order, servers
        self._compression = compression_of(options.compression)
        self._devices = planner.layout.devices
        self._synchrony = synchrony_of(options.synchrony) if isinstance(options, AllReduce | ParameterServer) else None
        self._arrivals: Arrivals | None = None  # of workers with a pace of their own
        if isinstance(self._synchrony, Asynchronous):
            self._arrivals = Arrivals(self._synchrony.record, self._synchrony.replay)
        self._topology = topology_of(options.topology) if isinstance(options, AllReduce) else None
        if isinstance(self._topology, Gossip):
            self._topology.neighbours(len(self._devices))  # raises for a graph of others
        self._outer: OwnWeights | None = None
        self._takes_slots = False  # whether it is to, from the compiled optimizer
        self._plans: dict[Plan, float] = {}  # as simulated, the shortest 1; one, once it is known which is taken

    @property
    def staleness(self) -> Sequence[int]:
        """One step for weights that are updated late, in the next step; else none.

        Of workers with a pace of their own it is the largest of the last updates.
        """
        if isinstance(self._runner, OwnPaceRunner):
            return [max((each.staleness for each in [*self._runner.arrivals.events]), default=0)]
        return [int(self._runner is not None and bool(self.plan.late.packs))]

    @property
    def readers(self) -> Sequence[str]:
        """Every worker reads its rows; whole minibatches this process reads, and sends them."""
        return () if self._is_at_own_pace else self._devices

    @property
    def _is_at_own_pace(self) -> bool:
        """Whether every worker takes whole minibatches."""
        return isinstance(self._synchrony, Asynchronous)

    @property
    def _reads_ahead(self) -> bool:
        return self._is_at_own_pace or super()._reads_ahead

    def compiled(self, owner: keras.Model, loss: Any, jit_compile: Any) -> None:
        """The optimizer and the loss are new."""
        check_loss_scaling(owner.optimizer, self._scheme.name, None)
        if self._serves and self._servers > 1:
            check_whole(owner.optimizer, self._scheme.name, f"{self._servers} servers, each with some of the weights")
        if isinstance(self._order, Plan) and self._order.late.packs and (self._is_apart or self._is_stale):
            raise ValueError(
                "Workers with weights of their own send nothing late, and stale ones all. Received: an order with late "
                f"packs, synchrony={self._synchrony!r}, topology={self._topology!r}. Try these packs among its pushes."
            )
        if isinstance(self._topology, Gossip) and stepping(owner.optimizer).use_ema:
            raise ValueError(
                "Neighbours average weights, and no moving averages of these. Received: "
                f"topology={self._topology!r}, an optimizer with use_ema=True. Try use_ema=False."
            )
        if isinstance(self._order, Plan) and self._order.late.packs:
            check_whole(owner.optimizer, self._scheme.name, "weights that the plan updates late")
        check_fragments(self._synchrony, len(self._layers.trained))
        if self._is_at_own_pace and memory_rows(self.model):
            raise ValueError(
                "A worker does not have the minibatch before, of which layers keep rows. Received: stateful layers, "
                f"synchrony={self._synchrony!r}. Try stateful=False, or synchrony='stale:1'."
            )
        check_votes(self._compression, "compression", owner.optimizer, self.model)
        self._momentum = 0.0
        if self._compression is not None:
            # An embedding's rows are sent as they are, and have no momentum but the optimizer's.
            is_one = not self._is_apart and not embeddings(self.model, self.model.trainable_variables)
            self._momentum = self._compression.corrected(is_one * plain_momentum(stepping(owner.optimizer)))
        super().compiled(owner, loss, jit_compile)
        self._plans = {}

    @property
    def _layers(self) -> Workload:
        """The model's layers and their trained variables; nothing takes time."""
        chain = self.planner.chain
        variables = chain.segment(0, len(chain.blocks)).trainable_variables
        return workload_of(chain, variables, None, Message(), 1)

    def _decide(self, rows: int | None) -> None:
        (self._segment,) = self.planner.layout.segments(self.planner.chain)
        self._plans = self._plans or self._planned(rows)
        self.plan = next(iter(self._plans))

    def _built(self, rows: int | None) -> Sequence[list[Stage]]:
        loss = self._compilation.metrics.loss
        self._weights = [
            Weights(
                self._segment, parts, self.optimizer, loss, len(self._devices), UpdateRule(momentum=not self._momentum)
            )
            for parts in (self._of_servers() if self._serves else self._of_workers())
        ]
        self._compressor = self._new_compressor()
        self._outer = self._new_outer()
        for number, weights in enumerate(self._weights if self._outer else ()):
            weights.apart = number
        kept = [each.slots() for each in (self._compressor, self._outer) if each is not None]
        self._weights[0].worker_slots = [slot for slots in kept for slot in slots]
        had = any(OF_DEVICE.search(slot.kind) for slot in self._stages.slots())
        self._takes_slots = self._outer is not None and not had
        return [list[Stage](self._weights)]

    def _prepare(self, rows: int | None, shapes: Shapes | None) -> None:
        super()._prepare(rows, shapes)
        self._lost.unless_lost(self._take_slots)

    def _take_slots(self) -> None:
        """Workers with optimizers of their own begin with what the compiled one has."""
        if self._takes_slots:
            self._takes_slots = False
            known(self._outer).take_slots()

    def restore(self, arrays: Arrays, about: dict[str, Any]) -> list[str]:
        """Go on from there; workers with a pace of their own go on in their order, too."""
        if self._arrivals is not None:
            self._arrivals.go_on(about["updates"])
        return super().restore(arrays, about)

    def _run_settings(self) -> RunSettings:
        if self._arrivals is not None:
            self._arrivals.sets_aside = known(self._fit).session.has_checkpoints
        settings = super()._run_settings()
        self._take_slots()  # where the data had to say first what the stages are
        return settings

    @property
    def drains(self) -> bool:
        """Whether to have the state changes training.

        Workers are joined for it, or their next exchange is later, or the gradient after it is not stale.
        """
        return self._synchrony is not None or super().drains

    @property
    def _is_apart(self) -> bool:
        """Whether every worker updates weights of its own."""
        return isinstance(self._synchrony, LocalSGD) or isinstance(self._topology, Gossip)

    @property
    def _is_stale(self) -> bool:
        """Whether every gradient is applied while the next step computes."""
        return isinstance(self._synchrony, Stale)

    def _new_outer(self) -> OwnWeights | None:
        """What brings workers' own weights together."""
        if isinstance(self._topology, Gossip):
            return Mixing(self._topology, self._weights, self._join_steps)
        if not isinstance(self._synchrony, LocalSGD):
            return None
        return OuterStep(self._synchrony, self._weights, self._layers.fragments(self._synchrony.fragments))

    @property
    def _join_steps(self) -> int:
        return join_steps(self._synchrony)

    def _kinds_beside(self) -> list[str]:
        apart = ["each worker's own slots"] if self._outer is not None else []
        return [*super()._kinds_beside(), *apart]

    def _new_compressor(self) -> Compressor | None:
        """What sums compressed gradients."""
        if self._compression is None:
            return None
        weights, rows = self._segment.trainable_variables, self._rows_alone()
        like = {n: spec for n, spec in enumerate(specs(weights)) if n not in rows}
        of_moves = isinstance(self._synchrony, LocalSGD)
        return Compressor(self._compression, like, self._devices, weights, self._momentum, of_moves=of_moves)

    def _of_servers(self) -> list[list[WeightsPart]]:
        """The weights, once: the part that each server has; there may be fewer of them than servers."""
        held = self._layers.on_servers(self._servers)
        parts = [WeightsPart(device, each) for device, each in zip(self._devices, held, strict=False)]
        return [[part for part in parts if part.numbers] or parts[:1]]

    def _of_workers(self) -> list[list[WeightsPart]]:
        """The weights on every worker, in two parts if a part of them is updated late."""
        late = set(self.plan.late_variables)
        every = range(len(self._segment.trainable_variables))
        groups = [[n for n in every if n not in late], sorted(late)]
        groups = [each for each in groups if each] or groups[:1]
        return [[WeightsPart(device, each) for each in groups] for device in self._devices]

    def _new_runner(self) -> Any:
        count = len(self._devices)
        workers = [Worker(self._segment, device, n, count) for n, device in enumerate(self._devices)]
        reads = self._compilation.metrics.read_predictions
        kind: Any = TransferStep
        make: Any = StepRunner
        if isinstance(self._synchrony, Asynchronous):
            kind, make = OwnPaceStep, partial(OwnPaceRunner, self._synchrony, known(self._arrivals))
        return make(
            self._weights,
            workers,
            self.plan,
            lambda plan, begun: kind(
                self._weights,
                workers,
                plan,
                self._serves,
                HOST,
                begun,
                reads,
                self._compressor,
                self._outer,
                self._topology == RING,
                self._is_stale,
            ),
            WorkerRows(self._devices),
            self._run_settings,
            self._compilation.learning_rate,
            self._outer,
            self._is_stale,
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
            near = finalists(first_s, [*simulated.values()])
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
            runner = self._by(plan, keeps, fitted)
            self._runner.is_tried = True
            return minibatch_s(runner, known(self._compilation.data.first))
        except BaseException as error:
            if not isinstance(error, FORGETTING):
                self._runner = None  # the next trial is of another plan
            raise
        finally:
            if self._runner is not None:
                self._runner.is_tried = False

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
        arrays = self._collected()
        try:
            yield
        finally:
            self._assigned(arrays)

    def _setting(self, rows: int | None, is_measured: bool = True) -> Setting:
        """The workers as the simulator takes them, for minibatches of so many rows.

        If it ``is_measured``, the model is profiled, and links, processors' speeds and what else needs these are
        measured, if anything is sent; else nothing takes time.
        """
        variables, planner, workers = self._segment.trainable_variables, self.planner, len(self._devices)
        profile, message, cluster = None, Message(), Cluster()
        if is_measured:
            cluster = described(self._devices, within_functions=True)
            message = message_of(cluster, workers, self._serves, self._topology)
            if message != Message():  # else no order hides anything
                profile = planner.profile(rows or DEFAULT_ROWS, workers, filter(None, [self._compression]))
                cluster = with_processors(cluster, self._devices)
                message = message_of(cluster, workers, self._serves, self._topology)
        workload = workload_of(planner.chain, variables, profile, message, workers, self._rows_alone())
        if isinstance(self._synchrony, LocalSGD):
            workload = updating_alone(workload)
        if profile is not None and self._compression is not None:
            workload = coded(workload, profile, self._compression, workers, self._join_steps)
        sent = input_bytes(self.model, planner.shapes, (rows or DEFAULT_ROWS) // workers)
        return Setting(
            workload,
            workers,
            self._serves,
            cluster,
            0.0 if profile is None else between_steps_s(profile, cluster),
            servers=self._servers,
            whole=True,
            input_bytes=sent,
            at_once=self._needs_all or bool(stepping(self.optimizer).gradient_accumulation_steps),
            gradient_bytes=self._gradient_bytes(),
            join_steps=self._join_steps,
            fragments=workload.fragments(join_fragments(self._synchrony)),
            topology=self._topology,
            is_stale=self._is_stale or hides_joins(self._synchrony),
        )

    def _gradient_bytes(self) -> tuple[int, ...] | None:
        """Of every variable's gradient as it is sent, if gradients are compressed."""
        if self._compression is None:
            return None
        every = specs(self._segment.trainable_variables)
        rows = self._rows_alone()
        return tuple(
            size_bytes(each) if n in rows else self._compression.sent_bytes(each.shape.as_list(), each.dtype.size)
            for n, each in enumerate(every)
        )

    def _rows_alone(self) -> set[int]:
        """The numbers of weights whose gradients are rows: embeddings' that one layer reads."""
        weights = self._segment.trainable_variables
        used = Counter(id(each) for block in self.planner.chain.blocks for call in block.calls for each in call.weights)
        return {n for n in embeddings(self.model, weights) if used[id(weights[n])] == 1}

    @property
    def _needs_all(self) -> bool:
        """Whether all gradients are needed at once: their norm, by a class of the user's, or to join weights."""
        if self._is_apart:
            return True
        steps = stepping(self.optimizer)
        return limit(steps.global_clipnorm) is not None or bool(whole_step(steps))

    def _planned(self, rows: int | None) -> dict[Plan, float]:
        """The plans of the order as simulated, measured where it depends on that."""
        rows_alone = embeddings(self.model, self._segment.trainable_variables)
        if self._is_at_own_pace:
            return {ORDERS["none"](self._setting(rows, is_measured=False).workload, True): 1.0}
        setting = self._setting(rows, is_measured(self._order)).joining()  # as when all is sent
        plans = planned(self._order, setting, rows_alone, self._needs_all or self._is_stale)
        if self._is_stale:
            # Weights that were pulled would share the links with the gradients that are sent then.
            plans = {each.returning._replace(pushes=Phase(), late=each.pushes): part for each, part in plans.items()}
        # What the steps between two joins take does not depend on the order: trials of few steps would tell nothing.
        return dict([*plans.items()][:1]) if isinstance(self._synchrony, LocalSGD) else plans
