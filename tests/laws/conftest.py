"""A law that asks for a way is tried with every way to train, unless it says over which ones."""

from __future__ import annotations

from pathlib import Path


def pytest_generate_tests(metafunc):
    from ways_to_train import WAYS  # makes tensors

    said = [name for mark in metafunc.definition.iter_markers("parametrize") for name in _names(mark.args[0])]
    if "way" in metafunc.fixturenames and "way" not in said:
        metafunc.parametrize("way", WAYS)


def _names(given):
    return given.split(",") if isinstance(given, str) else given


def pytest_collection_modifyitems(items):
    """All laws of one way follow each other: what is compiled for it, the laws that a process tries share."""
    places = [place for place, item in enumerate(items) if Path(__file__).parent in item.path.parents]
    by_way = sorted((items[place] for place in places), key=_way)
    for place, item in zip(places, by_way, strict=True):
        items[place] = item


def _way(item):
    return str(item.callspec.params.get("way", "")) if hasattr(item, "callspec") else ""
