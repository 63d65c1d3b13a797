"""The state of a training run, as a checkpoint has it: weights, optimizers' slots, callbacks, position and time."""

from __future__ import annotations

import re
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from pipetrain.checkpoint.bundles import FINITE, SERIALIZED
from pipetrain.checkpoint.store import Checkpoint
from pipetrain.compute import keras_private
from pipetrain.compute.graph.inputs import beside
from pipetrain.compute.keras_private import CALLBACK_STATE, count_of, global_seed
from pipetrain.compute.optimizer.gradient_scaling import LossScale, is_dynamic, stepping
from pipetrain.compute.optimizer.slots import Slot
from pipetrain.compute.profiling.progress import Progress
from pipetrain.compute.transfers.compression import RESIDUALS, UNSENT
from pipetrain.logs import counted


class TrainingTime:
    """A stopwatch that stands still while the stages rest for something else: an evaluation, a look at a snapshot.

    Args:
        now_s: a clock, in seconds.
    """

    def __init__(self, now_s: Callable[[], float] = time.perf_counter) -> None:
        self._now_s, self._start_s = now_s, now_s()
        self._paused = 0
        self._paused_s = self._paused_at_s = 0.0

    @property
    def seconds(self) -> float:
        """Since it was made, but for the pauses."""
        now_s = self._paused_at_s if self._paused else self._now_s()
        return now_s - self._start_s - self._paused_s

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Meanwhile it stands still; pauses within a pause change nothing."""
        if not self._paused:
            self._paused_at_s = self._now_s()
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1
            if not self._paused:
                self._paused_s += self._now_s() - self._paused_at_s


PASSED_UNREAD = ("ArrayDataAdapter", "TFDatasetAdapter")  # whose every epoch reads anew


class Position(NamedTuple):
    """So many minibatches of an epoch (the first is 0) are done."""

    epoch: int
    step: int


def start_at(epoch_iterator: Any, position: Position, first_epoch: int, verbose: bool = True) -> None:
    """Make Keras' loop over epochs begin at this position, with the very minibatches that are due there.

    Of the epochs before it, whatever decides on the order of later ones happens again: iterators are made, generators
    are read, a PyDataset is told of its epochs. ``first_epoch`` is the one that ``fit`` would begin with;
    ``verbose``: whether it is shown if it takes long.
    """
    enumerate_epoch = keras_private.steps_of(epoch_iterator)

    def resumed() -> Iterator[Any]:
        keras_private.set_steps(epoch_iterator, None)  # the next epochs are Keras' own
        progress = Progress("Passing over the data of epochs that are done", (position.epoch - first_epoch) * verbose)
        for _ in range(first_epoch, position.epoch):
            _pass_over(epoch_iterator, enumerate_epoch())
            progress.add(1)
        steps = enumerate_epoch()
        progress = Progress("Passing over minibatches that are done", position.step * verbose)
        for done in range(position.step):
            try:
                *_, iterator = next(steps)
                next(iterator)
                progress.add(1)
            except StopIteration:
                raise ValueError(
                    f"The data end before the place where training stopped. Received: {done} minibatches, of which "
                    f"{position.step} are done. Try the data and the batch size of the run that is resumed."
                ) from None
        yield from steps

    keras_private.set_steps(epoch_iterator, resumed)


def _pass_over(epoch_iterator: Any, steps: Iterator[Any]) -> None:
    kind = type(epoch_iterator.data_adapter).__name__
    unread = epoch_iterator.steps_per_epoch is None and epoch_iterator.num_batches and kind in PASSED_UNREAD
    with warnings.catch_warnings(), epoch_iterator.catch_stop_iteration():
        warnings.simplefilter("ignore")
        for *_, iterator in steps:
            if not unread:
                next(iterator)


Arrays = dict[str, np.ndarray]
OF_DEVICE = re.compile(r"(_of_stage_\d+)?_of_worker_\d+$")  # how the kinds of slots end that each device has


class RunState(NamedTuple):
    """All that training needs to go on: values by name, tensors or arrays, and what JSON holds of them.

    Tensors are of this moment, whatever is trained on: who writes them makes arrays of them, see ``as_arrays``.
    """

    values: dict[str, Any]
    about: dict[str, Any]


def named(model: keras.Model, slots: Iterable[Slot], shared: Iterable[Sequence[Any]]) -> dict[str, Any]:
    """Variables by name: ``weight/N`` is the model's N-th, ``slot/N/KIND`` are its slots, ``shared/N``.

    ``beside/N`` are states of recurrent layers and, last, Keras' global seed if there is one.

    Nothing here depends on how the model is cut; of several replicas, and of what optimizers have in common, the first
    is taken.
    """
    numbers = {id(variable): n for n, variable in enumerate(model.variables)}
    found = {f"weight/{n}": variable for n, variable in enumerate(model.variables)}
    found |= {f"beside/{n}": variable for n, variable in enumerate(beside(model))}
    for slot in slots:
        found.setdefault(f"slot/{numbers[id(slot.weight)]}/{slot.kind}", slot.variable)
    first: Sequence[Any] = next(iter(shared), ())
    return found | {f"shared/{n}": variable for n, variable in enumerate(first)}


def collected(model: keras.Model, slots: Iterable[Slot], shared: Iterable[Sequence[Any]]) -> dict[str, Any]:
    """The values of the variables that are ``named``."""
    return {name: tf.convert_to_tensor(variable) for name, variable in named(model, slots, shared).items()}


def leave_out(about: dict[str, Any]) -> None:
    """Go on without what was in flight, with the first minibatch whose results no step has taken.

    The last stages may have made updates with some of those that come then, and the first ones lack some of those
    before. ``about``, which is what a checkpoint says of itself, says so by ``left_out``.
    """
    left = about.pop("in_flight", None)
    if left is not None and left["left"] is not None:
        about["left_out"] = True


def check_weights(model: keras.Model, arrays: Arrays, path: Path) -> None:
    """Raise ValueError where the arrays, of this file, are another model's."""
    here = [tuple(variable.shape) for variable in model.variables]
    there = [array.shape for array in numbered(arrays, "weight")]
    if here != there:
        different = next((n for n, pair in enumerate(zip(here, there, strict=False)) if pair[0] != pair[1]), None)
        what = f"{len(there)} variables for {len(here)}"
        if different is not None:
            what = f"shape {there[different]} for {model.variables[different].path!r} of shape {here[different]}"
        raise ValueError(
            f"The checkpoint is of another model. Received: {str(path)!r} with {what} of {model.name!r}. "
            "Try the model that it was made with, or another directory."
        )


