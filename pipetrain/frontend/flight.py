"""What a runner keeps between two calls, as a checkpoint has it, and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from pipetrain.checkpoint.nested import nested, plain
from pipetrain.checkpoint.state import Arrays, RunState, named, tensor_of
from pipetrain.compute.functions.stage_values import KeptStage
from pipetrain.frontend.stages import OptimizedStages
from pipetrain.run.collector import InFlight, Kept


class FlightConditions(NamedTuple):
    """What has to be the same where a run goes on with what is in flight: how it is trained, and by which versions.

    ``devices`` are kinds of devices, each as often as it has a replica of a stage.
    """

    scheme: str
    ends: tuple[int, ...]
    replicas: tuple[int, ...]
    compiled: tuple[bool, ...]
    devices: tuple[str, ...]
    microbatches: int
    recompute: bool
    compression: str | None = None
    of_tensorflow: str = tf.version.VERSION
    of_keras: str = keras.version()

    def differences(self, about: dict[str, Any]) -> list[str]:
        """What is otherwise than in a checkpoint's ``about``, by name."""
        mine = {name: list(each) if isinstance(each, tuple) else each for name, each in self._asdict().items()}
        return [name for name, each in mine.items() if about.get(name) != each]


def state_of(
    model: keras.Model, stages: OptimizedStages, kept: Kept, way: FlightConditions, devices: Sequence[str]
) -> RunState:
    """The state of a run whose devices hold what was ``kept``.

    Whoever cannot go on with what is in flight finds the values that a drained run has: of weights that several stages
    have, those of the first.
    """
    values: dict[int, Any] = {}
    for replicas, held in zip(stages.replicas, kept.stages, strict=True):
        values |= {id(each): value for each, value in zip(replicas[0].everything(), held[0].variables, strict=True)}
        values |= {id(each): value for each, value in replicas[0].of_model(held)}
    common = named(model, stages.slots(), stages.shared())
    found = {name: values.get(id(each), tf.convert_to_tensor(each)) for name, each in common.items()}
    tensors: list[tf.Tensor] = []
    left = None if kept.in_flight is None else plain(kept.in_flight, tensors)
    more = {f"flight/{n}": each for n, each in enumerate(tensors)}
    names = _names(model, stages)
    for name, variable in _variables(stages, names):
        more[name] = values[id(variable)]
    for k, held in enumerate(kept.stages):
        more |= {f"state/{k}/{r}/{n}": each for r, mine in enumerate(held) for n, each in enumerate(mine.state)}
    first = {id(value): name for name, value in reversed(found.items())}
    same = {name: first[id(value)] for name, value in more.items() if id(value) in first}
    found |= {name: value for name, value in more.items() if name not in same}
    about = {
        "of": way._asdict(),
        "taken": kept.taken,
        "ahead": 0 if kept.in_flight is None else len(kept.in_flight.results),
        "minibatches": kept.minibatches,
        "states": [[len(mine.state) for mine in held] for held in kept.stages],
        "same": same,
        "left": left,
        "devices": list(devices),
    }
    return RunState(found, {"in_flight": about})


def kept_of(
    model: keras.Model, stages: OptimizedStages, arrays: Arrays, about: dict[str, Any], devices: Sequence[str]
) -> Kept | None:
    """What ``state_of`` was given; None where the stages have other variables than those of the checkpoint."""
    there = dict(zip(about["devices"], devices, strict=True))
    names, same = _names(model, stages), about["same"]

    def array(name: str) -> np.ndarray:
        return arrays[same.get(name, name)]

    def tensor(number: int, dtype: tf.DType, device: str) -> tf.Tensor:
        with tf.device(there.get(device)):
            return tf.identity(tensor_of(array(f"flight/{number}"), dtype))

    held = []
    try:
        for k, (replicas, counts) in enumerate(zip(stages.replicas, about["states"], strict=True)):
            variables = [array(names[id(each)]) for each in replicas[0].everything()]
            if [each.shape for each in variables] != [tuple(each.shape) for each in replicas[0].everything()]:
                return None
            states = [
                [tf.constant(array(f"state/{k}/{r}/{n}")) for n in range(count)] for r, count in enumerate(counts)
            ]
            held.append([KeptStage([tf.constant(each) for each in variables], mine) for mine in states])
    except KeyError:
        return None
    left = nested(about["left"], tensor)
    if left is None:
        return Kept(held, about["taken"])
    return Kept(held, about["taken"], InFlight(*left))


def _names(model: keras.Model, stages: OptimizedStages) -> dict[int, str]:
    """The names of all variables of the stages, by identity: those that a drained run's have, and ``run/K/N``."""
    numbers = {id(variable): n for n, variable in enumerate(model.variables)}
    names = {id(copy): f"weight/{numbers[id(original)]}" for each in stages.first for copy, original in each.firsts()}
    common = named(model, stages.slots(), stages.shared())
    names |= {id(variable): name for name, variable in common.items()}
    for k, stage in enumerate(stages.first):
        for n, variable in enumerate(stage.everything()):
            names.setdefault(id(variable), f"run/{k}/{n}")
    return names


def _variables(stages: OptimizedStages, names: dict[int, str]) -> Iterator[tuple[str, Any]]:
    """The variables of the stages, by name, that are in no state of a drained run."""
    for stage in stages.first:
        for variable in stage.everything():
            if names[id(variable)].startswith("run/"):
                yield names[id(variable)], variable
