"""Every figure of the sources, small; what has ended is not repeated, and what fails is told."""

from __future__ import annotations

import argparse
import csv
import importlib
import json
import re
import shlex
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


class Parsed(Exception):
    """A program has read its command line."""


@pytest.fixture
def parse(monkeypatch):
    """A function that lets a program read a command line, which fails where an option or a value is not known."""
    read = argparse.ArgumentParser.parse_args

    def read_and_stop(self, arguments=None, namespace=None):
        read(self, arguments, namespace)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", read_and_stop)

    def parse(program, *arguments):
        monkeypatch.setattr("sys.argv", [program, *arguments])
        with pytest.raises(Parsed):
            importlib.import_module(program.removesuffix(".py").replace("/", ".")).main()

    return parse


def commands_of_the_table():
    """The rows of the results' index, but for the headers, with the commands of their last cells."""
    text = (ROOT / "docs" / "results" / "index.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("|")]
    rows = [row for row in rows if not row.startswith(("|---", "| what", "| dim"))]
    return {row: re.findall(r"`((?:python|pytest) [^`]+)`", row.split("|")[-2]) for row in rows}


def test_rows_of_the_table_of_figures_have_commands_that_are_there():
    found = commands_of_the_table()
    assert len(found) > 25
    for row, commands in found.items():
        assert commands, row
        assert all((ROOT / command.split()[1]).exists() for command in commands), row


def test_commands_of_the_table_of_figures_have_options_that_their_programs_know(parse):
    """No program goes further than to read its command line."""
    for command in {each for commands in commands_of_the_table().values() for each in commands}:
        words = shlex.split(command)
        if words[0] == "python":
            parse(*words[1:])


def test_an_option_that_a_program_does_not_know_is_found(parse, capsys):
    with pytest.raises(SystemExit):
        parse("experiments/traffic.py", "--no-such-option")
    assert "--no-such-option" in capsys.readouterr().err


def test_no_cell_of_the_table_of_figures_is_empty_but_for_a_dimension_that_goes_on():
    for row in commands_of_the_table():
        first, *others = (cell.strip() for cell in row.split("|")[1:-1])
        assert all(others) and (first or len(others) == 3), row
