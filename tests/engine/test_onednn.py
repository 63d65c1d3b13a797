"""oneDNN's kernels are on where they serve, unless the user has decided or TensorFlow was there first."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import keras
import pytest

import pipetrain
from pipetrain.compute import processor

ROOT = Path(__file__).parents[2]
PROCESSORS = {
    "fma": "fpu sse4_2 avx avx2 fma",
    "fma and vnni": "fpu avx2 fma avx512f avx512_vnni",
    "fma and avx_vnni": "fpu avx2 fma avx_vnni",
    "old": "fpu sse4_2",
}


def described(path, name):
    path.write_text(f"processor : 0\nmodel name : made up\nflags\t\t: {PROCESSORS[name]}\n\nprocessor : 1\n")
    return path


@pytest.fixture
def on(monkeypatch, tmp_path):
    """Pretends to be a processor on which TensorFlow is not loaded yet."""

    def on(name, loaded=False):
        path = tmp_path / "cpuinfo"
        monkeypatch.setattr(processor, "PATH", described(path, name) if name else path)
        monkeypatch.delenv(processor.VARIABLE, raising=False)
        monkeypatch.setattr(processor, "_came_late", False)
        if not loaded:
            monkeypatch.delitem(sys.modules, "tensorflow")

    return on


@pytest.mark.parametrize(
    ("name", "value"), [("fma", "1"), ("fma and vnni", None), ("fma and avx_vnni", None), ("old", None), (None, None)]
)
def test_it_is_on_where_tensorflow_leaves_fused_multiply_adds_unused(name, value, on):
    on(name)
    processor.switch_on()
    assert os.environ.get(processor.VARIABLE) == value
    assert not processor.left_out()


@pytest.mark.parametrize("value", ["0", "1"])
def test_what_the_user_has_set_stays(value, on, monkeypatch):
    on("fma")
    monkeypatch.setenv(processor.VARIABLE, value)
    processor.switch_on()
    assert os.environ[processor.VARIABLE] == value


@pytest.mark.wide
@pytest.mark.parametrize(("name", "said"), [("fma", True), ("fma and vnni", False), ("old", False)])
def test_too_late_explain_says_so(name, said, on):
    on(name, loaded=True)
    processor.switch_on()
    assert processor.VARIABLE not in os.environ
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2), keras.layers.Dense(2)])
    line = "Import pipetrain before tensorflow and keras, or set TF_ENABLE_ONEDNN_OPTS=1."
    assert pipetrain.PipelineModel(model, stages=2, scheme="spectrain").explain(8).endswith(line) == said


@pytest.mark.wide
@pytest.mark.parametrize(
    ("imports", "value"),
    [(["pipetrain", "keras"], "1"), pytest.param(["keras", "pipetrain"], None, marks=pytest.mark.slow)],
)
def test_a_program_imports_pipetrain_first(imports, value, tmp_path):
    """Here as where TensorFlow reads the variable: in a fresh process."""
    program = f"""
import os, pathlib, sys
read_text = pathlib.Path.read_text
cpuinfo = pathlib.Path({str(described(tmp_path / "cpuinfo", "fma"))!r})
pathlib.Path.read_text = lambda path, **given: read_text(cpuinfo if "cpuinfo" in str(path) else path, **given)
{"; ".join(f"import {each}" for each in imports)}
print(os.environ.get("{processor.VARIABLE}"))
"""
    environment = {name: text for name, text in os.environ.items() if name != processor.VARIABLE}
    environment["PYTHONPATH"] = str(ROOT)
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.split() == [str(value)]


@pytest.mark.parametrize("program", ["pipetrain/__main__.py", "experiments/run.py"])
def test_programs_import_it_before_tensorflow(program):
    """Whatever they import afterwards."""
    lines = (ROOT / program).read_text().splitlines()
    imports = [line.split()[1] for line in lines if line.startswith(("import ", "from "))]
    first = next(n for n, name in enumerate(imports) if name.split(".")[0] in ("pipetrain", "experiments"))
    assert not {"keras", "tensorflow"} & {name.split(".")[0] for name in imports[:first]}
