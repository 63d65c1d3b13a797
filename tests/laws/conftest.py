"""A law that asks for a way is tried with every way to train, unless it says over which ones."""

from __future__ import annotations


def pytest_generate_tests(metafunc):
    from ways_to_train import WAYS  # makes tensors

    said = [name for mark in metafunc.definition.iter_markers("parametrize") for name in _names(mark.args[0])]
    if "way" in metafunc.fixturenames and "way" not in said:
        metafunc.parametrize("way", WAYS)


def _names(given):
    return given.split(",") if isinstance(given, str) else given
