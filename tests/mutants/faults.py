"""Small faults of the source, each of which some test is to notice: ``run.py`` makes them one at a time.

They were chosen from the source by what it computes, not by what tests there are. Where the source changes, its fault
changes with it: ``tests/test_mutants.py`` says which one no longer fits.
"""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    """One piece of source and what takes its place.

    ``file`` is relative to the repository's root, ``before`` stands there exactly once. ``protects`` says what no
    longer holds with ``after`` in its place.
    """

    name: str
    file: str
    before: str
    after: str
    protects: str


SCHEMES = [
    Fault(
        "asynchronous-version",
        "pipetrain/schemes/schedules.py",
        "return max(0, microbatch - (stages - 1 - stage)) // microbatches",
        "return max(0, microbatch - (stages - stage)) // microbatches",
        "An asynchronous forward finds as many updates as the formula says.",
    ),
    Fault(
        "interleaved-warm-up",
        "pipetrain/schemes/schedules.py",
        "max(map(len, pieces)) + 2 * (devices - 1 - device)",
        "max(map(len, pieces)) + (devices - 1 - device)",
        "Interleaved 1F1B makes as many forwards first as its source says.",
    ),
    Fault(
        "zero-bubble-limit",
        "pipetrain/schemes/zero_bubble.py",
        "self._held < self._limit",
        "self._held <= self._limit",
        "A device of a zero-bubble schedule holds no more microbatches than its limit.",
    ),
    Fault(
        "spectrain-forward-horizon",
        "pipetrain/schemes/policies.py",
        "return Read(newest, reader.minibatch - newest + reader.stage // 2)",
        "return Read(newest, reader.minibatch - newest + (reader.stage + 1) // 2)",
        "SpecTrain's forwards predict as far ahead as the paper says, at odd stages too.",
    ),
    Fault(
        "spectrain-shared-backward",
        "pipetrain/schemes/policies.py",
        "return Read(current, reader.minibatch - current + reader.stage // 2)",
        "return Read(current, reader.stage // 2)",
        "SpecTrain's backwards predict shared weights that are behind up to the same target.",
    ),
    Fault(
        "one-target-reach",
        "pipetrain/schemes/policies.py",
        "return (done + reach * (stages - 1)) / microbatches",
        "return (done + reach * stages) / microbatches",
        "With one target all stages predict the version that the formula says.",
    ),
    Fault(
        "2bw-horizon",
        "pipetrain/schemes/policies.py",
        "return Read(0) if before < 0 else Read(before, self.horizon)",
        "return Read(0) if before < 0 else Read(before)",
        "2bw with a horizon reads predicted weights.",
    ),
    Fault(
        "kept-unpredicted",
        "pipetrain/schemes/weight_versions.py",
        "self._kept[read] = self._keep(read.horizon)",
        "self._kept[read] = self._keep(0)",
        "An old version that is read predicted is kept predicted.",
    ),
    Fault(
        "staleness-of-backward",
        "pipetrain/schemes/weight_versions.py",
        "microbatch // self._microbatches - self._reads(microbatch)[0].version",
        "microbatch // self._microbatches - self._reads(microbatch)[1].version",
        "Corrections go by the staleness of what the forward has read.",
    ),
    Fault(
        "adam-velocity",
        "pipetrain/schemes/policies.py",
        "correction = (1 - beta_2**step) ** 0.5 / (1 - beta_1**step)",
        "correction = (1 - beta_2**step) / (1 - beta_1**step)",
        "Adam's predicted weights go along its last update, its bias correction included.",
    ),
    Fault(
        "fit-fades",
        "pipetrain/schemes/policies.py",
        "FADING * sums[1] + square",
        "sums[1] + square",
        "The fitted multiple of the velocity forgets old observations in both of its sums.",
    ),
    Fault(
        "validated-order-of-minibatches",
        "pipetrain/schemes/validation.py",
        "if action.updates and minibatch < begun:",
        "if action.updates and minibatch < begun - 1:",
        "An order that mixes two minibatches' backwards at a stage is refused.",
    ),
    Fault(
        "code-of-subtrees",
        "pipetrain/schemes/coded_reduce.py",
        "piece._replace(coefficient=piece.coefficient * tree.code.coefficients[place][part])",
        "piece._replace(coefficient=tree.code.coefficients[place][part])",
        "In a tree of two levels the coefficients of both multiply.",
    ),
    Fault(
        "metropolis-weights",
        "pipetrain/schemes/synchrony.py",
        "Fraction(1, 1 + max(len(others), len(neighbours[other])))",
        "Fraction(1, 1 + len(others))",
        "What a worker gives its neighbours, and what it takes of them, are both whole.",
    ),
    Fault(
        "transfer-window",
        "pipetrain/schemes/transfers/plan.py",
        "counted[-self.window] if 0 < self.window <= len(counted)",
        "counted[-1] if 0 < self.window <= len(counted)",
        "As many messages are under way at once as the phase's window allows.",
    ),
    Fault(
        "lost-rows",
        "pipetrain/schemes/splitting.py",
        "return range(rows * part // parts, rows * (part + 1) // parts)",
        "return range(rows // parts * part, rows // parts * (part + 1))",
        "Every row of a minibatch belongs to one of its parts, however many there are.",
    ),
]

