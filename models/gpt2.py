"""GPT-2: a decoder of words that predicts the next one, its output layer being the transposed embedding."""

from __future__ import annotations

from typing import Any

import keras

L = keras.layers


@keras.saving.register_keras_serializable("pipetrain_models")
class TiedEmbedding(L.Embedding):
    """An embedding that, called with ``reverse=True``, gives the products of its inputs with all words' vectors."""

    def call(self, inputs: Any, reverse: bool = False) -> Any:
        """Numbers of shape (..., words) to vectors, or vectors to logits of shape (..., words, vocabulary)."""
        if reverse:
            return keras.ops.matmul(inputs, keras.ops.transpose(keras.ops.convert_to_tensor(self.embeddings)))
        return super().call(inputs)

    def compute_output_spec(self, inputs: Any, reverse: bool = False) -> Any:
        """The shape and type of what ``call`` gives."""
        shape = (*inputs.shape[:-1], self.input_dim) if reverse else (*inputs.shape, self.output_dim)
        return keras.KerasTensor(shape, self.compute_dtype)


@keras.saving.register_keras_serializable("pipetrain_models")
class Positions(L.Layer):
    """Adds a trained vector for each position."""

    def build(self, shape: tuple[int, ...]) -> None:
        """Make the vectors."""
        self.positions = self.add_weight(shape[1:], keras.initializers.RandomNormal(stddev=0.01), name="positions")

    def call(self, x: Any) -> Any:
        """The sum."""
        return x + self.positions


def gpt2(
    input_shape: tuple[int, ...], classes: int, depth: int = 12, width: int = 768, heads: int | None = None
) -> keras.Model:
    """``depth`` blocks of ``width`` units; logits of the next word at every position.

    A block is ``x + attention(norm(x))``, each word seeing those before it, and then ``x + feed_forward(norm(x))`` of
    ``4 * width`` units. Weights are normal numbers of deviation 0.02; those of layers that are added to x are smaller
    by ``sqrt(2 * depth)``. There is no dropout.
    Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.3.

    Args:
        input_shape: number of words of one text, as a tuple of one.
        classes: number of distinct words.
        depth: blocks.
        width: units of every word's vector.
        heads: attention heads; by default one for every 64 units, as published.
    """
    words = keras.Input(input_shape, dtype="int32", name="words")
    normal, smaller = (keras.initializers.RandomNormal(stddev=0.02 / by) for by in (1.0, (2 * depth) ** 0.5))
    embedding = TiedEmbedding(classes, width, normal, name="embedding")
    x = Positions(name="positions")(embedding(words))
    heads = heads or max(1, width // 64)
    for n in range(1, depth + 1):
        y = L.LayerNormalization(epsilon=1e-5, name=f"block{n}_norm1")(x)
        attend = L.MultiHeadAttention(heads, width // heads, kernel_initializer=normal, name=f"block{n}_attention")
        x = L.Add(name=f"block{n}_add1")([x, attend(y, y, use_causal_mask=True)])
        y = L.LayerNormalization(epsilon=1e-5, name=f"block{n}_norm2")(x)
        y = L.Dense(4 * width, "gelu", kernel_initializer=normal, name=f"block{n}_feed1")(y)
        y = L.Dense(width, kernel_initializer=smaller, name=f"block{n}_feed2")(y)
        x = L.Add(name=f"block{n}_add2")([x, y])
    x = L.LayerNormalization(epsilon=1e-5, name="norm")(x)
    return keras.Model(words, embedding(x, reverse=True), name="gpt2")
