"""The way to train that ``scheme="auto"`` chooses, once, when the first ``fit`` begins."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import keras

from pipetrain.compute.graph.input_shapes import shapes_of_data
from pipetrain.compute.keras_private import replace_layer
from pipetrain.compute.profiling.kept_trials import KeptTrials
from pipetrain.frontend.attributes import known
from pipetrain.frontend.auto import AutoStrategy
from pipetrain.frontend.input_data import DEFAULT_ROWS, first_rows, sample_of
from pipetrain.frontend.options import Options
from pipetrain.frontend.preprocessing import preprocesses
from pipetrain.frontend.strategies import checked, strategy_of
from pipetrain.frontend.strategy_model import StrategyModel
from pipetrain.frontend.way_trials import WayTrial, compared_s, for_trials, kept
from pipetrain.plan.choice import Choice, Way
from pipetrain.plan.stages import Partition
from pipetrain.schemes.options import AnyScheme, flat, keywords, name_of, scheduled, with_options
from pipetrain.schemes.table import COPIED, UNCUT
from pipetrain.schemes.table import scheme as scheme_of_table

LAYOUT = ("stages", "cuts", "replicas")


class AutoMixin(StrategyModel):
    """Gives the model the strategy of the way that is chosen, and compiles it again.

    ``way`` are the arguments of ``PipelineModel`` that were chosen: the scheme's name, its options and the others, each
    by its name; None before, and without ``scheme="auto"``.
    """

    _compile_again: partial[None] | None = None
    way: Mapping[str, Any] | None = None
    _choice: Choice | None = None
    _chosen_scheme: AnyScheme
    scheme: str
    options: dict[str, Any]
    _by: Callable[[keras.Model, Options], AutoMixin]  # a model that is trained by these options

    @property
    def choice(self) -> Choice | None:
        """The ways to train among which ``scheme="auto"`` has chosen, as a table when printed; None before that.

        None too where it was a checkpoint that told the way.
        """
        return self._choice

    def settle(self, x: Any, y: Any, batch_size: int | None, callbacks: Sequence[Any]) -> None:
        """Choose the way to train if it is open: that of the run which a checkpoint goes on with, or the fastest.

        Where prediction cannot tell which that is, several are tried, if inputs and labels can be seen before ``fit``.
        Raises ValueError if none fits the devices' memory.
        """
        strategy = self._strategy
        if not isinstance(strategy, AutoStrategy):
            return
        told = (each.way_of_run(self.is_verbose) for each in callbacks if hasattr(each, "way_of_run"))
        known_way, stages = next((each for each in told if each), None), None
        if known_way is not None:
            way: Mapping[str, Any] = way_of(known_way)
            if strategy.is_laid_out:
                _check_layout(way, strategy)
        else:
            rows, shapes = first_rows(x, batch_size), shapes_of_data(x, strategy.trained)
            choice = strategy.choice(rows, shapes)
            data = None if preprocesses(self.model) else sample_of(x, y, rows or DEFAULT_ROWS)
            self._choice = choice if data is None else self._tried(strategy, choice, data)
            way, stages = self._choice.taken.arguments, self._choice.cut
        options = checked(_options(strategy, way, stages))
        self._strategy = strategy_of(self.model, options)
        self._strategy.placement.compare_on(strategy.devices, strategy.given.memory_bytes)
        replace_layer(self, "inner", self._strategy.trained)
        self.scheme, self.options, self._chosen_scheme = options.name, options.policy, options.scheme
        if strategy.is_laid_out and known_way is not None:  # in the layout that is given now
            placement, given = self._strategy.placement, strategy.given
            way = {"scheme": options.scheme, "microbatches": options.microbatches, "stages": placement.stages}
            way |= {"cuts": tuple(given.cuts)} if given.cuts is not None else {}
            way |= {"replicas": placement.replicas} if max(placement.replicas) > 1 else {}
        self.way = told_of(way)
        known(self._compile_again)()

    def _tried(self, strategy: AutoStrategy, choice: Choice, data: Any) -> Choice:
        """The choice with what those ways take that may be the fastest, if they are several."""
        near = choice.near
        if len(near) < 2:
            return choice
        compiled = {**known(self._compile_again).keywords, **dict.fromkeys(("metrics", "weighted_metrics"))}
        compiled.pop("steps_per_execution", None)  # trials time single minibatches
        settings = {**self.optimizer.get_config(), "learning_rate": None, "name": None}
        within = "turns", strategy.devices, type(self.optimizer).__name__, settings, compiled.get("jit_compile")
        kept_trials = KeptTrials(choice, within)

        def trial(way: Way) -> WayTrial:
            cut, _ = choice.cut_of(way) if choice.cut_of and way.is_pipeline else (None, 0.0)
            make = partial(self._by, self.model, _options(strategy, way.arguments, cut))
            return WayTrial(make, data, {**compiled, "optimizer": for_trials(self.optimizer, self.model)})

        def fit_together(numbers: Sequence[int]) -> bool:
            limit_bytes = math.inf if choice.limit_bytes is None else choice.limit_bytes
            return sum(near[n].memory_bytes for n in numbers) <= limit_bytes

        seconds = kept_trials.seconds
        if not seconds:
            with kept(self.model):
                seconds, is_to_keep = compared_s(
                    [partial(trial, way) for way in near], fit_together, strategy.placement.verbose
                )
            if min(seconds) == math.inf:
                return choice  # whoever trains is told why
            if is_to_keep:
                kept_trials.keep(seconds)
        return choice.with_trials([*zip(near, seconds, strict=True)])


def _options(strategy: AutoStrategy, way: Mapping[str, Any], cut: Partition | None) -> Options:
    """Those of a way to train, with its cut if it is a pipeline; a layout that is given stays."""
    arguments = {**way, "cuts": None, "replicas": None, "stages": cut} if cut is not None else dict(way)
    if cut is None and strategy.is_laid_out:
        arguments |= dict(zip(LAYOUT, strategy.given.layout, strict=True))
        arguments["microbatches"] = strategy.given.microbatches or way.get("microbatches")
    name = name_of(arguments["scheme"])
    arguments["devices"] = strategy.devices[:1] if name == "single" else strategy.devices
    arguments["recompute"] = strategy.given.recompute and name not in COPIED
    return Options(**arguments)


def _check_layout(way: Mapping[str, Any], strategy: AutoStrategy) -> None:
    """Refuse to go on, in a layout, with a run that was none of a synchronous pipeline of one stage a device."""
    scheme = scheduled(way["scheme"])
    pipeline = None if name_of(scheme) in UNCUT else scheme_of_table(scheme)
    if pipeline is None or pipeline.asynchronous or pipeline.schedule.chunks > 1:
        given = {name: value for name, value in zip(LAYOUT, strategy.given.layout, strict=True) if value is not None}
        raise ValueError(
            "The run of the checkpoint was trained in a way that has no such layout. Received: "
            f"{keywords(given)}, a checkpoint of {keywords({'scheme': way['scheme']})}. Try leaving "
            f"{' and '.join(given)} out, or another directory."
        )


def told_of(way: Mapping[str, Any]) -> dict[str, Any]:
    """A way's arguments as a checkpoint has them: the scheme's options by their names."""
    return flat(**way)


def way_of(told: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that ``told_of`` has told."""
    common = {name: value for name, value in told.items() if name in Options._fields and name != "scheme"}
    own = {name: value for name, value in told.items() if name not in Options._fields}
    if own.get("grid"):  # of which JSON has made lists
        own["grid"] = tuple(tuple(each) if isinstance(each, list) else each for each in own["grid"])
    return {"scheme": with_options(told["scheme"], **own), **common}