PLAN = [
    Fault(
        "prediction-costs",
        "pipetrain/plan/cost.py",
        "share * sums.compute_s + (1 + PREDICTING * predictions) * sums.update_s",
        "share * sums.compute_s + sums.update_s",
        "Where weights are predicted, stages take the time of that too.",
    ),
    Fault(
        "overhead-of-microbatches",
        "pipetrain/plan/cost.py",
        "self._overhead_s = 2 * microbatches * cluster.overhead_s",
        "self._overhead_s = 2 * cluster.overhead_s",
        "Every microbatch's two actions have the cluster's overhead.",
    ),
    Fault(
        "largest-share",
        "pipetrain/plan/cost.py",
        "return math.ceil(self._batch_size / replicas) / self._batch_size",
        "return 1 / replicas",
        "A replicated stage takes as long as the replica with most rows.",
    ),
    Fault(
        "work-of-gradients",
        "pipetrain/plan/cost.py",
        "work = 2 * share * demand.work * (self._crossing[:-1] + self._outputs)",
        "work = share * demand.work * (self._crossing[:-1] + self._outputs)",
        "A block at work has the gradients of its inputs and outputs in memory too.",
    ),
    Fault(
        "bits-and-bytes",
        "pipetrain/plan/cluster.py",
        '/ (8 if match[3] == "b" else 1)',
        '/ (8 if match[3] == "B" else 1)',
        "In a cluster file Gb/s are bits and GB/s are bytes.",
    ),
    Fault(
        "all-reduce-seconds",
        "pipetrain/plan/cluster.py",
        "return 2 * (replicas - 1) * (self.latency_s",
        "return (replicas - 1) * (self.latency_s",
        "Summing gradients in a ring takes two rounds of messages.",
    ),
    Fault(
        "simplest-way",
        "pipetrain/plan/choice.py",
        "return min(near, key=lambda way: (not way.is_exact, KINDS.index(way.kind), way.losses, way.known_s))",
        "return min(near, key=lambda way: (way.known_s, KINDS.index(way.kind)))",
        "The simplest way is taken where others are hardly faster.",
    ),
    Fault(
        "faster-in-microbatches",
        "pipetrain/plan/profile.py",
        "(part if last_s > first_s else min(part, 1.0))",
        "part",
        "What a block gains in microbatches is not carried beyond those that were measured.",
    ),
    Fault(
        "gradients-of-divided-layers",
        "pipetrain/plan/grid_cost.py",
        "reduced += 2 * (grid.rows - 1) * size",
        "reduced += 2 * (grid.devices - 1) * size",
        "Gradients of a divided layer are summed over the devices with the same outputs alone.",
    ),
    Fault(
        "sums-in-memory",
        "pipetrain/plan/memory.py",
        "sums = 1 + gathered if action.updates else gathered",
        "sums = 1 if action.updates else gathered",
        "While gradients are added the old sum and the new one are in memory.",
    ),
    Fault(
        "largest-stage-that-fits",
        "pipetrain/plan/search.py",
        "_window_minima(f, np.arange(1, len(f)), last + 1)",
        "_window_minima(f, np.arange(1, len(f)), last)",
        "A stage may have as many blocks as fit the memory.",
    ),
    Fault(
        "shared-inside-one-stage",
        "pipetrain/plan/cost.py",
        "((inside > 0) & (inside < len(places)))",
        "(inside > 0)",
        "Weights that are shared within one stage alone cost no messages.",
    ),
    Fault(
        "filling-and-draining",
        "pipetrain/plan/stages.py",
        "return max((1 + filling) * self.slowest_s, work_s / self.processors)",
        "return max(self.slowest_s, work_s / self.processors)",
        "A synchronous schedule's minibatch takes the filling and draining of the pipeline too.",
    ),
]

