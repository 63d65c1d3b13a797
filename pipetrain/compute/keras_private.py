"""Every private name of Keras that the package uses, each behind a name of its own, and why no public one serves.

No other module uses them, so a new version of Keras requires changes only here. ``pyproject.toml`` bounds the versions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, TypeVar

import keras
from keras.src.backend.common import global_state
from keras.src.backend.common.global_state import get_global_attribute, set_global_attribute
from keras.src.random.seed_generator import global_seed_generator
from keras.src.trainers.compile_utils import CompileLoss, get_loss
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.data_adapters.tf_dataset_adapter import TFDatasetAdapter
from keras.src.trainers.trainer import model_supports_jit

Value = TypeVar("Value")

TO_COME = "uninitialized_variables"  # made within scopes, at whose end they get values
# What Keras' own callbacks remember, by the names of their attributes: they have no state to ask for.
CALLBACK_STATE = {
    keras.callbacks.EarlyStopping: ("wait", "best", "best_epoch", "best_weights", "stopped_epoch"),
    keras.callbacks.ReduceLROnPlateau: ("wait", "best", "cooldown_counter"),
    keras.callbacks.ModelCheckpoint: ("best", "_batches_seen_since_last_saving", "_last_batch_seen"),
}
# What ``compile`` leaves in a model: saving takes it from there.
COMPILED = ("compiled", "optimizer", "loss", "_compile_config", "_compile_loss", "_compile_metrics", "_loss_tracker")
GLOBAL_SEED = "global_seed_generator"  # the name under which Keras keeps its generator; only newer versions export it
OF_FIT = "_use_cached_eval_dataset"  # an argument of ``evaluate``, which Keras' ``fit`` alone gives
LISTS = ("_variables", "_trainable_variables")  # an optimizer's lists that are no slots
SCOPES = ("stateless_scope", "autocast_scope")  # in which variables have other values, or other types
# What Keras notes of each thread from the beginning of a layer's call, or of a scope, to its end.
OF_CALLS = (
    *("current_call_ctx", "name_scope_stack", *SCOPES, "symbolic_scope", "remat_scope_stack"),
    *("in_tf_graph_scope", "tracking_on", "custom_objects_scope_dict"),
    *("shared_objects/id_to_obj_map", "shared_objects/id_to_config_map"),
)
HUB, HUB_LOOP = "keras_hub.", "keras_hub.src.utils.pipeline_model"  # whose loops the frontend's ``preprocessing`` meets
# What Keras' loop sets in a model while it compiles, trains, evaluates and predicts.
OF_LOOP = (
    *("compiled", "history", "jit_compile", "loss", "optimizer", "run_eagerly", "steps_per_execution"),
    *("stop_training", "stop_evaluating", "stop_predicting", "unrolled_steps_per_execution"),
    *("train_function", "test_function", "predict_function"),
)
# Of a model, methods with which Keras trains and evaluates it; of an optimizer, those that are given all gradients, or
# all weights, of a step. Public ones are in ``frontend.wrapped_model``.
LOOP_METHODS = (
    *("_aggregate_additional_loss", "_compute_loss", "_get_own_losses", "_get_regularization_losses"),
    *("_assert_compile_called", "_flatten_metrics_in_order", "_get_metrics_result_or_logs", "_make_function"),
    *("_autoconvert_optionals", "_maybe_symbolic_build", "_should_eval", "_symbolic_build"),
)
WHOLE_STEP = (
    *("_all_reduce_sum_gradients", "_apply_weight_decay", "_backend_apply_gradients", "_backend_update_step"),
    *("_backend_increment_gradient_accumulators", "_backend_reset_gradient_accumulators", "_clip_gradients"),
    *("_distributed_tf_update_step", "_filter_empty_gradients", "_overwrite_model_variables_with_average_value"),
    *("_overwrite_variables_directly_with_gradients", "_update_model_variables_moving_average"),
)


def history(tensor: Any) -> tuple[Any, int, int]:
    """What made a symbolic tensor: operation, node, and which of its outputs. No public function gives these."""
    operation, node_index, tensor_index = tensor._keras_history
    return operation, node_index, tensor_index


def call_node(operation: Any, index: int) -> Any:
    """One call of an operation, with its arguments."""
    return operation._inbound_nodes[index]


def mask_of(value: Any) -> Any:
    """The Keras mask that a tensor carries, or None; ``keras.src.backend.get_keras_mask`` is not public."""
    return getattr(value, "_keras_mask", None)


def set_mask(value: Any, mask: Any) -> None:
    """Make a tensor carry a Keras mask."""
    if mask is not None:
        value._keras_mask = mask


def replace_layer(owner: keras.Model, name: str, layer: keras.Layer) -> None:
    """Give an attribute of a model another layer; set as usual, the one before would remain the model's too."""
    if getattr(owner, name) is not layer:
        owner._layers.remove(getattr(owner, name))
        setattr(owner, name, layer)


