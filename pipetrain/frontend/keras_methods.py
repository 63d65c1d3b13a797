"""How a PipelineModel has each public method and property of ``keras.Model``, and what becomes of overridden ones.

Those of optimizers are in ``pipetrain.compute.optimizer.clone``. Every method of Keras is in one of these tables;
``tests/fit/test_keras_methods.py`` goes through all that Keras has, so that what a new version adds is noticed until it
is decided.
"""

from __future__ import annotations

# The wrapped model's, as its class has them.
DELEGATED = (
    *("add_loss", "add_variable", "add_weight", "build_from_config", "compute_mask", "compute_output_shape"),
    *("compute_output_spec", "count_params", "get_build_config", "get_layer", "get_quantization_layer_structure"),
    *("input", "input_dtype", "input_spec", "layers", "output", "rematerialized_call", "stateless_call"),
    *("supports_masking", "symbolic_call", "to_json"),
)
# Likewise; they read the weights, so all minibatches so far are applied first.
DRAINED = ("export",)
# Likewise, of the wrapped model compiled as the PipelineModel is.
COMPILED = ("compute_metrics", "get_compile_config", "metrics", "metrics_names")
# Written out, with the wrapped model's own at their end.
OWN = (
    *("call", "compile", "compile_from_config", "get_metrics_result", "get_state_tree", "get_weights", "load_weights"),
    *("predict_on_batch", "reset_metrics", "save", "save_weights", "set_state_tree", "set_weights", "summary"),
)
# Of these the PipelineModel has Keras' own: the wrapped model is its one layer. Training asks no model for them.
KEPT = (
    *("add_metric", "build", "compute_dtype", "dtype", "dtype_policy", "distribute_reduction_method", "from_config"),
    *("jit_compile", "load_own_variables", "loss", "path", "quantization_mode", "quantized_build", "quantized_call"),
    *("run_eagerly", "save_own_variables", "stateless_compute_loss", "variable_dtype"),
)
# What cannot be done with it, and what to try; the wrapped model's class may override them.
ABSENT = {
    "get_config": ("copied, pickled or described", "save(path), which writes a file for keras.models.load_model"),
    "quantize": (
        "quantized, since its stages would go on with the weights before",
        "quantize of .model after training",
    ),
}
OF_SEQUENTIAL = dict.fromkeys(("add", "pop"), ("given other layers, since these are cut", "it before it is wrapped"))
_LOSS = "the loss in compile"
_METRICS = "metrics in compile, or compute_metrics"
_CALLBACK = "a callback of fit"
_VARIABLES = "layer.trainable = False for those that are not to be trained"
# What Keras' loop asks of a model and a PipelineModel of itself: a model whose class overrides one of these is refused.
REPLACED = {
    "compiled_loss": _LOSS,
    "compiled_metrics": _METRICS,
    "compute_loss": _LOSS,
    "distribute_strategy": "devices=",
    "evaluate": _CALLBACK,
    "fit": _CALLBACK,
    "losses": "add_loss in a layer",
    "make_predict_function": "predict_step",
    "make_test_function": _METRICS,
    "make_train_function": _LOSS,
    "metrics_variables": "metrics",
    "non_trainable_variables": _VARIABLES,
    "non_trainable_weights": _VARIABLES,
    "test_on_batch": _CALLBACK,
    "test_step": _METRICS,
    "train_on_batch": _CALLBACK,
    "train_step": _LOSS,
    "trainable": _VARIABLES,
    "trainable_variables": _VARIABLES,
    "trainable_weights": _VARIABLES,
    "variables": _VARIABLES,
    "weights": _VARIABLES,
}
# A model that overrides one of these predicts by itself, on its own device, all minibatches so far applied.
PREDICTING = ("predict", "predict_step")