SIMULATION = [
    Fault(
        "busy-link",
        "pipetrain/simulation/stations.py",
        "if free_at[medium] > now:",
        "if free_at[medium] < now:",
        "A simulated transfer waits until its link is free.",
    ),
    Fault(
        "predictions-of-a-microbatch",
        "pipetrain/simulation/costs.py",
        "return forwards / self._microbatches, backwards / self._microbatches",
        "return forwards, backwards",
        "In a simulation a minibatch predicts weights as often as in training.",
    ),
    Fault(
        "slow-updates",
        "pipetrain/simulation/pipeline.py",
        "taken_s *= station.factors[station.position]",
        "taken_s *= 1.0",
        "A simulated slowdown makes updates slower too.",
    ),
    Fault(
        "vectorized-links",
        "pipetrain/simulation/pipeline.py",
        "sent_s = np.maximum(computed_s, self._link_free_s[link]) + self._holds_s[link, place >> 1]",
        "sent_s = computed_s + self._holds_s[link, place >> 1]",
        "The simulation by arrays gives the same times as that by events where links are slow.",
    ),
    Fault(
        "load-of-a-tree",
        "pipetrain/simulation/coded_reduce.py",
        "TreeSetting(tree, float(tree.load) * whole_s,",
        "TreeSetting(tree, whole_s / tree.workers,",
        "A simulated worker computes all the rows that a code gives it.",
    ),
    Fault(
        "acknowledgement-latency",
        "pipetrain/simulation/kernel.py",
        "there_s = self._clock.now + self._route(sink, source).latency_s",
        "there_s = self._clock.now",
        "A simulated acknowledgement takes the latency of its link.",
    ),
    Fault(
        "gradients-gathered-in-parts",
        "pipetrain/simulation/data_parallel.py",
        "self._scatters = len(sinks) > 2 and setting.gradient_bytes is None",
        "self._scatters = len(sinks) > 2",
        "Compressed gradients are sent whole to every worker that needs the sum.",
    ),
    Fault(
        "share-of-a-divided-layer",
        "pipetrain/simulation/grid.py",
        "            share = sum(self._counts[n] for n in self._grid.group(part)) / rows",
        "            share = self._counts[device] / rows",
        "A simulated device computes its channels for all rows of its group.",
    ),
    Fault(
        "step-of-a-trace",
        "pipetrain/trace/trace.py",
        "return float(ends_s[last] - ends_s[first]) / (last - first)",
        "return float(ends_s[last] - ends_s[first]) / (last - first + 1)",
        "A trace's seconds for a minibatch are divided by as many minibatches as were measured.",
    ),
    Fault(
        "cause-of-idleness",
        "pipetrain/trace/idle.py",
        'yield "imbalance", row, there_s, start_s',
        'yield "transfer", row, there_s, start_s',
        "Waiting after all inputs have arrived is not said to be a transfer.",
    ),
    Fault(
        "newest-records",
        "pipetrain/trace/records.py",
        "joined[np.arange(max(0, len(joined) - self._count), len(joined))]",
        "joined[np.arange(0, min(len(joined), self._count))]",
        "A long training's trace keeps the newest actions.",
    ),
]

