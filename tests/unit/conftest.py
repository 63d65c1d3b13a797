"""What is tested here needs no TensorFlow: a test that imports it or Keras fails, and so does a module of tests."""

from __future__ import annotations

import builtins
from contextlib import contextmanager

import pytest

FORBIDDEN = ("tensorflow", "keras")


@contextmanager
def without_tensorflow():
    original = builtins.__import__

    def importing(name, *args, **settings):
        if name.partition(".")[0] in FORBIDDEN:
            pytest.fail(f"{name} is imported where there is to be no TensorFlow")
        return original(name, *args, **settings)

    builtins.__import__ = importing
    try:
        yield
    finally:
        builtins.__import__ = original


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    with without_tensorflow():
        return (yield)


@pytest.fixture(autouse=True)
def no_tensorflow():
    with without_tensorflow():
        yield
