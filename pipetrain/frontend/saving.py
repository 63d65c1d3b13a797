"""Saving, loading and describing: the wrapped model's, as if it had been compiled, and trained, by itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras

from pipetrain.frontend.compile_arguments import without_one_step
from pipetrain.frontend.delegation import DelegationMixin, compiled_as


class SavingMixin(DelegationMixin):
    """Weights and files are those of the wrapped model, all minibatches so far applied."""

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