COMPUTE = [
    Fault(
        "gradient-of-one-stage",
        "pipetrain/compute/functions/backward.py",
        "return b if a is None else a",
        "return None",
        "A shared weight that a gradient reaches in one stage alone is trained.",
    ),
    Fault(
        "rows-of-words",
        "pipetrain/compute/functions/backward.py",
        "tf.concat([a.indices, b.indices], 0)",
        "tf.concat([b.indices, a.indices], 0)",
        "Of an embedding's gradients, added over microbatches, each row belongs to its own word.",
    ),
    Fault(
        "summed-penalty",
        "pipetrain/compute/functions/stage_function.py",
        "else (scaled_share, scale)",
        "else (scaled_share, scaled_share)",
        "A layer's own loss that is a sum over rows counts fully for each part of a minibatch.",
    ),
    Fault(
        "averaged-statistics",
        "pipetrain/compute/functions/state.py",
        "tf.add_n([each.values[n] for each in everyone]) / len(everyone)",
        "first",
        "The statistics of batch normalization are the mean of all replicas'.",
    ),
    Fault(
        "random-numbers-of-replicas",
        "pipetrain/compute/functions/state.py",
        "replica + STREAMS * before",
        "STREAMS * before",
        "Every replica draws random numbers of its own.",
    ),
    Fault(
        "order-of-factors",
        "pipetrain/compute/functions/weight_products.py",
        "return WeightProduct(self.inputs + other.inputs, self.gradients + other.gradients)",
        "return WeightProduct(self.inputs + other.inputs, other.gradients + self.gradients)",
        "A weight gradient that is made once for all microbatches pairs each one's inputs with its own gradients.",
    ),
    Fault(
        "nesterov-kernel",
        "pipetrain/compute/optimizer/update.py",
        "use_nesterov=optimizer.nesterov,",
        "use_nesterov=False,",
        "SGD with Nesterov momentum makes Keras' own updates.",
    ),
    Fault(
        "decay-in-the-displacement",
        "pipetrain/compute/optimizer/update.py",
        "return value - value * decay * rate",
        "return value",
        "Weight decay is no part of the velocity that is measured.",
    ),
    Fault(
        "accumulated-before",
        "pipetrain/compute/optimizer/update.py",
        "(tf.cast(since, minibatches.dtype) + minibatches) / self._every",
        "minibatches / self._every",
        "Where gradients are accumulated, predictions count the minibatches since the last update.",
    ),
    Fault(
        "growth-of-the-loss-scale",
        "pipetrain/compute/optimizer/gradient_scaling.py",
        "if self.finite_steps == self.growth_steps - 1:",
        "if self.finite_steps == self.growth_steps:",
        "A dynamic loss scale is doubled after as many steps as in Keras.",
    ),
    Fault(
        "decay-under-stretched-momentum",
        "pipetrain/compute/optimizer/clone.py",
        "optimizer.weight_decay / factor",
        "optimizer.weight_decay * factor",
        "Where momentum is stretched, weight decay stays what it is.",
    ),
    Fault(
        "slots-of-replicas",
        "pipetrain/compute/optimizer/slots.py",
        "for part in parts[1:]:",
        "for part in parts[2:]:",
        "Every replica goes on with what the compiled optimizer has gathered.",
    ),
    Fault(
        "observed-displacement",
        "pipetrain/compute/optimizer/velocity.py",
        "tf.reduce_sum(tf.cast(variable.value - left, tf.float32) * by) / tf.cast(steps, tf.float32)",
        "tf.reduce_sum(tf.cast(variable.value - left, tf.float32) * by)",
        "The fitted multiple is that of the velocity for one update.",
    ),
    Fault(
        "regularizer-of-shared-weights",
        "pipetrain/compute/graph/segment.py",
        "penalties = [*own, *(loss for variable, loss in pairs if id(variable) not in self.before)]",
        "penalties = [*own, *(loss for _, loss in pairs)]",
        "The regularizer of a weight that several stages have counts once.",
    ),
    Fault(
        "gradient-by-an-assigned-weight",
        "pipetrain/compute/graph/segment.py",
        "lambda gradient: (gradient, None)",
        "lambda gradient: (tf.zeros_like(gradient), None)",
        "A weight that a layer assigns to in its forward still gets its gradient.",
    ),
    Fault(
        "vote-on-zero",
        "pipetrain/compute/transfers/compression.py",
        "signs = tf.where(values == 0, is_even, values > 0)",
        "signs = values >= 0",
        "A weight that has no gradient on any device is not moved by their majority.",
    ),
    Fault(
        "gradients-within-a-group",
        "pipetrain/compute/grid/pieces.py",
        "found[sink] = in_order(parts)",
        "found[sink] = parts[sink]",
        "The gradient of a divided layer's inputs is the sum over all devices of the group.",
    ),
    Fault(
        "norm-of-a-grid",
        "pipetrain/compute/grid/weights.py",
        "return [norms[number][0], *(sent(",
        "return [*(sent(",
        "On a grid gradients are clipped by the norm of the whole ones too.",
    ),
    Fault(
        "shares-under-a-code",
        "pipetrain/compute/transfers/coded.py",
        "shares = Shares(given.factors[n, 0], given.factors[n, 1])",
        "shares = Shares(given.factors[n, 1], given.factors[n, 0])",
        "Under a code a loss that is a sum over rows counts fully for each part.",
    ),
    Fault(
        "penalty-of-a-worker",
        "pipetrain/compute/transfers/weights.py",
        "penalty = tf.cast(as_mean(penalty, shares.penalty), tf.float32) * shares.penalty",
        "penalty = tf.cast(as_mean(penalty, shares.penalty), tf.float32)",
        "The loss that all-reduce reports has the layers' own losses once.",
    ),
    Fault(
        "late-gradient-of-nobody",
        "pipetrain/compute/transfers/step.py",
        "if number in of else tf.zeros_like(variable)",
        "if number in of else variable",
        "A worker without rows has no late gradient, not that of the minibatch before.",
    ),
    Fault(
        "weights-of-a-stale-gradient",
        "pipetrain/compute/transfers/step.py",
        "pulled = self._pulled(active) if self._is_stale else []",
        "pulled = []",
        "A stale gradient is made with the weights from before the gradient that waits.",
    ),
    Fault(
        "fragments-left-apart",
        "pipetrain/compute/transfers/outer_step.py",
        "if not (self.unites and each == exchanged)]",
        "if not self.unites or exchanged is None]",
        "A drain joins the fragments that the last step has not joined, too.",
    ),
    Fault(
        "own-weights-after-a-drain",
        "pipetrain/compute/transfers/outer_step.py",
        "value = tf.where(there, mine.value.read_value(), variable.value.read_value())",
        "value = variable.value.read_value()",
        "After a drain each worker of a gossip goes on from its own weights, not from the average.",
    ),
    Fault(
        "bytes-after-a-block",
        "pipetrain/compute/profiling/block_costs.py",
        "for value in chain.crossing(index + 1))",
        "for value in chain.crossing(index))",
        "A profile says what crosses a cut after each block.",
    ),
    Fault(
        "steps-of-a-recurrent-layer",
        "pipetrain/compute/profiling/operation_count.py",
        "each._replace(times=steps)]",
        "each]",
        "The operations of a recurrent layer are counted for each of its steps.",
    ),
]

