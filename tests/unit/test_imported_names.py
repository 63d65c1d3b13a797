"""Programs beside the package import names that it has: nothing else imports them all."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = [
    path
    for folder in ("benchmarks", "experiments", "plots", "examples", "models")
    for path in (ROOT / folder).glob("*.py")
]


def defined(path):
    """The names that a module has at its top level; of the package itself those it gives on demand."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(each.asname or each.name).split(".")[0] for each in node.names}
    return found


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_imported_name_is_there(path):
    wrong = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("pipetrain"):
            continue
        place = ROOT / node.module.replace(".", "/")
        for name in (each.name for each in node.names):
            if (place / f"{name}.py").is_file() or (place / name).is_dir():
                continue
            module = place.with_suffix(".py") if place.with_suffix(".py").is_file() else place / "__init__.py"
            if not module.is_file() or name not in defined(module):
                wrong.append(f"{node.module}.{name}")
    assert not wrong
