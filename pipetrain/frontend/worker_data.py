"""``pipetrain.data``: training data that each worker reads on its own host."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from itertools import chain
from typing import Any

import keras
import tensorflow as tf

from pipetrain.compute.cores import is_remote, processor_of
from pipetrain.compute.keras_private import weighted_by_class
from pipetrain.frontend.input_data import READ_BY, preprocesses, untuned
from pipetrain.frontend.worker_reader import WorkersIterator, named
from pipetrain.run.control import LostWorker

Make = Callable[[int, int], tf.data.Dataset]  # of a worker's number and how many there are

MOST_SENT_BYTES = 16 * 2**10  # of constants that a worker's dataset may take along from this process
AHEAD = 2  # minibatches that a worker reads ahead
PYTHON = ("PyFunc", "PyFuncStateless", "EagerPyFunc")  # operations that call Python in the process that traced them
BESIDE = "y", "sample_weight", "batch_size"  # arguments of ``fit`` that such data have of their own
INFINITE, UNKNOWN = tf.data.INFINITE_CARDINALITY, tf.data.UNKNOWN_CARDINALITY


def data(fn: Make) -> WorkerData:
    """Training data that each worker reads by itself, on its own host: ``pm.fit(pipetrain.data(fn), epochs=3)``.

    Minibatch k is the concatenation, in the order of the workers, of the k-th elements of their datasets. For a scheme
    that divides a minibatch's rows, all-reduce and parameter-server, every device that computes is a worker; in a
    pipeline the first stage's device is the only one, and labels go from its host to the last stage's. No inputs pass
    through the process that calls ``fit``; labels come to it where it has metrics to update.

    ``fn`` is called in that process when ``fit`` begins, once for each worker, and is traced as by ``tf.function``:
    what Python does in it (``os.listdir``, ``open``, NumPy) is done there and then; the operations of ``tf.data`` and
    TensorFlow (``list_files``, ``TFRecordDataset``, ``tf.io.read_file``, what ``map`` is given) run on the worker's
    host, read its files, and use its processor. ``shuffle`` needs a seed for runs that can be repeated.

    Args:
        fn: ``fn(worker, workers)`` returns the ``tf.data.Dataset`` of the worker with this number, from 0 on, of so
            many. Its elements are ``(x, y)`` or ``(x, y, sample_weight)``, each the worker's rows of a minibatch. All
            have as many elements; repeated ones need ``steps_per_epoch``.

    Raises:
        TypeError: if ``fn`` cannot be called.
    """
    if not callable(fn):
        raise TypeError(
            f"Workers' data are made by a function. Received: fn={fn!r}. Try pipetrain.data(lambda worker, workers: "
            "tf.data.TFRecordDataset(...).batch(32))."
        )
    return WorkerData(fn)


class WorkerData:
    """What ``pipetrain.data`` gives: datasets that are made when it is known which devices read them.

    Args:
        make: gives the dataset of a worker.
    """

    def __init__(self, make: Make) -> None:
        self._make = make

    def on(self, devices: Sequence[str], class_weight: Any = None) -> WorkerDatasets:
        """The datasets on these workers' hosts, with the ``class_weight`` of ``fit``.

        Raises ValueError and TypeError for what cannot be read together, or not there.
        """
        return WorkerDatasets(self._make, devices, class_weight)


class WorkerDatasets:
    """Every worker's dataset, on its host.

    ``described`` is a data set for Keras' loop like one of all workers' rows, with their number of minibatches; it is
    not read itself. ``lost`` is what is known of a lost worker.

    Args:
        make: gives the dataset of a worker.
        devices: the workers'.
        class_weight: as ``fit`` is given it.
    """

    def __init__(self, make: Make, devices: Sequence[str], class_weight: Any) -> None:
        self._devices = [processor_of(device) for device in devices]
        self.lost = LostWorker(self._devices)
        self._made = [  # TensorFlow forgets functions that nobody holds, with what the datasets call
            _traced(make, worker, device, len(devices), class_weight) for worker, device in enumerate(self._devices)
        ]
        specs = [concrete.structured_outputs.element_spec for concrete in self._made]
        name = partial(named, self._devices)
        self._element_spec = _common(specs, name)
        self._datasets, counts = self._placed()
        self.described = tf.data.Dataset.from_generator(tuple, output_signature=_together(specs)).apply(
            tf.data.experimental.assert_cardinality(_same(counts, name))
        )
        setattr(self.described, READ_BY, self)

    def check_steps(self, steps_per_epoch: int | None) -> None:
        """Refuse data without end where nothing says where an epoch ends."""
        if steps_per_epoch is None and int(self.described.cardinality()) == INFINITE:
            raise ValueError(
                "The workers' datasets have no end. Received: pipetrain.data with repeated datasets, "
                "steps_per_epoch=None. Try steps_per_epoch, or datasets without repeat()."
            )

    def _placed(self) -> tuple[list[Any], list[int]]:
        datasets, counts = [], []
        for concrete, device in zip(self._made, self._devices, strict=True):
            with tf.device(device):
                datasets.append(untuned(concrete()))
                counts.append(int(datasets[-1].cardinality()))
        return datasets, counts

    def __iter__(self) -> WorkersIterator:
        return WorkersIterator(self._devices, self._datasets, self._element_spec, self.lost)


def check_worker_data(model: keras.Model, given: Mapping[str, Any]) -> None:
    """Refuse arguments of ``fit`` that data which workers read have of their own, or do not have."""
    validation = given["validation_data"]
    if any(isinstance(each, WorkerData) for each in (validation, *(validation if type(validation) is tuple else ()))):
        raise ValueError(
            "Validation data are read by this process. Received: validation_data=pipetrain.data(...). Try a "
            "tf.data.Dataset or arrays."
        )
    if not isinstance(given["x"], WorkerData):
        return
    split = ["validation_split"] if given["validation_split"] else []
    if present := [f"{name}=..." for name in (*(each for each in BESIDE if given[each] is not None), *split)]:
        raise ValueError(
            "Workers' datasets have labels, weights and minibatches of their own. Received: x=pipetrain.data(...) and "
            f"{' and '.join(present)}. Try leaving {'it' if len(present) == 1 else 'them'} out."
        )
    if preprocesses(model):
        raise ValueError(
            "What a model preprocesses is read by this process, which has its vocabulary. Received: "
            f"x=pipetrain.data(...), and {model.name!r} with a preprocessor. Try fit with a tf.data.Dataset."
        )


def check_readers(readers: Sequence[str], scheme: str) -> None:
    """Refuse a scheme whose devices do not read data."""
    if not readers:
        raise ValueError(
            "With this scheme workers do not read data by themselves. Received: x=pipetrain.data(...), "
            f"scheme={scheme!r}. Try scheme='all-reduce', 'parameter-server' or a pipeline such as '1f1b'; or fit with "
            "a tf.data.Dataset."
        )


def check_not_by_workers(method: str, x: Any) -> None:
    """Refuse data that workers would read where this process reads them."""
    if isinstance(x, WorkerData):
        raise ValueError(
            f"What {method} is given is read by this process. Received: {method}(pipetrain.data(...)). Try a "
            "tf.data.Dataset or arrays."
        )


def _traced(make: Make, worker: int, device: str, workers: int, class_weight: Any) -> Any:
    """A function that makes a worker's dataset."""

    def made() -> tf.data.Dataset:
        dataset = make(worker, workers)
        if not isinstance(dataset, tf.data.Dataset):
            raise TypeError(
                f"Every worker has a dataset. Received: fn({worker}, {workers}) of pipetrain.data returned "
                f"{type(dataset).__name__}. Try a tf.data.Dataset."
            )
        return weighted_by_class(dataset, class_weight).prefetch(AHEAD)

    concrete = tf.function(made, autograph=False).get_concrete_function()
    _check_rows(concrete.structured_outputs.element_spec, worker)
    if is_remote(device):
        _check_there(concrete, worker, device)
    return concrete


