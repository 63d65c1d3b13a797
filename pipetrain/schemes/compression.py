"""What gradients, and what crosses a pipeline's cuts, become on their way: how many bytes, and with what loss.

Each compression is a frozen object with its options; a name, or ``"NAME:VALUE"`` with the value of its first option,
stands for it. Where there is *error feedback*, what a message lacks of the gradient is added to the next one: what was
sent plus what is left is the sum of all gradients (Karimireddy et al. 2019, arXiv 1901.09847).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from numbers import Real
from typing import Any, ClassVar

from pipetrain.schemes.arguments import checked_bool, checked_count

ELEMENTS = 1000  # of which a share is sent
FIRST_SHARE, QUARTERS = 0.25, 4  # of a warm-up: what is sent in the first of these
FLOAT_BYTES, INDEX_BYTES = 4, 4  # of a scale or a kept value, and of its place
VOTE_BITS = 2  # beside those of the elements: whether all are finite, and whether any is not 0
BY_KIND: Any = None  # the error feedback of ``Sign``, which has another default for a majority


class Compression:
    """What becomes of a gradient. Raises ValueError, TypeError for values that it cannot have.

    ``error_feedback`` is whether what a message lacks is added to the next one, which it is of gradients of weights
    alone. Random numbers that a message depends on are those of the step, the same in every run.

    One of your own is a subclass with ``encode(values)``, which gives a list of tensors for values of one dimension,
    and ``decode(parts)``, which gives as many values of one dimension again; it may say its bytes by ``sent_bytes``.
    For a gradient the parts have fixed shapes. What crosses a pipeline's cuts has a number of elements, and parts have
    sizes, that are only known when the function runs: ``tf.shape(values)`` has it, ``values.shape`` has None.
    """

    name: ClassVar[str] = "own"
    first_option: ClassVar[str] = ""  # whose value may follow the name
    error_feedback: bool = False
    local_clipnorm: float | None = None  # to which each device clips its gradients before
    majority: bool = False  # whether of the sum only the signs count

    def __post_init__(self) -> None:
        """Raise ValueError, TypeError for values that the compression cannot have."""
        checked_bool("error_feedback", self.error_feedback, "What a message lacks is kept, or it is not")
        self._check()

    def _check(self) -> None:
        pass

    def __str__(self) -> str:
        if self.name == Compression.name and type(self).__repr__ is object.__repr__:  # of one's own, by what it holds
            return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"
        if self.name == Compression.name:
            return repr(self)
        own = {name: getattr(self, name) for name, usual in self._usual.items() if getattr(self, name) != usual}
        first = own.pop(self.first_option, None)
        value = "" if first is None else f":{self.first_option if first is True else first}"
        return ", ".join([f"{self.name}{value}", *(f"{name}={each}" for name, each in own.items())])

    @property
    def _usual(self) -> dict[str, Any]:
        """The values of its options that are not told: the defaults."""
        return {each.name: each.default for each in fields(self)} if is_dataclass(self) else {}

    def sent_bytes(self, shape: Sequence[int], item_bytes: int = FLOAT_BYTES) -> int:
        """The bytes of a message of a gradient of this shape, whose elements have so many; never more than those."""
        return min(self._bytes(shape, item_bytes), math.prod(shape) * item_bytes)

    def _bytes(self, shape: Sequence[int], item_bytes: int) -> int:
        """Of a compression of one's own that does not say it, as large as the gradient."""
        return math.prod(shape) * item_bytes

    def encodes(self, shape: Sequence[int], item_bytes: int = FLOAT_BYTES) -> bool:
        """Whether a gradient of this shape is sent as a message: where that is no smaller, it is sent as it is."""
        return hasattr(self, "encode") or self.sent_bytes(shape, item_bytes) < math.prod(shape) * item_bytes

    def corrected(self, momentum: float, argument: str = "compression") -> float:
        """The momentum by which devices sum their gradients, in place of the optimizer that has it: none."""
        return 0.0

    def phase(self, updates: int) -> int:
        """Which of its phases has the gradient that follows so many updates: there is one."""
        return 0

    def in_phase(self, phase: int) -> Compression:
        """How gradients are compressed in a phase."""
        return self


