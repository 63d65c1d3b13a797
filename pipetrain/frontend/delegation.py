"""What a PipelineModel has of the wrapped model: its methods and properties, and the attributes that it alone has."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import Any

import keras

from pipetrain.compute.keras_private import COMPILED as LENT
from pipetrain.compute.keras_private import OF_LOOP
from pipetrain.frontend.keras_methods import ABSENT, COMPILED, DELEGATED, DRAINED, OF_SEQUENTIAL
from pipetrain.frontend.strategy_model import StrategyModel


class DelegationMixin(StrategyModel):
    """What Keras' methods, or a class of the user's or of KerasHub's, do with a model, the wrapped one does.

    Its own attributes, such as a task's ``backbone`` and ``preprocessor``, are read and set here as there.
    """

    def __getattr__(self, name: str) -> Any:
        """An attribute that only the wrapped model has; a method of it finds all minibatches so far applied."""
        if name.startswith("_") or "_strategy" not in vars(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        value = getattr(self.model, name)
        if name in OF_SEQUENTIAL:
            raise _absent(self, name, *OF_SEQUENTIAL[name])
        return _drained(self, value) if inspect.ismethod(value) else value

    def __setattr__(self, name: str, value: Any) -> None:
        if self._is_the_models(name):
            setattr(self.model, name, value)
        else:
            super().__setattr__(name, value)

    def _is_the_models(self, name: str) -> bool:
        """Whether an attribute is one that only the wrapped model has, and that is nothing of Keras' loop."""
        if name.startswith("_") or name in OF_LOOP or "_strategy" not in vars(self):
            return False
        return not (name in vars(self) or hasattr(type(self), name)) and hasattr(self.model, name)

    @contextmanager
    def at_rest(self) -> Iterator[keras.Model]:
        """The wrapped model, all minibatches so far applied."""
        self._strategy.drain()
        yield self.model

    @contextmanager
    def _as_it_is(self) -> Iterator[keras.Model]:
        yield self.model

    def _compiled_within(self) -> AbstractContextManager[keras.Model]:
        """The model whose variables Keras sees, compiled meanwhile as this one is."""
        return compiled_as(self.inner, self)


Lend = Callable[[Any], AbstractContextManager[keras.Model]]


def _delegated(name: str, lend: Lend) -> Any:
    """Keras' method or property of this name, of the model that is lent for it."""
    own = inspect.getattr_static(keras.Model, name)
    if not isinstance(own, property):

        @wraps(own)
        def call(self: DelegationMixin, *args: Any, **settings: Any) -> Any:
            with lend(self) as model:
                return getattr(model, name)(*args, **settings)

        return call

    def read(self: DelegationMixin) -> Any:
        with lend(self) as model:
            return getattr(model, name)

    def write(self: DelegationMixin, value: Any) -> None:
        setattr(self.model, name, value)

    return property(read, write if own.fset else None, doc=own.__doc__)


def _refusing(name: str, what: str, remedy: str) -> Any:
    @wraps(getattr(keras.Model, name))
    def call(self: DelegationMixin, *_: Any, **__: Any) -> Any:
        raise _absent(self, name, what, remedy)

    return call


def _drained(owner: DelegationMixin, method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def call(*args: Any, **settings: Any) -> Any:
        with owner.at_rest():
            return method(*args, **settings)

    return call


def _absent(owner: keras.Model, name: str, what: str, remedy: str) -> ValueError:
    return ValueError(f"A PipelineModel cannot be {what}. Received: {name} of {owner.name!r}. Try {remedy}.")


@contextmanager
def compiled_as(model: keras.Model, other: keras.Model) -> Iterator[keras.Model]:
    """The model, which meanwhile is compiled as the other one is, with its very optimizer and metrics.

    They are set past Keras, which would go on tracking what they hold.
    """
    mine, theirs = vars(model), vars(other)
    lent = {name: theirs[name] for name in LENT if name in theirs} if other.compiled else {}
    before = {name: mine[name] for name in lent if name in mine}
    try:
        mine.update(lent)
        yield model
    finally:
        for name in lent:
            mine.pop(name, None)
        mine.update(before)


def _fill() -> None:
    """Give the class what the tables say."""
    lent: dict[tuple[str, ...], Lend] = {
        DELEGATED: DelegationMixin._as_it_is,
        DRAINED: DelegationMixin.at_rest,
        COMPILED: DelegationMixin._compiled_within,
    }
    for names, lend in lent.items():
        for name in names:
            if hasattr(keras.Model, name):  # older versions of Keras lack some
                setattr(DelegationMixin, name, _delegated(name, lend))
    for name, (what, remedy) in ABSENT.items():
        setattr(DelegationMixin, name, _refusing(name, what, remedy))


_fill()
