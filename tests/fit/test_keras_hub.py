"""Task models of keras_hub, at tiny sizes: cut, they are the unsplit model. Needs ``pip install ".[hub]"``."""

from __future__ import annotations

import keras
import networks
import numpy as np
import parameters
import pytest
import transparency

import pipetrain
from pipetrain.compute.graph.blocks import Chain

hub = pytest.importorskip("keras_hub").models

TEXT = {"vocabulary_size": 50, "num_layers": 3, "hidden_dim": 8, "intermediate_dim": 16, "dropout": 0.0}
HEADS = {**TEXT, "num_heads": 2}
ENCODER = {**HEADS, "max_sequence_length": 12}
GROUPED = {**TEXT, "num_query_heads": 2, "num_key_value_heads": 1}
RESNET = {
    "input_conv_filters": [64],
    "input_conv_kernel_sizes": [3],
    "stackwise_num_filters": [64, 64],
    "stackwise_num_blocks": [1, 1],
    "stackwise_num_strides": [1, 2],
    "block_type": "basic_block",
    "image_shape": (16, 16, 3),
}


def language(name, **settings):
    """A causal or a sequence-to-sequence language model of a family."""
    task = getattr(hub, f"{name}CausalLM", None) or getattr(hub, f"{name}Seq2SeqLM")
    return task(backbone=getattr(hub, f"{name}Backbone")(**settings), preprocessor=None)


def classifier(name, **settings):
    """A text classifier of a family."""
    backbone = getattr(hub, f"{name}Backbone")(**settings)
    return getattr(hub, f"{name}TextClassifier")(backbone=backbone, num_classes=3, preprocessor=None, dropout=0.0)


def electra():
    """A classifier around the backbone, for which keras_hub has no task."""
    sizes = {name: size for name, size in ENCODER.items() if name != "vocabulary_size"}
    backbone = hub.ElectraBackbone(vocab_size=50, embedding_dim=8, **sizes)
    return keras.Model(backbone.input, keras.layers.Dense(3, name="logits")(backbone.output["pooled_output"]))


def vit():
    backbone = hub.ViTBackbone(
        image_shape=(16, 16, 3), patch_size=(4, 4), num_layers=3, num_heads=2, hidden_dim=8, mlp_dim=16
    )
    return hub.ViTImageClassifier(backbone=backbone, num_classes=3, preprocessor=None)


def resnet():
    return hub.ResNetImageClassifier(backbone=hub.ResNetBackbone(**RESNET), num_classes=3, preprocessor=None)


def segformer():
    encoder = hub.MiTBackbone(
        layerwise_depths=[1, 1],
        num_layers=2,
        layerwise_num_heads=[1, 2],
        layerwise_sr_ratios=[2, 1],
        max_drop_path_rate=0.0,
        layerwise_patch_sizes=[3, 3],
        layerwise_strides=[2, 2],
        image_shape=(16, 16, 3),
        hidden_dims=[8, 16],
    )
    backbone = hub.SegFormerBackbone(image_encoder=encoder, projection_filters=8)
    return hub.SegFormerImageSegmenter(backbone=backbone, num_classes=2, preprocessor=None)


def deeplab():
    backbone = hub.DeepLabV3Backbone(
        image_encoder=hub.ResNetBackbone(**RESNET),
        low_level_feature_key="P2",
        spatial_pyramid_pooling_key="P3",
        dilation_rates=[2],
        upsampling_size=2,
        image_shape=(16, 16, 3),
    )
    return hub.DeepLabV3ImageSegmenter(backbone=backbone, num_classes=2, preprocessor=None)


