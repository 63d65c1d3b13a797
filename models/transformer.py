"""Transformer: encoder and decoder blocks over a short sentence, for classification."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

L = keras.layers
VOCABULARY = 20_000


def transformer(
    input_shape: tuple[int, ...],
    classes: int,
    depth: int = 6,
    width: int = 512,
    heads: int = 8,
    vocabulary: int = VOCABULARY,
) -> keras.Model:
    """``depth`` encoder blocks and ``depth`` decoder blocks of ``width`` units; the mean over the words gives logits.

    The decoder reads the same sentence, each word seeing those before it, and attends to the encoder's output.
    Normalization follows every sum, feed-forward layers have ``4 * width`` units, and the words' vectors are multiplied
    by the root of the width, as published.
    Source: Vaswani et al. 2017 (arXiv 1706.03762).

    Args:
        input_shape: number of words of one sentence, as a tuple of one.
        classes: number of logits.
        depth: encoder blocks, and decoder blocks.
        width: units of every word's vector.
        heads: attention heads, each of ``width / heads`` units.
        vocabulary: number of distinct words.
    """
    words = keras.Input(input_shape, dtype="int32", name="words")
    initial = keras.initializers.RandomNormal(stddev=width**-0.5)
    x = L.Embedding(vocabulary, width, initial, name="embedding")(words)
    x = source = x * width**0.5 + _positions(input_shape[0], width)
    for n in range(depth):
        x = _attention(x, x, heads, f"encoder{n + 1}_self")
        x = _feed_forward(x, f"encoder{n + 1}_feed")
    encoded, x = x, source
    for n in range(depth):
        x = _attention(x, x, heads, f"decoder{n + 1}_self", causal=True)
        x = _attention(x, encoded, heads, f"decoder{n + 1}_cross")
        x = _feed_forward(x, f"decoder{n + 1}_feed")
    x = L.GlobalAveragePooling1D(name="mean")(x)
    return keras.Model(words, L.Dense(classes, name="logits")(x), name="transformer")


def _attention(x: Any, memory: Any, heads: int, name: str, causal: bool = False) -> Any:
    attend = L.MultiHeadAttention(heads, x.shape[-1] // heads, name=name)
    y = attend(x, memory, use_causal_mask=causal)
    return L.LayerNormalization(name=f"{name}_norm")(L.Add(name=f"{name}_add")([x, y]))


def _feed_forward(x: Any, name: str) -> Any:
    y = L.Dense(4 * x.shape[-1], activation="relu", name=f"{name}_1")(x)
    y = L.Dense(x.shape[-1], name=f"{name}_2")(y)
    return L.LayerNormalization(name=f"{name}_norm")(L.Add(name=f"{name}_add")([x, y]))


def _positions(words: int, width: int) -> Any:
    """``sin(p / 10000^(2i/width))`` and the cosines, shape (words, width)."""
    angles = np.arange(words)[:, None] / 10_000 ** (2 * (np.arange(width) // 2) / width)
    return np.where(np.arange(width) % 2 == 0, np.sin(angles), np.cos(angles)).astype("float32")
