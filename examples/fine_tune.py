"""Fine-tuning by low-rank adapters: a classifier of keras_hub learns a second task, its backbone frozen.

    python examples/fine_tune.py

A small BERT, cut into four stages, first learns what made-up sentences are about. Its backbone is then frozen and gets
LoRA adapters, and with a new head it learns whether the sentences praise. By weight stashing every stage keeps the
weights of each minibatch in flight: here old versions and the optimizer's slots are of the adapters and the head, and
of the frozen weights there is one copy.

Needs keras_hub. A pretrained backbone takes the place of the first part, and brings its own words:
``classifier = keras_hub.models.BertTextClassifier.from_preset("bert_small_en_uncased", num_classes=2)``.
"""

import sys

import pipetrain

import keras
import numpy as np
import tensorflow as tf

try:
    import keras_hub
except ImportError:
    sys.exit('This example needs keras_hub: pip install ".[hub]" installs it.')

if not tf.config.list_physical_devices("GPU"):  # before any tensor or model is made
    pipetrain.set_cpu_devices(4)

NOUNS = [["film", "play", "scene"], ["soup", "cake", "bread"], ["train", "bus", "ferry"]]  # by what they are about
GOOD, BAD = ["good", "fine", "lovely", "great"], ["bad", "dull", "awful", "poor"]
LINKS = ["the", "a", "was", "is", "really", "quite", "said", "we", "they", "that"]
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *np.concatenate(NOUNS).tolist(), *GOOD, *BAD, *LINKS]

keras.utils.set_random_seed(0)
random = np.random.default_rng(0)


def sentence():
    """A sentence, what it is about, and whether it praises that."""
    about, good = random.integers(3), random.integers(2)
    words = ["we" if random.integers(2) else "they", "said", "that", "the", random.choice(NOUNS[about])]
    words += ["was" if random.integers(2) else "is", *["really"] * random.integers(2), *["quite"] * random.integers(2)]
    return " ".join([*words, random.choice([BAD, GOOD][good])]), about, good


def classifier(backbone, classes):
    """The task model, which reads strings."""
    tokenizer = keras_hub.models.BertTokenizer(vocabulary=WORDS)
    preprocessor = keras_hub.models.BertTextClassifierPreprocessor(tokenizer, sequence_length=12)
    return keras_hub.models.BertTextClassifier(backbone, num_classes=classes, preprocessor=preprocessor, dropout=0.0)


def pipeline(task, scheme, learning_rate):
    """Four stages, one for each of the backbone's layers."""
    cuts = [f"transformer_layer_{n}" for n in range(3)]
    pm = pipetrain.PipelineModel(task, cuts=cuts, scheme=scheme)
    pm.compile(
        keras.optimizers.Adam(learning_rate),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        jit_compile=False,
    )
    return pm


def parameters(weights):
    """How many numbers the weights have."""
    return sum(int(np.prod(weight.shape)) for weight in weights)


texts, subjects, praises = map(np.array, zip(*(sentence() for _ in range(2400)), strict=True))
train, test = slice(0, 2000), slice(2000, None)

backbone = keras_hub.models.BertBackbone(
    vocabulary_size=len(WORDS),
    num_layers=4,
    num_heads=4,
    hidden_dim=64,
    intermediate_dim=128,
    dropout=0.0,
    max_sequence_length=12,
)
print("What is it about?", flush=True)
pm = pipeline(classifier(backbone, 3), "1f1b", 1e-3)
pm.fit(texts[train], subjects[train], batch_size=50, epochs=3, validation_data=(texts[test], subjects[test]))

backbone.enable_lora(rank=4)
tuned = classifier(backbone, 2)
trained, everything = parameters(tuned.trainable_weights), parameters(tuned.weights)
print(f"\nDoes it praise? {trained} of {everything} parameters are trained.", flush=True)
pm = pipeline(tuned, "weight-stashing", 3e-3)
before = pm.evaluate(texts[test], praises[test], batch_size=50, verbose=0, return_dict=True)["accuracy"]
pm.fit(texts[train], praises[train], batch_size=50, epochs=4, validation_data=(texts[test], praises[test]))
after = pm.evaluate(texts[test], praises[test], batch_size=50, verbose=0, return_dict=True)["accuracy"]
print(f"\nOf sentences that it has not seen, it judged {before:.0%} rightly before, and {after:.0%} now.")
