"""Which of the processor's instruction sets a side's kernels may use: environment variables of its process."""

from __future__ import annotations

import os

from pipetrain.compute.processor import BY_DEFAULT, instructions
from pipetrain.compute.processor import VARIABLE as ONEDNN

# What hides the rest of a processor's instruction sets from oneDNN and from the compiler of XLA.
MASKS = {"avx2": {"ONEDNN_MAX_CPU_ISA": "AVX2", "XLA_FLAGS": "--xla_cpu_max_isa=AVX2"}}


def mask(isa: str) -> None:
    """Of this process and those that it starts; before TensorFlow is imported."""
    variables = dict(MASKS[isa])
    variables["XLA_FLAGS"] = " ".join(filter(None, [os.environ.get("XLA_FLAGS"), variables["XLA_FLAGS"]]))
    os.environ.update(variables)


def is_on_by_itself() -> bool:
    """Whether TensorFlow switches oneDNN's kernels on by itself on this processor; False where it is not known."""
    return bool(instructions() & BY_DEFAULT)


def set_onednn(value: str | None) -> None:
    """Switch oneDNN's kernels on ("1") or off ("0"), or leave it to TensorFlow, which is not imported yet."""
    if value is None:
        os.environ.pop(ONEDNN, None)  # which importing pipetrain may have set
    else:
        os.environ[ONEDNN] = value
