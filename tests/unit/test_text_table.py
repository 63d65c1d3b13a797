"""Tables, and numbers of things in messages."""

from __future__ import annotations

import pytest

from pipetrain.logs import TERMINAL, counted, text_table


@pytest.mark.parametrize(
    ("number", "noun", "said"),
    [(1, "epoch", "1 epoch"), (6, "epoch", "6 epochs"), (2, "microbatch", "2 microbatches"), (0, "stage", "0 stages")],
)
def test_plurals(number, noun, said):
    assert counted(number, noun) == said


NAMES = (
    "synchronous schedule",
    "stages a device",
    "microbatches",
    "samples/s",
    "against as set",
    "waiting",
    "memory MiB",
)


def test_a_table_that_a_terminal_is_too_narrow_for_has_names_of_several_lines():
    row = ("as set: interleaved", "2", "16", "6318", "1.00x", "56%", "2.92")
    assert text_table(NAMES, [row]).splitlines() == [
        "synchronous          stages a                           against           memory",
        "schedule               device  microbatches  samples/s   as set  waiting     MiB",
        "-------------------  --------  ------------  ---------  -------  -------  ------",
        "as set: interleaved         2            16       6318    1.00x      56%    2.92",
    ]
    wide, *_ = text_table(NAMES[:3], [row[:3]]).splitlines()
    assert wide == "synchronous schedule  stages a device  microbatches"
    assert max(map(len, text_table(NAMES, []).splitlines())) <= TERMINAL
