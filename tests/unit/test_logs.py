"""Lines of the logger ``pipetrain``: which are shown, and where. No TensorFlow."""

from __future__ import annotations

import contextlib
import io
import logging

import pytest

import pipetrain
from pipetrain import logs

OURS = logging.getLogger("pipetrain.some.module")


@pytest.fixture(autouse=True)
def info_again():
    yield
    pipetrain.set_verbosity("info")


@pytest.fixture
def of_the_user():
    """What a program's own configuration of all logs writes."""
    written, root = io.StringIO(), logging.getLogger()
    handler, before = logging.StreamHandler(written), root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    yield written
    root.removeHandler(handler)
    root.setLevel(before)


def said():
    OURS.debug("debug")
    OURS.info("info")
    OURS.warning("warning")
    OURS.error("error")


@pytest.mark.parametrize(
    ("level", "shown"),
    [
        ("debug", ["debug", "info", "warning", "error"]),
        ("info", ["info", "warning", "error"]),
        ("WARNING", ["warning", "error"]),
        (logging.ERROR, ["error"]),
        (logging.CRITICAL, []),
    ],
)
def test_lines_from_a_level_up_are_shown_on_standard_output(level, shown, capsys):
    pipetrain.set_verbosity(level)
    said()
    out, err = capsys.readouterr()
    assert out.splitlines() == shown and err == ""


@pytest.mark.parametrize("level", ["loud", "", 0, 1, 25, 20.0, True, None, ["info"]])
def test_other_levels_are_refused(level):
    with pytest.raises(ValueError, match=r"^Lines are .*\. Received: level=.*\. Try 'info', 'warning' or 'error'\.$"):
        pipetrain.set_verbosity(level)
    assert logging.getLogger("pipetrain").level == logging.INFO


def test_lines_go_where_standard_output_goes_then(capsys):
    with contextlib.redirect_stdout(io.StringIO()) as redirected:
        OURS.info("%s is 100%%", "this")
    OURS.info("50% of all")
    OURS.info("below", extra=logs.BELOW_BAR)
    assert redirected.getvalue() == "this is 100%\n"
    assert capsys.readouterr().out == "50% of all\n\nbelow\n"


def test_a_program_that_configures_all_logs_has_no_line_twice(of_the_user, capsys):
    OURS.info("once")
    assert capsys.readouterr().out == "once\n" and of_the_user.getvalue() == ""


def test_a_program_may_take_the_lines_into_its_own_log(of_the_user, capsys, monkeypatch):
    logger = logging.getLogger("pipetrain")
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "propagate", True)
    OURS.info("below", extra=logs.BELOW_BAR)
    assert capsys.readouterr().out == "" and of_the_user.getvalue() == "below\n"


def test_what_a_program_has_configured_before_stays(monkeypatch):
    logger, own = logging.getLogger("pipetrain"), [logging.NullHandler()]
    monkeypatch.setattr(logger, "handlers", own)
    monkeypatch.setattr(logger, "propagate", True)
    logger.setLevel(logging.ERROR)
    logs.set_up()
    assert logger.handlers is own and len(own) == 1 and logger.propagate and logger.level == logging.ERROR
