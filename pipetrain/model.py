"""PipelineModel: a Keras model that trains as a pipeline of stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras

from pipetrain.frontend.auto import AutoStrategy
from pipetrain.frontend.compilation import arguments_of, resolved
from pipetrain.frontend.contexts import Turn, taking_turns
from pipetrain.frontend.input_data import DEFAULT_ROWS
from pipetrain.frontend.keras_loop import KerasLoop
from pipetrain.frontend.options import Options, check_jit_compile, checked, taken_over, taken_over_trace
from pipetrain.frontend.overview import Overview
from pipetrain.frontend.refusals import check_optimizer_kind
from pipetrain.frontend.strategies import strategy_of
from pipetrain.plan.choice import Choice, Explanation
from pipetrain.plan.stages import Partition
from pipetrain.schemes.arguments import checked_bool
from pipetrain.schemes.options import AnyScheme
from pipetrain.trace.trace import Trace

if TYPE_CHECKING:
    from pipetrain.pictures.figure import Picture


@taking_turns
class PipelineModel(KerasLoop):
    """Trains a Keras model as a pipeline: stages on several devices, many minibatches in flight.

    It is a ``keras.Model``: ``compile``, ``fit``, ``evaluate``, ``predict`` and ``save`` are Keras' own, its
    weights those of the wrapped model in the same order. While a pipeline runs, each stage owns its weights; at the end
    of every epoch, before evaluate, predict, get_weights, set_weights, save, save_weights and load_weights, and before
    a callback uses a variable of the wrapped model, it drains and the weights are written back.
    ``evaluate`` and ``predict`` run the stages' forwards alone, with the wrapped model's results.

    Sources: SpecTrain (arXiv 1809.02839), PipeDream (arXiv 1806.03377), GPipe (arXiv 1811.06965).

    Args:
        model: a Sequential or Functional model: branches, skips, several inputs and outputs, nested models and
            shared layers included. A subclassed model called inside one is a block that is not cut.
        stages: how many stages (the model is then profiled and cut at the first ``fit``, for inputs like those of its
            first minibatch), or a ``Partition``. By default one per device. ``single`` always uses one;
            ``data-parallel``, ``all-reduce``, ``parameter-server`` and ``grid`` have as many devices, each with all
            layers: of those given, as many as these.
        scheme: a name: ``single``, ``data-parallel``, ``vanilla``, ``weight-stashing``, ``vertical-sync``,
            ``spectrain``, ``spike-compensation``, ``2bw``, ``gpipe``, ``1f1b``, ``interleaved``, ``looped-bfs``,
            ``zb-h1``, ``zb-h2``, ``zb-v``, ``v-half``, ``v-min``, ``all-reduce``, ``parameter-server``,
            ``coded-reduce`` or ``grid``; or an object that has the options of a scheme: ``pipetrain.SpecTrain``,
            ``TwoBW``, ``Vanilla``, ``WeightStashing``, ``VerticalSync``, ``SpikeCompensation``, ``Interleaved``,
            ``LoopedBFS``, ``GPipe``, ``OneFOneB``, ``ZBH1``, ``ZBH2``, ``ZBV``, ``VHalf``, ``VMin``, ``AllReduce``,
            ``ParameterServer``, ``CodedReduce``, ``Grid`` or ``Auto``; the name of a file in ``.csv`` that has a
            synchronous schedule, see ``pipetrain.schemes.text_form``; or your own ``pipetrain.schemes.Scheme``, which
            ``FILE.py:NAME`` names too. ``data-parallel`` is a baseline: what plain Keras trains under TensorFlow's
            MirroredStrategy on devices of this process; ``all-reduce`` does that too.
            ``auto``, the default: the fastest way on these devices, in a trial of those that are predicted to be near
            the fastest, whose training equals the unsplit model's; where stages, cuts or replicas are given, the
            fastest of the synchronous pipelines that have them. Chosen at the first ``fit``, see ``choice``.
        cuts: instead of ``stages``, the name of the last layer of every stage but the final one, for schemes with
            several stages.
        devices: TensorFlow devices, such as ``("CPU:0", "CPU:1")``; by default those of the workers that the program
            has joined, else all logical CPU devices if there are several, else all GPUs. With fewer devices than
            stages, neighbouring stages share a device.
        replicas: how many devices each stage has, such as ``(2, 1, 1)``; by default one, or those of the ``Partition``.
            Each replica takes its part of every minibatch's rows, and their gradients are summed: training is that of
            the unreplicated stage, except for BatchNormalization and Dropout, which use one replica's rows only.
        microbatches: how many per minibatch for synchronous schedules, ``2bw`` and ``spectrain`` with the horizon
            ``target``, 4 by default (``2bw``: as many as stages if these are more, and stages - 1 at least; a file: as
            many as it is for); the other schemes have one.
        recompute: keep only the inputs of a stage's forward and run it again before its backward, with the same
            seeds: less memory, more time, equal results. ``vanilla`` and ``spectrain``, whose backward reads newer
            weights, then also keep the forward's.
        memory_bytes: what a device may hold: what ``auto`` chooses, and where a pipeline is cut, keeps to it; by
            default what TensorFlow may take of the GPUs' memory, and on CPU devices without a limit.
        name: the model's name.
        options: of a scheme by keyword, as in 0.1, with a warning that shows the new line; ``trace=False``, which is
            the property ``is_traced`` now.

    Raises:
        ValueError, TypeError: for what cannot be trained, before training starts.
    """

    def __init__(
        self,
        model: keras.Model,
        stages: int | Partition | None = None,
        scheme: AnyScheme | None = None,
        *,
        cuts: Sequence[str] | None = None,
        devices: Sequence[str] | None = None,
        replicas: Sequence[int] | None = None,
        microbatches: int | None = None,
        recompute: bool = False,
        memory_bytes: int | None = None,
        name: str | None = None,
        **options: Any,
    ) -> None:
        is_traced = taken_over_trace(options)
        scheme = taken_over(scheme, options)
        chosen = checked(Options(scheme, stages, cuts, devices, replicas, microbatches, recompute, memory_bytes))
        strategy = strategy_of(model, chosen)
        with strategy.distribution.scope():
            # The wrapped model's policy tells Keras whether to scale losses; what is cast is for the layers to say.
            super().__init__(name=name or model.name, dtype=model.dtype_policy, autocast=False)
        self.turn = Turn()
        # Keras searches attributes for layers: ``inner`` is what it finds, the strategy is nothing to it.
        self.inner, self.scheme, self.options = strategy.trained, chosen.name, chosen.policy
        self._chosen_scheme = chosen.scheme
        self._exact_trace, self.built = False, True
        self.is_traced = is_traced
        self._strategy = strategy  # from here on what this model does not have it takes from the wrapped one

    @staticmethod
    def _by(model: keras.Model, options: Options) -> PipelineModel:
        return PipelineModel(model, **options._asdict())

    @property
    def is_traced(self) -> bool:
        """Whether ``fit`` keeps a trace, of the newest 100 000 actions and as many transfers; True by default.

        They are some tens of megabytes at most, however long it trains. A new value applies from the next ``fit`` on.
        """
        return self._is_traced

    @is_traced.setter
    def is_traced(self, wanted: bool) -> None:
        self._is_traced = checked_bool("is_traced", wanted, "A trace is either kept (True) or not (False)")

    @property
    def trace(self) -> Trace:
        """The newest spans and transfers of every stage up to the last drain; empty for ``data-parallel``.

        Empty too with ``is_traced = False``.

        ``pipetrain.idle(trace)`` returns why each stage waited. Calls on a CPU device are finished when they return, so
        the times of spans and transfers are exact. Calls on a GPU return earlier: see ``exact_trace``.
        """
        return self._strategy.trace

    @property
    def choice(self) -> Choice | None:
        """The ways to train among which ``scheme="auto"`` has chosen, as a table when printed; None before that.

        None too where it was a checkpoint that told the way.
        """
        return self._choice

    @property
    def stages_on(self) -> dict[str, list[int]]:
        """The numbers of the stages on every device in use, by its full TensorFlow name."""
        return self._strategy.planner.layout.stages_on

    @property
    def staleness(self) -> tuple[int, ...]:
        """Of every stage, of how many updates before its own a minibatch's gradients are, once the pipeline is full.

        That is the age of the weights that its forward reads, by the schedule; a scheme that predicts weights reads
        them moved so far ahead. With synchronous schemes it is 0. A plan of all-reduce or parameter-server with late
        updates has 1. After each drain, such as at an epoch's end, the first minibatches have less.
        """
        return tuple(self._strategy.staleness)

    @property
    def stragglers(self) -> tuple[int, ...]:
        """Of ``coded-reduce``, for every worker the steps since ``compile`` that ended without it.

        A worker counts whose parent had the step's weights for it, and did not have its gradients when the step ended:
        it was late with them, or still at an earlier step. Empty for other schemes.
        """
        return getattr(self._strategy, "stragglers", ())

    @property
    def exact_trace(self) -> bool:
        """Whether the trace has all times and messages, at the price of speed; False by default.

        A new value applies from the next ``fit`` on.

        If it is True, data parallelism and grids record every message, and the last stage's forward and backward are
        apart, which otherwise are one call, on GPUs and with XLA recorded as a forward. Where functions over all
        devices run the stages, other times are exact in any case, as they are on CPU devices of this process. Where a
        thread runs each device, each action then waits for its GPU or its worker before it sends results and at its
        end. Otherwise its span is the time of the call that enqueues its work, a transfer from another device may
        include waiting for the kernels that compute what is sent, and transfers to workers are not recorded.
        """
        return self._exact_trace

    @exact_trace.setter
    def exact_trace(self, wanted: bool) -> None:
        self._exact_trace = checked_bool(
            "exact_trace", wanted, "A trace's times are either exact (True) or not (False)"
        )

    def __repr__(self) -> str:
        return f"<PipelineModel {self._overview.line}>" if "_strategy" in vars(self) else super().__repr__()

    @property
    def _overview(self) -> Overview:
        strategy = self._strategy
        planner = strategy.planner
        devices = strategy.devices if isinstance(strategy, AutoStrategy) else planner.layout.distinct_devices
        return Overview(self.name, self.scheme, planner, self._choice, devices)

    def summary(
        self,
        line_length: int | None = None,
        positions: Sequence[float] | None = None,
        print_fn: Callable[..., Any] | None = None,
        **settings: Any,
    ) -> None:
        """A table of the stages, and below it Keras' own ``summary`` of the wrapped model, with these arguments.

        Of each stage its layers, devices, parameters, and the memory that it needs where a plan has told that. Nothing
        is measured or decided for it: what is open is said.
        """
        (print_fn or print)(f"{self._overview.text}\n")
        self.model.summary(line_length=line_length, positions=positions, print_fn=print_fn, **settings)

    def plot(self, path: str | Path | None = None) -> Picture:
        """Bars of what the stages take and hold on their devices, with the device that all others wait for.

        Where nothing is planned, since the cut is given and little work, their parameters. What stages did in training
        ``trace.plot()`` shows. Needs matplotlib: ``pip install "pipetrain[plot]"``.

        Args:
            path: a file to save it to, of the kind that its name ends in.

        Returns:
            The matplotlib figure. Raises ValueError where the way to train, or the cut, is not decided yet.
        """
        return self._overview.plot().saved(path)

    def partition(self, batch_size: int = DEFAULT_ROWS, input_shapes: Any = None) -> Partition:
        """How the model is cut; it is profiled at this batch size if it is not cut yet.

        ``input_shapes`` as for ``pipetrain.profile``, if the model leaves dimensions open; by default those of the
        first minibatch that it was trained on. Raises ValueError if the shapes are not known.
        """
        self._strategy.planner.ask(input_shapes)
        with self._watched():
            return self._strategy.planner.partition(batch_size, verbose=True)

    def explain(self, batch_size: int = DEFAULT_ROWS, input_shapes: Any = None) -> Explanation:
        """A text: how the model is cut, and the estimates of other ways to train it on these devices.

        With ``scheme="auto"`` the ways among which it chooses, or has chosen, with what they took in a trial. A
        notebook shows it as tables; its parts are its attributes ``choice`` and ``cut``, and
        ``pm.explain(128).choice.plot()`` draws the ways.
        ``input_shapes`` as for ``partition``.
        """
        if self.choice is not None and self.choice.batch_size == batch_size:
            return self.choice.explained()
        self._strategy.planner.ask(input_shapes)
        with self._watched():
            return self._strategy.explanation(batch_size, self._chosen_scheme)

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        """The wrapped model's forward."""
        return self.inner(inputs, training=training)

    def compile(
        self,
        optimizer: Any = ...,
        loss: Any = ...,
        loss_weights: Any = ...,
        metrics: Any = ...,
        weighted_metrics: Any = ...,
        run_eagerly: Any = ...,
        steps_per_execution: Any = ...,
        jit_compile: Any = ...,
        auto_scale_loss: Any = ...,
        **settings: Any,
    ) -> None:
        """Keras' ``compile``. Raises ValueError, with the option's name, for what a pipeline cannot do exactly.

        What is not given is as in the wrapped model's own ``compile``: a task of KerasHub has its optimizer, loss and
        metrics, and more ``settings``, such as ``sampler``.

        An optimizer's ``global_clipnorm=c`` makes every gradient ``g * min(1, c/n)``, ``n**2`` being the sum of the
        squares of all stages' gradients of a minibatch: for synchronous schemes, or one stage. With ``use_ema`` each
        stage averages its weights after each of its updates; ``fit`` ends with the averages as the model's weights.
        With ``gradient_accumulation_steps=k`` each stage updates after every k-th of its minibatches, by the mean of
        their gradients.

        Synchronous schemes scale the loss of a model with the dtype policy ``mixed_float16``, as Keras does: a
        minibatch with a gradient that is not finite, in any stage, makes no step. With ``loss_scale_factor`` every
        scheme scales it by this number.

        ``steps_per_execution=n`` lets a call of an asynchronous pipeline's function have n minibatches, 32 at most.
        Weights do not depend on it, and callbacks see every minibatch; a learning rate that they set takes effect
        after at most ``2 * n + stages + 1`` minibatches, those read ahead. By default n is 1 to 8, chosen from
        how much the model computes. For ``"data-parallel"`` it is as in plain Keras.

        ``jit_compile=True`` lets XLA compile every stage's functions, with a warning where it cannot; ``False`` does
        not. With ``"auto"``, the default, each stage has the kernels that a profile says are faster for it.
        """
        self.check_no_session("compile")
        every = {"optimizer": optimizer, "loss": loss, "loss_weights": loss_weights, "metrics": metrics}
        every |= {"weighted_metrics": weighted_metrics, "run_eagerly": run_eagerly, "jit_compile": jit_compile}
        every |= {"steps_per_execution": steps_per_execution, "auto_scale_loss": auto_scale_loss}
        given = {name: value for name, value in every.items() if value is not ...}
        self.compile_with(**resolved(self.model, given | settings))

    def compile_with(self, **arguments: Any) -> None:
        """``compile``, by the arguments of Keras' own, made by the wrapped model's own ``compile``, if it has one."""
        check_optimizer_kind(arguments.get("optimizer"))
        jit_compile = arguments.get("jit_compile", "auto")
        check_jit_compile(jit_compile)
        self.compiled, self._compile_again = False, partial(self.compile_with, **arguments)  # where Keras does not look
        strategy, optimizer = self._strategy, arguments.pop("optimizer", "rmsprop")
        if optimizer is not None:
            optimizer = keras.optimizers.get(optimizer)  # made in no strategy's scope
        with strategy.distribution.scope():
            optimizer, settings = strategy.keras_arguments(optimizer, arguments)
            super().compile(optimizer=optimizer, **settings)
        self.compiled = False  # what is refused below must not be trained with
        if self.optimizer is None:
            raise ValueError("Training needs an optimizer. Received: optimizer=None. Try keras.optimizers.SGD(1e-2).")
        strategy.compiled(self, arguments.get("loss"), jit_compile)
        self.compiled = True

    def check_compile_called(self, method: str) -> None:
        """Keras' check; the first time a model that is not compiled is compiled as the wrapped model is, if that is."""
        if self._compile_again is None and self.model.compiled:
            self.compile_with(**arguments_of(self.model))
        super().check_compile_called(method)