RUN = [
    Fault(
        "number-of-a-message",
        "pipetrain/run/program_runner.py",
        "return tf.constant(settings.minibatches + minibatch, tf.int64)",
        "return tf.constant(minibatch, tf.int64)",
        "A run that goes on draws for the messages over its cuts what it would have drawn.",
    ),
    Fault(
        "summed-loss",
        "pipetrain/compute/program/arguments.py",
        "of_loss = shares if loss_is_mean else [1.0] * len(shares)",
        "of_loss = shares",
        "A loss that is a sum over rows is the sum of the microbatches'.",
    ),
    Fault(
        "penalties-of-all-stages",
        "pipetrain/compute/program/stage_trace.py",
        "penalty = own if penalty is None else penalty + own",
        "penalty = own",
        "The loss that is reported has the layers' own losses of all stages.",
    ),
    Fault(
        "share-of-a-replica",
        "pipetrain/compute/program/arguments.py",
        "(each if replicas > 1 else 1.0)",
        "(1 / replicas)",
        "Replicas with more rows than others count for as much more.",
    ),
    Fault(
        "share-of-a-microbatch",
        "pipetrain/schemes/splitting.py",
        "return len(self.microbatch(number)) / self.rows if self.rows else 1 / self.microbatches",
        "return 1 / self.microbatches",
        "Microbatches with more rows than others count for as much more.",
    ),
    Fault(
        "penalty-beside-a-sum",
        "pipetrain/compute/program/walk.py",
        "(each.penalty, each.share.of_minibatch)",
        "(each.penalty, each.share.of_loss)",
        "Beside a loss that is a sum over rows, regularization still counts once a minibatch.",
    ),
    Fault(
        "skipped-step",
        "pipetrain/compute/program/sums.py",
        "        if finite is None:\n            apply()",
        "        if True:\n            apply()",
        "With a dynamic loss scale no step is made by gradients that are not finite.",
    ),
    Fault(
        "sum-over-stages",
        "pipetrain/compute/program/sums.py",
        "return [over_stages(a, b) for a, b in zip(here, mine, strict=True)]",
        "return [a for a, b in zip(here, mine, strict=True)]",
        "The gradients of shared weights are the sums over all stages that have them.",
    ),
    Fault(
        "norm-of-all-stages",
        "pipetrain/compute/program/sums.py",
        "tf.stack([moved(each, trace.device) for each in norms])",
        "tf.stack([moved(each, trace.device) for each in norms[:1]])",
        "Gradients are clipped by the norm of all stages' together.",
    ),
    Fault(
        "weights-of-recomputation",
        "pipetrain/run/stage_work.py",
        "if self._stage.recompute and not self._weights.last(microbatch.number):",
        "if self._stage.recompute and self._weights.last(microbatch.number):",
        "A forward is run again with the weights that it had the first time.",
    ),
    Fault(
        "rate-of-late-gradients",
        "pipetrain/run/step_runner.py",
        "self._late_rate if self.plan.are_late(group.numbers) else learning_rate",
        "learning_rate",
        "Late gradients are applied with the learning rate of the step that made them.",
    ),
    Fault(
        "snapshots-after-a-drain",
        "pipetrain/run/control.py",
        "steps, every = self._settings.steps + version, self._settings.snapshot_every",
        "steps, every = version, self._settings.snapshot_every",
        "Snapshots count the updates of the whole fit, whenever the pipeline was drained.",
    ),
]

