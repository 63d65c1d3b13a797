"""Fine-tuning by low-rank adapters: a classifier of keras_hub learns what "not" means, its backbone frozen.

    python examples/fine_tune.py

A small BERT, cut into four stages, first learns which made-up sentences praise. Its backbone is then frozen and gets
LoRA adapters, and learns from sentences of which half have a "not" that turns their meaning round. By weight stashing
every stage keeps the weights of each minibatch in flight: here old versions and the optimizer's slots are of the
adapters and the head, and of the frozen weights there is one copy.

Needs keras_hub. A pretrained model takes the place of the first part and brings its own words:
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

NOUNS = ["film", "play", "scene", "soup", "cake", "bread", "train", "bus", "ferry"]
GOOD, BAD = ["good", "fine", "lovely", "great"], ["bad", "dull", "awful", "poor"]
OTHERS = ["the", "was", "is", "not", "really", "quite", "said", "we", "they", "that"]
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *NOUNS, *GOOD, *BAD, *OTHERS]

keras.utils.set_random_seed(0)
random = np.random.default_rng(0)


def sentence(negations):
    """A sentence, with or without "not" if there are ``negations``, and whether it praises."""
    good, negated = random.integers(2), random.integers(2) * negations
    words = [random.choice(["we", "they"]), "said", "that", "the", random.choice(NOUNS), random.choice(["was", "is"])]
    words += ["not"] * negated + ["really"] * random.integers(2) + ["quite"] * random.integers(2)
    return " ".join([*words, random.choice([BAD, GOOD][good])]), good ^ negated


def sentences(count, negations):
    """So many sentences, and their labels."""
    texts, labels = zip(*(sentence(negations) for _ in range(count)), strict=True)
    return np.array(texts), np.array(labels)


def pipeline(task, scheme, learning_rate):
    """Four stages, one for each of the backbone's layers."""
    pm = pipetrain.PipelineModel(task, cuts=[f"transformer_layer_{n}" for n in range(3)], scheme=scheme)
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


tokenizer = keras_hub.models.BertTokenizer(vocabulary=WORDS)
classifier = keras_hub.models.BertTextClassifier(
    backbone=keras_hub.models.BertBackbone(
        vocabulary_size=len(WORDS),
        num_layers=4,
        num_heads=4,
        hidden_dim=64,
        intermediate_dim=128,
        dropout=0.0,
        max_sequence_length=12,
    ),
    num_classes=2,
    preprocessor=keras_hub.models.BertTextClassifierPreprocessor(tokenizer, sequence_length=12),
    dropout=0.0,
)
pm = pipeline(classifier, "1f1b", 1e-3)
pm.fit(*sentences(1000, negations=False), batch_size=50, epochs=3)

classifier.backbone.enable_lora(rank=8)
trained, everything = parameters(classifier.trainable_weights), parameters(classifier.weights)
print(f"\nNow the backbone is frozen: {trained} of {everything} parameters are trained.", flush=True)
pm = pipeline(classifier, "weight-stashing", 1e-3)
test = sentences(400, negations=True)
before = pm.evaluate(*test, batch_size=50, verbose=0, return_dict=True)["accuracy"]
pm.fit(*sentences(2000, negations=True), batch_size=50, epochs=24)
after = pm.evaluate(*test, batch_size=50, verbose=0, return_dict=True)["accuracy"]
print(f'\nOf new sentences with and without "not" {before:.0%} were judged rightly before, and {after:.0%} are now.')
