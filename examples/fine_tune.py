"""Fine-tuning by low-rank adapters: a classifier of keras_hub learns new words, its backbone frozen.

    python examples/fine_tune.py

A small BERT, cut into four stages, first learns which made-up sentences praise. Its backbone is then frozen and gets
LoRA adapters, and learns from sentences of which half judge in words that it has never read. By weight stashing every
stage keeps the weights of each minibatch in flight: here old versions and the optimizer's slots are of the adapters and
the head, and of the frozen weights there is one copy.

Needs keras_hub. A pretrained model takes the place of the first part and brings its own words:
``classifier = keras_hub.models.BertTextClassifier.from_preset("bert_small_en_uncased", num_classes=2)``.
"""

import sys

import pipetrain
from pipetrain.cli.environment import start_tensorflow

start_tensorflow(4)  # quietly; without GPUs on so many logical CPU devices

import keras
import numpy as np

try:
    import keras_hub
except ImportError:
    sys.exit('This example needs keras_hub: pip install ".[hub]" installs it.')

NOUNS = ["film", "play", "scene", "soup", "cake", "bread", "train", "bus", "ferry"]
KNOWN = [["bad", "dull", "awful", "poor"], ["good", "fine", "lovely", "great"]]
NEW = [["grim", "dreary", "bland", "shoddy"], ["superb", "splendid", "charming", "brilliant"]]
BOTH = [known + new for known, new in zip(KNOWN, NEW, strict=True)]
OTHERS = ["the", "was", "is", "really", "quite", "said", "we", "they", "that"]
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *NOUNS, *BOTH[0], *BOTH[1], *OTHERS]

keras.utils.set_random_seed(0)
random = np.random.default_rng(0)


def sentence(verdicts):
    """A sentence with one of these verdicts, and whether it praises."""
    praises = random.integers(2)
    words = [random.choice(["we", "they"]), "said", "that", "the", random.choice(NOUNS), random.choice(["was", "is"])]
    words += ["really"] * random.integers(2) + ["quite"] * random.integers(2)
    return " ".join([*words, random.choice(verdicts[praises])]), praises


def sentences(count, verdicts):
    """So many sentences, and their labels."""
    texts, labels = zip(*(sentence(verdicts) for _ in range(count)), strict=True)
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
pm.fit(*sentences(1000, KNOWN), batch_size=50, epochs=2)

classifier.backbone.enable_lora(rank=8)
trained, everything = parameters(classifier.trainable_weights), parameters(classifier.weights)
print(f"\nNow the backbone is frozen: {trained} of {everything} parameters are trained.", flush=True)
pm = pipeline(classifier, "weight-stashing", 5e-3)
test = sentences(400, BOTH)
before = pm.evaluate(*test, batch_size=50, verbose=0, return_dict=True)["accuracy"]
pm.fit(*sentences(1000, BOTH), batch_size=50, epochs=16)
after = pm.evaluate(*test, batch_size=50, verbose=0, return_dict=True)["accuracy"]
print(f"\nOf other sentences {before:.0%} were understood before, and {after:.0%} are now.")
