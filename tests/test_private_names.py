"""Private names of Keras and TensorFlow are in two adapters alone, so that new versions of them are met there."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ADAPTERS = {ROOT / "pipetrain/compute/keras_private.py", ROOT / "pipetrain/compute/tensorflow_private.py"}
ROOMS = ("pipetrain", "experiments", "models", "plots")
SOURCES = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
PUBLIC = {"_replace", "_asdict", "_fields", "_make", "_exit"}  # of named tuples and of os


def private(name):
    return name.startswith("_") and not name.startswith("__") and name not in PUBLIC


def own_names(trees):
    """What the package itself defines: functions, classes, attributes of ``self``, fields and slots."""
    found = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                found.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
    return found


def test_private_names_of_others_are_in_the_adapters():
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES if path not in ADAPTERS}
    own, strangers = own_names(trees.values()), []
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and private(node.attr) and node.attr not in own:
                strangers.append(f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}")
            if isinstance(node, ast.Import | ast.ImportFrom):
                modules = [getattr(node, "module", None) or "", *(each.name for each in node.names)]
                strangers += [
                    f"{path.relative_to(ROOT)}:{node.lineno}: {module}"
                    for module in modules
                    if module.startswith(("keras.src", "tensorflow.python"))
                ]
    assert strangers == []


@pytest.mark.parametrize("path", sorted(ADAPTERS), ids=lambda path: path.stem)
def test_every_adapter_says_what_each_is_for(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    assert functions
    assert all(ast.get_docstring(each) for each in functions)
