"""The table of faults fits the source; ``tests/mutants/run.py`` shows which tests notice them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from mutants.faults import FAULTS

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_fault_fits_the_source(fault):
    text = (ROOT / fault.file).read_text(encoding="utf-8")
    assert text.count(fault.before) == 1, f"{fault.before!r} in {fault.file}"
    ast.parse(text.replace(fault.before, fault.after))


def test_faults_are_different_and_there_are_enough():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 66
    assert len({fault[1:3] for fault in FAULTS}) == len(FAULTS)
    assert all(fault.before != fault.after and fault.protects for fault in FAULTS)
