"""Four logical CPU devices for every test, and networks and data to train on."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import pytest  # noqa: E402

import pipetrain  # noqa: E402

pipetrain.set_cpu_devices(6)


@pytest.fixture(autouse=True)
def no_thread_left():
    """No test may leave a stage's thread behind."""
    yield
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("pipetrain")]
    assert not left


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory):
    """Profiles of the tests' models stay out of the user's cache."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))
