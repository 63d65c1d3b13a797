"""Numbers of things in messages."""

from __future__ import annotations

import pytest

from pipetrain.plan.text_table import counted


@pytest.mark.parametrize(
    ("number", "noun", "said"),
    [(1, "epoch", "1 epoch"), (6, "epoch", "6 epochs"), (2, "microbatch", "2 microbatches"), (0, "stage", "0 stages")],
)
def test_plurals(number, noun, said):
    assert counted(number, noun) == said
