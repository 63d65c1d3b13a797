"""A Keras model around another one, with what that one has: each public method and property of ``keras.Model``.

Every one of them is in a table here, or in ``refusals.REPLACED``; those of optimizers are in
``pipetrain.compute.optimizer.clone``. ``tests/fit/test_keras_methods.py`` goes through all that Keras has, so that what
a new version adds is noticed until it is decided.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import Any

import keras

from pipetrain.compute.keras_private import COMPILED as LENT
from pipetrain.compute.keras_private import OF_LOOP, HookedModel
from pipetrain.frontend.compilation import without_one_step
from pipetrain.frontend.strategy import Strategy

# The wrapped model's, as its class has them.
DELEGATED = (
    *("add_loss", "add_variable", "add_weight", "build_from_config", "compute_mask", "compute_output_shape"),
    *("compute_output_spec", "count_params", "get_build_config", "get_layer", "get_quantization_layer_structure"),
    *("input", "input_dtype", "input_spec", "layers", "output", "rematerialized_call", "stateless_call"),
    *("supports_masking", "symbolic_call", "to_json"),
)
# Likewise; they read the weights, so all minibatches so far are applied first.
DRAINED = ("export",)
# Likewise, of the wrapped model compiled as the PipelineModel is.
COMPILED = ("compute_metrics", "get_compile_config", "metrics", "metrics_names")
# Written out, with the wrapped model's own at their end.
OWN = (
    *("call", "compile", "compile_from_config", "get_metrics_result", "get_state_tree", "get_weights", "load_weights"),
    *("predict_on_batch", "reset_metrics", "save", "save_weights", "set_state_tree", "set_weights", "summary"),
)
# Of these the PipelineModel has Keras' own: the wrapped model is its one layer. Training asks no model for them.
KEPT = (
    *("add_metric", "build", "compute_dtype", "dtype", "dtype_policy", "distribute_reduction_method", "from_config"),
    *("jit_compile", "load_own_variables", "loss", "path", "quantization_mode", "quantized_build", "quantized_call"),
    *("run_eagerly", "save_own_variables", "stateless_compute_loss", "variable_dtype"),
)
# What cannot be done with it, and what to try; the wrapped model's class may override them.
ABSENT = {
    "get_config": ("copied, pickled or described", "save(path), which writes a file for keras.models.load_model"),
    "quantize": (
        "quantized, since its stages would go on with the weights before",
        "quantize of .model after training",
    ),
}
OF_SEQUENTIAL = dict.fromkeys(("add", "pop"), ("given other layers, since these are cut", "it before it is wrapped"))
# A model that overrides one of these predicts by itself, on its own device, all minibatches so far applied.
PREDICTING = ("predict", "predict_step")


class WrappedModel(HookedModel):
    """What Keras' methods, or a class of the user's or of KerasHub's, do with a model, the wrapped one does.

    Its own attributes, such as a task's ``backbone`` and ``preprocessor``, are read and set here as there. Weights and
    files are its own, all minibatches so far applied.

    ``inner`` is the model whose variables Keras sees: the wrapped one, or a copy of it.
    """

    _strategy: Strategy
    inner: keras.Model

    @property
    def model(self) -> keras.Model:
        """The wrapped model."""
        return self._strategy.model

    def __getattr__(self, name: str) -> Any:
        """An attribute that only the wrapped model has; a method of it finds all minibatches so far applied."""
        if name.startswith("_") or "_strategy" not in vars(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        value = getattr(self.model, name)
        if name in OF_SEQUENTIAL:
            raise _absent(self, name, *OF_SEQUENTIAL[name])
        return _drained(self, value) if inspect.ismethod(value) else value

    def __setattr__(self, name: str, value: Any) -> None:
        if self._is_the_models(name):
            setattr(self.model, name, value)
        else:
            super().__setattr__(name, value)

    def _is_the_models(self, name: str) -> bool:
        """Whether an attribute is one that only the wrapped model has, and that is nothing of Keras' loop."""
        if name.startswith("_") or name in OF_LOOP or "_strategy" not in vars(self):
            return False
        return not (name in vars(self) or hasattr(type(self), name)) and hasattr(self.model, name)

    @contextmanager
    def at_rest(self) -> Iterator[keras.Model]:
        """The wrapped model, all minibatches so far applied."""
        self._strategy.drain()
        yield self.model

    @contextmanager
    def _as_it_is(self) -> Iterator[keras.Model]:
        yield self.model

    def _compiled_within(self) -> AbstractContextManager[keras.Model]:
        """The model whose variables Keras sees, compiled meanwhile as this one is."""
        return compiled_as(self.inner, self)

    def get_weights(self) -> Any:
        """The wrapped model's weights, all minibatches so far applied."""
        self._strategy.drain()
        return self.model.get_weights()

    def set_weights(self, weights: Any) -> None:
        """Set the wrapped model's weights, in its order."""
        with self._strategy.changing():
            self.model.set_weights(weights)

    def save(self, filepath: Any, *args: Any, **settings: Any) -> None:
        """Save the wrapped model, compiled as this one is: an ordinary Keras file, which needs no pipetrain to load."""
        self._strategy.drain()
        with self._compiled_alone() as model:
            model.save(filepath, *args, **settings)

    def save_weights(self, filepath: Any, *args: Any, **settings: Any) -> None:
        """Save the wrapped model's weights and the optimizer's slots, as Keras' own ``save_weights`` does."""
        self._strategy.drain()
        with self._compiled_alone() as model:
            model.save_weights(filepath, *args, **settings)

    def load_weights(self, filepath: Any, *args: Any, **settings: Any) -> None:
        """Load the wrapped model's weights, and the optimizer's slots if it is built, as Keras' own does."""
        with self._strategy.changing(), self._compiled_alone() as model:
            model.load_weights(filepath, *args, **settings)

    def get_state_tree(self, *args: Any, **settings: Any) -> Any:
        """Keras' ``get_state_tree`` of the wrapped model, compiled as this one is."""
        self._strategy.drain()
        with self._compiled_alone() as model:
            return model.get_state_tree(*args, **settings)

    def set_state_tree(self, state_tree: Any) -> None:
        """Keras' ``set_state_tree`` of the wrapped model, compiled as this one is."""
        with self._strategy.changing(), self._compiled_alone() as model:
            model.set_state_tree(state_tree)

    @contextmanager
    def _compiled_alone(self) -> Iterator[keras.Model]:
        """The wrapped model, compiled meanwhile as this one is: for Keras, one that trained."""
        with compiled_as(self.model, self) as model:
            yield model

    def compile_from_config(self, config: Any) -> None:
        """``compile`` as another model was, by what its ``get_compile_config`` gives."""
        self.compile(**without_one_step(keras.saving.deserialize_keras_object(config)))