@dataclass(frozen=True)
class BFloat16(Compression):
    """``"bfloat16"``: the nearest number with 8 bits of mantissa and the range of float32: 2 bytes an element."""

    name: ClassVar[str] = "bfloat16"
    error_feedback: bool = False

    def _bytes(self, shape: Sequence[int], item_bytes: int) -> int:
        return 2 * math.prod(shape)


@dataclass(frozen=True)
class Float16(BFloat16):
    """``"float16"``: the nearest number with 11 bits of mantissa, at most 65504 in absolute value: 2 bytes an element.

    Gradients below 6e-8 become 0; ``error_feedback=True`` keeps them until they have added up.
    """

    name: ClassVar[str] = "float16"


@dataclass(frozen=True)
class Int8(Compression):
    """``"int8"``: multiples of a step for each block of elements, rounded at random, which is right on average.

    ``Q(x) = step * floor(x / step + u)`` with ``step = max|x| / 127`` of the block and u uniform in [0, 1), so that
    ``E[Q(x)] = x``: ``1 + 4 / block`` bytes an element. Source: QSGD, Alistarh et al. 2017 (arXiv 1610.02132), with the
    largest element of a block in place of its norm.

    Args:
        block: elements that have a step in common.
        error_feedback: see ``Compression``.
    """

    name: ClassVar[str] = "int8"
    first_option: ClassVar[str] = "block"
    bits: ClassVar[int] = 8
    block: int = 256
    error_feedback: bool = False

    def _check(self) -> None:
        checked_count("block", self.block, "Elements of a block have a step in common", 256, least=2)

    @property
    def levels(self) -> int:
        """How many steps the largest element of a block has."""
        return int(2 ** (self.bits - 1)) - 1

    def _bytes(self, shape: Sequence[int], item_bytes: int) -> int:
        count = math.prod(shape)
        return math.ceil(count * self.bits / 8) + FLOAT_BYTES * math.ceil(count / self.block)


@dataclass(frozen=True)
class Int4(Int8):
    """``"int4"``: as ``Int8``, with ``step = max|x| / 7`` and two elements in a byte.

    Args:
        block: elements that have a step in common.
        error_feedback: see ``Compression``.
    """

    name: ClassVar[str] = "int4"
    bits: ClassVar[int] = 4
    block: int = 64
    error_feedback: bool = True


@dataclass(frozen=True)
class Sign(Compression):
    """``"sign"``: the signs of a variable's elements, and the mean of their absolute values: a bit an element.

    ``Q(x) = mean|x| * sign(x)``, where 0 has the sign of positive numbers. Source: EF-signSGD, Karimireddy et al. 2019
    (arXiv 1901.09847).

    With ``"sign:majority"`` the devices vote, each with one bit for an element: the optimizer gets
    ``sign(sum over devices of sign(x))``, which is 1, -1, or 0 at a tie, so that with SGD an element moves by the
    learning rate. All devices that have rows count alike, whatever number of rows they have; a device whose gradient of
    a variable is 0 everywhere does not vote on it. One bit cannot say that a single element is 0: its sign is then +
    and - by turns, from one device to the next and from one step to the next, so that an element that is 0 on all
    devices stays, or with an odd number of them goes back in the next step. There is no error feedback. Source: signSGD
    with majority vote, Bernstein et al. 2018 (arXiv 1802.04434), algorithm 3.

    Args:
        error_feedback: see ``Compression``; by default True, and False for a majority. ``dataclasses.replace`` takes it
            over from the object, so that one which changes ``majority`` is to be given both.
        majority: whether devices vote.

    Raises ValueError for a majority with error feedback: signs without a scale are no part of the gradient that could
    be subtracted from it.
    """

    name: ClassVar[str] = "sign"
    first_option: ClassVar[str] = "majority"
    error_feedback: bool = BY_KIND
    majority: bool = False

    def __post_init__(self) -> None:
        """Raise ValueError, TypeError for values that the compression cannot have."""
        votes = checked_bool("majority", self.majority, "Devices vote by their signs, or they do not")
        object.__setattr__(self, "majority", votes)
        if self.error_feedback is BY_KIND:
            object.__setattr__(self, "error_feedback", not votes)
        super().__post_init__()

    def _check(self) -> None:
        if self.majority and self.error_feedback:
            raise ValueError(
                "Signs without a scale are no part of a gradient, of which the rest could be kept. Received: "
                "majority=True, error_feedback=True. Try error_feedback=False, or majority=False."
            )

    @property
    def _usual(self) -> dict[str, Any]:
        return {**super()._usual, "error_feedback": not self.majority}

    def _bytes(self, shape: Sequence[int], item_bytes: int) -> int:
        count = math.prod(shape)
        return math.ceil((count + VOTE_BITS) / 8) if self.majority else math.ceil(count / 8) + FLOAT_BYTES


