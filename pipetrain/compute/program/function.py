"""A program as one TensorFlow function over all devices, called with a minibatch.

TensorFlow has the whole of it: hosts run their part of a call by themselves, and what crosses a cut is sent when it is
made. Stages' functions stay calls in it, each on its stage's device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from pipetrain.compute.cores import is_remote
from pipetrain.compute.functions.flat_values import packing_captures
from pipetrain.compute.functions.graph_rewrite import packer, unpacker
from pipetrain.compute.functions.stage import Stage
from pipetrain.compute.functions.weight_binding import any_rows
from pipetrain.compute.program.arguments import FIRST, LAST, Arguments, NumberArguments, ProgramResult, Settings
from pipetrain.compute.program.walk import Failed, Walk
from pipetrain.compute.tensorflow_private import UNORDERED, call_of
from pipetrain.schemes.programs import Program
from pipetrain.schemes.scheme import Scheme


class ProgramInputs(NamedTuple):
    """What a program's function is called with.

    ``x`` and ``targets`` are those of the minibatches of which something goes in at the first stage and at the last
    one, ``rows`` of all that it works on by their numbers, ``rates`` their learning rates if these are arguments, and
    ``held`` what the function before has left. The loss is multiplied by the ``scale``. ``number`` is that of minibatch
    0, since training began, for random numbers of what is compressed; None where nothing is.
    """

    x: Sequence[Sequence[tf.Tensor]]
    targets: Sequence[Any]
    rows: Mapping[int, int]
    scale: float = 1.0
    rates: tf.Tensor | None = None
    held: Sequence[tf.Tensor] = ()
    number: tf.Tensor | None = None


class ProgramFunction:
    """A traced program: call it with minibatches.

    Workers do not fetch from this process, which they may not reach: they are given what they need.

    ``calls`` are its calls by their names, ``runs`` how many of each replica's are a forward and a backward together,
    ``clock`` says what the times in its results are of, ``kept`` of which minibatch and stage its snapshots are, and
    ``held_specs`` what it leaves for the next one.
    """

    def __init__(self, concrete: Any, numbers: NumberArguments, walk: Walk, is_optimized: bool) -> None:
        self._concrete, self._numbers = concrete, numbers  # TensorFlow forgets a function that nobody holds
        self._first, self._last = walk.entrances
        self._unpack, self._pack = unpacker(concrete.structured_input_signature[0]), packer(concrete.structured_outputs)
        # A course has several functions, which call the same stages' functions. What there is to optimize beside those
        # is little; but TensorFlow would optimize them again in every function, which takes a third of its first call.
        self._call = call_of(concrete, is_optimized)
        self.calls, self.clock, self.held_specs = walk.calls, walk.clock, walk.held_specs
        self.kept = walk.kept
        self.runs = Counter(each.place for each in self.calls.values() if each.number is not None)

    def __call__(self, given: ProgramInputs) -> ProgramResult:
        """Work on these minibatches."""
        flat: list[tf.Tensor] = []
        numbers = self._numbers(given.rows, given.scale)
        x, rates, number = _sent(self._first, (given.x, given.rates, given.number))
        self._unpack((x, _sent(self._last, given.targets), numbers, rates, given.held, number), flat)
        result: ProgramResult = self._pack(iter(self._call(flat)))
        return result


def _sent(device: str, values: Any) -> Any:
    """The same values, on the device if that is a worker's."""
    if not is_remote(device):
        return values
    with tf.device(device):
        return tf.nest.map_structure(lambda each: None if each is None else tf.identity(each), values)


def walked(
    stages: Sequence[Sequence[Stage]],
    scheme: Scheme,
    program: Program,
    given: ProgramInputs,
    settings: Settings,
    failed: Failed,
    held_specs: Any = None,
) -> None:
    """Make a program's calls one after another, for what a function is given; no state of layers is kept."""
    arguments = Arguments(stages, settings, program)
    numbers = NumberArguments(arguments.numbers, settings.microbatches)(given.rows, given.scale)
    walk = Walk(stages, scheme, program, arguments, settings, failed)
    held = _held(held_specs, given.held)
    walk.body([list(each) for each in given.x], given.targets, numbers, given.rates, held, given.number)


def traced(
    stages: Sequence[Sequence[Stage]],
    scheme: Scheme,
    program: Program,
    targets: Any,
    settings: Settings,
    failed: Failed,
    held_specs: Any = None,
) -> ProgramFunction:
    """Trace a program, for labels and sample weights of these specs.

    The stages have been traced and their state is held, see ``Stage.hold_state``. ``failed`` is told of an error in
    tracing an action. ``held_specs`` are those of what the function before has left.
    """
    arguments = Arguments(stages, settings, program)
    walk = Walk(stages, scheme, program, arguments, settings, failed)

    def body(x: Any, targets: Any, numbers: Any, rates: Any, held: list[tf.Tensor], number: Any) -> ProgramResult:
        with tf.device(settings.host):  # where what belongs to no stage is
            return walk.body(x, targets, numbers, rates, _held(held_specs, held), number)

    function = tf.function(packing_captures(body), autograph=False, experimental_attributes=UNORDERED)
    inputs = any_rows(stages[0][0].segment.inputs)
    leaves = tf.nest.flatten(held_specs, expand_composites=True)
    concrete = function.get_concrete_function(
        [inputs for _ in arguments.entering[FIRST]],
        [targets for _ in arguments.entering[LAST]],
        [each.spec for each in arguments.numbers],
        tf.TensorSpec([len(settings.parts)]) if settings.has_rates else None,
        [each for each in leaves if isinstance(each, tf.TensorSpec)],
        tf.TensorSpec([], tf.int64) if scheme.compresses else None,
    )
    numbers = NumberArguments(arguments.numbers, settings.microbatches)
    is_one_of_several = held_specs is not None or walk.held_specs is not None
    return ProgramFunction(concrete, numbers, walk, is_optimized=not is_one_of_several)


def _held(specs: Any, tensors: Sequence[tf.Tensor]) -> Any:
    """What the function before has left, as it was."""
    if specs is None:
        return None
    given = iter(tensors)
    leaves = tf.nest.flatten(specs, expand_composites=True)
    flat = [next(given) if isinstance(each, tf.TensorSpec) else each for each in leaves]
    return tf.nest.pack_sequence_as(specs, flat, expand_composites=True)
