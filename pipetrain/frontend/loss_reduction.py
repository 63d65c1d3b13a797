"""How a minibatch's loss follows from those of its parts: as the losses themselves tell, or by trial."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from pipetrain.compute.cores import HOST
from pipetrain.compute.functions.weight_binding import any_rows
from pipetrain.compute.keras_private import axis_of
from pipetrain.run.channels import take

# A minibatch's loss is the mean of its parts', weighted by their rows; or their sum; or the sum of what they have of
# it when each is told by what all of it is divided.
Way = Literal["mean", "sum", "divided"]
Divisor = Literal["nothing", "rows", "entries", "weights"]

WHOLE_BATCH = ("Dice", "Tversky", "Circle", "dice", "tversky", "circle")  # which look at all rows at once
HINGES = ("Hinge", "SquaredHinge", "hinge", "squared_hinge")  # which take 0 for -1 if all labels are 0 or 1
BY_LABELS = ("crossentropy", "ce")  # names by which Keras takes the one that fits the labels


def ways(loss: Any, parts: int, outputs: Sequence[Any], are_masked: bool = False) -> list[Way]:
    """How the loss of several parts of a minibatch may be put together: one way, or several of which a trial tells.

    What is not reduced is summed where gradients start from it, as in Keras. Raises ValueError for losses of which some
    are reduced and others are not, where a minibatch has several parts. ``outputs`` are the model's; ``are_masked``:
    whether they have masks that are known beforehand.
    """
    losses = [_resolved(each) for each in keras.tree.flatten(loss) if each is not None]
    reductions = {_reduction(each) for each in losses}
    if reductions in ({"sum"}, {"none"}):
        found: list[Way] = ["sum"]
    elif parts == 1 or not reductions - {"mean"}:
        found = ["mean"]
    else:
        found = ["divided"]
    if parts > 1 and "none" in reductions and len(reductions) > 1:
        raise ValueError(
            "The loss of a batch cannot be put together from those of its microbatches and replicas. "
            f"Received: reduction={sorted(reductions)} for {parts} parts of a batch. "
            "Try reduction='sum_over_batch_size', or microbatches=1 and one replica of the last stage."
        )
    divided = are_masked or any(ignored_class(each) is not None for each in losses)
    if parts > 1 and divided and reductions - {"none", "sum"}:
        found = ["divided"]
    if parts > 1 and found != ["divided"] and not is_known(loss, outputs):
        others: list[Way] = ["mean", "sum"]
        found += [each for each in others if each not in found]
    return found


def divides(loss: Any) -> bool:
    """Whether Keras divides some loss by a number of entries, which a mask makes smaller."""
    losses = [_resolved(each) for each in keras.tree.flatten(loss) if each is not None]
    return any(_reduction(each) not in ("sum", "none") for each in losses)


def divides_by(loss: keras.losses.Loss, sample_weight: Any, is_masked: bool) -> Divisor:
    """By what a loss divides the sum over a minibatch's entries that are not masked."""
    reduction = _reduction(loss)
    if reduction in ("sum", "none"):
        return "nothing"
    if reduction == "mean_with_sample_weight" and sample_weight is not None:
        return "weights"
    return "entries" if is_masked or ignored_class(loss) is not None else "rows"


def ignored_class(loss: Any) -> int | None:
    """The label of entries that a loss leaves out, and does not count."""
    return loss.ignore_class if isinstance(loss, keras.losses.SparseCategoricalCrossentropy) else None


def is_known(loss: Any, outputs: Sequence[Any]) -> bool:
    """Whether all are losses of Keras' that look at one row at a time; of others only a trial tells.

    Of an output with a number for each row, and no more dimensions, they take the mean of all rows.
    """
    by_rows = all(each is None or _goes_by_rows(_resolved(each)) for each in keras.tree.flatten(loss))
    return by_rows and all(len(each.shape) > 1 for each in outputs)


def hinges(loss: Any) -> list[bool]:
    """Which of the losses take labels of 0 and 1 for -1 and 1, if a batch has no others."""
    return [_name(_resolved(each)) in HINGES for each in keras.tree.flatten(loss)]


def _goes_by_rows(loss: Any) -> bool:
    name, own = _name(loss), type(loss) if isinstance(loss, keras.losses.Loss) else loss
    is_own = loss in BY_LABELS or getattr(keras.losses, name, None) is own
    return is_own and name not in WHOLE_BATCH and axis_of(loss) == -1


def _name(loss: Any) -> str:
    """The name of a class of losses, or of a function."""
    return type(loss).__name__ if isinstance(loss, keras.losses.Loss) else getattr(loss, "__name__", str(loss))


