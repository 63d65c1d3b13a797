"""The tutorial runs from top to bottom."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TUTORIAL = ROOT / "docs" / "tutorial.ipynb"


@pytest.mark.wide  # a minute
def test_the_tutorial_runs(tmp_path, monkeypatch):
    nbformat = pytest.importorskip("nbformat", reason="needs nbclient")
    nbclient = pytest.importorskip("nbclient")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    notebook = nbformat.read(TUTORIAL, as_version=4)
    resources = {"metadata": {"path": str(TUTORIAL.parent)}}
    nbclient.NotebookClient(notebook, timeout=250, kernel_name="python3", resources=resources).execute()
    shown = [each for cell in notebook.cells if cell.cell_type == "code" for each in cell.outputs]
    pictures = [each for each in shown if "image/png" in each.get("data", {})]
    assert len(pictures) == 5
    assert float(shown[-1]["data"]["text/plain"]) < 1e-3
