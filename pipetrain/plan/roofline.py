"""What blocks would cost on a device that is not there: seconds from counted work, by a roofline."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipetrain.plan.profile import BlockProfile, Profile

FLOAT_BYTES = 4
MOST_SPLITS, LEAST_INNER = 32, 128  # parts that the sum within a product is cut into, and how long each is at least
UPDATE_PASSES = 5  # SGD with momentum reads weights, velocity and gradients, and writes weights and velocity
PREDICTION_PASSES = 3  # W + s*v reads weights and velocity, and writes a copy
# A cross-entropy reads the outputs for their largest and for the sum of exponentials, and reads and writes to make the
# gradients and to multiply them by the loss's; a metric reads them for the largest.
LOSS_PASSES, METRIC_PASSES = 6, 1
# Seconds for an operation, a byte and a kernel, of a device as they are, and how near to those a fit stays.
USUAL, NEARNESS = np.array([1 / 45e9, 1 / 8e9, 5e-6]), 0.03
LEAST = 1e-3  # of these; a block that has no other operations would otherwise take no time
SAME = 0.1  # a distance of logarithms: blocks nearer than that tell the same


class Device(NamedTuple):
    """One device, as its maker describes it, and what of that is reached.

    ``flops_per_s`` and ``bandwidth_bytes_per_s`` are the peaks; ``compute_part`` and ``bandwidth_part`` what the best
    kernels reach of each. A matrix product is computed in square tiles of ``tile`` numbers a side, each by one of
    ``processors`` multiprocessors. ``launch_s`` is what every kernel takes beside its work.
    """

    name: str
    flops_per_s: float
    bandwidth_bytes_per_s: float
    processors: int
    tile: int = 64
    compute_part: float = 0.9
    bandwidth_part: float = 0.8
    launch_s: float = 5e-6

    def moving_s(self, size_bytes: float) -> float:
        """Seconds to read or write so many bytes: ``bytes / (bandwidth * part)``."""
        return size_bytes / (self.bandwidth_bytes_per_s * self.bandwidth_part)


# 3840 cores in 30 multiprocessors at 1531 MHz, two operations a cycle; NVIDIA's data sheet of the Tesla P40.
TESLA_P40 = Device("Tesla P40", 11.76e12, 346e9, 30)


class Product(NamedTuple):
    """Matrix products (rows x inner) by (inner x columns): ``together`` of them at once, ``times`` one after another.

    ``moved_bytes`` is what each of the ``times`` reads and writes: both factors and the result.
    """

    rows: int
    inner: int
    columns: int
    moved_bytes: int
    together: int = 1
    times: int = 1

    @property
    def flops(self) -> int:
        """``2 * rows * inner * columns`` for each: multiplications and additions."""
        return 2 * self.rows * self.inner * self.columns * self.together * self.times

    def slice(self, parts: int) -> Product:
        """The same with one of so many parts of the columns, at least one; its left factor is read as before."""
        columns = math.ceil(self.columns / parts)
        by_column = FLOAT_BYTES * self.together * (self.inner + self.rows)
        return self._replace(columns=columns, moved_bytes=self.moved_bytes - by_column * (self.columns - columns))

    def backward(self) -> tuple[Product, Product]:
        """The gradients of the left and of the right factor, as many operations each as forward.

        The left ones (of activations) go step by step, as forward does; the right ones (of weights) are summed over all
        steps in one product.
        """
        rows, inner, columns, moved, together, times = self
        return Product(rows, columns, inner, moved, together, times), Product(
            inner, rows * times, columns, moved, together
        )


class Work(NamedTuple):
    """What one block has to do for one minibatch forward: products, and bytes that all else reads and writes.

    ``kernels`` is how many launches that takes beside the products'. The other fields are those of ``BlockProfile``.
    """

    name: str
    products: tuple[Product, ...] = ()
    moved_bytes: int = 0
    kernels: int = 1
    weight_bytes: int = 0
    output_bytes: int = 0
    activation_bytes: int = 0
    shared: tuple[tuple[int, int], ...] = ()
    fixed_bytes: int = 0

    @property
    def flops(self) -> int:
        """Operations of the products; what else is computed hides behind its bytes."""
        return sum(product.flops for product in self.products)

    def slice(self, parts: int) -> Work:
        """One of so many equal parts of a layer's outputs: all of the inputs, and parts of weights and results."""
        products = tuple(product.slice(parts) for product in self.products)
        moved_bytes, weight_bytes = self.moved_bytes // parts, self.weight_bytes // parts
        return self._replace(products=products, moved_bytes=moved_bytes, weight_bytes=weight_bytes)


