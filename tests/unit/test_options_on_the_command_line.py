"""Each option of a scheme is on the command line as its field has it, in the group of the schemes that own it."""

from __future__ import annotations

import argparse
import re
from dataclasses import MISSING, fields

import pytest

from pipetrain.cli.arguments import SCHEMES, Folded, add_scheme_options, cores, from_zero, horizon, listed, part
from pipetrain.cli.main import main
from pipetrain.schemes.grid import Grid
from pipetrain.schemes.options import OPTIONS, owners, with_options
from pipetrain.schemes.table import GRID

EVERY = [*dict.fromkeys(each.name for scheme in SCHEMES.values() for each in fields(scheme))]
FIELDS = [(name, each) for name, scheme in SCHEMES.items() for each in fields(scheme)]
IDS = [f"{name}-{each.name}" for name, each in FIELDS]
GIVEN = {  # what is written, and what it means
    "horizon": {"spectrain": ("target", "target"), "2bw": ("1.5", 1.5)},
    "spike_compensation": (True,),
    "rescale_steps": ("20", 20),
    "stretch_momentum": ("no", False),
    "chunks": ("3", 3),
    "order": ("tic", "tic"),
    "compression": ("int8:64", "int8:64"),
    "replica_compression": ("top-k:0.1", "top-k:0.1"),
    "synchrony": ("stale:1", "stale:1"),
    "topology": ("gossip:torus", "gossip:torus"),
    "servers": ("2", 2),
    "children": ("4", 4),
    "depth": ("2", 2),
    "stragglers": ("0", 0),
    "staleness": ("predicted", "predicted"),
    "allow": ("compression,local", "compression,local"),
    "grid": ("2", "3", Grid(2, 3)),
}
WRONG = {
    "horizon": ["far"],
    "rescale_steps": ["0"],
    "stretch_momentum": ["maybe"],
    "chunks": ["0"],
    "order": ["fifo"],
    "compression": ["top-k:2"],
    "replica_compression": ["int9"],
    "synchrony": ["local:0"],
    "topology": ["gossip:star"],
    "servers": ["none"],
    "children": ["0"],
    "depth": ["1.5"],
    "stragglers": ["-1"],
    "staleness": ["some"],
    "allow": ["compression,all"],
    "grid": ["2"],
}


def command_line(wanted=EVERY, **own):
    parser = argparse.ArgumentParser(prog="x", formatter_class=Folded)
    return parser, add_scheme_options(parser, wanted, **own)


def flags(parser):
    """Of every option the groups that have it, with what argparse knows of it."""
    found = {}
    for group in parser._action_groups[2:]:  # after those that every parser has
        for action in group._group_actions:
            found.setdefault(action.dest, []).append((group, action))
    return found


def made(name, parsed):
    """The scheme of its options of a command line."""
    given = {each.name: getattr(parsed, each.name) for each in fields(SCHEMES[name])}
    if name == "coded-reduce":
        given["children"] = given["children"] or 3
    return with_options(name, **given)


@pytest.mark.parametrize(("name", "field"), FIELDS, ids=IDS)
def test_every_field_has_one_flag_with_its_text_and_its_default(name, field):
    parser, of_schemes = command_line()
    ((group, action),) = flags(parser)[field.name]
    assert action.option_strings == [f"--{field.name.replace('_', '-')}"]
    assert action.option_strings[0] in of_schemes[name]
    assert field.metadata["about"].replace("%", "%%") in action.help
    assert name in f"{group.title} {group.description}".replace(",", "").split()
    told = field.metadata.get("by_default", field.default)
    if told is None or told is MISSING or isinstance(told, bool):
        assert "default" not in action.help
    else:
        assert f"(default: {told})" in " ".join(parser.format_help().split())
    children = {"children": 3} if name == "coded-reduce" else {}
    assert made(name, parser.parse_args([])) == with_options(name, **children)


@pytest.mark.parametrize(("name", "field"), FIELDS, ids=IDS)
def test_what_is_given_is_what_the_object_has(name, field):
    parser, _ = command_line()
    given = GIVEN[field.name]
    *written, value = given[name] if isinstance(given, dict) else given
    scheme = made(name, parser.parse_args([f"--{field.name.replace('_', '-')}", *written]))
    if name == GRID:
        assert scheme == value
    else:
        children = {"children": 3} if name == "coded-reduce" else {}
        assert scheme == OPTIONS[name](**{**children, field.name: value})