def assign(model: keras.Model, arrays: Arrays, slots: Iterable[Slot], shared: Iterable[Sequence[Any]]) -> list[str]:
    """Put the arrays back where ``named`` found them; gives what ``assign_gathered`` does."""
    assign_model(model, arrays)
    return assign_gathered(model, arrays, slots, shared)


def assign_model(model: keras.Model, arrays: Arrays) -> None:
    """Of these the model's own: weights and state."""
    for n, variable in enumerate(model.variables):
        variable.assign(arrays[f"weight/{n}"])
    state = numbered(arrays, "beside")
    if len(state) > len(beside(model)):
        global_seed()  # is made
    for variable, array in zip(beside(model), state, strict=False):  # older files have none
        _assign(variable, array)


def assign_gathered(
    model: keras.Model, arrays: Arrays, slots: Iterable[Slot], shared: Iterable[Sequence[Any]]
) -> list[str]:
    """Of these what optimizers and devices have gathered.

    Gives what begins anew, and what devices had gathered that none goes on with, each as a text.
    """
    numbers, missing = {id(variable): n for n, variable in enumerate(model.variables)}, set[str]()
    places = [(f"slot/{numbers[id(slot.weight)]}/{slot.kind}", slot.variable) for slot in slots]
    unsent, left_out = handed_on(arrays, [name for name, _ in places])
    for name, variable in places:
        array = unsent.get(name, arrays.get(name))
        if array is None and _kind(name) in RESIDUALS:  # all had been sent
            array = np.zeros(tuple(variable.shape), np.float32)
        if not _assign(variable, array):
            missing.add(_kind(name))
    for variables in shared:
        for n, variable in enumerate(variables):
            _assign(variable, arrays.get(f"shared/{n}"))
    return [*(f"{kind} from zero" for kind in sorted(missing)), *left_out]


def handed_on(arrays: Arrays, names: Collection[str]) -> tuple[Arrays, list[str]]:
    """What devices that are gone had not sent yet, with what those of these names had not, to which it is added.

    With error feedback, and with momentum that devices have, only the sum over all devices of a weight counts: what was
    sent plus what is left is the sum of all gradients. New devices begin with zeros. Also gives, as texts, what devices
    had gathered that none of these names goes on with.
    """
    here, found, left = defaultdict[str, list[str]](list), Arrays(), defaultdict[str, set[str]](set)
    for name in dict.fromkeys(names):
        here[OF_DEVICE.sub("", name)].append(name)
    turns = Counter[str]()
    for name in sorted(name for name in arrays if name.startswith("slot/") and OF_DEVICE.search(name)):
        weight = OF_DEVICE.sub("", name)
        if weight.rpartition("/")[2] not in UNSENT or weight not in here:
            if name not in names:
                left[_kind(name)].add(name.rpartition("/")[2])
            continue
        for each in here[weight]:
            if each not in found:
                found[each] = arrays[each] if each in arrays else np.zeros_like(arrays[name])
        if name not in found:
            taker = here[weight][turns[weight] % len(here[weight])]
            found[taker] = found[taker] + arrays[name]
            turns[weight] += 1
    return found, [f"{kind} of {counted(len(devices), 'device')} left out" for kind, devices in sorted(left.items())]


def _kind(name: str) -> str:
    """What a slot is, of the name of its array."""
    return OF_DEVICE.sub("", name.rpartition("/")[2].strip("_"))