def _check_rows(spec: Any, worker: int) -> None:
    """Refuse elements that are no rows of dense tensors."""
    received = f"Received: pipetrain.data with elements of {spec} of worker {worker}."
    if not all(isinstance(each, tf.TensorSpec) and each.shape.rank is not None for each in tf.nest.flatten(spec)):
        raise ValueError(
            "What workers read must be dense, of a known number of dimensions. "
            f"{received} Try to_tensor(), tf.sparse.to_dense or tf.ensure_shape in the dataset's map."
        )
    if any(each.shape.rank == 0 for each in tf.nest.flatten(spec)):
        raise ValueError(
            "Each element of a worker's dataset is its rows of a minibatch. "
            f"{received} Try batch(rows) at the dataset's end."
        )


def _check_there(concrete: Any, worker: int, device: str) -> None:
    """Refuse what only this process has: arrays, Python functions, and tables or variables."""
    graph = concrete.graph.as_graph_def()
    nodes = [*chain(graph.node, *(each.node_def for each in graph.library.function))]
    where = f"Received: pipetrain.data, whose fn makes for worker {worker} ({device})"
    if any(node.op in PYTHON for node in nodes):
        raise ValueError(
            "Python functions do not run on workers: TensorFlow has them in the process that made them. "
            f"{where} a dataset with from_generator, py_function or numpy_function. Try operations of tf.data."
        )
    captured = [each for each in concrete.captured_inputs if each.dtype not in (tf.resource, tf.variant)]
    if len(captured) < len(concrete.captured_inputs):
        raise ValueError(
            "Tables and variables of this process are not on workers. "
            f"{where} a dataset that uses one. Try to make it within fn, or to look values up before."
        )
    size = sum(node.attr["value"].tensor.ByteSize() for node in nodes if node.op == "Const")
    size += sum(each.shape.num_elements() * each.dtype.size for each in captured)
    if size > MOST_SENT_BYTES:
        raise ValueError(
            "A worker's dataset would take arrays of this process along. "
            f"{where} a dataset with {size} bytes of constants, of which {MOST_SENT_BYTES} are allowed. Try files that "
            "the worker has, read by tf.data (list_files, TFRecordDataset, tf.io.read_file); or fit(x, y)."
        )


