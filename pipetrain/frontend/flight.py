"""What a runner keeps between two calls, as a checkpoint has it, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from pipetrain.checkpoint.state import Arrays, RunState, named, tensor_of
from pipetrain.compute.functions import stage_values, weight_binding, weight_products
from pipetrain.compute.functions.stage_values import KeptStage
from pipetrain.compute.program import stage_trace, sums, walk
from pipetrain.compute.tensorflow_private import parts_of_slices_spec
from pipetrain.frontend.layout import OptimizedStages
from pipetrain.run import collector
from pipetrain.run.collector import InFlight, Kept
from pipetrain.schemes import policies, weight_versions

IN_FLIGHT = (stage_values, weight_binding, weight_products, sums, stage_trace, walk, collector, policies)
RECORDS: dict[str, Any] = {  # all that these modules have, whether it is in flight today or not
    name: kind
    for module in (*IN_FLIGHT, weight_versions)
    for name, kind in vars(module).items()
    if isinstance(kind, type) and issubclass(kind, tuple) and kind.__module__ == module.__name__
}


class Unwritable(TypeError):
    """A value that cannot be written."""


def plain(value: Any, tensors: list[tf.Tensor]) -> Any:
    """What JSON holds of a nested value; its tensors are added to the list. Raises Unwritable for what is unknown here.

    Numbers, texts, truth values and None are themselves; anything else is an object of one entry.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, tf.Tensor):
        if value.dtype == tf.resource:
            raise Unwritable("a resource, such as a table or a generator of random numbers, is in flight")
        tensors.append(value)
        return {"tensor": [len(tensors) - 1, value.dtype.name, value.device]}
    if isinstance(value, tf.TypeSpec):
        return _plain_spec(value)
    if isinstance(value, dict):
        return {"dict": [[plain(key, tensors), plain(each, tensors)] for key, each in value.items()]}
    name = type(value).__name__
    if type(value) in (tuple, list):
        return {name: [plain(each, tensors) for each in value]}
    if RECORDS.get(name) is type(value):
        return {"record": [name, [plain(each, tensors) for each in value]]}
    raise Unwritable(f"a value of type {name} is in flight")


def _plain_spec(spec: tf.TypeSpec) -> Any:
    if isinstance(spec, tf.TensorSpec):
        return {"spec": [_sizes(spec.shape), spec.dtype.name]}
    if isinstance(spec, tf.IndexedSlicesSpec):
        shape, *dtypes, indices = parts_of_slices_spec(spec)
        return {"slices": [_sizes(shape), *(each and each.name for each in dtypes), _sizes(indices)]}
    raise Unwritable(f"a value of {type(spec).__name__} is in flight")


def nested(value: Any, tensor: Callable[[int, tf.DType, str], tf.Tensor]) -> Any:
    """What ``plain`` was given; ``tensor`` gives a tensor by its number in the list, its type and its device then."""
    if not isinstance(value, dict):
        return value
    ((kind, given),) = value.items()
    if kind == "tensor":
        number, dtype, device = given
        return tensor(number, tf.as_dtype(dtype), device)
    if kind == "spec":
        return tf.TensorSpec(given[0], tf.as_dtype(given[1]))
    if kind == "slices":
        shape, *dtypes, indices = given
        types = [each and tf.as_dtype(each) for each in dtypes]
        return tf.IndexedSlicesSpec(shape, *types, indices)
    if kind == "dict":
        return {nested(key, tensor): nested(each, tensor) for key, each in given}
    if kind == "record":
        name, fields = given
        return RECORDS[name](*(nested(each, tensor) for each in fields))
    return {"tuple": tuple, "list": list}[kind](nested(each, tensor) for each in given)


def _sizes(shape: Any) -> Any:
    return None if shape.rank is None else list(shape)


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
    replica_compression: str | None = None
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
        for replica, mine in zip(replicas, held, strict=True):
            values |= {id(each): value for each, value in zip(replica.held(), mine.variables, strict=True)}
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
            kept = []
            for r, (replica, count) in enumerate(zip(replicas, counts, strict=True)):
                mine = [*replicas[0].everything(), *(slot.variable for slot in replica.worker_slots)]
                variables = [array(names[id(each)]) for each in mine]
                if [each.shape for each in variables] != [tuple(each.shape) for each in mine]:
                    return None
                state = [tf.constant(array(f"state/{k}/{r}/{n}")) for n in range(count)]
                kept.append(KeptStage([tf.constant(each) for each in variables], state))
            held.append(kept)
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
