"""What ``fit`` and ``evaluate`` are given: checked, and read minibatch by minibatch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, count
from typing import Any

import keras
import tensorflow as tf

from pipetrain.cluster.connection import joins
from pipetrain.compute.functions.kernels import direct
from pipetrain.compute.functions.weight_binding import any_rows
from pipetrain.compute.graph.inputs import Shapes, in_order, memory_rows
from pipetrain.compute.graph.segment import adapted
from pipetrain.compute.profiling.block_passes import sample
from pipetrain.compute.tensorflow_private import type_spec_of
from pipetrain.frontend.worker_reader import Parts, WorkersIterator, read_function
from pipetrain.run.window import Minibatch


def check_data(x: Any, y: Any) -> None:
    """Refuse missing data and arrays of different lengths."""
    if x is None:
        raise ValueError(
            "There is nothing to train on. Received: x=None. Try fit(x, y) with arrays or a tf.data.Dataset."
        )
    lengths = {rows_of_array(array) for array in keras.tree.flatten((x, y)) if is_array(array)}
    if 0 in lengths:
        raise ValueError("There is nothing to train on. Received: x or y with no rows. Try at least one row.")
    if len(lengths) > 1:
        raise ValueError(
            f"Inputs and labels differ in length. Received: x and y with {sorted(lengths)} rows. "
            "Try as many labels as inputs."
        )


def check_rows(rows: int | None, microbatches: int) -> None:
    """Refuse a batch with fewer rows than microbatches."""
    if rows is not None and rows < microbatches:
        raise ValueError(
            f"The batch is smaller than its microbatches. Received: {rows} rows, microbatches={microbatches}. "
            f"Try microbatches={rows} or a batch size of at least {microbatches}."
        )


def check_memory(rows: int, remembered: int | None) -> None:
    """Refuse a batch of another number of rows than stateful recurrent layers have states for; None without such."""
    if remembered is not None and rows != remembered:
        raise ValueError(
            f"A stateful recurrent layer remembers {remembered} rows, from batch to batch. Received: a batch of {rows} "
            f"rows. Try batch_size={remembered}, and data that fill the last batch."
        )


def checked_inputs(x: Any, model: keras.Model) -> list[tf.Tensor]:
    """The minibatch's inputs in the model's order, types and ranks. Raises ValueError where they cannot agree."""
    given = in_order(x, model)
    names = [tensor.name for tensor in model.inputs]
    if len(given) != len(names):
        raise ValueError(f"The model takes {len(names)} inputs. Received: x with {len(given)}. Try x as {names!r}.")
    return [_checked(value, expected) for value, expected in zip(given, model.inputs, strict=True)]


def _checked(value: Any, expected: Any) -> tf.Tensor:
    if value is None:
        raise ValueError(
            f"Every input must be given, an optional one too. Received: x with None for {expected.name!r}. Try zeros "
            "that stand for it, or a model without this input."
        )
    if isinstance(value, tf.RaggedTensor) or (isinstance(value, tf.SparseTensor) and expected.sparse):
        raise ValueError(
            f"Inputs must be dense. Received: x of type {type(value).__name__} for {expected.name!r}. Try to_tensor() "
            "of a ragged tensor, or keras.Input(sparse=False), which makes sparse tensors and SciPy's matrices dense."
        )
    if isinstance(value, tf.SparseTensor):  # as Keras does
        value = tf.sparse.to_dense(value)
    tensor = adapted(tf.convert_to_tensor(value), expected)
    if not tf.TensorShape([None, *expected.shape[1:]]).is_compatible_with(tensor.shape):
        raise ValueError(
            f"The data do not fit the model. Received: x of shape {tuple(tensor.shape)} for {expected.name!r}. "
            f"Try shape {tuple(expected.shape)}."
        )
    return tensor


def rows_of_array(array: Any) -> int:
    """The number of its rows; SciPy's sparse matrices have no length."""
    return int(array.shape[0]) if hasattr(array, "tocsr") else len(array)


def is_array(value: Any) -> bool:
    """Whether it has rows and is not read from an iterator."""
    return hasattr(value, "__len__") and hasattr(value, "shape") and hasattr(value, "dtype")


DEFAULT_ROWS = 32  # Keras' batch size where none is given
Weigh = Callable[[Any, Any, list[tf.Tensor]], Any]
WeighTogether = Callable[[Sequence[Any], Sequence[str]], list[Any]]


