"""Six logical CPU devices for every test that trains; ``tests/unit`` runs without TensorFlow."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from functools import cache
from pathlib import Path

import hypothesis
import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # tests run in as many processes as there are cores, or more
UNIT = Path(__file__).parent / "unit"
GPU_MIB = 2048  # of each logical GPU
BEGUN_S = time.monotonic()
WITHIN_S = "PIPETRAIN_TESTS_WITHIN_S"  # tests that have not begun within so many seconds are skipped

# A tenth of all tests' time went into looking for garbage among the modules, which stay, and among graphs being traced.
gc.set_threshold(50_000, 10, 10)

# A shell lets what it runs in the background ignore this signal, and so would all processes that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)


# How long an example takes is the machine's, which others may load.
hypothesis.settings.register_profile("pipetrain", deadline=None)
hypothesis.settings.load_profile("pipetrain")


def pytest_collectstart(collector):
    if isinstance(collector, pytest.Module) and UNIT not in collector.path.parents:
        start_tensorflow(collector.config.option.markexpr == "gpu")


def pytest_runtest_setup(item):
    within_s = os.environ.get(WITHIN_S)
    if within_s and time.monotonic() - BEGUN_S > float(within_s):
        pytest.skip(f"not begun within {within_s} s, by {WITHIN_S}")


@cache
def start_tensorflow(on_gpus):
    """Make the logical devices, before any test's module makes a tensor.

    With ``-m gpu``, the first card is four logical devices, and XLA makes no kernels for it that add in any order.
    """
    import pipetrain
    from pipetrain.compute.profiling import timing as block_timing  # noqa: F401

    pipetrain.set_cpu_devices(6)
    if on_gpus:
        import tensorflow as tf

        os.environ.setdefault("XLA_FLAGS", "--xla_gpu_deterministic_ops=true")
        if cards := tf.config.list_physical_devices("GPU"):
            parts = [tf.config.LogicalDeviceConfiguration(memory_limit=GPU_MIB)] * 4
            tf.config.set_logical_device_configuration(cards[0], parts)
    gc.freeze()


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
    block_timing = sys.modules.get("pipetrain.compute.profiling.timing")
    if block_timing and request.node.get_closest_marker("measures") is None:
        monkeypatch.setattr(block_timing, "MEASURE_S", 0.01)
        monkeypatch.setattr(block_timing, "AT_MOST_S", 0.1)
