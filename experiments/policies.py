"""Ways to deal with staleness, ways to send less, and one training of a small network under one of them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import models
from experiments import optimizers
from experiments.datasets import Dataset
from experiments.networks import input_shape, parameters
from pipetrain.schemes.compression import COMPRESSIONS, CUTS, Int8, TopK
from pipetrain.schemes.options import AllReduce, ParameterServer, SpecTrain, TwoBW, Vanilla, with_options
from pipetrain.schemes.synchrony import LocalSGD

if TYPE_CHECKING:
    import keras

# Each policy's arguments of PipelineModel.
POLICIES: dict[str, Mapping[str, Any]] = {
    "single": {"scheme": "single"},
    "vanilla": {"scheme": "vanilla"},
    "weight-stashing": {"scheme": "weight-stashing"},
    "vertical-sync": {"scheme": "vertical-sync"},
    "2bw": {"scheme": "2bw"},
    "spike-compensation": {"scheme": "spike-compensation"},
    "vanilla + rescaling": {"scheme": Vanilla(rescale_steps=100)},
    "spectrain": {"scheme": "spectrain"},
    "spectrain/local": {"scheme": SpecTrain(horizon="local")},
    "spectrain/fitted": {"scheme": SpecTrain(horizon="fitted")},
    **{
        f"spectrain/target/M={count}": {"scheme": SpecTrain(horizon="target"), "microbatches": count}
        for count in (1, 2, 4, 8)
    },
    "2bw/1.5": {"scheme": TwoBW(horizon=1.5)},
}
ORDER = "none"  # every order gives the same weights, and none has to be found by trials
# What data parallelism sends; a policy's stages are then its workers.
SENDING: dict[str, Mapping[str, Any]] = {
    "all-reduce": {"scheme": AllReduce(ORDER)},
    **{f"all-reduce/{name}": {"scheme": AllReduce(ORDER, name)} for name in COMPRESSIONS},
    "all-reduce/sign:majority": {"scheme": AllReduce(ORDER, "sign:majority")},
    "all-reduce/int8 + feedback": {"scheme": AllReduce(ORDER, Int8(error_feedback=True))},
    **{f"all-reduce/local:{steps}": {"scheme": AllReduce(ORDER, synchrony=LocalSGD(steps))} for steps in (8, 32)},
    **{
        f"all-reduce/diloco:{steps}": {"scheme": AllReduce(ORDER, synchrony=LocalSGD(steps, 0.7, 0.9))}
        for steps in (8, 32)
    },
    "all-reduce/local:32 in 4 fragments": {"scheme": AllReduce(ORDER, synchrony=LocalSGD(32, fragments=4))},
    "all-reduce/local:32 in 4 fragments + overlap": {
        "scheme": AllReduce(ORDER, synchrony=LocalSGD(32, fragments=4, overlap=True))
    },
    "all-reduce/stale:1": {"scheme": AllReduce(ORDER, synchrony="stale:1")},
    **{
        f"parameter-server/{synchrony}": {"scheme": ParameterServer(ORDER, synchrony=synchrony)}
        for synchrony in ("asynchronous", "asynchronous:3")
    },
    "all-reduce/ring": {"scheme": AllReduce(ORDER, topology="ring")},
    **{
        f"all-reduce/{name}": {"scheme": AllReduce(ORDER, topology=name)}
        for name in ("gossip", "gossip:torus", "gossip:complete")
    },
    "all-reduce/gossip + local:8": {"scheme": AllReduce(ORDER, topology="gossip", synchrony="local:8")},
    "all-reduce/top-k - feedback": {"scheme": AllReduce(ORDER, TopK(error_feedback=False))},
    "all-reduce/top-k - momentum": {"scheme": AllReduce(ORDER, TopK(momentum_correction=False))},
    "all-reduce/top-k + warm-up": {"scheme": AllReduce(ORDER, TopK(warm_up=200))},
    "all-reduce/top-k + warm-up + clipping": {"scheme": AllReduce(ORDER, TopK(warm_up=200, local_clipnorm=1.0))},
}
# What crosses the cuts of pipelines.
CROSSING: dict[str, Mapping[str, Any]] = {
    "1f1b": {"scheme": "1f1b"},
    **{
        f"{scheme}/{each.name}": {"scheme": with_options(scheme, compression=each.name)}
        for scheme in ("1f1b", "spectrain")
        for each in CUTS
    },
}
EVERY_POLICY = {**POLICIES, **SENDING, **CROSSING}
MLP = "mlp"  # the network of this module
GUESSING = math.log(10)  # the loss of ten classes, all equally likely


@dataclass(frozen=True)
class Run:
    """What decides the accuracy of one training; ``stages`` is 1 for the policy ``single``.

    ``model`` is a network of ``models``, of the depth and width that it has, or ``mlp``. With ``every`` it is validated
    after so many minibatches again and again.
    """

    policy: str
    stages: int
    learning_rate: float
    seed: int
    momentum: float
    steps: int
    batch_size: int
    depth: int
    width: int
    optimizer: str = "momentum"
    residual: bool = False
    model: str = MLP
    every: int = 0

    @property
    def name(self) -> str:
        """Of the file that keeps the outcome."""
        model = "" if self.model == MLP else f"{self.model}-"
        policy = (
            self.policy.replace(" + ", "-")
            .replace(" - ", "-without-")
            .replace("/", "-")
            .replace("=", "")
            .replace(":", "")
        )
        return f"{model}{policy}-stages{self.stages}-rate{self.learning_rate:g}-seed{self.seed}"


@dataclass(frozen=True)
class Outcome:
    """Validation accuracy and loss of the last weights; None if the loss of step ``stopped_at`` was not finite.

    ``guessing`` is the loss of giving every class the same probability, of ten classes at least. ``history``: of each
    validation on the way the minibatches before it, and the accuracy.
    """

    accuracy: float | None
    loss: float | None
    stopped_at: int | None = None
    guessing: float = GUESSING
    history: tuple[tuple[int, float], ...] = ()

    @property
    def diverged(self) -> bool:
        """Whether the last loss is none, or worse than that of guessing."""
        return self.loss is None or not self.loss <= self.guessing


def recorded(run: Run, folder: Path) -> Outcome | None:
    """What the very same run came to before; None if it has not ended."""
    try:
        found = json.loads((folder / f"{run.name}.json").read_text(encoding="utf-8"))
        outcome = {**found["outcome"], "history": tuple(map(tuple, found["outcome"].get("history", ())))}
        return Outcome(**outcome) if Run(**found["run"]) == run else None
    except (OSError, KeyError, TypeError, ValueError):
        return None


def record(run: Run, outcome: Outcome, folder: Path) -> None:
    """Keep what a run came to; whole or not at all."""
    part = folder / f".{run.name}.part"
    part.write_text(json.dumps({"run": asdict(run), "outcome": asdict(outcome)}, indent=1) + "\n", encoding="utf-8")
    part.replace(folder / f"{run.name}.json")


def train(run: Run, data: Dataset) -> Outcome:
    """Train once, from the same weights and on the same minibatches for the same seed."""
    import keras

    import pipetrain
    from experiments.training import batches, validation
    from pipetrain.callbacks import Snapshots

    keras.backend.clear_session()
    keras.utils.set_random_seed(run.seed)
    shape, model = network(run, data)
    guessing = math.log(max(10, data.classes))  # two classes: a loss above log(2) is no divergence yet
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(loss=loss, metrics=["accuracy"])  # for the evaluation
    where = {} if run.policy == "single" else {"cuts": even_cuts(run, model)}
    if run.policy in SENDING:
        where = {"stages": run.stages}
    pm = pipetrain.PipelineModel(model, **where, **EVERY_POLICY[run.policy])
    pm.compile(optimizers.build(run.optimizer, run.learning_rate, run.momentum), loss=loss)
    steps, tested = _Count(), validation(data, shape)
    history: list[tuple[int, float]] = []

    def validated(model: keras.Model) -> dict[str, float]:
        return {name: float(each) for name, each in model.evaluate(tested, verbose=0, return_dict=True).items()}

    def note(step: int, model: keras.Model) -> None:
        history.append((step, validated(model)["accuracy"]))

    callbacks = [steps.callback(), *([Snapshots(run.every, note)] if run.every else [])]
    try:
        minibatches = batches(data, shape, run.batch_size, run.seed)
        pm.fit(minibatches, steps_per_epoch=run.steps, shuffle=False, verbose=0, callbacks=callbacks)
    except FloatingPointError:
        return Outcome(None, None, steps.done, guessing, tuple(history))
    result = validated(model)
    return Outcome(result["accuracy"], result["loss"], guessing=guessing, history=tuple(history))


class _Count:
    """The steps that a training has done."""

    def __init__(self) -> None:
        self.done = 0

    def callback(self) -> keras.callbacks.Callback:
        import keras

        def count(batch: int, logs: Any) -> None:
            self.done += 1

        return keras.callbacks.LambdaCallback(on_train_batch_end=count)


def network(run: Run, data: Dataset) -> tuple[tuple[int, ...], keras.Model]:
    """The network, and the shape of what it reads."""
    shape = data.x_train.shape[1:]
    if run.model == MLP:
        return shape, mlp(shape, data.classes, run.depth, run.width, run.residual)
    given = {"depth": run.depth, "width": run.width}
    size = {key: value for key, value in given.items() if key in parameters(run.model)}
    shape = input_shape(run.model, shape)
    return shape, models.build(run.model, shape, data.classes, **size)


def even_cuts(run: Run, model: keras.Model) -> list[str]:
    """The last layers of all stages but the final one: the same number of layers each, or of places to cut at."""
    if run.model == MLP:
        return cuts(run.depth, run.stages, run.residual)
    from pipetrain.compute.graph.blocks import Chain

    blocks = Chain(model).blocks
    return [blocks[len(blocks) * stage // run.stages - 1].name for stage in range(1, run.stages)]


def mlp(shape: tuple[int, ...], classes: int, depth: int, width: int, residual: bool = False) -> keras.Model:
    """``depth`` dense layers named ``dense_0`` and so on, all tanh but the last, Glorot uniform.

    With ``residual`` each but the first and the last adds its outputs to its inputs, as a layer ``sum_1`` and so on.
    """
    import keras

    x = y = keras.Input(shape)
    y = keras.layers.Flatten()(y)
    for n in range(depth - 1):
        made = keras.layers.Dense(width, activation="tanh", name=f"dense_{n}")(y)
        y = keras.layers.Add(name=f"sum_{n}")([y, made]) if residual and n else made
    return keras.Model(x, keras.layers.Dense(classes, name=f"dense_{depth - 1}")(y))


def cuts(depth: int, stages: int, residual: bool = False) -> list[str]:
    """The last layers of all stages but the final one, the layers shared out as evenly as can be."""
    last = [depth * stage // stages - 1 for stage in range(1, stages)]
    return [f"sum_{n}" if residual and n else f"dense_{n}" for n in last]