FRONTEND = [
    Fault(
        "epochs-passed-over",
        "pipetrain/checkpoint/state.py",
        "for _ in range(first_epoch, position.epoch):",
        "for _ in range(first_epoch + 1, position.epoch):",
        "Training that is resumed reads the minibatches in the order that they would have had.",
    ),
    Fault(
        "rates-of-what-is-in-flight",
        "pipetrain/run/course_runner.py",
        "rate = learning_rate if before is None else before.rate",
        "rate = learning_rate",
        "Minibatches that were in flight keep the learning rate that they took along, in the run that goes on, too.",
    ),
    Fault(
        "files-that-are-kept",
        "pipetrain/checkpoint/store.py",
        "for old in self._in_order()[: -self._keep]:",
        "for old in self._in_order()[: -self._keep - 1]:",
        "As many checkpoints are kept as were asked for.",
    ),
    Fault(
        "rate-of-what-is-resumed",
        "pipetrain/frontend/fit_session.py",
        'about["begun_rate"] == self._begun_rate:',
        'about["begun_rate"] != self._begun_rate:',
        "Training that is resumed has the learning rate that callbacks had set, unless the user has set another.",
    ),
    Fault(
        "loss-weighed-by-rows",
        "pipetrain/frontend/metrics.py",
        'update_loss(self._model, loss, tf.cast(rows, "float32"))',
        "update_loss(self._model, loss, tf.ones([]))",
        "An epoch's loss weighs minibatches by their rows.",
    ),
    Fault(
        "penalty-in-evaluation",
        "pipetrain/frontend/metrics.py",
        "loss += tf.cast(penalty, loss.dtype)",
        "loss += 0 * tf.cast(penalty, loss.dtype)",
        "The loss of an evaluation has the layers' own losses.",
    ),
    Fault(
        "divided-by-weights",
        "pipetrain/frontend/metrics.py",
        'if by == "weights":',
        'if by == "nothing":',
        "A loss that is divided by the sum of the sample weights is so for all parts of a minibatch together.",
    ),
    Fault(
        "rows-of-a-device",
        "pipetrain/frontend/mirroring.py",
        'factor = self._devices * tf.cast(rows, "float32") / tf.cast(_of_all(rows), "float32")',
        "factor = tf.ones([])",
        "With data parallelism a device with fewer rows than others counts for as much less.",
    ),
    Fault(
        "bubble-of-an-epoch",
        "pipetrain/frontend/runner_fit.py",
        "busy = (now.busy_s - since.busy_s) / (passed_s * activity.ranks)",
        "busy = (now.busy_s - since.busy_s) / passed_s",
        "An epoch's bubble is a share of the time of all devices.",
    ),
    Fault(
        "updates-ahead",
        "pipetrain/frontend/runner_fit.py",
        "if ahead := runner.made - before - int(self.told.numpy()):",
        "if ahead := runner.made - before:",
        "After a drain the optimizer has counted every update once.",
    ),
]

FAULTS = [*SCHEMES, *PLAN, *SIMULATION, *COMPUTE, *RUN, *FRONTEND]