FAMILIES = {
    "GPT-2": lambda: language("GPT2", **ENCODER),
    "Gemma": lambda: language("Gemma", **GROUPED, head_dim=4),
    "Llama": lambda: language("Llama", **GROUPED),
    "Llama, tied": lambda: language("Llama", **GROUPED, tie_word_embeddings=True),
    "Mistral": lambda: language("Mistral", **GROUPED),
    "Mixtral": lambda: language("Mixtral", **GROUPED, num_experts=2),
    "Qwen": lambda: language("Qwen", **GROUPED),
    "Phi-3": lambda: language("Phi3", **GROUPED),
    "OPT": lambda: language("OPT", **ENCODER),
    "Bloom": lambda: language("Bloom", **HEADS),
    "GPT-NeoX": lambda: language("GPTNeoX", **ENCODER, rotary_percentage=1.0),
    "BART": lambda: language("Bart", **ENCODER),
    "T5": lambda: language("T5", **HEADS, key_value_dim=4),
    "BERT": lambda: classifier("Bert", **ENCODER),
    "RoBERTa": lambda: classifier("Roberta", **ENCODER),
    "XLM-RoBERTa": lambda: classifier("XLMRoberta", **ENCODER),
    "DistilBERT": lambda: classifier("DistilBert", **ENCODER),
    "ELECTRA": electra,
    "ALBERT": lambda: classifier("Albert", **ENCODER, embedding_dim=8),
    "DeBERTa": lambda: classifier("DebertaV3", **ENCODER),
    "FNet": lambda: classifier("FNet", **TEXT, max_sequence_length=12),
    "RoFormer": lambda: classifier("RoformerV2", **HEADS, head_size=4),
    "ViT": vit,
    "ResNet": resnet,
    "SegFormer": segformer,
    "DeepLab": deeplab,
}
NORMALIZED = ("ResNet", "SegFormer", "DeepLab")  # by the statistics of a batch, which are not those of a microbatch
CUT = ("Llama, tied", "T5", "DeepLab")  # by default
TRAINED = ("ResNet",)


def made(family):
    keras.utils.set_random_seed(0)
    return FAMILIES[family]()


@pytest.mark.wide
@pytest.mark.parametrize("family", parameters.by_default(FAMILIES, *CUT))
def test_outputs_loss_and_gradients_equal_the_unsplit_model_s(family):
    model = made(family)
    assert len(Chain(model).blocks) >= (5 if family == "ViT" else 6)
    assert transparency.error(model, 2, 3, 4) < 1e-4


def rows_of(model, rows):
    """Inputs, and targets of the outputs' shape.

    A model called without ``training`` is one in training behind a layer that is by default, as Resizing is: this call
    would change the statistics of normalizations.
    """
    inputs = transparency.sample(model, rows)
    given = keras.tree.pack_sequence_as(model.input, [np.asarray(each) for each in inputs])
    return given, np.random.default_rng(1).normal(size=model(given, training=False).shape).astype("float32")


def trained(model, x, y):
    """Ten steps without XLA, which rounds otherwise: plain Keras' DeepLab with it is 5e-4 from that without it.

    A task's own metrics are of classes, which ``rows_of`` does not have, whether or not the task is cut.
    """
    none = {"metrics": None, "weighted_metrics": None}
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), loss="mse", jit_compile=False, **none)
    model.fit(x, y, batch_size=4, shuffle=False, verbose=0)


