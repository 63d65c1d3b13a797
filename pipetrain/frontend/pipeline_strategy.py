"""Training by a pipeline: stages of layers on devices, with several minibatches in flight or several microbatches."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import keras

from pipetrain.compute.cores import is_remote
from pipetrain.compute.functions.stage import Stage
from pipetrain.compute.graph.blocks import Chain
from pipetrain.compute.graph.sharing import embeddings
from pipetrain.compute.keras_private import flat_layers
from pipetrain.compute.optimizer.clone import plain_momentum, told
from pipetrain.compute.optimizer.gradient_scaling import is_dynamic, stepping
from pipetrain.compute.optimizer.muon import AttentiveMuon
from pipetrain.compute.profiling.operation_count import estimated_s
from pipetrain.frontend.contexts import known
from pipetrain.frontend.fit_session import FitSession
from pipetrain.frontend.layout import training_stages
from pipetrain.frontend.planner import Planner
from pipetrain.frontend.refusals import check_votes
from pipetrain.frontend.runner_strategy import RunnerStrategy
from pipetrain.run.course_runner import CourseRunner
from pipetrain.run.pipeline import Pipeline
from pipetrain.run.program_runner import ProgramRunner, is_one_function
from pipetrain.schemes.compression import summing
from pipetrain.schemes.policies import SpecTrainPolicy
from pipetrain.schemes.scheme import Scheme
from pipetrain.schemes.splitting import window

_logger = logging.getLogger(__name__)
MANY_STAGES = 5  # from which on the paper's prediction is clearly worse than one to a single target
CALL_S, MOST_AT_ONCE = 0.03, 8  # of functions that have several minibatches: seconds, and how many
MOST_STEPS = 32  # minibatches of a call where they are asked for: more take many seconds to trace


class PipelineStrategy(RunnerStrategy):
    """Stages of the model's layers, one on each device or several.

    Args:
        planner: of the model, which decides on its layout.
        scheme: order of actions and choice of weights.
    """

    def __init__(self, planner: Planner, scheme: Scheme) -> None:
        super().__init__(planner, scheme)
        if scheme.replica_compression is not None and max(planner.layout.replicas) == 1:
            raise ValueError(
                "No stage has several devices, whose sums could be compressed. Received: "
                f"replica_compression={str(scheme.replica_compression)!r}, replicas={planner.layout.replicas}. "
                f"Try replicas={(2, *planner.layout.replicas[1:])}, or leaving replica_compression out."
            )
        if (votes := scheme.replica_compression) is not None and votes.majority and min(planner.layout.replicas) == 1:
            raise ValueError(
                "A stage of one device would get gradients as they are, and the others signs, which need another "
                f"learning rate. Received: replica_compression={str(votes)!r}, replicas={planner.layout.replicas}. "
                f"Try replicas={tuple(max(2, each) for each in planner.layout.replicas)}, or {votes.name!r}."
            )
        self._summed = 0.0  # the momentum by which replicas sum gradients, in place of the optimizer
        self._to_say: list[str] = []  # at the first ``fit`` of a compilation that shows anything

    @property
    def readers(self) -> Sequence[str]:
        """The first stage's device reads whole minibatches; labels go from its host to the last stage's."""
        return self.planner.layout.devices[:1]

    def compiled(self, owner: keras.Model, loss: Any, jit_compile: Any) -> None:
        """The optimizer and the loss are new: stages are made anew when the next ``fit`` begins."""
        if (compression := self._scheme.replica_compression) is not None:
            if is_dynamic(owner.optimizer):
                raise ValueError(
                    "What messages lacked would be of another loss scale than what it is added to. Received: "
                    f"replica_compression={str(compression)!r}, optimizer={type(owner.optimizer).__name__}, in which "
                    "Keras wraps others under the policy 'mixed_float16'. Try the policy 'mixed_bfloat16'."
                )
            check_votes(compression, "replica_compression", owner.optimizer, self.model)
            if compression.majority and self._has_rows_or_shares():
                raise ValueError(
                    "Stages that share weights add their gradients, and a sum of majorities is none. Received: "
                    f"replica_compression={str(compression)!r}, weights that several layers or calls have. "
                    f"Try {compression.name!r}."
                )
            summing(compression)  # raises for one that a scheme's own object may have
            plain = self._scheme.synchronous and not self._has_rows_or_shares()
            momentum = plain * plain_momentum(stepping(owner.optimizer))
            self._summed = compression.corrected(momentum, "replica_compression")
        super().compiled(owner, loss, jit_compile)
        stages, scheme = self.planner.layout.stages, self._scheme
        steps, factor, self._to_say = self._compilation.steps, scheme.rule(0, stages, self.microbatches).stretch, []
        if factor != 1:
            self._to_say.append(f"Momentum is stretched (stretch_momentum): {told(steps, factor)}.")
        elif isinstance(scheme.policy, SpecTrainPolicy) and stages >= MANY_STAGES:
            self._to_say.append(
                "With this many stages spectrain as published loses accuracy: 0.04 to 0.09 at 8 stages in our runs, "
                "where pipetrain.SpecTrain(horizon='target') lost 0.03 at most (docs/results/staleness.md)."
            )
        if scheme.asynchronous and stages > 1 and self._predicts_words():
            fewest = -(-stages // 4)
            if not isinstance(steps, AttentiveMuon):
                self._to_say.append(
                    f"With {type(steps).__name__} and late gradients language models learn slowly: "
                    "pipetrain.AttentiveMuon and pipetrain.SpecTrain(horizon='target') were as good as one device, and "
                    "scheme='1f1b' is (docs/results/language-models.md)."
                )
            elif scheme.splits and self.microbatches < fewest:
                self._to_say.append(
                    f"With microbatches={self.microbatches} and {stages} stages language models learn slowly at first. "
                    f"Try microbatches={fewest}: a quarter of the stages was as good as one device "
                    "(docs/results/language-models.md)."
                )

    def begin(self, session: FitSession) -> None:
        """A ``fit`` begins."""
        if self.planner.verbose:
            for what in self._to_say:
                _logger.info(what)
            self._to_say = []
        super().begin(session)

    def _decide(self, rows: int | None) -> None:
        self.planner.decided(rows)

    def _built(self, rows: int | None) -> Sequence[list[Stage]]:
        planner = self.planner
        return training_stages(
            planner.chain,
            planner.decided(rows),
            self._scheme,
            known(self.optimizer),
            self._compilation.metrics.loss,
            rows,
            self.microbatches,
            planner.training.recompute,
            lambda: planner.verbose,
            self._summed,
        )

    def _has_rows_or_shares(self) -> bool:
        """Whether gradients of some weights are rows, or are added for several layers: momentum is the optimizer's."""
        used = [id(each) for block in self.planner.chain.blocks for call in block.calls for each in call.weights]
        return len({*used}) < len(used) or bool(embeddings(self.model, self.model.trainable_variables))

    def _predicts_words(self) -> bool:
        """Whether it is a language model, as layers tell: embeddings, attentions, and an output at each position."""
        layers = flat_layers(self.model)
        attends = any("attention" in type(layer).__name__.lower() for layer in layers)
        embeds = any(isinstance(layer, keras.layers.Embedding) for layer in layers)
        return attends and embeds and any(len(each.shape) > 2 for each in self.model.outputs)

    def _new_runner(self) -> Any:
        return Pipeline(self._stages.replicas, self._scheme, self.microbatches, self._run_settings)

    def _traced(self, runner: Any) -> Any:
        """One function a minibatch, or for several of them, where that serves."""
        kind = self._kind_of_runner()
        if type(runner) is not kind:
            traced, runner = runner, kind(*(self._stages.replicas, self._scheme, self.microbatches, self._run_settings))
            runner.traced_for, runner.output_masks, runner.made = traced.traced_for, traced.output_masks, traced.made
        if isinstance(runner, CourseRunner):
            runner.minibatches = self._minibatches_at_once()
            stands_in = runner.minibatches == 1 and not self._on_workers
            ahead = window(self.planner.layout.stages, self.microbatches, flushes=False)
            runner.most_ahead = ahead if stands_in else None  # as threads would: learning rates take effect by it
        return runner

    def _runner_for_data(self) -> Any:
        runner = super()._runner_for_data()
        if known(self._fit).session.has_checkpoints and not runner.keeps_flight:
            self._runner = runner = self._traced(runner)
        return runner

    @property
    def _on_workers(self) -> bool:
        return any(map(is_remote, self.planner.layout.devices))

    def _kind_of_runner(self) -> Any:
        """What is to run the stages.

        An asynchronous pipeline has several functions, for each of which TensorFlow prepares all of the stages' own:
        that is worth it on workers, where minibatches are small, and for checkpoints that do not drain it.
        """
        if not is_one_function(self._scheme, self._stages.replicas):
            return Pipeline
        if not self._scheme.asynchronous:
            return ProgramRunner
        has_checkpoints = known(self._fit).session.has_checkpoints
        return CourseRunner if self._on_workers or has_checkpoints or self._minibatches_at_once() > 1 else Pipeline

    def _minibatches_at_once(self) -> int:
        """How many minibatches a call has in the ``fit`` that is under way: what is asked, or as it is estimated."""
        if self._steps is not None:
            return min(self._steps, MOST_STEPS)
        rows = known(known(self._fit).session.rows)
        return minibatches_of_call(self.planner.chain, self.planner.layout.stages, rows)


def minibatches_of_call(chain: Chain, stages: int, rows: int) -> int:
    """How many minibatches of so many rows take a call's time in a pipeline of so many stages, by estimate.

    What is measured would be another number each time, and learning rates take effect by it.
    """
    try:
        minibatch_s = estimated_s(chain, rows) / stages
    except (AttributeError, TypeError, ValueError):  # nothing is known of such layers
        return 1
    return max(1, min(MOST_AT_ONCE, int(CALL_S / max(minibatch_s, CALL_S / MOST_AT_ONCE))))
