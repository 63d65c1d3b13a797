"""``scheme="auto"``: what chooses the way to train when the first ``fit`` begins, by trials too, and hands on."""

from __future__ import annotations

import gc
import math
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from pipetrain.checkpoint.state import assign_model, collected
from pipetrain.cluster.bandwidth import with_processors
from pipetrain.compute.cores import is_remote
from pipetrain.compute.graph.inputs import Shapes, shapes_of_data
from pipetrain.compute.keras_private import rate_of
from pipetrain.compute.optimizer.clone import clone
from pipetrain.compute.optimizer.gradient_scaling import stepping
from pipetrain.compute.profiling.limits import KeptTrials
from pipetrain.compute.profiling.progress import Progress
from pipetrain.frontend.contexts import known
from pipetrain.frontend.input_data import DEFAULT_ROWS, first_rows, preprocesses, sample_of
from pipetrain.frontend.layout import Layout, described_for
from pipetrain.frontend.options import Options
from pipetrain.frontend.pipeline_strategy import PipelineStrategy
from pipetrain.frontend.planner import Planner
from pipetrain.plan.choice import TURNS, Choice, Explanation, Way, finalists, settled
from pipetrain.plan.stages import Partition
from pipetrain.run.window import TrialClock
from pipetrain.schemes.options import AnyScheme, built, flat, keywords, name_of, with_options
from pipetrain.schemes.scheme import Scheme
from pipetrain.schemes.synchrony import join_steps
from pipetrain.schemes.table import COPIED, UNCUT
from pipetrain.simulation.every_way import CROSSING, SENT, PipelineLayout, choose

MOST = 10**6  # minibatches, of which the clock needs fewer
TINY = 1e-20  # of the learning rate; some optimizers divide by it
FAILURES = (ValueError, TypeError, NotImplementedError, FloatingPointError, tf.errors.OpError)


class _Timing(keras.callbacks.Callback):
    """Stops training when enough minibatches are timed."""

    def __init__(self, period: int) -> None:
        super().__init__()
        self.clock = TrialClock(period)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """A result is there."""
        self.clock.tick()
        self.model.stop_training = self.model.stop_training or self.clock.is_enough


class WayTrial:
    """A model that trains in one way, in turns.

    Args:
        make: gives the model.
        data: inputs and labels of a minibatch.
        compiled: the arguments of ``compile``.
        period: minibatches after which steps repeat.
    """

    def __init__(self, make: Callable[[], keras.Model], data: Any, compiled: dict[str, Any], period: int = 1) -> None:
        self._make, self._data, self._compiled, self._period = make, data, compiled, period
        self.model: keras.Model | None = None

    def turn_s(self) -> float:
        """Seconds from one minibatch to the next in a turn; infinite if the model cannot train.

        Raises what training raises, but for what may be due to this way: that it is refused, or needs too much memory.
        """
        timing = _Timing(self._period)
        try:
            if self.model is None:
                self.model = self._make()
                self.model.compile_with(**self._compiled)
            again = tf.data.Dataset.from_tensors(self._data).repeat()
            self.model.fit(again, steps_per_epoch=MOST, shuffle=False, verbose=0, callbacks=[timing])
        except FAILURES:
            return math.inf
        return timing.clock.minibatch_s


def compared_s(
    trials: Sequence[Callable[[], WayTrial]],
    predicted_s: Sequence[float],
    fit_together: Callable[[Sequence[int]], bool],
    verbose: bool = True,
) -> tuple[list[float], bool]:
    """Seconds of a minibatch by each of these ways, infinite if it cannot train, and whether that is to be kept.

    Each is tried alone, so that the devices' memory need not hold several. Then those that are near the fastest, by
    trial and prediction, are made again, and take turns, if they ``fit_together``. Where that fails, the first trials
    hold, and are not to be kept: what made it fail may be over.
    """
    progress, first_s = Progress(f"Trying {len(trials)} ways to train.", len(trials) * verbose), []
    for made in trials:
        first_s.append(made().turn_s())
        gc.collect()  # its stages' weights, and what workers keep for it
        progress.add(1)
    near = finalists(first_s, predicted_s)
    turns_s = _in_turns({n: trials[n]() for n in near}, verbose) if fit_together(near) else {}
    gc.collect()
    return (first_s, False) if turns_s is None else (settled(first_s, turns_s), math.inf not in first_s)


def _in_turns(trials: Mapping[int, WayTrial], verbose: bool) -> dict[int, list[float]] | None:
    """Seconds of a minibatch of each in each of its turns; None if one cannot train beside the others."""
    progress = Progress(f"Trying {len(trials)} of them in turns.", TURNS * len(trials) * verbose)
    turns_s: dict[int, list[float]] = {n: [] for n in trials}
    for _ in range(TURNS):
        for n, trial in trials.items():
            turns_s[n].append(trial.turn_s())
            if turns_s[n][-1] == math.inf:
                progress.end()
                return None
            progress.add(1)
    return turns_s