def _resolved(loss: Any) -> Any:
    """The loss that Keras has under a name; what it chooses by the labels stays a name."""
    is_name = isinstance(loss, str) and loss.lower() not in BY_LABELS
    return keras.losses.get(loss) if is_name else loss.lower() if isinstance(loss, str) else loss


def _reduction(loss: Any) -> str:
    """How a loss is reduced; what is no ``Loss``, Keras makes one that is the mean."""
    reduction = loss.reduction if isinstance(loss, keras.losses.Loss) else "mean"
    return {"sum_over_batch_size": "mean", None: "none"}.get(reduction, reduction)


LARGEST_BYTES = 64 * 2**20  # of the outputs that losses are tried on
FEWEST_ROWS = 6  # which several parts have
MOST_VALUES = 32  # of those that a loss compares labels with
TOLERANCE = 3e-5  # relative to the losses of all parts; sums in float32 differ by less
# What labels often mean something else by, beside what the loss itself compares them with: padding, or not known.
SPECIAL = (0.0, 1.0, -1.0, -100.0, 255.0, float("nan"))

Loss = Callable[[Any, list[tf.Tensor], Any], tf.Tensor]  # of labels, outputs and sample weights
Divided = Callable[[Any, Any, tf.Tensor], Any]


class Draw(NamedTuple):
    """Labels, outputs and sample weights of a minibatch."""

    y: Any
    outputs: list[tf.Tensor]
    sample_weight: Any

    @property
    def rows(self) -> int:
        """How many there are."""
        return int(self.outputs[0].shape[0])


def found_way(
    ways: Sequence[Way],
    loss: Loss,
    divided: Divided | None,
    y: Any,
    sample_weight: Any,
    outputs: Sequence[tf.TensorSpec],
    about: str,
) -> Way:
    """The first way by which the losses of unequal parts give that of the whole, whatever labels there are.

    They are tried on the first minibatch's labels and on odd ones: padded by other numbers of entries in each row, not
    known, of one class, and with all numbers that the loss compares something with, each for outputs drawn at random,
    like probabilities, and once like logits.

    Args:
        ways: those that may be.
        loss: the compiled one; of sample weights that are ``divided``, that of a part.
        divided: gives those, of labels, sample weights and a number of rows; None where that is no way.
        y, sample_weight: the first minibatch's.
        outputs: their specs, of which the rows may be open.
        about: the loss in words.

    Raises ValueError, which names the loss, if there is none, or if it cannot be tried.
    """
    left, tried, error = list(ways), 0, None
    with tf.device(HOST), keras.StatelessScope():
        base = _rows_of_all(y, sample_weight, outputs)
        traced = tf.function(loss, autograph=False)
        of = traced.get_concrete_function(*any_rows(tuple(base)))
        of_part = of
        if divided is not None:
            given = base._replace(sample_weight=divided(base.y, base.sample_weight, tf.constant(base.rows)))
            of_part = traced.get_concrete_function(*any_rows(tuple(given)))
        for draw in _draws(base, _constants(of.graph)):
            try:
                whole = _number(of(*draw))
            except tf.errors.OpError as raised:  # labels that the loss does not take
                error = raised
                continue
            tried += np.isfinite(whole)
            for way in [*left]:
                parted = _parted(way, of_part, divided, draw)
                if not _alike(whole, parted):
                    left.remove(way)
            if not left:
                raise ValueError(
                    "The loss of a batch cannot be put together from its parts': it is neither a mean nor a sum over "
                    f"the rows, whatever their labels. Received: loss={about}, {whole:.6g} for {draw.rows} rows whose "
                    f"parts of unequal sizes have {_shown(parted)}. Try a loss that gives a number for every row, "
                    "microbatches=1 and one replica of the last stage, or a scheme that does not divide batches: "
                    "'vanilla'."
                )
    if not tried:
        raise ValueError(
            f"Whether the loss is a mean over the rows cannot be tried: {error or 'it is not finite.'} Received: "
            f"loss={about}. Try microbatches=1 and one replica of the last stage."
        )
    return left[0]


