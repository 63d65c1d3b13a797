"""Notices who uses variables while their values are somewhere else: a stage has newer ones."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from pipetrain.compute.keras_private import held_by, outside_scopes
from pipetrain.compute.tensorflow_private import WatchedCalls, handle_of, unwatch, watch

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
