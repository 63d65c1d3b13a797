"""One training run of one scheme, and the files it leaves."""

from __future__ import annotations

import json
import math
import resource
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import count, groupby
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

import models
import pipetrain
from experiments import optimizers
from experiments.datasets import Dataset
from experiments.networks import input_shape
from experiments.records import CHECKPOINTS, Settings, Summary
from pipetrain.callbacks import PipelineCheckpoint, Snapshots
from pipetrain.frontend.layout import available, check_local
from pipetrain.schemes.options import check_microbatches, with_horizon
from pipetrain.schemes.table import DATA_PARALLEL, UNCUT

EVALUATION_ROWS = 500  # per batch; evaluation is no part of what is timed
TIMED_STEPS = (50, 250)  # samples per second are measured between these, or over the second half of a shorter run


class Recorder(keras.callbacks.Callback):
    """Writes a row of history every so many steps, and keeps the time that training took up to each step.

    That is the session's, which stands still in evaluations, and so the same as in the progress bar.
    """

    def __init__(self, data: Dataset, settings: Settings, path: Path) -> None:
        super().__init__()
        self._data, self._settings = data, settings
        self._path = path
        self._validation = validation(data, input_shape(settings.model, data.x_test.shape[1:]))
        # Keras' running mean of the loss after every so many steps, and of how many steps it is: a run that goes on in
        # other stages does not see all.
        self._means, self._counts = {0: 0.0}, {0: 0}
        self._before_s = 0.0  # what training took before this session, when it was resumed
        self._latest: dict[str, float] = {}
        self.rows: list[dict[str, float]] = []
        self.seen_s: list[float] = []
        path.write_text("", encoding="utf-8")

    def evaluate(self, step: int, model: keras.Model) -> None:
        """The function of a ``Snapshots`` callback: validate the weights of this step."""
        result = model.evaluate(self._validation, verbose=0, return_dict=True)
        self._latest = {"val_loss": float(result["loss"]), "val_accuracy": float(result["accuracy"])}
        before = max(each for each in self._means if each < step)
        counts, means = self._counts, self._means
        train_loss = counts[step] * means[step] - counts[before] * means[before]
        train_loss /= counts[step] - counts[before]
        self.rows.append({"step": step, "train_loss": train_loss, **self._latest})
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(self.rows[-1]) + "\n")

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Say what ``auto`` has taken, and why."""
        if taken := _taken(self.model):
            told = ", ".join(f"{name}={value}" for name, value in taken["taken"].items())
            print(f"auto takes {told}. {taken['reason']}")

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Show the latest validation at the end of the progress bar, which has no room for it before."""
        if logs is not None:
            logs.update(self._latest)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Keep the loss and the time of this step."""
        self.seen_s.append(self._before_s + self.model.session.time.seconds)
        if (batch + 1) % self._settings.eval_every == 0:
            self._means[batch + 1], self._counts[batch + 1] = float(logs["loss"]), len(self.seen_s)

    def get_state(self) -> dict[str, Any]:
        """What a checkpoint keeps of the recorder."""
        means, counts = ({str(step): each for step, each in of.items()} for of in (self._means, self._counts))
        return {"means": means, "counts": counts, "latest": self._latest, "rows": self.rows, "seen_s": self.seen_s}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint: later rows of the history are forgotten."""
        self._means = {int(step): mean for step, mean in state["means"].items()}
        counts = state.get("counts") or {step: step for step in self._means}  # an earlier version saw all steps
        self._counts = {int(step): int(count) for step, count in counts.items()}
        self._latest, self.rows, self.seen_s = state["latest"], state["rows"], state["seen_s"]
        self._before_s = (self.seen_s[-1] if self.seen_s else 0.0) - self.model.session.time.seconds
        self._path.write_text("".join(json.dumps(row) + "\n" for row in self.rows), encoding="utf-8")

    def samples_per_second(self) -> float | None:
        """Training throughput between two steps far enough apart, or None for a run too short to tell."""
        first, last = TIMED_STEPS if len(self.seen_s) >= TIMED_STEPS[1] else (len(self.seen_s) // 2, len(self.seen_s))
        if last - first <= 2 * (self._settings.stages + 2):  # as many were read ahead at the start: too short to tell
            return None
        taken_s = self.seen_s[last - 1] - self.seen_s[first - 1]
        return (last - first) * self._settings.batch_size / taken_s


def pipelined(model: keras.Model, settings: Settings) -> pipetrain.PipelineModel:
    """The model as a pipeline, compiled. Raises ValueError for what cannot be trained."""
    pm = pipetrain.PipelineModel(
        model, scheme=settings.scheme_with_options, microbatches=settings.microbatches, **settings.layout
    )
    pm.compile(
        optimizers.build(settings.optimizer, settings.learning_rate, settings.momentum),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return pm


def check(settings: Settings) -> None:
    """Raise ValueError, before anything is trained, for settings that no network can be trained with."""
    check_microbatches(settings.microbatches, with_horizon(settings.way, settings.horizon))
    if (settings.microbatches or 1) > settings.batch_size:
        raise ValueError(
            f"A microbatch needs at least one row. Received: {settings.label}, --batch-size {settings.batch_size}. "
            f"Try at most {settings.batch_size} microbatches."
        )
    if settings.scheme != DATA_PARALLEL:
        layers = [keras.layers.Dense(1) for _ in range(settings.devices)]
        pipelined(keras.Sequential([keras.Input((1,)), *layers]), settings)
    else:
        check_local(available())


def train_all(
    runs: Sequence[Settings], data: Callable[[Settings], Dataset], folder: Callable[[Settings], Path]
) -> None:
    """Train all these runs; of each its config, history and summary are kept.

    Runs of one network that follow each other share its data. Raises ValueError, before any is trained, for one that
    cannot be.
    """
    for each in runs:
        check(each)
    numbers = count(1)
    for model, of_model in groupby(runs, key=lambda each: each.model):
        found: Dataset | None = None
        for each in of_model:
            about = f"{model}, {each.optimizer} {each.learning_rate:g}, {each.label}, seed {each.seed}"
            print(f"{next(numbers)} of {len(runs)}: {about}", flush=True)
            found = found or data(each)
            train(each, found, folder(each), verbose=False, keep=False)
            keras.utils.clear_session()  # or memory grows with every run


def train(settings: Settings, data: Dataset, output: Path, verbose: bool, keep: bool = True) -> Summary:
    """Train once, and write config, history and summary into ``output``; to ``keep`` are trace, cut and model too."""
    keras.utils.set_random_seed(settings.seed)
    shape = input_shape(settings.model, data.x_train.shape[1:])
    model = models.build(settings.model, shape, data.classes, **settings.size)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(loss=loss, metrics=["accuracy"])  # for the evaluations
    pm = pipelined(model, settings)
    output.mkdir(parents=True, exist_ok=True)
    if verbose and settings.scheme not in UNCUT:
        print(f"{pm.explain(settings.batch_size)}\n")
    write_settings(settings, output)
    recorder = Recorder(data, settings, output / "history.jsonl")
    every = settings.checkpoint_every
    checkpoints = [PipelineCheckpoint(output / CHECKPOINTS, every)] if every else []
    diverged_at = None
    try:
        pm.fit(
            batches(data, shape, settings.batch_size, settings.seed),
            steps_per_epoch=settings.steps,
            shuffle=False,  # the data set shuffles itself
            callbacks=[recorder, Snapshots(settings.eval_every, recorder.evaluate), *checkpoints],
        )
    except FloatingPointError as error:
        diverged_at = len(recorder.seen_s)
        print(f"\n{error}")
    if keep:
        pm.trace.save(output / "trace.json")
        if pm.stragglers:
            print(f"Steps that ended without a worker, in the order of the workers: {pm.stragglers}.")
        pm.save(output / "model.keras")
    summary = replace(_summary(settings, recorder, diverged_at), **_taken(pm))
    _write(output / "summary.json", asdict(summary))
    shutil.rmtree(output / CHECKPOINTS, ignore_errors=True)  # the run is over, and its model saved
    if verbose and pm.choice is not None:
        print(f"\n{pm.choice}")
    if keep and pm.scheme not in UNCUT:  # which nothing had to cut
        write_partition(pm, settings.batch_size, output)
    return summary


def batches(data: Dataset, shape: tuple[int, ...], batch_size: int, seed: int) -> tf.data.Dataset:
    """Endless shuffled minibatches for a network that reads ``shape``, the same for the same seed."""
    rows = len(data.x_train)
    pairs = tf.data.Dataset.from_tensor_slices((data.x_train, data.y_train))
    shuffled = pairs.shuffle(rows, seed=seed, reshuffle_each_iteration=True).repeat()
    return shuffled.batch(batch_size, drop_remainder=True).map(as_read(shape)).prefetch(4)


def validation(data: Dataset, shape: tuple[int, ...]) -> tf.data.Dataset:
    """All test examples for a network that reads ``shape``."""
    pairs = tf.data.Dataset.from_tensor_slices((data.x_test, data.y_test))
    return pairs.batch(EVALUATION_ROWS).map(as_read(shape)).prefetch(1)


def as_read(shape: tuple[int, ...]) -> Callable[[tf.Tensor, tf.Tensor], tuple[tf.Tensor, tf.Tensor]]:
    """For a data set of (examples, labels): images of other sizes or with one channel become ``shape``."""

    def convert(x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        if tuple(x.shape[1:]) != shape:
            x = x if x.shape.rank == 4 else x[..., None]
            x = tf.repeat(tf.image.resize(x, shape[:2]), shape[2] // x.shape[3], axis=3)
        return x, y

    return convert


def write_settings(settings: Settings, output: Path) -> None:
    """What a run is to be, into its folder; whole or not at all."""
    output.mkdir(parents=True, exist_ok=True)
    part = output / ".config.json.part"
    _write(part, asdict(settings))
    part.replace(output / "config.json")


def write_partition(pm: pipetrain.PipelineModel, batch_size: int, output: Path) -> None:
    """How the model was cut, and what the planner says that each stage costs, into a run's folder."""
    try:
        cut = pm.partition(batch_size)
    except ValueError as error:  # by its estimate, what has just been trained cannot be
        print(f"There is no partition.json. {error}")
        return
    about = {"model": cut.model, "batch_size": cut.batch_size, "samples_per_second": cut.samples_per_second}
    _write(output / "partition.json", {**about, "stages": [asdict(stage) for stage in cut.stages]})


def _summary(settings: Settings, recorder: Recorder, diverged_at: int | None) -> Summary:
    def best(key: str, choose: Any) -> float | None:
        finite = [row[key] for row in recorder.rows if math.isfinite(row[key])]
        return choose(finite) if finite else None

    return Summary(
        scheme=settings.scheme,
        model=settings.model,
        dataset=settings.dataset,
        stages=settings.stages,
        batch_size=settings.batch_size,
        steps=len(recorder.seen_s),
        samples_per_second=recorder.samples_per_second(),
        min_train_loss=best("train_loss", min),
        min_val_loss=best("val_loss", min),
        max_val_accuracy=best("val_accuracy", max),
        peak_memory_bytes=_peak_memory_bytes(),
        diverged_at=diverged_at,
    )


def _taken(pm: pipetrain.PipelineModel) -> dict[str, Any]:
    """What ``auto`` has taken, and why; nothing of other schemes."""
    if pm.way is None:
        return {}
    reason = "As the checkpoint's run." if pm.choice is None else pm.choice.reason
    return {"taken": {name: value for name, value in pm.way.items() if value is not None}, "reason": reason}


def _peak_memory_bytes() -> int:
    """The most that this process has had resident, and its GPUs allocated, so far."""
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    gpus = [device.name.removeprefix("/device:") for device in tf.config.list_logical_devices("GPU")]
    return resident + sum(tf.config.experimental.get_memory_info(name)["peak"] for name in gpus)


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
