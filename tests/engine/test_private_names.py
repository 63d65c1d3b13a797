"""Private names of Keras and TensorFlow are in two adapters alone, so that new versions of them are met there."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import keras
import networks
import pytest
import tensorflow as tf

import pipetrain
from pipetrain.compute import keras_private, tensorflow_private

ROOT = Path(__file__).parents[2]
ADAPTERS = {ROOT / "pipetrain/compute/keras_private.py", ROOT / "pipetrain/compute/tensorflow_private.py"}
ROOMS = ("pipetrain", "experiments", "models", "plots")
SOURCES = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
PUBLIC = {"_replace", "_asdict", "_fields", "_make", "_exit"}  # of named tuples and of os
BY_NAME = {"getattr", "setattr", "hasattr", "delattr", "attrgetter"}  # functions that take an attribute's name


def private(name):
    return name.startswith("_") and not name.startswith("__") and name not in PUBLIC


def is_self(node):
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def own_names(tree):
    """What a module itself defines: functions, classes, attributes of classes and of ``self``."""
    found = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.Attribute(value=value, attr=name, ctx=ast.Store()) if is_self(value):
                found.add(name)
        if isinstance(node, ast.ClassDef):
            stored = (each for line in node.body for each in ast.walk(line) if not isinstance(line, ast.FunctionDef))
            found.update(each.id for each in stored if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store))
    return found


def attribute_names(node, inherited):
    """What a node reads or writes by a private name, if it does; of ``self`` unless it is ``inherited``."""
    match node:
        case ast.Attribute(value=value, attr=name) if private(name) and not (is_self(value) and name in inherited):
            yield name
        case ast.Call(func=ast.Name(id=function) | ast.Attribute(attr=function), args=args) if function in BY_NAME:
            names = (each.value for each in args if isinstance(each, ast.Constant))
            yield from (name for name in names if private(str(name)))


def module_names(node):
    """What a node names that may be a module, in code or as text."""
    match node:
        case ast.Attribute():
            yield ast.unparse(node)
        case ast.Constant(value=str(text)):
            yield text
        case ast.Import(names=names):
            yield from (each.name for each in names)
        case ast.ImportFrom(module=module, names=names):
            yield from (f"{module}.{each.name}" for each in names)


def is_internal(module):
    return re.match(r"(keras|tensorflow|tf)\.(src|python|_(?!_version__)\w+)\b", module) is not None


def strangers(source, inherited=frozenset()):
    """Lines of a module that use private names of others, each with what it uses.

    Of ``self``, attributes of base classes are the package's own if they are among the ``inherited``.
    """
    tree = ast.parse(source)
    own = own_names(tree)
    for node in ast.walk(tree):
        foreign = any(name not in own for name in attribute_names(node, inherited))
        if foreign or any(map(is_internal, module_names(node))):
            yield node.lineno, ast.unparse(node)


@pytest.mark.wide
def test_private_names_of_others_are_in_the_adapters():
    sources = {path: path.read_text(encoding="utf-8") for path in SOURCES if path not in ADAPTERS}
    inherited = frozenset().union(*(own_names(ast.parse(source)) for source in sources.values()))
    found = [
        f"{path.relative_to(ROOT)}:{line}: {what}"
        for path, source in sources.items()
        for line, what in strangers(source, inherited)
    ]
    assert found == []


@pytest.mark.parametrize(
    "line",
    [
        "optimizer._iterations",
        "self._compile_loss",
        "getattr(value, '_keras_mask', None)",
        "hasattr(each, '_tracker')",
        "operator.attrgetter('_id')(operation)",
        "tf.__internal__.tracking",
        "keras.src.backend",
        "kind.__module__.startswith('keras.src.')",
        "import keras.src.backend",
        "from keras.src import backend",
        "from keras import src",
        "from tensorflow.python.eager import context",
        "from tensorflow import _api",
    ],
)
def test_private_names_are_found(line):
    assert {number for number, _ in strangers(f"import keras\n{line}\n", {"_iterations"})} == {2}


def test_own_private_names_are_no_strangers():
    source = "class A:\n    def _f(self):\n        self._x = 1\n        return self._f, other._x, self._of_base\n"
    assert [*strangers(source, {"_of_base"})] == []


def classes():
    """Every class that the package defines."""
    for module in pkgutil.walk_packages(pipetrain.__path__, "pipetrain."):
        if not module.name.endswith("__main__"):
            for each in vars(importlib.import_module(module.name)).values():
                if inspect.isclass(each) and each.__module__ == module.name:
                    yield each


def private_names(kind):
    """The private names that a class defines or gives its objects, by its source."""
    try:
        found = own_names(ast.parse(textwrap.dedent(inspect.getsource(kind))))
    except (OSError, TypeError):  # compiled
        found = set()
    return {name for name in found | set(vars(kind)) if private(name)}


def overridden(kind):
    """Private names of a class that Keras or TensorFlow use too, for a base of its."""
    bases = [base for base in kind.__mro__ if base.__module__.split(".")[0] in ("keras", "tensorflow")]
    names = private_names(kind) - {"_abc_impl"}  # which every abstract class has one of
    return sorted(names.intersection(*[frozenset().union(*map(private_names, bases))]))


@pytest.mark.wide
def test_no_class_takes_a_private_name_of_its_base_in_keras():
    # A method would be called, or an attribute changed, by Keras as if it were Keras' own.
    known = {keras_private.HookedModel, keras_private.HookedMuon, tensorflow_private.WatchedVariable}
    taken = {each.__qualname__: overridden(each) for each in classes() if each not in known}
    assert {name: names for name, names in taken.items() if names} == {}
    assert overridden(tensorflow_private.WatchedVariable) == ["_handle"]
    assert overridden(keras_private.HookedMuon) == ["_should_use_adamw"]
    assert overridden(keras_private.HookedModel) == ["_get_metrics_result_or_logs", "_maybe_symbolic_build"]


def test_private_names_that_a_class_takes_are_found():
    class Taking(keras.Layer):
        def __init__(self):
            super().__init__()
            self._losses = self._something_else = []

        def _get_call_context(self):
            return None

    assert overridden(Taking) == ["_get_call_context", "_losses"]
    assert overridden(type("Plain", (tf.Module,), {"_something_else": 1})) == []


@pytest.mark.parametrize("path", sorted(ADAPTERS), ids=lambda path: path.stem)
def test_every_adapter_says_what_each_is_for(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    assert functions
    assert all(ast.get_docstring(each) for each in functions)


@pytest.mark.parametrize("before", [lambda: None, keras.utils.clear_session])
def test_a_call_in_another_thread_draws_and_leaves_the_seed_as_in_this_one(before):
    """Also the first one after a seed or a session begins anew, and in a thread in which something was drawn before."""

    def draw():
        return float(keras.random.normal((1,))[0])

    def begin_anew():
        networks.draw_from(1)  # set_random_seed does this too, but not that of older versions
        keras.utils.set_random_seed(1)

    begin_anew()
    expected = draw(), draw()
    with ThreadPoolExecutor(1) as other:
        other.submit(draw).result()
        for _ in range(2):
            before()
            begin_anew()
            drawn = other.submit(keras_private.with_state_of_keras(draw)).result()
            assert (drawn, draw()) == expected