class InputData:
    """Reads minibatches and prepares them for the model; data from TensorFlow, read ahead, take one op each.

    After ``open``, ``first`` is the first minibatch, ``rows`` are its rows, ``shapes`` those of its inputs without the
    batch, and ``targets`` the specs of the labels and the sample weights of every minibatch to come. By ``spec``, that
    of the data, Keras knows whether it has traced a step for them.

    Args:
        model: the model to feed.
        rate: a learning rate, which every minibatch takes along as it is when the minibatch is read.
        weigh: gives what minibatches have as sample weights, of labels, sample weights and inputs.
        together: gives the same of all parts of a minibatch, of what ``weigh`` gives of each and their devices.
    """

    def __init__(
        self,
        model: keras.Model,
        rate: tf.Variable | None = None,
        weigh: Weigh | None = None,
        together: WeighTogether | None = None,
    ) -> None:
        self.first: Minibatch | None = None
        self.rows, self.targets = 0, None
        self.shapes: Shapes = ()
        self.spec: Any = None
        self._model, self._rate, self._weigh, self._together = model, rate, weigh, together
        self._by_workers: dict[Any, Any] = {}  # functions that read minibatches on their hosts
        self._last = tf.function(self._taken, autograph=False)
        self._next = tf.function(self._taken_of, autograph=False)

    def open(self, iterator: Iterator[Any], steps: int | None = None, ahead: bool = True) -> Iterator[Minibatch]:
        """The iterator's minibatches; of TensorFlow's ones no more than ``steps`` are read, each ``ahead`` of its turn.

        Raises ValueError if they do not fit the model, StopIteration without data.
        """
        if isinstance(iterator, tf.data.Iterator):
            spec = tf.OptionalSpec(iterator.element_spec)
            taken = self._last.get_concrete_function(spec)
            minibatches = self._read(taken, iterator, spec, steps, ahead)
            first, targets, self.spec = next(minibatches), taken.structured_outputs, iterator.element_spec
        elif isinstance(iterator, WorkersIterator):
            function = self._on_workers(iterator)
            minibatches = self._read_by_workers(function, iterator, steps)
            first, targets, self.spec = next(minibatches), function.structured_outputs[0][0], iterator.element_spec
        else:
            minibatches = map(self._prepared, iterator)
            first = targets = next(minibatches)
            self.spec = tf.nest.map_structure(_spec, (first.x, first.y, first.sample_weight))
        self.first, self.rows = first, int(first.x[0].shape[0])
        self.shapes = tuple(tuple(each.shape[1:]) for each in first.x)
        self.targets = any_rows((targets.y, targets.sample_weight))
        remembered = memory_rows(self._model)

        def checked(minibatch: Minibatch) -> Minibatch:
            check_memory(int(minibatch.x[0].shape[0]), remembered)
            return _with_number(minibatch)

        return map(checked, chain([first], minibatches))

    def _read(
        self, taken: Any, iterator: tf.data.Iterator, spec: tf.OptionalSpec, steps: int | None, ahead: bool
    ) -> Iterator[Minibatch]:
        """Every minibatch; ``ahead``, by a call that reads the next one too, which so is known to be there.

        Data that end with an error in one thread can break what another does at that moment.
        """
        last, following, optional = direct(taken), None, None
        for number in count(1):
            if optional is None:
                optional = iterator.get_next_as_optional()
                if not optional.has_value():
                    return
            if not ahead or number == steps:
                yield last(optional)
                optional, more = None, number != steps
            else:
                if following is None:
                    following = self._reading_ahead(iterator, spec)
                try:
                    minibatch, optional, numbers = following(optional)
                except tf.errors.OpError:  # in reading the next one, which is nothing to this one
                    yield last(optional)
                    raise
                more, *rate = numbers.numpy().tolist()  # 1.0 or 0.0; no rate, or one
                yield minibatch._replace(learning_rate=rate[0]) if rate else minibatch
            if not more:
                return

    def _reading_ahead(self, iterator: tf.data.Iterator, spec: tf.OptionalSpec) -> Callable[[Any], Any]:
        """``_taken_of`` this iterator, traced: as a single op, unless there is a GPU.

        The first GPU would run the op, and cannot ask an iterator, which is on the host, for more.
        """
        concrete = self._next.get_concrete_function(spec, type_spec_of(iterator))
        if tf.config.list_logical_devices("GPU"):
            return lambda optional: concrete(optional, iterator)
        op = direct(concrete)
        (handle,) = tf.nest.flatten(iterator, expand_composites=True)
        return lambda optional: op(optional, handle)

    def _on_workers(self, iterator: WorkersIterator) -> Any:
        """The function that reads a minibatch where its rows are."""
        key = iterator.devices, iterator.element_spec, joins()  # of before, workers that are started anew know nothing
        if key not in self._by_workers:
            self._by_workers[key] = read_function(iterator.devices, iterator.element_spec, self._rows, self._weighed)
        return self._by_workers[key]

    def _weighed(self, parts: Parts, devices: Sequence[str]) -> Parts:
        if self._together is None:
            return parts
        weights = self._together([each.sample_weight for each in parts], devices)
        return [each._replace(sample_weight=weight) for each, weight in zip(parts, weights, strict=True)]

    def _read_by_workers(self, function: Any, iterator: WorkersIterator, steps: int | None) -> Iterator[Minibatch]:
        for _ in count() if steps is None else range(steps):
            minibatch = iterator.read(function)
            if minibatch is None:
                return
            yield minibatch._replace(learning_rate=None if self._rate is None else float(self._rate))

    def _taken_of(self, optional: Any, iterator: Any) -> tuple[Minibatch, Any, tf.Tensor]:
        """The minibatch, the next one, and as one tensor whether there is one, and the learning rate if it is read."""
        minibatch, following = self._taken(optional), iterator.get_next_as_optional()
        rate: Any = minibatch.learning_rate
        rates = [] if rate is None else [rate]
        with tf.device("CPU:0"):  # for Python to read; on a GPU it would wait for what that has been given
            more = tf.cast(following.has_value(), tf.float32 if rate is None else rate.dtype)
            numbers = tf.stack([more, *rates])
        return minibatch._replace(learning_rate=None), following, numbers

    def _taken(self, optional: Any) -> Minibatch:
        return self._prepared(optional.get_value())

    def _prepared(self, data: Any) -> Minibatch:
        return self._rows(data)._replace(learning_rate=None if self._rate is None else self._rate.read_value())

    def _rows(self, data: Any) -> Minibatch:
        """The minibatch without its learning rate."""
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        y, sample_weight = keras.tree.map_structure(_tensor, (y, sample_weight))
        inputs = checked_inputs(x, self._model)
        if self._weigh is not None:
            sample_weight = self._weigh(y, sample_weight, inputs)
        return Minibatch(inputs, y, sample_weight)