def for_trials(optimizer: keras.optimizers.Optimizer, model: keras.Model) -> keras.optimizers.Optimizer:
    """An optimizer that does the same work, with tiny steps unless a schedule or a function gives the learning rate.

    The loss of a minibatch that comes again then stays what it is.
    """
    variables, steps = model.trainable_variables, stepping(optimizer)
    copy = clone(steps, variables, variables)
    if isinstance(rate_of(copy), keras.Variable):
        copy.learning_rate = TINY
    return copy if steps is optimizer else keras.optimizers.LossScaleOptimizer(copy)


@contextmanager
def kept(model: keras.Model) -> Iterator[None]:
    """In the end the model has the weights and the state that it had, whatever was done with it.

    Python's and NumPy's random numbers, from which Keras draws seeds, go on as if nothing had been.
    """
    arrays, drawn, of_numpy = collected(model, (), ()), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        assign_model(model, arrays)
        random.setstate(drawn)
        np.random.set_state(of_numpy)


LAYOUT = ("stages", "cuts", "replicas")


class Taken(NamedTuple):
    """The way to train that was chosen.

    Attributes:
        way: the arguments of ``PipelineModel`` that were chosen, each by its name.
        cut: of its pipeline, if it is one whose cut was chosen.
        choice: among which it was chosen; None where a checkpoint told it.
    """

    way: Mapping[str, Any]
    cut: Partition | None
    choice: Choice | None


