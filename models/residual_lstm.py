"""Residual LSTM: a deep stack of LSTMs with projections and skip connections."""

from __future__ import annotations

import keras

L = keras.layers
VOCABULARY = 20_000


def residual_lstm(
    input_shape: tuple[int, ...], classes: int, depth: int = 8, width: int = 1024, vocabulary: int = VOCABULARY
) -> keras.Model:
    """``depth`` LSTMs of ``width`` memory units, each projected to ``width / 2`` outputs and added to its input.

    The last word's output gives the logits. The published cell feeds its projection back into the recurrence; here,
    with Keras' own LSTM, the recurrence sees the memory units and the projection follows.
    Source: Kim, El-Khamy and Lee 2017 (arXiv 1701.03360).

    Args:
        input_shape: number of words of one sentence, as a tuple of one.
        classes: number of logits.
        depth: LSTM layers.
        width: memory units of each.
        vocabulary: number of distinct words.
    """
    words = keras.Input(input_shape, dtype="int32", name="words")
    x = L.Embedding(vocabulary, width // 2, name="embedding")(words)
    for n in range(1, depth + 1):
        y = L.LSTM(width, return_sequences=True, name=f"lstm_{n}")(x)
        y = L.Dense(width // 2, use_bias=False, name=f"projection_{n}")(y)
        x = L.Add(name=f"add_{n}")([x, y])
    return keras.Model(words, L.Dense(classes, name="logits")(x[:, -1]), name="residual_lstm")
