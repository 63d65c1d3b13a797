"""Four logical CPU devices for every test, and networks and data to train on."""

from __future__ import annotations

import gc
import os
import sys
import threading
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

# A tenth of all tests' time went into looking for garbage among the modules, which stay, and among graphs being traced.
gc.set_threshold(50_000, 10, 10)

import pytest  # noqa: E402

import pipetrain  # noqa: E402
from pipetrain.compute.profiling import block_timing  # noqa: E402

pipetrain.set_cpu_devices(6)
gc.freeze()

GPU_MIB = 2048  # of each logical GPU


def pytest_configure(config):
    """With ``-m gpu``, the first card is four logical devices; before TensorFlow starts, or never.

    XLA then makes no kernels for GPUs that add in any order.
    """
    if config.option.markexpr != "gpu":
        return
    import tensorflow as tf

    os.environ.setdefault("XLA_FLAGS", "--xla_gpu_deterministic_ops=true")
    if cards := tf.config.list_physical_devices("GPU"):
        parts = [tf.config.LogicalDeviceConfiguration(memory_limit=GPU_MIB)] * 4
        tf.config.set_logical_device_configuration(cards[0], parts)


@pytest.fixture(autouse=True)
def no_thread_left():
    """No test may leave a stage's thread behind."""
    yield
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("pipetrain")]
    assert not left


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory):
    """Profiles of the tests' models stay out of the user's cache; the suite's processes share them."""
    folder = tmp_path_factory.getbasetemp()
    shared = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    os.environ["XDG_CACHE_HOME"] = str(shared / "cache")


@pytest.fixture(autouse=True)
def rough_profiles(request, monkeypatch):
    """Few walks decide where a test's model is cut, on a machine that the tests keep busy; not where ``measures``."""
    if request.node.get_closest_marker("measures") is None:
        monkeypatch.setattr(block_timing, "MEASURE_S", 0.01)
        monkeypatch.setattr(block_timing, "AT_MOST_S", 0.1)
