"""Contexts of a model: whose turn it is to call it, attributes with another value, and what an interrupt undoes.

Calls of several threads come one after another, or are refused.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar

from pipetrain.compute.keras_private import end_calls_of_layers, keep_to_come, tracked_ids, variables_to_come

Class = TypeVar("Class", bound=type)
Value = TypeVar("Value")

PATIENCE_S = 600.0  # with calls of other threads that end by themselves
TRAINING = ("fit", "train_on_batch")
IN_LOOP = (*TRAINING, "evaluate", "predict", "test_on_batch", "predict_on_batch")  # never called by a layer
IN_TURN = (
    *TRAINING,
    *("compile", "evaluate", "explain", "export", "get_state_tree", "get_weights", "load_weights", "partition"),
    *("predict", "predict_on_batch", "save", "save_weights", "set_state_tree", "set_weights", "test_on_batch"),
)


class Turn:
    """Whose turn it is: the thread, and the methods of the model that it is in."""

    def __init__(self) -> None:
        self.free = threading.Condition()
        self.thread: threading.Thread | None = None
        self.methods: list[str] = []

    def of_another(self, me: threading.Thread) -> threading.Thread | None:
        """The other thread whose turn it is."""
        other = self.thread
        return other if other is not None and other is not me and other.is_alive() else None


class MethodCall:
    """A context in which it is this thread's turn to call a method of the model; it may call more within.

    It waits while another thread evaluates, predicts, saves or compiles. Raises RuntimeError if another thread trains,
    which may itself be waiting for what this call gives.
    """

    def __init__(self, turn: Turn, method: str) -> None:
        self._turn, self._method = turn, method

    def __enter__(self) -> None:
        turn, me, until_s = self._turn, threading.current_thread(), time.monotonic() + PATIENCE_S
        with turn.free:
            while (other := turn.of_another(me)) is not None:
                if any(each in TRAINING for each in turn.methods) or time.monotonic() > until_s:
                    raise RuntimeError(
                        "Another thread is at work with the model. Received: "
                        f"{self._method} in thread {me.name!r}, during {turn.methods[0]} in thread {other.name!r}. Try "
                        "it after that, in a callback of it, or with a copy (keras.models.clone_model, set_weights)."
                    )
                turn.free.wait(1.0)
            if turn.thread is not me:
                turn.thread, turn.methods = me, []
            turn.methods.append(self._method)

    def __exit__(self, *_: object) -> None:
        turn = self._turn
        with turn.free:
            turn.methods.pop()
            if not turn.methods:
                turn.thread = None
                turn.free.notify_all()


def taking_turns(kind: Class) -> Class:
    """A class of models whose methods in ``IN_TURN`` are called in turn; its objects have a ``turn``.

    Before one that is not called by another, they ``end_interrupted`` calls.
    """
    for name in IN_TURN:
        if hasattr(kind, name):
            setattr(kind, name, _in_turn(name, getattr(kind, name)))
    return kind


def _in_turn(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def called(self: Any, *args: Any, **settings: Any) -> Any:
        with MethodCall(self.turn, name):
            is_outermost = len(self.turn.methods) == 1
            if is_outermost:
                self.end_interrupted()
            try:
                return method(self, *args, **settings)
            except BaseException:
                if is_outermost and name in IN_LOOP:
                    end_calls_of_layers()
                raise

    return called


@contextmanager
def undone(objects: Sequence[Any]) -> Iterator[None]:
    """Undo changes to the attributes of these Keras objects, and to their lists, if an exception is raised.

    Keras would treat a partly built object, whose variables have no values yet, as complete, or add to it.
    """
    before = [(vars(each), dict(vars(each)), _copies(each)) for each in objects]
    to_come = variables_to_come().copy()
    try:
        yield
    except BaseException:
        keep_to_come(to_come)  # else the next scope, of whatever model, would begin with those of this one
        for attributes, values, copies in before:
            attributes.clear()
            attributes.update(values)
            for original, copied in copies:
                original.clear()
                (original.update if isinstance(original, set) else original.extend)(copied)
        raise


def _copies(each: Any) -> list[tuple[Any, Any]]:
    """Every list of an object, and what its tracker has recorded, with a copy."""
    found = [value for value in vars(each).values() if type(value) is list]
    found += tracked_ids(each)
    return [(value, value.copy()) for value in found]


class Meanwhile:
    """A context in which these attributes of an object, from which Keras' loop takes what to do, have these values.

    Args:
        target: the object, which has these attributes.
        values: theirs, by name.
    """

    def __init__(self, target: Any, **values: Any) -> None:
        self._target, self._values = target, values
        self._before: dict[str, Any] = {}

    def __enter__(self) -> None:
        self._before = {name: getattr(self._target, name) for name in self._values}
        self._set(self._values)

    def __exit__(self, *_: object) -> None:
        self._set(self._before)

    def _set(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            setattr(self._target, name, value)


def known(value: Value | None) -> Value:
    """The value of an attribute that has one by now. Raises RuntimeError if it is None."""
    if value is None:
        raise RuntimeError("Something is asked of a model before it is compiled, or fit has begun. Try that first.")
    return value
