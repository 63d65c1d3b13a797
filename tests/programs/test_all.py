"""Every figure of the sources, small; what has ended is not repeated, and what fails is told."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from experiments import all as every

ROOT = Path(__file__).parents[2]


@pytest.mark.wide
@pytest.mark.timeout(1200)  # a minute of computing, which a busy machine gives in ten
def test_every_command_works_small(tmp_path, capsys):
    status = every.main(["--quick", "--output", str(tmp_path)])
    printed = {each.name: (tmp_path / each.name / "output.txt").read_text()[-2000:] for each in every.COMMANDS}
    assert status == 0, (capsys.readouterr().out, printed)
    rows = [*csv.DictReader((tmp_path / "ended.csv").open())]
    assert [each["name"] for each in rows] == [each.name for each in every.COMMANDS]
    assert every.main(["--quick", "--only", "traffic", "--output", str(tmp_path)]) == 0


@pytest.fixture
def ran(monkeypatch):
    """The command lines that were run, each of which ends with its status."""
    lines, statuses = [], {}

    class Done:
        def __init__(self, line):
            self.returncode = statuses.get(Path(line[1]).stem, 0)

    def run(line, **settings):
        lines.append(line[1:])
        settings["stdout"].write("said")
        return Done(line)

    monkeypatch.setattr(every.subprocess, "run", run)
    return lines, statuses


def test_what_has_ended_well_is_not_run_again(ran, tmp_path, capsys):
    lines, statuses = ran
    statuses["speedup"] = 2
    options = ["--only", "traffic", "--only", "speedup", "--output", str(tmp_path)]
    assert every.main(options) == 1
    assert f"speedup failed: {tmp_path / 'speedup' / 'output.txt'}" in capsys.readouterr().out
    assert (tmp_path / "speedup" / "output.txt").read_text() == "said"
    statuses.clear()
    assert every.main(options) == 0
    assert [Path(line[0]).stem for line in lines] == ["traffic", "speedup", "speedup"]
    assert lines[0][1:] == ["--output", str(tmp_path / "traffic")]
    assert every.main([*options, "--quick"]) == 0  # which is another command
    assert len(lines) == 5
    assert json.loads((tmp_path / "traffic" / "ended.json").read_text())["status"] == 0


def test_every_command_is_a_program_and_every_study_of_the_guide_is_one_of_them():
    names = [each.name for each in every.COMMANDS]
    assert all((ROOT / "experiments" / f"{name}.py").exists() for name in names)
    guide = (ROOT / "docs" / "guide" / "experiments.md").read_text(encoding="utf-8")
    studies = {
        line.split("experiments/")[1].split(".py")[0] for line in guide.splitlines() if line.startswith("| `python")
    }
    assert studies - {"all"} == {*names}


@pytest.mark.parametrize("quick", [True, False])
def test_every_command_writes_to_its_folder_or_to_that_of_the_runs_it_reads(quick):
    folder = Path("figures")
    for each in every.COMMANDS:
        arguments = each.arguments(folder, quick)
        own = arguments[-2:] == ["--output", str(folder / each.name)]
        assert own or arguments == [str(folder / "table1")], each.name


def test_rows_of_the_table_of_figures_have_commands_that_are_there():
    """Each row of the results' index, but for the headers, ends with a command whose program exists."""
    text = (ROOT / "docs" / "results" / "index.md").read_text(encoding="utf-8")
    rows = [
        line for line in text.splitlines() if line.startswith("|") and not line.startswith(("|---", "| what", "| dim"))
    ]
    assert len(rows) > 25
    for row in rows:
        command = row.rsplit("`", 2)[1].split()
        assert (ROOT / command[1]).exists(), row