def is_own(kind: type) -> bool:
    """Whether a class is defined by Keras, and not a user's subclass."""
    return kind.__module__.startswith("keras.src.")


def overridden(thing: Any, names: Iterable[str], *libraries: str) -> list[str]:
    """The names that an object or its class has of its own, in place of Keras' or another of these libraries'."""
    mine = {name for name, value in vars(thing).items() if callable(value)}
    return [name for name in names if name in mine or _is_overridden(type(thing), name, *libraries)]


def _is_overridden(kind: type, name: str, *libraries: str) -> bool:
    """Whether a class has something else by this name; a function's own module would be that of what it wraps."""
    definer = next((each for each in kind.__mro__ if name in vars(each)), object)
    return definer is not object and not definer.__module__.startswith(("keras.", *libraries))


def keeps_call(kind: type[keras.Model]) -> bool:
    """Whether a class of models keeps Keras' ``call``, so that its calls are those of its recorded graph."""
    definer = next(each for each in kind.__mro__ if "call" in vars(each))
    return definer.__module__.startswith("keras.src.models.") and not _is_overridden(kind, "__call__", HUB)


def compile_arguments(model: keras.Model) -> Mapping[str, Any] | None:
    """The arguments with which Keras' own ``compile`` was called last, one object for each call; None before."""
    found = vars(model).get("_compile_config")
    return None if found is None else found.config


def supports_xla(model: keras.Model) -> bool:
    """Whether Keras would let XLA compile all layers of a model; it asks itself only where there are GPUs."""
    return bool(model_supports_jit(model))


def weights_of_layer(layer: keras.Layer) -> list[keras.Variable]:
    """What a layer and those inside it were made to train, frozen or not; no public attribute tells it from state."""
    return [variable for each in flat_layers(layer) for variable in each._trainable_variables]


