"""A language model trained from scratch as a pipeline of four stages, and what it then writes.

    python examples/language_model.py

A small GPT-2 reads the prose of this project's own documentation, byte by byte, and learns to predict the next byte,
from no knowledge of any language to words and phrases. The model is cut by name, one block to a stage, and XLA compiles
nothing, so training starts at once. The output layer is the transposed embedding, so the first stage and the last one
hold a copy of the same weights: their gradients are summed, and both copies make the same update. ReversibleEmbedding
is a layer of Keras since 3.13.
"""

from pathlib import Path

import pipetrain
from pipetrain.cli.environment import start_tensorflow

start_tensorflow(4)  # quietly; without GPUs on so many logical CPU devices

import keras
import numpy as np
from keras import layers

CONTEXT, BYTES, WIDTH, HEADS, BLOCKS = 64, 256, 96, 4, 4  # bytes seen at once, and how many there are

keras.utils.set_random_seed(0)
root = Path(__file__).parents[1]
pages = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
lines = [line for page in pages for line in page.read_text(encoding="utf-8").splitlines()]
prose = [line for line in lines if line and line[0] not in "|`-#! "]  # no tables, lists, titles
text = np.frombuffer("\n".join(prose).encode(), np.uint8).astype("int32")
starts = np.random.permutation(np.arange(0, len(text) - CONTEXT, 20))
windows = np.stack([text[start : start + CONTEXT + 1] for start in starts])
x, y = windows[:, :-1], windows[:, 1:]

inputs = keras.Input((CONTEXT,), dtype="int32")
embedding = layers.ReversibleEmbedding(BYTES, WIDTH, name="embedding")
positions = layers.Embedding(CONTEXT, WIDTH, name="positions")
h = embedding(inputs) + positions(keras.ops.arange(CONTEXT) + 0 * inputs)
for n in range(BLOCKS):
    normed = layers.LayerNormalization()(h)
    attention = layers.MultiHeadAttention(HEADS, WIDTH // HEADS, name=f"attention{n}")
    h = h + attention(normed, normed, use_causal_mask=True)
    wide = layers.Dense(4 * WIDTH, activation="gelu", name=f"wide{n}")(layers.LayerNormalization()(h))
    h = h + layers.Dense(WIDTH, name=f"narrow{n}")(wide)
model = keras.Model(inputs, embedding(layers.LayerNormalization()(h), reverse=True), name="language_model")

pm = pipetrain.PipelineModel(model, cuts=("narrow0", "narrow1", "narrow2"), scheme="1f1b", microbatches=2)
warming_up = keras.optimizers.schedules.CosineDecay(0.0, 10**6, warmup_target=3e-3, warmup_steps=50)
pm.compile(
    keras.optimizers.Adam(warming_up),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
    jit_compile=False,
)
pm.fit(x, y, batch_size=32, epochs=5)

written, random = list(b"The pipeline "), np.random.default_rng(0)
while len(written) < 200:
    seen = written[-CONTEXT:]
    given = np.array([seen + [0] * (CONTEXT - len(seen))])
    logits = model.predict_on_batch(given)[0, len(seen) - 1].astype("float64") / 0.7
    chances = np.exp(logits - logits.max())
    written.append(int(random.choice(BYTES, p=chances / chances.sum())))
print(f"\nThe model goes on: {bytes(written).decode(errors='replace')}")
