"""Measure what each block of a model costs on a device, and leave the model as it was; keep that on disk.

A model is measured once, so it is always cut the same way on the same machine.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import keras
import tensorflow as tf

from pipetrain.compute.cores import full_name, has_pool, is_remote
from pipetrain.compute.graph.blocks import Chain
from pipetrain.compute.graph.inputs import Shapes, checked_shapes
from pipetrain.compute.graph.wide_layers import WideLayer, network_of, wide_layers
from pipetrain.compute.keras_private import is_own, supports_xla
from pipetrain.compute.processor import described
from pipetrain.compute.profiling.block_costs import TIMING, block_bytes, others, timed, with_compiled
from pipetrain.compute.profiling.kinds import Kinds, cost_key
from pipetrain.compute.profiling.limits import BUDGET_S, Budget, KeptValue, checked_budget, folder, kept_at
from pipetrain.compute.profiling.operation_count import LITTLE_S, is_little
from pipetrain.compute.profiling.progress import Progress
from pipetrain.compute.profiling.timing import time_coding, time_loss, time_step
from pipetrain.compute.tensorflow_private import is_deterministic
from pipetrain.plan.profile import NOISY, Profile, coding_of
from pipetrain.schemes.arguments import checked_count
from pipetrain.schemes.compression import COMPRESSIONS, Compression, compression_of
from pipetrain.schemes.splitting import microbatch_rows

TRACING, WEIGHING = 0.4, 0.5  # of a budget, in which functions are made, and their memory is measured
CHOOSING = ("TF_CUDNN_", "TF_DISABLE_", "TF_ENABLE_", "TF_XLA_", "XLA_", "ONEDNN_", "DNNL_")  # variables' first letters
FORMAT = 16  # of profiles that are kept; those of other formats are measured anew
FORMATS = {"coding": 1, "step": 1}  # the same of what is kept beside them
SMALL_PART = 0.01  # of all weights, of kinds whose step is not measured

_trusted: set[Path] = set()  # the files whose profiles this process has measured
_known: dict[tuple[str, str, str], Any] = {}  # what compressions and optimizers take on devices, for this process
Value = TypeVar("Value")


def profile(
    model: keras.Model,
    batch_size: int,
    device: str = "CPU:0",
    verbose: bool = True,
    input_shapes: Any = None,
    microbatches: int = 1,
    budget_s: float | None = BUDGET_S,
    compressions: Sequence[str | Compression] = (),
    optimizer: keras.optimizers.Optimizer | None = None,
) -> Profile:
    """Measure every layer's forward and backward seconds, weight bytes, and bytes that cross a cut after it.

    The blocks run one after another, all forwards, then all backwards, on random data (zeros for integer inputs): four
    such passes, or more where the machine is not steady. By turns with them all blocks run in one call, where
    neighbours share kernels, as in a stage. A block's figure is its part of what that takes, by the medians of its own
    times less those of an empty call; the profile's ``spread`` says how steady they are. XLA compiles one kind of
    blocks after another, the longest first, until what these take shows that it cannot be faster; if it may, as many
    passes are made compiled. It is not tried where a pass takes less than 2 ms, or so it is estimated from counted
    operations. The optimizer's step is that of SGD with momentum, unless one is given; the loss, where the outputs are
    large, a cross-entropy, and the metric an accuracy. The model's weights, statistics and seeds are read and never
    written.

    Where the budget is short, one block of each kind is run instead of all equal ones, without their neighbours, of as
    many kinds as there is time for, those first that have the most operations. The seconds of the others are
    ``estimated``: by a roofline that is fitted to those measured. The temporary memory of kernels is 0 where there was
    no time to measure it.

    Args:
        model: a Sequential or Functional model.
        batch_size: rows of the minibatch to measure with, at least 1.
        device: the TensorFlow device to measure on.
        verbose: show a progress bar when it takes long.
        input_shapes: the shapes of the inputs, without the batch, where the model leaves dimensions open: a tuple of
            sizes such as ``(64, 64, 3)``; for several inputs, such tuples in a list in the inputs' order, or in a
            dictionary by their keys or names.
        microbatches: how many the minibatch is divided into. The profile is measured with the rows of one, as a
            pipeline computes, and says what all take together: more than one minibatch of as many rows.
        budget_s: the seconds that it may take, which it may exceed by the measurement of a block; None or infinity for
            as many as it takes.
        compressions: whose encoding and decoding is measured, too, or known: it is kept beside the profiles of ``fit``.
        optimizer: whose step is measured, too, where it takes more than SGD's: of Muon, and of a class of your own.

    Raises:
        ValueError, TypeError: for a model whose layer calls Keras does not record, a batch size below 1, more
            microbatches than rows, an unknown device, dimensions that are neither known nor given, shapes that the
            model's inputs cannot have, or a budget that is no number of seconds above 0.
    """
    batch_size = checked_count("batch_size", batch_size, "A profile needs at least one row", 128)
    microbatches = checked_count("microbatches", microbatches, "A minibatch is divided into whole numbers", 4)
    if microbatches > batch_size:
        raise ValueError(
            f"A microbatch needs at least one row. Received: microbatches={microbatches}, batch_size={batch_size}. "
            f"Try at most {batch_size} microbatches."
        )
    checked_budget(budget_s)
    chain, shapes, device = Chain(model), checked_shapes(model, input_shapes), full_name(device)
    with_xla = may_be_compiled(chain, batch_size, device)
    measured = profile_chain(chain, batch_size, shapes, device, verbose, with_xla, microbatches, budget_s)
    return with_codings(with_steps(measured, chain, optimizer, device), compressions, device)


def profile_chain(
    chain: Chain,
    batch_size: int,
    shapes: Shapes,
    device: str,
    verbose: bool,
    with_xla: bool = True,
    microbatches: int = 1,
    budget_s: float | None = None,
) -> Profile:
    """``profile`` of a model whose blocks and input shapes are known; with XLA too, if that ``may_be_compiled``."""
    budget = Budget(budget_s)
    rows = rows_measured(chain, batch_size, microbatches)
    within = "" if budget.seconds == math.inf else f", {budget.seconds:g} s at most"
    steps = ((4 if with_xla else 3) * len(chain.blocks) + 1) * verbose  # the last one for the loss
    progress = Progress(f"Profiling the model's layers{within}", steps)
    with tf.device(device):
        kinds = Kinds(chain, rows, shapes)
        _trace(kinds, budget, progress)
        _weigh(kinds, rows, device, budget, progress)
        blocks = block_bytes(chain, kinds, rows, batch_size)
        is_whole = _is_whole(kinds, budget)
        blocks, spread = timed(kinds, blocks, device, is_whole, budget)
        progress.add(len(blocks))
        if with_xla and sum(block.seconds.total_s for block in blocks) >= LITTLE_S:
            blocks, compiled_spread = with_compiled(kinds, blocks, device, is_whole, budget, progress)
            spread = max(spread, compiled_spread)
        outputs = [kinds.like[value] for value in chain.crossing(len(blocks))]
        beside = time_loss(outputs, device, others(device), partial(budget.has, 1.0))
        progress.add(1)
        progress.end()  # steps are left if time was short, or XLA not worth trying, or failed
    measured = Profile(
        chain.model.name,
        int(rows),
        tuple(blocks),
        spread,
        *beside,
        microbatches=microbatches,
        network=network_of(chain),
        budget_s=budget.seconds if budget.is_short else None,
    )
    return measured if rows == batch_size else measured.scaled(int(batch_size))


def with_codings(profile: Profile, compressions: Iterable[str | Compression], device: str, place: str = "") -> Profile:
    """The profile with what these compressions take on the device, each measured once and kept beside the profiles.

    ``place`` identifies the host of a device in another process. Of such a device without it, and of compressions of
    the user's own, nothing is kept: each process measures them.
    """
    known = {each.compression: each for each in profile.codings}
    for each in map(compression_of, compressions):
        if each is not None and str(each) not in known:
            is_kept = type(each) in COMPRESSIONS.values()
            measure = partial(time_coding, each, device)
            known[str(each)] = _once(
                "coding", str(each), device, place, is_kept, measure, lambda found: coding_of(*found)
            )
    return replace(profile, codings=tuple(known.values()))


def with_steps(
    profile: Profile, chain: Chain, optimizer: keras.optimizers.Optimizer | None, device: str, place: str = ""
) -> Profile:
    """The profile with what this optimizer's step takes, for one that takes more than a pass over the weights.

    The step of SGD with momentum, which a profile has, stands for all of Keras' optimizers but Muon. Of Muon, and of
    classes of the user's own, the step is measured for each kind of weights: of one shape and type, and a path that
    differs by numbers alone. Kinds that have a hundredth of all weights or less take what SGD does, and so do those of
    which a class of the user's makes no step alone. It is kept as for ``with_codings``.
    """
    if optimizer is None or (is_own(type(optimizer)) and not isinstance(optimizer, keras.optimizers.Muon)):
        return profile
    trained = chain.model.trainable_variables
    numbers = {id(each): _kind_of_weight(each) for each in trained}
    weights = [{id(each): each for call in block.calls for each in call.weights} for block in chain.blocks]
    sizes = Counter[tuple[Any, ...]]()
    for each in trained:
        sizes[numbers[id(each)]] += math.prod(each.shape)
    per_element_s = sum(each.update_s for each in profile.blocks) / max(sizes.total(), 1)
    settings = {**optimizer.get_config(), "name": "", "learning_rate": 0}
    is_kept = is_own(type(optimizer)) or type(optimizer).__module__.startswith("pipetrain.")

    def seconds(weight: keras.Variable) -> float:
        kind = numbers[id(weight)]
        if sizes[kind] > SMALL_PART * sizes.total():
            key = repr((type(optimizer).__qualname__, sorted(settings.items()), kind))
            try:
                return _once("step", key, device, place, is_kept, partial(time_step, optimizer, weight, device), float)
            except Exception:  # whatever a class of the user's raises that is given one weight alone
                if is_kept:
                    raise
        return per_element_s * math.prod(weight.shape)

    found = [sum(seconds(each) for each in mine.values() if id(each) in numbers) for mine in weights]
    pairs = zip(profile.blocks, found, strict=True)
    blocks = tuple(replace(block, step_s=max(taken_s - block.update_s, 0.0)) for block, taken_s in pairs)
    return replace(profile, blocks=blocks)


def _kind_of_weight(weight: keras.Variable) -> tuple[Any, ...]:
    return tuple(weight.shape), weight.dtype, re.sub(r"\d+", "", weight.path)


def _once(
    name: str,
    key: str,
    device: str,
    place: str,
    is_kept: bool,
    measure: Callable[[], Value],
    checked: Callable[[Any], Value],
) -> Value:
    """What was measured on a device by this process, or, where it ``is_kept``, by another one; measured if need be."""
    if (name, key, device) not in _known:
        if is_kept and (place or not is_remote(device)):
            kept = KeptValue(name, (FORMATS[name], (key, device), within(device, place)), checked)
            found = kept.read()
            _known[name, key, device] = kept.keep(measure()) if found is None else found
        else:
            _known[name, key, device] = measure()
    return cast(Value, _known[name, key, device])


def _trace(kinds: Kinds, budget: Budget, progress: Progress) -> None:
    """Make the functions of as many kinds as there is time for, the largest first, which is made anyway."""
    for n, kind in enumerate(kinds.largest_first):
        if n and kind.traced is None and not budget.has(TRACING):
            return
        kind.trace()
        progress.add(len(kind.blocks))


def _weigh(kinds: Kinds, rows: int, device: str, budget: Budget, progress: Progress) -> None:
    """Measure the temporary memory of as many kinds as there is time for."""
    for kind in kinds.largest_first:
        if kind.traced and budget.has(WEIGHING):
            kind.weigh(rows, device)
            progress.add(len(kind.blocks))


def _is_whole(kinds: Kinds, budget: Budget) -> bool:
    """Whether there is time to run every block with its neighbours, not only one of each kind.

    To make a function of all blocks takes about as long for each as it took to trace a kind and to measure its memory.
    """
    each_s = budget.spent_s / len(kinds.all)
    return all(kind.traced for kind in kinds.all) and budget.has(TIMING, each_s * len(kinds.of))


def rows_measured(chain: Chain, batch_size: int, microbatches: int) -> int:
    """The rows of the largest microbatch; those of a minibatch where the model fixes their number."""
    is_fixed = any(tensor.shape[:1] != (None,) for tensor in chain.specs(0))
    return batch_size if is_fixed else max(map(len, microbatch_rows(batch_size, microbatches)))


def may_be_compiled(chain: Chain, batch_size: int, device: str) -> bool:
    """Whether XLA is worth trying: for enough work, where Keras says that it can, and stages would run at once.

    XLA hands parts of a function to TensorFlow's pool of threads. If that has fewer threads than the process has CPU
    devices, compiled stages wait for each other there.
    """
    return not is_little(chain, batch_size) and supports_xla(chain.model) and has_pool(device)


def conditions() -> tuple[str, ...]:
    """The processor with its instruction sets, and the settings that switch kernels on or off."""
    chosen = sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith(CHOOSING))
    return platform.machine(), *described(), *chosen, f"deterministic={is_deterministic()}"


def within(device: str, place: str) -> tuple[Any, ...]:
    """All but the model on which seconds depend that are measured on a device; see ``cached_profile``."""
    return (
        device,
        place,
        conditions(),
        platform.node(),
        os.cpu_count(),
        tf.config.threading.get_intra_op_parallelism_threads(),
        len(tf.config.list_logical_devices()),
        tf.__version__,
    )


def cached_profile(
    chain: Chain,
    batch_size: int,
    shapes: Shapes,
    device: str,
    verbose: bool = True,
    place: str = "",
    with_xla: bool = True,
    microbatches: int = 1,
    budget_s: float | None = BUDGET_S,
) -> Profile:
    """The profile of a chain of such layers, at this batch size and for such inputs, measured at the first call.

    ``place`` identifies the host of a device in another process. Profiles are kept under ``$XDG_CACHE_HOME/pipetrain``
    (``~/.cache/pipetrain``); the folder may be deleted. Models with a layer whose settings Keras cannot serialize are
    measured every time. Another process measures once more where other work has disturbed the first measurement, so
    that ``spread`` is above ``NOISY``, and the steadier profile of the two is kept. A profile that lacks something for
    want of time serves where no more seconds are allowed; else it is measured anew, and replaced.
    """
    with_xla = with_xla and may_be_compiled(chain, batch_size, device)
    blocks = chain.blocks
    keys = [cost_key(block) for block in blocks]
    if None in keys:
        return profile_chain(chain, batch_size, shapes, device, verbose, with_xla, microbatches, budget_s)
    crossing = [[(tensor.shape, tensor.dtype) for tensor in chain.specs(end + 1)] for end in range(len(blocks))]
    key = FORMAT, keys, crossing, batch_size, shapes, (microbatches, with_xla, *within(device, place))
    digest = hashlib.sha256(repr(key).encode()).hexdigest()[:32]
    path = folder() / f"{digest}.json"
    found = _read(path)
    known = found if found is not None and _serves(found, budget_s) else None
    if known is None or (path not in _trusted and _is_doubtful(known)):
        measured = profile_chain(chain, batch_size, shapes, device, verbose, with_xla, microbatches, budget_s)
        known = _kept(measured, path, known, replaces=found is not None)
        _trusted.add(path)
    renamed = tuple(replace(cost, name=block.name) for cost, block in zip(known.blocks, blocks, strict=True))
    return replace(known, model=chain.model.name, blocks=renamed, microbatches=microbatches, network=network_of(chain))


def _read(path: Path) -> Profile | None:
    try:
        return Profile.load(path)
    except OSError:  # not there
        return None
    except ValueError:  # not whole
        with suppress(OSError):
            path.unlink()
        return None


def _serves(known: Profile, budget_s: float | None) -> bool:
    """Whether nothing was left out of it that these seconds have time for."""
    return known.budget_s is None or checked_budget(budget_s) <= known.budget_s


def _is_doubtful(known: Profile) -> bool:
    """Whether other work has disturbed the measurement; what takes little time is never steady."""
    return known.spread > NOISY and sum(block.seconds.total_s for block in known.blocks) >= LITTLE_S


def _kept(measured: Profile, path: Path, before: Profile | None, replaces: bool) -> Profile:
    """The profile that is kept: the steadier one, or that of another process if it has measured at the same time.

    It ``replaces`` the file that is there, be it the one of ``before`` or one that lacks something. None that lacks
    something replaces one that does not.
    """
    if before is not None and (before.spread <= measured.spread or not _serves(measured, before.budget_s)):
        return before
    return kept_at(path, measured, measured.save, _read, replaces)


CHANGING_NOTHING = ("kernel_initializer", "bias_initializer", "name")  # which change no seconds


def with_slices(measured: Profile, model: keras.Model, parts: Sequence[int], device: str = "CPU:0") -> Profile:
    """The profile with the seconds of one of so many equal parts of each wide layer's outputs.

    A layer of such a part is measured behind one that is trained, so that it makes the gradients of its inputs as in
    the model. Layers that are alike are measured once. Layers with open dimensions, and with fewer outputs than parts,
    are left out.

    Args:
        measured: of the model, whole minibatches.
        model: whose layers are measured.
        parts: numbers of parts.
        device: the TensorFlow device to measure on.
    """
    known: dict[str, tuple[float, float]] = {}
    slices: dict[str, tuple[tuple[int, float, float], ...]] = {}
    for layer in wide_layers(Chain(model).blocks):
        found = []
        for count in sorted({*parts} - {1}):
            channels = -(-layer.size // count)
            if count <= layer.size and None not in layer.call.node.input_tensors[0].shape[1:]:
                key = _key(layer, channels)
                if key not in known:
                    known[key] = _measured_s(layer, channels, measured.batch_size, device)
                found.append((count, *known[key]))
        slices[layer.name] = tuple(found)
    blocks = tuple(replace(block, slices=slices.get(block.name, ())) for block in measured.blocks)
    return replace(measured, blocks=blocks)


def _key(layer: WideLayer, channels: int) -> str:
    config = layer.narrowed(channels).get_config()
    config = {name: value for name, value in config.items() if name not in CHANGING_NOTHING}
    shape = layer.call.node.input_tensors[0].shape[1:]
    return json.dumps([type(layer.call.operation).__name__, list(shape), config], default=str, sort_keys=True)


def _measured_s(layer: WideLayer, channels: int, rows: int, device: str) -> tuple[float, float]:
    read = keras.Input(layer.call.node.input_tensors[0].shape[1:], dtype=layer.call.node.input_tensors[0].dtype)
    narrow = layer.narrowed(channels)
    alone = keras.Model(read, narrow(keras.layers.PReLU(dtype=read.dtype)(read)))
    block = profile(alone, rows, device, verbose=False).blocks[-1]
    return block.forward_s, block.backward_s