@dataclass(frozen=True)
class TopK(Compression):
    """``"top-k"``: of every variable this share of the elements, the largest in absolute value: 8 bytes for each.

    Of a variable there is at least one; all are sent as they are where that is less. Source: Deep Gradient Compression,
    Lin et al. 2018 (arXiv 1712.01887), section 3.

    An element that is sent once in many steps would get the momentum of one gradient for many. With *momentum
    correction* each device sums its gradients by momentum before (``u <- mu * u + g``), and the optimizer has none;
    what has been sent leaves that sum, too. *Warm-up* sends more in the beginning: in the four quarters of the first
    ``warm_up`` steps ``0.25 * (share / 0.25) ** (quarter / 4)`` for quarter 0 to 3.

    Args:
        share: of the elements, above 0 up to 1.
        error_feedback: see ``Compression``.
        momentum_correction: ``"auto"``: with error feedback, for Keras' SGD with a momentum that is not Nesterov's and
            nothing that clips or accumulates gradients, of models without embeddings; True: ValueError where that is
            not so; False: never.
        warm_up: steps since training began, each worker's own where it has some, in which more is sent; 0 for none.
        local_clipnorm: each device's gradients are clipped to the norm ``local_clipnorm / sqrt(devices)`` before they
            are summed by momentum, so that the sum of independent ones has about ``local_clipnorm``; None: never.
    """

    name: ClassVar[str] = "top-k"
    first_option: ClassVar[str] = "share"
    share: float = 0.01
    error_feedback: bool = True
    momentum_correction: bool | str = "auto"
    warm_up: int = 0
    local_clipnorm: float | None = None

    def _check(self) -> None:
        check_share(self.share)
        if not isinstance(self.momentum_correction, str) or self.momentum_correction != "auto":
            asked = checked_bool("momentum_correction", self.momentum_correction, "Momentum is corrected, or it is not")
            object.__setattr__(self, "momentum_correction", asked)
        checked_count("warm_up", self.warm_up, "More is sent for so many updates, or for none", 100, least=0)
        norm = self.local_clipnorm
        if norm is not None and (isinstance(norm, bool) or not isinstance(norm, Real) or not 0 < norm < math.inf):
            raise ValueError(
                f"Gradients are clipped to a norm above 0. Received: local_clipnorm={norm!r}. Try 1.0, or None."
            )

    def phase(self, updates: int) -> int:
        """The quarter of the warm-up, or that it is over."""
        if not self.warm_up or self.share >= FIRST_SHARE:
            return QUARTERS
        return min(QUARTERS, QUARTERS * updates // self.warm_up)

    def in_phase(self, phase: int) -> TopK:
        """With the share of a quarter of the warm-up."""
        share = FIRST_SHARE * (self.share / FIRST_SHARE) ** (phase / QUARTERS)
        return self if phase == QUARTERS else replace(self, share=max(share, self.share))

    def corrected(self, momentum: float, argument: str = "compression") -> float:
        """The momentum by which devices sum their gradients, of an optimizer with this one; 0 where they do not.

        ``argument`` is what the compression is given as. Raises ValueError where that is wanted, and cannot be.
        """
        if self.momentum_correction is True and not (momentum and self.error_feedback):
            raise ValueError(
                "Momentum correction needs error feedback, and Keras' SGD with a momentum that is not Nesterov's and "
                "with nothing that clips or accumulates gradients; no embeddings, and a join in every step; in "
                "pipelines a synchronous schedule, and no weights that several layers have. Received: "
                f"{argument}={self!r}. Try momentum_correction='auto'."
            )
        is_sent = self.encodes((ELEMENTS,))
        return momentum if self.momentum_correction and self.error_feedback and is_sent else 0.0

    def count(self, shape: Sequence[int]) -> int:
        """How many elements of a variable of this shape are sent."""
        return max(1, math.ceil(self.share * math.prod(shape)))

    def _bytes(self, shape: Sequence[int], item_bytes: int) -> int:
        return (item_bytes + INDEX_BYTES) * self.count(shape)


@dataclass(frozen=True)
class RandomK(TopK):
    """``"random-k"``: as ``TopK``, with elements drawn anew in each step, for all devices the same: 4 bytes for each.

    Their places need not be sent. Without error feedback they are multiplied by ``1 / share``, which is right on
    average. Source: Stich et al. 2018 (arXiv 1809.07599).

    Args:
        share: of the elements, above 0 up to 1.
        error_feedback: see ``Compression``.
        momentum_correction: as that of ``TopK``.
        warm_up: likewise.
        local_clipnorm: likewise.
    """

    name: ClassVar[str] = "random-k"

    def _bytes(self, shape: Sequence[int], item_bytes: int) -> int:
        return item_bytes * self.count(shape)


@dataclass(frozen=True)
class PowerSGD(Compression):
    """``"power-sgd"``: a matrix of low rank in place of a gradient M of n rows and m columns: ``4 rank (n + m)`` bytes.

    ``P = orthonormal(M Q)``, and ``Q = M^T P`` is the next step's start: a step of the power iteration in every step of
    training. What has more than two dimensions is a matrix of its last one's columns; vectors, and what would not
    become smaller, are sent as they are. Each device sends P and Q of its own gradient, and the sum is that of the
    products. Source: Vogels et al. 2019 (arXiv 1905.13727), where P and Q are summed.

    Args:
        rank: of the matrix.
        error_feedback: see ``Compression``.
    """

    name: ClassVar[str] = "power-sgd"
    first_option: ClassVar[str] = "rank"
    rank: int = 2
    error_feedback: bool = True

    def _check(self) -> None:
        checked_count("rank", self.rank, "A matrix has a rank from 1 up", 2)

    def sides(self, shape: Sequence[int]) -> tuple[int, int] | None:
        """The rows and columns of the matrix that a variable of this shape is; None where it is sent as it is."""
        if len(shape) < 2 or not math.prod(shape):
            return None
        rows, columns = math.prod(shape[:-1]), shape[-1]
        return (rows, columns) if self.rank * (rows + columns) < rows * columns else None

    def _bytes(self, shape: Sequence[int], item_bytes: int) -> int:
        sides = self.sides(shape)
        return FLOAT_BYTES * self.rank * sum(sides) if sides else item_bytes * math.prod(shape)


COMPRESSIONS: dict[str, type[Compression]] = {
    each.name: each for each in (BFloat16, Float16, Int8, Int4, Sign, TopK, RandomK, PowerSGD)
}
NONE = "none"


CUTS = (BFloat16, Float16, Int8, Int4)  # those of this package that messages of any rows may have


def crosses_cuts(compression: Compression | None) -> bool:
    """Whether messages of it may be of any rows: those of ``CUTS``, and one's own, which is given any values.

    Those that were made with error feedback may not: it is for gradients alone.
    """
    return compression is not None and _takes_any_rows(compression) and not _feeds_back(compression)


def _takes_any_rows(compression: Compression) -> bool:
    return type(compression) in CUTS or hasattr(compression, "encode")


def _feeds_back(compression: Compression) -> bool:
    # That which is the default of one of the package is for gradients; one's own has it because that was written.
    return compression.error_feedback and not (type(compression) in CUTS and type(compression).error_feedback)


def check_crossing(given: Any, scheme: str) -> None:
    """Raise ValueError, TypeError for what is no compression of what crosses a pipeline's cuts; None is none."""
    compression = compression_of(given)
    if compression is None:
        return
    if not _takes_any_rows(compression):
        raise ValueError(
            "What crosses a pipeline's cuts is of other rows in every minibatch: it cannot be compressed as gradients "
            f"of weights can. Received: compression={given!r}, scheme={scheme!r}. "
            f"Try one of: {', '.join(each.name for each in CUTS)}; or one of your own."
        )
    if _feeds_back(compression):
        raise ValueError(
            "What a message of other rows lacks is of no use to the next one. Received: "
            f"compression={str(compression)!r} with error_feedback=True, scheme={scheme!r}. Try error_feedback=False."
        )


def check_share(share: Any) -> None:
    """Raise ValueError for what is no share of the elements."""
    if isinstance(share, bool) or not isinstance(share, Real) or not 0 < float(share) <= 1:
        raise ValueError(f"A share is above 0 and at most 1. Received: share={share!r}. Try share=0.01.")


def compression_of(given: Any, argument: str = "compression") -> Compression | None:
    """The compression that a name, a name with a value, or an object stands for; None for none.

    ``argument`` is what errors call it.

    Raises ValueError for a name that there is not, TypeError for what is neither.
    """
    if isinstance(given, Compression):
        _check_own(given, argument)
    if given is None or isinstance(given, Compression):
        return given
    if not isinstance(given, str):
        raise TypeError(
            f"A compression is a name or an object. Received: {argument}={given!r}. "
            f"Try one of: {', '.join(map(repr, COMPRESSIONS))}; or pipetrain.TopK(share=0.01)."
        )
    name, _, value = given.partition(":")
    if name == NONE and not value:
        return None
    if name not in COMPRESSIONS:
        raise ValueError(
            f"Unknown compression. Received: {argument}={given!r}. Try one of: {', '.join((NONE, *COMPRESSIONS))}."
        )
    return COMPRESSIONS[name](**(_first_option(given, name, value, argument) if value else {}))


def _check_own(given: Compression, argument: str) -> None:
    """Raise ValueError, TypeError for an object that is none of this package's and makes no messages itself."""
    if isinstance(given, tuple(COMPRESSIONS.values())) and not hasattr(given, "encode"):
        return
    if missing := [each for each in ("encode", "decode") if not callable(getattr(given, each, None))]:
        raise TypeError(
            f"A compression of your own has encode(values) and decode(parts). Received: {argument}={given!r}, without "
            f"{' and '.join(missing)}. Try one of: {', '.join(map(repr, COMPRESSIONS))}."
        )
    checked_bool("error_feedback", given.error_feedback, "What a message lacks is kept, or it is not")


def summing(given: Any) -> Compression | None:
    """The compression of gradients that a stage's replicas sum. Raises ValueError, TypeError for what cannot be one."""
    compression = compression_of(given, "replica_compression")
    if isinstance(compression, TopK) and (compression.warm_up or compression.local_clipnorm is not None):
        raise ValueError(
            "What a stage's replicas send is alike in all steps, and no device has the norm of all gradients. "
            f"Received: replica_compression={given!r}. Try warm_up=0 and local_clipnorm=None."
        )
    return compression


def _first_option(given: str, name: str, value: str, argument: str) -> dict[str, Any]:
    kind = COMPRESSIONS[name]
    default = getattr(kind, kind.first_option, None)
    if isinstance(default, bool) and value == kind.first_option:
        return {kind.first_option: True}
    try:
        if default is not None and not isinstance(default, bool):
            return {kind.first_option: float(value) if isinstance(default, float) else int(value)}
    except ValueError:
        pass
    remedy = name if default is None else f"{name}:{default}, its {kind.first_option}"
    if isinstance(default, bool):
        remedy = f"{name}, or {name}:{kind.first_option}"
    raise ValueError(f"The compression has no such value. Received: {argument}={given!r}. Try {remedy}.")
