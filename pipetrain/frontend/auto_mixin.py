"""The way to train that ``scheme="auto"`` chooses, once, when the first ``fit`` begins."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pipetrain.compute.graph.input_shapes import shapes_of_data
from pipetrain.compute.keras_private import replace_layer
from pipetrain.frontend.auto import AutoStrategy
from pipetrain.frontend.input_data import first_rows
from pipetrain.frontend.strategies import Options, checked, strategy_of
from pipetrain.frontend.strategy_model import StrategyModel
from pipetrain.plan.choice import Choice
from pipetrain.schemes.table import COPIED


class AutoMixin(StrategyModel):
    """Gives the model the strategy of the way that is chosen, and compiles it again.

    ``way`` are the arguments of ``PipelineModel`` that were chosen; None before, and without ``scheme="auto"``.
    """

    _compile_again: Callable[[], None]
    way: Mapping[str, Any] | None = None
    _choice: Choice | None = None
    scheme: str
    options: dict[str, Any]

    @property
    def choice(self) -> Choice | None:
        """The ways to train among which ``scheme="auto"`` has chosen, as a table when printed; None before that.

        None too where it was a checkpoint that told the way.
        """
        return self._choice

    def settle(self, x: Any, batch_size: int | None, callbacks: Sequence[Any]) -> None:
        """Choose the way to train if it is open: that of the run which a checkpoint goes on with, or the fastest.

        Raises ValueError if none fits the devices' memory.
        """
        strategy = self._strategy
        if not isinstance(strategy, AutoStrategy):
            return
        told = (each.way_of_run() for each in callbacks if hasattr(each, "way_of_run"))
        way, stages = next((each for each in told if each), None), None
        if way is None:
            rows, shapes = first_rows(x, batch_size), shapes_of_data(x, strategy.trained)
            self._choice = strategy.choice(rows, shapes)
            way, stages = self._choice.taken.arguments, self._choice.cut
        arguments = {**way, "cuts": None, "replicas": None} if stages is not None else dict(way)
        devices = strategy.devices[:1] if way["scheme"] == "single" else strategy.devices
        recompute = strategy.placement.training.recompute and way["scheme"] not in COPIED
        options = checked(Options(**arguments, stages=stages, devices=devices, recompute=recompute))
        self._strategy = strategy_of(self.model, options)
        replace_layer(self, "inner", self._strategy.trained)
        self.scheme, self.options = options.name, options.of_policy()
        self.way = way
        self._compile_again()
