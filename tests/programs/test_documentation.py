"""What the documentation's build takes: it is strict, and shows docstrings."""

from __future__ import annotations

import ast
import inspect
import os
import pydoc
import re
import subprocess
import sys
from pathlib import Path

import pytest

import pipetrain

ROOT = Path(__file__).parents[2]
ENTRY = re.compile(r"^    (\S[^:]*):", re.MULTILINE)  # of a docstring's part, the name that is described


def described(node):
    """The names that the docstring's part Args describes."""
    text = ast.get_docstring(node) or ""
    part = re.search(r"^Args:\n((?:    .*\n?|\n)*)", text, re.MULTILINE)
    return ENTRY.findall(part[1]) if part else []


def taken(node, classes):
    """The names that a function, or a class by its ``__init__`` or its fields, takes; None where they are elsewhere.

    A class has the fields of its bases too, as far as these are among ``classes``, by name.
    """
    if isinstance(node, ast.FunctionDef):
        given = node.args
        names = {each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)}
        return names | {each.arg for each in (given.vararg, given.kwarg) if each}
    made = [each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"]
    if made:
        return taken(made[0], classes)
    fields = {each.target.id for each in node.body if isinstance(each, ast.AnnAssign)}
    bases = (classes[each.id] for each in node.bases if isinstance(each, ast.Name) and each.id in classes)
    return fields.union(*(taken(base, classes) or () for base in bases)) or None


def shown():
    """The files whose docstrings the reference shows."""
    pages = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "api").glob("*.md"))
    names = re.findall(r"^::: (\S+)", pages, re.MULTILINE)
    return sorted({Path(inspect.getsourcefile(pydoc.locate(name))) for name in names})


def test_every_argument_is_described_by_itself():
    """One that is not in the signature is a warning of the build, which then fails."""
    wrong = []
    for path in shown():
        nodes = [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
        classes = {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}
        for node in nodes:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and (names := described(node)):
                known = taken(node, classes)
                wrong += [f"{path.name}: {node.name}: {name}" for name in names if known and name not in known]
    assert not wrong


def test_every_public_name_has_a_page():
    pages = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "api").glob("*.md"))
    missing = [name for name in pipetrain.__all__ if not re.search(rf"^::: pipetrain\.{name}(\.\w+)?$", pages, re.M)]
    assert missing == []


CHECKS = [ROOT / ".ci" / "run", ROOT / ".github" / "workflows" / "checks.yml"]


@pytest.mark.parametrize("path", CHECKS, ids=lambda path: path.name)
def test_the_build_is_strict(path):
    """With -q mkdocs counts no warnings."""
    (line,) = [line for line in path.read_text(encoding="utf-8").splitlines() if "mkdocs" in line]
    options = line.partition("#")[0].split()
    assert "--strict" in options and not {"-q", "--quiet"} & {*options}


def test_github_runs_the_linters_of_ci():
    ours, theirs = (path.read_text(encoding="utf-8") for path in CHECKS)
    linters = re.findall(r'^(?:PYTHONPATH=\. )?"\$bin/(ruff|mypy|lint-imports)"(.*)$', ours, re.MULTILINE)
    assert len(linters) == 5
    assert not [program for program in map("".join, linters) if f"- run: {program}\n" not in theirs]


def test_figures_of_the_readme_are_those_of_the_benchmarks():
    table = (
        (ROOT / "README.md").read_text(encoding="utf-8").partition("## What it brings")[2].partition("## Install")[0]
    )
    pages = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "benchmarks").glob("*.md"))
    figures = re.findall(r"\d+\.\d\dx", table)
    assert len(figures) > 10
    assert [each for each in figures if each[:-1] not in pages] == []


@pytest.mark.wide  # half a minute
def test_the_first_program_of_the_readme_runs(tmp_path):
    """As it stands, and where nothing else is."""
    (program,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S)
    (tmp_path / "train.py").write_text(program, encoding="utf-8")
    subprocess.run(
        [sys.executable, "train.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path)},
        check=True,
        timeout=280,
    )
    assert {"timeline.png", "model.keras"} <= {path.name for path in tmp_path.iterdir()}
