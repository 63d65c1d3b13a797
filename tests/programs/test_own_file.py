"""Schemes of one's own in a Python file, and names that are like a scheme's."""

from __future__ import annotations

import networks
import numpy as np
import pytest
from own_schemes import NEWEST

import pipetrain
from pipetrain.cli.main import main
from pipetrain.schemes import Schedule, Scheme, table
from pipetrain.schemes.schedules import gpipe
from pipetrain.schemes.text_form import chosen, in_full

TEXT = f"""
from __future__ import annotations
from dataclasses import dataclass
from pipetrain.schemes import Schedule, Scheme
from pipetrain.schemes.policies import FlushPolicy
from pipetrain.schemes.schedules import gpipe
from pipetrain.schemes.table import ASYNCHRONOUS
{NEWEST}
class Late(Newest):
    def __init__(self, updates):
        self.updates = updates

@dataclass(frozen=True)
class Far(Newest):
    updates: int = 2

late = Late(1)
order = Schedule(gpipe)
whole = Scheme("whole", order, FlushPolicy(), splits=True)
number = 3
"""
WHOLE = "order", "whole"
EVERY = " or ".join(f".*mine.py:{name}" for name in ("Newest", "Late", "Far", "late", *WHOLE[1:]))


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(TEXT)
    return path


@pytest.mark.parametrize(
    ("name", "scheme", "asynchronous"),
    [
        ("Newest", "Newest", True),
        ("Far", "Far", True),
        ("late", "late", True),
        *((each, each, False) for each in WHOLE),
    ],
)
def test_what_a_file_may_have(file, name, scheme, asynchronous):
    found = chosen(f"{file}:{name}")
    assert isinstance(found, Scheme) and (found.name, found.asynchronous) == (scheme, asynchronous)
    assert table.check_name(found) == scheme
    assert chosen(f"{file}:{name}") == found  # what was planned for it is looked up by it
    assert isinstance(found.schedule, Schedule) and (asynchronous or found.schedule.order is gpipe)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        (":Neewst", "no such name. .* Try .*mine.py:Newest"),
        ("", f"no such name. .* Try {EVERY}"),
        (":Late", "takes arguments"),
        (":number", "is no scheme. Received: .* a int. Try a Scheme"),
    ],
)
def test_what_is_no_scheme(file, name, problem):
    with pytest.raises(ValueError, match=problem):
        chosen(f"{file}{name}")


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ValueError, match=r"There is no such file. Received: scheme='none.py:Mine'. Try"):
        pipetrain.PipelineModel(networks.mlp(), stages=2, scheme="none.py:Mine")
    (tmp_path / "broken.py").write_text("1 / 0")
    with pytest.raises(ValueError, match=r"cannot be executed: ZeroDivisionError: .*broken.py.*Try python broken.py"):
        chosen(f"{tmp_path / 'broken.py'}:Mine")


def test_a_file_that_is_changed_is_read_anew(file, monkeypatch):
    found = chosen(f"{file}:whole")
    file.write_text(TEXT.replace('"whole"', '"other"'))
    assert str(found) == "whole" and str(chosen(f"{file}:whole")) == "other"
    monkeypatch.chdir(file.parent)
    assert in_full("mine.py:whole") == f"{file}:whole"
    assert in_full("mine.csv") == str(file.with_suffix(".csv"))
    assert in_full("vanilla") is None


@pytest.mark.wide
def test_a_model_trains_by_a_file_as_by_the_table(file):
    x, y = networks.data(64)
    weights = []
    for scheme in ("vanilla", f"{file}:Newest"):
        pm = networks.pipeline(cuts=networks.cuts(6, 3), scheme=scheme)
        networks.fit(pm, x, y)
        weights.append(pm.get_weights())
    for ours, theirs in zip(*weights, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(
    ("name", "near"), [("spectrian", "spectrain"), ("Gpipe", "gpipe"), ("allreduce", "all-reduce"), ("zbv", "zb-v")]
)
def test_the_closest_name_is_said(name, near, capsys):
    with pytest.raises(ValueError, match=f"Received: scheme='{name}'. Try '{near}', or one of: "):
        pipetrain.PipelineModel(networks.mlp(), stages=2, scheme=name)
    assert main(["schedule", "--scheme", name]) == 2
    assert f"Try '{near}', or one of: " in capsys.readouterr().err


def test_where_no_name_is_near(capsys):
    with pytest.raises(ValueError, match="Try one of: single"):
        table.check_name("?")
    with pytest.raises(ValueError, match="Try one of: single"):
        table.check_name(3)


def test_an_asynchronous_schedule_shows_its_steady_state(capsys, file, tmp_path):
    """Of one minibatch alone a device would wait for most of the time."""
    for scheme in ("spectrain", "2bw", f"{file}:Newest"):
        assert main(["schedule", "--scheme", scheme, "--stages", "4"]) == 0
        printed = capsys.readouterr().out
        assert "bubble 0.0% of the work in the steady state" in printed
        assert "0: F0  F1  F2  F3 " in printed and "B5" in printed
    assert main(["schedule", "--scheme", "spectrain", "--minibatches", "2"]) == 0
    printed = capsys.readouterr().out
    assert "4 stages on 4 devices, 2 minibatches\n" in printed and "F2" not in printed
    assert main(["schedule", "--scheme", "1f1b", "--minibatches", "2"]) == 0
    assert "2 minibatches of 4 microbatches\n" in (printed := capsys.readouterr().out)
    assert "bubble 75.0% of the work; 42 units" in printed
    assert main(["schedule", "--scheme", "spectrain", "--csv", str(tmp_path / "file.csv")]) == 2
    assert "Try it without --csv" in capsys.readouterr().err


def test_on_a_terminal_a_grid_is_as_wide_as_that(capsys, monkeypatch):
    assert main(["schedule", "--scheme", "spectrain", "--stages", "8"]) == 0
    (*_, whole) = (line.split()[1:] for line in capsys.readouterr().out.splitlines() if line.startswith("0: "))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["schedule", "--scheme", "spectrain", "--stages", "8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert [cell for line in lines if line.startswith("0: ") for cell in line.split()[1:]] == whole


@pytest.mark.parametrize("command", ["plan", "simulate", "schedule", "worker"])
def test_help_is_folded_but_for_examples(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main([command, "--help"])
    long = [line for line in capsys.readouterr().out.splitlines() if len(line) > 80]
    assert not [line for line in long if not line.startswith(" ")]
