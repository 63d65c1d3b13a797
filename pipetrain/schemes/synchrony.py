"""When the workers of data parallelism bring their weights together: in every step, or after several of their own."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real
from typing import Any, ClassVar

from pipetrain.schemes.arguments import checked_count

SYNCHRONOUS = "synchronous"
REDUCING = "all-reduce"


@dataclass(frozen=True)
class LocalSGD:
    """``"local"``, ``"local:STEPS"``: every worker updates its own weights, and so many steps later they are joined.

    With the weights W before these steps, the mean M of the workers' weights after them, and ``D = W - M``::

        V <- momentum * V + D
        W <- W - rate * (D + momentum * V)

    Every worker then goes on from W. Its own optimizer, with all that this has gathered, is never sent. By default W is
    the average, as in local SGD (Stich 2019, arXiv 1805.09767), and with ``steps=1`` besides, it is taken for training
    without it. For hundreds of steps DiLoCo has ``rate=0.7, momentum=0.9`` (Douillard et al. 2023, arXiv 2311.08105);
    after few steps such a momentum goes too far.

    Args:
        steps: of each worker between two joins. A drain, such as an epoch's end, is a join too.
        rate: of the outer step.
        momentum: of the outer step, Nesterov's.

    Raises ValueError for a count below 1, a rate that is not above 0, and a momentum that is not in [0, 1).
    """

    name: ClassVar[str] = "local"
    steps: int = 8
    rate: float = 1.0
    momentum: float = 0.0

    def __post_init__(self) -> None:
        """Raise ValueError for values that it cannot have."""
        checked_count("steps", self.steps, "Workers are joined after one step or more", 8)
        _check("rate", self.rate, 0.7, "The outer step's rate is above 0", lambda rate: 0 < rate < float("inf"))
        _check("momentum", self.momentum, 0.9, "The outer step's momentum is in [0, 1)", lambda each: 0 <= each < 1)

    def __str__(self) -> str:
        outer = "" if (self.rate, self.momentum) == (1, 0) else f", rate {self.rate:g}, momentum {self.momentum:g}"
        return f"{self.name}:{self.steps}{outer}"

    @property
    def is_plain(self) -> bool:
        """Whether all gradients of every step are averaged before they are used, or might as well be."""
        return self.steps == 1 and self.rate == 1 and self.momentum == 0


def _check(name: str, value: Any, example: float, problem: str, is_right: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, Real) or not is_right(float(value)):
        raise ValueError(f"{problem}. Received: {name}={value!r}. Try {name}={example}.")


def synchrony_of(given: Any) -> LocalSGD | None:
    """What a name, a name with a number of steps, or an object stands for; None where every step is joined.

    Raises ValueError for a name that there is not, TypeError for what is neither.
    """
    if given is None or isinstance(given, LocalSGD):
        return None if given is None or given.is_plain else given
    if not isinstance(given, str):
        raise TypeError(
            f"Synchrony is a name or an object. Received: synchrony={given!r}. "
            f"Try {SYNCHRONOUS!r}, 'local:8', or pipetrain.LocalSGD(steps=8)."
        )
    name, _, steps = given.partition(":")
    if name == SYNCHRONOUS and not steps:
        return None
    if name != LocalSGD.name or (steps and not (steps.isascii() and steps.isdecimal())):
        raise ValueError(f"Unknown synchrony. Received: synchrony={given!r}. Try {SYNCHRONOUS!r}, or 'local:8'.")
    return synchrony_of(LocalSGD(**({"steps": int(steps)} if steps else {})))


def check_synchrony(given: Any, scheme: str) -> None:
    """Raise ValueError, TypeError for no synchrony, and for a scheme that has one alone; None is the default."""
    if synchrony_of(given) is not None and scheme != REDUCING:
        raise ValueError(
            f"Only {REDUCING} has workers with weights of their own. Received: synchrony={given!r}, scheme={scheme!r}. "
            f"Try leaving it out, or scheme={REDUCING!r}."
        )