@pytest.mark.wide
@pytest.mark.parametrize("family", parameters.by_default(FAMILIES, *TRAINED))
def test_training_equals_plain_keras(family):
    plain, split, stale = (made(family) for _ in range(3))
    x, y = rows_of(plain, 40)
    trained(keras.Model(plain.input, plain.output), x, y)  # a task's own compile adds its loss and metrics
    before = split.get_weights()
    microbatches = 1 if family in NORMALIZED else 2
    trained(pipetrain.PipelineModel(split, scheme="1f1b", stages=3, microbatches=microbatches), x, y)
    largest = max(np.abs(each).max() for each in plain.get_weights())
    for mine, wanted in zip(split.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(mine, wanted, atol=1e-4 * largest)
    trained(pipetrain.PipelineModel(stale, scheme="spectrain", stages=3), x, y)
    assert all(np.isfinite(each).all() for each in stale.get_weights())
    assert any((mine != old).any() for mine, old in zip(stale.get_weights(), before, strict=True))


def tuned(family):
    """A frozen backbone with adapters in its attention, and the task's own layers, which are trained."""
    model = made(family)
    model.backbone.enable_lora(2)
    adapters = [each for each in model.backbone.trainable_weights if "lora" in each.path]
    assert adapters  # beside them the biases of the same layers are trained
    for each in adapters:  # zeros otherwise, with which half of the gradients are zeros
        each.assign(0.3 * np.random.default_rng(0).normal(size=each.shape))
    return model


@pytest.mark.wide
@pytest.mark.parametrize("family", parameters.by_default(["BERT", "GPT-2"], "BERT"))
def test_a_frozen_backbone_with_adapters_trains_as_plain_keras(family):
    plain, split, stale = (tuned(family) for _ in range(3))
    x, y = rows_of(plain, 40)
    trained(keras.Model(plain.input, plain.output), x, y)
    trains = {id(each) for each in split.trainable_weights}
    before = split.get_weights()
    trained(pipetrain.PipelineModel(split, scheme="1f1b", stages=3, microbatches=2), x, y)
    trained(pipetrain.PipelineModel(stale, scheme="spectrain", stages=3), x, y)
    networks.assert_close(split.get_weights(), plain.get_weights())
    for model in (split, stale):
        pairs = zip(model.weights, split.weights, before, strict=True)
        assert {id(same) for weight, same, old in pairs if (weight.numpy() != old).any()} == trains


@pytest.mark.parametrize("family", parameters.by_default(["BERT", "GPT-2"]))
def test_mixed_bfloat16_trains_as_plain_keras(family):
    """As near as bfloat16 tells numbers apart.

    Its epsilon is 2**-7. Every result is rounded, by half of that at most, and gradients of two microbatches are
    rounded apart, so they differ by some such roundings, and so does how far the weights go: four times epsilon of the
    farthest is allowed. The weights themselves are float32.
    """
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        plain, split = made(family), made(family)
    finally:
        keras.config.set_dtype_policy(policy)
    x, y = rows_of(plain, 40)
    before = split.get_weights()
    trained(keras.Model(plain.input, plain.output), x, y)
    trained(pipetrain.PipelineModel(split, scheme="1f1b", stages=3, microbatches=2), x, y)
    moved = [wanted - old for wanted, old in zip(plain.get_weights(), before)]
    farthest = max(np.abs(each).max() for each in moved)
    assert farthest > 0
    for mine, wanted in zip(split.get_weights(), plain.get_weights(), strict=True):
        assert mine.dtype == "float32"
        np.testing.assert_allclose(mine, wanted, rtol=0, atol=4 * 2**-7 * farthest)


WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "a", "film", "play", "was", "is", "good", "bad", "dull"]


def classifier_of_text():
    tokenizer = hub.BertTokenizer(vocabulary=WORDS)
    preprocessor = hub.BertTextClassifierPreprocessor(tokenizer, sequence_length=8)
    backbone = hub.BertBackbone(**{**ENCODER, "vocabulary_size": len(WORDS)})
    return hub.BertTextClassifier(backbone=backbone, num_classes=2, preprocessor=preprocessor, dropout=0.0)


@pytest.mark.wide
def test_strings_train_as_the_task_itself_trains_on_them():
    keras.utils.set_random_seed(0)
    random = np.random.default_rng(0)
    texts = np.array([" ".join(random.choice(WORDS[5:], 5)) for _ in range(40)])
    labels = np.array(["good" in text for text in texts], "int32")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    results = []
    for wrap in (lambda task: task, lambda task: pipetrain.PipelineModel(task, stages=3, scheme="1f1b")):
        keras.utils.set_random_seed(0)
        model = wrap(task := classifier_of_text())
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss=loss, metrics=["accuracy"])
        history = model.fit(texts, labels, batch_size=8, epochs=2, verbose=0, validation_data=(texts[:8], labels[:8]))
        found = model.evaluate(texts, labels, batch_size=8, verbose=0)
        results.append((task.get_weights(), history.history, found, model.predict(texts, batch_size=8, verbose=0)))
    (weights, history, found, outputs), (ours, our_history, our_found, our_outputs) = results
    networks.assert_close(ours, weights)
    for name, values in history.items():
        np.testing.assert_allclose(our_history[name], values, rtol=1e-4)
    np.testing.assert_allclose(our_found, found, rtol=1e-4)
    np.testing.assert_allclose(our_outputs, outputs, atol=1e-4)