def not_finite(arrays: Arrays) -> set[str]:
    """The names of weights, and of optimizers' slots, that have a NaN or an infinity."""
    kept = {name: array for name, array in arrays.items() if name.startswith(FINITE)}
    return {name for name, array in kept.items() if array.dtype.kind == "f" and not np.isfinite(array).all()}


def scale_arrays(optimizer: keras.optimizers.Optimizer, now: LossScale | None = None) -> Arrays:
    """Of an optimizer that scales the loss and may skip steps: ``loss_scale``, ``finite_steps`` and ``steps`` made.

    ``now`` is the scale that its variables do not know yet.
    """
    arrays = {name: array_of(variable) for name, variable in _of_scale(optimizer).items()}
    if arrays and now is not None:
        found = {"loss_scale": now.scale, "finite_steps": now.finite_steps, "steps": arrays["steps"] + now.stepped}
        arrays |= {name: np.asarray(each, arrays[name].dtype) for name, each in found.items()}
    return arrays


def assign_scale(optimizer: keras.optimizers.Optimizer, arrays: Arrays, updates: int) -> None:
    """Put them back; without them, no step was skipped in as many ``updates``."""
    for name, variable in _of_scale(optimizer).items():
        value = arrays.get(name, np.asarray(updates) if name == "steps" else array_of(variable))
        variable.assign(tf.cast(value, variable.dtype))


def _of_scale(optimizer: keras.optimizers.Optimizer) -> dict[str, Any]:
    if not is_dynamic(optimizer):
        return {}
    steps = count_of(stepping(optimizer))
    return {"loss_scale": optimizer.dynamic_scale, "finite_steps": optimizer.step_counter, "steps": steps}


def as_arrays(values: Mapping[str, Any]) -> Arrays:
    """Arrays that NumPy can write."""
    return {name: array_of(value) for name, value in values.items()}


def array_of(value: Any) -> np.ndarray:
    """The value of a variable or tensor, in a type that NumPy can write: bfloat16 as float32, which holds it exactly.

    Packs and lists of tensors, and strings, are the bytes that TensorFlow makes of them.
    """
    if isinstance(value, np.ndarray):
        return value
    value = tf.convert_to_tensor(value)
    if value.dtype in SERIALIZED:
        with tf.device(value.device):
            return np.frombuffer(tf.io.serialize_tensor(value).numpy(), np.uint8)
    return (tf.cast(value, tf.float32) if value.dtype == tf.bfloat16 else value).numpy()


def tensor_of(array: np.ndarray, dtype: tf.DType) -> tf.Tensor:
    """The tensor of this type that ``array_of`` was given, on the device of this scope."""
    if dtype in SERIALIZED:
        return tf.io.parse_tensor(array.tobytes(), dtype)
    return tf.cast(array, dtype)


def _assign(variable: Any, array: np.ndarray | None) -> bool:
    if array is None or tuple(variable.shape) != array.shape:
        return False
    variable.assign(tf.cast(array, variable.dtype))
    return True


def numbered(arrays: Arrays, kind: str) -> list[np.ndarray]:
    """The arrays ``KIND/0``, ``KIND/1``, ... in order."""
    keys = (key for key in arrays if key.startswith(f"{kind}/"))
    return [arrays[key] for key in sorted(keys, key=lambda key: int(key.split("/")[1]))]


def remembered(callbacks: list[Any]) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """What callbacks know that decides on what they do later: for JSON, and lists of arrays.

    Later steps change nothing of it, although callbacks may give the very lists that they go on with.
    """
    plain: dict[str, Any] = {}
    arrays: dict[str, np.ndarray] = {}
    for key, callback, name in _attributes(callbacks):
        value = getattr(callback, name)
        if isinstance(value, list):
            arrays |= {f"{key}/{n}": array_of(each) for n, each in enumerate(value)}
        else:
            plain[key] = float(value) if isinstance(value, np.generic) else value
    plain |= {key: each.get_state() for key, each in _named(callbacks) if hasattr(each, "get_state")}
    return deepcopy(plain), arrays


def recall(callbacks: list[Any], found: Checkpoint) -> None:
    """Give callbacks back what ``remembered`` took from them."""
    plain = found.about["callbacks"]
    for key, callback, name in _attributes(callbacks):
        listed = [found.arrays[each] for each in found.arrays if each.startswith(f"{key}/")]
        if listed or key in plain:
            setattr(callback, name, listed or plain[key])
    for key, each in _named(callbacks):
        if hasattr(each, "set_state") and key in plain:
            each.set_state(plain[key])


def _attributes(callbacks: list[Any]) -> Iterator[tuple[str, Any, str]]:
    """Key, callback and attribute of what Keras' own callbacks remember."""
    for key, callback in _named(callbacks):
        for kind, names in CALLBACK_STATE.items():
            if isinstance(callback, kind):
                yield from ((f"{key}/{name}", callback, name) for name in names)


def _named(callbacks: list[Any]) -> Iterator[tuple[str, Any]]:
    """Every callback by its class, and which of the class it is: others may come between."""
    seen: Counter[str] = Counter()
    for callback in callbacks:
        name = type(callback).__name__
        yield f"callback/{name}/{seen[name]}", callback
        seen[name] += 1
