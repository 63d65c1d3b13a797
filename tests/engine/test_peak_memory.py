"""The memory that the plan estimates, against that of a real run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.wide
@pytest.mark.parametrize(
    "onednn",
    [pytest.param("0", id="TensorFlow's kernels"), pytest.param("1", id="oneDNN's kernels", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize(
    ("network", "scheme", "nesterov"),
    [
        ("snn", "spectrain", ""),
        *(
            pytest.param(network, scheme, "", marks=pytest.mark.slow)
            for network in ("dense", "snn", "vgg16", "resnet", "transformer")
            for scheme in ("spectrain", "weight-stashing")
            if (network, scheme) != ("snn", "spectrain")
        ),
        *(pytest.param("vgg16", scheme, "", marks=pytest.mark.slow) for scheme in ("gpipe", "1f1b")),
        *(pytest.param("dense", scheme, "nesterov", marks=pytest.mark.slow) for scheme in ("vanilla", "spectrain")),
        *(  # four stages, of which the first and the last one share a weight
            pytest.param("gpt2", scheme, "", marks=pytest.mark.slow)
            for scheme in ("spectrain", "weight-stashing", "1f1b")
        ),
    ],
)
def test_memory_is_what_a_real_run_has_at_its_fullest(network, scheme, nesterov, onednn, tmp_path):
    """The peak depends on which stages are at work at once, most of all where convolutions need large workspaces."""
    script = Path(__file__).parents[1] / "peak_memory.py"
    environment = {**os.environ, "TF_CPU_ALLOCATOR_USE_BFC": "1", "XDG_CACHE_HOME": str(tmp_path)}
    environment["TF_ENABLE_ONEDNN_OPTS"] = onednn
    run = subprocess.run(
        [sys.executable, str(script), network, scheme, nesterov, "4" if network == "gpt2" else "2"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    figures = json.loads(run.stdout.splitlines()[-1])  # after the progress bar
    assert figures["measured"] == pytest.approx(figures["expected"], rel=0.15)
