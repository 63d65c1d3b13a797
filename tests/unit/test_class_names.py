"""Every class of the package has a name of its own, private ones too."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def places(folder):
    """Where each class under the folder is defined, by its name: files with the lines, in order."""
    found = defaultdict(list)
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(f"{path.relative_to(folder.parent).as_posix()}:{node.lineno}")
    return found


def repeated(folder):
    """The names of more than one class, each with the places where these are defined."""
    return [f"{name}: {', '.join(where)}" for name, where in sorted(places(folder).items()) if len(where) > 1]


def test_no_two_classes_have_the_same_name():
    assert len(places(ROOT / "pipetrain")) > 300
    assert not repeated(ROOT / "pipetrain"), "classes of one name: " + "; ".join(repeated(ROOT / "pipetrain"))


def test_classes_of_one_name_are_found_with_their_files(tmp_path):
    within = tmp_path / "package" / "inner"
    within.mkdir(parents=True)
    (tmp_path / "package" / "a.py").write_text("class _Same:\n    pass\n\n\nclass Other:\n    pass\n", encoding="utf-8")
    (within / "b.py").write_text("def made():\n    class _Same:\n        pass\n", encoding="utf-8")
    assert repeated(tmp_path / "package") == ["_Same: package/a.py:1, package/inner/b.py:2"]