def weights_of(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """The variables that an optimizer has been built for."""
    return list(optimizer._trainable_variables) if optimizer.built else []


def rate_of(optimizer: keras.optimizers.Optimizer) -> Any:
    """The learning rate itself, a variable or a schedule; the public property gives a schedule's current value."""
    return getattr(optimizer, "_learning_rate", None)


def count_of(optimizer: keras.optimizers.Optimizer) -> Any:
    """The variable that counts an optimizer's steps, whatever wraps the optimizer.

    Where it accumulates gradients these are minibatches, and the public ``iterations`` a number of updates.
    """
    return optimizer._iterations


def averages_of(optimizer: keras.optimizers.Optimizer) -> list[Any]:
    """The averages of the weights that a built optimizer keeps, None for a weight without; empty if it keeps none."""
    return list(optimizer._model_variables_moving_average) if optimizer.use_ema else []


def own_variables(optimizer: keras.optimizers.Optimizer) -> list[Any]:
    """An optimizer's variables; the public property also gives those of an optimizer that it wraps."""
    return list(optimizer._variables)


def first_moments(optimizer: keras.optimizers.Optimizer) -> list[Any]:
    """Adam's first moments, and RMSprop's velocities."""
    moments: list[Any] = optimizer._momentums
    return moments


def second_moments(optimizer: keras.optimizers.Optimizer) -> list[Any]:
    """Adam's second moments, the largest so far with AMSGrad."""
    moments: list[Any] = optimizer._velocity_hats if optimizer.amsgrad else optimizer._velocities
    return moments


def decay_of(optimizer: keras.optimizers.Optimizer, variable: keras.Variable) -> float:
    """The weight decay of this variable, 0 for none: the public ``exclude_from_weight_decay`` only sets that.

    Muon has another one for the variables that it updates as Adam does.
    """
    if not optimizer.weight_decay or not optimizer._use_weight_decay(variable):
        return 0.0
    if hasattr(optimizer, "adam_weight_decay") and optimizer._should_use_adamw(variable):
        return float(optimizer.adam_weight_decay or 0.0)
    return float(optimizer.weight_decay)


def copy_exclusions(
    source: keras.optimizers.Optimizer,
    target: keras.optimizers.Optimizer,
    originals: Sequence[keras.Variable],
    copies: Sequence[keras.Variable],
) -> None:
    """Exclude from the target's weight decay what is excluded from the source's, which the settings do not contain."""
    excluded = getattr(source, "_exclude_from_weight_decay", None)
    if excluded is None:
        return
    names = source._exclude_from_weight_decay_pattern
    target.exclude_from_weight_decay(
        [mine for mine, theirs in zip(copies, originals, strict=True) if source._var_key(theirs) in excluded],
        [names.pattern] if names else None,
    )


def index_of(optimizer: keras.optimizers.Optimizer, variable: keras.Variable) -> int:
    """The index of a variable among the optimizer's, for an ``update_step`` in a subclass."""
    index: int = optimizer._get_variable_index(variable)
    return index


def track(optimizer: keras.optimizers.Optimizer, variable: Any) -> None:
    """Add an existing variable to the optimizer's: the public method makes a new one."""
    optimizer._track_variable(variable)


def forget_weights(optimizer: keras.optimizers.Optimizer) -> None:
    """Return an optimizer to its state before ``build``, except for slots that the caller has removed."""
    attributes = vars(optimizer)
    kept = {id(optimizer._iterations), id(optimizer._learning_rate)}
    set_variables(optimizer, [variable for variable in optimizer.variables if id(variable) in kept])
    attributes["_trainable_variables"], attributes["_trainable_variables_indices"] = [], {}
    optimizer.built = False


def set_variables(optimizer: keras.optimizers.Optimizer, variables: Sequence[Any]) -> None:
    """Set the optimizer's variables, in a new list: TensorFlow would not save a list that has been changed."""
    attributes = vars(optimizer)
    tracker = attributes.pop("_tracker")  # which would add all variables of a list to the optimizer's
    try:
        if [*map(id, optimizer._variables)] != [*map(id, variables)]:
            optimizer._variables = list(variables)
    finally:
        attributes["_tracker"] = tracker
    tracker.config["variables"] = tracker.config["variables"][0], optimizer._variables
    tracker.stored_ids["variables"] = {id(variable) for variable in variables}


def tracked_ids(each: Any) -> list[Any]:
    """The sets by which an object of Keras knows what it tracks."""
    return [*each._tracker.stored_ids.values()] if hasattr(each, "_tracker") else []


def variables_to_come() -> list[Any]:
    """The variables that wait for their values until Keras leaves a stateless scope: one list for the whole process."""
    found: list[Any] = get_global_attribute(TO_COME, [], set_to_default=True)
    return found


def keep_to_come(variables: Sequence[Any]) -> None:
    """Let only these wait, as far as they have no values yet: to one that has, Keras would refuse to give another."""
    set_global_attribute(TO_COME, [each for each in variables if each._value is None])


def set_initial_epoch(model: keras.Model, epoch: int | None) -> None:
    """Set the first epoch of a ``fit`` that has begun; None for the one that it was given."""
    model._initial_epoch = epoch


def steps_of(epoch_iterator: Any) -> Callable[[], Iterator[Any]]:
    """The function by which ``fit`` makes the iterator over an epoch's steps."""
    found: Callable[[], Iterator[Any]] = epoch_iterator._enumerate_iterator
    return found


def set_steps(epoch_iterator: Any, steps: Callable[[], Iterator[Any]] | None) -> None:
    """Replace the function that makes the iterator over an epoch's steps; None restores Keras' own."""
    if steps is None:
        del epoch_iterator._enumerate_iterator
    else:
        epoch_iterator._enumerate_iterator = steps


def end_without_waiting(epoch_iterator: Any) -> None:
    """Let Keras' loop end an epoch without asking every worker whether it is done: one that is lost does not answer."""
    epoch_iterator.tf_sync = lambda: None


def distributed_spec(epoch_iterator: Any) -> Any:
    """The specs of the elements of the data set of Keras' loop, as a distribution strategy gives them."""
    return epoch_iterator._distributed_dataset.element_spec


def rows_of_minibatches(epoch_iterator: Any) -> list[int]:
    """The numbers of rows that minibatches have where Keras' loop reads arrays; empty for other data.

    With a number of steps, which may end an epoch before its last minibatch, that one is left out.
    """
    adapter = epoch_iterator.data_adapter
    if not isinstance(adapter, ArrayDataAdapter):
        return []
    whole = [adapter.batch_size] if epoch_iterator.num_batches != 1 or not adapter.has_partial_batch else []
    is_cut_short = epoch_iterator.steps_per_epoch is not None or not adapter.has_partial_batch
    return whole if is_cut_short else [*whole, adapter.partial_batch_size]


def weighted_by_class(dataset: Any, class_weight: Any) -> Any:
    """The data set with sample weights by class, as Keras' loop makes it; publicly only ``fit`` does."""
    return TFDatasetAdapter(dataset, class_weight=class_weight).get_tf_dataset()


def flat_layers(model: keras.Model) -> list[Any]:
    """Every layer of a model, those of nested models included, in a fixed order."""
    return list(model._flatten_layers())


def global_seed(make: bool = True) -> Any:
    """The state of the generator from which Keras draws where no seed is given; None if there is none to be made."""
    if not make and get_global_attribute(GLOBAL_SEED) is None:
        return None
    return global_seed_generator().state


def with_state_of_keras(call: Callable[[], Value]) -> Callable[[], Value]:
    """A call for another thread: it has this one's global seed and policies, which Keras keeps for each thread."""
    mine = vars(global_state.GLOBAL_STATE_TRACKER)  # of the module itself: clear_session makes another

    def called() -> Value:
        own, here = vars(global_state.GLOBAL_STATE_TRACKER), dict(mine)
        own.clear()  # an earlier call may have left its seed
        own.update(here)
        own.pop(TO_COME, None)  # a list that both would add to, and make the values of: a second time is an error
        try:
            return call()
        finally:
            if own.get(GLOBAL_SEED) is not None:  # it may be the first that needs one, as after set_random_seed
                mine[GLOBAL_SEED] = own[GLOBAL_SEED]

    return called


@contextmanager
def outside_scopes() -> Iterator[None]:
    """Meanwhile variables have their own values and types, whatever scopes of Keras the thread is in."""
    before = {name: get_global_attribute(name) for name in SCOPES}
    try:
        for name in SCOPES:
            set_global_attribute(name, None)
        yield
    finally:
        for name, scope in before.items():
            set_global_attribute(name, scope)


@contextmanager
def ending_calls() -> Iterator[None]:
    """If an exception leaves it, no call of a layer and none of Keras' scopes goes on that has begun within it.

    An interrupt may come just before Keras notes the end. Else layers would keep the losses of all later calls, all of
    them would train or infer as that one did, and variables would be named after scopes that nobody is in.
    """
    before = {name: get_global_attribute(name) for name in OF_CALLS}
    stacks = {name: each.copy() for name, each in before.items() if isinstance(each, list)}
    try:
        yield
    except BaseException:
        for name, value in (before | stacks).items():
            set_global_attribute(name, value)
        raise


def held_by(variable: Any) -> Any:
    """TensorFlow's variable in a variable of Keras, whatever scope the thread is in; one of TensorFlow's itself."""
    return variable._value if isinstance(variable, keras.Variable) else variable


def distribution_of(optimizer: keras.optimizers.Optimizer) -> Any:
    """The distribution strategy in whose scope an optimizer was made."""
    return optimizer._distribution_strategy


@contextmanager
def distributed(optimizer: keras.optimizers.Optimizer, strategy: Any) -> Iterator[None]:
    """Meanwhile an optimizer belongs to a strategy, and is given the sums of all devices' gradients.

    Keras' own sums them when clipping, and whatever a subclass does to them, is done.
    """
    attributes, inner = vars(optimizer), getattr(optimizer, "inner_optimizer", optimizer)
    apply, add = optimizer.apply_gradients, inner._all_reduce_sum_gradients

    def add_and_apply(pairs: Iterable[tuple[Any, Any]]) -> Any:
        return apply(add(list(pairs)))

    before = distribution_of(inner)
    try:
        inner._distribution_strategy = strategy
        vars(inner)["_all_reduce_sum_gradients"] = list
        attributes["apply_gradients"] = add_and_apply
        yield
    finally:
        attributes.pop("apply_gradients", None)
        vars(inner).pop("_all_reduce_sum_gradients", None)
        inner._distribution_strategy = before


def set_value(variable: keras.Variable, value: Any) -> None:
    """Let a variable keep its value in another variable of TensorFlow's; publicly it has one for all its life."""
    variable._value = value


def map_losses(model: keras.Model, changed: Callable[[Any], Any]) -> None:
    """Let a model that was just compiled minimise these losses in place of its own, of which ``compile`` has a copy."""
    compiled = model._compile_loss
    if compiled is not None:
        compiled._user_loss = keras.tree.map_structure(changed, compiled._user_loss)


def compiled_loss(model: keras.Model) -> Any:
    """The loss that ``compile`` made, None without one: the public ``compute_loss`` adds penalties to it."""
    return model._compile_loss


class UntrackedLoss(CompileLoss):
    """A compiled loss whose calls leave no trace: the losses of single outputs are not tracked."""

    @property
    def metrics(self) -> list[Any]:
        """None for each loss."""
        return [None] * len(self._flat_losses or ())


def untracked(compiled: Any, loss: Any) -> Any:
    """A compiled loss as another one, with its weights and names of outputs, of a ``loss`` of the same structure."""
    return UntrackedLoss(loss, compiled._user_loss_weights, output_names=compiled.output_names)


def loss_of(identifier: Any, y: Any, outputs: Any) -> keras.losses.Loss:
    """The loss that a compiled one makes of a name or function; the public ``keras.losses.get`` gives functions."""
    return get_loss(identifier, y, outputs)


def axis_of(loss: Any) -> Any:
    """The axis along which one of Keras' losses looks at entries, where it was given one; not all configs have it."""
    return getattr(loss, "_fn_kwargs", {}).get("axis", -1)


def has_metrics(model: keras.Model) -> bool:
    """Whether ``compile`` was given metrics beside the loss."""
    return model._compile_metrics is not None


def update_loss(model: keras.Model, loss: Any, rows: Any) -> None:
    """Add a loss to the loss tracker of the compiled model, weighted by a number of rows."""
    model._loss_tracker.update_state(loss, sample_weight=rows)


def built_when_traced(model: keras.Model) -> list[Any]:
    """What Keras builds in the first call of a compiled model's loss and metrics."""
    metrics, loss = model._compile_metrics, model._compile_loss
    users = [] if metrics is None else keras.tree.flatten((metrics._user_metrics, metrics._user_weighted_metrics))
    return [each for each in (metrics, loss, *users) if isinstance(each, keras.Metric | keras.losses.Loss)]


class HookedMuon(keras.optimizers.Muon):
    """A Muon that asks how many axes a variable counts as: two for what is a matrix, of which it makes the step."""

    def axes_of(self, variable: Any) -> int:
        """All that it has."""
        return len(variable.shape)

    def _should_use_adamw(self, variable: Any) -> bool:
        counted = SimpleNamespace(shape=variable.shape[: self.axes_of(variable)], path=variable.path)
        return bool(super()._should_use_adamw(counted))


class HookedModel(keras.Model):
    """A model with hooks for parts of Keras' loop that have no public hook.

    Each hook is given Keras' ``own`` function, and calls it unless the hook is overridden.
    """

    def check_compile_called(self, method: str) -> None:
        """Raise Keras' ValueError where the model is not compiled."""
        self._assert_compile_called(method)

    def build_before_loop(self, own: Callable[..., None], iterator: Any, data_batch: Any) -> None:
        """Before the loop of an epoch or evaluation: build what needs a batch, which ``own`` reads."""
        own(iterator=iterator, data_batch=data_batch)

    def logs_of_epoch(self, own: Callable[[Any], Any], logs: Any) -> Any:
        """The logs of an epoch that has ended, from those of its last step."""
        return own(logs)

    def _maybe_symbolic_build(self, iterator: Any = None, data_batch: Any = None) -> None:
        self.build_before_loop(super()._maybe_symbolic_build, iterator, data_batch)

    def _get_metrics_result_or_logs(self, logs: Any) -> Any:
        return self.logs_of_epoch(super()._get_metrics_result_or_logs, logs)
