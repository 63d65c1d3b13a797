"""Muon of attentions' kernels too, which language models need where gradients are late."""

from __future__ import annotations

from typing import Any

import keras

from pipetrain.compute.keras_private import HookedMuon


@keras.saving.register_keras_serializable("pipetrain")
class AttentiveMuon(HookedMuon):
    """Keras' Muon, of attentions' kernels too, which Keras' own leaves to AdamW because they have three axes.

    Of a kernel of shape (width, heads, size) or (heads, size, width) the matrix with its heads joined, M, is made
    orthogonal: ``m <- momentum * m + g``, ``W <- W - rate * rms_rate * sqrt(longer side of M) * orthogonal(g + momentum
    * m)``. Where the width is neither ``heads * size`` nor known, the first axis is taken for it. Embeddings, and all
    that has one axis, stay with AdamW. Biases of queries, keys and values, and positions, have two axes and are
    matrices, as for Keras' own. All kernels with three axes count as attentions', Conv1D's too: ``exclude_layers``
    leaves layers to AdamW.

    With Adam a language model learns slowly in an asynchronous pipeline, with this one and
    ``SpecTrain(horizon="target")`` as fast as without late gradients if a minibatch has at least a quarter as many
    microbatches as there are stages (docs/results/language-models.md). Source of Muon: Jordan et al. 2024; of the
    steps' size: Liu et al. 2025 (arXiv 2502.16982).

    Args:
        learning_rate: and all other arguments are those of ``keras.optimizers.Muon``.

    Raises:
        ValueError: for a Keras before 3.13, whose Muon has steps of another size.
    """

    def __init__(self, learning_rate: Any = 0.001, **settings: Any) -> None:
        if not hasattr(keras.optimizers.Muon, "lr_adjust"):
            raise ValueError(
                "The steps of Muon are scaled by a matrix's sides from Keras 3.13 on. Received: optimizer="
                f"{type(self).__name__}, Keras {keras.__version__}. Try pip install -U keras."
            )
        super().__init__(learning_rate, **settings)

    def axes_of(self, variable: Any) -> int:
        """Two, as a matrix has, of what has three."""
        axes = super().axes_of(variable)
        return 2 if axes == 3 else axes

    def zeropower_via_newtonschulz5(self, x: Any, steps: int) -> Any:
        """The matrix made orthogonal."""
        if len(x.shape) == 2:
            return super().zeropower_via_newtonschulz5(x, steps)
        matrix = keras.ops.reshape(x, _matrix_shape(tuple(x.shape)))
        return keras.ops.reshape(super().zeropower_via_newtonschulz5(matrix, steps), x.shape)

    def lr_adjust(self, x: Any) -> Any:
        """The step, scaled by the longer side of the matrix."""
        longer = max(x.shape if len(x.shape) == 2 else _matrix_shape(tuple(x.shape)))
        return x if self.rms_rate is None else x * (longer**0.5 * self.rms_rate)


def _matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    first, second, third = shape
    return (first * second, third) if first != second * third and first * second == third else (first, second * third)
