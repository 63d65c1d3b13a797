"""A program as one TensorFlow function over all devices, called with a minibatch.

TensorFlow has the whole of it: hosts run their part of a call by themselves, and what crosses a cut is sent when it is
made. Stages' functions stay calls in it, each on its stage's device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from pipetrain.compute.functions.flattening import packer, unpacker
from pipetrain.compute.functions.stage import Stage
from pipetrain.compute.functions.weight_binding import any_rows
from pipetrain.compute.program.arguments import Arguments, Settings
from pipetrain.compute.program.numbers import NumberArguments
from pipetrain.compute.program.result import ProgramResult
from pipetrain.compute.program.walk import Failed, Walk
from pipetrain.compute.tensorflow_private import UNORDERED, call_of
from pipetrain.schemes.programs import Program
from pipetrain.schemes.scheme import Scheme


class ProgramFunction:
    """A traced program: call it with a minibatch.

    ``calls`` are its calls by their names, ``runs`` how many of each replica's are a forward and a backward together,
    and ``clock`` says what the times in its results are of.
    """

    def __init__(self, concrete: Any, numbers: NumberArguments, walk: Walk) -> None:
        self._concrete, self._numbers = concrete, numbers  # TensorFlow forgets a function that nobody holds
        self._unpack, self._pack = unpacker(concrete.structured_input_signature[0]), packer(concrete.structured_outputs)
        self._call = call_of(concrete)
        self.calls, self.clock = walk.calls, walk.clock
        self.runs = Counter(each.place for each in self.calls.values() if each.number is not None)

    def __call__(self, x: Sequence[tf.Tensor], targets: Any, rows: int, scale: float) -> ProgramResult:
        """Make the step of a minibatch of so many rows, whose loss is multiplied by the scale."""
        flat: list[tf.Tensor] = []
        self._unpack((x, targets, self._numbers(rows, scale)), flat)
        result: ProgramResult = self._pack(iter(self._call(flat)))
        return result


def walked(
    stages: Sequence[Sequence[Stage]],
    scheme: Scheme,
    program: Program,
    given: tuple[Sequence[tf.Tensor], Any, int, float],
    settings: Settings,
    failed: Failed,
) -> None:
    """Make a program's calls one after another, for what a function is given; no state of layers is kept."""
    arguments = Arguments(stages, settings)
    x, targets, rows, scale = given
    numbers = NumberArguments(arguments.numbers, settings.parts.microbatches)(rows, scale)
    Walk(stages, scheme, program, arguments, settings, failed).body(list(x), targets, numbers)


def traced(
    stages: Sequence[Sequence[Stage]],
    scheme: Scheme,
    program: Program,
    targets: Any,
    settings: Settings,
    failed: Failed,
) -> ProgramFunction:
    """Trace the program of a minibatch, for labels and sample weights of these specs.

    The stages have been traced and their state is held, see ``Stage.hold_state``. ``failed`` is told of an error in
    tracing an action.
    """
    arguments = Arguments(stages, settings)
    walk = Walk(stages, scheme, program, arguments, settings, failed)
    function = tf.function(walk.body, autograph=False, experimental_attributes=UNORDERED)
    given = any_rows(stages[0][0].segment.inputs), targets, [each.spec for each in arguments.numbers]
    concrete = function.get_concrete_function(*given)
    return ProgramFunction(concrete, NumberArguments(arguments.numbers, settings.parts.microbatches), walk)