def _rows_of_all(y: Any, sample_weight: Any, outputs: Sequence[tf.TensorSpec]) -> Draw:
    """The first minibatch, or as many of its rows as are to be tried, with outputs that are like probabilities."""
    count = int(tf.nest.flatten((y, outputs))[0].shape[0] or 1) if y is not None else 1
    row_bytes = sum(int(np.prod(each.shape[1:])) * each.dtype.size for each in outputs)
    rows = max(FEWEST_ROWS, min(count, LARGEST_BYTES // max(1, row_bytes)))
    places = np.arange(rows) % max(1, count)
    y, sample_weight = tf.nest.map_structure(
        lambda each: None if each is None else tf.gather(each, places), (y, sample_weight)
    )
    return Draw(y, _outputs(outputs, rows, 0), sample_weight)


def _outputs(specs: Sequence[tf.TensorSpec], rows: int, seed: int) -> list[tf.Tensor]:
    rng = np.random.default_rng(seed)
    return [tf.cast(rng.uniform(0.05, 0.95, (rows, *each.shape[1:])).astype("float32"), each.dtype) for each in specs]


def _draws(base: Draw, compared: Iterable[float]) -> Iterator[Draw]:
    """The first minibatch, and with other labels, outputs and weights."""
    yield base
    rng = np.random.default_rng(1)
    labels = [np.asarray(each, "float64") for each in tf.nest.flatten(base.y) if _is_number(each)]
    ends = [float(end) for each in labels if each.size for end in (np.nanmin(each), np.nanmax(each), each.flat[0])]
    for value in dict.fromkeys([*SPECIAL, *ends, *compared]):
        yield _with(base, rng, partial(_replaced, value, rng))
    yield _with(base, rng, lambda each: tf.gather(each, _uneven(each, rng)))
    yield base._replace(outputs=[_normal(each, rng) for each in base.outputs])  # logits
    yield _with(base, rng, lambda each: each if each.dtype.is_integer else _normal(each, rng))


def _with(base: Draw, rng: np.random.Generator, change: Callable[[Any], Any]) -> Draw:
    y = tf.nest.map_structure(lambda each: change(each) if _is_number(each) else each, base.y)
    weights = tf.nest.map_structure(
        lambda each: None if each is None else tf.cast(rng.uniform(0, 2, each.shape), each.dtype), base.sample_weight
    )
    outputs = [tf.cast(rng.uniform(0.05, 0.95, each.shape).astype("float32"), each.dtype) for each in base.outputs]
    return Draw(y, outputs, weights)


def _replaced(value: float, rng: np.random.Generator, labels: tf.Tensor) -> tf.Tensor:
    """Labels of which each row has this value another number of times; as they are where they cannot have it."""
    dtype = labels.dtype
    if not dtype.is_floating and (not np.isfinite(value) or not dtype.min <= value <= dtype.max):
        return labels
    often = rng.permutation(np.linspace(0.0, 1.0, labels.shape[0])).reshape([-1] + [1] * (labels.shape.rank - 1))
    return tf.where(rng.random(labels.shape) < often, tf.cast(value, dtype), labels)


def _uneven(labels: tf.Tensor, rng: np.random.Generator) -> np.ndarray:
    """Row numbers of which some come more often than others."""
    return np.sort(rng.integers(0, labels.shape[0], labels.shape[0]) ** 2 // labels.shape[0])


def _normal(labels: tf.Tensor, rng: np.random.Generator) -> tf.Tensor:
    return tf.cast(rng.normal(0, 3, labels.shape), labels.dtype)


def _is_number(value: Any) -> bool:
    return value is not None and (value.dtype.is_floating or value.dtype.is_integer)


def _parted(way: Way, of: Loss, divided: Divided | None, draw: Draw) -> list[float]:
    """What parts of unequal sizes have of the loss."""
    rows, given = draw.rows, draw
    if divided is not None:
        given = draw._replace(sample_weight=divided(draw.y, draw.sample_weight, tf.constant(rows)))
    ends = [0, 1, 1 + rows // 3, rows]
    found = []
    for start, end in pairwise(ends):
        try:
            number = _number(of(*take(tuple(given), range(start, end), rows)))
        except tf.errors.OpError:
            number = float("nan")
        found.append(number * (end - start) / rows if way == "mean" else number)
    return found


def _alike(whole: float, parts: Sequence[float]) -> bool:
    if not np.isfinite([whole, sum(parts)]).all():  # within infinity everything would be near
        return not np.isfinite(whole) and not np.isfinite(sum(parts))
    return abs(whole - sum(parts)) <= TOLERANCE * (abs(whole) + sum(map(abs, parts))) + 1e-7


def _number(loss: tf.Tensor) -> float:
    return float(tf.reduce_sum(loss))


def _shown(parts: Sequence[float]) -> str:
    return ", ".join(f"{each:.6g}" for each in parts)


def _constants(graph: Any) -> list[float]:
    """The numbers, written out in a function, with which it may compare labels."""
    nodes = [*graph.as_graph_def().node]
    nodes += [node for function in graph.as_graph_def().library.function for node in function.node_def]
    found: dict[float, None] = {}
    for node in nodes:
        if node.op == "Const" and tf.as_dtype(node.attr["dtype"].type) not in (tf.string, tf.variant, tf.resource):
            value = tf.make_ndarray(node.attr["value"].tensor)
            if value.size == 1 and np.isreal(value).all():
                found[float(value.reshape(()))] = None
    return list(found)[:MOST_VALUES]