class AutoStrategy(PipelineStrategy):
    """A pipeline that is not trained: at the first ``fit`` a strategy of the chosen way takes its place.

    Args:
        planner: of the pipeline whose schedule is to be chosen, or of one stage.
        scheme: of that pipeline.
        devices: full names of all that may be used.
        allow: what may be chosen, see ``schemes.options.Auto``.
        given: the arguments that the user gives.
    """

    def __init__(
        self, planner: Planner, scheme: Scheme, devices: Sequence[str], allow: Collection[str], given: Options
    ) -> None:
        super().__init__(planner, scheme)
        self.devices, self._allow, self.given = list(devices), allow, given

    @property
    def readers(self) -> Sequence[str]:
        """None, before a way is chosen."""
        return ()

    @property
    def is_laid_out(self) -> bool:
        """Whether a layout is given, whose schedule is to be chosen; else any way may be."""
        return self.given.layout != (None, None, None)

    def choice(self, rows: int | None = None, shapes: Shapes | None = None) -> Choice:
        """Every way to train with minibatches of so many rows; the model is profiled, and links are measured."""
        planner, layout = self.planner, None
        planner.learn_shapes(shapes)
        if self.is_laid_out:
            layout = PipelineLayout(planner.layout.replicas, planner.layout.ends, self.given.microbatches)
        devices = sum(layout.replicas) if layout else len(self.devices)
        batch_size, pieces = rows or DEFAULT_ROWS, (layout and layout.microbatches) or devices
        sent = (*SENT, CROSSING) if "compression" in self._allow else ()
        whole = planner.profile(batch_size, 1, sent)
        of_microbatches = planner.profile(batch_size, pieces, sent) if 1 < pieces <= batch_size else None
        cluster = with_processors(described_for(self.model, self.devices, self.given.memory_bytes), self.devices)
        mirrored = not any(map(is_remote, self.devices))
        training = planner.training._replace(microbatches=1)
        return choose(
            whole, devices, cluster, training, of_microbatches, mirrored=mirrored, layout=layout, allow=self._allow
        )

    def explanation(self, batch_size: int, scheme: AnyScheme) -> Explanation:
        """The ways to train as a table, which would be taken, and its cut."""
        return self.choice(batch_size).explained()

    def taken(
        self,
        x: Any,
        y: Any,
        batch_size: int | None,
        callbacks: Sequence[Any],
        make: Callable[[Options], keras.Model],
        compiled: Mapping[str, Any],
    ) -> Taken:
        """The way of the run which a checkpoint goes on with, or the fastest.

        Where prediction cannot tell which that is, several are tried, if inputs and labels can be seen before ``fit``.

        Args:
            x, y, batch_size, callbacks: those of ``fit``.
            make: gives a model that is trained by these options.
            compiled: the arguments of ``compile``.

        Raises:
            ValueError: if none fits the devices' memory; for a layout that the checkpoint's way cannot have.
        """
        told = (each.way_of_run(self.planner.verbose) for each in callbacks if hasattr(each, "way_of_run"))
        known_way = next((each for each in told if each), None)
        if known_way is not None:
            way = way_of(known_way)
            if self.is_laid_out:
                self._check_layout(way)
            return Taken(way, None, None)
        rows = first_rows(x, batch_size)
        choice = self.choice(rows, shapes_of_data(x, self.trained))
        data = None if preprocesses(self.model) else sample_of(x, y, rows or DEFAULT_ROWS)
        choice = choice if data is None else self._tried(choice, data, make, compiled)
        return Taken(choice.taken.arguments, choice.cut, choice)

    def _tried(
        self, choice: Choice, data: Any, make: Callable[[Options], keras.Model], compiled: Mapping[str, Any]
    ) -> Choice:
        """The choice with what those ways take that may be the fastest, if they are several."""
        near, optimizer = choice.near, known(self.optimizer)
        if len(near) < 2:
            return choice
        compiled = {**compiled, **dict.fromkeys(("metrics", "weighted_metrics"))}
        compiled.pop("steps_per_execution", None)  # trials time single minibatches
        settings = {**optimizer.get_config(), "learning_rate": None, "name": None}
        within = "turns", self.devices, type(optimizer).__name__, settings, compiled.get("jit_compile")
        kept_trials = KeptTrials(choice, within)

        def trial(way: Way) -> WayTrial:
            cut, _ = choice.cut_of(way) if choice.cut_of and way.is_pipeline else (None, 0.0)
            made = partial(make, self.options_of(way.predicted, cut))
            period = join_steps(getattr(way.arguments["scheme"], "synchrony", None))
            return WayTrial(made, data, {**compiled, "optimizer": for_trials(optimizer, self.model)}, period)

        def fit_together(numbers: Sequence[int]) -> bool:
            limit_bytes = math.inf if choice.limit_bytes is None else choice.limit_bytes
            return sum(near[n].memory_bytes for n in numbers) <= limit_bytes

        seconds = kept_trials.seconds
        if not seconds:
            with kept(self.model):
                trials, predicted_s = [partial(trial, way) for way in near], [way.step_s for way in near]
                seconds, is_to_keep = compared_s(trials, predicted_s, fit_together, self.planner.verbose)
            if min(seconds) == math.inf:
                return choice  # whoever trains is told why
            if is_to_keep:
                kept_trials.keep(seconds)
        return choice.with_trials([*zip(near, seconds, strict=True)])

    def options_of(self, way: Mapping[str, Any], cut: Partition | None) -> Options:
        """Those of a way to train, with its cut if it is a pipeline; a layout that is given stays."""
        arguments = {**way, "cuts": None, "replicas": None, "stages": cut} if cut is not None else dict(way)
        if cut is None and self.is_laid_out:
            arguments |= dict(zip(LAYOUT, self.given.layout, strict=True))
            arguments["microbatches"] = self.given.microbatches or way.get("microbatches")
        name = name_of(arguments["scheme"])
        arguments["devices"] = self.devices[:1] if name == "single" else self.devices
        arguments["recompute"] = self.given.recompute and name not in COPIED
        return Options(**arguments)

    def way_told(self, taken: Taken, options: Options, layout: Layout) -> dict[str, Any]:
        """The way that was taken as a checkpoint has it: the scheme's options by their names.

        Of a run that goes on in the layout that is given now, with that.
        """
        way = dict(taken.way)
        if self.is_laid_out and taken.choice is None:
            way = {"scheme": options.scheme, "microbatches": options.microbatches, "stages": layout.stages}
            way |= {"cuts": tuple(self.given.cuts)} if self.given.cuts is not None else {}
            way |= {"replicas": layout.replicas} if max(layout.replicas) > 1 else {}
        return flat(**way)

    def _check_layout(self, way: Mapping[str, Any]) -> None:
        """Refuse to go on, in a layout, with a run that was none of a synchronous pipeline of one stage a device."""
        pipeline = None if name_of(way["scheme"]) in UNCUT else built(way["scheme"])
        if pipeline is None or pipeline.asynchronous or pipeline.schedule.chunks > 1:
            given = {name: value for name, value in zip(LAYOUT, self.given.layout, strict=True) if value is not None}
            raise ValueError(
                "The run of the checkpoint was trained in a way that has no such layout. Received: "
                f"{keywords(given)}, a checkpoint of {keywords({'scheme': way['scheme']})}. Try leaving "
                f"{' and '.join(given)} out, or another directory."
            )


def way_of(told: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that ``way_told`` has told."""
    common = {name: value for name, value in told.items() if name in Options._fields and name != "scheme"}
    own = {name: value for name, value in told.items() if name not in Options._fields}
    if own.get("grid"):  # of which JSON has made lists
        own["grid"] = tuple(tuple(each) if isinstance(each, list) else each for each in own["grid"])
    return {"scheme": with_options(told["scheme"], **own), **common}