Lend = Callable[[Any], AbstractContextManager[keras.Model]]


def _delegated(name: str, lend: Lend) -> Any:
    """Keras' method or property of this name, of the model that is lent for it."""
    own = inspect.getattr_static(keras.Model, name)
    if not isinstance(own, property):

        @wraps(own)
        def call(self: WrappedModel, *args: Any, **settings: Any) -> Any:
            with lend(self) as model:
                return getattr(model, name)(*args, **settings)

        return call

    def read(self: WrappedModel) -> Any:
        with lend(self) as model:
            return getattr(model, name)

    def write(self: WrappedModel, value: Any) -> None:
        setattr(self.model, name, value)

    return property(read, write if own.fset else None, doc=own.__doc__)


def _refusing(name: str, what: str, remedy: str) -> Any:
    @wraps(getattr(keras.Model, name))
    def call(self: WrappedModel, *_: Any, **__: Any) -> Any:
        raise _absent(self, name, what, remedy)

    return call


def _drained(owner: WrappedModel, method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def call(*args: Any, **settings: Any) -> Any:
        with owner.at_rest():
            return method(*args, **settings)

    return call


def _absent(owner: keras.Model, name: str, what: str, remedy: str) -> ValueError:
    return ValueError(f"A PipelineModel cannot be {what}. Received: {name} of {owner.name!r}. Try {remedy}.")


@contextmanager
def compiled_as(model: keras.Model, other: keras.Model) -> Iterator[keras.Model]:
    """The model, which meanwhile is compiled as the other one is, with its very optimizer and metrics.

    They are set past Keras, which would go on tracking what they hold.
    """
    mine, theirs = vars(model), vars(other)
    lent = {name: theirs[name] for name in LENT if name in theirs} if other.compiled else {}
    before = {name: mine[name] for name in lent if name in mine}
    try:
        mine.update(lent)
        yield model
    finally:
        for name in lent:
            mine.pop(name, None)
        mine.update(before)


def _fill() -> None:
    """Give the class what the tables say."""
    lent: dict[tuple[str, ...], Lend] = {
        DELEGATED: WrappedModel._as_it_is,
        DRAINED: WrappedModel.at_rest,
        COMPILED: WrappedModel._compiled_within,
    }
    for names, lend in lent.items():
        for name in names:
            if hasattr(keras.Model, name):  # older versions of Keras lack some
                setattr(WrappedModel, name, _delegated(name, lend))
    for name, (what, remedy) in ABSENT.items():
        setattr(WrappedModel, name, _refusing(name, what, remedy))


_fill()