def efficiency(product: Product, device: Device, splits: int = 1) -> float:
    """The part of a device's multiprocessors' time that gives numbers of the result, from 0 to 1.

    ``rows * inner * columns * together / (waves * processors * tile^2 * ceil(inner / splits))`` with
    ``waves = ceil(ceil(rows/tile) * ceil(columns/tile) * together * splits / processors)``: tiles at the edges are
    partly empty, and in the last wave of tiles some multiprocessors have none. With ``splits`` the sum over ``inner``
    is cut into parts that are tiles of their own. After "Matrix Multiplication Background" of NVIDIA's deep learning
    performance guide, tile and wave quantization.
    """
    tiles = math.ceil(product.rows / device.tile) * math.ceil(product.columns / device.tile) * product.together * splits
    waves = math.ceil(tiles / device.processors)
    useful = product.rows * product.inner * product.columns * product.together
    return useful / (waves * device.processors * device.tile**2 * math.ceil(product.inner / splits))


def product_seconds(product: Product, device: Device) -> float:
    """``times * (max(flops / (peak * part * efficiency), bytes / bandwidth) + launch)`` with the splits that suit best.

    Every split writes a result of its own, which is read again to be summed.
    """
    peak, flops = device.flops_per_s * device.compute_part, product.flops / product.times
    result_bytes = FLOAT_BYTES * product.rows * product.columns * product.together
    best_s, splits = math.inf, 1
    while splits == 1 or (splits <= MOST_SPLITS and product.inner >= splits * LEAST_INNER):
        moved = product.moved_bytes + (2 * splits * result_bytes if splits > 1 else 0)
        best_s = min(best_s, max(flops / (peak * efficiency(product, device, splits)), device.moving_s(moved)))
        splits *= 2
    return product.times * (best_s + device.launch_s)


def block_profile(work: Work, device: Device, slices: Sequence[int] = ()) -> BlockProfile:
    """The seconds of one block: its products, what else it moves, and its launches, one after another.

    ``slices`` are the numbers of parts of its outputs of which one's seconds are wanted too.

    Backward is twice forward: both gradients of each product by their own shapes, and twice the other bytes. The update
    is that of SGD with momentum, ``5 * weights / bandwidth``.
    """
    forward_s, backward_s = _computing_s(work, device)
    return BlockProfile(
        name=work.name,
        forward_s=forward_s,
        backward_s=backward_s,
        output_bytes=work.output_bytes,
        weight_bytes=work.weight_bytes,
        activation_bytes=work.activation_bytes,
        shared=work.shared,
        fixed_bytes=work.fixed_bytes,
        update_s=device.moving_s(UPDATE_PASSES * work.weight_bytes) + (device.launch_s if work.weight_bytes else 0.0),
        slices=tuple((parts, *_computing_s(work.slice(parts), device)) for parts in slices if work.products),
    )


def _computing_s(work: Work, device: Device) -> tuple[float, float]:
    """Of the forward and of the backward."""
    rest_s, launches_s = device.moving_s(work.moved_bytes), work.kernels * device.launch_s
    gradients = [each for product in work.products for each in product.backward()]
    forward_s = sum(product_seconds(each, device) for each in work.products) + rest_s + launches_s
    return forward_s, sum(product_seconds(each, device) for each in gradients) + 2 * rest_s + 2 * launches_s


def roofline(model: str, batch_size: int, works: Sequence[Work], device: Device, slices: Sequence[int] = ()) -> Profile:
    """The profile that the device would give for work counted at this batch size, without any measuring.

    ``slices``: see ``block_profile``.
    The loss takes ``6 * outputs / bandwidth``, as a cross-entropy does, the metric ``outputs / bandwidth``.
    """
    loss_s, metric_s = (device.moving_s(passes * works[-1].output_bytes) for passes in (LOSS_PASSES, METRIC_PASSES))
    blocks = tuple(block_profile(work, device, slices) for work in works)
    return Profile(model, batch_size, blocks, loss_s=loss_s, metric_s=metric_s)


