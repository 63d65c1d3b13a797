"""Schedules in files: what is written is read back, and what cannot run is refused."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipetrain.cli.main import main
from pipetrain.schemes.actions import Action
from pipetrain.schemes.dry_run import ScheduleError, replay
from pipetrain.schemes.schedules import orders
from pipetrain.schemes.table import PIPELINES, SCHEDULED
from pipetrain.schemes.text_form import check_held, microbatches_of, parsed, schedule_of, scheme_of, stages_of, written
from pipetrain.schemes.validation import check

SYNCHRONOUS = [name for name, each in PIPELINES.items() if each.schedule.flushes]


@given(st.sampled_from(SYNCHRONOUS), st.integers(1, 5), st.integers(1, 12))
@settings(max_examples=60)
def test_what_is_written_is_read_back(name, devices, microbatches):
    schedule = PIPELINES[name].schedule
    made = orders(schedule.order, devices, 1, microbatches)
    text = written(replay(made))
    assert parsed(text) == tuple(map(tuple, made))
    read = schedule_of(parsed(text))
    stages = devices * schedule.chunks
    assert read.chunks == schedule.chunks
    assert [read.stages_on(d, stages) for d in range(devices)] == [
        schedule.stages_on(d, stages) for d in range(devices)
    ]
    assert orders(read.order, devices, 2, microbatches) == orders(schedule.order, devices, 2, microbatches)


def test_a_row_is_a_device_and_a_column_a_step():
    made = orders(PIPELINES["1f1b"].schedule.order, 2, 1, 2)
    assert written(replay(made)) == "0F0,0F1,,0B0,,0B1\n,1F0,1B0,1F1,1B1,\n"


def test_compounds_are_their_parts_and_reductions_follow_by_themselves():
    assert parsed("0F0,(0F1;0B0)OVERLAP_F_B, 0B1 ,0REDUCE_GRAD\n") == (
        tuple(map(Action.parse, ("0F0", "0F1", "0B0", "0B1"))),
    )


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("0F0,0X0\n", "Row 1, column 2: Not an action. Received: text='0X0'"),
        ("0F0,0B0\n1F0,1B\n", "Row 2, column 2: .*'1B'"),
        ("", "Received: 0 rows"),
        (",,\n", "Received: 1 rows"),
        ("0F0\n1F0,1B0\n", "0B0 is missing"),
        ("0F0,0F0,0B0\n", "0F0 stands 2 times"),
        ("0F0,0I0\n", "0W0 is missing"),
        ("0F1,0B1\n", "0F0 is missing"),
        ("0F1000000000,0B1000000000\n", "0F0 is missing"),
        ("1000000000F0,1000000000B0\n", "0F0 is missing"),
        ("0F0,0B0,1F0,1B0\n2F0,2B0,3F0,3B0,1F1,1B1,0F1,0B1\n", "2F1 is missing"),
        ("0F0,0B0,0F1\n1F0,1B0,1F1,1B1,0B1\n", "0B1 stands in row 2, and other actions of stage 0 in row 1"),
        ("0F0,0B0\n1F0,2F0,2B0,1B0\n", r"rows with \[1, 2\] stages"),
        ("0F0,0B0,0F1,0B1\n1F1,1F0,1B0,1B1\n", "1F1 comes where 0F0 has sent"),
        ("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n", "0B0 <-- ERROR HERE: needs input gradients of stage 1"),
    ],
)
def test_what_cannot_run_is_refused_by_its_action(text, named, tmp_path):
    with pytest.raises(ScheduleError, match=named):
        schedule_of(parsed(text))
    (tmp_path / "mine.csv").write_text(text, encoding="utf-8")
    with pytest.raises(ScheduleError, match=f"(?s)mine.csv: .*{named}"):
        scheme_of(tmp_path / "mine.csv")


def test_other_programs_files(tmp_path):
    """A spreadsheet's has a byte order mark; what is no text is refused."""
    (tmp_path / "mine.csv").write_bytes(b"\xef\xbb\xbf0F0,0B0\r\n")
    assert stages_of(scheme_of(tmp_path / "mine.csv")) == 1
    (tmp_path / "mine.csv").write_bytes(b"\xff\xfe0\x00F\x000\x00")
    with pytest.raises(ScheduleError, match=r"mine.csv: A schedule is text in UTF-8. Received: .*byte 0xff"):
        scheme_of(tmp_path / "mine.csv")


def test_more_memory_than_there_is_is_refused_by_the_first_action_that_needs_it():
    made = orders(PIPELINES["zb-h1"].schedule.order, 4, 1, 8)
    check_held(made, 4)
    with pytest.raises(ScheduleError, match=r"0F3 needs more memory.* device 0 .* of 4 microbatches"):
        check_held(made, 3)


def test_a_file_is_for_its_number_of_microbatches_and_devices(tmp_path):
    (tmp_path / "mine.csv").write_text(written(replay(orders(SCHEDULED["zb-v"].schedule.order, 2, 1, 3))))
    mine = scheme_of(tmp_path / "mine.csv")
    assert (mine.name, stages_of(mine), microbatches_of(mine)) == ("mine.csv", 4, 3)
    assert stages_of(SCHEDULED["zb-v"]) is microbatches_of(SCHEDULED["zb-v"]) is None
    check(mine, 4, 3)
    for stages, microbatches in ((4, 2), (6, 3), (2, 3)):
        with pytest.raises(ScheduleError, match=f"for 2 devices and 3 microbatches. Received: {stages // 2} devices"):
            check(mine, stages, microbatches)


def test_the_command_prints_writes_and_reads(tmp_path, capsys):
    file = tmp_path / "zb-v.csv"
    assert main(["schedule", "--scheme", "zb-v", "--stages", "8", "--microbatches", "16", "--csv", str(file)]) == 0
    printed = capsys.readouterr().out.split("\n")
    assert printed[0] == "zb-v: 8 stages on 4 devices, 16 microbatches"
    assert printed[1].startswith("0: 0F0  0F1  0F2")
    assert printed[5:7] == [
        "bubble 0.0% of the work; 99 units from the first action to the last",
        "activations of a stage that each device holds at most: 8, 8, 8, 8",
    ]
    assert main(["schedule", "--scheme", str(file)]) == 0
    assert capsys.readouterr().out.split("\n")[1:] == printed[1:]
    assert main(["schedule", "--scheme", "interleaved", "--chunks", "3"]) == 0
    assert "interleaved-3: 6 stages on 2 devices" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--scheme", "zb-v", "--limit", "7"], "7F0 needs more memory"),
        (["--scheme", "zb-v", "--stages", "5"], "2 stages on each device. Received: stages=5"),
        (["--scheme", "zb-v", "--chunks", "3"], "Received: chunks=3, scheme='zb-v'"),
        (["--scheme", "spectrain", "--microbatches", "2"], "does not split a minibatch"),
        (["--scheme", "data-parallel"], "no schedule"),
        (["--scheme", "absent.csv"], "absent.csv"),
    ],
)
def test_the_command_refuses_what_cannot_be(arguments, named, capsys):
    more = ["--microbatches", "8", "--stages", "8"] if "--limit" in arguments else []
    assert main(["schedule", *arguments, *more]) == 2
    assert named in capsys.readouterr().err
