"""Contexts of a model: whose turn it is to call it, attributes with another value, and what an interrupt undoes.

Calls of several threads come one after another, or are refused.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar

import tensorflow as tf

from pipetrain.compute.keras_private import (
    ending_calls,
    held_by,
    keep_to_come,
    outside_scopes,
    tracked_ids,
    variables_to_come,
)
from pipetrain.compute.tensorflow_private import WatchedCalls, ending_name_scopes, handle_of, unwatch, watch

Class = TypeVar("Class", bound=type)
Value = TypeVar("Value")

PATIENCE_S = 600.0  # with calls of other threads that end by themselves
TRAINING = ("fit", "train_on_batch")
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
            if len(self.turn.methods) > 1:
                return method(self, *args, **settings)
            self.end_interrupted()
            with ending_calls(), ending_name_scopes():
                return method(self, *args, **settings)

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


OWN_THREADS = "pipetrain"  # how the names of the package's threads begin: they may use what stages share with the model


class VariableWatch:
    """Brings values back before the program reads or writes the variables that they belong to.

    Every use from Python is noticed (of a variable of Keras, of TensorFlow's in it, by an operation, a layer, or a
    function that is traced), and every call of a function that has been traced with one. While nothing is used, it
    costs nothing but two assignments a step.

    Args:
        back: brings the values back, and ends the watch; called in the thread that began it, at the first use.

    Raises:
        RuntimeError: in any other thread of the program that uses a variable meanwhile.
    """

    def __init__(self, back: Callable[[], None]) -> None:
        self._back = back
        self._variables: list[Any] = []
        self._handles: frozenset[int] = frozenset()
        self._names: dict[int, str] = {}
        self._rests, self._thread, self._ident = True, threading.current_thread(), 0

    def begin(self, variables: Callable[[], Iterable[Any]], counts: Iterable[Any] = ()) -> None:
        """From here on the program is not to use these variables as they are; what has begun goes on after a rest.

        The ``counts`` are up to date: they may be read.
        """
        if not self._variables:
            self._thread, self._ident = threading.current_thread(), threading.get_ident()
            known = [(each, held_by(each)) for each in (*variables(), *counts)]
            self._names = {id(held): getattr(each, "path", each.name) for each, held in known}
            self._variables = list({id(held): held for _, held in known}.values())  # an interrupt finds them all
            read = {id(held_by(each)) for each in counts}
            for variable in self._variables:
                watch(variable, self._used, id(variable) not in read)
            self._handles = frozenset(id(handle_of(each)) for each in self._variables if id(each) not in read)
            WatchedCalls.listen(self._called)
        self._rests = False

    def rest(self) -> None:
        """Until ``begin`` this thread may use the variables as they are: it is at work on what has the values."""
        self._rests = True

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Meanwhile this thread may use the variables as they are."""
        before, self._rests = self._rests, True
        try:
            yield
        finally:
            self._rests = before

    def end(self) -> None:
        """The values are about to be back. An interrupt within leaves it to be done again.

        Raises RuntimeError in another thread than the one that began it, unless that has ended.
        """
        if self._variables and threading.get_ident() != self._ident and self._thread.is_alive():
            raise _elsewhere("what needs the weights of all minibatches so far")
        WatchedCalls.cease(self._called)
        for variable in self._variables:
            unwatch(variable)
        self._variables, self._handles = [], frozenset()

    def _called(self, inputs: Sequence[Any]) -> None:
        """A function is about to run, in any thread."""
        if self._rests and threading.get_ident() == self._ident:
            return
        if not self._handles.isdisjoint(map(id, inputs)):
            handles = {id(each) for each in inputs}
            self._used(next(each for each in self._variables if id(handle_of(each)) in handles))

    def _used(self, variable: Any) -> None:
        """A variable is about to be used, in any thread."""
        if threading.get_ident() == self._ident:
            if not self._rests:
                with tf.init_scope(), outside_scopes():
                    self._back()
        elif not threading.current_thread().name.startswith(OWN_THREADS):
            raise _elsewhere(f"a use of variable {self._names.get(id(variable))!r}")


def _elsewhere(what: str) -> RuntimeError:
    return RuntimeError(
        "While fit runs in one thread, others find no weights in the model: the stages have newer ones. Received: "
        f"{what}, in thread {threading.current_thread().name!r}. Try it in a callback, or after fit."
    )
