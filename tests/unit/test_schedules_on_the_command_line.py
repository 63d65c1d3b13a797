"""``plan`` and ``simulate`` take ``--chunks`` and schedules of files, as ``PipelineModel`` and ``schedule`` do."""

from __future__ import annotations

import re

import pytest

from pipetrain.cli import main as command_line
from pipetrain.plan.cluster import SHARED_MEMORY, Cluster, Level
from pipetrain.plan.profile import BlockProfile, Profile

BLOCKS = 13


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs a command on a made-up profile of 13 layers; returns its status and what it printed."""
    blocks = tuple(BlockProfile(f"b{n}", 1e-3, 2e-3, 1000, 1000, 1000, 1e-4) for n in range(BLOCKS))
    measured = Profile("made up", 64, blocks)
    monkeypatch.setattr(
        "pipetrain.cli.given.on_this_machine", lambda _: (lambda pieces: measured, Cluster((Level(SHARED_MEMORY),)))
    )
    monkeypatch.chdir(tmp_path)

    def command(line):
        status = command_line.main(line.split())
        out, err = capsys.readouterr()
        return status, out + err

    return command


def rows(out):
    """The numbers of each table's rows, by the row's name."""
    cells = (re.split(r" {2,}", line.strip()) for line in out.splitlines())
    return {first: others for first, *others in cells if others}


@pytest.mark.wide
@pytest.mark.parametrize(("scheme", "stages"), [("zb-h1", 4), ("zb-v", 8)])
def test_a_file_is_planned_and_simulated_as_the_scheme_that_wrote_it(run, scheme, stages):
    assert run(f"schedule --scheme {scheme} --stages {stages} --microbatches 6 --csv mine.csv")[0] == 0
    common = "m.keras --devices 4 --batch-size 64"
    status, by_file = run(f"plan {common} --scheme mine.csv")
    assert status == 0
    status, by_name = run(f"plan {common} --scheme {scheme} --microbatches 6")
    assert status == 0
    assert rows(by_file)["mine.csv, M=6 (as set)"] == rows(by_name)[f"{scheme}, M=6 (as set)"]
    status, simulated = run(f"simulate {common} --minibatches 5 --scheme mine.csv --scheme {scheme} --microbatches 6")
    assert status == 0
    assert rows(simulated)["mine.csv"] == rows(simulated)[scheme]
    status, simulated = run(f"simulate {common} --minibatches 5 --scheme mine.csv --scheme 1f1b --output trace.json")
    assert status == 0 and {"mine.csv", "1f1b"} <= {*rows(simulated)}


def test_calls_of_functions(run):
    status, out = run("schedule --scheme vanilla --stages 2 --minibatches 3 --calls 2")
    assert status == 0
    assert "0: F0 F1 B0 U0 F2 | B1 U1 B2 U2" in out and "1: FB0 U0 FB1 U1  | FB2 U2" in out
    status, out = run("schedule --scheme zb-v --stages 4 --microbatches 2 --calls")
    assert status == 0 and " | " not in out and "3FI0" in out and "0U1" in out


def test_stages_on_a_device(run):
    status, out = run("plan m.keras --devices 4 --batch-size 64 --scheme interleaved --chunks 3")
    assert status == 0 and "interleaved-3, M=4 (as set)" in rows(out)
    status, out = run("simulate m.keras --devices 4 --minibatches 5 --scheme 1f1b --scheme looped-bfs --chunks 3")
    assert status == 0 and {"1f1b", "looped-bfs-3"} <= {*rows(out)}


@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_what_is_refused(run, command, tmp_path):
    assert run("schedule --scheme zb-h1 --stages 4 --microbatches 6 --csv mine.csv")[0] == 0
    common = f"{command} m.keras --devices"
    refused = {
        "4 --scheme 1f1b --chunks 3": r"fixed in this scheme.*chunks=3, scheme='1f1b'.*Try leaving it out, or one of",
        "4 --scheme mine.csv --chunks 3": r"fixed in this scheme.*chunks=3, scheme='mine.csv'",
        "8 --scheme mine.csv": r"Received: --scheme mine.csv, --devices 8.*Try --devices 4 --microbatches 6",
        "4 --scheme mine.csv --microbatches 4": r"--devices 4, --microbatches 4. Try --devices 4 --microbatches 6",
        "4 --scheme mine.csv --horizon target": r"Only spectrain and 2bw.*scheme='mine.csv'",
        "4 --scheme none.csv": r"no such file. Received: --scheme none.csv. Try .* schedule --scheme zb-v --csv FILE",
        "4 --scheme zb": r"Unknown scheme. Received: scheme='zb'. Try 'zb-v', or one of: .*zb-h1.*; a file's name",
        "4 --scheme broken.csv": r"broken.csv: 0B0 is missing|broken.csv: .*backward",
    }
    (tmp_path / "broken.csv").write_text("0F0\n", encoding="utf-8")
    for given, message in refused.items():
        status, told = run(f"{common} {given}")
        assert status == 2 and re.search(message, told), told


@pytest.mark.parametrize("command", ["plan m.keras --devices 4", "schedule"])
@pytest.mark.parametrize("scheme", ["all-reduce", "data-parallel", "grid"])
def test_what_has_no_schedule(run, command, scheme):
    status, told = run(f"{command} --scheme {scheme}")
    assert status == 2 and f"{scheme} has no schedule" in told


@pytest.mark.parametrize("command", ["plan", "simulate", "schedule"])
def test_help_tells_of_files_and_chunks(command, capsys):
    with pytest.raises(SystemExit):
        command_line.main([command, "--help"])
    told = " ".join(capsys.readouterr().out.split())
    chunks = "options of interleaved and looped-bfs: --chunks N stages on a device (default: 2)"
    for words in ("or the name of a file in .csv with a schedule", chunks, "mine.csv"):
        assert words in told