@pytest.mark.parametrize("option", WRONG)
def test_what_the_object_would_refuse_is_refused(option, capsys):
    parser, _ = command_line()
    flag = f"--{option.replace('_', '-')}"
    with pytest.raises(SystemExit):
        parser.parse_args([flag, *WRONG[option]])
    assert f"argument {flag}" in capsys.readouterr().err


def test_a_group_has_all_that_the_same_schemes_own():
    parser, of_schemes = command_line()
    grouped = [{action.dest for action in group._group_actions} for group in parser._action_groups[2:]]
    assert len(grouped) == len({tuple(owners(option)) for option in EVERY})
    for options in grouped:
        assert len({tuple(owners(option)) for option in options}) == 1
    assert {*of_schemes} == {*SCHEMES}
    titles = [group.title for group in parser._action_groups[2:]]
    assert "options of asynchronous schemes but spike-compensation" in titles
    assert "options of asynchronous schemes but 2bw" in titles
    assert "options of all-reduce and parameter-server" in titles


def test_a_command_line_has_options_and_words_of_its_own():
    parser, of_schemes = command_line(
        ("depth", "children", "servers"),
        flags={"depth": "--tree-depth"},
        defaults={"depth": 2},
        by_default={"children": "100% of all"},
    )
    assert {*flags(parser)} == {"tree_depth", "children", "servers"}
    assert of_schemes == {"coded-reduce": ["--tree-depth", "--children"], "parameter-server": ["--servers"]}
    assert vars(parser.parse_args([])) == {"tree_depth": 2, "children": None, "servers": None}
    told = " ".join(parser.format_help().split())
    assert "--tree-depth L levels of the tree (default: 2)" in told and "(default: 100% of all)" in told


@pytest.mark.parametrize(
    ("command", "wanted"),
    [
        ("plan", "horizon chunks compression replica_compression staleness allow"),
        (
            "simulate",
            "horizon chunks order compression replica_compression synchrony topology servers children depth stragglers "
            "grid",
        ),
        ("schedule", "chunks"),
    ],
)
def test_help_lists_options_under_their_schemes(command, wanted, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main([command, "--help"])
    said = capsys.readouterr().out
    expected, _ = command_line(wanted.split())
    titles = [group.title for group in expected._action_groups[2:]]
    assert [line.rstrip(":") for line in said.splitlines() if line.startswith("options of ")] == titles
    parts = {part.partition(":\n")[0]: part for part in re.split(r"^(?=options of )", said, flags=re.M)[1:]}
    for option, ((group, _),) in flags(expected).items():
        assert f"\n  --{option.replace('_', '-')} " in parts[group.title]


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (from_zero, "0.0", 0),
        (from_zero, "1e3", 1000),
        (horizon, "0.0", 0),
        (part, "1", 1),
        (cores, "0,2-3", [0, 2, 3]),
        (cores, "1-1", [1]),
    ],
)
def test_what_is_written_has_a_value(kind, text, value):
    assert kind(text) == value


@pytest.mark.parametrize(
    ("kind", "text"),
    [(from_zero, text) for text in ("-1", "nan", "inf", "x")]
    + [(part, text) for text in ("1.5", "-0.1", "nan")]
    + [(cores, text) for text in ("3-1", "0,3-1", "1-2-3", "", "-1")],
)
def test_what_has_no_value_is_refused_with_its_text(kind, text):
    with pytest.raises(argparse.ArgumentTypeError, match=f"^'{text}' (is not a number from 0|names no cores)"):
        kind(text)


def test_what_only_the_balance_has_is_not_left_unread(capsys):
    command = ["plan", "m.keras", "--devices", "2", "--overlap", "0.5", "--as-printed"]
    assert main(command) == 2
    assert "Received: --overlap and --as-printed. Try it with --balance." in capsys.readouterr().err


def test_lists_are_as_wide_as_the_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    text = listed({"a": ("one-two three four five six seven", "--flag"), "longer": ()})
    assert text.splitlines() == [
        "  a      one-two three four",
        "         five six seven",
        "         --flag",
        "  longer",
    ]