class InputsAlone(InputData):
    """Reads inputs alone; labels, where there are any, may be anything."""

    def _rows(self, data: Any) -> Minibatch:
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        return Minibatch(checked_inputs(x, self._model), None, None)


READ_BY = "read_by"  # the attribute of a data set that only describes others, which are read in its place


class Untuned:
    """A distribution strategy whose data sets TensorFlow does not tune while they are read, unless they ask for it.

    The thread that tunes looks up at ever longer intervals, up to a minute, and whoever lets go of an iterator waits
    for it (TensorFlow 2.21): at an epoch's end, for up to as long again as the epoch took. What would be tuned then
    takes the number of cores.

    Args:
        strategy: all else is left to it.
    """

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        self._strategy = strategy

    def experimental_distribute_dataset(self, dataset: Any, options: Any = None) -> Any:
        """The data set, for Keras to read; workers' datasets, where it stands for these."""
        datasets = getattr(dataset, READ_BY, None)
        return datasets or self._strategy.experimental_distribute_dataset(untuned(dataset), options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._strategy, name)


def untuned(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """The same data set; see ``Untuned``."""
    if dataset.options().autotune.enabled is not None:
        return dataset
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


def first_rows(x: Any, batch_size: int | None) -> int | None:
    """The rows of the first minibatch, where they can be known before it is there."""
    arrays = [array for array in keras.tree.flatten(x) if is_array(array)]
    if arrays:
        return min(batch_size or DEFAULT_ROWS, rows_of_array(arrays[0]))
    if isinstance(x, tf.data.Dataset):
        shapes = [spec.shape for spec in tf.nest.flatten(x.element_spec) if isinstance(spec, tf.TensorSpec)]
        return int(shapes[0][0]) if shapes and shapes[0].rank and shapes[0][0] is not None else None
    return None


def sample_of(x: Any, y: Any, rows: int) -> Any | None:
    """Inputs and labels such as the first minibatch has, without reading a data set; None where they are not known.

    Of arrays the first rows. Of a data set inputs of normally distributed numbers, or zeros where they are integers,
    labels of zeros, which every loss takes, and weights of ones.
    """
    if isinstance(x, tf.data.Dataset):
        found = tf.nest.flatten(x.element_spec)
        shapes = [spec.shape for spec in found if isinstance(spec, tf.TensorSpec)]
        if len(shapes) < len(found) or any(shape.rank is None or None in shape[1:] for shape in shapes):
            return None
        of_rows = tf.nest.map_structure(lambda spec: tf.TensorSpec((rows, *spec.shape[1:]), spec.dtype), x.element_spec)
        if not isinstance(of_rows, tuple):
            return tf.nest.map_structure(sample, of_rows)
        makers = zip((sample, _zeros, _ones), of_rows, strict=False)
        return tuple(tf.nest.map_structure(make, specs) for make, specs in makers)
    if all(is_array(array) and not hasattr(array, "tocsr") for array in keras.tree.flatten((x, y))):
        given = keras.tree.lists_to_tuples((x,) if y is None else (x, y))  # a data set would stack what is in a list
        return keras.tree.map_structure(lambda array: array[:rows], given)
    return None


def _zeros(spec: tf.TensorSpec) -> tf.Tensor:
    return tf.zeros(spec.shape, spec.dtype)


def _ones(spec: tf.TensorSpec) -> tf.Tensor:
    return tf.ones(spec.shape, spec.dtype)


def _with_number(minibatch: Minibatch) -> Minibatch:
    """With its learning rate, if it has one, as a number: that of now, before a callback sets it anew."""
    rate = minibatch.learning_rate
    return minibatch if rate is None or isinstance(rate, float) else minibatch._replace(learning_rate=float(rate))


def _spec(value: Any) -> Any:
    return None if value is None else tf.type_spec_from_value(value)


def _tensor(value: Any) -> Any:
    return None if value is None else tf.convert_to_tensor(value)


def fit_arguments(model: keras.Model, given: dict[str, Any]) -> dict[str, Any]:
    """Arguments of Keras' ``fit`` for what the model's layers read, from those that the model itself would take.

    Raises ValueError for a ``validation_split`` of a data set, and as ``minibatches``.
    """
    if not preprocesses(model):
        return given
    made, rows, split = dict(given, shuffle=False), given["batch_size"], given["validation_split"]
    names, validation = ("x", "y", "sample_weight", "batch_size"), given["validation_data"]
    of_validation = made.pop("validation_batch_size", None) or rows
    if split and validation is None:
        if isinstance(given["x"], tf.data.Dataset):
            raise ValueError(
                f"A data set cannot be split. Received: validation_split={split!r}. Try validation_data=dataset."
            )
        every = _rows(given["x"], given["y"], given["sample_weight"])
        count = math.floor(len(every) * (1.0 - split))  # the last ones are split off, as Keras has it
        made |= dict.fromkeys(names) | {"x": _batched(model, every.take(count), rows), "validation_split": 0.0}
        return made | {"validation_data": _batched(model, every.skip(count), of_validation)}
    if isinstance(validation, tf.data.Dataset):
        made["validation_data"], *_ = minibatches(model, validation, None, None, None)
    elif validation is not None:
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(validation)
        made["validation_data"], *_ = minibatches(model, x, y, sample_weight, of_validation)
    return made | dict(zip(names, minibatches(model, *(given[name] for name in names)), strict=True))


def minibatches(
    model: keras.Model, x: Any, y: Any, sample_weight: Any, batch_size: int | None
) -> tuple[Any, Any, Any, int | None]:
    """The arguments ``x``, ``y``, ``sample_weight`` and ``batch_size`` for what the layers read, as a data set.

    Raises ValueError for what a data set given as ``x`` has of its own.
    """
    if not preprocesses(model):
        return x, y, sample_weight, batch_size
    if not isinstance(x, tf.data.Dataset):
        return _batched(model, _rows(x, y, sample_weight), batch_size), None, None, None
    beside = {"y": y, "sample_weight": sample_weight, "batch_size": batch_size}
    if present := [name for name, value in beside.items() if value is not None]:
        raise ValueError(
            "A data set has labels, weights and minibatches of its own. Received: x=Dataset and "
            f"{' and '.join(present)}. Try leaving {'it' if len(present) == 1 else 'them'} out."
        )
    return _read(model, x), None, None, None


def _rows(x: Any, y: Any, sample_weight: Any) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(keras.utils.pack_x_y_sample_weight(x, y, sample_weight))


def _batched(model: keras.Model, rows: tf.data.Dataset, batch_size: int | None) -> tf.data.Dataset:
    return _read(model, rows.batch(batch_size or DEFAULT_ROWS))


def _read(model: keras.Model, given: tf.data.Dataset) -> tf.data.Dataset:
    """Minibatches as the layers read them."""
    return given.map(model.preprocess_samples, num_parallel_calls=tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)


def minibatch(model: keras.Model, x: Any, y: Any, sample_weight: Any) -> tuple[Any, Any, Any]:
    """One minibatch as the layers read it: ``x``, ``y`` and ``sample_weight``."""
    if not preprocesses(model):
        return x, y, sample_weight
    read: tuple[Any, Any, Any] = keras.utils.unpack_x_y_sample_weight(model.preprocess_samples(x, y, sample_weight))
    return read


def preprocesses(model: keras.Model) -> bool:
    """Whether the model has a preprocessor, as those of KerasHub may have."""
    return getattr(model, "preprocessor", None) is not None and hasattr(model, "preprocess_samples")