@pytest.mark.wide
def test_a_causal_language_model_of_strings_learns_and_generates():
    """Labels and the weights of padding are the preprocessor's; perplexity is keras_hub's."""
    keras.utils.set_random_seed(0)
    vocabulary = {chr(n): n - 31 for n in range(33, 127)} | {"Ġ": 0, "<|endoftext|>": 96, "cd": 97}
    tokenizer = hub.GPT2Tokenizer(vocabulary=vocabulary, merges=["c d"])
    preprocessor = hub.GPT2CausalLMPreprocessor(tokenizer, sequence_length=12)
    task = hub.GPT2CausalLM(hub.GPT2Backbone(**{**ENCODER, "vocabulary_size": 98}), preprocessor=preprocessor)
    metrics = pytest.importorskip("keras_hub").metrics
    pm = pipetrain.PipelineModel(task, stages=3, scheme="spectrain")
    pm.compile(
        keras.optimizers.Adam(0.01),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weighted_metrics=[metrics.Perplexity(from_logits=True, name="perplexity")],
        jit_compile=False,
    )
    history = pm.fit(["abababab", "ababab"] * 40, batch_size=8, epochs=12, verbose=0).history
    assert history["perplexity"][-1] < 4 < history["perplexity"][0]
    task.compile(sampler="greedy")
    assert task.generate("ab", max_length=8).startswith("aba")


class Generating(keras.callbacks.Callback):
    """After every epoch a look at the task, through the model that ``fit`` was called of."""

    def __init__(self, start):
        super().__init__()
        self.start, self.seen = start, []

    def on_epoch_end(self, epoch, logs=None):
        tokens = self.model.generate(self.start, stop_token_ids=None)["token_ids"]
        self.seen.append((type(self.model.backbone), np.asarray(tokens).tolist()))


def language_rows():
    """Tokens with the next ones as labels, and prompts."""
    tokens = np.random.default_rng(0).integers(1, 50, (16, 10))
    mask = np.ones((16, 10), bool)
    start = {"token_ids": tokens[:2], "padding_mask": mask[:2] & (np.arange(10) < 4)}
    return {"token_ids": tokens[:, :-1], "padding_mask": mask[:, :-1]}, tokens[:, 1:], start


CUTS = ("transformer_layer_0",)
COMPILED = {
    "by itself": lambda trained: None,
    "without arguments": lambda trained: trained.compile(jit_compile=False),
    "auto": lambda trained: trained.compile("auto", "auto", jit_compile=False),
    "with a sampler": lambda trained: trained.compile(keras.optimizers.SGD(0.1), sampler="greedy", jit_compile=False),
}


def of_task_and_of_pipeline(train):
    """What training a task by itself gives, and what training it by a pipeline does."""
    for wrap in (lambda task: task, lambda task: pipetrain.PipelineModel(task, 2, "1f1b", cuts=CUTS)):
        keras.utils.set_random_seed(0)
        yield train(wrap(language("GPT2", **{**ENCODER, "num_layers": 2})))


@pytest.mark.wide
@pytest.mark.parametrize("way", parameters.by_default(COMPILED, "with a sampler"))
def test_a_task_is_compiled_as_by_itself(way):
    x, y, _ = language_rows()

    def train(trained):
        COMPILED[way](trained)
        history = trained.fit(x, y, batch_size=8, shuffle=False, verbose=0).history
        return history, {**trained.optimizer.get_config(), "name": None}, type(trained.sampler)

    (history, *settings), (our_history, *our_settings) = of_task_and_of_pipeline(train)
    assert settings == our_settings
    assert list(history) == list(networks.without_figures(our_history))
    for name, values in history.items():
        np.testing.assert_allclose(our_history[name], values, rtol=1e-4)


@pytest.mark.wide
def test_a_task_generates_within_fit():
    x, y, start = language_rows()

    def train(trained):
        callback = Generating(start)
        trained.compile(keras.optimizers.SGD(0.1), sampler="greedy", jit_compile=False)
        trained.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0, callbacks=[callback])
        return callback.seen, trained.preprocessor

    of_task, of_pipeline = of_task_and_of_pipeline(train)
    assert of_pipeline == of_task
    assert len(of_task[0]) == 2
