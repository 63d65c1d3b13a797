"""Llama, as keras_hub has it: a decoder that predicts the next word, its output layer apart from its embedding."""

from __future__ import annotations

import keras

HEAD = 64  # units of one attention head


def llama(input_shape: tuple[int, ...], classes: int, depth: int = 12, width: int = 768) -> keras.Model:
    """``depth`` blocks of ``width`` units, with ``8 / 3 * width`` within; logits of the next word at every position.

    Norms are root mean squares, positions rotate queries and keys, feed-forward layers are gated. Nothing has a bias.
    Source: Touvron et al. 2023, "LLaMA: Open and Efficient Foundation Language Models" (arXiv 2302.13971), section 2.2.

    Args:
        input_shape: number of words of one text, as a tuple of one.
        classes: number of distinct words.
        depth: blocks.
        width: units of every word's vector.

    Raises:
        ValueError: where keras_hub is not installed.
    """
    try:
        import keras_hub
    except ImportError as error:
        raise ValueError(
            "This network is of keras_hub, which is not installed. Received: model='llama'. Try: pip install '.[hub]'."
        ) from error

    heads = max(1, width // HEAD)
    backbone = keras_hub.models.LlamaBackbone(
        vocabulary_size=classes,
        num_layers=depth,
        num_query_heads=heads,
        num_key_value_heads=heads,
        hidden_dim=width,
        intermediate_dim=round(8 / 3 * width),
    )
    words = keras.Input(input_shape, dtype="int32", name="words")
    decoder = keras_hub.models.LlamaCausalLM(backbone, preprocessor=None)
    logits = decoder({"token_ids": words, "padding_mask": keras.ops.ones_like(words)})
    return keras.Model(words, logits, name="llama")
