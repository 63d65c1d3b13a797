"""A law that asks for a way is tried with every way to train, unless it says over which ones."""

from __future__ import annotations


def pytest_generate_tests(metafunc):
    from ways_to_train import WAYS  # makes tensors

    said = [mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")]
    if "way" in metafunc.fixturenames and "way" not in said:
        metafunc.parametrize("way", WAYS)