def _with_rows(spec: tf.TensorSpec, rows: int | None) -> tf.TensorSpec:
    return tf.TensorSpec([rows, *spec.shape[1:]], spec.dtype)


def _common(specs: Sequence[Any], name: Callable[[int], str]) -> Any:
    """The spec of all workers' elements, of any number of rows. Raises ValueError if they are of several kinds."""
    first, *others = (tf.nest.map_structure(lambda each: _with_rows(each, None), spec) for spec in specs)
    for worker, spec in enumerate(others, start=1):
        if spec != first:
            raise ValueError(
                "Workers' rows make minibatches together, so their datasets have elements of one kind. Received: "
                f"pipetrain.data with {specs[0]} of {name(0)}, and {specs[worker]} of {name(worker)}. Try the same "
                "types and shapes."
            )
    return first


def _together(specs: Sequence[Any]) -> Any:
    """The spec of minibatches with the rows of all workers."""

    def whole(*each: Any) -> Any:
        rows = [spec.shape[0] for spec in each]
        return _with_rows(each[0], None if None in rows else sum(rows))

    return tf.nest.map_structure(whole, *specs)


def _same(counts: Sequence[int], name: Callable[[int], str]) -> int:
    """How many minibatches there are. Raises ValueError where workers are known to have different numbers."""
    known = {count for count in counts if count != UNKNOWN}
    if len(known) > 1:
        told = ", ".join(f"{_count(count)} of {name(worker)}" for worker, count in enumerate(counts))
        least = min(count for count in known if count != INFINITE)
        raise ValueError(
            f"Every minibatch has rows of all workers, so their datasets are of one length. Received: pipetrain.data "
            f"with elements: {told}. Try take({least}) for every worker, or repeat() and steps_per_epoch."
        )
    return reduce(lambda a, b: UNKNOWN if UNKNOWN in (a, b) else a, counts)


def _count(cardinality: int) -> str:
    return {INFINITE: "endless", UNKNOWN: "an unknown number"}.get(cardinality, str(cardinality))
