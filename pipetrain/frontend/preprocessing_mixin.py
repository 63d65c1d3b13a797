"""Models that preprocess what they are given, such as keras_hub's task models: strings in, tokens to the pipeline."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from pipetrain.compute.keras_private import OF_FIT
from pipetrain.frontend.strategy_model import StrategyModel

DEFAULT_BATCH = 32  # rows, as Keras has it


class PreprocessingMixin(StrategyModel):
    """``fit``, ``evaluate`` and ``predict`` take what the wrapped model's own take.

    A model that has a ``preprocessor`` and ``preprocess_samples(x, y, sample_weight)`` is given minibatches as they
    come, strings or pictures, and makes of them what its layers read, in the data pipeline. As there, arrays are then
    read in their order, not shuffled.
    """

    def fit(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: Any = "auto",
        callbacks: Any = None,
        validation_split: float = 0.0,
        validation_data: Any = None,
        shuffle: Any = True,
        class_weight: Any = None,
        sample_weight: Any = None,
        **settings: Any,
    ) -> Any:
        """Keras' ``fit``, of what the wrapped model preprocesses too."""
        if self._preprocesses:
            shuffle = False
            if validation_split:
                raise ValueError(
                    "What is preprocessed is not split. Received: "
                    f"validation_split={validation_split!r}. Try validation_data=(x, y)."
                )
            if validation_data is not None:
                rows = settings.pop("validation_batch_size", None) or batch_size
                is_dataset = isinstance(validation_data, tf.data.Dataset)
                parts = (validation_data,) if is_dataset else tuple(validation_data)
                x_of, y_of, weights_of = (*parts, None, None)[:3]
                validation_data, _, _ = self._minibatches(x_of, y_of, weights_of, rows)
            x, y, sample_weight, batch_size = *self._minibatches(x, y, sample_weight, batch_size), None
        settings |= {"shuffle": shuffle, "class_weight": class_weight}
        settings |= {"validation_split": validation_split, "validation_data": validation_data}
        return super().fit(x, y, batch_size, epochs, verbose, callbacks, sample_weight=sample_weight, **settings)

    def evaluate(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        verbose: Any = "auto",
        sample_weight: Any = None,
        steps: int | None = None,
        callbacks: Any = None,
        return_dict: bool = False,
        **settings: Any,
    ) -> Any:
        """Keras' ``evaluate``, of what the wrapped model preprocesses too."""
        if self._preprocesses and not settings.get(OF_FIT):  # whose validation data have been preprocessed
            x, y, sample_weight, batch_size = *self._minibatches(x, y, sample_weight, batch_size), None
        return super().evaluate(x, y, batch_size, verbose, sample_weight, steps, callbacks, return_dict, **settings)

    def predict(
        self,
        x: Any,
        batch_size: int | None = None,
        verbose: Any = "auto",
        steps: int | None = None,
        callbacks: Any = None,
    ) -> Any:
        """Keras' ``predict``, of what the wrapped model preprocesses too."""
        if self._preprocesses:
            x, batch_size = self._minibatches(x, None, None, batch_size)[0], None
        return super().predict(x, batch_size, verbose, steps, callbacks)

    def train_on_batch(
        self, x: Any, y: Any = None, sample_weight: Any = None, class_weight: Any = None, return_dict: bool = False
    ) -> Any:
        """Keras' ``train_on_batch``, of what the wrapped model preprocesses too."""
        if self._preprocesses:
            x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(self._of_model(x, y, sample_weight))
        return super().train_on_batch(x, y, sample_weight, class_weight, return_dict)

    def test_on_batch(self, x: Any, y: Any = None, sample_weight: Any = None, return_dict: bool = False) -> Any:
        """Keras' ``test_on_batch``, of what the wrapped model preprocesses too."""
        if self._preprocesses:
            x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(self._of_model(x, y, sample_weight))
        return super().test_on_batch(x, y, sample_weight, return_dict)

    @property
    def _preprocesses(self) -> bool:
        return getattr(self.model, "preprocessor", None) is not None and hasattr(self.model, "preprocess_samples")

    def _minibatches(self, x: Any, y: Any, sample_weight: Any, batch_size: int | None) -> tuple[Any, None, None]:
        """The preprocessed minibatches, as the first three arguments of ``fit``."""
        if isinstance(x, tf.data.Dataset):
            given = x
        else:
            packed = keras.utils.pack_x_y_sample_weight(x, y, sample_weight)
            given = tf.data.Dataset.from_tensor_slices(packed).batch(batch_size or DEFAULT_BATCH)
        return given.map(self._of_model, num_parallel_calls=tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE), None, None

    def _of_model(self, x: Any, y: Any = None, sample_weight: Any = None) -> Any:
        """A minibatch as the model's layers read it."""
        return self.model.preprocess_samples(x, y, sample_weight)