class Measured(NamedTuple):
    """A block that was measured: what it is, what it has to do, and what it took forward and backward."""

    label: str
    work: Work
    forward_s: float
    backward_s: float


class FittedRoofline:
    """What blocks would take that were not measured, from those that were.

    ``seconds = flops / F + bytes / B + kernels * L``, with an F, a B and an L of forwards and of backwards, none of
    them negative, that fit the measured seconds best: least squares of the relative errors, and with a small weight of
    how far each is from that of a usual device of the same speed, which decides where few blocks were measured. A block
    takes longer or shorter than that by the geometric mean of the errors of the measured blocks of its label, such as
    all convolutions, with weights ``1 / (d^2 + 0.1^2)^2``: d is how far the logarithms of their operations, bytes and
    kernels are from those of the block.

    Args:
        measured: at least one block.
    """

    def __init__(self, measured: Sequence[Measured]) -> None:
        self._forward = _Fitted([(each.label, _features(each.work), each.forward_s) for each in measured])
        self._backward = _Fitted([(each.label, _features(each.work), each.backward_s) for each in measured])

    def seconds(self, label: str, work: Work) -> tuple[float, float]:
        """Of the forward and of the backward."""
        return self._forward.seconds(label, _features(work)), self._backward.seconds(label, _features(work))


class _Fitted:
    """Of one direction."""

    def __init__(self, measured: Sequence[tuple[str, NDArray[np.float64], float]]) -> None:
        usual_s = [float(features @ USUAL) for _, features, _ in measured]
        taken = [(*each, usual) for each, usual in zip(measured, usual_s, strict=True) if min(each[2], usual) > 0]
        slower = math.exp(sum(math.log(each_s / usual) for *_, each_s, usual in taken) / max(len(taken), 1))
        near = np.diag(1 / (slower * USUAL)) * NEARNESS
        rows = np.array([features / each_s for _, features, each_s, _ in taken]).reshape(-1, len(USUAL))
        found = _non_negative(np.vstack([rows, near]), np.array([1.0] * len(rows) + [NEARNESS] * len(near)))
        self._rates = np.maximum(found, LEAST * slower * USUAL)
        found_of: dict[str, list[tuple[NDArray[np.float64], float]]] = {}
        for label, features, each_s, _ in taken:
            error = math.log(each_s / float(features @ self._rates))
            found_of.setdefault(label, []).append((np.log1p(features), error))
        self._errors = {
            label: [np.array(each) for each in zip(*those, strict=True)] for label, those in found_of.items()
        }

    def seconds(self, label: str, features: NDArray[np.float64]) -> float:
        return float(features @ self._rates) * math.exp(self._error(label, np.log1p(features)))

    def _error(self, label: str, place: NDArray[np.float64]) -> float:
        """The logarithm of how much longer blocks of this label take there."""
        if label not in self._errors:
            return 0.0
        places, errors = self._errors[label]
        weights = 1 / (((places - place) ** 2).sum(axis=1) + SAME**2) ** 2
        return float(weights @ errors / weights.sum())


def _features(work: Work) -> NDArray[np.float64]:
    """Operations, bytes, and kernels."""
    moved_bytes = work.moved_bytes + sum(each.times * each.moved_bytes for each in work.products)
    return np.array([work.flops, moved_bytes, work.kernels + sum(each.times for each in work.products)], float)


def _non_negative(parts: NDArray[np.float64], wanted: NDArray[np.float64]) -> NDArray[np.float64]:
    """The rates, none below 0, with which the columns' sum is nearest to what is wanted: the best of all subsets."""
    best, least = np.zeros(parts.shape[1]), math.inf
    scale = np.abs(parts).max(axis=0)
    for chosen in itertools.chain(*(itertools.combinations(range(parts.shape[1]), n) for n in (1, 2, 3))):
        columns = [*chosen]
        rates = np.linalg.lstsq(parts[:, columns] / scale[columns], wanted, rcond=None)[0] / scale[columns]
        error = float(((parts[:, columns] @ rates - wanted) ** 2).sum())
        if (rates >= 0).all() and error < least:
            best, least = np.zeros(parts.shape[1]), error
            best[columns] = rates
    return best
