"""The built documentation in a browser: no page is wider than its window, and nothing is fetched from elsewhere."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import page_widths
import pytest

ROOT = Path(__file__).parents[2]
BROWSER = pytest.mark.skipif(page_widths.chromium() is None, reason="needs Chromium")


@BROWSER
@pytest.mark.wide  # starts a browser
def test_what_is_too_wide_is_found(tmp_path):
    (tmp_path / "wide").mkdir()
    (tmp_path / "narrow").mkdir()
    (tmp_path / "wide" / "index.html").write_text('<body><div style="width: 600px">wide</div>')
    (tmp_path / "narrow" / "index.html").write_text("<body><p>narrow")
    found = page_widths.shown(tmp_path)
    assert [each.page for each in found if each.width > each.window] == ["wide/index.html"]
    assert len(found) == 2 * len(page_widths.WIDTHS)


@BROWSER
@pytest.mark.wide  # a minute
def test_pages_are_as_wide_as_their_window(tmp_path):
    pytest.importorskip("material", reason='needs pip install -e ".[docs]"')
    pytest.importorskip("mkdocstrings", reason='needs pip install -e ".[docs]"')
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=120)
    found = page_widths.shown(tmp_path, timeout_s=170)
    assert {each.window for each in found} == {*page_widths.WIDTHS}
    assert [(each.page, each.window, each.reaches) for each in found if each.width > each.window] == []
    assert [(each.page, each.elsewhere) for each in found if each.elsewhere] == []
